// Token scores in device memory: the bits that the host has, for every indicator, shape, type and stride; and what takes them.
#include <cmath>
#include <deque>
#include <limits>

#include "device_kit.hpp"
#include "mirror.hpp"

using namespace kvq_test;

namespace {

constexpr uint32_t kTypes[] = {KVQ_DTYPE_F32, KVQ_DTYPE_F16, KVQ_DTYPE_BF16, KVQ_DTYPE_F64};
constexpr Lay kLays[] = {Lay::packed, Lay::padded, Lay::head_first};

// Tensors of one shape on both sides, each of another type and stride.
struct Pairs {
  Pairs(Random &random, uint32_t n, size_t tokens, size_t heads, size_t dim, double scale, size_t shift = 0) {
    for (uint32_t i = 0; i < n; i++) {
      Floats values = random.normals(tokens * heads * dim, scale, 0.25 * scale);
      for (float &v : values)
        if (random.below(50) == 0) v *= 300;
      const size_t kind = shift + i;
      host.emplace_back(values, heads, dim, kTypes[kind % 4], kLays[kind / 4 % 3]);
      device.emplace_back(host.back());
      host_views.push_back(*host.back().view()), device_views.push_back(*device.back().view());
    }
  }
  std::deque<Tensor> host;
  std::deque<DeviceTensor> device;
  std::vector<kvq_tensor> host_views, device_views;
};

struct DeviceWords {
  explicit DeviceWords(const std::vector<uint32_t> &words) {
    REQUIRE(cudaMalloc(reinterpret_cast<void **>(&data), words.size() * 4) == cudaSuccess);
    REQUIRE(cudaMemcpy(data, words.data(), words.size() * 4, cudaMemcpyHostToDevice) == cudaSuccess);
  }
  ~DeviceWords() { cudaFree(data); }
  DeviceWords(const DeviceWords &) = delete;
  uint32_t *data = nullptr;
};

// f(inputs, scores) on both sides.
template <class F>
void same_scores(Pairs &pairs, size_t n, F &&f) {
  Floats expected(n, 0.5f);
  DeviceFloats scores(n);
  scores.set(expected);
  ok(f(pairs.host_views.data(), expected.data()));
  ok(f(pairs.device_views.data(), scores.data));
  REQUIRE(same_bits(scores.get(), expected));
}

}  // namespace

TEST_CASE("indicators of hidden states have the host's bits") {
  Random random(31);
  const size_t shapes[][2] = {{1, 1}, {7, 300}, {130, 1024}, {33, 64}, {5, 4097}};
  for (const auto &[tokens, dim] : shapes)
    for (uint32_t kind = 0; kind < 4; kind++)
      for (uint32_t layers : {2u, 5u})
        for (size_t shift = 0; shift < 8; shift += 3) {
          INFO("kind " << kind << ", " << layers << " layers [" << tokens << "][" << dim << "], shift " << shift << ", seed " << seed());
          Pairs pairs(random, layers, tokens, 1, dim, 3, shift);
          same_scores(pairs, tokens, [&](const kvq_tensor *hidden, float *scores) {
            return kvq_scores_hidden(kind, hidden, layers, tokens, uint32_t(dim), scores, nullptr);
          });
        }
}

TEST_CASE("key and value norms have the host's bits") {
  Random random(32);
  const uint32_t shapes[][3] = {{1, 1, 2}, {100, 8, 128}, {33, 3, 80}, {5, 2, 256}};
  for (const auto &[tokens, heads, dim] : shapes) {
    INFO("[" << tokens << "][" << heads << "][" << dim << "], seed " << seed());
    Pairs pairs(random, 12, tokens, heads, dim, 200);  // some saturate
    same_scores(pairs, tokens, [&](const kvq_tensor *rows, float *scores) {
      return kvq_scores_norms(rows, 12, tokens, heads, dim, scores, nullptr);
    });
  }
}

TEST_CASE("self-information has the host's bits") {
  Random random(33);
  for (uint32_t vocab : {1u, 2u, 33u, 1000u, 32001u})
    for (size_t kind = 0; kind < 12; kind += 5) {
      INFO("vocab " << vocab << ", kind " << kind << ", seed " << seed());
      constexpr uint32_t kTokens = 21;
      Pairs pairs(random, 1, kTokens, 1, vocab, 4, kind);
      std::vector<uint32_t> targets(kTokens);
      for (uint32_t &target : targets) target = uint32_t(random.below(vocab));
      const DeviceWords on_device(targets);
      same_scores(pairs, kTokens, [&](const kvq_tensor *logits, float *scores) {
        return kvq_scores_self_information(logits, logits->memory == KVQ_MEMORY_DEVICE ? on_device.data : targets.data(), kTokens, vocab, scores, nullptr);
      });
    }
}

