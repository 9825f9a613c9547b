// Exact statistics: sums against integers worked out by hand or by the rule itself in wide arithmetic, and independence of order.
#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <cmath>
#include <numeric>
#include <vector>

#include "half.hpp"
#include "policy/policy.h"
#include "random.hpp"
#include "recipe/recipe.h"
#include "recipe_kit.hpp"

using namespace kvq;
using kvq_test::half_bits;
using kvq_test::half_value;

namespace {

using Rows = std::vector<uint16_t>;

Rows halves(std::initializer_list<double> values) {
  Rows rows;
  for (const double v : values) rows.push_back(half_bits(v));
  return rows;
}

HeadStatistics empty(uint32_t dim, uint32_t dim_v = 0) {
  HeadStatistics statistics(std::pmr::get_default_resource());
  statistics.pairs.resize(dim / 2);
  statistics.k.resize(dim);
  statistics.v.resize(dim_v);
  return statistics;
}

HeadShape shape_of(uint32_t dim, uint32_t layout = KVQ_ROPE_HALF, uint32_t rotary = 0, uint32_t first = 0) {
  return {dim, KVQ_TENSOR_K, layout, rotary ? rotary : dim, first};
}

bool same(const HeadStatistics &a, const HeadStatistics &b) {
  const auto pair = [](const PairSums &x, const PairSums &y) { return x.k1 == y.k1 && x.k2 == y.k2 && x.q1 == y.q1 && x.q2 == y.q2; };
  const auto channel = [](const ChannelSums &x, const ChannelSums &y) {
    return x.sum == y.sum && x.abs == y.abs && x.min == y.min && x.max == y.max;
  };
  return a.nk == b.nk && a.nq == b.nq && std::equal(a.pairs.begin(), a.pairs.end(), b.pairs.begin(), pair) &&
         std::equal(a.k.begin(), a.k.end(), b.k.begin(), channel) && std::equal(a.v.begin(), a.v.end(), b.v.begin(), channel);
}

// The rule by way of long double and wide integers: every step but the roundings to fp32 is exact there.
UInt128 units(float v) { return UInt128(std::floor((long double)v * 16777216.0L)); }
float rounded_square(double u, double v) { return float(double(float(u * u)) + double(float(v * v))); }

}  // namespace

TEST_CASE("norms and squares of pairs count in units of 2^-24, rounded down") {
  HeadStatistics s = empty(4);
  const Rows k = halves({3, 0x1p-24, 4, 0x1p-24});  // half layout: pairs (3, 4) and (2^-24, 2^-24)
  add_key_statistics(shape_of(4), k.data(), 4, 1, &s);
  CHECK(s.nk == 1);
  CHECK(s.pairs[0].k1 == UInt128(5) << 24);
  CHECK(s.pairs[0].k2 == UInt128(25) << 24);
  CHECK(s.pairs[1].k1 == 1);  // sqrt(2) * 2^-24
  CHECK(s.pairs[1].k2 == 0);  // 2^-47
  CHECK(s.pairs[0].q1 == 0);
  CHECK(s.nq == 0);
}

TEST_CASE("the largest values fit") {
  HeadStatistics s = empty(2);
  const Rows row = halves({65504, -65504});
  Rows rows;
  for (int t = 0; t < 1000; t++) rows.insert(rows.end(), row.begin(), row.end());
  add_key_statistics(shape_of(2), rows.data(), 2, 1000, &s);
  // 65504^2 = 4290774016 is an fp32 number (16-bit multiple of 2^10), twice it as well; sqrt(2) * 65504 = 92636.6...
  CHECK(s.pairs[0].k2 == (UInt128(2) * 4290774016u * 1000) << 24);
  CHECK(s.pairs[0].k1 == units(std::sqrt(8581548032.0f)) * 1000);
  CHECK(s.k[0].sum == (Int128(65504) * 1000) << 24);
  CHECK(s.k[1].sum == -((Int128(65504) * 1000) << 24));
  CHECK(s.k[1].abs == (UInt128(65504) * 1000) << 24);
}

TEST_CASE("channels have exact sums, and extremes that start at infinity") {
  HeadStatistics s = empty(2, 2);
  CHECK(std::isinf(s.k[0].min));
  const Rows rows = halves({1.5, -2, -0.25, 0x1p-24, 3, -7});
  add_key_statistics(shape_of(2), rows.data(), 2, 3, &s);
  add_value_statistics(rows.data(), 2, 3, &s);
  CHECK(s.k[0].sum == Int128(4.25 * 16777216));
  CHECK(s.k[0].abs == UInt128(4.75 * 16777216));
  CHECK(s.k[1].sum == -Int128(9) * 16777216 + 1);
  CHECK(s.k[1].abs == UInt128(9) * 16777216 + 1);
  CHECK(s.k[0].min == -0.25f);
  CHECK(s.k[0].max == 3.0f);
  CHECK(s.k[1].min == -7.0f);
  CHECK(s.k[1].max == 0x1p-24f);
  CHECK(s.v[1].sum == s.k[1].sum);
  CHECK(s.nk == 3);
}

