// fp16 for the tests, through double arithmetic and sharing no code with src: the rule of section 1.4 of the formats.
#pragma once
#include <cmath>
#include <cstdint>
#include <limits>

namespace kvq_test {

inline double half_value(uint16_t bits) {
  const int exponent = (bits >> 10) & 31, fraction = bits & 1023;
  double value = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
  if (exponent == 31) value = fraction ? std::numeric_limits<double>::quiet_NaN() : std::numeric_limits<double>::infinity();
  return bits & 0x8000 ? -value : value;
}

// Nearest fp16, ties to even, beyond +-65504 saturating; the default rounding mode must be in force.
inline uint16_t half_bits(double value) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const double size = std::fabs(value);
  if (size >= 65504) return sign | 0x7BFF;
  const int exponent = size < 0x1p-14 ? -14 : std::ilogb(size);
  const double steps = std::nearbyint(std::ldexp(size, 10 - exponent));  // in units of the last place; may carry to 2048
  return sign | static_cast<uint16_t>(((exponent + 14) << 10) + static_cast<int>(steps));
}

// What the cache sees of an input element: rounded to fp16, saturated, -0 as +0.
inline float entry(float value) { return static_cast<float>(half_value(half_bits(value))) + 0.0f; }

}  // namespace kvq_test
