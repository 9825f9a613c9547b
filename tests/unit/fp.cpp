// fp.h: fp16, tree sums and splitmix64, against numbers worked out apart from it.
#include "util/fp.h"

#include <catch2/catch_test_macros.hpp>
#include <cmath>
#include <vector>

#include "half.hpp"
#include "random.hpp"

using namespace kvq_test;

TEST_CASE("every finite half goes to fp32 and back, and -0 comes back as +0") {
  for (uint32_t h = 0; h < 65536; h++) {
    if ((h & 0x7c00) == 0x7c00) continue;
    REQUIRE(kvq::half_to_float(uint16_t(h)) == float(half_value(uint16_t(h))));
    REQUIRE(kvq::float_to_half(kvq::half_to_float(uint16_t(h))) == (h == 0x8000 ? 0 : h));
  }
}

TEST_CASE("infinities and NaN of fp16 keep their meaning") {
  REQUIRE(kvq::half_to_float(0x7c00) == INFINITY);
  REQUIRE(kvq::half_to_float(0xfc00) == -INFINITY);
  REQUIRE(std::isnan(kvq::half_to_float(0x7e00)));
}

TEST_CASE("fp32 rounds to the nearest half, ties to even, and saturates") {
  const auto check = [](float x) {
    const uint16_t expected = half_bits(x);
    INFO(x);
    REQUIRE(kvq::float_to_half(x) == (expected == 0x8000 ? 0 : expected));
  };
  // Around the middle between any two neighbours: below it, on it, above it.
  for (uint32_t h = 0; h < 0x7bff; h++) {
    const float middle = float((half_value(uint16_t(h)) + half_value(uint16_t(h + 1))) / 2);
    for (const float x : {std::nextafter(middle, 0.0f), middle, std::nextafter(middle, 1e9f)}) check(x), check(-x);
  }
  for (const float x : {0.0f, -0.0f, 1e-45f, 65503.99f, 65504.0f, 65519.0f, 65520.0f, 1e6f, 3e38f, -3e38f}) check(x);
  Random random;
  for (int i = 0; i < 200000; i++) check(float(random.normal() * std::exp2(random.uniform() * 50 - 30)));
}

TEST_CASE("rne rounds to the nearest integer, ties to even") {
  for (int i = -100; i <= 100; i++) {
    const float tie = float(i) + 0.5f, even = float(i % 2 ? i + 1 : i);
    REQUIRE(kvq::rne(float(i)) == float(i));
    REQUIRE(kvq::rne(tie) == even);
    REQUIRE(kvq::rne(std::nextafter(tie, -1e9f)) == float(i));
    REQUIRE(kvq::rne(std::nextafter(tie, 1e9f)) == float(i + 1));
  }
  for (const float x : {4194303.5f, 4194304.5f, 6291457.5f, 8388607.5f, 8388609.0f, 16777215.0f, 1.07e7f, 3e38f}) {
    REQUIRE(kvq::rne(x) == std::nearbyint(x));
    REQUIRE(kvq::rne(-x) == std::nearbyint(-x));
  }
}

TEST_CASE("the tree sum adds neighbours first, as the padded tree says") {
  // (1e8 + 1) + (-1e8 + 1): both inner sums lose the 1 (steps of 8), so 0; from left to right it would be 1.
  float four[] = {1e8f, 1, -1e8f, 1};
  REQUIRE(kvq::tree_sum(four, 4) == 0.0f);
  // ((1 + 2^-24) + (2^-24 + 0)) with 3 elements: 1 + 2^-24 is a tie to 1, and again.
  float three[] = {1, 0x1p-24f, 0x1p-24f, 99};
  REQUIRE(kvq::tree_sum(three, 3) == 1.0f);
  // 5 elements: ((a + b) + (c + d)) + ((e + 0) + (0 + 0)) = ((1 + 2^-24) + (2^-24 + 2^-24)) + 0 = 1 + 2^-23.
  float five[] = {1, 0x1p-24f, 0x1p-24f, 0x1p-24f, 0, 99, 99, 99};
  REQUIRE(kvq::tree_sum(five, 5) == 1.0f + 0x1p-23f);
  float one[] = {-7};
  REQUIRE(kvq::tree_sum(one, 1) == -7.0f);
  float none[] = {3};
  REQUIRE(kvq::tree_sum(none, 0) == 0.0f);
}

TEST_CASE("splitmix64 gives the published sequence") {
  // State 0: the generator's first outputs are splitmix64(0), splitmix64(gamma), splitmix64(2 gamma).
  constexpr uint64_t gamma = 0x9E3779B97F4A7C15u;
  REQUIRE(kvq::splitmix64(0) == 0xE220A8397B1DCDAFu);
  REQUIRE(kvq::splitmix64(gamma) == 0x6E789E6AA1B965F4u);
  REQUIRE(kvq::splitmix64(2 * gamma) == 0x06C45D188009454Fu);
}