TEST_CASE("pairs follow the rotary layout") {
  const Rows row = halves({1, 2, 4, 8, 16, 32, 64, 128});
  const auto squares = [&](HeadShape shape) {
    HeadStatistics s = empty(8);
    add_key_statistics(shape, row.data(), 8, 1, &s);
    std::vector<uint64_t> values;
    for (const PairSums &pair : s.pairs) values.push_back(uint64_t(pair.k2 >> 24));
    return values;
  };
  CHECK(squares(shape_of(8)) == std::vector<uint64_t>{1 + 256, 4 + 1024, 16 + 4096, 64 + 16384});
  CHECK(squares(shape_of(8, KVQ_ROPE_ADJACENT)) == std::vector<uint64_t>{1 + 4, 16 + 64, 256 + 1024, 4096 + 16384});
  // Rotary channels 2..5 first, then the remaining ones by neighbours.
  CHECK(squares(shape_of(8, KVQ_ROPE_HALF, 4, 2)) == std::vector<uint64_t>{16 + 256, 64 + 1024, 1 + 4, 4096 + 16384});
}

TEST_CASE("sums follow the rule to the last unit, for random rows of any size") {
  kvq_test::Random random(1);
  for (const uint32_t dim : {2u, 6u, 80u}) {
    const size_t n = 300;
    Rows rows(n * dim);
    for (uint16_t &x : rows) x = half_bits(std::ldexp(random.normal(), int(random.below(20)) - 12));
    const HeadShape shape = shape_of(dim);
    HeadStatistics s = empty(dim);
    add_key_statistics(shape, rows.data(), dim, n, &s);
    add_query_statistics(shape, rows.data(), dim, n, &s);
    for (uint32_t p = 0; p < dim / 2; p++) {
      UInt128 norms = 0, squares = 0;
      for (size_t t = 0; t < n; t++) {
        const float square = rounded_square(half_value(rows[t * dim + p]), half_value(rows[t * dim + p + dim / 2]));
        norms += units(float(std::sqrt((long double)square)));  // double rounding cannot occur: 64 > 2 * 24 + 2 bits
        squares += units(square);
      }
      CHECK(s.pairs[p].k1 == norms);
      CHECK(s.pairs[p].k2 == squares);
      CHECK(s.pairs[p].q1 == norms);
      CHECK(s.pairs[p].q2 == squares);
    }
  }
}

TEST_CASE("neither order nor chunks nor strides matter") {  // V33
  kvq_test::Random random(2);
  const uint32_t dim = 16;
  const size_t n = 200, stride = 21;
  Rows rows(n * stride);
  for (uint16_t &x : rows) x = half_bits(random.normal() * 100);
  const HeadShape shape = shape_of(dim);
  HeadStatistics whole = empty(dim, dim), pieces = empty(dim, dim), shuffled = empty(dim, dim);
  const auto add = [&](size_t first, size_t count, HeadStatistics *s) {
    add_key_statistics(shape, &rows[first * stride], stride, count, s);
    add_value_statistics(&rows[first * stride], stride, count, s);
    add_query_statistics(shape, &rows[first * stride], stride, count, s);
  };
  add(0, n, &whole);
  for (size_t first = 0, count; first < n; first += count) add(first, count = std::min<size_t>(n - first, random.below(90)), &pieces);
  std::vector<size_t> order(n);
  std::iota(order.begin(), order.end(), 0u);
  for (size_t i = n; i > 1; i--) std::swap(order[i - 1], order[random.below(i)]);
  for (const size_t t : order) add(t, 1, &shuffled);
  CHECK(whole.nk == n);
  CHECK(same(whole, pieces));
  CHECK(same(whole, shuffled));
}

TEST_CASE("reset makes one head per KV head, in the memory of the layer") {
  LayerStatistics statistics(std::pmr::get_default_resource());
  reset_statistics(kvq_test::layer(8, 6, 3), &statistics);
  REQUIRE(statistics.heads.size() == 3);
  CHECK(statistics.heads[2].pairs.size() == 4);
  CHECK(statistics.heads[2].k.size() == 8);
  CHECK(statistics.heads[2].v.size() == 6);
  statistics.heads[1].nk = 5;
  reset_statistics(kvq_test::layer(4, 4, 2), &statistics);
  REQUIRE(statistics.heads.size() == 2);
  CHECK(statistics.heads[1].nk == 0);
}

TEST_CASE("128-bit sums convert to double by rounding to nearest even") {  // section 1.2, a property of the compiler
  const UInt128 one = 1;
  volatile int runtime = 0;  // not at compile time
  const auto convert = [&](UInt128 v) { return double(v + UInt128(runtime)); };
  CHECK(convert((one << 53) + 1) == 0x1p53);
  CHECK(convert((one << 53) + 3) == 0x1p53 + 4);
  CHECK(convert((one << 100) + (one << 47)) == 0x1p100);              // a tie to even
  CHECK(convert((one << 100) + (one << 47) + 1) == 0x1p100 + 0x1p48);  // just above it
  CHECK(convert((one << 100) + (UInt128(3) << 47)) == 0x1p100 + 0x1p49);
  CHECK(convert((one << 100) + (one << 47) - 1) == 0x1p100);
  CHECK(convert((one << 127) - 1) == 0x1p127);
  const auto negative = [&](Int128 v) { return double(v + Int128(runtime)); };
  CHECK(negative(-(Int128(1) << 100) - (Int128(1) << 47) - 1) == -(0x1p100 + 0x1p48));
  CHECK(negative(-(Int128(1) << 53) - 1) == -0x1p53);
}
