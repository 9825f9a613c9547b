// Threads: different sequences at once, one sequence by two threads, worker threads, two caches in one process.
// (Cases X1, X2, X20, X21.)
#include <chrono>
#include <condition_variable>
#include <thread>

#include "allocator.hpp"
#include "mirror.hpp"

using namespace kvq_test;

namespace {

// Catch2's macros are not for threads: these calls only note that something failed.
struct Faults {
  std::atomic<int> count{0};
  std::mutex mutex;
  std::string first;
  bool ok(int32_t status) {
    if (status == KVQ_OK) return true;
    const std::lock_guard lock(mutex);
    if (count++ == 0) first = std::string(kvq_status_string(status)) + ": " + detail();
    return false;
  }
};

// A user that only knows the C ABI and its own sequences.
class User {
 public:
  User(kvq_cache *cache, const Setup &setup, uint64_t number, size_t sequences)
      : cache_(cache), setup_(setup), text_(setup.layers, number), random_(number), seqs_(sequences) {}

  // The same calls whatever other users do; the results of the attention calls are kept.
  void live(size_t calls, Faults *faults) {
    for (kvq_seq &s : seqs_) {
      faults->ok(kvq_seq_create(cache_, &s));
      commit(s, ids(uint32_t(random_.below(40)), 1 + random_.below(60)), faults);
    }
    for (size_t i = 0; i < calls && faults->count == 0; ++i) {
      const size_t which = random_.below(seqs_.size());
      switch (random_.below(10)) {
        case 0:
          replace_by_fork(which, faults);
          break;
        case 1:
          cut(seqs_[which], faults);
          break;
        default:
          step(seqs_[which], ids(uint32_t(random_.below(90)), 1 + random_.below(5)), faults);
      }
    }
  }
  const Floats &results() const { return results_; }

 private:
  void commit(kvq_seq s, const Ids &list, Faults *faults) {
    for (uint32_t layer = 0; layer < setup_.layers.size(); ++layer) {
      const Tensor k = tensor(layer, Text::K, list), v = tensor(layer, Text::V, list), q = tensor(layer, Text::Q, list);
      auto desc = sized<kvq_prefill>();
      desc.layer = layer, desc.flags = KVQ_PREFILL_FINAL, desc.n_tokens = list.size();
      desc.k = k.view(), desc.v = v.view(), desc.q = q.view();
      faults->ok(kvq_prefill_commit(cache_, s, &desc, nullptr));
    }
  }
  void step(kvq_seq s, const Ids &list, Faults *faults) {
    const uint32_t count = uint32_t(list.size());
    kvq_step id = 0;
    if (!faults->ok(kvq_step_begin(cache_, &s, &count, 1, 0, &id))) return;
    for (uint32_t layer = 0; layer < setup_.layers.size(); ++layer) {
      const Tensor k = tensor(layer, Text::K, list), v = tensor(layer, Text::V, list), q = tensor(layer, Text::Q, list);
      Tensor out(list.size(), setup_.layers[layer].q_heads, dim_v(setup_.layers[layer]), KVQ_DTYPE_F32, Lay::packed);
      faults->ok(kvq_append(cache_, id, layer, k.view(), v.view(), nullptr, nullptr));
      faults->ok(kvq_attend(cache_, id, layer, q.view(), out.view(), nullptr, nullptr, nullptr));
      const Floats values = out.values();
      results_.insert(results_.end(), values.begin(), values.begin() + 4);
    }
    if (random_.below(5) == 0)
      faults->ok(kvq_step_abort(cache_, id));
    else
      faults->ok(kvq_step_end(cache_, id, nullptr, nullptr));
  }
  void replace_by_fork(size_t which, Faults *faults) {
    kvq_seq child = 0;
    if (!faults->ok(kvq_seq_fork(cache_, seqs_[which], UINT64_MAX, &child))) return;
    faults->ok(kvq_seq_remove(cache_, seqs_[which]));
    seqs_[which] = child;
  }
  void cut(kvq_seq s, Faults *faults) {
    auto length = sized<kvq_lengths>();
    if (faults->ok(kvq_seq_length(cache_, s, &length))) faults->ok(kvq_seq_truncate(cache_, s, length.total - random_.below(length.total + 1) / 2));
  }
  Tensor tensor(uint32_t layer, Text::Kind kind, const Ids &list) {
    return Tensor(text_.rows(layer, kind, list), text_.heads(layer, kind), text_.dim(layer, kind));
  }

