/* A C library under test, opened with dlopen: its functions, and what the steps of one test have made. */
#ifndef KVQ_CONFORM_LIBRARY_H
#define KVQ_CONFORM_LIBRARY_H

#include "array.h"
#include "kvq/kvq.h"
#include "target.h"

/* Every function that the runner calls; level 0 checks that each is exported. */
/* clang-format off */
#define LIBRARY_FUNCTIONS(F) \
  F(version) F(version_string) F(status_string) F(error_detail) F(backend_query) F(recipe_preset) F(recipe_account) \
  F(create) F(destroy) F(seq_create) F(seq_fork) F(seq_truncate) F(seq_remove) F(seq_length) F(prefill_commit) \
  F(step_begin) F(append) F(attend) F(step_end) F(step_abort) F(end_turn) F(export_values) F(export_wire) \
  F(codec_encode) F(codec_decode) F(policy_decide) F(policy_stats)
/* clang-format on */

typedef struct {
  void *handle;
#define LIBRARY_FIELD(name) __typeof__(&kvq_##name) name;
  LIBRARY_FUNCTIONS(LIBRARY_FIELD)
#undef LIBRARY_FIELD
} library;

enum {
  MAX_SEQUENCES = 64
};

typedef struct {
  target base;
  library lib;
  uint32_t backend;
  kvq_cache *cache; /* of the running test, or NULL */
  kvq_layer layer;  /* its geometry; all layers alike */
  uint32_t n_layers;
  struct {
    char name[64];
    kvq_seq id;
  } sequences[MAX_SEQUENCES];
  int n_sequences;
} library_target;

/* Returns NULL, or what is wrong. */
const char *library_open(library *lib, const char *path);
void library_close(library *lib);

/* Steps: fill `result` and return the library's status; RUNNER_ERROR with base.error filled if the vector itself is broken. */
enum {
  RUNNER_ERROR = 1
};
typedef int32_t (*library_step)(library_target *t, const cJSON *step, cJSON *result);
library_step find_stateless_step(const char *op);
library_step find_sequence_step(const char *op);
void forget_sequences(library_target *t);

/* Pieces of a step. */
int32_t runner_error(library_target *t, const char *what);
const char *text_field(const cJSON *step, const char *key, const char *missing);
double number_field(const cJSON *step, const char *key, double missing);
uint32_t layout_field(const cJSON *step);
kvq_tensor tensor_of(const array *a, size_t token_stride, size_t head_stride);

/* What create and account take.  The text of recipe (an object whose fields become text, or a text) or preset; malloc. */
char *recipe_text(const cJSON *step);
int read_geometry(library_target *t, const cJSON *step, kvq_layer *layer, uint32_t *n_layers);
/* options {bits, scores, budgets} as the C struct, which points into the rest. */
typedef struct {
  kvq_recipe_data data;
  int given; /* any of them */
  uint8_t *bits;
  uint64_t *budgets;
  array scores;
} recipe_options;
const char *read_options(const cJSON *step, recipe_options *o); /* NULL, or what is wrong; free_options in any case */
void free_options(recipe_options *o);

#endif
