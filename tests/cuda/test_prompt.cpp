// Attention of many new tokens at once, against float64 over the exported values (section 9): every recipe, head shape and option.
#include <algorithm>
#include <array>
#include <memory>

#include "device_kit.hpp"
#include "oracle.hpp"
#include "shadow.hpp"

using namespace kvq_test;

namespace {

// A device cache of one layer whose sequences live by prompts and steps.
class Subject {
 public:
  Subject(const Setup &setup, uint64_t stream) : text(setup.layers, stream), layer(setup.layers[0]), preset(promises(setup.recipe)) {
    kvq_config config = config_of(setup);
    config.backend = KVQ_BACKEND_CUDA;
    INFO(setup.recipe);
    ok(kvq_create(&config, &cache));
  }
  ~Subject() { kvq_destroy(cache); }
  Subject(const Subject &) = delete;

  Tensor tensor(Text::Kind kind, const Ids &list) { return Tensor(text.rows(0, kind, list), text.heads(0, kind), text.dim(0, kind)); }
  kvq_seq create() {
    kvq_seq seq;
    ok(kvq_seq_create(cache, &seq));
    return seq;
  }
  kvq_seq prompt(uint32_t first, uint32_t tokens, bool final = true) {
    const kvq_seq seq = create();
    const Ids list = ids(first, tokens);
    const Tensor k = tensor(Text::K, list), v = tensor(Text::V, list), q = tensor(Text::Q, list);
    const Floats scores = text.scores(list);
    auto chunk = sized<kvq_prefill>();
    chunk.n_tokens = tokens, chunk.k = k.view(), chunk.v = v.view(), chunk.q = q.view();
    if (final) chunk.flags = KVQ_PREFILL_FINAL;
    if (preset.rule.semkv) chunk.scores = scores.data(), chunk.n_scores = tokens;
    ok(kvq_prefill_commit(cache, seq, &chunk, nullptr));
    return seq;
  }

  struct Part {
    kvq_seq seq;
    uint32_t first, count;  // new tokens, by number
  };
  // New tokens of several sequences, looked at and appended; or, with `only`, queries of the newest that are there.  Returns the
  // largest error in units of the tolerance.
  double step(const std::vector<Part> &parts, bool only, const kvq_attend_options *options) {
    std::vector<kvq_seq> seqs;
    std::vector<uint32_t> counts;
    Ids list;
    for (const Part &part : parts) {
      seqs.push_back(part.seq), counts.push_back(part.count);
      for (uint32_t id : ids(part.first, part.count)) list.push_back(id);
    }
    // A step may pack what it appends when it ends; its attention sees the pages as they were.
    std::vector<std::array<Floats, 2>> kv;
    for (const Part &part : parts) {
      kv.push_back(contents(part.seq));
      if (!only) append_new(part, &kv.back());
    }
    kvq_step id;
    ok(kvq_step_begin(cache, seqs.data(), counts.data(), uint32_t(seqs.size()), only ? KVQ_STEP_QUERY_ONLY : 0, &id));
    const Tensor k = tensor(Text::K, list), v = tensor(Text::V, list), q = tensor(Text::Q, list);
    if (!only) ok(kvq_append(cache, id, 0, k.view(), v.view(), nullptr, nullptr));
    Tensor out(list.size(), layer.q_heads, dim_v(layer), KVQ_DTYPE_F32, Lay::packed);
    Floats lse(list.size() * layer.q_heads);
    ok(kvq_attend(cache, id, 0, q.view(), out.view(), lse.data(), options, nullptr));
    const Floats scores = text.scores(list);
    ok(kvq_step_end(cache, id, nullptr, only || !preset.rule.semkv ? nullptr : scores.data()));
    double worst = 0;
    for (size_t s = 0, row = 0; s < parts.size(); row += parts[s].count, s++)
      worst = std::max(worst, compare(parts[s], kv[s], row, out.values(), lse, options));
    return worst;
  }

  kvq_cache *cache = nullptr;
  Text text;
  const kvq_layer layer;
  const Preset preset;

