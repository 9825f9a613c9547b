// The tools of the tests themselves: a wrong oracle would find every backend wrong, or right.
#include <catch2/catch_test_macros.hpp>
#include <cmath>
#include <string>
#include <vector>

#include "allocator.hpp"
#include "guard.hpp"
#include "half.hpp"
#include "oracle.hpp"
#include "random.hpp"

using namespace kvq_test;

TEST_CASE("every finite fp16 is the nearest fp16 to itself, and midpoints go to the even neighbour") {
  for (uint32_t bits = 0; bits < 0x7C00; ++bits) {
    const double value = half_value(static_cast<uint16_t>(bits)), next = half_value(static_cast<uint16_t>(bits + 1));
    REQUIRE(half_bits(value) == bits);
    REQUIRE(half_bits(-value) == (bits | 0x8000));
    if (bits + 1 == 0x7C00) break;
    REQUIRE(next > value);
    REQUIRE(half_bits((value + next) / 2) == bits + bits % 2);
  }
  CHECK(half_bits(1e9) == 0x7BFF);
  CHECK(half_bits(0x1p-25) == 0);
  CHECK(std::isinf(half_value(0x7C00)));
  CHECK_FALSE(std::signbit(entry(-0.0f)));
}

TEST_CASE("attention of one token is its value, and a learned sink takes its share") {
  Random random;
  const std::vector<float> q = random.normals(2 * 4), k = random.normals(4), v = {1, 2, 3};
  const float sinks[] = {0, 1};
  Attention a{};
  a.tokens = a.n_queries = a.kv_heads = 1, a.q_heads = 2, a.dim_k = 4, a.dim_v = 3;
  a.q = q.data(), a.k = k.data(), a.v = v.data();
  CHECK(attend(a).out == std::vector<double>{1, 2, 3, 1, 2, 3});
  a.sinks = sinks;
  const Attended r = attend(a);
  for (int head = 0; head < 2; ++head) {
    double logit = 0;
    for (int c = 0; c < 4; ++c) logit += static_cast<double>(q[head * 4 + c]) * k[c] / 2;
    const double weight = 1 / (1 + std::exp(sinks[head] - logit));
    CHECK(std::fabs(r.out[head * 3 + 2] - 3 * weight) < 1e-12);
    CHECK(std::fabs(r.lse[head] - std::log(std::exp(logit) + std::exp(static_cast<double>(sinks[head])))) < 1e-12);
  }
}

TEST_CASE("attention is causal among the newest tokens and ends at the window") {
  Attention a{};
  const std::vector<float> q(3 * 2), k(5 * 2), v = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9};
  a.tokens = 5, a.n_queries = 3, a.q_heads = a.kv_heads = 1, a.dim_k = a.dim_v = 2;
  a.q = q.data(), a.k = k.data(), a.v = v.data();
  CHECK(attend(a).out == std::vector<double>{2, 3, 3, 4, 4, 5});  // means of the first 3, 4 and 5 rows
  a.window = 1;
  CHECK(attend(a).out == std::vector<double>{4, 5, 6, 7, 8, 9});
}

TEST_CASE("the allocator counts, fails on request and notices a wrong size") {
  CountingAllocator allocator;
  const kvq_allocator table = allocator.callbacks();
  void *p = table.alloc(table.user, 100, 64);
  CHECK(allocator.bytes == 100);
  table.release(table.user, p, 99, 64);
  CHECK(allocator.mistakes == 1);
  table.release(table.user, p, 100, 64);
  CHECK(allocator.bytes == 0);
  allocator.remaining = 0;
  CHECK(table.alloc(table.user, 1, 1) == nullptr);
}

TEST_CASE("a seed gives the same data on every run, and streams differ") {
  CHECK(Random(3).normals(4) == Random(3).normals(4));
  CHECK(Random(3).normals(4) != Random(4).normals(4));
  const std::vector<float> rows = Random().rows(1000, 2, 8);
  double mean = 0;
  for (size_t i = 0; i < rows.size(); ++i) mean += rows[i] / 8000 * (i / 8 % 2);
  CHECK(std::fabs(mean - 3) < 0.5);
}

TEST_CASE("a guarded buffer holds its bytes to the last one") {
  const char text[] = "seven";
  GuardedBuffer buffer(text, sizeof text);
  buffer.freeze();
  CHECK(std::string(static_cast<char *>(buffer.data())) == text);
}
