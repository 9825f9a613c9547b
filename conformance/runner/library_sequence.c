/* create, commit, append, end_turn, truncate, fork, remove, export, attend. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "library.h"

void forget_sequences(library_target *t) {
  t->lib.destroy(t->cache);
  t->cache = NULL;
  t->n_sequences = 0;
}

static int32_t step_create(library_target *t, const cJSON *step, cJSON *result) {
  (void)result;
  forget_sequences(t);
  if (read_geometry(t, step, &t->layer, &t->n_layers)) return RUNNER_ERROR;
  char *text = recipe_text(step);
  recipe_options options;
  const char *wrong = read_options(step, &options);
  kvq_config config;
  memset(&config, 0, sizeof config);
  config.struct_size = sizeof config;
  config.backend = t->backend;
  config.n_layers = t->n_layers;
  config.layers = &t->layer;
  config.n_layer_structs = 1;
  config.recipe = text;
  config.recipe_data = options.given ? &options.data : NULL;
  const int32_t status = wrong ? runner_error(t, wrong) : t->lib.create(&config, &t->cache);
  free(text);
  free_options(&options);
  return status;
}

/* Where the id of a name is kept; NULL if the name is new and there is no room. */
static kvq_seq *sequence_place(library_target *t, const char *name, int *is_new) {
  int i = 0;
  while (i < t->n_sequences && strcmp(t->sequences[i].name, name)) i++;
  *is_new = i == t->n_sequences;
  if (!name[0] || i == MAX_SEQUENCES) return NULL;
  return &t->sequences[i].id;
}

static void keep_sequence(library_target *t, const char *name, kvq_seq id) {
  int is_new;
  kvq_seq *place = sequence_place(t, name, &is_new);
  if (is_new) snprintf(t->sequences[t->n_sequences++].name, sizeof t->sequences[0].name, "%s", name);
  *place = id;
}

/* The id of a named sequence.  A name that was never used makes one; a removed one keeps its stale id. */
static int32_t find_sequence(library_target *t, const cJSON *step, kvq_seq *id) {
  int is_new;
  const char *name = text_field(step, "seq", "");
  const kvq_seq *place = sequence_place(t, name, &is_new);
  if (!place) return runner_error(t, "a sequence name is missing, or there are too many");
  if (!is_new) return *id = *place, KVQ_OK;
  const int32_t status = t->lib.seq_create(t->cache, id);
  if (!status) keep_sequence(t, name, *id);
  return status;
}

static int32_t add_lengths(library_target *t, kvq_seq id, cJSON *result, kvq_lengths *lengths) {
  memset(lengths, 0, sizeof *lengths);
  lengths->struct_size = sizeof *lengths;
  const int32_t status = t->lib.seq_length(t->cache, id, lengths);
  if (status || !result) return status;
  cJSON *l = cJSON_AddObjectToObject(result, "lengths");
  cJSON_AddNumberToObject(l, "sinks", (double)lengths->sinks);
  cJSON_AddNumberToObject(l, "packed", (double)lengths->packed);
  cJSON_AddNumberToObject(l, "tail", (double)lengths->tail);
  return KVQ_OK;
}

/* Tokens of a commit or append: k, v, q [layer][head][token][dim], scores [token]. */
typedef struct {
  array k, v, q, scores;
  size_t tokens;
} token_arrays;

static void free_tokens(token_arrays *a) { array_free(&a->k), array_free(&a->v), array_free(&a->q), array_free(&a->scores); }

static const char *read_tokens(const cJSON *step, token_arrays *a) {
  const struct {
    const char *key;
    array *to;
  } table[] = {{"k", &a->k}, {"v", &a->v}, {"q", &a->q}, {"scores", &a->scores}};
  memset(a, 0, sizeof *a);
  for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
    const cJSON *json = cJSON_GetObjectItemCaseSensitive(step, table[i].key);
    const char *wrong = json && !cJSON_IsNull(json) ? array_read(json, table[i].to) : NULL;
    if (wrong) return wrong;
  }
  if (a->scores.data && a->scores.dtype != DT_F32) return "scores are not f32";
  if (a->k.data) a->tokens = a->k.shape[2];
  return NULL;
}

