// The policy blob: what is written comes back, and nothing else does.
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <string>
#include <vector>

#include "policy/policy.h"
#include "random.hpp"
#include "recipe/recipe.h"
#include "recipe_kit.hpp"

using namespace kvq;
using Catch::Matchers::ContainsSubstring;
using kvq_test::layer;
using kvq_test::numbered;
using kvq_test::parsed;

namespace {

using Blob = std::pmr::vector<uint8_t>;
using Tables = std::pmr::vector<LayerTables>;

// A cache of three layers, the last of which reads the first.
struct Setting {
  std::vector<LayerShape> shapes;
  Recipe recipe;
  Tables tables;

  explicit Setting(std::string_view text, uint32_t dim = 16)
      : shapes(numbered({layer(dim, dim, 2), layer(dim, dim, 2), layer(dim, dim, 2)})), recipe(std::pmr::get_default_resource()) {
    shapes[2].source = 0;
    if (parse_recipe(text, shapes, &recipe) != KVQ_OK) FAIL(failure_detail());
    for (uint32_t l = 0; l < 3; l++) {
      LayerTables &table = tables.emplace_back(std::pmr::get_default_resource());
      if (l == 2) continue;
      LayerStatistics statistics(std::pmr::get_default_resource());
      reset_statistics(shapes[l], &statistics);
      kvq_test::Random random(7 + l);
      for (HeadStatistics &head : statistics.heads) {
        head.nk = head.nq = 1;
        for (PairSums &pair : head.pairs) pair.k1 = pair.k2 = random.below(1 << 30), pair.q1 = pair.q2 = random.below(1 << 30);
      }
      if (decide_tables(recipe.policy, recipe.layers[l], shapes[l], statistics, &table) != KVQ_OK) FAIL(failure_detail());
      if (recipe.layers[l].k[0].center)
        table.mu.assign(2, std::pmr::vector<uint16_t>(dim, uint16_t(0x3c00 + l)));
    }
  }

  Blob written() const {
    Blob blob;
    CHECK(write_policy_blob(recipe.text, shapes, tables, &blob) == KVQ_OK);
    return blob;
  }
  Status read(const Blob &blob, Tables *out) const { return read_policy_blob(blob.data(), blob.size(), recipe.text, shapes, out); }
};

// The blob with bytes changed and the hash set right again: what a hostile writer could make.
Blob rehashed(Blob blob) {
  uint64_t hash = 14695981039346656037u;  // FNV-1a, 64 bits
  for (size_t i = 0; i + 8 < blob.size(); i++) hash = (hash ^ blob[i]) * 1099511628211u;
  for (int i = 0; i < 8; i++) blob[blob.size() - 8 + i] = uint8_t(hash >> (8 * i));
  return blob;
}

constexpr std::string_view kPairWidths = "k=channel-widths(group=64);v=raw;policy=pair-widths(avg=2,bmin=1,bmax=4,score=k-only)";

}  // namespace

TEST_CASE("tables and centres come back as they were") {
  for (const std::string_view text : {kPairWidths, std::string_view("k=pair-mix(low=1,high=3,group=64);policy=pnmix(r=1/2)"),
                                      std::string_view("tq-split"), std::string_view("tq-2c"), std::string_view("blockgtq-k3v3-fast"),
                                      std::string_view("kivi-2")}) {
    const Setting setting(text);
    Tables read(std::pmr::get_default_resource());
    INFO(text);
    if (setting.read(setting.written(), &read) != KVQ_OK) FAIL(failure_detail());
    REQUIRE(read.size() == 3);
    for (int l = 0; l < 2; l++) {
      CHECK(read[l].k == setting.tables[l].k);
      CHECK(read[l].v == setting.tables[l].v);
      if (setting.recipe.layers[l].k[0].center) CHECK(read[l].mu == setting.tables[l].mu);
    }
    CHECK(read[2].k.size() == 2);
    CHECK(read[2].k[0].empty());
  }
}

TEST_CASE("a blob may hold only tables or only centres") {
  Setting setting("blockgtq-k3v3-fast");
  Setting cache = setting;
  for (LayerTables &table : cache.tables) table.mu.clear();
  Tables read;
  CHECK(setting.read(cache.written(), &read) == KVQ_OK);
  CHECK(read[0].mu[1].empty());
  CHECK(read[1].k == setting.tables[1].k);
  cache.tables[0].mu = setting.tables[0].mu;  // of one layer only
  CHECK(setting.read(cache.written(), &read) == KVQ_E_CORRUPT);
  cache = setting;
  cache.tables[1].k[1].clear();
  CHECK(setting.read(cache.written(), &read) == KVQ_E_CORRUPT);
}

