#include "cpu/doubt.h"

#include <algorithm>
#include <cmath>

namespace kvq::cpu {

bool is_certain(const Doubts &doubt, uint32_t row, uint32_t dim, double power) {
  constexpr double kOutput = 1e-7, kLse = 1e-3;  // FORMATS section 9
  // The square of an error is a mean over channels, so the fewer there are the farther it may be from what is expected; codes at the
  // ends of their levels and equal weights, which are rounded alike, add to that.
  constexpr double kSigmas = 6.0;
  const double rare = double(kCodes) * (1.0 + kSigmas * std::sqrt(2.0 / dim));
  const double tokens = std::max(1.0, doubt.count[row]), mean = doubt.first[row] / tokens;
  const double variance = doubt.second[row] / tokens - mean * mean, lse = kLse * std::max(1.0, double(doubt.largest[row]) / 16.0);
  const double output = kOutput * std::max(1.0, variance) * power;
  return rare * doubt.sum[row] <= output && 12.0 * doubt.tile[row] <= output && 4.0 * doubt.worst[row] <= lse * lse;
}

}  // namespace kvq::cpu
