// Centre of keys: the mean per channel over a prompt (FORMATS section 2.2, center=1), from exact integer sums.
#include <algorithm>

#include "policy/policy.h"
#include "util/fp.h"
#include "util/loops.h"

namespace kvq {

void CenterSum::add(const uint16_t *rows, size_t count) {
  const Loops &loops = select_loops();
  const uint32_t dim = uint32_t(sum_.size());
  Vector<int64_t> units(dim, sum_.get_allocator());
  for (size_t t = 0; t < count; t += kSumTokens) {
    loops.sum_values(rows + t * dim, dim, uint32_t(std::min<size_t>(kSumTokens, count - t)), dim, units.data());
    for (uint32_t c = 0; c < dim; c++) sum_[c] += units[c];
  }
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
