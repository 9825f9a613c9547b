/* The recipe and the geometry of create and account. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "library.h"

/* An object becomes "k=...;v=...;sinks=..." ; options travel apart, see read_options. */
char *recipe_text(const cJSON *step) {
  const cJSON *recipe = cJSON_GetObjectItemCaseSensitive(step, "recipe");
  const char *plain = cJSON_IsString(recipe) ? recipe->valuestring : text_field(step, "preset", "");
  const size_t room = 8192;
  char *text = calloc(1, room);
  if (!text) return NULL;
  if (!cJSON_IsObject(recipe)) {
    snprintf(text, room, "%s", plain);
    return text;
  }
  size_t n = 0;
  for (const cJSON *field = recipe->child; field; field = field->next) {
    if (cJSON_IsString(field))
      n += (size_t)snprintf(text + n, room - n, "%s%s=%s", n ? ";" : "", field->string, field->valuestring);
    else if (cJSON_IsNumber(field))
      n += (size_t)snprintf(text + n, room - n, "%s%s=%.0f", n ? ";" : "", field->string, field->valuedouble);
    if (n >= room) break;
  }
  return text;
}

int read_geometry(library_target *t, const cJSON *step, kvq_layer *layer, uint32_t *n_layers) {
  const cJSON *g = cJSON_GetObjectItemCaseSensitive(step, "geometry");
  if (!cJSON_IsObject(g)) return runner_error(t, "geometry is missing");
  memset(layer, 0, sizeof *layer);
  layer->struct_size = sizeof *layer;
  layer->kv_heads = (uint32_t)number_field(g, "kv_heads", 0);
  layer->q_heads = (uint32_t)number_field(g, "q_heads", layer->kv_heads);
  layer->dim_k = (uint32_t)number_field(g, "dim_k", 0);
  layer->dim_v = (uint32_t)number_field(g, "dim_v", layer->dim_k);
  layer->rope_layout = layout_field(g);
  layer->rotary_dim = (uint32_t)number_field(g, "rotary_dim", 0);
  layer->rotary_first = (uint32_t)number_field(g, "rotary_first", 0);
  *n_layers = (uint32_t)number_field(g, "layers", 0);
  return 0;
}

/* options stand in the recipe, or beside a preset. */
static const cJSON *option(const cJSON *step, const char *name) {
  const cJSON *recipe = cJSON_GetObjectItemCaseSensitive(step, "recipe"), *beside = cJSON_GetObjectItemCaseSensitive(step, "options");
  const cJSON *within = cJSON_GetObjectItemCaseSensitive(recipe, "options");
  return cJSON_GetObjectItemCaseSensitive(beside ? beside : within, name);
}

/* bits [layer][head] = LIST, one digit a pair or channel: flat. */
static uint8_t *read_bits(const cJSON *bits, uint64_t *count) {
  const cJSON *layer, *head;
  size_t n = 0;
  cJSON_ArrayForEach(layer, bits) cJSON_ArrayForEach(head, layer) n += strlen(head->valuestring);
  uint8_t *out = malloc(n + 1), *p = out;
  if (!out) return NULL;
  cJSON_ArrayForEach(layer, bits) cJSON_ArrayForEach(head, layer) for (const char *c = head->valuestring; *c; c++) *p++ = (uint8_t)(*c - '0');
  *count = n;
  return out;
}

static uint64_t *read_budgets(const cJSON *budgets, uint64_t *count) {
  const cJSON *budget;
  uint64_t *out = malloc(((size_t)cJSON_GetArraySize(budgets) + 1) * sizeof *out);
  if (!out) return NULL;
  *count = 0;
  cJSON_ArrayForEach(budget, budgets) out[(*count)++] = cJSON_IsString(budget) ? strtoull(budget->valuestring, NULL, 10) : (uint64_t)budget->valuedouble;
  return out;
}

const char *read_options(const cJSON *step, recipe_options *o) {
  memset(o, 0, sizeof *o);
  o->data.struct_size = sizeof o->data;
  const cJSON *bits = option(step, "bits"), *scores = option(step, "scores"), *budgets = option(step, "budgets");
  if (bits) o->data.bits = o->bits = read_bits(bits, &o->data.n_bits);
  if (budgets) o->data.budgets = o->budgets = read_budgets(budgets, &o->data.n_budgets);
  if (scores) {
    const char *wrong = array_read(scores, &o->scores);
    if (!wrong && o->scores.dtype != DT_F64) wrong = "options.scores are not f64";
    if (wrong) return wrong;
    o->data.scores = o->scores.data;
    o->data.n_scores = o->scores.count;
  }
  o->given = bits || scores || budgets;
  return NULL;
}

void free_options(recipe_options *o) { free(o->bits), free(o->budgets), array_free(&o->scores); }