  kvq_cache *cache_;
  const Setup &setup_;
  Text text_;
  Random random_;
  std::vector<kvq_seq> seqs_;
  Floats results_;
};

}  // namespace

TEST_CASE("threads on different sequences get what each would get alone") {  // X1
  for (const char *recipe : {"k=affine-channel(levels=16,group=16);v=lloyd(levels=8);block=16;sinks=2;recent=3",
                             "k=channel-widths(group=16,midpoint=1);v=lloyd(levels=3);block=16;policy=pair-widths(avg=3,bmin=1,bmax=6)"}) {
    const Setup setup{.recipe = recipe, .layers = {layer_of(2, 1, 32), layer_of(1, 2, 32)}};
    const size_t users = 8, calls = 300 / kSlow + 20, sequences = 8;
    Faults faults;
    Cache shared(setup);
    std::vector<User> together;
    for (uint64_t i = 0; i < users; ++i) together.emplace_back(shared, setup, i, sequences);
    std::vector<std::thread> threads;
    for (User &user : together) threads.emplace_back([&] { user.live(calls, &faults); });
    for (std::thread &thread : threads) thread.join();
    INFO(faults.first);
    REQUIRE(faults.count == 0);
    for (uint64_t i = 0; i < users; ++i) {
      Cache own(setup);
      User alone(own, setup, i, sequences);
      alone.live(calls, &faults);
      REQUIRE(same_bits(alone.results(), together[i].results()));
    }
    REQUIRE(stats(shared).sequences == users * sequences);
  }
}

TEST_CASE("a second thread on a sequence in use is told that it is busy") {  // X2
  // The allocator holds the first thread inside its call for a while.
  struct Gate {
    std::mutex mutex;
    std::condition_variable changed;
    bool armed = false, inside = false, released = false;
  } gate;
  kvq_allocator callbacks = sized<kvq_allocator>();
  callbacks.user = &gate;
  callbacks.alloc = [](void *user, size_t size, size_t align) -> void * {
    Gate &g = *static_cast<Gate *>(user);
    std::unique_lock lock(g.mutex);
    if (g.armed) {
      g.armed = false, g.inside = true;
      g.changed.notify_all();
      g.changed.wait_for(lock, std::chrono::seconds(20), [&] { return g.released; });
    }
    return std::aligned_alloc(align, (size + align - 1) / align * align);
  };
  callbacks.release = [](void *, void *ptr, size_t, size_t) { std::free(ptr); };
  Mirror m(Setup{.recipe = kK4V4, .layers = {layer_of(2, 2, 64)}, .allocator = &callbacks});
  const kvq_seq s = m.create(), other = m.create();
  m.commit(s, ids(0, 100)), m.commit(other, ids(0, 50));
  const Tensor k = m.tensor(0, Text::K, ids(0, 500)), v = m.tensor(0, Text::V, ids(0, 500));
  auto desc = sized<kvq_prefill>();
  desc.n_tokens = 500, desc.k = k.view(), desc.v = v.view(), desc.flags = KVQ_PREFILL_FINAL;
  int32_t first = 1;
  gate.armed = true;
  std::thread holder([&] { first = kvq_prefill_commit(m.cache, s, &desc, nullptr); });
  {
    std::unique_lock lock(gate.mutex);
    REQUIRE(gate.changed.wait_for(lock, std::chrono::seconds(20), [&] { return gate.inside; }));
  }
  const uint32_t one = 1;
  kvq_step step = 0;
  kvq_seq child = 0;
  float row[64];
  const int32_t results[] = {kvq_seq_truncate(m.cache, s, 3), kvq_step_begin(m.cache, &s, &one, 1, 0, &step), kvq_seq_remove(m.cache, s),
                             kvq_seq_fork(m.cache, s, 1, &child), kvq_end_turn(m.cache, s),
                             kvq_export_values(m.cache, s, 0, 0, 0, 0, 1, row)};
  auto length = sized<kvq_lengths>();
  const int32_t others[] = {kvq_seq_truncate(m.cache, other, 49), kvq_seq_length(m.cache, other, &length)};
  {
    const std::lock_guard lock(gate.mutex);
    gate.released = true;
    gate.changed.notify_all();
  }
  holder.join();
  ok(first);
  for (int32_t status : results) CHECK(status == KVQ_E_BUSY);
  for (int32_t status : others) CHECK(status == KVQ_OK);
  REQUIRE(lengths(m.cache, s).total == 600);
}

