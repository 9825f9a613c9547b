#include "array.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const struct {
  const char *name;
  size_t size;
} DTYPES[DT_COUNT] = {{"f32", 4}, {"f16", 2}, {"bf16", 2}, {"f64", 8}, {"i32", 4}, {"u8", 1}};

size_t dtype_size(array_dtype dtype) { return DTYPES[dtype].size; }
const char *dtype_name(array_dtype dtype) { return DTYPES[dtype].name; }

static float half_value(uint16_t h) {
  const int exponent = h >> 10 & 31, mantissa = h & 1023;
  float v = exponent == 31 ? (mantissa ? NAN : INFINITY)
            : exponent     ? ldexpf((float)(1024 + mantissa), exponent - 25)
                           : ldexpf((float)mantissa, -24);
  return h & 0x8000 ? -v : v;
}

/* hp(): nearest even, saturating at 65504; the fp16 bits. */
static uint16_t half_bits(float x) {
  const uint16_t sign = signbit(x) ? 0x8000 : 0;
  const float a = fabsf(x);
  int exponent;
  if (a >= 65504.0f) return (uint16_t)(sign | 0x7bff);
  if (a == 0.0f) return 0;
  frexpf(a, &exponent); /* a = m * 2^exponent, m in [0.5, 1) */
  if (exponent < -13) exponent = -13;
  /* steps of 2^(exponent - 11): rintf is exact here and rounds to even */
  const float steps = rintf(ldexpf(a, 11 - exponent));
  const uint32_t n = (uint32_t)steps + (uint32_t)(exponent + 13) * 1024u;
  return n ? (uint16_t)(sign | n) : 0;
}

uint16_t half_of(float x) { return isinf(x) ? (uint16_t)(x < 0 ? 0xfc00 : 0x7c00) : half_bits(x); }

