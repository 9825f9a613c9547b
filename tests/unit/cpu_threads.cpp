// Threads of attention calls: the same bits whatever their number, for sequences that are cut into parts and for others.
#include <catch2/catch_test_macros.hpp>
#include <set>

#include "cpu/parts.h"
#include "cpu/pool.h"
#include "cpu_kit.hpp"

using namespace kvq_test;

namespace {

constexpr uint32_t kThreads[] = {2, 3, 7};

// A sequence of packed and raw pages, the same for every number of threads.
struct Long {
  Long(uint32_t kv_heads, uint32_t ratio, uint32_t threads, uint32_t packed, uint32_t raw) : cache(layer_of(kv_heads, ratio, 64, 32), threads) {
    Random random(packed + raw);
    cache.append(random.rows(4, kv_heads, 64), random.rows(4, kv_heads, 32));
    if (packed) {
      const auto format = cache.format("lloyd(levels=8)", "affine-token(levels=4,group=32)", 128);
      cache.append(random.rows(packed, kv_heads, 64), random.rows(packed, kv_heads, 32), format.get());
    }
    cache.append(random.rows(raw, kv_heads, 64), random.rows(raw, kv_heads, 32));
    query = random.normals(size_t(kMostQueries) * kv_heads * ratio * 64, 0.05);
    sinks = random.normals(size_t(kv_heads) * ratio);
  }
  Outputs attend(Options options) const {
    return cache.attend({query.begin(), query.begin() + long(options.queries * cache.shape.q_heads * 64)}, options);
  }
  static constexpr uint32_t kMostQueries = 5;
  Cache cache;
  std::vector<float> query, sinks;
};

}  // namespace

TEST_CASE("a long sequence of one head is cut into parts, a short one is not, and many heads need none") {
  REQUIRE(kvq::cpu::part_count(kvq::cpu::kPartTokens - 1, 1000, 1) == 1);
  REQUIRE(kvq::cpu::part_count(5 * kvq::cpu::kPartTokens, 1000, 1) == 5);
  REQUIRE(kvq::cpu::part_count(5 * kvq::cpu::kPartTokens, 3, 1) == 3);
  REQUIRE(kvq::cpu::part_count(1000 * kvq::cpu::kPartTokens, 100000, 8) == 4);
  REQUIRE(kvq::cpu::part_count(1000 * kvq::cpu::kPartTokens, 100000, 64) == 1);
  for (uint32_t items = 1; items < 100; items++) {
    const uint32_t parts = kvq::cpu::part_count(1u << 30, 1u << 24, items);
    REQUIRE((parts == 1 || parts * items <= kvq::cpu::kMostParts));
  }
}

TEST_CASE("one long sequence with one KV head has the same result, bit for bit, on any number of threads") {
  const Long alone(1, 4, 1, 24 * 1024, 1000);
  Options variants[4];
  variants[1].queries = 5;
  variants[2].window = 20000, variants[2].softcap = 5;
  variants[3].sinks = alone.sinks.data();
  std::vector<Outputs> expected;
  for (const Options &options : variants) {
    expected.push_back(alone.attend(options));
    alone.cache.check({alone.query.begin(), alone.query.begin() + long(options.queries * 4 * 64)}, options);
  }
  for (const uint32_t threads : kThreads) {
    const Long shared(1, 4, threads, 24 * 1024, 1000);
    for (size_t i = 0; i < std::size(variants); i++) {
      INFO(threads << " threads, variant " << i);
      REQUIRE(shared.attend(variants[i]) == expected[i]);
    }
  }
}

TEST_CASE("a part whose tokens no query sees adds nothing") {
  const Long alone(1, 2, 1, 24 * 1024, 40), shared(1, 2, 3, 24 * 1024, 40);
  Options options;
  options.window = 17;
  alone.cache.check({alone.query.begin(), alone.query.begin() + 2 * 64}, options);
  REQUIRE(shared.attend(options) == alone.attend(options));
}

TEST_CASE("sequences of one call have the results that they have alone, on any number of threads") {
  const std::pair<uint32_t, uint32_t> kLengths[] = {{24 * 1024, 100}, {0, 50}, {18 * 1024, 3}, {1024, 0}, {32 * 1024, 64}};
  std::vector<std::unique_ptr<Long>> sequences;
  for (const auto &[packed, raw] : kLengths) sequences.push_back(std::make_unique<Long>(2, 4, 1, packed, std::max(raw, 1u)));
  const LayerShape shape = sequences[0]->cache.shape;
  const size_t row = size_t(shape.q_heads) * shape.dim_k, out_row = size_t(shape.q_heads) * shape.dim_v;
  std::vector<float> query, out(sequences.size() * out_row), lse(sequences.size() * shape.q_heads);
  std::vector<kvq::AttendSequence> list;
  for (const auto &sequence : sequences) {
    list.push_back({sequence->cache.page_list(), sequence->cache.tokens(), uint32_t(list.size()), 1});
    query.insert(query.end(), sequence->query.begin(), sequence->query.begin() + long(row));
  }
  const kvq_tensor q = tensor_of(query.data(), shape.q_heads, shape.dim_k), o = tensor_of(out.data(), shape.q_heads, shape.dim_v);
  for (const uint32_t threads : {1u, 2u, 3u, 7u}) {
    kvq::Memory memory;
    const std::shared_ptr<kvq::Backend> backend = kvq::make_cpu_backend(&memory, threads);
    const kvq::AttendCall call{0, &shape, &q, &o, lse.data(), sequences[0]->cache.scale(), 0, 0, nullptr, list};
    REQUIRE(backend->attend(call, backend->make_workspace({&shape, 1}).get()) == KVQ_OK);
    for (size_t i = 0; i < sequences.size(); i++) {
      INFO(threads << " threads, sequence " << i);
      const Outputs alone = sequences[i]->attend({});
      REQUIRE(std::equal(alone.out.begin(), alone.out.end(), out.begin() + long(i * out_row)));
      REQUIRE(std::equal(alone.lse.begin(), alone.lse.end(), lse.begin() + long(i * shape.q_heads)));
    }
  }
}

TEST_CASE("a pool gives every item to exactly one thread, run after run") {
  kvq::Memory memory;
  for (const uint32_t threads : {1u, 2u, 3u, 7u}) {
    kvq::cpu::Pool pool(&memory, threads);
    pool.prepare();
    for (uint32_t run = 0; run < 500; run++) {
      std::vector<uint32_t> times(run % 40), wrong(threads);
      struct Both {
        std::vector<uint32_t> &times, &wrong;
      } both{times, wrong};
      pool.run(uint32_t(times.size()), [](void *self, uint32_t item, uint32_t thread) {
        static_cast<Both *>(self)->times[item]++;
        static_cast<Both *>(self)->wrong[thread]++; }, &both);
      REQUIRE(std::ranges::all_of(times, [](uint32_t n) { return n == 1; }));
    }
  }
}
