// The packing rule (section 7) against a model that knows only lengths, and pages that hold token numbers.
#include "engine_kit.hpp"

using namespace kvq_test;

namespace {

// What a sequence must look like.  Packed pages never tell tokens apart, so a list of tokens and three lengths are all.
struct Model {
  uint64_t sinks, recent, block;
  bool committed = false;
  std::vector<uint32_t> tokens;
  uint64_t packed = 0;

  uint64_t sink_count() const { return std::min<uint64_t>(tokens.size(), sinks); }
  uint64_t tail() const { return tokens.size() - sink_count() - packed; }
  void add(const std::vector<uint32_t> &more) {
    tokens.insert(tokens.end(), more.begin(), more.end());
    while (committed && tail() >= recent + block) packed += block;  // one block after the other, as section 7 says it
  }
  void commit() {
    committed = true;
    add({});
  }
  void truncate(uint64_t length) {
    tokens.resize(length);
    packed = std::min(packed, length - sink_count());
  }
};

struct Shape {
  uint64_t sinks, recent, block;
  const char *codecs;
};

// Row codecs with blocks that divide a page of 64, are larger, and neither; column codecs with groups of 16 and 96.
constexpr Shape kShapes[] = {
    {0, 0, 1, "k=lloyd(levels=4);v=lloyd(levels=4)"},
    {3, 5, 8, "k=lloyd(levels=4);v=lloyd(levels=4)"},
    {4, 32, 64, "k=lloyd(levels=4);v=lloyd(levels=4)"},
    {17, 0, 100, "k=lloyd(levels=4);v=lloyd(levels=4)"},
    {0, 3, 7, "k=raw;v=raw"},
    {1, 0, 150, "k=raw;v=lloyd(levels=4)"},
    {5, 9, 16, "k=affine-channel(levels=4,group=16);v=lloyd(levels=4)"},
    {0, 0, 48, "k=affine-channel(levels=4,group=16);v=lloyd(levels=4)"},
    {32, 20, 96, "k=affine-channel(levels=4,group=96);v=lloyd(levels=4)"},
    {0, 40, 192, "k=affine-channel(levels=4,group=96);v=affine-channel(levels=4,group=64)"},
};

std::string recipe_of(const Shape &shape) {
  return std::string(shape.codecs) + ";sinks=" + std::to_string(shape.sinks) + ";recent=" + std::to_string(shape.recent) +
         ";block=" + std::to_string(shape.block);
}

void compare(const NumberCache &cache, uint64_t id, const Model &model) {
  const kvq_lengths lengths = cache.lengths(id);
  REQUIRE(lengths.total == model.tokens.size());
  REQUIRE(lengths.sinks == model.sink_count());
  REQUIRE(lengths.packed == model.packed);
  REQUIRE(lengths.tail == model.tail());
  REQUIRE(bool(lengths.committed) == model.committed);
  if (model.tokens.empty()) return;
  for (uint32_t l = 0; l < NumberCache::kLayers; l++) {
    const std::vector<uint32_t> numbers = cache.numbers(id, l);
    REQUIRE(numbers.size() == model.tokens.size());
    for (size_t i = 0; i < numbers.size(); i++)
      if (numbers[i] != model.tokens[i] + l * NumberCache::kLayerStep)
        FAIL("layer " << l << " position " << i << " holds " << numbers[i] << " instead of token " << model.tokens[i]);
  }
}

}  // namespace