/* One layer's slice of [layer][head][token][dim] as a strided tensor; NULL for an absent array. */
static const kvq_tensor *layer_slice(const array *a, uint32_t layer, kvq_tensor *out) {
  if (!a->data) return NULL;
  const size_t dim = a->shape[3], tokens = a->shape[2], heads = a->shape[1];
  *out = tensor_of(a, dim, dim * tokens);
  out->data = (uint8_t *)a->data + dtype_size(a->dtype) * layer * heads * tokens * dim;
  return out;
}

/* Hand over every layer, then the flag.  A layer that refuses undoes the layers before it, so that the whole commit is refused. */
static int32_t commit_tokens(library_target *t, kvq_seq id, const token_arrays *a, int final) {
  kvq_lengths before;
  kvq_tensor k, v, q;
  int32_t status = add_lengths(t, id, NULL, &before);
  for (uint32_t layer = 0; !status && a->tokens && layer < t->n_layers; layer++) {
    kvq_prefill p;
    memset(&p, 0, sizeof p);
    p.struct_size = sizeof p;
    p.layer = layer;
    p.n_tokens = a->tokens;
    p.k = layer_slice(&a->k, layer, &k), p.v = layer_slice(&a->v, layer, &v), p.q = layer_slice(&a->q, layer, &q);
    p.scores = layer ? NULL : a->scores.data;
    p.n_scores = p.scores ? (uint32_t)a->scores.count : 0;
    status = t->lib.prefill_commit(t->cache, id, &p, NULL);
  }
  if (!status && final) {
    kvq_prefill p;
    memset(&p, 0, sizeof p);
    p.struct_size = sizeof p;
    p.layer = KVQ_ALL_LAYERS;
    p.flags = KVQ_PREFILL_FINAL;
    status = t->lib.prefill_commit(t->cache, id, &p, NULL);
  }
  if (status && a->tokens && status != KVQ_E_STALE) {
    t->lib.error_detail(t->base.error, sizeof t->base.error, NULL); /* of the refusal, not of what follows */
    t->lib.seq_truncate(t->cache, id, before.total);
  }
  return status;
}

static int32_t step_commit(library_target *t, const cJSON *step, cJSON *result) {
  kvq_seq id;
  token_arrays a;
  kvq_lengths lengths;
  int32_t status = find_sequence(t, step, &id);
  if (status) return status;
  const char *wrong = read_tokens(step, &a);
  if (wrong) return runner_error(t, wrong);
  const cJSON *final = cJSON_GetObjectItemCaseSensitive(step, "final");
  status = commit_tokens(t, id, &a, !cJSON_IsFalse(final));
  if (!status) status = add_lengths(t, id, result, &lengths);
  free_tokens(&a);
  return status;
}

static int32_t append_tokens(library_target *t, kvq_seq id, const token_arrays *a) {
  kvq_step running;
  const uint32_t n = (uint32_t)a->tokens;
  kvq_tensor k, v, q;
  int32_t status = t->lib.step_begin(t->cache, &id, &n, 1, 0, &running);
  if (status) return status;
  for (uint32_t layer = 0; !status && n && layer < t->n_layers; layer++)
    status = t->lib.append(t->cache, running, layer, layer_slice(&a->k, layer, &k), layer_slice(&a->v, layer, &v), layer_slice(&a->q, layer, &q), NULL);
  if (!status) status = t->lib.step_end(t->cache, running, NULL, a->scores.data);
  if (status) {
    t->lib.error_detail(t->base.error, sizeof t->base.error, NULL);
    t->lib.step_abort(t->cache, running);
  }
  return status;
}