static uint64_t splitmix64(uint64_t x) {
  x += UINT64_C(0x9E3779B97F4A7C15);
  x = (x ^ x >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
  x = (x ^ x >> 27) * UINT64_C(0x94D049BB133111EB);
  return x ^ x >> 31;
}

double array_get(const array *a, size_t i) {
  const uint8_t *p = (const uint8_t *)a->data + i * dtype_size(a->dtype);
  union {
    float f;
    double d;
    uint32_t u32;
    int32_t i32;
    uint16_t u16;
  } x;
  memset(&x, 0, sizeof x);
  memcpy(&x, p, dtype_size(a->dtype));
  switch (a->dtype) {
    case DT_F32:
      return x.f;
    case DT_F64:
      return x.d;
    case DT_I32:
      return x.i32;
    case DT_F16:
      return half_value(x.u16);
    case DT_BF16:
      x.u32 <<= 16;
      return x.f;
    default:
      return *p;
  }
}

/* bf16 nearest to f, ties to even. */
static uint16_t bf16_bits(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

static void array_put(array *a, size_t i, uint16_t half) {
  uint8_t *p = (uint8_t *)a->data + i * dtype_size(a->dtype);
  const float f = half_value(half);
  const double d = f;
  switch (a->dtype) {
    case DT_F64:
      memcpy(p, &d, 8);
      break;
    case DT_F16:
      memcpy(p, &half, 2);
      break;
    case DT_BF16: {
      const uint16_t v = bf16_bits(f);
      memcpy(p, &v, 2);
      break;
    }
    case DT_I32: {
      const int32_t v = (int32_t)f;
      memcpy(p, &v, 4);
      break;
    }
    case DT_U8:
      *p = (uint8_t)f;
      break;
    default:
      memcpy(p, &f, 4);
  }
}

static double number(const cJSON *object, const char *key, double missing) {
  const cJSON *v = cJSON_GetObjectItemCaseSensitive(object, key);
  return cJSON_IsNumber(v) ? v->valuedouble : missing;
}

static uint64_t integer(const cJSON *object, const char *key) {
  const cJSON *v = cJSON_GetObjectItemCaseSensitive(object, key);
  return cJSON_IsString(v) ? strtoull(v->valuestring, NULL, 0) : cJSON_IsNumber(v) ? (uint64_t)v->valuedouble
                                                                                   : 0;
}

static double channel_value(const cJSON *list, size_t c, double missing) {
  const cJSON *v = cJSON_GetArrayItem(list, (int)c);
  return cJSON_IsNumber(v) ? v->valuedouble : missing;
}

/* Element i = hp(float((mul*u + add) * chan_mul[c] + chan_add[c])), u from splitmix64(seed + i). */
static const char *generate(const cJSON *gen, array *a) {
  const cJSON *kind = cJSON_GetObjectItemCaseSensitive(gen, "kind");
  if (!cJSON_IsString(kind) || strcmp(kind->valuestring, "splitmix")) return "unknown gen.kind";
  const uint64_t seed = integer(gen, "seed");
  const double mul = number(gen, "mul", 1), add = number(gen, "add", 0);
  const cJSON *chan_mul = cJSON_GetObjectItemCaseSensitive(gen, "chan_mul"), *chan_add = cJSON_GetObjectItemCaseSensitive(gen, "chan_add");
  const size_t channels = a->n_dims ? a->shape[a->n_dims - 1] : 1;
  double *m = malloc(2 * (channels + 1) * sizeof *m);
  if (!m) return "out of memory";
  for (size_t c = 0; c < channels; c++) m[2 * c] = channel_value(chan_mul, c, 1), m[2 * c + 1] = channel_value(chan_add, c, 0);
  for (size_t i = 0; i < a->count; i++) {
    const double u = (double)(splitmix64(seed + i) >> 40) / 8388608.0 - 1.0;
    const size_t c = i % channels;
    array_put(a, i, half_bits((float)((mul * u + add) * m[2 * c] + m[2 * c + 1])));
  }
  free(m);
  return NULL;
}

static int nibble(char c) {
  return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10
                                      : c >= 'A' && c <= 'F'   ? c - 'A' + 10
                                                               : -1;
}

ptrdiff_t hex_bytes(const char *text, uint8_t **bytes) {
  const size_t n = strlen(text);
  *bytes = malloc(n / 2 + 1);
  if (!*bytes || n % 2) return -1;
  for (size_t i = 0; i < n / 2; i++) {
    const int high = nibble(text[2 * i]), low = nibble(text[2 * i + 1]);
    if (high < 0 || low < 0) return -1;
    (*bytes)[i] = (uint8_t)(high * 16 + low);
  }
  return (ptrdiff_t)(n / 2);
}

char *hex_text(const void *bytes, size_t n) {
  char *text = malloc(2 * n + 1);
  if (!text) return NULL;
  for (size_t i = 0; i < n; i++) {
    const uint8_t b = ((const uint8_t *)bytes)[i];
    text[2 * i] = "0123456789abcdef"[b >> 4];
    text[2 * i + 1] = "0123456789abcdef"[b & 15];
  }
  text[2 * n] = 0;
  return text;
}

static const char *read_shape(const cJSON *shape, array *out) {
  if (!cJSON_IsArray(shape) || cJSON_GetArraySize(shape) > ARRAY_MAX_DIMS) return "shape is no list of at most 6 sizes";
  out->n_dims = cJSON_GetArraySize(shape);
  out->count = 1;
  for (int i = 0; i < out->n_dims; i++) {
    const double size = cJSON_GetArrayItem(shape, i)->valuedouble;
    if (!(size >= 0 && size < 1e9)) return "a size of shape is out of range";
    out->shape[i] = (size_t)size;
    out->count *= out->shape[i];
    if (out->count > (size_t)1 << 30) return "shape is too large";
  }
  return NULL;
}

const char *array_read(const cJSON *json, array *out) {
  memset(out, 0, sizeof *out);
  const cJSON *dtype = cJSON_GetObjectItemCaseSensitive(json, "dtype");
  if (!cJSON_IsString(dtype)) return "dtype is missing";
  int d = 0;
  while (d < DT_COUNT && strcmp(dtype->valuestring, DTYPES[d].name)) d++;
  if (d == DT_COUNT) return "unknown dtype";
  out->dtype = (array_dtype)d;
  const char *wrong = read_shape(cJSON_GetObjectItemCaseSensitive(json, "shape"), out);
  if (wrong) return wrong;
  const cJSON *hex = cJSON_GetObjectItemCaseSensitive(json, "hex"), *gen = cJSON_GetObjectItemCaseSensitive(json, "gen");
  if (cJSON_IsString(hex)) {
    const ptrdiff_t n = hex_bytes(hex->valuestring, (uint8_t **)&out->data);
    return n == (ptrdiff_t)(out->count * dtype_size(out->dtype)) ? NULL : "hex does not match dtype and shape";
  }
  out->data = malloc(out->count * dtype_size(out->dtype) + 1);
  if (!out->data) return "out of memory";
  return cJSON_IsObject(gen) ? generate(gen, out) : "neither hex nor gen";
}

void array_free(array *a) {
  free(a->data);
  a->data = NULL;
}

cJSON *array_json(array_dtype dtype, int n_dims, const size_t *shape, const void *data) {
  cJSON *json = cJSON_CreateObject(), *sizes = cJSON_AddArrayToObject(json, "shape");
  size_t count = 1;
  for (int i = 0; i < n_dims; i++) {
    cJSON_AddItemToArray(sizes, cJSON_CreateNumber((double)shape[i]));
    count *= shape[i];
  }
  cJSON_AddStringToObject(json, "dtype", dtype_name(dtype));
  char *text = hex_text(data, count * dtype_size(dtype));
  cJSON_AddStringToObject(json, "hex", text ? text : "");
  free(text);
  return json;
}
