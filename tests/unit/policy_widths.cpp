// Width policies: scores from statistics, the greedy, its ties and limits.
#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "policy/policy.h"
#include "random.hpp"
#include "recipe/recipe.h"
#include "recipe_kit.hpp"

using namespace kvq;
using kvq_test::layer;
using kvq_test::parsed;

namespace {

using Widths = std::vector<uint8_t>;

Widths allocated(const std::vector<double> &scores, Ratio avg, uint32_t bmin = 1, uint32_t bmax = 8, uint32_t unit = 1) {
  Widths widths(scores.size());
  if (allocate_widths(scores, avg, bmin, bmax, unit, widths) != KVQ_OK) FAIL(failure_detail());
  return widths;
}

uint64_t sum(const Widths &widths) { return std::accumulate(widths.begin(), widths.end(), uint64_t(0)); }

double cost(const std::vector<double> &scores, const Widths &widths) {
  double total = 0;
  for (size_t i = 0; i < scores.size(); i++) total += scores[i] * std::pow(4.0, -int(widths[i]));
  return total;
}

// Least cost of any widths of 4 pairs in 1..4 that add up to `budget`.
double least_cost(const std::vector<double> &scores, uint64_t budget) {
  double best = std::numeric_limits<double>::infinity();
  for (int n = 0; n < 256; n++) {
    const Widths widths = {uint8_t(1 + (n & 3)), uint8_t(1 + (n >> 2 & 3)), uint8_t(1 + (n >> 4 & 3)), uint8_t(1 + (n >> 6))};
    if (sum(widths) == budget) best = std::min(best, cost(scores, widths));
  }
  return best;
}

}  // namespace

TEST_CASE("equal scores get equal widths, the rest goes to the lower pairs") {  // V34
  const std::vector<double> equal(64, 5.0), zero(64, 0.0);
  CHECK(allocated(equal, {3, 1}) == Widths(64, 3));
  Widths half(64, 2);
  std::fill_n(half.begin(), 32, uint8_t(3));
  CHECK(allocated(equal, {5, 2}) == half);
  CHECK(allocated(zero, {5, 2}) == half);
  CHECK(allocated(equal, {5, 2}, 1, 8, 8) == half);  // runs of 8 keep the order of equal pairs
}

TEST_CASE("the budget is spent up to the limits") {
  std::vector<double> scores(64, 0.0);
  scores[9] = 1;
  const Widths widths = allocated(scores, {3, 1});
  CHECK(widths[9] == 8);
  CHECK(sum(widths) == 192);
  CHECK(allocated(scores, {100, 1}) == Widths(64, 8));
  CHECK(allocated(scores, {100, 1}, 1, 4) == Widths(64, 4));
  CHECK(allocated(scores, {0, 1}, 0, 8) == Widths(64, 0));
  CHECK(sum(allocated(scores, {129, 64})) == 129);
  CHECK(sum(allocated(scores, {1299, 640})) == 129);  // floor(129.9)
}

TEST_CASE("the greedy is as good as every assignment of four pairs") {  // V34
  kvq_test::Random random(3);
  for (int round = 0; round < 40; round++) {
    std::vector<double> scores(4);
    for (double &s : scores) s = std::exp2(8 * random.uniform() - 4);
    for (uint64_t budget = 4; budget <= 16; budget++) {
      const Widths widths = allocated(scores, {budget, 4}, 1, 4);
      REQUIRE(sum(widths) == budget);
      REQUIRE(cost(scores, widths) == least_cost(scores, budget));
    }
  }
}

TEST_CASE("equal gains go to the pair with fewer bits, then to the lower") {
  // s * 4^-b: with scores 4 and 1, pair 0 at one bit more ties with pair 1.
  CHECK(allocated({4, 1}, {3, 2}, 1, 8) == Widths{2, 1});
  CHECK(allocated({4, 1}, {4, 2}, 1, 8) == Widths{2, 2});  // 4/16 = 1/4: pair 1 has fewer bits
  CHECK(allocated({1, 4}, {4, 2}, 1, 8) == Widths{2, 2});
  CHECK(allocated({1, 4, 1}, {5, 3}, 1, 8) == Widths{2, 2, 1});
}