static int32_t step_append(library_target *t, const cJSON *step, cJSON *result) {
  kvq_seq id;
  token_arrays a;
  kvq_lengths lengths;
  int32_t status = find_sequence(t, step, &id);
  if (status) return status;
  const char *wrong = read_tokens(step, &a);
  if (wrong) return runner_error(t, wrong);
  status = append_tokens(t, id, &a);
  if (!status) status = add_lengths(t, id, result, &lengths);
  free_tokens(&a);
  return status;
}

static int32_t step_end_turn(library_target *t, const cJSON *step, cJSON *result) {
  kvq_seq id;
  kvq_lengths lengths;
  int32_t status = find_sequence(t, step, &id);
  if (!status) status = t->lib.end_turn(t->cache, id);
  return status ? status : add_lengths(t, id, result, &lengths);
}

static int32_t step_truncate(library_target *t, const cJSON *step, cJSON *result) {
  kvq_seq id;
  kvq_lengths lengths;
  int32_t status = find_sequence(t, step, &id);
  if (!status) status = t->lib.seq_truncate(t->cache, id, (uint64_t)number_field(step, "length", 0));
  return status ? status : add_lengths(t, id, result, &lengths);
}

/* `to` is a new name, or that of a removed sequence. */
static int32_t step_fork(library_target *t, const cJSON *step, cJSON *result) {
  kvq_seq parent, child;
  kvq_lengths lengths;
  int is_new;
  const char *to = text_field(step, "to", "");
  int32_t status = find_sequence(t, step, &parent);
  if (!status && !sequence_place(t, to, &is_new)) return runner_error(t, "fork has no name for the child, or there are too many");
  if (!status) status = t->lib.seq_fork(t->cache, parent, UINT64_MAX, &child);
  if (status) return status;
  keep_sequence(t, to, child);
  return add_lengths(t, child, result, &lengths);
}

static int32_t step_remove(library_target *t, const cJSON *step, cJSON *result) {
  kvq_seq id;
  (void)result;
  const int32_t status = find_sequence(t, step, &id);
  return status ? status : t->lib.seq_remove(t->cache, id);
}

static int32_t export_wire(library_target *t, kvq_seq id, const cJSON *step, uint32_t tensor, cJSON *result) {
  const uint32_t layer = (uint32_t)number_field(step, "layer", 0), head = (uint32_t)number_field(step, "head", 0);
  const uint64_t block = (uint64_t)number_field(step, "block", 0);
  size_t needed = 0;
  int32_t status = t->lib.export_wire(t->cache, id, layer, head, tensor, block, NULL, 0, &needed, NULL);
  void *wire = malloc(needed + 1);
  if (status == KVQ_E_SIZE) status = t->lib.export_wire(t->cache, id, layer, head, tensor, block, wire, needed, &needed, NULL);
  if (!status) {
    char *text = hex_text(wire, needed);
    cJSON_AddStringToObject(result, "wire", text ? text : "");
    free(text);
  }
  free(wire);
  return status;
}

static int32_t step_export(library_target *t, const cJSON *step, cJSON *result) {
  kvq_seq id;
  kvq_lengths lengths;
  int32_t status = find_sequence(t, step, &id);
  if (!status) status = add_lengths(t, id, NULL, &lengths);
  if (status) return status;
  const uint32_t tensor = strcmp(text_field(step, "tensor", "k"), "v") ? KVQ_TENSOR_K : KVQ_TENSOR_V;
  if (cJSON_GetObjectItemCaseSensitive(step, "block")) return export_wire(t, id, step, tensor, result);
  const uint64_t first = (uint64_t)number_field(step, "first", 0);
  const double rest = first < lengths.total ? (double)(lengths.total - first) : 0;
  const uint64_t count = (uint64_t)number_field(step, "count", rest);
  const size_t dim = tensor == KVQ_TENSOR_K ? t->layer.dim_k : t->layer.dim_v, shape[2] = {count, dim};
  float *values = count <= lengths.total ? calloc(count * dim + 1, sizeof *values) : NULL; /* NULL: the library must refuse first */
  float dummy;
  status = t->lib.export_values(t->cache, id, (uint32_t)number_field(step, "layer", 0), (uint32_t)number_field(step, "head", 0), tensor, first, count,
                                values ? values : &dummy);
  if (!status) cJSON_AddItemToObject(result, "values", array_json(DT_F32, 2, shape, values));
  free(values);
  return status;
}

