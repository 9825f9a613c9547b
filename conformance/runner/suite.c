#include "suite.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "compare.h"

static char *read_text(const char *path) {
  FILE *f = fopen(path, "rb");
  if (!f) return NULL;
  fseek(f, 0, SEEK_END);
  const long size = ftell(f);
  rewind(f);
  char *text = size >= 0 ? malloc((size_t)size + 1) : NULL;
  const size_t got = text ? fread(text, 1, (size_t)size, f) : 0;
  if (text) text[got] = 0;
  fclose(f);
  return text;
}

static const char *text_of(const cJSON *object, const char *key, const char *missing) {
  const cJSON *v = cJSON_GetObjectItemCaseSensitive(object, key);
  return cJSON_IsString(v) ? v->valuestring : missing;
}

/* The flag "L1".."L4" of a test; 1 if there is none. */
static int test_level(const cJSON *test) {
  const cJSON *flag;
  cJSON_ArrayForEach(flag, cJSON_GetObjectItemCaseSensitive(test, "flags")) if (cJSON_IsString(flag) && flag->valuestring[0] == 'L')
      return atoi(flag->valuestring + 1);
  return 1;
}

/* 1 if every step gives its status and results; else 0 and a sentence. */
static int run_test(target *t, const cJSON *test, char *why, size_t size) {
  if (t->begin(t, cJSON_GetObjectItemCaseSensitive(test, "flags"))) {
    snprintf(why, size, "%s", t->error);
    return 0;
  }
  int number = 0;
  const cJSON *step;
  cJSON_ArrayForEach(step, cJSON_GetObjectItemCaseSensitive(test, "steps")) {
    char status[32] = "", difference[600] = "";
    cJSON *result = t->step(t, step, status);
    const char *expected = text_of(step, "status", "OK"), *op = text_of(step, "op", "?");
    int good = result != NULL;
    if (!good) snprintf(difference, sizeof difference, "%s", t->error);
    if (good && strcmp(status, expected)) {
      snprintf(difference, sizeof difference, "status %s, expected %s%s%s", status, expected, t->error[0] ? ": " : "", t->error);
      good = 0;
    }
    if (good) good = compare_expected(cJSON_GetObjectItemCaseSensitive(step, "expect"), result, difference, sizeof difference);
    cJSON_Delete(result);
    if (!good) {
      snprintf(why, size, "step %d (%s): %s", number, op, difference);
      return 0;
    }
    number++;
  }
  if (!number) snprintf(why, size, "the test has no steps");
  return number > 0;
}

const char *run_file(const char *path, target *t, const selection *choice, reporter report, void *user) {
  char *text = read_text(path);
  if (!text) return "cannot be read";
  cJSON *root = cJSON_Parse(text);
  free(text);
  if (!root) return "is no JSON";
  if (strcmp(text_of(root, "schema", ""), "kvq-vectors/1")) {
    cJSON_Delete(root);
    return "has another schema than kvq-vectors/1";
  }
  const cJSON *group, *test;
  cJSON_ArrayForEach(group, cJSON_GetObjectItemCaseSensitive(root, "groups")) {
    cJSON_ArrayForEach(test, cJSON_GetObjectItemCaseSensitive(group, "tests")) {
      char name[256], why[800] = "";
      snprintf(name, sizeof name, "%s/%s/%s", text_of(root, "suite", "?"), text_of(group, "id", "?"), text_of(test, "id", "?"));
      if (test_level(test) > choice->level || (choice->filter && !strstr(name, choice->filter))) continue;
      report(user, name, run_test(t, test, why, sizeof why) ? NULL : why);
    }
  }
  cJSON_Delete(root);
  return NULL;
}
