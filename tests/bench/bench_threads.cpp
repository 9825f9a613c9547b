// How attention on the CPU grows with threads: a decode step of one layer through the C ABI, by the library's own threads (n_threads) and
// by threads of the caller, each with its share of the heads (n_callers), beside one thread and beside what as many threads read.
//
// Every round measures one thread and several in turn, so that both meet the same neighbours; times are of the wall, medians and the
// best.  Results must be the same bits.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "calls.hpp"
#include "half.hpp"
#include "random.hpp"
#include "report.hpp"

namespace {

struct Options {
  std::vector<std::string> recipes = {"tq-3", "pnmix", "fp16"};
  std::vector<uint64_t> contexts = {8192, 32768, 131072};
  std::vector<uint32_t> threads;
  uint32_t kv_heads = 8, q_heads = 32, dim = 128, rounds = 21;
  std::string json;
};

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Threads of a runtime, which wait for work without sleeping; the calling one is number 0.
class Crew {
 public:
  explicit Crew(uint32_t n) : size_(n) {
    for (uint32_t i = 1; i < n; i++) threads_.emplace_back([this, i] { serve(i); });
  }
  ~Crew() {
    stop_ = true;
    for (std::thread &thread : threads_) thread.join();
  }
  uint32_t size() const { return size_; }
  void run(const std::function<void(uint32_t)> &work) {
    work_ = &work;
    left_ = uint32_t(threads_.size());
    turn_++;
    work(0);
    while (left_ > 0) std::this_thread::yield();
  }

 private:
  void serve(uint32_t number) {
    for (uint64_t done = 0; !stop_;) {
      if (turn_ == done) {
        std::this_thread::yield();
        continue;
      }
      done++;
      (*work_)(number);
      left_--;
    }
  }
  const uint32_t size_;
  std::vector<std::thread> threads_;
  const std::function<void(uint32_t)> *work_ = nullptr;
  std::atomic<uint64_t> turn_{0};
  std::atomic<uint32_t> left_{0};
  std::atomic<bool> stop_{false};
};

// Bytes that the threads of a crew read per second, each from memory of its own that no cache holds.
double read_rate(Crew &crew) {
  constexpr size_t kBytes = size_t(256) << 20, kWords = kBytes / 8, kHuge = size_t(2) << 20;
  std::vector<uint64_t *> memory(crew.size());
  std::vector<uint64_t> sums(crew.size() * 8);
  crew.run([&](uint32_t i) {
    memory[i] = static_cast<uint64_t *>(std::aligned_alloc(kHuge, kBytes));
    if (!memory[i]) return;
#if defined(MADV_HUGEPAGE)
    madvise(memory[i], kBytes, MADV_HUGEPAGE);
#endif
    std::fill_n(memory[i], kWords, 1);
  });
  double best = 1e30;
  for (int round = 0; round < 5; round++) {
    const double start = now();
    crew.run([&](uint32_t i) {
      uint64_t sum[8] = {};
      for (size_t w = 0; memory[i] && w < kWords; w += 8)
        for (size_t k = 0; k < 8; k++) sum[k] += memory[i][w + k];
      std::copy_n(sum, 8, &sums[i * 8]);
    });
    best = std::min(best, now() - start);
  }
  for (uint64_t *words : memory) std::free(words);
  return double(kBytes) * crew.size() / best;
}

kvq_tensor tensor(std::vector<uint16_t> &rows, size_t offset = 0) {
  kvq_tensor t = sized<kvq_tensor>();
  t.dtype = KVQ_DTYPE_F16;
  t.data = rows.data() + offset;
  return t;
}

// A cache of one layer with a prompt, in a step whose attention is measured.
class Prompt {
 public:
  Prompt(const std::string &recipe, uint64_t tokens, uint32_t n_threads, uint32_t n_callers, const Options &o) : o_(o) {
    kvq_layer layer = sized<kvq_layer>();
    layer.kv_heads = o.kv_heads, layer.q_heads = o.q_heads, layer.dim_k = o.dim;
    kvq_config config = sized<kvq_config>();
    config.n_layers = config.n_layer_structs = 1, config.layers = &layer, config.recipe = recipe.c_str();
    config.n_threads = n_threads, config.n_callers = n_callers;
    check(kvq_create(&config, &cache_));
    check(kvq_seq_create(cache_, &seq_));
    kvq_test::Random random(tokens);
    for (auto *rows : {&k_, &v_, &q_}) {
      rows->resize(kChunk * (rows == &q_ ? o.q_heads : o.kv_heads) * o.dim);
      for (uint16_t &x : *rows) x = kvq_test::half_bits(random.normal());
    }
    commit(tokens);
    const uint32_t one = 1;
    check(kvq_step_begin(cache_, &seq_, &one, 1, 0, &step_));
    const kvq_tensor k = tensor(k_), v = tensor(v_);
    check(kvq_append(cache_, step_, 0, &k, &v, nullptr, nullptr));
    out_.resize(size_t(o.q_heads) * o.dim);
    kvq_stats stats = sized<kvq_stats>();
    check(kvq_stats_get(cache_, &stats));
    bytes_ = double(stats.page_bytes_raw + stats.page_bytes_packed);
  }
  ~Prompt() { kvq_destroy(cache_); }
  Prompt(const Prompt &) = delete;