TEST_CASE("accumulated attention has the host's bits") {
  Random random(34);
  const uint32_t shapes[][3] = {{1, 1, 1}, {3, 70, 1000}, {32, 5, 33}, {2, 33, 257}};
  for (const auto &[heads, queries, keys] : shapes)
    for (size_t kind = 0; kind < 12; kind++) {
      INFO(heads << " heads, " << queries << " queries, " << keys << " keys, kind " << kind << ", seed " << seed());
      Pairs pairs(random, 1, queries, heads, keys, 0.01, kind);
      same_scores(pairs, keys, [&](const kvq_tensor *weights, float *scores) {
        return kvq_scores_attention(weights, heads, queries, keys, scores, nullptr);
      });
    }
}

TEST_CASE("random scores are the host's") {
  Floats expected(1000);
  DeviceFloats scores(expected.size());
  ok(kvq_scores_random(9, 77, expected.size(), KVQ_MEMORY_HOST, expected.data(), nullptr));
  ok(kvq_scores_random(9, 77, expected.size(), KVQ_MEMORY_DEVICE, scores.data, nullptr));
  REQUIRE(same_bits(scores.get(), expected));
}

TEST_CASE("a token that is not finite, or beyond the vocabulary, gets NaN and the others keep theirs") {
  constexpr uint32_t kTokens = 9, kDim = 70;
  Random random(35);
  Floats values = random.normals(kTokens * kDim);
  DeviceFloats scores(kTokens), better(kTokens);
  const DeviceTensor good(Tensor(values, 1, kDim));
  values[4 * kDim + 13] = std::numeric_limits<float>::infinity();
  values[7 * kDim + 69] = std::numeric_limits<float>::quiet_NaN();
  const DeviceTensor bad(Tensor(values, 1, kDim));
  const auto compare = [&](std::vector<uint32_t> marked) {
    const Floats got = scores.get(), expected = better.get();
    for (uint32_t t = 0; t < kTokens; t++) {
      INFO("token " << t);
      const bool is_marked = std::find(marked.begin(), marked.end(), t) != marked.end();
      REQUIRE((is_marked ? std::isnan(got[t]) : got[t] == expected[t]));
    }
  };
  for (uint32_t kind = 0; kind < 4; kind++) {
    const kvq_tensor with[] = {*good.view(), *bad.view()}, without[] = {*good.view(), *good.view()};
    ok(kvq_scores_hidden(kind, with, 2, kTokens, kDim, scores.data, nullptr));
    ok(kvq_scores_hidden(kind, without, 2, kTokens, kDim, better.data, nullptr));
    if (kind >= 2) compare({4, 7});  // the differences of the other kinds are 0 without the bad elements
    const Floats got = scores.get();
    REQUIRE((std::isnan(got[4]) && std::isnan(got[7]) && !std::isnan(got[5])));
  }
  ok(kvq_scores_norms(bad.view(), 1, kTokens, 1, kDim, scores.data, nullptr));
  ok(kvq_scores_norms(good.view(), 1, kTokens, 1, kDim, better.data, nullptr));
  compare({4, 7});
  std::vector<uint32_t> targets(kTokens, 3);
  const DeviceWords fine(targets);
  targets[2] = kDim;
  const DeviceWords beyond(targets);
  ok(kvq_scores_self_information(bad.view(), beyond.data, kTokens, kDim, scores.data, nullptr));
  ok(kvq_scores_self_information(good.view(), fine.data, kTokens, kDim, better.data, nullptr));
  compare({2, 4, 7});
}

TEST_CASE("host memory that is called a device's is refused by the scores") {
  Floats rows(8, 1.0f), scores(2);
  auto tensor = sized<kvq_tensor>();
  tensor.memory = KVQ_MEMORY_DEVICE, tensor.data = rows.data();
  refused(kvq_scores_hidden(KVQ_SCORE_NORM, &tensor, 1, 2, 4, scores.data(), nullptr), KVQ_E_INVALID);
  DeviceFloats there(2);
  refused(kvq_scores_hidden(KVQ_SCORE_NORM, &tensor, 1, 2, 4, there.data, nullptr), KVQ_E_INVALID);
  REQUIRE(detail().find("hidden") != std::string::npos);
}

