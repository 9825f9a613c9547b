// SemKV's selection of tokens: exact counts, ties and odd scores.
#include <catch2/catch_test_macros.hpp>
#include <limits>
#include <numeric>
#include <vector>

#include "policy/policy.h"
#include "random.hpp"

using namespace kvq;

namespace {

using Flags = std::vector<uint8_t>;
constexpr float kInf = std::numeric_limits<float>::infinity();

Flags selected(Ratio r, Rounding rounding, const std::vector<float> &scores) {
  Flags flags(scores.size(), 7);
  if (select_tokens(r, rounding, scores, flags) != KVQ_OK) FAIL(failure_detail());
  return flags;
}

int count(Ratio r, Rounding rounding, size_t n) {
  const Flags flags = selected(r, rounding, std::vector<float>(n, 1.0f));
  return std::accumulate(flags.begin(), flags.end(), 0);
}

}  // namespace

TEST_CASE("of a prompt floor(r*T) tokens are high") {  // V29
  CHECK(count({35, 100}, Rounding::floor, 180) == 63);
  CHECK(count({29, 100}, Rounding::floor, 100) == 29);
  CHECK(count({58, 100}, Rounding::floor, 50) == 29);
  CHECK(count({1, 4}, Rounding::floor, 7) == 1);
  CHECK(count({(uint64_t(1) << 63) - 2, (uint64_t(1) << 63) - 1}, Rounding::floor, 1000) == 999);
}

TEST_CASE("of a block round-half-even(r*n) tokens are high") {  // V30
  CHECK(count({35, 100}, Rounding::half_even, 90) == 32);
  CHECK(count({35, 100}, Rounding::half_even, 30) == 10);
  CHECK(count({1, 4}, Rounding::half_even, 6) == 2);
  CHECK(count({1, 4}, Rounding::half_even, 10) == 2);
  CHECK(count({1, 4}, Rounding::half_even, 7) == 2);  // T22
  CHECK(count({1, 4}, Rounding::half_even, 64) == 16);  // T21
  CHECK(count({1, 2}, Rounding::half_even, 1) == 0);
  CHECK(count({1, 2}, Rounding::half_even, 3) == 2);
  CHECK(count({9223372036854775806u, 9223372036854775807u}, Rounding::half_even, 1000) == 1000);
}

TEST_CASE("ratios 0 and 1, and no token at all") {  // V31
  for (const Rounding rounding : {Rounding::floor, Rounding::half_even}) {
    CHECK(count({0, 1}, rounding, 5) == 0);
    CHECK(count({1, 1}, rounding, 5) == 5);
    CHECK(count({1, 2}, rounding, 0) == 0);
    CHECK(count({1, 1}, rounding, 1) == 1);
  }
}

TEST_CASE("equal scores go to the lower index") {  // V31
  CHECK(selected({1, 2}, Rounding::floor, {1, 1, 1, 1}) == Flags{1, 1, 0, 0});
  CHECK(selected({1, 2}, Rounding::floor, {0, 2, 1, 1, 1, 3}) == Flags{0, 1, 1, 0, 0, 1});
  CHECK(selected({1, 2}, Rounding::floor, {-0.0f, 0.0f}) == Flags{1, 0});
}

TEST_CASE("infinite scores are numbers, NaN is refused") {  // V31
  CHECK(selected({1, 2}, Rounding::floor, {-kInf, 5, kInf, kInf}) == Flags{0, 0, 1, 1});
  CHECK(selected({3, 4}, Rounding::floor, {-kInf, -kInf, 3, -kInf}) == Flags{1, 1, 1, 0});
  const float scores[] = {1, std::numeric_limits<float>::quiet_NaN()};
  Flags flags(2);
  CHECK(select_tokens({1, 2}, Rounding::floor, scores, flags) == KVQ_E_INVALID);
  CHECK(select_tokens({0, 1}, Rounding::floor, scores, flags) == KVQ_E_INVALID);
}

TEST_CASE("ratios beyond 1 are refused") {
  Flags flags(1);
  const float scores[] = {1};
  CHECK(select_tokens({2, 1}, Rounding::floor, scores, flags) == KVQ_E_INVALID);
  CHECK(select_tokens({0, 0}, Rounding::floor, scores, flags) == KVQ_E_INVALID);
}

TEST_CASE("the selection is the head of a stable sort") {
  kvq_test::Random random(4);
  for (int round = 0; round < 50; round++) {
    const size_t n = 1 + random.below(200);
    std::vector<float> scores(n);
    for (float &s : scores) s = float(random.below(10));
    const uint64_t p = random.below(n + 1);
    const Flags flags = selected({p, n}, Rounding::floor, scores);
    Flags expected(n, 0);
    for (uint64_t taken = 0; taken < p; taken++) {  // the largest that is left, the first of equals
      size_t best = n;
      for (size_t i = 0; i < n; i++)
        if (!expected[i] && (best == n || scores[i] > scores[best])) best = i;
      expected[best] = 1;
    }
    REQUIRE(flags == expected);
  }
}