TEST_CASE("scores over sixty orders of magnitude are compared in fp64") {  // V35
  std::vector<double> scores(64);
  for (int i = 0; i < 64; i++) scores[i] = std::pow(10.0, 30 - double(i) * 60 / 63);
  const Widths widths = allocated(scores, {3, 1});
  CHECK(sum(widths) == 192);
  CHECK(std::is_sorted(widths.rbegin(), widths.rend()));
  CHECK(widths[0] == 8);
  CHECK(widths[63] == 1);
}

TEST_CASE("scores that are no finite numbers above zero are refused") {  // V35
  Widths widths(2);
  for (const double bad : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity(), -1.0, -1e-300}) {
    const double scores[] = {1, bad};
    CHECK(allocate_widths(scores, {2, 1}, 1, 8, 1, widths) == KVQ_E_INVALID);
  }
  const double zero[] = {1, -0.0};
  CHECK(allocate_widths(zero, {2, 1}, 1, 8, 1, widths) == KVQ_OK);
}

TEST_CASE("budgets and limits out of range are refused") {
  const std::vector<double> scores(8, 1.0);
  Widths widths(8);
  CHECK(allocate_widths(scores, {7, 8}, 1, 8, 1, widths) == KVQ_E_INVALID);
  CHECK(allocate_widths(scores, {1, 1}, 1, 8, 1, widths) == KVQ_OK);
  CHECK(allocate_widths(scores, {2, 1}, 3, 2, 1, widths) == KVQ_E_INVALID);
  CHECK(allocate_widths(scores, {2, 1}, 1, 9, 1, widths) == KVQ_E_INVALID);
  CHECK(allocate_widths(scores, {2, 1}, 1, 8, 3, widths) == KVQ_E_INVALID);
  CHECK(allocate_widths(scores, {2, 1}, 1, 8, 0, widths) == KVQ_E_INVALID);
}

TEST_CASE("runs of pairs move together, in the order of their scores") {
  // Sorted: pairs 3 (9), 1 (5), 0 (4), 2 (4): runs {3, 1} with 14 and {0, 2} with 8.  Budget 4 * 2 - 4 = 4 bits: 2 moves.
  // 14/4 > 8/4, then 14/16 < 8/4.
  CHECK(allocated({4, 5, 4, 9}, {2, 1}, 1, 8, 2) == Widths{2, 2, 2, 2});
  CHECK(allocated({4, 5, 4, 9}, {3, 2}, 1, 8, 2) == Widths{1, 2, 1, 2});
  // 7 bits of budget behind bmin: three moves of 2, one bit is left over.
  CHECK(sum(allocated({4, 5, 4, 9}, {11, 4}, 1, 8, 2)) == 4 + 6);
  // Equal scores: ties of the sort go to the lower pair, ties of gain to fewer bits and then the earlier run.
  CHECK(allocated({1, 1, 1, 1}, {3, 2}, 1, 8, 2) == Widths{2, 2, 1, 1});
  CHECK(allocated({1, 1, 1, 1}, {2, 1}, 1, 8, 2) == Widths{2, 2, 2, 2});
  CHECK(allocated({1, 2, 2, 1}, {3, 2}, 1, 8, 2) == Widths{1, 2, 2, 1});
  CHECK(allocated({0, 0, 0, 7}, {10, 4}, 1, 3, 2) == Widths{3, 2, 2, 3});  // a full run passes its turn on
}

TEST_CASE("a run's score is summed in sorted order") {
  // 1e16 + 1 + 1 = 1e16 in that order; the second run is the same pairs of scores, so the runs tie and the earlier one wins.
  const std::vector<double> scores = {1, 1e16, 1, 1e16 + 2, 1, 1};
  // Sorted: 3 (1e16+2), 1 (1e16), then 0, 2, 4, 5.  Runs of 3: {3, 1, 0} and {2, 4, 5}.
  CHECK(allocated(scores, {3, 2}, 1, 8, 3) == Widths{2, 2, 1, 2, 1, 1});
}

