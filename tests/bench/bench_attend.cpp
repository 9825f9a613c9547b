// Speed of the CPU backend's attention below the C ABI, for one decode step of one layer, against the naive way in the same process:
// decode every page to fp32 with the exporter, then attend in fp32 with loops compiled for the same instruction set.
//
// Pages lie in memory in random order, as in a cache that has been used.  Rounds alternate between the two ways, times are medians,
// and the result is checked against float64 over the decoded values.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "calls.hpp"
#include "cpu/cpu_backend.h"
#include "half.hpp"
#include "oracle.hpp"
#include "random.hpp"
#include "recipe/recipe.h"
#include "report.hpp"

namespace {

struct Options {
  std::vector<std::string> recipes;
  std::vector<uint64_t> contexts = {32768};
  double sharp = 1;
  uint32_t kv_heads = 8, q_heads = 32, dim = 128, threads = 1, rounds = 21, queries = 1;
  std::string json;
};

kvq_tensor tensor_of(const void *data, uint32_t heads, uint32_t dim) {
  kvq_tensor tensor = sized<kvq_tensor>();
  tensor.data = const_cast<void *>(data);
  tensor.token_stride = int64_t(heads) * dim;
  tensor.head_stride = dim;
  return tensor;
}

// Time of the processor for one thread, which other programs disturb less; of the wall for several.
double now(uint32_t threads) {
  timespec time;
  clock_gettime(threads > 1 ? CLOCK_MONOTONIC : CLOCK_PROCESS_CPUTIME_ID, &time);
  return double(time.tv_sec) + 1e-9 * double(time.tv_nsec);
}
template <class F>
double seconds(uint32_t threads, F &&f) {
  const double start = now(threads);
  f();
  return now(threads) - start;
}

// ---------------------------------------------------------------------------------------------------- the naive way

// softmax(q . K^T) . V of `rows` rows over T decoded tokens of one KV head; written for the vectorizer.
__attribute__((always_inline)) inline void naive_rows(const float *k, const float *v, const float *q, uint32_t rows, uint64_t tokens,
                                                      uint32_t dim, std::vector<float> &logits, float *out) {
  constexpr uint32_t kLanes = 16;
  logits.resize(tokens);
  for (uint32_t r = 0; r < rows; r++) {
    const float *query = q + size_t(r) * dim;
    float most = -INFINITY;
    for (uint64_t t = 0; t < tokens; t++) {
      float lane[kLanes] = {}, sum = 0;
      for (uint32_t c = 0; c < dim; c += kLanes)
        for (uint32_t i = 0; i < kLanes; i++) lane[i] += query[c + i] * k[t * dim + c + i];
      for (uint32_t i = 0; i < kLanes; i++) sum += lane[i];
      logits[t] = sum;
      most = std::max(most, sum);
    }
    float *sums = out + size_t(r) * dim, total = 0;
    std::fill_n(sums, dim, 0.0f);
    for (uint64_t t = 0; t < tokens; t++) {
      const float p = std::exp(logits[t] - most);
      total += p;
      for (uint32_t c = 0; c < dim; c++) sums[c] += p * v[t * dim + c];
    }
    for (uint32_t c = 0; c < dim; c++) sums[c] /= total;
  }
}

#define NAIVE_ARGUMENTS                                                                                                     \
  const float *k, const float *v, const float *q, uint32_t rows, uint64_t tokens, uint32_t dim, std::vector<float> &logits, \
      float *out
void naive_portable(NAIVE_ARGUMENTS) { naive_rows(k, v, q, rows, tokens, dim, logits, out); }
#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) void naive_avx2(NAIVE_ARGUMENTS) { naive_rows(k, v, q, rows, tokens, dim, logits, out); }
__attribute__((target("avx512f,avx512vl,avx512bw,avx512dq,fma,prefer-vector-width=512"))) void naive_avx512(NAIVE_ARGUMENTS) {
  naive_rows(k, v, q, rows, tokens, dim, logits, out);
}
#endif

using Naive = void (*)(NAIVE_ARGUMENTS);
Naive naive_path(const std::string &path) {
#if defined(__x86_64__)
  if (path == "avx2" || path == "avxvnni") return naive_avx2;
  if (path == "avx512") return naive_avx512;
#endif
  return naive_portable;
}

// ---------------------------------------------------------------------------------------------------- one layer with a context

class Layer {
 public:
  Layer(const std::string &recipe_text, const Options &o, uint64_t tokens)
      : o_(o), tokens_(tokens), random_(tokens), backend_(kvq::make_cpu_backend(&memory_, o.threads)), recipe_(&memory_) {
    shape_ = {o.kv_heads, o.q_heads, o.dim, o.dim, KVQ_ROPE_HALF, o.dim, 0, 0, 0};
    check(kvq::parse_recipe(recipe_text, {&shape_, 1}, &recipe_));
    for (uint32_t h = 0; h < o.kv_heads; h++)
      for (uint32_t c = 0; c < o.dim; c++) scale_.push_back(float(std::exp2(random_.normal())));
    query_ = random_.normals(size_t(o.queries) * o.q_heads * o.dim, o.sharp);
    for (uint32_t q = 0; q < o.queries * o.q_heads; q++)  // logits of unit size whatever the channels' scales are
      for (uint32_t c = 0; c < o.dim; c++)
        query_[size_t(q) * o.dim + c] /= scale_[size_t(q % o.q_heads) / (o.q_heads / o.kv_heads) * o.dim + c];
    out_.resize(size_t(o.queries) * o.q_heads * o.dim);
    freeze();
    fill();
    workspace_ = backend_->make_workspace({&shape_, 1});
  }
  ~Layer() {
    for (const auto &[page, bytes] : pages_) backend_->release_page(page, bytes);
  }

