// Speed of decode attention: how long the newest tokens of some sequences take to attend to a context, recipe against fp16.
//
// For every context length all recipes hold the same prompt at once and are timed in turn, round by round, so that a change of
// the machine's speed meets all of them; ratios are taken within a round, and medians over rounds are reported.  Every result is
// checked against float64 attention over the values that the cache exports.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "calls.hpp"
#include "oracle.hpp"
#include "random.hpp"
#include "report.hpp"

namespace {

struct Options {
  std::vector<std::string> recipes = {"kvq-3", "kvq-2", "tq-3", "kivi-2"};
  std::vector<uint64_t> contexts = {1024, 8192, 32768};
  uint32_t batch = 1, new_tokens = 1, kv_heads = 8, q_heads = 32, dim = 128, threads = 1, rounds = 21;
  std::string json;
};

kvq_tensor tensor(std::vector<float> &rows, size_t offset = 0) {
  kvq_tensor t = sized<kvq_tensor>();
  t.data = rows.data() + offset;
  return t;
}

// The prompt that every recipe gets, and the queries.
struct Data {
  std::vector<float> k, v, q, scores, queries;

  Data(const Options &o, uint64_t context) : scores(context) {
    kvq_test::Random random(context);
    k = random.rows(context, o.kv_heads, o.dim);
    v = random.rows(context, o.kv_heads, o.dim);
    q = random.normals(std::min<uint64_t>(context, 256) * o.q_heads * o.dim);
    queries = random.normals(size_t{o.batch} * o.new_tokens * o.q_heads * o.dim, 0.1);
    check(kvq_scores_random(kvq_test::seed(), 0, context, KVQ_MEMORY_HOST, scores.data(), nullptr));
  }
};

// One layer of one recipe, holding `batch` sequences with the same prompt.
class Subject {
 public:
  std::vector<double> microseconds;
  std::vector<float> out;

  Subject(const std::string &recipe, const Options &o, uint64_t context, Data &data)
      : out(data.queries.size()), options_(o), context_(context) {
    kvq_layer layer = sized<kvq_layer>();
    layer.kv_heads = o.kv_heads, layer.q_heads = o.q_heads, layer.dim_k = o.dim;
    kvq_config config = sized<kvq_config>();
    config.n_layers = config.n_layer_structs = 1;
    config.layers = &layer;
    config.recipe = recipe.c_str();
    config.n_threads = o.threads;
    check(kvq_create(&config, &cache_));
    const std::vector<uint32_t> counts(o.batch, o.new_tokens);
    for (uint32_t i = 0; i < o.batch; ++i) {
      seqs_.push_back(0);
      check(kvq_seq_create(cache_, &seqs_.back()));
      prompt(seqs_.back(), data);
    }
    check(kvq_step_begin(cache_, seqs_.data(), counts.data(), o.batch, KVQ_STEP_QUERY_ONLY, &step_));
  }
  Subject(const Subject &) = delete;
  Subject &operator=(const Subject &) = delete;
  ~Subject() { kvq_destroy(cache_); }

  void attend(Data &data) {
    const kvq_tensor q = tensor(data.queries), result = tensor(out);
    const auto start = std::chrono::steady_clock::now();
    check(kvq_attend(cache_, step_, 0, &q, &result, nullptr, nullptr, nullptr));
    microseconds.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count());
  }

  // Bytes of pages per token and KV head, K and V together.
  double bytes() const {
    kvq_stats stats = sized<kvq_stats>();
    check(kvq_stats_get(cache_, &stats));
    return static_cast<double>(stats.page_bytes_raw + stats.page_bytes_packed) / static_cast<double>(context_ * options_.batch * options_.kv_heads);
  }

  // Largest error of sequence 0 in units of its largest value, over the query heads of the last KV head.
  double error(const Data &data) const {
    const Options &o = options_;
    const uint32_t head = o.kv_heads - 1, group = o.q_heads / o.kv_heads;
    std::vector<float> k(context_ * o.dim), v(k.size()), q;
    check(kvq_export_values(cache_, seqs_[0], 0, head, KVQ_TENSOR_K, 0, context_, k.data()));
    check(kvq_export_values(cache_, seqs_[0], 0, head, KVQ_TENSOR_V, 0, context_, v.data()));
    std::vector<float> seen;
    for (uint32_t i = 0; i < o.new_tokens; ++i) {
      const size_t first = (size_t{i} * o.q_heads + head * group) * o.dim, last = first + size_t{group} * o.dim;
      q.insert(q.end(), data.queries.begin() + first, data.queries.begin() + last);
      seen.insert(seen.end(), out.begin() + first, out.begin() + last);
    }
    kvq_test::Attention a{};
    a.tokens = context_, a.n_queries = o.new_tokens, a.q_heads = group, a.kv_heads = 1, a.dim_k = a.dim_v = o.dim;
    a.q = q.data(), a.k = k.data(), a.v = v.data();
    const std::vector<double> expected = kvq_test::attend(a).out;
    double worst = 0, largest = 0;
    for (float x : v) largest = std::max(largest, std::fabs(static_cast<double>(x)));
    for (size_t i = 0; i < seen.size(); ++i) worst = std::max(worst, std::fabs(seen[i] - expected[i]));
    return worst / largest;
  }

