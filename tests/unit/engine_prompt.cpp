// Prompts: layers become final one by one, later prompts, SemKV's choice of tokens.
#include <algorithm>
#include <numeric>

#include "engine_kit.hpp"

using namespace kvq_test;

namespace {

constexpr const char *kRows = "k=lloyd(levels=4);v=lloyd(levels=4);sinks=4;recent=6;block=16";

void expect_numbers(const NumberCache &cache, uint64_t id, const std::vector<uint32_t> &tokens) {
  for (uint32_t l = 0; l < NumberCache::kLayers; l++) {
    std::vector<uint32_t> expected;
    for (const uint32_t token : tokens) expected.push_back(token + l * NumberCache::kLayerStep);
    REQUIRE(cache.numbers(id, l) == expected);
  }
}

// The flags of a run by section 6: the `count` highest scores, ties to the lower index.
std::vector<bool> highest(const std::vector<uint32_t> &tokens, size_t count) {
  std::vector<size_t> order(tokens.size());
  std::iota(order.begin(), order.end(), size_t(0));
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return NumberCache::score(tokens[a]) > NumberCache::score(tokens[b]); });
  std::vector<bool> flags(tokens.size());
  for (size_t i = 0; i < count; i++) flags[order[i]] = true;
  return flags;
}

// By position: is the token in a page of the high class?
std::vector<bool> flags_of(const NumberCache &cache, uint64_t id, uint64_t from, uint64_t count) {
  const kvq::Cache::SequenceUse use = cache.use(id);
  std::vector<bool> flags(count);
  for (const kvq::PackedRef &ref : use->pages[1])
    for (uint32_t r = 0; r < ref.count; r++)
      if (ref.page->positions[r] >= from && ref.page->positions[r] < from + count) flags[ref.page->positions[r] - from] = true;
  return flags;
}

}  // namespace

TEST_CASE("a layer is packed by its own FINAL, the others stay as they are") {
  NumberCache cache(kRows);
  const uint64_t id = cache.create();
  const std::vector<uint32_t> tokens = tokens_from(1, 100);
  for (uint32_t l = 0; l < NumberCache::kLayers; l++) REQUIRE(cache.chunk(id, l, tokens, false) == KVQ_OK);
  const uint64_t raw = cache.stats().pages_raw;
  REQUIRE(raw == 2 * 7);
  REQUIRE(cache.chunk(id, 1, {}, true) == KVQ_OK);
  REQUIRE(cache.stats().pages_raw < raw);  // the raw prompt of layer 1 is gone
  REQUIRE(cache.lengths(id).committed == 0);
  REQUIRE(cache.lengths(id).packed == 0);
  expect_numbers(cache, id, tokens);
  REQUIRE(cache.chunk(id, 1, {7}, false) == KVQ_E_STATE);
  REQUIRE(cache.chunk(id, 1, {}, true) == KVQ_E_STATE);
  REQUIRE(cache->truncate(*cache.use(id), 50) == KVQ_E_STATE);
  uint64_t child, step;
  const uint32_t one = 1;
  REQUIRE(cache->fork(*cache.use(id), 50, &child) == KVQ_E_STATE);
  REQUIRE(cache->begin_step({&id, 1}, &one, false, &step) == KVQ_E_STATE);
  REQUIRE(cache.chunk(id, 0, {}, true) == KVQ_OK);
  REQUIRE(cache.lengths(id).committed == 1);
  REQUIRE(cache.lengths(id).packed == 80);
  expect_numbers(cache, id, tokens);
}