  void attend() {
    const kvq_tensor q = tensor_of(query_.data(), o_.q_heads, o_.dim), out = tensor_of(out_.data(), o_.q_heads, o_.dim);
    const kvq::PageList list{this, views_.size(),
                             [](const void *self, uint32_t, size_t i) { return static_cast<const Layer *>(self)->views_[i]; }};
    const kvq::AttendSequence sequence{list, tokens_, 0, o_.queries};
    const kvq::AttendCall call{0, &shape_, &q, &out, nullptr, scale(), 0, 0, nullptr, {&sequence, 1}};
    check(backend_->attend(call, workspace_.get()));
  }

  void naive(Naive attend_naively) {
    const uint32_t ratio = o_.q_heads / o_.kv_heads;
    naive_out_.resize(out_.size());
    std::vector<float> k, v, q, logits;
    for (uint32_t h = 0; h < o_.kv_heads; h++) {
      decode(h, KVQ_TENSOR_K, &k);
      decode(h, KVQ_TENSOR_V, &v);
      const size_t first = size_t(h) * ratio * o_.dim;
      q.assign(query_.begin() + first, query_.begin() + first + size_t(ratio) * o_.dim);
      for (float &x : q) x *= scale();
      attend_naively(k.data(), v.data(), q.data(), ratio, tokens_, o_.dim, logits, naive_out_.data() + first);
    }
  }

  // Largest error in units of section 9's tolerance, for the query heads of one KV head and the last query.
  double error() {
    const uint32_t ratio = o_.q_heads / o_.kv_heads, head = o_.kv_heads - 1;
    std::vector<float> k, v, q;
    decode(head, KVQ_TENSOR_K, &k);
    decode(head, KVQ_TENSOR_V, &v);
    const size_t first = (size_t(o_.queries - 1) * o_.q_heads + head * ratio) * o_.dim;
    for (size_t i = 0; i < size_t(ratio) * o_.dim; i++) q.push_back(kvq_test::entry(query_[first + i]));
    kvq_test::Attention a{};
    a.tokens = tokens_, a.n_queries = 1, a.q_heads = ratio, a.kv_heads = 1, a.dim_k = a.dim_v = o_.dim;
    a.q = q.data(), a.k = k.data(), a.v = v.data(), a.scale = scale();
    const kvq_test::Attended exact = kvq_test::attend(a);
    double largest = 0, worst = 0;
    for (const float x : v) largest = std::max(largest, std::fabs(double(x)));
    for (uint32_t r = 0; r < ratio; r++)
      worst = std::max(worst, kvq_test::attention_error(out_.data() + first + size_t(r) * o_.dim, exact.out.data() + size_t(r) * o_.dim,
                                                        o_.dim, exact.variance[r], largest));
    return worst;
  }

  double bytes_per_token_head() const {
    double bytes = 0;
    for (const kvq::PageView &view : views_)
      bytes += double(view.format ? view.format->bytes : backend_->raw_page_bytes(shape_)) * view.count /
               (view.format ? view.format->page_tokens : backend_->raw_page_tokens());
    return bytes / double(tokens_ * o_.kv_heads);
  }

