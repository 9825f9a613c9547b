// Policies that choose pairs or channels: PN-Mix and channel split, and the centre of keys.
#include <catch2/catch_test_macros.hpp>
#include <cmath>
#include <vector>

#include "half.hpp"
#include "policy/policy.h"
#include "random.hpp"
#include "recipe/recipe.h"
#include "recipe_kit.hpp"

using namespace kvq;
using kvq_test::layer;
using kvq_test::parsed;

namespace {

using Mask = std::pmr::vector<uint8_t>;

std::vector<uint32_t> chosen(const Mask &mask) {
  std::vector<uint32_t> list;
  for (uint32_t i = 0; i < mask.size(); i++)
    if (mask[i]) list.push_back(i);
  return list;
}

LayerStatistics some_statistics(const LayerShape &shape, bool queries = true) {
  LayerStatistics statistics(std::pmr::get_default_resource());
  reset_statistics(shape, &statistics);
  for (HeadStatistics &head : statistics.heads) head.nk = 1, head.nq = queries;
  return statistics;
}

LayerTables decided(const Recipe &recipe, const LayerShape &shape, const LayerStatistics &statistics) {
  LayerTables tables(std::pmr::get_default_resource());
  if (decide_tables(recipe.policy, recipe.layers[0], shape, statistics, &tables) != KVQ_OK) FAIL(failure_detail());
  return tables;
}

std::string pnmix(const std::string &keys, const std::string &unit = "") {
  return "k=pair-mix(low=1,high=3,group=64" + unit + ");v=raw;policy=pnmix(" + keys + ")";
}

}  // namespace

TEST_CASE("pn-mix picks the pairs with the largest product of query and key norms, ties to the lower") {
  const LayerShape shape = layer(12);
  LayerStatistics statistics = some_statistics(shape);
  const uint64_t q[] = {1, 2, 6, 4, 3, 1}, k[] = {12, 6, 1, 3, 4, 1};  // products 12, 12, 6, 12, 12, 1
  for (int p = 0; p < 6; p++) statistics.heads[0].pairs[p].q1 = q[p], statistics.heads[0].pairs[p].k1 = k[p];
  CHECK(chosen(decided(parsed(pnmix("r=1/2"), {shape}), shape, statistics).k[0]) == std::vector<uint32_t>{0, 1, 3});
  CHECK(chosen(decided(parsed(pnmix("r=5/6"), {shape}), shape, statistics).k[0]) == std::vector<uint32_t>{0, 1, 2, 3, 4});
  CHECK(chosen(decided(parsed(pnmix("r=1/2,criterion=k-pair"), {shape}), shape, statistics).k[0]) == std::vector<uint32_t>{0, 1, 4});
}

TEST_CASE("pn-mix by channel ranks the range or the sum of magnitudes") {
  const LayerShape shape = layer(4);
  LayerStatistics statistics = some_statistics(shape, false);
  const float lowest[] = {-1, 0, -5, 2}, highest[] = {1, 4, -2, 6};  // ranges 2, 4, 3, 4
  const uint64_t abs[] = {9, 7, 9, 9};
  for (int c = 0; c < 4; c++)
    statistics.heads[0].k[c].min = lowest[c], statistics.heads[0].k[c].max = highest[c], statistics.heads[0].k[c].abs = abs[c];
  const auto mask = [&](const char *criterion, const char *r) {
    const std::string keys = "r=" + std::string(r) + ",criterion=" + criterion;
    return chosen(decided(parsed(pnmix(keys, ",unit=channel"), {shape}), shape, statistics).k[0]);
  };
  CHECK(mask("k-range", "1/4") == std::vector<uint32_t>{1});
  CHECK(mask("k-range", "3/4") == std::vector<uint32_t>{1, 2, 3});
  CHECK(mask("k-magnitude", "1/2") == std::vector<uint32_t>{0, 2});
}

TEST_CASE("exact sums decide where doubles would see a tie") {
  const LayerShape shape = layer(4);
  LayerStatistics statistics = some_statistics(shape);
  statistics.heads[0].pairs[0].k1 = UInt128(1) << 60;
  statistics.heads[0].pairs[1].k1 = (UInt128(1) << 60) + 1;
  CHECK(chosen(decided(parsed(pnmix("r=1/2,criterion=k-pair"), {shape}), shape, statistics).k[0]) == std::vector<uint32_t>{1});
}

TEST_CASE("the number of salient pairs is floor(r * D/2)") {  // V32
  const LayerShape shape = layer(128);
  const auto count = [&](const char *r) {
    const std::string keys = "r=" + std::string(r);
    return chosen(decided(parsed(pnmix(keys), {shape}), shape, some_statistics(shape)).k[0]).size();
  };
  CHECK(count("2/5") == 25);
  CHECK(count("40/100") == 25);
  CHECK(count("1/2") == 32);
  CHECK(count("0") == 0);
  CHECK(count("1") == 64);
  CHECK(count("9223372036854775806/9223372036854775807") == 63);
}

TEST_CASE("every KV head has its own mask") {  // V32
  const LayerShape shape = layer(8, 8, 2);
  LayerStatistics statistics = some_statistics(shape);
  for (int p = 0; p < 4; p++)
    statistics.heads[0].pairs[p].q1 = statistics.heads[0].pairs[p].k1 = 1 + p,
    statistics.heads[1].pairs[p].q1 = statistics.heads[1].pairs[p].k1 = 9 - p;
  const LayerTables tables = decided(parsed(pnmix("r=1/2"), {shape}), shape, statistics);
  CHECK(chosen(tables.k[0]) == std::vector<uint32_t>{2, 3});
  CHECK(chosen(tables.k[1]) == std::vector<uint32_t>{0, 1});
  CHECK(tables.v[0].empty());
}

