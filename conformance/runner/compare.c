#include "compare.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "array.h"

typedef struct {
  char *why;
  size_t size;
  const cJSON *expect; /* of the step: bounds of attention live beside `out` and `lse` */
} context;

static int compare_item(const context *c, const char *key, const cJSON *expect, const cJSON *result);

static int is_array_object(const cJSON *v) {
  return cJSON_IsObject(v) && cJSON_GetObjectItemCaseSensitive(v, "dtype") && cJSON_GetObjectItemCaseSensitive(v, "shape");
}

/* Texts of bytes: say which byte, and both values. */
static int compare_text(const context *c, const char *key, const char *expect, const char *result) {
  const size_t n = strlen(expect), m = strlen(result);
  if (!strcmp(expect, result)) return 1;
  size_t i = 0;
  while (i < n && i < m && expect[i] == result[i]) i++;
  if (i == n || i == m)
    snprintf(c->why, c->size, "%s: %zu bytes expected, got %zu", key, n / 2, m / 2);
  else
    snprintf(c->why, c->size, "%s: byte %zu is %.2s, expected %.2s (of %zu bytes)", key, i / 2, result + i / 2 * 2, expect + i / 2 * 2, n / 2);
  return 0;
}

/* A bound of the step: one number, or one for each row. */
static double bound(const context *c, const char *key, size_t row) {
  const cJSON *v = cJSON_GetObjectItemCaseSensitive(c->expect, key);
  if (cJSON_IsArray(v)) v = cJSON_GetArrayItem(v, (int)row);
  return cJSON_IsNumber(v) ? v->valuedouble : -1;
}

/* Section 9: per query and head (the last axis), NMSE and the largest error; infinities must agree. */
static int compare_out(const context *c, const array *expect, const array *result) {
  const size_t width = expect->n_dims ? expect->shape[expect->n_dims - 1] : 1;
  for (size_t row = 0; row * width < expect->count; row++) {
    const double nmse = bound(c, "nmse", row), max_abs = bound(c, "max_abs", row);
    double error = 0, energy = 0, largest = 0;
    for (size_t i = row * width; i < (row + 1) * width; i++) {
      const double e = array_get(expect, i), d = array_get(result, i) - e;
      error += d * d, energy += e * e;
      if (!(fabs(d) <= largest)) largest = fabs(d);
    }
    const double ratio = error == 0 ? 0 : error / energy;
    if (!(ratio <= nmse) || !(largest <= max_abs)) {
      snprintf(c->why, c->size, "out: row %zu has NMSE %.3g (at most %.3g), largest error %.3g (at most %.3g)", row, ratio, nmse, largest, max_abs);
      return 0;
    }
  }
  return 1;
}

static int compare_lse(const context *c, const array *expect, const array *result) {
  for (size_t i = 0; i < expect->count; i++) {
    const double limit = bound(c, "lse_abs", i);
    const double e = array_get(expect, i), r = array_get(result, i);
    if (e == r || fabs(e - r) <= limit) continue;
    snprintf(c->why, c->size, "lse: element %zu is %.9g, expected %.9g within %.3g", i, r, e, limit);
    return 0;
  }
  return 1;
}

static int compare_exact(const context *c, const char *key, const array *expect, const array *result) {
  const size_t size = dtype_size(expect->dtype);
  for (size_t i = 0; i < expect->count; i++) {
    const uint8_t *e = (const uint8_t *)expect->data + i * size, *r = (const uint8_t *)result->data + i * size;
    if (!memcmp(e, r, size)) continue;
    char *he = hex_text(e, size), *hr = hex_text(r, size);
    snprintf(c->why, c->size, "%s: element %zu is %.9g (%s), expected %.9g (%s)", key, i, array_get(result, i), hr ? hr : "",
             array_get(expect, i), he ? he : "");
    free(he), free(hr);
    return 0;
  }
  return 1;
}

static int compare_arrays(const context *c, const char *key, const cJSON *expect, const cJSON *result) {
  array e, r;
  const char *wrong_e = array_read(expect, &e), *wrong_r = array_read(result, &r);
  int same = 0;
  if (wrong_e || wrong_r)
    snprintf(c->why, c->size, "%s: %s is no array: %s", key, wrong_e ? "expected value" : "result", wrong_e ? wrong_e : wrong_r);
  else if (e.count != r.count || (e.dtype != r.dtype && strcmp(key, "out") && strcmp(key, "lse")))
    snprintf(c->why, c->size, "%s: %zu elements of %s expected, got %zu of %s", key, e.count, dtype_name(e.dtype), r.count, dtype_name(r.dtype));
  else
    same = !strcmp(key, "out") ? compare_out(c, &e, &r) : !strcmp(key, "lse") ? compare_lse(c, &e, &r)
                                                                              : compare_exact(c, key, &e, &r);
  array_free(&e), array_free(&r);
  return same;
}

static int compare_list(const context *c, const char *key, const cJSON *expect, const cJSON *result) {
  const int n = cJSON_GetArraySize(expect), m = cJSON_GetArraySize(result);
  if (n != m) {
    snprintf(c->why, c->size, "%s: %d entries expected, got %d", key, n, m);
    return 0;
  }
  char name[96];
  const cJSON *e = expect->child, *r = result->child;
  for (int i = 0; i < n; i++, e = e->next, r = r->next) {
    snprintf(name, sizeof name, "%s[%d]", key, i);
    if (!compare_item(c, name, e, r)) return 0;
  }
  return 1;
}

static int compare_item(const context *c, const char *key, const cJSON *expect, const cJSON *result) {
  if (is_array_object(expect) && is_array_object(result)) return compare_arrays(c, key, expect, result);
  if (cJSON_IsString(expect) && cJSON_IsString(result)) return compare_text(c, key, expect->valuestring, result->valuestring);
  if (cJSON_IsArray(expect) && cJSON_IsArray(result)) return compare_list(c, key, expect, result);
  if (cJSON_IsNumber(expect) && cJSON_IsNumber(result)) {
    const double e = expect->valuedouble, r = result->valuedouble;
    if (fabs(e - r) <= 1e-9 * fmax(1, fabs(e))) return 1;
    snprintf(c->why, c->size, "%s: %.12g, expected %.12g", key, r, e);
    return 0;
  }
  if (cJSON_IsObject(expect) && cJSON_IsObject(result)) {
    for (const cJSON *e = expect->child; e; e = e->next) {
      const cJSON *r = cJSON_GetObjectItemCaseSensitive(result, e->string);
      if (r && compare_item(c, e->string, e, r)) continue;
      if (!r) snprintf(c->why, c->size, "%s.%s is missing", key, e->string);
      return 0;
    }
    return 1;
  }
  snprintf(c->why, c->size, "%s: the result is of another JSON type", key);
  return 0;
}

static int is_bound(const char *key) { return !strcmp(key, "nmse") || !strcmp(key, "max_abs") || !strcmp(key, "lse_abs"); }

int compare_expected(const cJSON *expect, const cJSON *result, char *why, size_t why_size) {
  const context c = {why, why_size, expect};
  for (const cJSON *e = expect ? expect->child : NULL; e; e = e->next) {
    if (is_bound(e->string)) continue;
    const cJSON *r = cJSON_GetObjectItemCaseSensitive(result, e->string);
    if (!r) {
      snprintf(why, why_size, "%s is missing from the results", e->string);
      return 0;
    }
    if (!compare_item(&c, e->string, e, r)) return 0;
  }
  return 1;
}