  // All heads, or part `share` of `shares` of them.
  void attend(uint32_t share = 0, uint32_t shares = 1) {
    const uint32_t first = o_.kv_heads * share / shares, end = o_.kv_heads * (share + 1) / shares;
    if (first == end) return;
    kvq_attend_options options = sized<kvq_attend_options>();
    if (shares > 1) options.head_first = first, options.head_count = end - first;
    kvq_tensor out = sized<kvq_tensor>();
    out.data = out_.data();
    const kvq_tensor q = tensor(q_);
    check(kvq_attend(cache_, step_, 0, &q, &out, nullptr, &options, nullptr));
  }
  const std::vector<float> &out() const { return out_; }
  double bytes() const { return bytes_; }

 private:
  static constexpr size_t kChunk = 4096;
  void commit(uint64_t tokens) {
    for (uint64_t first = 0; first < tokens; first += kChunk) {
      kvq_prefill part = sized<kvq_prefill>();
      const kvq_tensor k = tensor(k_), v = tensor(v_), q = tensor(q_);
      part.n_tokens = std::min<uint64_t>(kChunk, tokens - first);
      part.k = &k, part.v = &v, part.q = &q;
      check(kvq_prefill_commit(cache_, seq_, &part, nullptr));
    }
    kvq_prefill final = sized<kvq_prefill>();
    final.flags = KVQ_PREFILL_FINAL;
    check(kvq_prefill_commit(cache_, seq_, &final, nullptr));
  }

  const Options &o_;
  kvq_cache *cache_ = nullptr;
  kvq_seq seq_ = 0;
  kvq_step step_ = 0;
  double bytes_ = 0;
  std::vector<uint16_t> k_, v_, q_;
  std::vector<float> out_;
};

struct Times {
  std::vector<double> one, many;
  double ratio() const {
    std::vector<double> ratios;
    for (size_t i = 0; i < one.size(); i++) ratios.push_back(one[i] / many[i]);
    return median(ratios);
  }
  double best() const { return *std::min_element(many.begin(), many.end()); }
};

template <class One, class Many>
Times compare(uint32_t rounds, One one, Many many) {
  Times times;
  for (uint32_t round = 0; round < rounds + 2; round++) {
    const double start = now();
    one();
    const double middle = now();
    many();
    const double end = now();
    if (round >= 2) times.one.push_back(middle - start), times.many.push_back(end - middle);
  }
  return times;
}

void measure(const std::string &recipe, uint64_t tokens, uint32_t n, double rate, const Options &o, Prompt &alone, cJSON *results) {
  const double rows = double(tokens) * o.kv_heads * 1e-9;
  cJSON *row = cJSON_CreateObject();
  cJSON_AddStringToObject(row, "recipe", recipe.c_str());
  cJSON_AddNumberToObject(row, "tokens", double(tokens));
  cJSON_AddNumberToObject(row, "threads", n);
  std::printf("%-20s %7llu %3u", recipe.c_str(), (unsigned long long)tokens, n);
  for (const bool own : {true, false}) {
    Prompt prompt(recipe, tokens, own ? n : 1, own ? 1 : n, o);
    Crew crew(own ? 1 : n);  // who waits without sleeping would keep a core from the library's threads
    const std::function<void(uint32_t)> share = [&](uint32_t i) { prompt.attend(i, n); };
    const Times times = compare(o.rounds, [&] { alone.attend(); }, [&] { own ? prompt.attend() : crew.run(share); });
    if (prompt.out() != alone.out()) throw std::runtime_error("results depend on the number of threads");
    const double ns = median(times.many) / rows, bytes = prompt.bytes() / median(times.many);
    std::printf("  %8.2f %6.2f %6.2f %7.2f %5.0f%%", ns, times.best() / rows, times.ratio(), bytes * 1e-9, bytes / rate * 100);
    cJSON *kind = cJSON_AddObjectToObject(row, own ? "n_threads" : "head_ranges");
    const std::pair<const char *, double> numbers[] = {{"ns_per_token_head", ns}, {"best_ns_per_token_head", times.best() / rows}, {"times_one_thread", times.ratio()}, {"gigabytes_per_second", bytes * 1e-9}, {"of_reading", bytes / rate}};
    for (const auto &[name, value] : numbers) cJSON_AddNumberToObject(kind, name, value);
  }
  std::printf("\n");
  std::fflush(stdout);
  cJSON_AddItemToArray(results, row);
}

}  // namespace

