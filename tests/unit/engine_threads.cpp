// Sequences that share pages, used from several threads at once.  Thread sanitizer builds find what goes wrong; here every
// position must still hold its token.
#include <thread>

#include "engine_kit.hpp"

using namespace kvq_test;

TEST_CASE("forks of one prompt grow, shrink and end in threads of their own") {
  INFO("seed " << seed());
  NumberCache cache("k=lloyd(levels=4);v=lloyd(levels=4);sinks=3;recent=5;block=24");
  const uint64_t root = cache.create();
  REQUIRE(cache.commit(root, tokens_from(1, 150)) == KVQ_OK);
  constexpr int kThreads = 4;
  uint64_t first[kThreads];
  for (uint64_t &id : first) REQUIRE(cache->fork(*cache.use(root), 130, &id) == KVQ_OK);
  std::atomic<int> wrong{0};
  const auto work = [&](int thread) {
    Random random(uint64_t(thread) + 1);
    uint64_t id = first[thread];
    std::vector<uint32_t> tokens = tokens_from(1, 130);
    for (int round = 0; round < 150; round++) {
      const std::vector<uint32_t> more = tokens_from(uint32_t(1000 * thread + round + 200), random.below(9));
      wrong += cache.append(id, more, uint32_t(more.size())) != KVQ_OK;
      tokens.insert(tokens.end(), more.begin(), more.end());
      if (random.below(4) == 0) {
        tokens.resize(tokens.size() - random.below(tokens.size() < 40 ? 1 : 30));
        wrong += cache->truncate(*cache.use(id), tokens.size()) != KVQ_OK;
      }
      if (random.below(8) == 0) {  // go on as a child; the parent ends
        uint64_t child = 0;
        kvq::Cache::SequenceUse use = cache.use(id);
        wrong += cache->fork(*use, UINT64_MAX, &child) != KVQ_OK;
        wrong += cache->remove(use) != KVQ_OK;
        id = child;
      }
    }
    first[thread] = id;
    const kvq::Cache::SequenceUse use = cache.use(id);
    const kvq::SequenceView view(*use, 1, *cache->store, nullptr);
    wrong += view.length() != tokens.size();
    for (size_t i = 0; i < view.count(); i++)
      for (uint32_t r = 0; r < view.page(i).count; r++)
        wrong += *NumberBackend::row(view.page(i).page, view.page(i).first + r) != tokens[view.page(i).position + r] + NumberCache::kLayerStep;
  };
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; t++) threads.emplace_back(work, t);
  for (std::thread &thread : threads) thread.join();
  REQUIRE(wrong == 0);
  REQUIRE(cache.stats().sequences == kThreads + 1);
  REQUIRE(cache.numbers(root, 0) == tokens_from(1, 150));
}