TEST_CASE("layers of different length cannot become final together") {
  NumberCache cache(kRows);
  const uint64_t id = cache.create();
  REQUIRE(cache.chunk(id, 0, tokens_from(1, 50), false) == KVQ_OK);
  REQUIRE(cache.chunk(id, 1, tokens_from(1, 49), false) == KVQ_OK);
  REQUIRE(cache.lengths(id).total == 49);
  uint64_t child;
  REQUIRE(cache->fork(*cache.use(id), 10, &child) == KVQ_E_STATE);
  REQUIRE(cache->prefill(*cache.use(id), {KVQ_ALL_LAYERS, true, 0, nullptr, nullptr, nullptr, {}}) == KVQ_E_STATE);
  REQUIRE(cache.chunk(id, 0, {}, true) == KVQ_OK);
  REQUIRE(cache.chunk(id, 1, {}, true) == KVQ_E_STATE);
  const uint64_t used = cache.stats().bytes_used;
  REQUIRE(cache.chunk(id, 1, {50, 51}, true) == KVQ_E_STATE);  // one too many: not even staged
  REQUIRE(cache.stats().bytes_used == used);
  REQUIRE(cache.lengths(id).total == 49);
  REQUIRE(cache.chunk(id, 1, {50}, true) == KVQ_OK);
  expect_numbers(cache, id, tokens_from(1, 50));
}

TEST_CASE("a later prompt is staged until FINAL, and each layer is packed by its own") {
  NumberCache cache(kRows);
  const uint64_t id = cache.create();
  REQUIRE(cache.commit(id, tokens_from(1, 30)) == KVQ_OK);
  const uint64_t packed = cache.lengths(id).packed;
  REQUIRE(packed == 16);
  std::vector<uint32_t> all = tokens_from(1, 30);
  for (uint32_t chunk = 0; chunk < 3; chunk++) {
    const std::vector<uint32_t> more = tokens_from(100 + 40 * chunk, 40);
    for (uint32_t l = 0; l < NumberCache::kLayers; l++) REQUIRE(cache.chunk(id, l, more, false) == KVQ_OK);
    all.insert(all.end(), more.begin(), more.end());
  }
  REQUIRE(cache.lengths(id).packed == packed);
  REQUIRE(cache.lengths(id).tail == 150 - 4 - packed);
  uint64_t step;
  const uint32_t one = 1;
  REQUIRE(cache->begin_step({&id, 1}, &one, false, &step) == KVQ_E_STATE);
  REQUIRE(cache->end_turn(*cache.use(id)) == KVQ_E_STATE);
  REQUIRE(cache.chunk(id, 0, {}, true) == KVQ_OK);
  REQUIRE(cache.lengths(id).packed == packed);
  expect_numbers(cache, id, all);
  REQUIRE(cache.chunk(id, 1, {}, true) == KVQ_OK);
  REQUIRE(cache.lengths(id).packed == 16 * ((150 - 4 - 6) / 16));
  expect_numbers(cache, id, all);
}

TEST_CASE("a later prompt that is cut back to its beginning is no prompt any more") {
  NumberCache cache(kRows);
  const uint64_t id = cache.create();
  REQUIRE(cache.commit(id, tokens_from(1, 30)) == KVQ_OK);
  for (uint32_t l = 0; l < NumberCache::kLayers; l++) REQUIRE(cache.chunk(id, l, tokens_from(60, 5), false) == KVQ_OK);
  REQUIRE(cache->truncate(*cache.use(id), 31) == KVQ_OK);
  REQUIRE(cache.append(id, {9}, 1) == KVQ_E_STATE);
  REQUIRE(cache->truncate(*cache.use(id), 30) == KVQ_OK);
  REQUIRE(cache.append(id, {9}, 1) == KVQ_OK);
}

TEST_CASE("a refused chunk is not staged") {
  NumberCache cache(kRows, 100);
  const uint64_t id = cache.create();
  REQUIRE(cache.chunk(id, 0, tokens_from(1, 60), false) == KVQ_OK);
  const kvq_stats before = cache.stats();
  REQUIRE(cache.chunk(id, 0, tokens_from(100, 41), false) == KVQ_E_FULL);
  double bad[] = {5, 0, -1, 0};
  kvq_tensor x{};
  x.dtype = KVQ_DTYPE_F64, x.data = bad, x.token_stride = x.head_stride = 2;
  REQUIRE(cache->prefill(*cache.use(id), {0, true, 2, &x, &x, nullptr, {}}) == KVQ_E_NONFINITE);
  REQUIRE(cache.stats().bytes_used == before.bytes_used);
  REQUIRE(cache.stats().pages_raw == before.pages_raw);
  REQUIRE(cache.numbers(id, 0) == tokens_from(1, 60));
}

