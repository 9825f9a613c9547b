/* Typed arrays of vector files: {"dtype", "shape", "hex" | "gen"} (SPEC section 10). */
#ifndef KVQ_CONFORM_ARRAY_H
#define KVQ_CONFORM_ARRAY_H

#include <cjson/cJSON.h>
#include <stddef.h>
#include <stdint.h>

enum {
  ARRAY_MAX_DIMS = 6
};
typedef enum {
  DT_F32,
  DT_F16,
  DT_BF16,
  DT_F64,
  DT_I32,
  DT_U8,
  DT_COUNT
} array_dtype; /* the first four are KVQ_DTYPE_* */

typedef struct array {
  array_dtype dtype;
  int n_dims;
  size_t shape[ARRAY_MAX_DIMS];
  size_t count; /* elements */
  void *data;   /* little-endian, row-major */
} array;

/* Read an array; returns NULL, or what is wrong with it.  Free with array_free. */
const char *array_read(const cJSON *json, array *out);
void array_free(array *a);

size_t dtype_size(array_dtype dtype);
const char *dtype_name(array_dtype dtype);
double array_get(const array *a, size_t i);
/* fp16 bits nearest to x; finite values saturate at 65504, infinities stay. */
uint16_t half_of(float x);

/* {"dtype", "shape", "hex"} of data in memory. */
cJSON *array_json(array_dtype dtype, int n_dims, const size_t *shape, const void *data);

/* Hex text of bytes (malloc), and back; hex_bytes returns the count, or -1 if the text is no hex. */
char *hex_text(const void *bytes, size_t n);
ptrdiff_t hex_bytes(const char *text, uint8_t **bytes);

#endif
