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

/* The level of a test: its flag "L1".."L4"; 1 if there is none. */
static int test_level(const cJSON *test) {
  const cJSON *flag;
  cJSON_ArrayForEach(flag, cJSON_GetObjectItemCaseSensitive(test, "flags")) if (cJSON_IsString(flag) && flag->valuestring[0] == 'L') return atoi(flag->valuestring + 1);
  return 1;
}

/* The status and results of one step against what is expected: 1, or 0 and a sentence. */
static int check_step(target *t, const cJSON *step, char *why, size_t size) {
  char status[32] = "";
  t->error[0] = 0;
  cJSON *result = t->step(t, step, status);
  const char *expected = text_of(step, "status", "OK");
  int good = 0;
  if (!result)
    snprintf(why, size, "%s", t->error);
  else if (strcmp(status, expected))
    snprintf(why, size, "status %s, expected %s%s%s", status, expected, t->error[0] ? ": " : "", t->error);
  else
    good = compare_expected(cJSON_GetObjectItemCaseSensitive(step, "expect"), result, why, size);
  cJSON_Delete(result);
  return good;
}

static outcome run_test(target *t, const cJSON *test, char *why, size_t size) {
  const int begun = t->begin(t, cJSON_GetObjectItemCaseSensitive(test, "flags"));
  if (begun != BEGIN_OK) {
    snprintf(why, size, "%s", t->error);
    return begun == BEGIN_SKIP ? OUTCOME_SKIPPED : OUTCOME_FAILED;
  }
  int number = 0;
  const cJSON *step;
  cJSON_ArrayForEach(step, cJSON_GetObjectItemCaseSensitive(test, "steps")) {
    char difference[600] = "";
    if (!check_step(t, step, difference, sizeof difference)) {
      snprintf(why, size, "step %d (%s): %s", number, text_of(step, "op", "?"), difference);
      return OUTCOME_FAILED;
    }
    number++;
  }
  if (number) return OUTCOME_PASSED;
  snprintf(why, size, "the test has no steps");
  return OUTCOME_FAILED;
}

/* Run the chosen tests of a parsed file; the target is opened when the first one is due. */
static const char *run_tests(const cJSON *root, const selection *choice, const run_calls *calls) {
  static char error[512];
  target *t = NULL;
  const cJSON *group, *test;
  cJSON_ArrayForEach(group, cJSON_GetObjectItemCaseSensitive(root, "groups")) {
    cJSON_ArrayForEach(test, cJSON_GetObjectItemCaseSensitive(group, "tests")) {
      char name[256], why[800] = "";
      snprintf(name, sizeof name, "%s/%s/%s", text_of(root, "suite", "?"), text_of(group, "id", "?"), text_of(test, "id", "?"));
      if (test_level(test) > choice->level || (choice->filter && !strstr(name, choice->filter))) continue;
      if (!t && !(t = calls->open(calls->user, error, sizeof error))) return error;
      calls->report(calls->user, name, NULL, NULL);
      const outcome what = run_test(t, test, why, sizeof why);
      calls->report(calls->user, name, &what, why);
    }
  }
  if (t) t->close(t);
  return NULL;
}

const char *run_file(const char *path, const selection *choice, const run_calls *calls) {
  char *text = read_text(path);
  if (!text) return "cannot be read";
  cJSON *root = cJSON_Parse(text);
  free(text);
  if (!root) return "is no JSON";
  const char *wrong = strcmp(text_of(root, "schema", ""), "kvq-vectors/1") ? "has another schema than kvq-vectors/1" : run_tests(root, choice, calls);
  cJSON_Delete(root);
  return wrong;
}