TEST_CASE("cut and flipped blobs are corrupt, and leave the tables alone") {
  const Setting setting(kPairWidths);
  const Blob blob = setting.written();
  Tables read;
  REQUIRE(setting.read(blob, &read) == KVQ_OK);
  for (size_t size = 0; size < blob.size(); size++) {
    const Blob cut(blob.begin(), blob.begin() + long(size));
    REQUIRE(setting.read(cut, &read) == KVQ_E_CORRUPT);
  }
  for (size_t bit = 0; bit < 8 * blob.size(); bit++) {
    Blob flipped = blob;
    flipped[bit / 8] ^= uint8_t(1 << bit % 8);
    REQUIRE(setting.read(flipped, &read) == KVQ_E_CORRUPT);
  }
  CHECK(read[0].k == setting.tables[0].k);
  Blob longer = blob;
  longer.insert(longer.end() - 8, 0);
  CHECK(setting.read(rehashed(longer), &read) == KVQ_E_CORRUPT);
}

TEST_CASE("a changed blob with a right hash reads as valid tables of the recipe or not at all") {
  const Setting setting(kPairWidths);
  const Blob blob = setting.written();
  for (size_t i = 4; i + 8 < blob.size(); i++)
    for (const uint8_t value : {0x00, 0x01, 0x05, 0x7f, 0x80, 0xff}) {
      Blob changed = blob;
      changed[i] = value;
      Tables read;
      if (setting.read(rehashed(changed), &read) != KVQ_OK) continue;
      for (int l = 0; l < 2; l++)
        for (const auto &widths : read[l].k) {
          int sum = 0;
          for (const uint8_t width : widths) {
            REQUIRE((width >= 1 && width <= 4));
            sum += width;
          }
          REQUIRE((widths.size() == 8 && sum == 16));
        }
    }
}

TEST_CASE("tables that the policy could not decide are corrupt") {
  const auto broken = [](std::string_view text, auto change) {
    Setting setting(text);
    const Setting original = setting;
    change(setting.tables[0]);
    Tables read;
    return original.read(setting.written(), &read);
  };
  CHECK(broken(kPairWidths, [](LayerTables &t) { t.k[0][3] += t.k[0][3] < 4 ? 1 : -1; }) == KVQ_E_CORRUPT);
  CHECK(broken(kPairWidths, [](LayerTables &t) { t.k[1].push_back(1); }) == KVQ_E_CORRUPT);
  CHECK(broken(kPairWidths, [](LayerTables &t) { t.v[1].push_back(1); }) == KVQ_E_CORRUPT);
  CHECK(broken(kPairWidths, [](LayerTables &t) { t.mu.assign(2, std::pmr::vector<uint16_t>(16)); }) == KVQ_E_CORRUPT);
  CHECK(broken("tq-split", [](LayerTables &t) { t.v[0].assign(16, 1); }) == KVQ_E_CORRUPT);
  CHECK(broken("tq-split", [](LayerTables &t) { t.v[0].assign(16, 0), t.v[0][0] = 8; }) == KVQ_E_CORRUPT);
  CHECK(broken("tq-2c", [](LayerTables &t) { t.mu[1][4] = 0x7c00; }) == KVQ_E_CORRUPT);
  CHECK(broken("tq-2c", [](LayerTables &t) { t.mu[1][4] = 0x8000; }) == KVQ_E_CORRUPT);
  CHECK(broken("tq-2c", [](LayerTables &t) { t.mu[1].pop_back(); }) == KVQ_E_CORRUPT);
  CHECK(broken("tq-2c", [](LayerTables &t) { t.mu[1][4] = 0xbc00; }) == KVQ_OK);
}

TEST_CASE("blobs of another recipe or geometry are refused by the name of the field") {
  const Setting setting(kPairWidths);
  const Blob blob = setting.written();
  Tables read;
  const auto other = [&](std::string_view text) {
    const Setting target(text);
    CHECK(target.read(blob, &read) == KVQ_E_CONFIG);
    return std::string(failure_detail());
  };
  CHECK_THAT(other("k=channel-widths(group=128);v=raw;policy=pair-widths(avg=2,bmin=1,bmax=4,score=k-only)"), ContainsSubstring("'k'"));
  CHECK_THAT(other(std::string(kPairWidths) + ";sinks=4"), ContainsSubstring("'sinks'"));
  CHECK_THAT(other("k=channel-widths(group=64);v=raw;policy=pair-widths(avg=3,bmin=1,bmax=4,score=k-only)"), ContainsSubstring("'policy'"));

  const auto changed = [&](auto change) {
    std::vector<LayerShape> shapes = setting.shapes;
    change(shapes);
    CHECK(read_policy_blob(blob.data(), blob.size(), setting.recipe.text, shapes, &read) == KVQ_E_CONFIG);
    return std::string(failure_detail());
  };
  CHECK_THAT(changed([](auto &s) { s.pop_back(); }), ContainsSubstring("n_layers is 3 in the blob, 2 in the cache"));
  CHECK_THAT(changed([](auto &s) { s[1].kv_heads = 1; }), ContainsSubstring("layer 1: kv_heads is 2 in the blob, 1"));
  CHECK_THAT(changed([](auto &s) { s[0].rope_layout = 1; }), ContainsSubstring("rope_layout"));
  CHECK_THAT(changed([](auto &s) { s[2].source = 2; }), ContainsSubstring("kv_source"));
  Blob newer = blob;
  newer[4] = 2;
  CHECK(setting.read(rehashed(newer), &read) == KVQ_E_CONFIG);
  CHECK_THAT(failure_detail(), ContainsSubstring("version is 2"));
}
