/* encode, decode, stats, policy, account. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "library.h"

static uint32_t tensor_field(const cJSON *step) { return strcmp(text_field(step, "tensor", "k"), "v") ? KVQ_TENSOR_K : KVQ_TENSOR_V; }

/* mu: fp16 bits, or NULL.  The array owns them. */
static const char *read_mu(const cJSON *step, array *mu, const uint16_t **bits) {
  const cJSON *json = cJSON_GetObjectItemCaseSensitive(step, "mu");
  memset(mu, 0, sizeof *mu);
  *bits = NULL;
  if (!json) return NULL;
  const char *wrong = array_read(json, mu);
  if (!wrong && mu->dtype != DT_F16) wrong = "mu is not f16";
  if (!wrong) *bits = mu->data;
  return wrong;
}

static kvq_codec codec_of(const cJSON *step, const uint16_t *mu) {
  kvq_codec c;
  memset(&c, 0, sizeof c);
  c.struct_size = sizeof c;
  c.tensor = tensor_field(step);
  c.text = text_field(step, "codec", "");
  c.dim = (uint32_t)number_field(step, "dim", 0);
  c.rope_layout = layout_field(step);
  c.rotary_dim = (uint32_t)number_field(step, "rotary_dim", 0);
  c.rotary_first = (uint32_t)number_field(step, "rotary_first", 0);
  c.mu = mu;
  return c;
}

static void add_hex(cJSON *result, const char *key, const void *bytes, size_t n) {
  char *text = hex_text(bytes, n);
  cJSON_AddStringToObject(result, key, text ? text : "");
  free(text);
}

static int32_t step_encode(library_target *t, const cJSON *step, cJSON *result) {
  array x, mu;
  const uint16_t *bits;
  const char *wrong = read_mu(step, &mu, &bits);
  if (wrong || (wrong = array_read(cJSON_GetObjectItemCaseSensitive(step, "x"), &x))) return runner_error(t, wrong);
  const kvq_codec codec = codec_of(step, bits);
  const kvq_tensor tensor = tensor_of(&x, x.shape[1], x.shape[1]);
  size_t needed = 0;
  int32_t status = t->lib.codec_encode(&codec, &tensor, x.shape[0], NULL, 0, &needed);
  void *wire = malloc(needed + 1);
  if (status == KVQ_E_SIZE) status = t->lib.codec_encode(&codec, &tensor, x.shape[0], wire, needed, &needed);
  if (!status) add_hex(result, "wire", wire, needed);
  free(wire);
  array_free(&x), array_free(&mu);
  return status;
}

static int32_t step_decode(library_target *t, const cJSON *step, cJSON *result) {
  array mu;
  const uint16_t *bits;
  uint8_t *wire = NULL;
  const char *wrong = read_mu(step, &mu, &bits);
  const ptrdiff_t size = wrong ? -1 : hex_bytes(text_field(step, "wire", "?"), &wire);
  if (size < 0) return runner_error(t, wrong ? wrong : "wire is no hex");
  const kvq_codec codec = codec_of(step, bits);
  const size_t tokens = (size_t)number_field(step, "tokens", 0), shape[2] = {tokens, codec.dim};
  float *values = calloc(tokens * codec.dim + 1, sizeof *values);
  const int32_t status = t->lib.codec_decode(&codec, wire, (size_t)size, tokens, values);
  if (!status) cJSON_AddItemToObject(result, "values", array_json(DT_F32, 2, shape, values));
  free(values), free(wire);
  array_free(&mu);
  return status;
}

/* k [tokens][dim], q [tokens][dim] or [query heads][tokens][dim], token or pair scores: the inputs of a policy. */
typedef struct {
  array k, q, scores;
  kvq_tensor k_tensor, q_tensor;
  kvq_policy policy;
} policy_inputs;

static const char *read_optional(const cJSON *step, const char *key, array *a) {
  const cJSON *json = cJSON_GetObjectItemCaseSensitive(step, key);
  memset(a, 0, sizeof *a);
  return json ? array_read(json, a) : NULL;
}

static const char *read_policy(const cJSON *step, policy_inputs *in) {
  memset(in, 0, sizeof *in);
  const char *range = cJSON_GetObjectItemCaseSensitive(step, "range") ? "range" : "scores";
  const char *key = cJSON_GetObjectItemCaseSensitive(step, "k") ? "k" : "v"; /* channel-split also ranks values */
  const char *wrong = read_optional(step, key, &in->k);
  if (!wrong) wrong = read_optional(step, "q", &in->q);
  if (!wrong) wrong = read_optional(step, range, &in->scores);
  if (wrong) return wrong;
  kvq_policy *p = &in->policy;
  p->struct_size = sizeof *p;
  p->rope_layout = layout_field(step);
  p->rotary_dim = (uint32_t)number_field(step, "rotary_dim", 0);
  p->rotary_first = (uint32_t)number_field(step, "rotary_first", 0);
  if (in->k.data) {
    p->dim = (uint32_t)in->k.shape[in->k.n_dims - 1];
    p->n_tokens = in->k.shape[in->k.n_dims - 2];
    in->k_tensor = tensor_of(&in->k, p->dim, p->dim);
    p->k = &in->k_tensor;
  }
  if (in->q.data) {
    p->dim = (uint32_t)in->q.shape[in->q.n_dims - 1];
    p->n_tokens = in->q.shape[in->q.n_dims - 2];
    p->q_heads = in->q.n_dims > 2 ? (uint32_t)in->q.shape[0] : 1;
    in->q_tensor = tensor_of(&in->q, p->dim, p->dim * p->n_tokens);
    p->q = &in->q_tensor;
  }
  p->n_scores = in->scores.count;
  if (in->scores.data && in->scores.dtype == DT_F64) {
    p->pair_scores = in->scores.data;
    if (!p->dim) p->dim = (uint32_t)(2 * in->scores.count);
  } else if (in->scores.data) {
    p->token_scores = in->scores.data;
  }
  return NULL;
}

