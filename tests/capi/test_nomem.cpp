// An allocator that fails at its k-th call, for every k, in every function that allocates: NOMEM, everything as before, and all
// works when there is memory again.  (Case A5.)
#include <functional>

#include "allocator.hpp"
#include "mirror.hpp"

using namespace kvq_test;

namespace {

struct Poor {
  CountingAllocator memory;
  kvq_allocator callbacks = memory.callbacks();
  Setup setup(const std::string &recipe) {
    return {.recipe = recipe, .layers = {layer_of(2, 2, 32), layer_of(2, 2, 32)}, .allocator = &callbacks};
  }
};

// Call with room for k allocations, k = 0, 1, ..., until it succeeds.  `unchanged` is asked after every failure.
// Result: allocations that the call needed.
int64_t starve(CountingAllocator &memory, const char *what, const std::function<int32_t()> &call, const std::function<void()> &unchanged) {
  for (int64_t k = 0;; ++k) {
    INFO(what << " with room for " << k << " allocations");
    REQUIRE(k < 2000);
    const uint64_t before = memory.bytes;
    memory.remaining = k;
    const int32_t status = call();
    memory.remaining = INT64_MAX;
    if (status == KVQ_OK) return k;
    refused(status, KVQ_E_NOMEM);
    REQUIRE(detail().size() > 10);
    REQUIRE(unchanged_bytes(memory.bytes, before));
    REQUIRE(memory.mistakes == 0);
    unchanged();
  }
}

// Contents and attention of a sequence, to be compared after a failure.
std::function<void()> watch(Mirror &m, kvq_seq s) {
  const uint32_t queries = uint32_t(std::min<uint64_t>(m.total(s), 2));
  return [&m, s, queries, picture = m.picture(s), seen = m.query(s, queries, {.check = false})] {
    m.check_lengths(s);
    REQUIRE((m.picture(s) == picture));
    REQUIRE(same_bits(m.query(s, queries, {.check = false}), seen));
  };
}

const char *const kRecipes[] = {
    "k=affine-channel(levels=16,group=32);v=lloyd(levels=5);block=32;sinks=4;recent=3",
    "k=channel-widths(group=16,midpoint=1);v=lloyd(levels=3,params=e5m3);block=16;sinks=3;policy=pair-widths(avg=3,bmin=1,bmax=6)",
    "semkv-tq;block=16",
    "tq-3c;block=16;recent=5",
    "blockgtq-k3v3;block=16",
};

}  // namespace

TEST_CASE("create without memory gives nothing and leaks nothing") {
  for (const char *recipe : kRecipes) {
    Poor poor;
    const Setup setup = poor.setup(recipe);
    const kvq_config config = config_of(setup);
    kvq_cache *cache = nullptr;
    const int64_t needed = starve(poor.memory, recipe, [&] { return kvq_create(&config, &cache); }, [&] { REQUIRE(cache == nullptr); });
    REQUIRE(needed > 0);
    kvq_destroy(cache);
    REQUIRE((poor.memory.bytes == 0 && poor.memory.mistakes == 0));
  }
}

