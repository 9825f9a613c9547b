// Section 2.4: the angle of a pair, and back, by polynomials that are part of the format: plain fp32 steps, the same on every
// machine, host or device.
#pragma once
#include <cstddef>
#include <cstdint>

#include "util/fp.h"

namespace kvq {

inline constexpr float kPi = 0x1.921fb6p+1f, kHalfPi = 0x1.921fb6p+0f, kTwoPi = 0x1.921fb6p+2f;
inline constexpr float kTwoOverPi = 0x1.45f306p-1f;
inline constexpr float kHalfPiHigh = 0x1.92p+0f, kHalfPiLow = 0x1.fb5444p-12f;  // their sum is pi/2 to 40 bits

// F: float, or a vector of them (util/loops_impl.h).
template <size_t N, class F>
KVQ_HD inline F polynomial(const float (&coefficient)[N], F t) {
  F sum = F{} + coefficient[N - 1];
  for (size_t i = N - 1; i-- > 0;) sum = sum * t + coefficient[i];
  return sum;
}

// Angle of (u, v) in [0, 2 pi).
template <class F>
KVQ_HD inline F polar_angle(F u, F v) {
  // Coefficients of polar.json, lowest power first: atan divided by x, in x * x.
  const float atan[] = {0x1.ffffeap-1f, -0x1.554c3ap-2f, 0x1.988174p-3f, -0x1.1cd946p-3f,
                        0x1.8af1bap-4f, -0x1.ca0882p-5f, 0x1.6633a8p-6f, -0x1.09b80ep-8f};
  const F au = u < 0.0f ? -u : u, av = v < 0.0f ? -v : v, mx = au > av ? au : av, mn = au > av ? av : au;
  const F q = mn / mx;
  F r = q * polynomial(atan, q * q);
  r = av > au ? kHalfPi - r : r;
  r = u < 0.0f ? kPi - r : r;
  r = v < 0.0f ? kTwoPi - r : r;
  return (r >= kTwoPi) | (mx == 0.0f) ? F{} : r;
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