static void free_policy(policy_inputs *in) { array_free(&in->k), array_free(&in->q), array_free(&in->scores); }

/* name(key=value,...) from the fields of the step that are no inputs. */
static void policy_text(const cJSON *step, char *text, size_t room) {
  static const char *const INPUTS[] = {"op", "name", "k", "q", "v", "scores", "range", "layout", "rotary_dim", "rotary_first", "expect", "status", "tensor", "comment"};
  size_t n = (size_t)snprintf(text, room, "%s", text_field(step, "name", ""));
  char separator = '(';
  for (const cJSON *f = step->child; f && n < room; f = f->next) {
    size_t i = 0;
    while (i < sizeof INPUTS / sizeof *INPUTS && strcmp(f->string, INPUTS[i])) i++;
    if (i < sizeof INPUTS / sizeof *INPUTS || cJSON_IsArray(f)) continue;
    n += cJSON_IsString(f) ? (size_t)snprintf(text + n, room - n, "%c%s=%s", separator, f->string, f->valuestring)
                           : (size_t)snprintf(text + n, room - n, "%c%s=%.0f", separator, f->string, f->valuedouble);
    separator = ',';
  }
  if (separator == ',' && n < room) snprintf(text + n, room - n, ")");
}

/* What a policy yields, by name. */
static void add_decision(const cJSON *step, cJSON *result, const void *bytes, size_t n) {
  const char *name = text_field(step, "name", "");
  const int widths = !strcmp(name, "blockgtq") || !strcmp(name, "pair-widths") ||
                     (!strcmp(name, "chanmix") && cJSON_GetObjectItemCaseSensitive(step, "range"));
  if (widths) {
    cJSON_AddItemToObject(result, "bits", array_json(DT_U8, 1, &n, bytes));
  } else if (!strcmp(name, "center")) {
    const size_t dim = n / 2;
    cJSON_AddItemToObject(result, "mu", array_json(DT_F16, 1, &dim, bytes));
  } else {
    add_hex(result, strncmp(name, "semkv", 5) ? "mask" : "flags", bytes, n);
  }
}

/* One decision; *bytes is to be freed. */
static int32_t decide(library_target *t, const kvq_policy *policy, uint8_t **bytes, size_t *n) {
  *n = 0;
  *bytes = NULL;
  int32_t status = t->lib.policy_decide(policy, NULL, 0, n);
  if (status != KVQ_E_SIZE) return status;
  *bytes = malloc(*n + 1);
  return t->lib.policy_decide(policy, *bytes, *n, n);
}

/* pmkvq-shrink: the width of `tokens` packed tokens under each budget, one decision a budget. */
static int32_t step_shrink(library_target *t, const cJSON *step, cJSON *result) {
  const cJSON *budgets = cJSON_GetObjectItemCaseSensitive(step, "budgets"), *budget;
  uint8_t widths[256];
  size_t count = 0, n;
  cJSON_ArrayForEach(budget, budgets) {
    char text[256], number[32];
    uint8_t *bytes;
    kvq_policy policy;
    if (count == sizeof widths) return runner_error(t, "too many budgets");
    snprintf(number, sizeof number, "%.0f", budget->valuedouble);
    snprintf(text, sizeof text, "pmkvq-shrink(budget=%s,kv_heads=%.0f,dim_k=%.0f,dim_v=%.0f)", cJSON_IsString(budget) ? budget->valuestring : number,
             number_field(step, "kv_heads", 0), number_field(step, "dim_k", 0), number_field(step, "dim_v", 0));
    memset(&policy, 0, sizeof policy);
    policy.struct_size = sizeof policy;
    policy.text = text;
    policy.n_tokens = (uint64_t)number_field(step, "tokens", 0);
    const int32_t status = decide(t, &policy, &bytes, &n);
    if (!status && n == 1) widths[count++] = *bytes;
    free(bytes);
    if (status) return status;
  }
  cJSON_AddItemToObject(result, "bits", array_json(DT_U8, 1, &count, widths));
  return KVQ_OK;
}

