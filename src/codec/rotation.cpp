#include "codec/rotation.h"

#include <bit>
#include <cmath>

#include "codec/codec.h"
#include "codec/row_rules.h"
#include "util/fp.h"

namespace kvq {
namespace {

// One pass: the signs of all channels, and the transform of a power of two of them.
struct Pass {
  uint32_t width, lanes;
  uint64_t signs;         // argument of splitmix64 for channels 0..63; the number of the 64 is its lowest field
  uint32_t first, count;  // channels of the transform
};

Pass make_pass(uint32_t q, uint32_t width, uint32_t lanes, uint64_t seed, uint32_t tensor, uint32_t k) {
  const uint32_t count = std::bit_floor(width);
  return {width, lanes, sign_seed(seed, tensor, q, k), q ? width - count : 0, count};
}

void apply_signs(const Pass &pass, float *y) {
  uint64_t word = 0;
  for (uint32_t i = 0; i < pass.width; i++) {
    if (i % 64 == 0) word = splitmix64(pass.signs ^ i / 64);
    const float sign = word >> i % 64 & 1u ? -1.0f : 1.0f;
    for (uint32_t l = 0; l < pass.lanes; l++) y[size_t(i) * pass.lanes + l] *= sign;
  }
}

void transform(const Pass &pass, float *y) {
  const size_t n = size_t(pass.count) * pass.lanes;
  y += size_t(pass.first) * pass.lanes;
  for (size_t distance = pass.lanes; distance < n; distance *= 2) {
    for (size_t base = 0; base < n; base += 2 * distance) {
      float *lower = y + base, *upper = lower + distance;
      for (size_t i = 0; i < distance; i++) {
        const float a = lower[i], b = upper[i];
        lower[i] = a + b;
        upper[i] = a - b;
      }
    }
  }
  if (pass.count == 1) return;
  const float c = inverse_sqrt(pass.count);
  for (size_t i = 0; i < n; i++) y[i] *= c;
}

}  // namespace

float inverse_sqrt(uint32_t w) { return float(1.0 / std::sqrt(double(w))); }

void rotate_lanes(float *y, uint32_t width, uint32_t lanes, uint64_t seed, uint32_t tensor, uint32_t k) {
  for (uint32_t q = 0; q < (std::has_single_bit(width) ? 1u : 2u); q++) {
    const Pass pass = make_pass(q, width, lanes, seed, tensor, k);
    apply_signs(pass, y);
    transform(pass, y);
  }
}

void unrotate_lanes(float *y, uint32_t width, uint32_t lanes, uint64_t seed, uint32_t tensor, uint32_t k) {
  for (uint32_t q = std::has_single_bit(width) ? 1u : 2u; q-- > 0;) {
    const Pass pass = make_pass(q, width, lanes, seed, tensor, k);
    transform(pass, y);
    apply_signs(pass, y);
  }
}

void rotate(float *y, uint32_t width, uint64_t seed, uint32_t tensor, uint32_t k) { rotate_lanes(y, width, 1, seed, tensor, k); }

void unrotate(float *y, uint32_t width, uint64_t seed, uint32_t tensor, uint32_t k) {
  unrotate_lanes(y, width, 1, seed, tensor, k);
}

}  // namespace kvq
