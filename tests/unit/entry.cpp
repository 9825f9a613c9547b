// entry.h: how elements of K, V and Q become fp16 (rule 1.4).
#include "util/entry.h"

#include <catch2/catch_test_macros.hpp>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "half.hpp"
#include "kvq/kvq.h"
#include "random.hpp"

using namespace kvq_test;

namespace {

struct Entered {
  uint32_t end;
  uint64_t saturated = 0;
  std::vector<uint16_t> bits;
};

template <class T>
Entered enter(uint32_t dtype, const std::vector<T> &x) {
  Entered result{};
  result.bits.resize(x.size());
  result.end = kvq::enter_row(x.data(), dtype, uint32_t(x.size()), result.bits.data(), &result.saturated);
  return result;
}

uint16_t bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return uint16_t(bits >> 16);
}

}  // namespace

TEST_CASE("dtype_bytes knows the four types and no other") {
  REQUIRE(kvq::dtype_bytes(KVQ_DTYPE_F32) == 4);
  REQUIRE(kvq::dtype_bytes(KVQ_DTYPE_F16) == 2);
  REQUIRE(kvq::dtype_bytes(KVQ_DTYPE_BF16) == 2);
  REQUIRE(kvq::dtype_bytes(KVQ_DTYPE_F64) == 8);
  REQUIRE(kvq::dtype_bytes(4) == 0);
}

TEST_CASE("one number enters as the same half from every type (V28)") {
  // Multiples of 1/8 with 4 significant bits: exact in all four types.
  std::vector<float> f32;
  std::vector<double> f64;
  std::vector<uint16_t> f16, b16;
  for (int i = -15; i <= 15; i++) {
    const float x = float(i) / 8;
    f32.push_back(x), f64.push_back(x), f16.push_back(half_bits(x)), b16.push_back(bf16(x));
  }
  const Entered expected = enter(KVQ_DTYPE_F32, f32);
  REQUIRE(expected.end == f32.size());
  for (size_t i = 0; i < f32.size(); i++) REQUIRE(half_value(expected.bits[i]) == f64[i]);
  REQUIRE(enter(KVQ_DTYPE_F64, f64).bits == expected.bits);
  REQUIRE(enter(KVQ_DTYPE_F16, f16).bits == expected.bits);
  REQUIRE(enter(KVQ_DTYPE_BF16, b16).bits == expected.bits);
}

TEST_CASE("fp64 goes through fp32: two roundings") {
  // 1 + 2^-11 + 2^-40 is above the middle between 1 and 1 + 2^-10, but rounds to that middle in fp32, then to even.
  const Entered entered = enter<double>(KVQ_DTYPE_F64, {1 + 0x1p-11 + 0x1p-40, 1 + 0x1p-11 + 0x1p-22});
  REQUIRE(entered.bits == std::vector<uint16_t>{0x3c00, 0x3c01});
}

TEST_CASE("minus zero enters as zero from every type") {
  REQUIRE(enter<float>(KVQ_DTYPE_F32, {-0.0f, -1e-30f}).bits == std::vector<uint16_t>{0, 0});
  REQUIRE(enter<double>(KVQ_DTYPE_F64, {-0.0}).bits == std::vector<uint16_t>{0});
  REQUIRE(enter<uint16_t>(KVQ_DTYPE_F16, {0x8000}).bits == std::vector<uint16_t>{0});
  REQUIRE(enter<uint16_t>(KVQ_DTYPE_BF16, {0x8000}).bits == std::vector<uint16_t>{0});
}

TEST_CASE("elements beyond 65504 saturate and are counted") {
  const Entered entered = enter<float>(KVQ_DTYPE_F32, {65504.0f, 65504.004f, -125000.0f, 1.0f, 3e38f});
  REQUIRE(entered.end == 5);
  REQUIRE(entered.saturated == 3);
  REQUIRE(entered.bits == std::vector<uint16_t>{0x7bff, 0x7bff, 0xfbff, 0x3c00, 0x7bff});
  REQUIRE(enter<uint16_t>(KVQ_DTYPE_BF16, {bf16(125000.0f)}).saturated == 1);
  REQUIRE(enter<uint16_t>(KVQ_DTYPE_F16, {0x7bff, 0xfbff}).saturated == 0);
}

TEST_CASE("the first element that is not finite is named, and nothing is counted") {
  constexpr float infinity = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  const Entered entered = enter<float>(KVQ_DTYPE_F32, {1e6f, 2.0f, -infinity, nan});
  REQUIRE(entered.end == 2);
  REQUIRE(entered.saturated == 0);
  REQUIRE(enter<float>(KVQ_DTYPE_F32, {nan}).end == 0);
  REQUIRE(enter<uint16_t>(KVQ_DTYPE_F16, {0, 0x7c00}).end == 1);
  REQUIRE(enter<uint16_t>(KVQ_DTYPE_F16, {0, 0, 0xfe01}).end == 2);
  REQUIRE(enter<uint16_t>(KVQ_DTYPE_BF16, {0x7f80}).end == 0);
  // Finite in fp64, infinite as fp32.
  REQUIRE(enter<double>(KVQ_DTYPE_F64, {3.4e38, 3.5e38}).end == 1);
}

TEST_CASE("no elements: nothing happens") {
  uint64_t saturated = 7;
  REQUIRE(kvq::enter_row(nullptr, KVQ_DTYPE_F32, 0, nullptr, &saturated) == 0);
  REQUIRE(saturated == 7);
}

TEST_CASE("subnormal halves enter exactly from fp32 (V26)") {
  std::vector<float> x;
  for (int k = -20; k <= 20; k++) x.push_back(float(k) * 0x1p-24f);
  const Entered entered = enter(KVQ_DTYPE_F32, x);
  for (size_t i = 0; i < x.size(); i++) REQUIRE(half_value(entered.bits[i]) == double(x[i]));
}