// ---- SemKV

TEST_CASE("SemKV: a prompt, blocks and the end of a turn choose their tokens each for themselves") {
  NumberCache cache("policy=semkv(r=1/4,low=lloyd(levels=5),high=lloyd(levels=6));block=10;sinks=3");
  const uint64_t id = cache.create();
  std::vector<uint32_t> all = tokens_from(1, 50);
  REQUIRE(cache.commit(id, all) == KVQ_OK);
  REQUIRE(cache.lengths(id).packed == 47);
  REQUIRE(flags_of(cache, id, 3, 47) == highest(tokens_from(4, 47), 11));  // floor(47 / 4)

  for (uint32_t i = 0; i < 27; i++) {
    REQUIRE(cache.append(id, {100 + i}, 1) == KVQ_OK);
    all.push_back(100 + i);
    REQUIRE(cache.lengths(id).tail == (i + 1) % 10);
  }
  for (uint32_t b = 0; b < 2; b++)  // half of 10/4 to even: 2
    REQUIRE(flags_of(cache, id, 50 + 10 * b, 10) == highest(tokens_from(100 + 10 * b, 10), 2));
  REQUIRE(cache->end_turn(*cache.use(id)) == KVQ_OK);
  REQUIRE(flags_of(cache, id, 70, 7) == highest(tokens_from(120, 7), 2));  // 7/4 = 1.75
  REQUIRE(cache.lengths(id).tail == 0);
  expect_numbers(cache, id, all);

  // A later prompt ends the turn first, and is one run of its own.
  REQUIRE(cache.append(id, tokens_from(300, 6), 6) == KVQ_OK);
  const std::vector<uint32_t> prompt = tokens_from(400, 21);
  for (uint32_t l = 0; l < NumberCache::kLayers; l++) REQUIRE(cache.chunk(id, l, prompt, false) == KVQ_OK);
  REQUIRE(cache.lengths(id).tail == 21);  // two blocks' worth, and not packed before FINAL
  REQUIRE(flags_of(cache, id, 77, 6) == highest(tokens_from(300, 6), 2));  // 6/4 = 1.5, to even
  for (uint32_t l = 0; l < NumberCache::kLayers; l++) REQUIRE(cache.chunk(id, l, {}, true) == KVQ_OK);
  REQUIRE(flags_of(cache, id, 83, 21) == highest(prompt, 5));
  for (const auto &part : {tokens_from(300, 6), prompt}) all.insert(all.end(), part.begin(), part.end());
  expect_numbers(cache, id, all);
}

TEST_CASE("SemKV: a block counts from what a truncation left in the tail") {
  NumberCache cache("policy=semkv(r=1/4,low=lloyd(levels=5),high=lloyd(levels=6));block=10");
  const uint64_t id = cache.create();
  REQUIRE(cache.commit(id, tokens_from(1, 20)) == KVQ_OK);
  REQUIRE(cache.append(id, tokens_from(100, 9), 9) == KVQ_OK);
  REQUIRE(cache->truncate(*cache.use(id), 24) == KVQ_OK);
  REQUIRE(cache.append(id, tokens_from(200, 6), 6) == KVQ_OK);
  std::vector<uint32_t> block = tokens_from(100, 4);
  for (const uint32_t token : tokens_from(200, 6)) block.push_back(token);
  REQUIRE(flags_of(cache, id, 20, 10) == highest(block, 2));
  // Cut within packed runs, in both classes: what is left keeps its flags.
  const std::vector<bool> before = flags_of(cache, id, 0, 13);
  REQUIRE(cache->truncate(*cache.use(id), 13) == KVQ_OK);
  REQUIRE(flags_of(cache, id, 0, 13) == before);
  std::vector<uint32_t> all = tokens_from(1, 13);
  expect_numbers(cache, id, all);
  REQUIRE(cache.append(id, tokens_from(300, 25), 25) == KVQ_OK);
  for (const uint32_t token : tokens_from(300, 25)) all.push_back(token);
  expect_numbers(cache, id, all);
  REQUIRE(cache.lengths(id).tail == 5);
}