// A life whose scores never leave the device, beside one that has them from the host.
TEST_CASE("prompts and steps take scores in device memory") {
  constexpr uint32_t kPrompt = 300, kHeads = 2, kDim = 128;
  Random random(36);
  cudaStream_t stream;
  REQUIRE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
  for (const char *recipe : {"semkv", "semkv-tq"}) {
    Setup setup{.recipe = recipe, .layers = {layer_of(kHeads, 4, kDim)}};
    kvq_config config = config_of(setup);
    config.backend = KVQ_BACKEND_CUDA;
    kvq_cache *caches[2];
    kvq_seq seqs[2];
    for (int i = 0; i < 2; i++) {
      ok(kvq_create(&config, &caches[i]));
      ok(kvq_seq_create(caches[i], &seqs[i]));
    }
    DeviceFloats scores(kPrompt);
    Floats same(kPrompt);
    const auto grow = [&](uint32_t tokens, auto &&f) {
      const Tensor k(random.rows(tokens, kHeads, kDim), kHeads, kDim), v(random.rows(tokens, kHeads, kDim), kHeads, kDim);
      const DeviceTensor keys(k), values(v);
      for (int i = 0; i < 2; i++) f(i, *keys.view(), *values.view());
    };
    const auto score = [&](const kvq_tensor &v, uint32_t tokens) {  // value-norm
      ok(kvq_scores_norms(&v, 1, tokens, kHeads, kDim, scores.data, stream));
      REQUIRE(cudaMemcpyAsync(same.data(), scores.data, tokens * 4, cudaMemcpyDeviceToHost, stream) == cudaSuccess);
      REQUIRE(cudaStreamSynchronize(stream) == cudaSuccess);
    };
    grow(kPrompt, [&](int i, const kvq_tensor &k, const kvq_tensor &v) {
      if (i == 0) score(v, kPrompt);
      auto prompt = sized<kvq_prefill>();
      prompt.n_tokens = kPrompt, prompt.k = &k, prompt.v = &v, prompt.n_scores = kPrompt;
      prompt.flags = KVQ_PREFILL_FINAL | (i ? KVQ_PREFILL_DEVICE_SCORES : 0);
      prompt.scores = i ? scores.data : same.data();
      ok(kvq_prefill_commit(caches[i], seqs[i], &prompt, stream));
    });
    for (int round = 0; round < 50; round++)
      grow(3, [&](int i, const kvq_tensor &k, const kvq_tensor &v) {
        if (i == 0) score(v, 3);
        const uint32_t count = 3, keep = round % 5 ? 3 : 2;
        kvq_step step = 0;
        ok(kvq_step_begin(caches[i], &seqs[i], &count, 1, i ? KVQ_STEP_DEVICE_SCORES : 0, &step));
        ok(kvq_append(caches[i], step, 0, &k, &v, nullptr, stream));
        if (i) ok(kvq_scores_norms(&v, 1, 3, kHeads, kDim, scores.data, stream));  // behind the step's work
        ok(kvq_step_end(caches[i], step, &keep, i ? scores.data : same.data()));
      });
    REQUIRE(lengths(caches[0], seqs[0]).packed > kPrompt);
    REQUIRE(policy_blob(caches[0], seqs[0]) == policy_blob(caches[1], seqs[1]));
    for (uint32_t head = 0; head < kHeads; head++)
      REQUIRE((export_wire(caches[0], seqs[0], 0, head, KVQ_TENSOR_K) == export_wire(caches[1], seqs[1], 0, head, KVQ_TENSOR_K)));
    for (kvq_cache *cache : caches) kvq_destroy(cache);
  }
  REQUIRE(cudaStreamDestroy(stream) == cudaSuccess);
}

TEST_CASE("a NaN among scores in device memory is refused, and nothing changes") {
  constexpr uint32_t kTokens = 80;
  Random random(37);
  Setup setup{.recipe = "semkv", .layers = {layer_of(1, 1, 64)}};
  kvq_config config = config_of(setup);
  config.backend = KVQ_BACKEND_CUDA;
  kvq_cache *cache = nullptr;
  kvq_seq seq = 0;
  ok(kvq_create(&config, &cache));
  ok(kvq_seq_create(cache, &seq));
  const Tensor k(random.rows(kTokens, 1, 64), 1, 64);
  Floats values = random.normals(kTokens);
  values[17] = std::numeric_limits<float>::quiet_NaN();
  DeviceFloats scores(kTokens);
  scores.set(values);
  auto prompt = sized<kvq_prefill>();
  prompt.n_tokens = prompt.n_scores = kTokens, prompt.k = prompt.v = k.view(), prompt.scores = scores.data;
  prompt.flags = KVQ_PREFILL_FINAL | KVQ_PREFILL_DEVICE_SCORES;
  refused(kvq_prefill_commit(cache, seq, &prompt, nullptr), KVQ_E_INVALID);
  REQUIRE(detail().find("scores[17]") != std::string::npos);
  REQUIRE(lengths(cache, seq).total == 0);
  values[17] = 0;
  scores.set(values);
  ok(kvq_prefill_commit(cache, seq, &prompt, nullptr));
  REQUIRE(lengths(cache, seq).packed == kTokens);
  kvq_destroy(cache);
}
