// Calls that run out of memory at their k-th allocation, for every k: nothing has changed, and the call can be made again.
// (capi_nomem does the same through the C ABI; here are the paths of later prompts, on pages that forks share.)
#include <functional>

#include "allocator.hpp"
#include "engine_kit.hpp"

using namespace kvq_test;

namespace {

// All that can be seen of a sequence and of the cache's memory.
struct Picture {
  std::vector<std::vector<uint32_t>> numbers;
  uint64_t total, packed, tail, committed, bytes_used, pages_raw, pages_packed, tokens, scores;
  bool operator==(const Picture &) const = default;
};

Picture picture(const NumberCache &cache, uint64_t id) {
  Picture seen;
  for (uint32_t l = 0; l < NumberCache::kLayers; l++) seen.numbers.push_back(cache.numbers(id, l));
  const kvq_lengths lengths = cache.lengths(id);
  const kvq_stats stats = cache.stats();
  seen.total = lengths.total, seen.packed = lengths.packed, seen.tail = lengths.tail, seen.committed = lengths.committed;
  seen.bytes_used = stats.bytes_used, seen.pages_raw = stats.pages_raw, seen.pages_packed = stats.pages_packed;
  seen.tokens = stats.tokens;
  seen.scores = cache.use(id)->scores.size();
  return seen;
}

struct Starved {
  CountingAllocator memory;
  kvq_allocator callbacks = memory.callbacks();
  NumberCache cache;
  explicit Starved(const std::string &recipe) : cache(recipe, 0, {}, &callbacks) {}

  // Call with room for 0, 1, 2, ... allocations until it succeeds.
  void until_it_works(const char *what, const std::vector<uint64_t> &watched, const std::function<Status()> &call) {
    std::vector<Picture> before;
    for (const uint64_t id : watched) before.push_back(picture(cache, id));
    for (int64_t room = 0;; room++) {
      INFO(what << " with room for " << room << " allocations");
      REQUIRE(room < 1000);
      memory.remaining = room;
      Status status = KVQ_E_NOMEM;
      try {
        status = call();
      } catch (const std::bad_alloc &) {
      }
      memory.remaining = INT64_MAX;
      if (status == KVQ_OK) {
        REQUIRE(room > 0);
        return;
      }
      REQUIRE(status == KVQ_E_NOMEM);
      for (size_t i = 0; i < watched.size(); i++) REQUIRE(picture(cache, watched[i]) == before[i]);
      REQUIRE(cache.stats().bytes_used == memory.bytes);
    }
  }
};

}  // namespace

TEST_CASE("a later prompt that runs out of memory can be given again, chunk by chunk and layer by layer") {
  for (const char *recipe : {"k=lloyd(levels=4);v=lloyd(levels=4);sinks=4;recent=6;block=24",
                             "k=affine-channel(levels=4,group=16);v=lloyd(levels=4);block=16",
                             "policy=semkv(r=1/4,low=lloyd(levels=5),high=lloyd(levels=6));block=10"}) {
    INFO(recipe);
    Starved starved(recipe);
    const NumberCache &cache = starved.cache;
    const uint64_t id = cache.create();
    REQUIRE(cache.commit(id, tokens_from(1, 70)) == KVQ_OK);
    REQUIRE(cache.append(id, tokens_from(100, 7), 7) == KVQ_OK);  // SemKV: a turn that the prompt will end
    uint64_t fork = 0;
    REQUIRE(cache->fork(*cache.use(id), UINT64_MAX, &fork) == KVQ_OK);
    std::vector<uint32_t> expected = tokens_from(1, 70);
    for (const uint32_t token : tokens_from(100, 7)) expected.push_back(token);
    for (uint32_t part = 0; part < 2; part++) {
      const std::vector<uint32_t> tokens = tokens_from(200 + 50 * part, 50);
      for (uint32_t l = 0; l < NumberCache::kLayers; l++)
        starved.until_it_works("chunk", {id, fork}, [&] { return cache.chunk(id, l, tokens, false); });
      expected.insert(expected.end(), tokens.begin(), tokens.end());
    }
    for (uint32_t l = 0; l < NumberCache::kLayers; l++)
      starved.until_it_works("FINAL", {id, fork}, [&] { return cache.chunk(id, l, {900, 901, 902}, true); });
    for (const uint32_t token : {900u, 901u, 902u}) expected.push_back(token);
    REQUIRE(cache.numbers(id, 0) == expected);
    expected.resize(77);
    REQUIRE(cache.numbers(fork, 0) == expected);
  }
}

TEST_CASE("the end of a turn, or of a step, that runs out of memory on shared pages leaves them shared") {
  Starved starved("policy=semkv(r=1/2,low=lloyd(levels=5),high=lloyd(levels=6));block=12");
  const NumberCache &cache = starved.cache;
  const uint64_t id = cache.create();
  REQUIRE(cache.commit(id, tokens_from(1, 30)) == KVQ_OK);
  REQUIRE(cache.append(id, tokens_from(100, 5), 5) == KVQ_OK);
  uint64_t fork = 0;
  REQUIRE(cache->fork(*cache.use(id), UINT64_MAX, &fork) == KVQ_OK);
  starved.until_it_works("end_turn", {id, fork}, [&] { return cache->end_turn(*cache.use(id)); });
  REQUIRE(cache.lengths(id).tail == 0);
  REQUIRE(cache.lengths(fork).tail == 5);

  const uint64_t ids[] = {id, fork};
  const uint32_t counts[] = {13, 8};
  uint64_t step = 0;
  starved.until_it_works("begin_step", {id, fork}, [&] { return cache->begin_step(ids, counts, false, &step); });
  kvq::Cache::StepUse use;
  REQUIRE(cache->steps.use(step, &use) == KVQ_OK);
  std::vector<double> numbers(2 * 21, 0.0);
  for (size_t i = 0; i < 21; i++) numbers[2 * i] = double(500 + i);
  kvq_tensor x{};
  x.dtype = KVQ_DTYPE_F64, x.data = numbers.data(), x.token_stride = x.head_stride = 2;
  for (uint32_t l = 0; l < NumberCache::kLayers; l++) REQUIRE(cache->append(*use, l, x, x, nullptr) == KVQ_OK);
  const std::vector<float> scores = NumberCache::scores_of(tokens_from(500, 21));
  starved.until_it_works("end_step", {id, fork}, [&] { return cache->end_step(use, nullptr, scores.data()); });
  REQUIRE(cache.lengths(id).packed == 35 + 12);
  REQUIRE(cache.lengths(fork).packed == 30 + 12);
  REQUIRE(cache.numbers(fork, 1).back() == 520);
  for (const uint64_t each : ids) {
    kvq::Cache::SequenceUse last = cache.use(each);
    REQUIRE(cache->remove(last) == KVQ_OK);
  }
  REQUIRE((cache.stats().pages_raw == 0 && cache.stats().pages_packed == 0));
}