static int32_t step_policy(library_target *t, const cJSON *step, cJSON *result) {
  policy_inputs in;
  char text[1024];
  if (!strcmp(text_field(step, "name", ""), "pmkvq-shrink")) return step_shrink(t, step, result);
  const char *wrong = read_policy(step, &in);
  if (wrong) return runner_error(t, wrong);
  policy_text(step, text, sizeof text);
  in.policy.text = text;
  size_t n;
  uint8_t *bytes;
  const int32_t status = decide(t, &in.policy, &bytes, &n);
  if (!status) add_decision(step, result, bytes, n);
  free(bytes);
  free_policy(&in);
  return status;
}

/* A 128-bit integer as decimal text. */
static void decimal(const uint64_t words[2], int is_signed, char text[48]) {
  __extension__ typedef unsigned __int128 u128;
  u128 v = (u128)words[1] << 64 | words[0];
  const int negative = is_signed && words[1] >> 63;
  if (negative) v = -v;
  char *p = text + 47;
  *p = 0;
  do *--p = (char)('0' + (int)(v % 10)), v /= 10;
  while (v);
  if (negative) *--p = '-';
  memmove(text, p, strlen(p) + 1);
}

static void add_sum(cJSON *result, const char *key, const uint64_t words[2], int is_signed) {
  char text[48];
  cJSON *list = cJSON_GetObjectItemCaseSensitive(result, key);
  if (!list) list = cJSON_AddArrayToObject(result, key);
  decimal(words, is_signed, text);
  cJSON_AddItemToArray(list, cJSON_CreateString(text));
}

static void add_extremes(cJSON *result, const kvq_channel_sums *channels, size_t dim) {
  uint16_t *bits = calloc(2 * dim + 1, sizeof *bits);
  for (size_t c = 0; c < dim; c++) { /* exact: they are fp16 values, or infinities without tokens */
    bits[c] = half_of(channels[c].min);
    bits[dim + c] = half_of(channels[c].max);
  }
  cJSON_AddItemToObject(result, "min", array_json(DT_F16, 1, &dim, bits));
  cJSON_AddItemToObject(result, "max", array_json(DT_F16, 1, &dim, bits + dim));
  free(bits);
}

static int32_t step_stats(library_target *t, const cJSON *step, cJSON *result) {
  policy_inputs in;
  const char *wrong = read_policy(step, &in);
  if (wrong) return runner_error(t, wrong);
  const size_t dim = in.policy.dim;
  kvq_pair_sums *pairs = calloc(dim / 2 + 1, sizeof *pairs);
  kvq_channel_sums *channels = calloc(dim + 1, sizeof *channels);
  uint64_t counts[2] = {0, 0};
  const int32_t status = t->lib.policy_stats(&in.policy, pairs, channels, counts);
  for (size_t p = 0; !status && p < dim / 2; p++) {
    add_sum(result, "K1", pairs[p].k1, 0), add_sum(result, "K2", pairs[p].k2, 0);
    add_sum(result, "Q1", pairs[p].q1, 0), add_sum(result, "Q2", pairs[p].q2, 0);
  }
  for (size_t c = 0; !status && c < dim; c++) add_sum(result, "sum", channels[c].sum, 1), add_sum(result, "abs", channels[c].abs, 0);
  if (!status) {
    cJSON_AddNumberToObject(result, "nk", (double)counts[0]);
    cJSON_AddNumberToObject(result, "nq", (double)counts[1]);
    add_extremes(result, channels, dim);
  }
  free(pairs), free(channels);
  free_policy(&in);
  return status;
}

static int32_t step_account(library_target *t, const cJSON *step, cJSON *result) {
  kvq_layer layer;
  uint32_t n_layers;
  if (read_geometry(t, step, &layer, &n_layers)) return RUNNER_ERROR;
  kvq_layer *layers = malloc((n_layers + 1) * sizeof *layers);
  for (uint32_t i = 0; i < n_layers; i++) layers[i] = layer;
  char *text = recipe_text(step);
  recipe_options options;
  const char *wrong = read_options(step, &options);
  kvq_account a;
  memset(&a, 0, sizeof a);
  a.struct_size = sizeof a;
  const int32_t status = wrong ? runner_error(t, wrong)
                               : t->lib.recipe_account(text, layers, n_layers, (uint64_t)number_field(step, "tokens", 0), options.given ? &options.data : NULL, &a);
  if (!status) {
    cJSON_AddNumberToObject(result, "wire_bytes", (double)a.wire_bytes);
    cJSON_AddNumberToObject(result, "metadata_bytes", (double)a.metadata_bytes);
    cJSON_AddNumberToObject(result, "effective_bits_k", a.effective_bits_k);
    cJSON_AddNumberToObject(result, "effective_bits_v", a.effective_bits_v);
  }
  free(layers), free(text);
  free_options(&options);
  return status;
}

library_step find_stateless_step(const char *op) {
  static const struct {
    const char *op;
    library_step run;
  } table[] = {{"encode", step_encode}, {"decode", step_decode}, {"stats", step_stats}, {"policy", step_policy}, {"account", step_account}};
  for (size_t i = 0; i < sizeof table / sizeof *table; i++)
    if (!strcmp(op, table[i].op)) return table[i].run;
  return NULL;
}