TEST_CASE("a prompt that runs out of memory can be given again") {
  for (const char *recipe : kRecipes) {
    INFO(recipe);
    Poor poor;
    {
      Mirror m(poor.setup(recipe)), rich(Setup{.recipe = recipe, .layers = poor.setup(recipe).layers});
      kvq_seq s = 0;
      starve(poor.memory, "seq_create", [&] { return kvq_seq_create(m.cache, &s); }, [&] { REQUIRE(s == 0); });
      ok(kvq_seq_remove(m.cache, s));
      s = m.create();
      const kvq_seq r = rich.create();
      rich.commit(r, ids(0, 90));
      m.chunk(s, ids(0, 20));
      for (uint32_t layer : {1, 0})
        starve(poor.memory, "prefill", [&] { return m.prefill(s, layer, ids(20, 70), 0, layer == 1); }, [&] { m.check_lengths(s); });
      const auto before = m.picture(s);
      starve(poor.memory, "final of a layer", [&] {
        auto desc = sized<kvq_prefill>();
        desc.layer = 1, desc.flags = KVQ_PREFILL_FINAL;
        return kvq_prefill_commit(m.cache, s, &desc, nullptr); }, [&] { REQUIRE(lengths(m.cache, s).committed == 0); });
      starve(poor.memory, "final", [&] { return m.finish(s); }, [&] { REQUIRE(lengths(m.cache, s).committed == 0); });
      REQUIRE(lengths(m.cache, s).committed == 1);
      for (uint32_t layer = 0; layer < 2; ++layer)
        for (uint32_t head = 0; head < 2; ++head)
          for (uint32_t tensor : {0, 1})
            REQUIRE((export_wire(m.cache, s, layer, head, tensor) == export_wire(rich.cache, r, layer, head, tensor)));
    }
    REQUIRE((poor.memory.bytes == 0 && poor.memory.mistakes == 0));
  }
}

TEST_CASE("a step that runs out of memory can be tried again") {
  for (const char *recipe : kRecipes) {
    INFO(recipe);
    Poor poor;
    {
      Mirror m(poor.setup(recipe)), rich(Setup{.recipe = recipe, .layers = poor.setup(recipe).layers});
      const kvq_seq a = m.create(), b = m.create(), ra = rich.create(), rb = rich.create();
      m.commit(a, ids(0, 30)), m.commit(b, ids(0, 77));
      rich.commit(ra, ids(0, 30)), rich.commit(rb, ids(0, 77));
      for (uint32_t round = 0; round < 6; ++round) {
        const auto watch_a = watch(m, a), watch_b = watch(m, b);
        const auto both = [&] { watch_a(), watch_b(); };
        const kvq_seq seqs[2] = {a, b};
        const uint32_t counts[2] = {1 + 7 * round, 20};
        const Ids news = ids(200, counts[0] + counts[1]);
        kvq_step step = 0;
        starve(poor.memory, "step_begin", [&] { return kvq_step_begin(m.cache, seqs, counts, 2, 0, &step); }, [&] { REQUIRE(step == 0); both(); });
        for (uint32_t layer = 0; layer < 2; ++layer) {
          const Tensor k = m.tensor(layer, Text::K, news), v = m.tensor(layer, Text::V, news);
          ok(kvq_append(m.cache, step, layer, k.view(), v.view(), nullptr, nullptr));
        }
        const Floats scores = m.text.scores(news);
        starve(poor.memory, "step_end", [&] { return kvq_step_end(m.cache, step, nullptr, scores.data()); }, [&] { m.check_lengths(a); m.check_lengths(b); });
        rich.append(ra, part(news, 0, counts[0])), rich.append(rb, part(news, counts[0], news.size()));
        m.appended(a, part(news, 0, counts[0])), m.appended(b, part(news, counts[0], news.size()));
        for (const auto &[poor_seq, rich_seq] : {std::pair{a, ra}, {b, rb}})
          for (uint32_t head = 0; head < 2; ++head)
            REQUIRE((export_wire(m.cache, poor_seq, 1, head, 0) == export_wire(rich.cache, rich_seq, 1, head, 0)));
        m.truncate(a, 29 - round), m.truncate(b, 70 - round);
        rich.truncate(ra, 29 - round), rich.truncate(rb, 70 - round);
      }
      m.check(a), m.check(b);
    }
    REQUIRE((poor.memory.bytes == 0 && poor.memory.mistakes == 0));
  }
}