 private:
  // Values [head][token][dim] of keys and values.
  std::array<Floats, 2> contents(kvq_seq seq) {
    std::array<Floats, 2> kv;
    const uint64_t total = lengths(cache, seq).total;
    for (uint32_t tensor : {KVQ_TENSOR_K, KVQ_TENSOR_V})
      for (uint32_t head = 0; head < layer.kv_heads; head++) {
        const Floats one = export_values(cache, seq, 0, head, tensor, total, dim_of(layer, tensor));
        kv[tensor].insert(kv[tensor].end(), one.begin(), one.end());
      }
    return kv;
  }
  // New tokens behind them, as fp16.
  void append_new(const Part &part, std::array<Floats, 2> *kv) {
    for (uint32_t tensor : {KVQ_TENSOR_K, KVQ_TENSOR_V}) {
      const size_t dim = dim_of(layer, tensor), heads = layer.kv_heads;
      const Floats rows = text.rows(0, tensor == KVQ_TENSOR_K ? Text::K : Text::V, ids(part.first, part.count));
      Floats &old = (*kv)[tensor], all;
      const size_t size = old.size() / heads;
      for (size_t h = 0; h < heads; h++) {
        all.insert(all.end(), old.begin() + long(h * size), old.begin() + long((h + 1) * size));
        for (size_t t = 0; t < part.count; t++)
          for (size_t c = 0; c < dim; c++) all.push_back(float(half_value(half_bits(rows[(t * heads + h) * dim + c]))));
      }
      old = all;
    }
  }

  // The first and the last queries, and some between.
  double compare(const Part &part, const std::array<Floats, 2> &kv, size_t first_row, const Floats &out, const Floats &lse,
                 const kvq_attend_options *options) {
    const size_t dims[2] = {layer.dim_k, dim_v(layer)}, heads = layer.q_heads, tokens = kv[0].size() / (layer.kv_heads * dims[0]);
    double worst = 0;
    for (uint32_t i = 0; i < part.count; i++) {
      if (i >= 6 && i + 6 < part.count && random_.below(part.count) > 12) continue;
      const Floats q = text.rows(0, Text::Q, {part.first + i});
      for (size_t head = 0; head < heads; head++) {
        const size_t kv_head = head * layer.kv_heads / heads, row = (first_row + i) * heads + head;
        Attention a{};
        a.tokens = tokens - part.count + i + 1, a.n_queries = a.q_heads = a.kv_heads = 1, a.dim_k = dims[0], a.dim_v = dims[1];
        Floats query(q.begin() + long(head * dims[0]), q.begin() + long((head + 1) * dims[0]));
        for (float &x : query) x = float(half_value(half_bits(x)));
        a.q = query.data(), a.k = kv[0].data() + kv_head * tokens * dims[0], a.v = kv[1].data() + kv_head * tokens * dims[1];
        if (options && options->window && options->window != UINT32_MAX) a.window = options->window;
        if (options) a.softcap = options->softcap, a.scale = options->scale;
        if (options && options->sinks) a.sinks = options->sinks + head;
        const Attended exact = attend(a);
        float largest = 0;
        for (size_t j = 0; j < a.tokens * dims[1]; j++) largest = std::max(largest, std::fabs(a.v[j]));
        const double error = attention_error(out.data() + row * dims[1], exact.out.data(), dims[1], exact.variance[0], largest);
        const double lse_error = std::fabs(lse[row] - exact.lse[0]) / (1e-3 * std::max(1.0, exact.largest[0] / 16));
        INFO("query " << i << " of " << part.count << ", " << a.tokens << " tokens, head " << head << ", variance " << exact.variance[0]);
        REQUIRE(error <= 1);
        REQUIRE(lse_error <= 1);
        worst = std::max({worst, error, lse_error});
      }
    }
    return worst;
  }

  Random random_{77};
};

struct Shape {
  uint32_t kv_heads, ratio, dim_k, dim_v;
};
constexpr Shape kShapes[] = {{2, 4, 128, 128}, {2, 8, 64, 64}, {2, 2, 256, 256}, {2, 3, 96, 96}, {3, 1, 128, 128}, {1, 5, 128, 64}, {1, 4, 80, 48}};
constexpr uint32_t kNew[] = {160, 64, 513, 16, 129};

const char *const kOthers[] = {
    "k=lloyd(levels=7,scale=ls);v=lloyd(levels=32,scale=unbiased);block=16",
    "k=lloyd(levels=64,scale=plain,params=e5m3);v=lloyd(levels=128,rotate=0);block=1",
    "k=affine-token(levels=5,group=D,rotate=1,center=1);v=affine-token(levels=7,group=8);block=7;recent=3",
    "k=affine-channel(levels=6,group=8,midpoint=1);v=lloyd(levels=256);block=24;sinks=3",
    "k=raw;v=affine-token(levels=3,group=4);block=5",
};

std::vector<std::string> recipes() {
  std::vector<std::string> all(std::begin(kOthers), std::end(kOthers));
  for (const Preset &preset : presets()) all.push_back(preset.name);
  return all;
}

Setup setup_of(const std::string &recipe, const Shape &shape) { return preset_setup(recipe, {layer_of(shape.kv_heads, shape.ratio, shape.dim_k, shape.dim_v)}); }

// Every recipe with one of the shapes; shift 0: the first of them.
void check_recipes(uint32_t shift) {
  size_t number = 0;
  double worst = 0;
  for (const std::string &recipe : recipes()) {
    number += 1 + shift;
    const Shape &shape = shift == 0 ? kShapes[0] : kShapes[number % std::size(kShapes)];
    const uint32_t count = kNew[number % std::size(kNew)];
    INFO(recipe << ", dim " << shape.dim_k << "/" << shape.dim_v << ", heads " << shape.kv_heads << "x" << shape.ratio << ", new tokens " << count << ", seed " << seed());
    Subject subject(setup_of(recipe, shape), 100 * shift + number);
    const kvq_seq a = subject.prompt(0, 300), b = subject.prompt(1000, 611), c = subject.prompt(2000, 33);
    worst = std::max(worst, subject.step({{b, 1611, count}, {a, 300, count / 2 + 1}, {c, 2033, 1}}, false, nullptr));
    const uint32_t all = uint32_t(lengths(subject.cache, a).total);
    worst = std::max(worst, subject.step({{a, 0, all}}, true, nullptr));
  }
  WARN("largest error in units of the tolerance: " << worst);
}

}  // namespace