static kvq_attend_options options_of(const cJSON *step, const array *sinks) {
  kvq_attend_options o;
  memset(&o, 0, sizeof o);
  o.struct_size = sizeof o;
  o.scale = (float)number_field(step, "scale", 0);
  o.softcap = (float)number_field(step, "softcap", 0);
  o.window = (uint32_t)number_field(step, "window", 0);
  o.sinks = sinks->data;
  return o;
}

/* Queries of the newest n tokens, [query head][n][dim_k] -> out [query head][n][dim_v], lse [query head][n]. */
static int32_t run_attend(library_target *t, kvq_seq id, const cJSON *step, const array *q, const array *sinks, cJSON *result) {
  const uint32_t n = (uint32_t)q->shape[1];
  const size_t heads = q->shape[0], dim_v = t->layer.dim_v, shape[3] = {heads, n, dim_v};
  const kvq_attend_options options = options_of(step, sinks);
  const kvq_tensor qt = tensor_of(q, q->shape[2], q->shape[2] * n);
  array out = {DT_F32, 3, {heads, n, dim_v}, heads * n * dim_v, calloc(heads * n * dim_v + 1, sizeof(float))};
  const kvq_tensor ot = tensor_of(&out, dim_v, dim_v * n);
  float *lse = calloc(2 * heads * n + 1, sizeof *lse), *by_head = lse + heads * n;
  kvq_step running;
  int32_t status = t->lib.step_begin(t->cache, &id, &n, 1, KVQ_STEP_QUERY_ONLY, &running);
  if (!status) {
    status = t->lib.attend(t->cache, running, (uint32_t)number_field(step, "layer", 0), &qt, &ot, lse, &options, NULL);
    if (status) t->lib.error_detail(t->base.error, sizeof t->base.error, NULL);
    t->lib.step_abort(t->cache, running);
  }
  for (size_t h = 0; h < heads; h++)
    for (size_t i = 0; i < n; i++) by_head[h * n + i] = lse[i * heads + h];
  if (!status) {
    cJSON_AddItemToObject(result, "out", array_json(DT_F32, 3, shape, out.data));
    cJSON_AddItemToObject(result, "lse", array_json(DT_F32, 2, shape, by_head));
  }
  free(lse);
  array_free(&out);
  return status;
}

static int32_t step_attend(library_target *t, const cJSON *step, cJSON *result) {
  kvq_seq id;
  array q, sinks;
  int32_t status = find_sequence(t, step, &id);
  if (status) return status;
  memset(&sinks, 0, sizeof sinks);
  const cJSON *given = cJSON_GetObjectItemCaseSensitive(step, "sinks");
  const char *wrong = array_read(cJSON_GetObjectItemCaseSensitive(step, "q"), &q);
  if (!wrong && given && !cJSON_IsNull(given)) wrong = array_read(given, &sinks);
  if (!wrong && (q.n_dims != 3 || (sinks.data && sinks.dtype != DT_F32))) wrong = "q is not [query head][token][dim], or sinks are not f32";
  if (wrong) return runner_error(t, wrong);
  status = run_attend(t, id, step, &q, &sinks, result);
  array_free(&q), array_free(&sinks);
  return status;
}

library_step find_sequence_step(const char *op) {
  static const struct {
    const char *op;
    library_step run;
  } table[] = {{"create", step_create}, {"commit", step_commit}, {"append", step_append}, {"end_turn", step_end_turn}, {"truncate", step_truncate}, {"fork", step_fork}, {"remove", step_remove}, {"export", step_export}, {"attend", step_attend}};
  for (size_t i = 0; i < sizeof table / sizeof *table; i++)
    if (!strcmp(op, table[i].op)) return table[i].run;
  return NULL;
}