TEST_CASE("readers of one sequence in one step, and one step by many threads, end in a result or in BUSY") {  // X2
  Mirror m(Setup{.recipe = kK4V4, .layers = {layer_of(2, 2, 64)}});
  const kvq_seq s = m.create();
  m.commit(s, ids(0, 300));
  const Seen want = m.query(s, 1);
  const uint32_t one = 1;
  kvq_step step = 0;
  ok(kvq_step_begin(m.cache, &s, &one, 1, KVQ_STEP_QUERY_ONLY, &step));
  std::atomic<int> good{0}, wrong{0};
  std::vector<std::thread> threads;
  const Tensor q = m.tensor(0, Text::Q, ids(299, 1));
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&] {
      for (int i = 0; i < 200; ++i) {
        Tensor out(1, 4, 64, KVQ_DTYPE_F32, Lay::packed);
        const int32_t status = kvq_attend(m.cache, step, 0, q.view(), out.view(), nullptr, nullptr, nullptr);
        if (status == KVQ_OK)
          ++(same_bits(out.values(), want.out[0]) ? good : wrong);
        else if (status != KVQ_E_BUSY)
          ++wrong;
      }
    });
  for (std::thread &thread : threads) thread.join();
  ok(kvq_step_end(m.cache, step, nullptr, nullptr));
  REQUIRE(good > 0);
  REQUIRE(wrong == 0);
}

TEST_CASE("the number of worker threads does not change a bit") {  // X20
  for (const char *recipe : {kK4V4, "kvq-3", "semkv-tq", "blockgtq-k3v3"}) {
    std::vector<Seen> seen;
    for (uint32_t n_threads : {0, 1, 2, 3, 8}) {
      Mirror m(Setup{.recipe = recipe, .layers = {layer_of(3, 2, 64)}, .n_threads = n_threads});
      const kvq_seq a = m.create(), b = m.create();
      m.commit(a, ids(0, 2000 / kSlow)), m.commit(b, ids(0, 70));
      seen.push_back(m.step({a, b}, {ids(2000, 3), ids(2003, 1)}));
      const Seen again = m.query({b, a}, {1, 4});
      seen.back().out.insert(seen.back().out.end(), again.out.begin(), again.out.end());
      seen.back().lse.insert(seen.back().lse.end(), again.lse.begin(), again.lse.end());
    }
    for (const Seen &other : seen) REQUIRE(same_bits(other, seen[0]));
  }
}

