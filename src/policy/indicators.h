// Token scores for SemKV: eight indicators of section 3.3 and random, as kvq.h describes them (kvq_scores_*).
// Accumulated in fp64.  Outputs are written only on success.
#pragma once
#include <cstdint>

#include "util/status.h"

namespace kvq {

Status score_hidden(uint32_t kind, const float *const *hidden, uint32_t n_hidden, uint64_t n_tokens, uint32_t dim, float *scores);
// Tensors in host memory with strides resolved; rows enter by rule 1.4 like all of K and V.
Status score_norms(const kvq_tensor *rows, uint32_t n_layers, uint64_t n_tokens, uint32_t heads, uint32_t dim, float *scores);
Status score_self_information(const float *logits, const uint32_t *targets, uint64_t n_tokens, uint32_t vocab, float *scores);
// Adds to scores [n_keys].
Status score_attention(const float *weights, uint32_t heads, uint64_t n_queries, uint64_t n_keys, float *scores);
void score_random(uint64_t seed, uint64_t first, uint64_t n_tokens, float *scores);

}  // namespace kvq
