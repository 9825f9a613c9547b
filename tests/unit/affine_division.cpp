// Codes without a division are the codes of rule 2.1.
#include <bit>
#include <catch2/catch_test_macros.hpp>

#include "codec/affine.h"
#include "random.hpp"

using namespace kvq;

// A corrected quotient is within an ulp, so codes can differ only beside k + 1/2.  Steps are scaled by powers of two without rounding, so
// their significands are all there is: 11 bits in fp16, fewer in 8-bit floats.
TEST_CASE("codes by products agree beside every boundary of every step") {
  uint64_t differ = 0;
  for (uint32_t significand = 1024; significand < 2048; significand++) {
    const float step = float(significand) * 0x1p-10f, inverse = 1.0f / step;
    for (uint32_t k = 0; k < 255; k++) {
      const uint32_t boundary = std::bit_cast<uint32_t>((float(k) + 0.5f) * step);  // exact
      for (int ulps = -6; ulps <= 6; ulps++) {
        const float d = std::bit_cast<float>(boundary + uint32_t(ulps));
        differ += affine_code(d, 0.0f, step, 255.0f) != affine_code_fast(d, 0.0f, step, inverse, 255.0f);
      }
    }
  }
  CHECK(differ == 0);
}

TEST_CASE("codes by products agree for any fp16 value, zero and step") {
  kvq_test::Random random;
  const auto finite = [&] {
    uint16_t bits = 0;
    do bits = uint16_t(random.below(65536));
    while ((bits & 0x7c00u) == 0x7c00u);
    return half_to_float(bits);
  };
  uint64_t differ = 0;
  for (int i = 0; i < 300000; i++) {
    const float x = finite(), zero = finite(), scale = std::fabs(finite()), step = scale == 0 ? 1.0f : scale;
    const float top = float(1 + random.below(255)), near = zero + step * top * float(random.uniform());
    differ += affine_code(x, zero, step, top) != affine_code_fast(x, zero, step, 1.0f / step, top);
    const float inside = std::fabs(near) < 65504 ? hp(near) : x;
    differ += affine_code(inside, zero, step, top) != affine_code_fast(inside, zero, step, 1.0f / step, top);
  }
  CHECK(differ == 0);
}