TEST_CASE("prompts of every recipe agree with float64") { check_recipes(0); }
TEST_CASE("prompts of every recipe agree with float64 at other shapes") { check_recipes(1); }
TEST_CASE("prompts of every recipe agree with float64 at yet other shapes") { check_recipes(2); }

TEST_CASE("prompts with windows, soft caps and learned sinks agree with float64") {
  const std::string all[] = {"fp16", "tq-3", "pnmix", "semkv", "kvq-2.5"};
  for (const std::string &recipe : all)
    for (uint32_t round = 0; round < 6; round++) {
      const Shape &shape = kShapes[round % 4];
      Subject subject(setup_of(recipe, shape), 500 + round);
      const Floats sinks = Random(9 + round).normals(shape.kv_heads * shape.ratio, 2);
      auto options = sized<kvq_attend_options>();
      constexpr uint32_t kWindows[] = {1, 5, 64, 200, 0, 65};
      options.window = kWindows[round];
      if (round % 2) options.softcap = 5;
      if (round % 3 == 0) options.sinks = sinks.data();
      if (round == 4) options.scale = -0.05f;
      INFO(recipe << ", round " << round << ", dim " << shape.dim_k << ", ratio " << shape.ratio);
      const kvq_seq a = subject.prompt(0, 500), b = subject.prompt(600, 170);
      subject.step({{a, 500, 130}, {b, 770, 77}}, false, &options);
      subject.step({{b, 600, 247}, {a, 0, 300}}, true, &options);
    }
}

TEST_CASE("prompts see staged tokens, forks and what is left of cut pages") {
  for (const std::string recipe : {"tq-2", "kivi-2-g32", "pnmix", "blockgtq-k3v3-fast", "kvq-2"}) {
    INFO(recipe);
    Subject subject(setup_of(recipe, kShapes[0]), 31);
    const kvq_seq staged = subject.prompt(0, 333, false);
    subject.step({{staged, 0, 333}}, true, nullptr);
    const kvq_seq parent = subject.prompt(1000, 450);
    kvq_seq child;
    ok(kvq_seq_fork(subject.cache, parent, 210, &child));
    subject.step({{child, 1210, 130}, {parent, 1450, 90}}, false, nullptr);
    ok(kvq_seq_truncate(subject.cache, child, 101));
    subject.step({{child, 1101, 129}}, false, nullptr);
    subject.step({{child, 1000, 201}, {parent, 1000, 540}}, true, nullptr);  // data of the tokens, whatever their rows hold
  }
}

TEST_CASE("few long sequences are split, and a step that comes again has the same bits") {
  Subject subject(setup_of("tq-4", kShapes[0]), 8);
  const kvq_seq seq = subject.prompt(0, 6000);
  REQUIRE(subject.step({{seq, 5870, 130}}, true, nullptr) <= 1);
  Floats out[2];
  for (Floats &result : out) {
    kvq_step id;
    const uint32_t count = 140;
    ok(kvq_step_begin(subject.cache, &seq, &count, 1, KVQ_STEP_QUERY_ONLY, &id));
    const Tensor q = subject.tensor(Text::Q, ids(5860, count));
    Tensor to(count, 8, 128, KVQ_DTYPE_F16, Lay::padded);
    ok(kvq_attend(subject.cache, id, 0, q.view(), to.view(), nullptr, nullptr, nullptr));
    ok(kvq_step_end(subject.cache, id, nullptr, nullptr));
    REQUIRE(to.gaps_untouched());
    result = to.values();
  }
  REQUIRE(std::memcmp(out[0].data(), out[1].data(), out[0].size() * sizeof(float)) == 0);
}

