// Centre of keys: the mean per channel over a prompt (FORMATS section 2.2, center=1), from exact integer sums.
#include "policy/policy.h"
#include "util/fp.h"

namespace kvq {

void CenterSum::add(const uint16_t *rows, size_t count) {
  const size_t dim = sum_.size();
  for (size_t t = 0; t < count; t++)
    for (size_t c = 0; c < dim; c++) sum_[c] += int64_t(half_to_float(rows[t * dim + c]) * 0x1p24f);  // exact: below 2^40
  count_ += count;
}

void CenterSum::add(const ChannelSums *sums, uint64_t count) {
  for (size_t c = 0; c < sum_.size(); c++) sum_[c] += sums[c].sum;
  count_ += count;
}

void CenterSum::mean(std::span<uint16_t> mu) const {
  for (size_t c = 0; c < sum_.size(); c++)
    mu[c] = count_ ? float_to_half(float(double(sum_[c]) / 0x1p24 / double(count_))) : uint16_t(0);
}

}  // namespace kvq