TEST_CASE("the packed count follows the formula, however the tokens arrive") {
  for (const Shape &shape : kShapes) {
    INFO(recipe_of(shape));
    const uint64_t sinks = shape.sinks, recent = shape.recent, block = shape.block;
    if (block == 192) continue;  // the group of K and V is 192: see the other tests
    for (const uint64_t total : {uint64_t(0), sinks, sinks + 1, sinks + recent + block - 1, sinks + recent + block, 2 * block + 37, uint64_t(500)}) {
      const uint64_t behind = total - std::min(total, sinks);
      const uint64_t expected = behind < recent ? 0 : block * ((behind - recent) / block);
      const std::vector<uint32_t> tokens = tokens_from(10, total);
      NumberCache cache(recipe_of(shape));
      const uint64_t at_once = cache.create(), one_by_one = cache.create(), in_chunks = cache.create(), in_steps = cache.create();
      REQUIRE(cache.commit(at_once, tokens) == KVQ_OK);
      REQUIRE(cache.commit(one_by_one, {}) == KVQ_OK);
      for (const uint32_t token : tokens) REQUIRE(cache.append(one_by_one, {token}, 1) == KVQ_OK);
      for (uint32_t l = 0; l < NumberCache::kLayers; l++) {
        for (size_t i = 0; i < total; i += 33)
          REQUIRE(cache.chunk(in_chunks, l, tokens_from(10 + uint32_t(i), std::min<uint64_t>(33, total - i)), false) == KVQ_OK);
        REQUIRE(cache.chunk(in_chunks, l, {}, true) == KVQ_OK);
      }
      for (size_t i = 0; i < total; i += 70) {  // steps before the commit are chunks
        const std::vector<uint32_t> part = tokens_from(10 + uint32_t(i), std::min<uint64_t>(70, total - i));
        REQUIRE(cache.append(in_steps, part, uint32_t(part.size())) == KVQ_OK);
      }
      REQUIRE(cache.commit(in_steps, {}) == KVQ_OK);
      for (const uint64_t id : {at_once, one_by_one, in_chunks, in_steps}) {
        INFO(total << " tokens");
        Model model{sinks, recent, block, true, tokens, expected};
        compare(cache, id, model);
      }
    }
  }
}

TEST_CASE("random appends, rejections, truncations, forks and removals keep every token at its place") {
  INFO("seed " << seed());
  Random random(77);
  for (const Shape &shape : kShapes) {
    INFO(recipe_of(shape));
    NumberCache cache(recipe_of(shape));
    const kvq_stats empty = cache.stats();
    std::vector<std::pair<uint64_t, Model>> all;
    uint32_t next = 1;
    for (int round = 0; round < 400; round++) {
      if (all.empty() || (all.size() < 6 && random.below(20) == 0)) {
        all.emplace_back(cache.create(), Model{shape.sinks, shape.recent, shape.block, false, {}, 0});
        continue;
      }
      const size_t pick = random.below(all.size());
      const uint64_t id = all[pick].first;
      Model &model = all[pick].second;
      const uint64_t length = model.tokens.size(), action = random.below(12);
      if (action < 6) {
        const uint32_t count = uint32_t(random.below(random.below(4) ? 6 : 130));
        const uint32_t keep = random.below(3) ? count : uint32_t(random.below(count + 1));
        std::vector<uint32_t> tokens = tokens_from(next, count);
        next += count;
        REQUIRE(cache.append(id, tokens, keep) == KVQ_OK);
        tokens.resize(keep);
        model.add(tokens);
      } else if (action < 8) {
        const std::vector<uint32_t> tokens = tokens_from(next, random.below(90));
        next += uint32_t(tokens.size());
        REQUIRE(cache.commit(id, tokens) == KVQ_OK);
        model.add(tokens);
        model.commit();
      } else if (action == 8) {
        const uint64_t shorter = length - random.below(std::min<uint64_t>(length, 150) + 1);
        REQUIRE(cache->truncate(*cache.use(id), shorter) == KVQ_OK);
        model.truncate(shorter);
      } else if (action == 9 && all.size() < 12) {
        const uint64_t keep = random.below(2) ? length : length - random.below(length + 1);
        uint64_t child;
        REQUIRE(cache->fork(*cache.use(id), keep, &child) == KVQ_OK);
        Model copy = model;
        copy.truncate(keep);
        compare(cache, child, copy);
        all.emplace_back(child, copy);
        continue;
      } else if (action == 10 && all.size() > 3) {
        kvq::Cache::SequenceUse use = cache.use(id);
        REQUIRE(cache->remove(use) == KVQ_OK);
        all.erase(all.begin() + ptrdiff_t(pick));
        continue;
      }
      compare(cache, id, model);
      if (round % 50 == 0)
        for (const auto &[other, expected] : all) compare(cache, other, expected);
    }
    uint64_t total = 0;
    for (const auto &[id, model] : all) compare(cache, id, model), total += model.tokens.size();
    REQUIRE(cache.stats().tokens == total);
    REQUIRE(cache.stats().sequences == all.size());
    for (const auto &[id, model] : all) {
      kvq::Cache::SequenceUse use = cache.use(id);
      REQUIRE(cache->remove(use) == KVQ_OK);
    }
    const kvq_stats after = cache.stats();
    REQUIRE(after.bytes_used == empty.bytes_used);
    REQUIRE((after.pages_raw == 0 && after.pages_packed == 0 && after.page_bytes_raw == 0 && after.page_bytes_packed == 0));
    REQUIRE(after.tokens == 0);
  }
}

