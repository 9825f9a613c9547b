// SemKV: which tokens are kept at the higher precision, given their scores (SemKV section 3.4; FORMATS section 6).
#include <cmath>

#include "policy/select.h"
#include "policy/statistics.h"
#include "policy/text.h"

namespace kvq {

namespace {

uint64_t rounded(Ratio r, Rounding rounding, uint64_t n) {
  const UInt128 product = UInt128(r.p) * n;
  uint64_t count = uint64_t(product / r.q);
  if (rounding == Rounding::half_even) {
    const UInt128 twice = product % r.q * 2;  // the remainder against one half
    count += twice > r.q || (twice == r.q && count % 2 == 1);
  }
  return count;
}

}  // namespace

Status select_tokens(Ratio r, Rounding rounding, std::span<const float> scores, std::span<uint8_t> flags) {
  if (r.q == 0 || r.p > r.q) return fail(KVQ_E_INVALID, "r=%llu/%llu is not in 0..1", (unsigned long long)r.p, (unsigned long long)r.q);
  for (size_t i = 0; i < scores.size(); i++)
    if (std::isnan(scores[i])) return fail(KVQ_E_INVALID, "the score of token %zu is NaN", i);
  select_largest(scores, rounded(r, rounding, scores.size()), flags);
  return KVQ_OK;
}

}  // namespace kvq
