// The last steps of rules 2.2 and 2.5 and the signs of section 3, written once for host and device.
#pragma once
#include <cmath>
#include <cstdint>

#include "codec/codec.h"
#include "util/fp.h"

namespace kvq {

// The scalar h of a codebook row before it is stored: n its norm, s the sum of m * m, p = tree(y * m), a the book's scale.
KVQ_HD inline float row_scale(ScaleRule rule, float a, float n, float sigma, uint64_t s, float p) {
  if (s == 0 || n == 0.0f) return 0.0f;
  switch (rule) {
    case ScaleRule::plain:
      return sigma;
    case ScaleRule::ls:
      return p / (a * float(s));
    case ScaleRule::unbiased:
      return p > 0.0f ? n * n / (a * p) : 0.0f;
    default:
      return n / (a * std::sqrt(float(s)));
  }
}

// Argument of splitmix64 for the signs of channels 0..63 of pass q, group index k; channels 64 i... take it XOR i.
KVQ_HD inline uint64_t sign_seed(uint64_t seed, uint32_t tensor, uint32_t q, uint32_t k) {
  return seed ^ (uint64_t(tensor) << 48 | uint64_t(q) << 40 | uint64_t(k) << 16);
}

// Shrinking by `ratio` (17: 8 to 4 bits, 5: 4 to 2 bits): codes and scales of the coarser width.
KVQ_HD inline uint8_t shrink_code(uint8_t code, uint32_t ratio) { return uint8_t((2 * code + ratio) / (2 * ratio)); }
KVQ_HD inline uint16_t shrink_scale(uint16_t s, uint32_t ratio) { return float_to_half(float(ratio) * half_to_float(s)); }

// |x| of fp16 bits in units of 2^-24, an integer.
KVQ_HD inline uint64_t magnitude(uint16_t x) {
  const uint32_t exponent = x >> 10 & 31u, fraction = x & 0x3ffu;
  return exponent ? uint64_t(fraction | 0x400u) << (exponent - 1) : fraction;
}

}  // namespace kvq
