// Stored parameters: fp16, and the 8-bit floats e4m3 and e5m3 (section 2.2 and the end of section 5).
// All are rounded from fp32 to nearest even, saturate, and never hold -0.
#pragma once
#include <bit>
#include <cstdint>

#include "codec/codec.h"
#include "util/fp.h"

namespace kvq {

// Non-negative fp32 `a` (as bits) to `bias`ed exponent and 3 bits of mantissa; `aligner` has the subnormal step as its last bit.
KVQ_HD inline uint32_t round_to_m3(uint32_t a, uint32_t bias, float aligner) {
  const uint32_t smallest_normal = (128 - bias) << 23;
  if (a < smallest_normal) return std::bit_cast<uint32_t>(std::bit_cast<float>(a) + aligner) - std::bit_cast<uint32_t>(aligner);
  return ((a + 0x7ffffu + (a >> 20 & 1u)) >> 20) - ((127 - bias) << 3);
}

// FP8 E4M3: sign, 4 bits of exponent with bias 7, 3 of mantissa; at most 448 = 0x7E (0x7F is NaN and never written).
KVQ_HD inline uint8_t float_to_e4m3(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x), a = bits & 0x7fffffffu;
  const uint32_t magnitude = a >= std::bit_cast<uint32_t>(448.0f) ? 0x7eu : round_to_m3(a, 7, 0x1p14f);
  return magnitude ? uint8_t(magnitude | (bits >> 24 & 0x80u)) : uint8_t(0);
}

KVQ_HD inline float e4m3_to_float(uint8_t h) {
  const float magnitude = std::bit_cast<float>(uint32_t(h & 0x7fu) << 20) * 0x1p120f;
  return h & 0x80u ? -magnitude : magnitude;
}

// e5m3 of x >= 0: 5 bits of exponent with bias 20, 3 of mantissa, no sign; at most 3840 = 0xFF.
KVQ_HD inline uint8_t float_to_e5m3(float x) {
  const uint32_t a = std::bit_cast<uint32_t>(x);
  return a >= std::bit_cast<uint32_t>(3840.0f) ? uint8_t(0xff) : uint8_t(round_to_m3(a, 20, 0x1p1f));
}

KVQ_HD inline float e5m3_to_float(uint8_t h) { return std::bit_cast<float>(uint32_t(h) << 20) * 0x1p107f; }

KVQ_HD inline uint16_t store_param(float x, ParamType type) {
  switch (type) {
    case ParamType::e4m3:
      return float_to_e4m3(x);
    case ParamType::e5m3:
      return float_to_e5m3(x);
    default:
      return float_to_half(x);
  }
}

KVQ_HD inline float load_param(uint16_t bits, ParamType type) {
  switch (type) {
    case ParamType::e4m3:
      return e4m3_to_float(uint8_t(bits));
    case ParamType::e5m3:
      return e5m3_to_float(uint8_t(bits));
    default:
      return half_to_float(bits);
  }
}

}  // namespace kvq