TEST_CASE("SemKV: scores come once, with any layer, and must all be there at the end") {
  NumberCache cache("policy=semkv(r=1/2,low=lloyd(levels=5),high=lloyd(levels=6))");
  const uint64_t id = cache.create();
  const double numbers[] = {1, 0, 2, 0, 3, 0, 4, 0};
  kvq_tensor x{};
  x.dtype = KVQ_DTYPE_F64, x.data = const_cast<double *>(numbers), x.token_stride = x.head_stride = 2;
  const float first[] = {5, 1, 2, 9}, second[] = {0, 7, 8, 0};
  const float nan[] = {1, std::numeric_limits<float>::quiet_NaN(), 1, 1};
  REQUIRE(cache->prefill(*cache.use(id), {0, true, 4, &x, &x, nullptr, {}}) == KVQ_OK);
  REQUIRE(cache->prefill(*cache.use(id), {1, true, 4, &x, &x, nullptr, {}}) == KVQ_E_INVALID);
  REQUIRE(cache->prefill(*cache.use(id), {1, true, 4, &x, &x, nullptr, nan}) == KVQ_E_INVALID);
  REQUIRE(cache.lengths(id).total == 0);  // layer 1 has nothing yet
  REQUIRE(cache->prefill(*cache.use(id), {1, true, 4, &x, &x, nullptr, first}) == KVQ_OK);
  REQUIRE(flags_of(cache, id, 0, 4) == std::vector<bool>{true, false, false, true});

  const uint64_t other = cache.create();
  REQUIRE(cache->prefill(*cache.use(other), {0, false, 4, &x, &x, nullptr, first}) == KVQ_OK);
  REQUIRE(cache->prefill(*cache.use(other), {1, false, 4, &x, &x, nullptr, second}) == KVQ_OK);  // too late to matter
  REQUIRE(cache->prefill(*cache.use(other), {KVQ_ALL_LAYERS, true, 0, nullptr, nullptr, nullptr, {}}) == KVQ_OK);
  REQUIRE(flags_of(cache, other, 0, 4) == std::vector<bool>{true, false, false, true});
}

// ---- windows

TEST_CASE("where every layer has a window, pages that no query can reach are given back") {
  std::vector<kvq::LayerShape> shapes = {{1, 1, 2, 2, KVQ_ROPE_HALF, 2, 0, 40, 0}, {1, 1, 2, 2, KVQ_ROPE_HALF, 2, 0, 64, 1}};
  NumberCache cache("k=lloyd(levels=4);v=lloyd(levels=4);sinks=4;block=64", 0, shapes);
  const uint64_t id = cache.create();
  REQUIRE(cache.commit(id, tokens_from(1, 3000)) == KVQ_OK);
  const uint64_t pages = cache.stats().pages_packed;
  REQUIRE(pages <= (64 + 256) / 64 + 2);
  for (uint32_t i = 0; i < 500; i++) REQUIRE(cache.append(id, {5000 + i}, 1) == KVQ_OK);
  REQUIRE(cache.stats().pages_packed <= pages + 1);
  REQUIRE(cache.lengths(id).total == 3500);
  REQUIRE(cache.lengths(id).packed == 64 * ((3500 - 4) / 64));
  const std::vector<uint32_t> numbers = cache.numbers(id, 0);
  for (uint32_t i = 0; i < 4; i++) REQUIRE(numbers[i] == 1 + i);  // the sinks stay
  for (uint32_t i = 3500 - 64 - 256; i < 3500; i++) REQUIRE(numbers[i] == (i < 3000 ? 1 + i : 5000 + i - 3000));
  REQUIRE(cache->truncate(*cache.use(id), 3500 - 256) == KVQ_OK);
  REQUIRE(cache->truncate(*cache.use(id), 2000) == KVQ_E_INVALID);
  REQUIRE(cache->truncate(*cache.use(id), 2) == KVQ_OK);
  REQUIRE(cache.append(id, {9}, 1) == KVQ_OK);
  REQUIRE(cache.numbers(id, 0) == std::vector<uint32_t>{1, 2, 9});
}