TEST_CASE("forks, truncations, turns, policies and exports that run out of memory change nothing") {
  for (const char *recipe : kRecipes) {
    INFO(recipe);
    Poor poor;
    {
      Mirror m(poor.setup(recipe));
      const kvq_seq s = m.create();
      m.commit(s, ids(0, 120));
      m.append(s, ids(120, 9));
      const auto unchanged = watch(m, s);
      kvq_seq child = 0, short_child = 0;
      starve(poor.memory, "fork", [&] { return kvq_seq_fork(m.cache, s, UINT64_MAX, &child); }, [&] { REQUIRE(child == 0); unchanged(); });
      starve(poor.memory, "fork inside a block", [&] { return kvq_seq_fork(m.cache, s, 45, &short_child); }, [&] { REQUIRE(short_child == 0); unchanged(); });
      starve(poor.memory, "end_turn", [&] { return kvq_end_turn(m.cache, child); }, unchanged);
      starve(poor.memory, "truncate of a shared tail", [&] { return kvq_seq_truncate(m.cache, child, 126); }, unchanged);
      starve(poor.memory, "truncate of a shared block", [&] { return kvq_seq_truncate(m.cache, child, 50); }, unchanged);
      Floats row(32 * 129);
      starve(poor.memory, "export_values", [&] { return kvq_export_values(m.cache, s, 1, 1, 0, 0, 129, row.data()); }, unchanged);
      Bytes wire(4096);
      starve(poor.memory, "export_wire", [&] { return kvq_export_wire(m.cache, s, 1, 1, 0, 0, wire.data(), wire.size(), nullptr, nullptr); }, unchanged);
      size_t needed = 0;
      if (kvq_policy_get(m.cache, s, nullptr, 0, &needed) == KVQ_E_SIZE) {
        Bytes blob(needed);
        starve(poor.memory, "policy_get", [&] { return kvq_policy_get(m.cache, s, blob.data(), blob.size(), nullptr); }, unchanged);
        const kvq_seq empty = m.create();
        if (!m.preset.rule.semkv && kvq_policy_get(m.cache, 0, nullptr, 0, &needed) != KVQ_E_SIZE)
          starve(poor.memory, "policy_set", [&] { return kvq_policy_set(m.cache, empty, blob.data(), blob.size()); }, [&] { m.check_lengths(empty); unchanged(); });
      }
      unchanged();
    }
    REQUIRE((poor.memory.bytes == 0 && poor.memory.mistakes == 0));
  }
}

TEST_CASE("calibration that runs out of memory can go on") {
  Poor poor;
  {
    Mirror m(poor.setup("blockgtq-k3v3"));
    for (uint32_t layer = 0; layer < 2; ++layer) {
      const Tensor k = m.tensor(layer, Text::K, ids(0, 40)), q = m.tensor(layer, Text::Q, ids(0, 40));
      auto data = sized<kvq_calibration>();
      data.layer = layer, data.n_tokens = 40, data.k = k.view(), data.q = q.view();
      starve(poor.memory, "calibrate", [&] { return kvq_calibrate(m.cache, &data); }, [] {});
    }
    size_t needed = 0;
    starve(poor.memory, "calibrate_finish", [&] { return kvq_calibrate_finish(m.cache); }, [&] { refused(kvq_policy_get(m.cache, 0, nullptr, 0, &needed), KVQ_E_STATE); });
    const Bytes blob = policy_blob(m.cache, 0);
    Mirror rich(Setup{.recipe = "blockgtq-k3v3", .layers = m.setup.layers});
    for (uint32_t layer = 0; layer < 2; ++layer) {
      const Tensor k = m.tensor(layer, Text::K, ids(0, 40)), q = m.tensor(layer, Text::Q, ids(0, 40));
      auto data = sized<kvq_calibration>();
      data.layer = layer, data.n_tokens = 40, data.k = k.view(), data.q = q.view();
      ok(kvq_calibrate(rich.cache, &data));
    }
    ok(kvq_calibrate_finish(rich.cache));
    REQUIRE(policy_blob(rich.cache, 0) == blob);  // no failed call left half of its sums
  }
  REQUIRE((poor.memory.bytes == 0 && poor.memory.mistakes == 0));
}
