// PM-KVQ: what the widths of the chain cost (FORMATS section 2.5), and a helper that gives layers their budgets.
#include <cmath>
#include <vector>

#include "policy/policy.h"
#include "recipe/recipe.h"

namespace kvq {

Status chain_bytes(uint64_t tokens, uint32_t kv_heads, uint32_t dim_k, uint32_t dim_v, std::span<uint64_t> bytes) {
  Codec codec;
  codec.kind = Kind::progressive;
  for (size_t i = 0; i < std::size(kChainLevels); i++) {
    bytes[i] = 0;
    codec.levels = kChainLevels[i];
    for (const uint32_t tensor : {KVQ_TENSOR_K, KVQ_TENSOR_V}) {
      const uint32_t dim = tensor == KVQ_TENSOR_K ? dim_k : dim_v;
      const HeadShape shape{dim, tensor, KVQ_ROPE_HALF, dim, 0};
      HeadFormat format(std::pmr::get_default_resource());
      KVQ_TRY(check_shape(shape));
      KVQ_TRY(resolve_codec(&codec, shape));
      KVQ_TRY(make_format(codec, shape, {}, {}, &format));
      bytes[i] += uint64_t(kv_heads) * wire_size(format, uint32_t(tokens));
    }
  }
  return KVQ_OK;
}

uint32_t chain_width(size_t i) { return 16u >> i; }

size_t widest_within(uint64_t budget, std::span<const uint64_t> bytes) {
  size_t i = 0;
  while (i + 1 < bytes.size() && bytes[i] > budget) i++;
  return i;
}

// As Block-GTQ gives bits to pairs: the error energy of a layer falls by 4 with each bit.
Status allocate_budgets(std::span<const double> scores, uint64_t total, std::span<const uint64_t> bytes, std::span<uint64_t> budgets) {
  constexpr size_t kNarrowest = std::size(kChainLevels) - 1;
  const UInt128 least = UInt128(bytes[kNarrowest]) * scores.size();
  if (least > total)
    return fail(KVQ_E_INVALID, "total=%llu is less than %zu layers take at 2 bits, %llu each", (unsigned long long)total, scores.size(),
                (unsigned long long)bytes[kNarrowest]);
  for (size_t l = 0; l < scores.size(); l++)
    if (!(scores[l] >= 0) || std::isinf(scores[l]))
      return fail(KVQ_E_INVALID, "the score of layer %zu is %g, not a finite number >= 0", l, scores[l]);
  uint64_t left = total - uint64_t(least);
  std::vector<size_t> width(scores.size(), kNarrowest);  // index into the chain
  const auto gain = [&](size_t l) { return std::ldexp(scores[l], -2 * int(chain_width(width[l]))); };
  for (;;) {
    size_t best = scores.size();
    for (size_t l = 0; l < scores.size(); l++) {
      if (width[l] == 0 || bytes[width[l] - 1] - bytes[width[l]] > left) continue;
      const bool better = best == scores.size() || gain(l) > gain(best) || (gain(l) == gain(best) && width[l] > width[best]);
      if (better) best = l;
    }
    if (best == scores.size()) break;
    left -= bytes[width[best] - 1] - bytes[width[best]];
    width[best]--;
  }
  for (size_t l = 0; l < scores.size(); l++) budgets[l] = bytes[width[l]];
  return KVQ_OK;
}

}  // namespace kvq