int main(int argc, char **argv) {
  Options o;
  for (uint32_t n = 1; n <= std::max(1u, std::thread::hardware_concurrency()); n *= 2) o.threads.push_back(n);
  CLI::App app("Decode attention on the CPU by several threads, against one and against reading memory.");
  app.add_option("--recipe", o.recipes, "recipes")->delimiter(';')->capture_default_str();
  app.add_option("--T", o.contexts, "tokens")->delimiter(',')->capture_default_str();
  app.add_option("--threads", o.threads, "numbers of threads")->delimiter(',')->capture_default_str();
  app.add_option("--kv-heads", o.kv_heads, "")->capture_default_str();
  app.add_option("--q-heads", o.q_heads, "")->capture_default_str();
  app.add_option("--dim", o.dim, "channels of a head")->capture_default_str();
  app.add_option("--rounds", o.rounds, "timed calls of each")->capture_default_str()->check(CLI::Range(1, 100000));
  app.add_option("--json", o.json, "write the results to this file");
  CLI11_PARSE(app, argc, argv);

  cJSON *report = begin_report("kvq-bench-threads", argc, argv);
  try {
    kvq_backend_info cpu = sized<kvq_backend_info>();
    check(kvq_backend_query(0, &cpu));
    cJSON_AddStringToObject(report, "path", cpu.path);
    cJSON_AddNumberToObject(report, "processors", std::thread::hardware_concurrency());
    std::vector<double> rates;
    cJSON *reading = cJSON_AddArrayToObject(report, "reading"), *results = cJSON_AddArrayToObject(report, "results");
    std::printf("%s, %s; threads read", processor().c_str(), cpu.path);
    for (const uint32_t n : o.threads) {
      Crew crew(n);
      rates.push_back(read_rate(crew));
      std::printf(" %u: %.1f GB/s", n, rates.back() * 1e-9);
      cJSON *row = cJSON_CreateObject();
      cJSON_AddNumberToObject(row, "threads", n);
      cJSON_AddNumberToObject(row, "gigabytes_per_second", rates.back() * 1e-9);
      cJSON_AddItemToArray(reading, row);
    }
    std::printf("\n%-20s %7s %3s  %-37s  %s\n%32s", "recipe", "tokens", "n", "n_threads", "head ranges", "");
    for (int i = 0; i < 2; i++) std::printf("  %8s %6s %6s %7s %6s", "ns", "best", "times", "GB/s", "read");
    std::printf("\n");
    for (const std::string &recipe : o.recipes)
      for (const uint64_t tokens : o.contexts) {
        Prompt alone(recipe, tokens, 1, 1, o);
        for (size_t i = 0; i < o.threads.size(); i++) measure(recipe, tokens, o.threads[i], rates[i], o, alone, results);
      }
  } catch (const std::exception &failure) {
    std::fprintf(stderr, "kvq-bench-threads: %s\n", failure.what());
    return 1;
  }
  write_report(report, o.json);
  cJSON_Delete(report);
}
