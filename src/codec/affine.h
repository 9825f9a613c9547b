// Rule 2.1, the affine quantizer.  Every codec with scales and zeros uses these functions, on the host and on a device, which may have
// its own ways to store and load a parameter.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>

#include "codec/minifloat.h"

namespace kvq {

// Stored scale and zero of a vector whose values lie in [mn, mx].  levels == 1: width 0.
struct AffineParams {
  uint16_t s, z;
};

template <uint16_t (*kStore)(float, ParamType) = store_param>
KVQ_HD inline AffineParams affine_params(float mn, float mx, uint32_t levels, bool midpoint, ParamType type) {
  if (levels == 1) return {0, kStore((mn + mx) / 2.0f, type)};
  if (!midpoint) return {kStore((mx - mn) / float(levels - 1), type), kStore(mn, type)};
  const float z = (float(2 * levels - 1) * mn + mx) / float(2 * levels);
  return {kStore((mx - mn) / float(levels), type), kStore(z, type)};
}

// What turns values into codes: (x - zero) / step, clamped to [0, top].  A scale of 0 makes every code 0 without dividing by it.
struct AffineCoder {
  float zero, step, top;
};

template <float (*kLoad)(uint16_t, ParamType) = load_param>
KVQ_HD inline AffineCoder affine_coder(AffineParams params, uint32_t levels, ParamType type) {
  const float s = kLoad(params.s, type), z = kLoad(params.z, type);
  return s == 0.0f ? AffineCoder{z, 1.0f, 0.0f} : AffineCoder{z, s, float(levels - 1)};
}

// The clamp comes before the rounding, which is the same because its bounds are integers; then q + 1.5 * 2^23, whose last bit is
// 1, is rounded to nearest even by the addition itself.
KVQ_HD inline uint8_t affine_code(float x, float zero, float step, float top) {
  float q = (x - zero) / step;
  q = q > 0.0f ? q : 0.0f;
  q = q < top ? q : top;
  return uint8_t(std::bit_cast<uint32_t>(q + 0x1.8p23f));
}

// The same code without a division, for a fused multiply-add: `inverse` is 1 / step, rounded.  The quotient that this corrects once is
// within an ulp of (x - zero) / step, so a code can differ only where that is within ulps of k + 1/2; it does not, for any step of 11
// bits or fewer and every k below 255: tests/unit/affine_division.cpp visits them all.
KVQ_HD inline uint32_t affine_code_fast(float x, float zero, float step, float inverse, float top) {
  const float d = x - zero, near = d * inverse;
  const float q = std::fmin(std::fmax(std::fma(std::fma(-step, near, d), inverse, near), 0.0f), top);
  return std::bit_cast<uint32_t>(q + 0x1.8p23f) & 0xffu;
}

KVQ_HD inline float affine_value(uint8_t code, float s, float z) { return z + float(code) * s; }

}  // namespace kvq
