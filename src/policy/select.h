// The one selection rule of section 6: the `count` largest of n, ties to the lower index.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

namespace kvq {

// flags[i] = 1 for the `count` <= n largest scores (no NaN), else 0.  The order is total, so the result is unique.
template <class T>
void select_largest(std::span<const T> scores, uint64_t count, std::span<uint8_t> flags) {
  std::vector<uint64_t> order(scores.size());
  std::iota(order.begin(), order.end(), uint64_t(0));
  const auto before = [scores](uint64_t a, uint64_t b) { return scores[a] > scores[b] || (scores[a] == scores[b] && a < b); };
  if (count < order.size()) std::nth_element(order.begin(), order.begin() + ptrdiff_t(count), order.end(), before);
  std::fill(flags.begin(), flags.end(), uint8_t(0));
  for (uint64_t i = 0; i < count; i++) flags[order[i]] = 1;
}

}  // namespace kvq