 private:
  float scale() const { return float(1.0 / std::sqrt(double(o_.dim))); }

  std::vector<float> keys(uint64_t tokens) {
    std::vector<float> k(tokens * o_.kv_heads * o_.dim);
    for (size_t i = 0; i < k.size(); i++) k[i] = float(random_.normal()) * scale_[i % scale_.size()];
    return k;
  }

  // Rows as raw pages.
  std::vector<kvq::PageRows> raw(const std::vector<float> &k, const std::vector<float> &v) {
    const kvq_tensor keys = tensor_of(k.data(), o_.kv_heads, o_.dim), values = tensor_of(v.data(), o_.kv_heads, o_.dim);
    const uint64_t tokens = k.size() / (o_.kv_heads * o_.dim);
    std::vector<kvq::PageRows> rows;
    uint64_t saturated = 0;
    for (uint64_t t = 0; t < tokens; t += backend_->raw_page_tokens()) {
      rows.push_back({allocate(backend_->raw_page_bytes(shape_)), 0, uint32_t(std::min<uint64_t>(backend_->raw_page_tokens(), tokens - t))});
      check(backend_->store_rows(shape_, keys, values, t, rows.back(), &saturated));
    }
    return rows;
  }

  void *allocate(size_t bytes) {
    pages_.emplace_back(backend_->allocate_page(bytes), bytes);
    return pages_.back().first;
  }
  void release(const std::vector<kvq::PageRows> &rows) {
    for (const kvq::PageRows &row : rows) {
      const auto page = std::find_if(pages_.rbegin(), pages_.rend(), [&](const auto &p) { return p.first == row.page; });
      backend_->release_page(page->first, page->second);
      pages_.erase(std::next(page).base());
    }
  }

  // Tables of the policy from 512 tokens, and formats from them.
  void freeze() {
    const std::vector<float> k = keys(512), v = random_.normals(k.size());
    const std::vector<kvq::PageRows> rows = raw(k, v);
    kvq::LayerStatistics statistics(&memory_);
    kvq::reset_statistics(shape_, &statistics);
    std::vector<float> q = random_.normals(512 * size_t(o_.q_heads) * o_.dim);
    const kvq_tensor queries = tensor_of(q.data(), o_.q_heads, o_.dim);
    backend_->add_statistics(shape_, rows, &queries, 0, &statistics);
    kvq::LayerTables tables(&memory_);
    if (recipe_.policy.kind == kvq::PolicyKind::chanmix)
      profile(&tables);
    else
      check(kvq::decide_tables(recipe_.policy, recipe_.layers[0], shape_, statistics, &tables));
    for (uint32_t cls = 0; cls < recipe_.classes; cls++) formats_.push_back(format(cls, tables));
    release(rows);
  }

  // ChanMix's profile is the caller's: a retrieval head of 4 bits, in the others a quarter of 3 bits and one of 1 bit.
  void profile(kvq::LayerTables *tables) {
    constexpr uint8_t kWidths[4] = {3, 2, 1, 2};
    for (uint32_t h = 0; h < o_.kv_heads; h++) {
      auto &widths = tables->k.emplace_back();
      for (uint32_t c = 0; c < o_.dim; c++) widths.push_back(h == 0 ? 4 : kWidths[random_.below(4)]);
    }
  }

  std::shared_ptr<const kvq::PageFormat> format(uint32_t cls, const kvq::LayerTables &tables) {
    std::pmr::vector<kvq::HeadFormat> k, v;
    const std::vector<uint16_t> zeros(o_.dim);
    for (uint32_t h = 0; h < o_.kv_heads; h++)
      for (uint32_t tensor : {KVQ_TENSOR_K, KVQ_TENSOR_V}) {
        const kvq::Codec &codec = tensor == KVQ_TENSOR_K ? recipe_.layers[0].k[cls] : recipe_.layers[0].v[cls];
        const auto &all = tensor == KVQ_TENSOR_K ? tables.k : tables.v;
        kvq::HeadFormat head(&memory_);
        check(kvq::make_format(codec, shape_.head(tensor), h < all.size() ? std::span<const uint8_t>(all[h]) : std::span<const uint8_t>(),
                               codec.center ? std::span<const uint16_t>(zeros) : std::span<const uint16_t>(), &head));
        (tensor == KVQ_TENSOR_K ? k : v).push_back(std::move(head));
      }
    return backend_->make_format(shape_, page_tokens(), std::move(k), std::move(v));
  }

