// Speed of packing on the CPU: prompts committed through the C ABI, and the codecs' encoders alone.
//
// A prompt's cost is split where the ABI splits it: `stage` is the chunks (entry, raw pages, statistics), `pack` is FINAL (policy,
// encoding, page layout).  Beside the rate of fp16 input stands the share of one fp32 matrix product that the prompt goes through on its
// way to K and V: hidden states [tokens][q_heads * dim] times a square matrix, at the rate at which this core can multiply and add at most.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <ctime>
#include <memory_resource>
#include <stdexcept>
#include <string>
#include <vector>

#include "calls.hpp"
#include "codec/codec.h"
#include "half.hpp"
#include "random.hpp"
#include "report.hpp"

namespace {

struct Options {
  std::vector<std::string> recipes = {"fp16", "tq-3", "tq-2", "tq-4", "pnmix", "semkv", "kivi-2", "kvq-2", "kvq-2.5", "kvq-3", "blockgtq-k3v3", "blockgtq-k3v3-fast", "kivi-2-g32", "kitty", "polar-2"};
  std::vector<std::string> codecs = {"lloyd(levels=3)", "lloyd(levels=4)", "lloyd(levels=8)", "lloyd(levels=16)", "lloyd(levels=8,rotate=0)",
                                     "lloyd(levels=64)", "affine-token(levels=4,group=128)", "affine-token(levels=5,group=128,rotate=1)",
                                     "affine-channel(levels=4,group=128)", "affine-channel(levels=4,group=128,midpoint=1)",
                                     "polar(radius=4,angle=4,group=128)", "kitty(boost=1/32,group=128)"};
  uint64_t tokens = 8192, chunk = 512;
  uint32_t layers = 4, kv_heads = 8, q_heads = 32, dim = 128, rounds = 5;
  std::string json;
};

// Processor time, which other programs disturb less than the wall's.
double now() {
  timespec time;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return double(time.tv_sec) + 1e-9 * double(time.tv_nsec);
}

// Multiply-adds of fp32 per second that this core reaches without touching memory.
#if defined(__x86_64__)
__attribute__((target_clones("avx512f", "arch=haswell", "default")))
#endif
double
multiply_adds() {
  constexpr size_t kValues = 256, kTurns = 200000;
  float sum[kValues] = {};
  volatile float given = 0.9999f;
  const float factor = given;
  const double start = now();
  for (size_t turn = 0; turn < kTurns; turn++)
#pragma GCC unroll 16
    for (size_t i = 0; i < kValues; i++) sum[i] = sum[i] * factor + factor;
  const double seconds = now() - start;
  float total = 0;
  for (const float value : sum) total += value;
  volatile float keep = total;
  (void)keep;
  return double(kValues) * kTurns / seconds;
}

struct Data {
  static constexpr size_t kFresh = 100003;  // random numbers, then the same again: a prime, so that rows differ
  std::vector<uint16_t> k, v, q;
  std::vector<float> scores;
  explicit Data(const Options &o) : scores(o.tokens) {
    kvq_test::Random random(o.tokens);
    for (auto *rows : {&k, &v}) {
      rows->resize(o.tokens * o.kv_heads * o.dim);
      const size_t fresh = std::min(rows->size(), kFresh);
      for (size_t i = 0; i < rows->size(); i++) (*rows)[i] = i < fresh ? kvq_test::half_bits(random.normal()) : (*rows)[i - fresh];
    }
    q.resize(o.chunk * o.q_heads * o.dim);
    for (size_t i = 0; i < q.size(); i++) q[i] = k[i % k.size()];
    check(kvq_scores_random(kvq_test::seed(), 0, o.tokens, KVQ_MEMORY_HOST, scores.data(), nullptr));
  }
};

kvq_tensor tensor(std::vector<uint16_t> &rows, size_t offset = 0) {
  kvq_tensor t = sized<kvq_tensor>();
  t.dtype = KVQ_DTYPE_F16;
  t.data = rows.data() + offset;
  return t;
}

struct Times {
  std::vector<double> stage, pack, both;
};

// A layer of a prompt; the status of FINAL.  Times are added to those of the layers before.
int32_t commit_layer(kvq_cache *cache, kvq_seq seq, uint32_t layer, const Options &o, Data &data, bool queries, double (*spent)[2]) {
  const double start = now();
  kvq_prefill part = sized<kvq_prefill>();
  part.layer = layer;
  for (uint64_t first = 0; first < o.tokens; first += o.chunk) {
    const size_t at = size_t(first) * o.kv_heads * o.dim;
    const kvq_tensor k = tensor(data.k, at), v = tensor(data.v, at), q = tensor(data.q);
    part.n_tokens = std::min(o.chunk, o.tokens - first);
    part.n_scores = uint32_t(part.n_tokens);
    part.k = &k, part.v = &v, part.q = queries ? &q : nullptr;
    part.scores = data.scores.data() + first;
    check(kvq_prefill_commit(cache, seq, &part, nullptr));
  }
  const double staged = now();
  part = sized<kvq_prefill>();
  part.layer = layer;
  part.flags = KVQ_PREFILL_FINAL;
  const int32_t status = kvq_prefill_commit(cache, seq, &part, nullptr);
  (*spent)[0] += staged - start, (*spent)[1] += now() - staged;
  return status;
}

// One prompt into a fresh cache, layer by layer; false: the recipe needs queries, too.
bool commit(const std::string &recipe, const Options &o, Data &data, bool queries, Times *times) {
  kvq_layer layer = sized<kvq_layer>();
  layer.kv_heads = o.kv_heads, layer.q_heads = o.q_heads, layer.dim_k = o.dim;
  kvq_config config = sized<kvq_config>();
  config.n_layers = o.layers, config.n_layer_structs = 1;
  config.layers = &layer;
  config.recipe = recipe.c_str();
  kvq_cache *cache = nullptr;
  kvq_seq seq = 0;
  check(kvq_create(&config, &cache));
  check(kvq_seq_create(cache, &seq));
  int32_t status = KVQ_OK;
  double spent[2] = {};
  for (uint32_t layer = 0; layer < o.layers && status == KVQ_OK; layer++) status = commit_layer(cache, seq, layer, o, data, queries, &spent);
  if (queries || status != KVQ_E_STATE) check(status);
  for (double &time : spent) time /= o.layers;
  times->stage.push_back(spent[0]), times->pack.push_back(spent[1]), times->both.push_back(spent[0] + spent[1]);
  kvq_destroy(cache);
  return status == KVQ_OK;
}

cJSON *recipe_row(const std::string &recipe, const Options &o, Data &data, double rate) {
  Times times;
  const bool queries = !commit(recipe, o, data, false, &times);
  times = Times();  // that was to warm up
  for (uint32_t i = 0; i < o.rounds; i++) commit(recipe, o, data, queries, &times);
  const double bytes = double(o.tokens) * o.kv_heads * o.dim * 4, width = double(o.q_heads) * o.dim;
  const double product = double(o.tokens) * width * width / rate;
  const double stage = median(times.stage), pack = median(times.pack), both = median(times.both);
  const double with_queries = bytes * (queries ? 1 + double(o.q_heads) / (2 * o.kv_heads) : 1);
  std::printf("%-24s %8.2f %8.2f %8.2f %8.2f %9.2f %8.1f%%\n", recipe.c_str(), bytes / stage * 1e-9, bytes / pack * 1e-9,
              bytes / both * 1e-9, with_queries / both * 1e-9, both / bytes * 2e9, both / product * 100);
  std::fflush(stdout);
  cJSON *row = cJSON_CreateObject();
  cJSON_AddStringToObject(row, "recipe", recipe.c_str());
  cJSON_AddNumberToObject(row, "stage_gigabytes_per_second", bytes / stage * 1e-9);
  cJSON_AddNumberToObject(row, "pack_gigabytes_per_second", bytes / pack * 1e-9);
  cJSON_AddNumberToObject(row, "commit_gigabytes_per_second", bytes / both * 1e-9);
  cJSON_AddNumberToObject(row, "input_gigabytes_per_second", with_queries / both * 1e-9);  // with the queries, where there are any
  cJSON_AddNumberToObject(row, "ns_per_element", both / bytes * 2e9);
  cJSON_AddNumberToObject(row, "share_of_product", both / product);
  return row;
}

cJSON *codec_row(const std::string &text, const Options &o, const Data &data) {
  std::pmr::memory_resource *memory = std::pmr::get_default_resource();
  const kvq::HeadShape shape{o.dim, KVQ_TENSOR_K, KVQ_ROPE_HALF, o.dim, 0};
  constexpr uint32_t kTokens = 128;
  kvq::Codec codec{};
  kvq::HeadFormat format(memory);
  kvq::Block block(memory);
  check(kvq::parse_codec(text, true, &codec));
  check(kvq::make_format(codec, shape, {}, {}, &format));
  std::vector<double> times;
  for (uint32_t i = 0; i < o.rounds + 1; i++) {
    const double start = now();
    for (size_t t = 0; t + kTokens <= o.tokens; t += kTokens) kvq::encode(format, {data.k.data() + t * o.dim, o.dim}, kTokens, &block);
    times.push_back(now() - start);
  }
  const double ns = median(times) / double(o.tokens / kTokens * kTokens * o.dim) * 1e9;
  std::printf("%-46s %8.2f GB/s %7.2f ns/element\n", text.c_str(), 2 / ns, ns);
  std::fflush(stdout);
  cJSON *row = cJSON_CreateObject();
  cJSON_AddStringToObject(row, "codec", text.c_str());
  cJSON_AddNumberToObject(row, "ns_per_element", ns);
  cJSON_AddNumberToObject(row, "gigabytes_per_second", 2 / ns);
  return row;
}

}  // namespace