// Every query's own token would win by 40 with the next query, and the next token with this one: a mask that is off by one to either
// side gives another token's value.
TEST_CASE("a query sees its own token and not the next") {
  constexpr uint32_t kTokens = 200, kDim = 128, kHeads = 4;
  for (const bool own : {true, false}) {
    Floats k(kTokens * kDim), v(kTokens * kDim), q(kTokens * kHeads * kDim);
    for (uint32_t t = 0; t < kTokens; t++) {
      k[t * kDim + t % kDim] = 20;
      for (uint32_t c = 0; c < kDim; c++) v[t * kDim + c] = float(t) + 1;
      for (uint32_t h = 0; h < kHeads; h++) q[(t * kHeads + h) * kDim + (own ? t : t + 1) % kDim] = 20;
    }
    const kvq_layer layer = layer_of(1, kHeads, kDim);
    Setup setup{.recipe = "fp16", .layers = {layer}};
    Subject subject(setup, 1);
    const kvq_seq seq = subject.create();
    const Tensor tk(k, 1, kDim), tv(v, 1, kDim), tq(q, kHeads, kDim);
    auto chunk = sized<kvq_prefill>();
    chunk.n_tokens = kTokens, chunk.k = tk.view(), chunk.v = tv.view(), chunk.flags = KVQ_PREFILL_FINAL;
    ok(kvq_prefill_commit(subject.cache, seq, &chunk, nullptr));
    kvq_step id;
    ok(kvq_step_begin(subject.cache, &seq, &kTokens, 1, KVQ_STEP_QUERY_ONLY, &id));
    Tensor out(kTokens, kHeads, kDim, KVQ_DTYPE_F32, Lay::packed);
    ok(kvq_attend(subject.cache, id, 0, tq.view(), out.view(), nullptr, nullptr, nullptr));
    ok(kvq_step_end(subject.cache, id, nullptr, nullptr));
    const Floats got = out.values();
    for (uint32_t t = 0; t < kTokens; t++) {
      // Channels repeat after 128 tokens: the query's channel belongs to t (or t + 1) and to the token 128 before.  With neither
      // visible all tokens weigh alike.
      double expected = own ? t + 1.0 : (t + 2.0) / 2;
      if (own && t >= kDim) expected = t + 1.0 - kDim / 2.0;
      if (!own && t + 1 >= kDim) expected = double(t + 1 - kDim) + 1;
      INFO("token " << t << ", own " << own);
      for (uint32_t h = 0; h < kHeads; h++) REQUIRE(std::fabs(got[(t * kHeads + h) * kDim] - expected) <= 1e-3 * (t + 1));
    }
  }
}

TEST_CASE("a graph of a chunk stays right while the sequence grows") {
  constexpr uint32_t kChunk = 128;
  Subject subject(setup_of("tq-3", kShapes[0]), 3);
  const kvq_layer &layer = subject.layer;
  const kvq_seq seq = subject.prompt(0, 90);
  DeviceFloats k(kChunk * layer.kv_heads * layer.dim_k), v(k.n), q(kChunk * layer.q_heads * layer.dim_k), out(q.n);
  cudaStream_t stream;
  REQUIRE(cudaStreamCreate(&stream) == cudaSuccess);
  cudaGraphExec_t exec = nullptr;
  for (uint32_t i = 0; i < 12; i++) {
    const Ids list = ids(90 + i * kChunk, kChunk);
    kvq_step id;
    ok(kvq_step_begin(subject.cache, &seq, &kChunk, 1, 0, &id));
    k.set(subject.text.rows(0, Text::K, list)), v.set(subject.text.rows(0, Text::V, list)), q.set(subject.text.rows(0, Text::Q, list));
    const kvq_tensor tk = k.tensor(), tv = v.tensor(), tq = q.tensor(), to = out.tensor();
    if (!exec)
      exec = record(stream, [&] {
        ok(kvq_append(subject.cache, id, 0, &tk, &tv, nullptr, stream));
        ok(kvq_attend(subject.cache, id, 0, &tq, &to, nullptr, nullptr, stream));
      });
    REQUIRE(cudaGraphLaunch(exec, stream) == cudaSuccess);
    REQUIRE(cudaStreamSynchronize(stream) == cudaSuccess);
    const Floats replayed = out.get();
    Tensor direct(kChunk, layer.q_heads, layer.dim_k, KVQ_DTYPE_F32, Lay::packed);
    ok(kvq_attend(subject.cache, id, 0, subject.tensor(Text::Q, list).view(), direct.view(), nullptr, nullptr, nullptr));
    ok(kvq_step_end(subject.cache, id, nullptr, nullptr));
    const Floats again = direct.values();
    REQUIRE(std::memcmp(replayed.data(), again.data(), again.size() * sizeof(float)) == 0);
  }
  cudaGraphExecDestroy(exec), cudaStreamDestroy(stream);
}