  uint32_t page_tokens() const { return backend_->page_tokens(recipe_.page_tokens); }

  void list(const kvq::PageRows &rows, const kvq::PageFormat *format) {
    kvq::PageView view;
    view.page = rows.page, view.format = format, view.count = rows.count, view.position = listed_;
    views_.push_back(view);
    listed_ += rows.count;
  }

  // Sinks, packed pages and tail as the recipe divides them; token classes in the policy's proportion.
  void fill() {
    const kvq::Split split = kvq::split_tokens(recipe_, tokens_);
    append_raw(split.sinks);
    const uint64_t pages = split.packed / page_tokens();
    std::vector<void *> memory[2];
    for (uint32_t cls = 0; cls < recipe_.classes; cls++) {
      for (uint64_t i = 0; i <= pages; i++) memory[cls].push_back(allocate(formats_[cls]->bytes));
      for (size_t i = memory[cls].size(); i > 1; i--) std::swap(memory[cls][i - 1], memory[cls][random_.below(i)]);
    }
    uint64_t high = 0, done = 0;
    for (uint64_t i = 0; done < split.packed; i++) {
      const bool is_high = recipe_.classes == 2 && high * recipe_.policy.r.q < (i + 1) * recipe_.policy.r.p;
      high += is_high;
      const uint32_t count = uint32_t(std::min<uint64_t>(page_tokens(), split.packed - done));
      append_packed(*formats_[is_high], memory[is_high][i], count);
      done += count;
    }
    append_raw(split.tail);
  }

  void append_raw(uint64_t tokens) {
    const std::vector<float> k = keys(tokens), v = random_.normals(k.size());
    for (const kvq::PageRows &rows : raw(k, v)) list(rows, nullptr);
  }
  void append_packed(const kvq::PageFormat &format, void *page, uint32_t count) {
    const std::vector<float> k = keys(count), v = random_.normals(k.size());
    const std::vector<kvq::PageRows> from = raw(k, v);
    const kvq::PageRows to{page, 0, count};
    backend_->pack(shape_, format, from, {&to, 1});
    release(from);
    list(to, &format);
  }

  void decode(uint32_t head, uint32_t tensor, std::vector<float> *out) {
    out->resize(tokens_ * o_.dim);
    float *to = out->data();
    std::vector<uint16_t> halves(backend_->raw_page_tokens() * size_t(o_.dim));
    for (const kvq::PageView &view : views_) {
      if (view.format) {
        kvq::Block block(&memory_);
        backend_->unpack(*view.format, view.page, view.first, view.count, head, tensor, &block);
        kvq::decode(tensor == KVQ_TENSOR_K ? view.format->k[head] : view.format->v[head], block, to);
      } else {
        backend_->load_rows(shape_, {const_cast<void *>(view.page), view.first, view.count}, head, tensor, halves.data());
        for (size_t i = 0; i < size_t(view.count) * o_.dim; i++) to[i] = float(kvq_test::half_value(halves[i]));
      }
      to += size_t(view.count) * o_.dim;
    }
  }