 private:
  void prompt(kvq_seq seq, Data &data) {
    const Options &o = options_;
    constexpr uint64_t kChunk = 256;
    for (uint64_t first = 0; first < context_; first += kChunk) {
      const kvq_tensor k = tensor(data.k, first * o.kv_heads * o.dim), v = tensor(data.v, first * o.kv_heads * o.dim), q = tensor(data.q);
      kvq_prefill chunk = sized<kvq_prefill>();
      chunk.n_tokens = std::min(kChunk, context_ - first);
      chunk.n_scores = static_cast<uint32_t>(chunk.n_tokens);
      chunk.flags = first + kChunk >= context_ ? KVQ_PREFILL_FINAL : 0;
      chunk.k = &k, chunk.v = &v, chunk.q = &q;
      chunk.scores = data.scores.data() + first;
      check(kvq_prefill_commit(cache_, seq, &chunk, nullptr));
    }
  }

  const Options &options_;
  const uint64_t context_;
  kvq_cache *cache_ = nullptr;
  std::vector<kvq_seq> seqs_;
  kvq_step step_ = 0;
};

// Measure all recipes at one context length, print a line for each, and append them to `results`.
void measure(const Options &o, uint64_t context, cJSON *results) {
  Data data(o, context);
  std::vector<std::string> names = {"fp16"};
  names.insert(names.end(), o.recipes.begin(), o.recipes.end());
  std::vector<std::unique_ptr<Subject>> subjects;
  for (const std::string &name : names) subjects.push_back(std::make_unique<Subject>(name, o, context, data));
  for (uint32_t round = 0; round < o.rounds + 2; ++round)  // two to warm up
    for (auto &subject : subjects) {
      subject->attend(data);
      if (round < 2) subject->microseconds.clear();
    }

  for (size_t i = 0; i < names.size(); ++i) {
    const Subject &s = *subjects[i];
    std::vector<double> ratios;
    for (uint32_t round = 0; round < o.rounds; ++round) ratios.push_back(subjects[0]->microseconds[round] / s.microseconds[round]);
    const double us = median(s.microseconds), bytes = s.bytes(), rows = static_cast<double>(context) * o.batch * o.kv_heads;
    const double gigabytes = bytes * rows / us * 1e-3, error = s.error(data);
    std::printf("%10llu  %-22s %10.1f %8.2f %8.1f %8.2f %8.2f %9.1e\n", static_cast<unsigned long long>(context), names[i].c_str(), us,
                us * 1e3 / rows, bytes, gigabytes, median(ratios), error);
    std::fflush(stdout);
    if (!(error <= 1e-3)) throw std::runtime_error(names[i] + ": the result is wrong");

    cJSON *result = cJSON_CreateObject();
    cJSON_AddStringToObject(result, "recipe", names[i].c_str());
    const struct {
      const char *name;
      double value;
    } numbers[] = {{"context", static_cast<double>(context)},
                   {"batch", static_cast<double>(o.batch)},
                   {"new_tokens", static_cast<double>(o.new_tokens)},
                   {"kv_heads", static_cast<double>(o.kv_heads)},
                   {"q_heads", static_cast<double>(o.q_heads)},
                   {"dim", static_cast<double>(o.dim)},
                   {"threads", static_cast<double>(o.threads)},
                   {"microseconds", us},
                   {"bytes_per_token_head", bytes},
                   {"gigabytes_per_second", gigabytes},
                   {"times_fp16", median(ratios)},
                   {"error", error}};
    for (const auto &[name, value] : numbers) cJSON_AddNumberToObject(result, name, value);
    cJSON_AddItemToArray(results, result);
  }
}

}  // namespace

int main(int argc, char **argv) {
  Options o;
  CLI::App app("Decode attention on quantized caches, against fp16 in the same run.");
  app.add_option("--recipes", o.recipes, "recipes, besides fp16")->delimiter(',')->capture_default_str();
  app.add_option("--contexts", o.contexts, "tokens in a sequence")->delimiter(',')->capture_default_str();
  app.add_option("--batch", o.batch, "sequences of a step")->capture_default_str()->check(CLI::Range(1, 4096));
  app.add_option("--new-tokens", o.new_tokens, "queries of each sequence")->capture_default_str()->check(CLI::Range(1, 64));
  app.add_option("--kv-heads", o.kv_heads, "")->capture_default_str();
  app.add_option("--q-heads", o.q_heads, "")->capture_default_str();
  app.add_option("--dim", o.dim, "channels of a head")->capture_default_str();
  app.add_option("--threads", o.threads, "threads of attention")->capture_default_str();
  app.add_option("--rounds", o.rounds, "timed calls of each recipe")->capture_default_str()->check(CLI::Range(1, 100000));
  app.add_option("--json", o.json, "write the results to this file");
  CLI11_PARSE(app, argc, argv);

  kvq_backend_info cpu = sized<kvq_backend_info>();
  cJSON *report = begin_report("kvq-bench", argc, argv);
  try {
    check(kvq_backend_query(0, &cpu));
    cJSON_AddStringToObject(report, "path", cpu.path);
    cJSON_AddStringToObject(report, "library", kvq_version_string());
    cJSON *results = cJSON_AddArrayToObject(report, "results");
    std::printf("%s, %s, KVQ_TEST_SEED=%llu\n%10s  %-22s %10s %8s %8s %8s %8s %9s\n", processor().c_str(), cpu.path,
                static_cast<unsigned long long>(kvq_test::seed()), "context", "recipe", "us", "ns/tok", "B/tok", "GB/s", "x fp16", "error");
    for (uint64_t context : o.contexts) measure(o, context, results);
  } catch (const std::exception &failure) {
    std::fprintf(stderr, "kvq-bench: %s\n", failure.what());
    return 1;
  }
  write_report(report, o.json);
  cJSON_Delete(report);
}