TEST_CASE("threads are made only where the configuration asks for them, and end with the cache") {  // X10, X20
  const auto threads_now = [] {
    size_t count = 0;
    FILE *file = std::fopen("/proc/self/status", "r");
    char line[256];
    while (file && std::fgets(line, sizeof line, file))
      if (std::sscanf(line, "Threads: %zu", &count) == 1) break;
    if (file) std::fclose(file);
    return count;
  };
  std::thread([] {}).join();  // with the first one a sanitizer makes one of its own, which stays
  for (size_t seen = 0; seen != threads_now(); std::this_thread::sleep_for(std::chrono::milliseconds(20))) seen = threads_now();
  const size_t before = threads_now();
  for (int round = 0; round < 20; ++round) {
    for (uint32_t n_threads : {1, 4}) {
      Mirror m(Setup{.recipe = kK4V4, .layers = {layer_of(2, 2, 64)}, .n_threads = n_threads});
      const kvq_seq s = m.create();
      m.commit(s, ids(0, 500));
      m.query(s, 4);
      REQUIRE(threads_now() <= before + (n_threads == 1 ? 0 : 3));
    }
    // A joined thread leaves the kernel's list a moment after the join.
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (threads_now() != before && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
    REQUIRE(threads_now() == before);
  }
}

TEST_CASE("two caches keep their memory and their messages apart") {  // X21
  CountingAllocator memory[2];
  const kvq_allocator callbacks[2] = {memory[0].callbacks(), memory[1].callbacks()};
  std::atomic<int> messages[2] = {};
  const auto log = [](void *user, int32_t level, const char *text) {
    if (level >= KVQ_LOG_ERROR && level <= KVQ_LOG_INFO && text && *text) ++*static_cast<std::atomic<int> *>(user);
  };
  Setup setup{.recipe = "kvq-2", .layers = {layer_of(2, 2, 64)}};
  setup.allocator = &callbacks[0], setup.log = log, setup.log_user = &messages[0];
  Mirror busy(setup);
  setup.allocator = &callbacks[1], setup.log_user = &messages[1];
  Mirror idle(setup);
  const kvq_seq quiet = idle.create();
  idle.commit(quiet, ids(0, 200));
  const uint64_t bytes = memory[1].bytes, calls = memory[1].allocations;
  const int spoken = messages[1];
  const kvq_seq s = busy.create();
  busy.commit(s, ids(0, 500));
  busy.append(s, ids(500, 100), 7);
  refused(kvq_seq_truncate(busy.cache, s, 10000), KVQ_E_INVALID);
  const kvq_seq again = idle.create();
  idle.remove(again);
  if (on_device()) {  // whose memory counts too, though no allocator gave it
    REQUIRE((stats(busy.cache).bytes_used > memory[0].bytes && stats(idle.cache).bytes_used > memory[1].bytes));
  } else {
    REQUIRE(stats(busy.cache).bytes_used == memory[0].bytes);
    REQUIRE(stats(idle.cache).bytes_used == memory[1].bytes);
  }
  REQUIRE(memory[1].allocations <= calls + 8);
  REQUIRE(memory[1].bytes <= bytes + 16384);
  REQUIRE(messages[1] == spoken);
  idle.check(quiet), busy.check(s);
}

namespace {

// A cache of two layers with a committed prompt of two sequences, and an open step with its rows appended.
struct Ranges {
  explicit Ranges(uint32_t n_callers, uint32_t flags = 0) {
    layer.kv_heads = kHeads, layer.q_heads = 2 * kHeads, layer.dim_k = 64, layer.dim_v = 32;
    auto config = sized<kvq_config>();
    config.n_layers = 2, config.n_layer_structs = 1, config.layers = &layer, config.recipe = "tq-3;sinks=4";
    config.n_callers = n_callers;
    REQUIRE(kvq_create(&config, &cache) == KVQ_OK);
    Random random(7);
    for (kvq_seq &seq : seqs) {
      REQUIRE(kvq_seq_create(cache, &seq) == KVQ_OK);
      rows(300, &random, [&](const kvq_tensor &k, const kvq_tensor &v, uint32_t l) {
        auto desc = sized<kvq_prefill>();
        desc.layer = l, desc.flags = KVQ_PREFILL_FINAL, desc.n_tokens = 300, desc.k = &k, desc.v = &v;
        REQUIRE(kvq_prefill_commit(cache, seq, &desc, nullptr) == KVQ_OK);
      });
    }
    const uint32_t counts[2] = {1, 3};
    REQUIRE(kvq_step_begin(cache, seqs, counts, 2, flags, &step) == KVQ_OK);
    if (!(flags & KVQ_STEP_QUERY_ONLY))
      rows(4, &random, [&](const kvq_tensor &k, const kvq_tensor &v, uint32_t l) {
        REQUIRE(kvq_append(cache, step, l, &k, &v, nullptr, nullptr) == KVQ_OK);
      });
    query = random.normals(4 * 2 * kHeads * 64, 0.2);
  }
  ~Ranges() { kvq_destroy(cache); }

  template <class F>
  void rows(uint32_t tokens, Random *random, F &&f) {
    for (uint32_t l = 0; l < 2; l++) {
      Floats k = random->rows(tokens, kHeads, 64), v = random->rows(tokens, kHeads, 32);
      auto keys = sized<kvq_tensor>(), values = sized<kvq_tensor>();
      keys.data = k.data(), values.data = v.data();
      f(keys, values, l);
    }
  }

  struct Result {
    Floats out = Floats(4 * 2 * kHeads * 32, -7.0f), lse = Floats(4 * 2 * kHeads, -7.0f);
    bool operator==(const Result &) const = default;
  };
  int32_t attend(uint32_t l, uint32_t first, uint32_t count, Result *result) {
    auto q = sized<kvq_tensor>(), out = sized<kvq_tensor>();
    q.data = query.data(), out.data = result->out.data();
    auto options = sized<kvq_attend_options>();
    options.head_first = first, options.head_count = count;
    return kvq_attend(cache, step, l, &q, &out, result->lse.data(), &options, nullptr);
  }

  static constexpr uint32_t kHeads = 6;
  kvq_layer layer = sized<kvq_layer>();
  kvq_cache *cache = nullptr;
  kvq_seq seqs[2] = {};
  kvq_step step = 0;
  Floats query;
};

}  // namespace

TEST_CASE("a call over a head range writes its own rows, with the bits of a call for all heads") {
  for (const uint32_t flags : {0u, KVQ_STEP_QUERY_ONLY}) {
    Ranges ranges(1, flags);
    Ranges::Result whole, parts;
    REQUIRE(ranges.attend(0, 0, 0, &whole) == KVQ_OK);
    for (const auto &[first, count] : {std::pair(0u, 1u), {1u, 3u}, {4u, 2u}}) {
      const Ranges::Result before = parts;
      REQUIRE(ranges.attend(0, first, count, &parts) == KVQ_OK);
      for (size_t row = 0; row < parts.lse.size(); row++) {
        const uint32_t head = uint32_t(row % (2 * Ranges::kHeads)) / 2;
        const bool mine = head >= first && head < first + count;
        REQUIRE(parts.lse[row] == (mine ? whole : before).lse[row]);
        for (size_t c = 0; c < 32; c++) REQUIRE(parts.out[row * 32 + c] == (mine ? whole : before).out[row * 32 + c]);
      }
    }
    REQUIRE(parts == whole);
    Ranges::Result all;
    REQUIRE(ranges.attend(0, 0, Ranges::kHeads, &all) == KVQ_OK);
    REQUIRE(all == whole);
  }
}

TEST_CASE("head ranges beyond the KV heads are refused, and non-finite queries only where the range reads them") {
  Ranges ranges(1);
  Ranges::Result result;
  for (const auto &[first, count] : {std::pair(0u, 7u), {6u, 1u}, {1u, 6u}, {1u, 0u}, {UINT32_MAX, 2u}, {2u, UINT32_MAX}})
    REQUIRE(ranges.attend(0, first, count, &result) == KVQ_E_INVALID);
  REQUIRE(result == Ranges::Result());
  ranges.query[5 * 64 + 3] = std::numeric_limits<float>::infinity();  // query head 5: KV head 2
  REQUIRE(ranges.attend(0, 0, 2, &result) == KVQ_OK);
  REQUIRE(ranges.attend(0, 2, 1, &result) == KVQ_E_NONFINITE);
  REQUIRE(detail().find("head 5") != std::string::npos);
}

TEST_CASE("threads of the caller share a step by heads, layer after layer") {
  constexpr uint32_t kCallers = 3;
  Ranges ranges(kCallers);
  Ranges::Result expected[2], results[2];
  for (uint32_t l = 0; l < 2; l++) REQUIRE(ranges.attend(l, 0, 0, &expected[l]) == KVQ_OK);
  for (int turn = 0; turn < 50; turn++) {
    for (uint32_t l = 0; l < 2; l++) {
      std::atomic<int> wrong{0};
      std::vector<std::thread> threads;
      for (uint32_t t = 0; t < kCallers; t++)
        threads.emplace_back([&, t] { wrong += ranges.attend(l, 2 * t, 2, &results[l]) != KVQ_OK; });
      for (std::thread &thread : threads) thread.join();
      REQUIRE(wrong == 0);
      REQUIRE(results[l] == expected[l]);
    }
  }
  REQUIRE(kvq_step_end(ranges.cache, ranges.step, nullptr, nullptr) == KVQ_OK);
}

TEST_CASE("calls over head ranges beside calls that want the step alone are done or BUSY, and nothing breaks") {
  Ranges ranges(2);
  Ranges::Result expected;
  REQUIRE(ranges.attend(0, 0, 0, &expected) == KVQ_OK);
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (uint32_t t = 0; t < 4; t++)
    threads.emplace_back([&, t] {
      for (int i = 0; i < 200; i++) {
        Ranges::Result result;
        const uint32_t first = t == 0 ? 0 : t, count = t == 0 ? 0 : 1;
        const int32_t status = ranges.attend(0, first, count, &result);
        wrong += status != KVQ_OK && status != KVQ_E_BUSY;
        wrong += status == KVQ_OK && result.lse[2 * first] != expected.lse[2 * first];
      }
    });
  for (std::thread &thread : threads) thread.join();
  REQUIRE(wrong == 0);
  REQUIRE(kvq_step_abort(ranges.cache, ranges.step) == KVQ_OK);
}