  const Options &o_;
  const uint64_t tokens_;
  kvq_test::Random random_;
  kvq::Memory memory_;
  kvq::LayerShape shape_{};
  std::shared_ptr<kvq::Backend> backend_;
  kvq::Recipe recipe_;
  std::vector<float> scale_, query_, out_, naive_out_;
  std::vector<std::shared_ptr<const kvq::PageFormat>> formats_;
  std::vector<std::pair<void *, size_t>> pages_;
  std::vector<kvq::PageView> views_;
  uint64_t listed_ = 0;
  std::shared_ptr<kvq::Workspace> workspace_;
};

// ---------------------------------------------------------------------------------------------------- report

void measure(const std::string &recipe, uint64_t tokens, const Options &o, cJSON *results) {
  Layer layer(recipe, o, tokens);
  const uint32_t naive_rounds = o.queries == 1 ? std::min(o.rounds, 3u) : 0;
  std::vector<double> times, naive;
  for (uint32_t round = 0; round < o.rounds + 2; round++) {
    const double time = seconds(o.threads, [&] { layer.attend(); });
    if (round >= 2) times.push_back(time);
    if (round < naive_rounds) naive.push_back(seconds(1, [&] { layer.naive(naive_path(kvq::cpu_path_name())); }));
  }
  const double rows = double(tokens) * o.kv_heads, ns = median(times) * 1e9 / rows, bytes = layer.bytes_per_token_head();
  const double best = *std::min_element(times.begin(), times.end()) * 1e9 / rows;
  const double naive_ns = naive.empty() ? 0 : median(naive) * 1e9 / rows, error = layer.error();
  std::printf("%-9s %8llu  %-20s %8.2f %8.2f %7.1f %7.2f %8.1f %7.1f %9.4f\n", kvq::cpu_path_name(), (unsigned long long)tokens, recipe.c_str(), ns, best, bytes, bytes / ns, naive_ns, naive_ns / ns, error);
  std::fflush(stdout);
  cJSON *result = cJSON_CreateObject();
  cJSON_AddStringToObject(result, "path", kvq::cpu_path_name());
  cJSON_AddStringToObject(result, "recipe", recipe.c_str());
  const std::pair<const char *, double> numbers[] = {
      {"context", double(tokens)}, {"kv_heads", o.kv_heads}, {"q_heads", o.q_heads}, {"dim", o.dim}, {"queries", o.queries}, {"threads", o.threads}, {"sharp", o.sharp}, {"ns_per_token_head", ns}, {"best_ns_per_token_head", best}, {"bytes_per_token_head", bytes}, {"gigabytes_per_second", bytes / ns}, {"naive_ns_per_token_head", naive_ns}, {"times_naive", naive_ns / ns}, {"error_of_tolerance", error}};
  for (const auto &[name, value] : numbers) cJSON_AddNumberToObject(result, name, value);
  cJSON_AddItemToArray(results, result);
}

}  // namespace

int main(int argc, char **argv) {
  Options o;
  std::vector<std::string> paths = {kvq::cpu_path_name()};
  for (uint32_t i = 0; kvq::preset_name(i); i++) o.recipes.push_back(kvq::preset_name(i));
  CLI::App app("Decode attention of the CPU backend, against decoding everything first.");
  app.add_option("--recipe", o.recipes, "recipes; all presets by default")->delimiter(';');
  app.add_option("--T", o.contexts, "tokens")->delimiter(',')->capture_default_str();
  app.add_option("--kv-heads", o.kv_heads, "")->capture_default_str();
  app.add_option("--q-heads", o.q_heads, "")->capture_default_str();
  app.add_option("--dim", o.dim, "channels of a head, a multiple of 16")->capture_default_str();
  app.add_option("--sharp", o.sharp, "standard deviation of the logits")->capture_default_str();
  app.add_option("--queries", o.queries, "new tokens that attend")->capture_default_str();
  app.add_option("--threads", o.threads, "")->capture_default_str();
  app.add_option("--rounds", o.rounds, "timed calls")->capture_default_str()->check(CLI::Range(1, 100000));
  app.add_option("--path", paths, "kernels: portable, avx2, avxvnni, avx512; the best by default")->delimiter(',')->capture_default_str();
  app.add_option("--json", o.json, "write the results to this file");
  CLI11_PARSE(app, argc, argv);

  cJSON *report = begin_report("kvq-bench-attend", argc, argv);
  const char *tunables = std::getenv("GLIBC_TUNABLES");  // glibc.malloc.hugetlb=1: pages of 2 MiB
  cJSON_AddStringToObject(report, "tunables", tunables ? tunables : "");
  cJSON *results = cJSON_AddArrayToObject(report, "results");
  std::printf("%s, KVQ_TEST_SEED=%llu\n%-9s %8s  %-20s %8s %8s %7s %7s %8s %7s %9s\n", processor().c_str(),
              (unsigned long long)kvq_test::seed(), "path", "T", "recipe", "ns", "best", "bytes", "GB/s", "naive", "times", "error/tol");
  try {
    for (const std::string &path : paths) {
      setenv("KVQ_CPU", path.c_str(), 1);
      if (kvq::cpu_path_name() != path) throw std::runtime_error("no kernels '" + path + "' on this machine");
      for (uint64_t tokens : o.contexts)
        for (const std::string &recipe : o.recipes) measure(recipe, tokens, o, results);
    }
  } catch (const std::exception &failure) {
    std::fprintf(stderr, "kvq-bench-attend: %s\n", failure.what());
    return 1;
  }
  write_report(report, o.json);
  cJSON_Delete(report);
}
