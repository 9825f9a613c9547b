/* Quick start: a prompt goes into a quantized cache, then one generated token attends to it.
 *
 *   cc quickstart.c $(pkg-config --cflags --libs kvq)
 *
 * Real programs pass the K, V and Q of their model (after RoPE); here they are random numbers. */
#include <stdio.h>
#include <stdlib.h>

#include "kvq/kvq.h"

enum {
  LAYERS = 2,
  KV_HEADS = 2,
  Q_HEADS = 8,
  DIM = 128,
  PROMPT = 1000
};

static void check(int32_t status, const char *call) {
  char detail[512] = "";
  if (status == KVQ_OK) return;
  kvq_error_detail(detail, sizeof detail, NULL);
  fprintf(stderr, "%s: %s: %s\n", call, kvq_status_string(status), detail);
  exit(1);
}
#define CHECK(call) check((call), #call)

/* N(0, 1), by the sum of 12 uniform numbers. */
static float *random_rows(size_t n) {
  static uint64_t state = 1;
  float *rows = malloc(n * sizeof *rows);
  size_t i;
  int j;
  if (!rows) exit(1);
  for (i = 0; i < n; ++i) {
    rows[i] = -6;
    for (j = 0; j < 12; ++j) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      rows[i] += (float)(state >> 40) / 16777216.0f;
    }
  }
  return rows;
}

/* A packed float32 tensor [tokens][heads][DIM] in host memory; strides 0 mean packed. */
static kvq_tensor tensor(float *data) {
  kvq_tensor t = {0};
  t.struct_size = sizeof t;
  t.dtype = KVQ_DTYPE_F32;
  t.data = data;
  return t;
}

int main(void) {
  kvq_layer layer = {0};
  kvq_config config = {0};
  kvq_stats stats = {0};
  kvq_account account = {0};
  kvq_cache *cache = NULL;
  kvq_seq seq;
  kvq_step step;
  const uint32_t one = 1;
  uint32_t l;

  /* All layers are alike, so one struct describes them. */
  layer.struct_size = sizeof layer;
  layer.kv_heads = KV_HEADS;
  layer.q_heads = Q_HEADS;
  layer.dim_k = DIM;
  config.struct_size = sizeof config;
  config.n_layers = LAYERS;
  config.layers = &layer;
  config.n_layer_structs = 1;
  config.recipe = "kvq-3";
  CHECK(kvq_create(&config, &cache));
  CHECK(kvq_seq_create(cache, &seq));

  /* The prompt, layer by layer.  Its queries tell the recipe which channels matter. */
  for (l = 0; l < LAYERS; ++l) {
    float *k_rows = random_rows(PROMPT * KV_HEADS * DIM), *v_rows = random_rows(PROMPT * KV_HEADS * DIM);
    float *q_rows = random_rows(PROMPT * Q_HEADS * DIM);
    kvq_tensor k = tensor(k_rows), v = tensor(v_rows), q = tensor(q_rows);
    kvq_prefill chunk = {0};
    chunk.struct_size = sizeof chunk;
    chunk.layer = l;
    chunk.flags = KVQ_PREFILL_FINAL;
    chunk.n_tokens = PROMPT;
    chunk.k = &k;
    chunk.v = &v;
    chunk.q = &q;
    CHECK(kvq_prefill_commit(cache, seq, &chunk, NULL));
    free(k_rows), free(v_rows), free(q_rows);
  }

  /* One generated token: append its K and V and attend with its queries, layer by layer. */
  CHECK(kvq_step_begin(cache, &seq, &one, 1, 0, &step));
  for (l = 0; l < LAYERS; ++l) {
    float *k_rows = random_rows(KV_HEADS * DIM), *v_rows = random_rows(KV_HEADS * DIM), *q_rows = random_rows(Q_HEADS * DIM);
    float *out_rows = random_rows(Q_HEADS * DIM);
    kvq_tensor k = tensor(k_rows), v = tensor(v_rows), q = tensor(q_rows), out = tensor(out_rows);
    CHECK(kvq_append(cache, step, l, &k, &v, NULL, NULL));
    CHECK(kvq_attend(cache, step, l, &q, &out, NULL, NULL, NULL));
    printf("layer %u, head 0: %+.4f %+.4f %+.4f %+.4f ...\n", l, out_rows[0], out_rows[1], out_rows[2], out_rows[3]);
    free(k_rows), free(v_rows), free(q_rows), free(out_rows);
  }
  CHECK(kvq_step_end(cache, step, NULL, NULL));

  account.struct_size = sizeof account;
  CHECK(kvq_recipe_account("kvq-3", &layer, 1, 32 * 1024 + 64, NULL, &account));
  stats.struct_size = sizeof stats;
  CHECK(kvq_stats_get(cache, &stats));
  printf("kvq-3: %.3f bits per number at 32K tokens, %.1f times less than fp16\n", account.effective_bits,
         16 / account.effective_bits);
  printf("%llu tokens held in %llu bytes: %llu raw pages, %llu packed pages\n", (unsigned long long)stats.tokens,
         (unsigned long long)stats.bytes_used, (unsigned long long)stats.pages_raw, (unsigned long long)stats.pages_packed);
  kvq_destroy(cache);
  return 0;
}