int main(int argc, char **argv) {
  Options o;
  CLI::App app("Packing of prompts on the CPU: gigabytes of fp16 input per second and core.");
  app.add_option("--recipes", o.recipes, "recipes; empty: none")->delimiter(',')->capture_default_str();
  app.add_option("--codec", o.codecs, "codec texts, encoded without a cache; empty: none")->capture_default_str();
  app.add_option("--tokens", o.tokens, "of the prompt")->capture_default_str();
  app.add_option("--chunk", o.chunk, "tokens of a chunk")->capture_default_str();
  app.add_option("--layers", o.layers, "of the cache, committed one after the other")->capture_default_str();
  app.add_option("--kv-heads", o.kv_heads, "")->capture_default_str();
  app.add_option("--q-heads", o.q_heads, "")->capture_default_str();
  app.add_option("--dim", o.dim, "channels of a head")->capture_default_str();
  app.add_option("--rounds", o.rounds, "timed runs of each")->capture_default_str()->check(CLI::Range(1, 1000));
  app.add_option("--json", o.json, "write the results to this file");
  CLI11_PARSE(app, argc, argv);
  cJSON *report = begin_report("kvq-bench-pack", argc, argv);
  try {
    kvq_backend_info cpu = sized<kvq_backend_info>();
    check(kvq_backend_query(0, &cpu));
    const double rate = multiply_adds();
    cJSON_AddStringToObject(report, "path", cpu.path);
    cJSON_AddNumberToObject(report, "multiply_adds_per_second", rate);
    Data data(o);
    std::printf("%s, %s, %.1f G multiply-adds/s\n%-24s %8s %8s %8s %8s %9s %9s\n", processor().c_str(), cpu.path, rate * 1e-9, "GB/s of K and V",
                "stage", "pack", "commit", "with Q", "ns/elem", "product");
    cJSON *recipes = cJSON_AddArrayToObject(report, "recipes"), *codecs = cJSON_AddArrayToObject(report, "codecs");
    for (const std::string &recipe : o.recipes)
      if (!recipe.empty()) cJSON_AddItemToArray(recipes, recipe_row(recipe, o, data, rate));
    for (const std::string &codec : o.codecs)
      if (!codec.empty()) cJSON_AddItemToArray(codecs, codec_row(codec, o, data));
  } catch (const std::exception &failure) {
    std::fprintf(stderr, "kvq-bench-pack: %s\n", failure.what());
    return 1;
  }
  write_report(report, o.json);
  cJSON_Delete(report);
}