TEST_CASE("channel split ranks keys and values by themselves") {
  const LayerShape shape = layer(4, 6);
  const Recipe recipe = parsed("tq-split", {shape});
  LayerStatistics statistics = some_statistics(shape, false);
  const uint64_t k[] = {5, 7, 7, 7}, v[] = {1, 2, 3, 3, 2, 1};
  for (int c = 0; c < 4; c++) statistics.heads[0].k[c].abs = k[c];
  for (int c = 0; c < 6; c++) statistics.heads[0].v[c].abs = v[c];
  const LayerTables tables = decided(recipe, shape, statistics);
  CHECK(chosen(tables.k[0]) == std::vector<uint32_t>{1, 2});
  CHECK(chosen(tables.v[0]) == std::vector<uint32_t>{1, 2, 3});
}

TEST_CASE("a mask that the text gives is not decided again") {
  const LayerShape shape = layer(8);
  const Recipe recipe = parsed("k=channel-split(high=8,low=4,mask=03);v=channel-split(high=8,low=4);policy=channel-split", {shape});
  const LayerTables tables = decided(recipe, shape, some_statistics(shape));
  CHECK(tables.k[0].empty());
  CHECK(chosen(tables.v[0]) == std::vector<uint32_t>{0, 1, 2, 3});
}

TEST_CASE("a policy without the statistics that it needs is refused as a matter of state") {
  const LayerShape shape = layer(8);
  LayerTables tables(std::pmr::get_default_resource());
  const auto status = [&](const std::string &text, uint64_t nk, uint64_t nq) {
    const Recipe recipe = parsed(text, {shape});
    LayerStatistics statistics = some_statistics(shape);
    statistics.heads[0].nk = nk, statistics.heads[0].nq = nq;
    return decide_tables(recipe.policy, recipe.layers[0], shape, statistics, &tables);
  };
  CHECK(status(pnmix("r=1/2"), 0, 1) == KVQ_E_STATE);
  CHECK(status(pnmix("r=1/2"), 1, 0) == KVQ_E_STATE);
  CHECK(status(pnmix("r=1/2,criterion=k-pair"), 1, 0) == KVQ_OK);
  CHECK(status(pnmix("r=1/2,criterion=k-pair"), 0, 0) == KVQ_E_STATE);
  CHECK(status("tq-split", 1, 0) == KVQ_OK);
  CHECK(status("tq-split", 0, 0) == KVQ_E_STATE);
  CHECK(status("tq-2", 0, 0) == KVQ_OK);
}

TEST_CASE("the table of policies says what each needs and whose it is") {
  const auto policy = [](const std::string &text) { return parsed(text, {layer(128)}).policy; };
  CHECK(policy_owner(policy("tq-2")) == Owner::nobody);
  CHECK(policy_owner(policy("semkv")) == Owner::nobody);
  CHECK(policy_owner(policy("pnmix")) == Owner::sequence);
  CHECK(policy_owner(policy("kvq-2")) == Owner::sequence);
  CHECK(policy_owner(policy("tq-split")) == Owner::sequence);
  CHECK(policy_owner(policy("blockgtq-k3v3")) == Owner::cache);
  CHECK(!policy_needs_statistics(policy("kivi-2")));
  CHECK(!policy_needs_statistics(policy("semkv")));
  CHECK(policy_needs_statistics(policy("tq-split")));
  CHECK(!policy_needs_queries(policy("tq-split")));
  CHECK(policy_needs_queries(policy("pnmix")));
  CHECK(!policy_needs_queries(policy(pnmix("r=1/2,criterion=k-pair"))));
  CHECK(policy_needs_queries(policy("kvq-2")));
  CHECK(!policy_needs_queries(policy("k=width-groups;policy=blockgtq(avg=2,score=k-var)")));
  CHECK(policy_needs_queries(policy("k=width-groups;policy=blockgtq(avg=2,score=q-only)")));
}

TEST_CASE("the centre is the mean per channel, rounded once to fp32 and once to fp16") {
  CenterSum sum(3, std::pmr::get_default_resource());
  std::vector<uint16_t> mu(3, 7);
  sum.mean(mu);
  CHECK(mu == std::vector<uint16_t>{0, 0, 0});
  const auto add = [&](double a, double b, double c) {
    const uint16_t row[] = {kvq_test::half_bits(a), kvq_test::half_bits(b), kvq_test::half_bits(c)};
    sum.add(row, 1);
  };
  add(1, 65504, 0x1p-24);
  add(2, 65504, -0x1p-24);
  add(2, 65504, 0x1p-24);
  sum.mean(mu);
  CHECK(mu[0] == kvq_test::half_bits(double(5.0f / 3.0f)));
  CHECK(mu[1] == 0x7bff);
  CHECK(mu[2] == 0);  // 2^-24 / 3 rounds to zero
}

TEST_CASE("the centre does not drift over many tokens") {
  const size_t n = 100000;
  CenterSum sum(1, std::pmr::get_default_resource());
  const std::vector<uint16_t> rows(n, kvq_test::half_bits(921.5));
  sum.add(rows.data(), n);
  const uint16_t last = kvq_test::half_bits(-921.5);
  sum.add(&last, 1);
  std::vector<uint16_t> mu(1);
  sum.mean(mu);
  CHECK(mu[0] == kvq_test::half_bits(double(float((double(n) - 1) * 921.5 / double(n + 1)))));
}
