// Numbers of section 1: fp16 bits, hp(), the tree sum, splitmix64.  Written for any C++20 compiler on host and device: plain
// fp32 operations, each rounded once; compile with -ffp-contract=off.
#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>

#include "util/hd.h"

namespace kvq {

// fp16 bits -> fp32, exact (finite values; infinities and NaN keep their meaning).
KVQ_HD inline float half_to_float(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000u) << 16, body = h & 0x7fffu;
  // 2^-112 * (fp32 with the fp16 exponent field): exact for normal and subnormal halves.
  const float magnitude = body >= 0x7c00u ? std::bit_cast<float>(0x7f800000u | uint32_t(body & 0x3ffu) << 13)
                                          : std::bit_cast<float>(body << 13) * std::bit_cast<float>(uint32_t(239) << 23);
  return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | sign);
}

// hp(x) + 0 of a finite x: nearest even, clamped to +-65504, never -0.
KVQ_HD inline uint16_t float_to_half(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x), sign = bits >> 16 & 0x8000u;
  uint32_t a = bits & 0x7fffffffu;
  if (a >= 0x477fe000u) return uint16_t(sign | 0x7bffu);  // 65504 and everything above
  uint32_t h;
  if (a < 0x38800000u) {  // below 2^-14: the sum aligns the subnormal step 2^-24 with the last bit of 0.5
    h = std::bit_cast<uint32_t>(std::bit_cast<float>(a) + 0.5f) - 0x3f000000u;
  } else {
    a += 0xfffu + (a >> 13 & 1u);
    h = (a >> 13) - 0x1c000u;
  }
  return h ? uint16_t(sign | h) : uint16_t(0);
}

// hp(x) as fp32.
KVQ_HD inline float hp(float x) { return half_to_float(float_to_half(x)); }

// rne(x): the nearest integer, ties to even.  Beyond 2^23 every fp32 is an integer; below it the sum's last bit is 1.
KVQ_HD inline float rne(float x) {
  const float c = x < 0.0f ? -0x1p23f : 0x1p23f;
  return x * x < 0x1p46f ? (x + c) - c : x;
}

KVQ_HD inline uint64_t splitmix64(uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
  x = (x ^ x >> 27) * 0x94D049BB133111EBu;
  return x ^ x >> 31;
}

// tree(v[0..n)) of section 1.3.  v is overwritten; it must have room for the next power of two.
inline float tree_sum(float *v, size_t n) {
  size_t p = std::bit_ceil(n ? n : 1);
  for (size_t i = n; i < p; i++) v[i] = 0.0f;
  for (; p > 1; p /= 2)
    for (size_t i = 0; i < p / 2; i++) v[i] = v[2 * i] + v[2 * i + 1];
  return v[0];
}

}  // namespace kvq
