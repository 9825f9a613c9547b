// Stateless decisions (kvq_policy_decide, kvq_policy_stats): one policy, one layer, one KV head, everything given.
#pragma once
#include <cstdint>
#include <memory_resource>
#include <span>
#include <string_view>
#include <vector>

#include "codec/codec.h"
#include "policy/statistics.h"
#include "util/status.h"

namespace kvq {

// kvq_policy, translated.  Tensors are in host memory with strides resolved; rows are entered by rule 1.4.
struct DecisionInput {
  HeadShape shape;                       // of the keys
  uint32_t q_heads = 0;                  // query heads in q
  uint64_t n_tokens = 0;                 // of k and q
  const kvq_tensor *k = nullptr, *q = nullptr;  // nullptr: not given
  std::span<const double> pair_scores;   // empty: not given
  std::span<const float> token_scores;
};

// `text` is "name(key=value,...)".  `out` gets a mask or flags (a bit per unit, LSB first), a byte per width, or fp16 mu.
//
//   pnmix, blockgtq, pair-widths, channel-split   the keys of the recipe's policy field; from k and q, the width policies also
//                                                 from pair_scores
//   semkv-prompt(r), semkv-block(r)               flags from token_scores
//   kitty(boost)                                  mask of the boosted channels of one group k
//   center                                        mu of k
//   chanmix(r_h)                                  mask of the heads that keep 4 bits; pair_scores: retrieval scores [layer][head]
//   chanmix(share)                                widths of a head's channels; pair_scores: range of each channel
//   pmkvq-shrink(budget,kv_heads,dim_k,dim_v)     the width of n_tokens packed tokens under a layer's budget in bytes
//   pmkvq-budgets(total,kv_heads,dim_k,dim_v)     budgets of layers with n_tokens packed tokens each, 8 bytes apiece, little-endian;
//                                                 pair_scores: the sensitivity of each layer
Status decide_policy(std::string_view text, const DecisionInput &input, std::pmr::vector<uint8_t> *out);

// Add k and q to `statistics`, which is given its sizes if it has none.  The sums of values stay as they are.
Status collect_statistics(const DecisionInput &input, HeadStatistics *statistics);

}  // namespace kvq