TEST_CASE("every token is packed once in every layer, and never again") {
  NumberCache cache("k=lloyd(levels=4);v=lloyd(levels=4);sinks=4;recent=10;block=24");
  const uint64_t id = cache.create();
  REQUIRE(cache.commit(id, tokens_from(1, 200)) == KVQ_OK);
  for (uint32_t i = 0; i < 300; i++) REQUIRE(cache.append(id, {500 + i}, 1) == KVQ_OK);
  REQUIRE(cache.backend().encoded == cache.lengths(id).packed * NumberCache::kLayers);
}

TEST_CASE("a fork shares pages until it writes") {
  NumberCache cache("k=lloyd(levels=4);v=lloyd(levels=4);block=64");
  const uint64_t parent = cache.create();
  REQUIRE(cache.commit(parent, tokens_from(1, 64 * 20 + 10)) == KVQ_OK);
  const kvq_stats before = cache.stats();
  REQUIRE(before.pages_packed == 20);
  REQUIRE(before.pages_raw == NumberCache::kLayers);
  uint64_t child;
  REQUIRE(cache->fork(*cache.use(parent), UINT64_MAX, &child) == KVQ_OK);
  REQUIRE(cache.stats().pages_packed == 20);
  REQUIRE(cache.stats().pages_raw == NumberCache::kLayers);
  REQUIRE(cache.append(child, {5000}, 1) == KVQ_OK);  // copies the tail's page in each layer
  REQUIRE(cache.stats().pages_packed == 20);
  REQUIRE(cache.stats().pages_raw == 2 * NumberCache::kLayers);
  REQUIRE(cache.append(parent, {6000}, 1) == KVQ_OK);  // the only one now: writes in place
  REQUIRE(cache.stats().pages_raw == 2 * NumberCache::kLayers);
  kvq::Cache::SequenceUse use = cache.use(parent);
  REQUIRE(cache->remove(use) == KVQ_OK);
  REQUIRE(cache.stats().pages_packed == 20);
  REQUIRE(cache.stats().pages_raw == NumberCache::kLayers);
  REQUIRE(cache.numbers(child, 1).back() == 5000 + NumberCache::kLayerStep);
}

TEST_CASE("a step that is aborted, or keeps nothing, leaves no trace") {
  NumberCache cache("k=lloyd(levels=4);v=lloyd(levels=4);sinks=3;block=8");
  const uint64_t id = cache.create();
  REQUIRE(cache.commit(id, tokens_from(1, 30)) == KVQ_OK);
  uint64_t child;
  REQUIRE(cache->fork(*cache.use(id), UINT64_MAX, &child) == KVQ_OK);  // so that appending must copy
  const uint64_t used = cache.stats().bytes_used;
  const uint32_t count = 100;
  uint64_t step;
  REQUIRE(cache->begin_step({&id, 1}, &count, false, &step) == KVQ_OK);
  REQUIRE(cache.stats().bytes_used > used);
  REQUIRE(cache->truncate(*cache.use(id), 3) == KVQ_E_STATE);
  kvq::Cache::StepUse use;
  REQUIRE(cache->steps.use(step, &use) == KVQ_OK);
  REQUIRE(cache->abort_step(use) == KVQ_OK);
  REQUIRE(cache.stats().bytes_used == used);
  REQUIRE(cache.append(id, tokens_from(900, 100), 0) == KVQ_OK);
  REQUIRE(cache.stats().bytes_used == used);
  Model model{3, 0, 8, true, tokens_from(1, 30), 24};
  compare(cache, id, model);
  compare(cache, child, model);
}