TEST_CASE("scores are the formulas of section 6 over the exact means") {
  HeadStatistics statistics(std::pmr::get_default_resource());
  statistics.pairs.resize(1), statistics.k.resize(2);
  const double unit = 16777216;
  // Two keys (1, 3) and (3, 7): k = (10 + 58) / 2 = 34, means 2 and 5, variance 34 - 4 - 25 = 5, ranges 2 and 4.
  // Queries with a mean squared norm of 9.
  statistics.nk = 2, statistics.nq = 4;
  statistics.pairs[0].k2 = UInt128(68 * unit), statistics.pairs[0].q2 = UInt128(36 * unit);
  statistics.k[0].sum = Int128(4 * unit), statistics.k[0].min = 1, statistics.k[0].max = 3;
  statistics.k[1].sum = Int128(10 * unit), statistics.k[1].min = 3, statistics.k[1].max = 7;
  const HeadShape shape{2, KVQ_TENSOR_K, KVQ_ROPE_HALF, 2, 0};
  const auto score = [&](Score rule) {
    double value = -1;
    CHECK(width_scores(rule, statistics, shape, {&value, 1}) == KVQ_OK);
    return value;
  };
  CHECK(score(Score::qk_avg) == 21.5);
  CHECK(score(Score::qk_max) == 34);
  CHECK(score(Score::qk_product) == std::sqrt(306.0));
  CHECK(score(Score::k_only) == 34);
  CHECK(score(Score::q_only) == 9);
  CHECK(score(Score::k_var) == 5);
  CHECK(score(Score::q_var) == 45);
  CHECK(score(Score::q_geo) == 15);
  CHECK(score(Score::q_range) == 90);
  statistics.pairs[0].k2 = UInt128(57 * unit);  // 28.5 - 4 - 25 < 0, as rounding of squares may leave it
  CHECK(score(Score::k_var) == 0);
  CHECK(score(Score::q_var) == 0);
}

TEST_CASE("scores need the statistics of their side") {
  HeadStatistics statistics(std::pmr::get_default_resource());
  statistics.pairs.resize(1), statistics.k.resize(2);
  const HeadShape shape{2, KVQ_TENSOR_K, KVQ_ROPE_HALF, 2, 0};
  const auto status = [&](Score rule, uint64_t nk, uint64_t nq) {
    double value;
    statistics.nk = nk, statistics.nq = nq;
    return width_scores(rule, statistics, shape, {&value, 1});
  };
  for (const Score rule : {Score::qk_avg, Score::qk_max, Score::qk_product, Score::q_var, Score::q_geo, Score::q_range}) {
    CHECK(status(rule, 1, 0) == KVQ_E_STATE);
    CHECK(status(rule, 0, 1) == KVQ_E_STATE);
  }
  CHECK(status(Score::k_only, 1, 0) == KVQ_OK);
  CHECK(status(Score::k_var, 0, 1) == KVQ_E_STATE);
  CHECK(status(Score::q_only, 0, 1) == KVQ_OK);
  CHECK(status(Score::q_only, 1, 0) == KVQ_E_STATE);
}

TEST_CASE("decided widths follow the statistics of each head and the recipe's limits") {
  const LayerShape shape = layer(16, 16, 2);
  const Recipe recipe = parsed("k=channel-widths(group=64);v=raw;policy=pair-widths(avg=2,bmin=1,bmax=3,score=k-only)", {shape});
  LayerStatistics statistics(std::pmr::get_default_resource());
  reset_statistics(shape, &statistics);
  for (int p = 0; p < 8; p++) {
    statistics.heads[0].pairs[p].k2 = UInt128(1) << (24 + 4 * p);
    statistics.heads[1].pairs[p].k2 = UInt128(1) << (52 - 4 * p);
  }
  statistics.heads[0].nk = statistics.heads[1].nk = 1;
  LayerTables tables(std::pmr::get_default_resource());
  REQUIRE(decide_tables(recipe.policy, recipe.layers[0], shape, statistics, &tables) == KVQ_OK);
  CHECK(tables.k[0] == std::pmr::vector<uint8_t>{1, 1, 1, 1, 3, 3, 3, 3});
  CHECK(tables.k[1] == std::pmr::vector<uint8_t>{3, 3, 3, 3, 1, 1, 1, 1});
}
