// Token scores for SemKV: eight indicators of section 3.3 and random, as kvq.h describes them (kvq_scores_*).
//
// There is one set of functions for host memory, below, and one for device memory (cuda/): the same bits (indicator_rules.h).
// Tensors have their strides resolved; outputs are written only on success.
#pragma once
#include <cstdint>

#include "util/status.h"

namespace kvq {

struct Indicators {
  Status (*hidden)(uint32_t kind, const kvq_tensor *hidden, uint32_t n_hidden, uint64_t n_tokens, uint32_t dim, float *scores);
  Status (*norms)(const kvq_tensor *rows, uint32_t n_layers, uint64_t n_tokens, uint32_t heads, uint32_t dim, float *scores);
  Status (*self_information)(const kvq_tensor &logits, const uint32_t *targets, uint64_t n_tokens, uint32_t vocab, float *scores);
  Status (*attention)(const kvq_tensor &weights, uint32_t heads, uint64_t n_queries, uint64_t n_keys, float *scores);
  Status (*random)(uint64_t seed, uint64_t first, uint64_t n_tokens, float *scores);
};
extern const Indicators host_indicators;

// Which of the hidden states a kind uses: [*first, n_hidden).
Status check_hidden(uint32_t kind, uint32_t n_hidden, uint32_t *first);

Status score_hidden(uint32_t kind, const kvq_tensor *hidden, uint32_t n_hidden, uint64_t n_tokens, uint32_t dim, float *scores);
// Rows enter by rule 1.4 like all of K and V.
Status score_norms(const kvq_tensor *rows, uint32_t n_layers, uint64_t n_tokens, uint32_t heads, uint32_t dim, float *scores);
Status score_self_information(const kvq_tensor &logits, const uint32_t *targets, uint64_t n_tokens, uint32_t vocab, float *scores);
// Adds to scores [n_keys].
Status score_attention(const kvq_tensor &weights, uint32_t heads, uint64_t n_queries, uint64_t n_keys, float *scores);
Status score_random(uint64_t seed, uint64_t first, uint64_t n_tokens, float *scores);

}  // namespace kvq
