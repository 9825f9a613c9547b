// Section 2.4: the angle of a pair, and back, by polynomials that are part of the format: plain fp32 steps, the same on every
// machine, host or device.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "util/fp.h"

namespace kvq {

inline constexpr float kPi = 0x1.921fb6p+1f, kHalfPi = 0x1.921fb6p+0f, kTwoPi = 0x1.921fb6p+2f;
inline constexpr float kTwoOverPi = 0x1.45f306p-1f;
inline constexpr float kHalfPiHigh = 0x1.92p+0f, kHalfPiLow = 0x1.fb5444p-12f;  // their sum is pi/2 to 40 bits

template <size_t N>
KVQ_HD inline float polynomial(const float (&coefficient)[N], float t) {
  float sum = coefficient[N - 1];
  for (size_t i = N - 1; i-- > 0;) sum = sum * t + coefficient[i];
  return sum;
}

// Angle of (u, v) in [0, 2 pi).
KVQ_HD inline float polar_angle(float u, float v) {
  // Coefficients of polar.json, lowest power first: atan divided by x, in x * x.
  const float atan[] = {0x1.ffffeap-1f, -0x1.554c3ap-2f, 0x1.988174p-3f, -0x1.1cd946p-3f,
                        0x1.8af1bap-4f, -0x1.ca0882p-5f, 0x1.6633a8p-6f, -0x1.09b80ep-8f};
  const float au = std::fabs(u), av = std::fabs(v), mx = au > av ? au : av, mn = au > av ? av : au;
  if (mx == 0.0f) return 0.0f;
  const float q = mn / mx;
  float r = q * polynomial(atan, q * q);
  if (av > au) r = kHalfPi - r;
  if (u < 0.0f) r = kPi - r;
  if (v < 0.0f) r = kTwoPi - r;
  return r >= kTwoPi ? 0.0f : r;
}

struct SinCos {
  float sin, cos;
};

KVQ_HD inline SinCos polar_sin_cos(float theta) {
  // As above: sin divided by x, and cos.
  const float sin[] = {0x1p+0f, -0x1.555556p-3f, 0x1.111102p-7f, -0x1.a00c12p-13f, 0x1.6c345ep-19f};
  const float cos[] = {0x1p+0f, -0x1p-1f, 0x1.55553ap-5f, -0x1.6c0788p-10f, 0x1.99072ap-16f};
  const float j = rne(theta * kTwoOverPi);  // quarters; an int32 whatever the parameters are
  const float r = (theta - j * kHalfPiHigh) - j * kHalfPiLow, t = r * r;
  const float s = r * polynomial(sin, t), c = polynomial(cos, t);
  switch (int32_t(j) & 3) {
    case 0:
      return {s, c};
    case 1:
      return {c, -s};
    case 2:
      return {-s, -c};
    default:
      return {-c, s};
  }
}

}  // namespace kvq
