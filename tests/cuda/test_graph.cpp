// Per-layer calls in a CUDA graph: captured once, replayed while sequences grow.
#include <memory>

#include "device_kit.hpp"
#include "mirror.hpp"

using namespace kvq_test;

TEST_CASE("a graph captured at 100 tokens is right at 1500") {
  constexpr uint32_t kLayers = 2, kSeqs = 3, kHeads = 2, kRatio = 4, kDim = 128;
  const uint64_t budgets[kLayers] = {300000, 100000};  // pmkvq: from 16 bits to 4, and to 2
  for (const char *recipe : {"tq-3", "kivi-2", "kvq-2.5", "semkv", "pmkvq"}) {
    INFO(recipe);
    const bool scored = std::string(recipe) == "semkv", narrows = std::string(recipe) == "pmkvq";
    auto data = sized<kvq_recipe_data>();
    data.budgets = budgets, data.n_budgets = kLayers;
    const std::vector<kvq_layer> layers(kLayers, layer_of(kHeads, kRatio, kDim));
    kvq_cache *caches[2];
    kvq_seq seqs[2][kSeqs];
    Random random(17);
    for (uint32_t side = 0; side < 2; side++) {
      auto config = sized<kvq_config>();
      config.backend = side;
      config.n_layers = config.n_layer_structs = kLayers, config.layers = layers.data(), config.recipe = recipe;
      if (narrows) config.recipe_data = &data;
      ok(kvq_create(&config, &caches[side]));
      for (kvq_seq &seq : seqs[side]) ok(kvq_seq_create(caches[side], &seq));
    }
    for (uint32_t s = 0; s < kSeqs; s++)
      for (uint32_t l = 0; l < kLayers; l++) {
        const uint32_t tokens = 100 + 77 * s;
        const Tensor k(random.rows(tokens, kHeads, kDim), kHeads, kDim), v(random.rows(tokens, kHeads, kDim), kHeads, kDim);
        const Tensor q(random.rows(tokens, kHeads * kRatio, kDim), kHeads * kRatio, kDim);
        const Floats scores = random.normals(tokens);
        for (uint32_t side = 0; side < 2; side++) {
          auto chunk = sized<kvq_prefill>();
          chunk.layer = l, chunk.n_tokens = tokens, chunk.flags = KVQ_PREFILL_FINAL;
          chunk.k = k.view(), chunk.v = v.view(), chunk.q = q.view();
          if (scored && l == 0) chunk.scores = scores.data(), chunk.n_scores = tokens;
          ok(kvq_prefill_commit(caches[side], seqs[side][s], &chunk, nullptr));
        }
      }
    const uint32_t kv = kSeqs * kHeads * kDim, qn = kv * kRatio;
    std::vector<std::unique_ptr<DeviceFloats>> k, v, q, out;
    for (uint32_t l = 0; l < kLayers; l++) {
      k.push_back(std::make_unique<DeviceFloats>(kv)), v.push_back(std::make_unique<DeviceFloats>(kv));
      q.push_back(std::make_unique<DeviceFloats>(qn)), out.push_back(std::make_unique<DeviceFloats>(qn));
    }
    cudaStream_t stream;
    REQUIRE(cudaStreamCreate(&stream) == cudaSuccess);
    cudaGraphExec_t exec = nullptr;
    const uint32_t ones[kSeqs] = {1, 1, 1};
    for (uint32_t i = 0; i < 1400; i++) {
      kvq_step steps[2];
      for (uint32_t side = 0; side < 2; side++) ok(kvq_step_begin(caches[side], seqs[side], ones, kSeqs, 0, &steps[side]));
      std::vector<Floats> expected;
      for (uint32_t l = 0; l < kLayers; l++) {
        const Floats nk = random.rows(kSeqs, kHeads, kDim), nv = random.rows(kSeqs, kHeads, kDim), nq = random.normals(qn, 0.2);
        k[l]->set(nk), v[l]->set(nv), q[l]->set(nq);
        const Tensor tk(nk, kHeads, kDim), tv(nv, kHeads, kDim), tq(nq, kHeads * kRatio, kDim);
        Tensor result(kSeqs, kHeads * kRatio, kDim, KVQ_DTYPE_F32, Lay::packed);
        ok(kvq_append(caches[0], steps[0], l, tk.view(), tv.view(), nullptr, nullptr));
        if (i % 20 == 0) ok(kvq_attend(caches[0], steps[0], l, tq.view(), result.view(), nullptr, nullptr, nullptr));
        expected.push_back(result.values());
      }
      if (!exec)
        exec = record(stream, [&] {
          for (uint32_t l = 0; l < kLayers; l++) {
            const kvq_tensor tk = k[l]->tensor(), tv = v[l]->tensor(), tq = q[l]->tensor(), to = out[l]->tensor();
            ok(kvq_append(caches[1], steps[1], l, &tk, &tv, nullptr, stream));
            ok(kvq_attend(caches[1], steps[1], l, &tq, &to, nullptr, nullptr, stream));
          }
        });
      REQUIRE(cudaGraphLaunch(exec, stream) == cudaSuccess);
      REQUIRE(cudaStreamSynchronize(stream) == cudaSuccess);
      for (uint32_t l = 0; l < kLayers && i % 20 == 0; l++) {
        const Floats got = out[l]->get();
        double error = 0, power = 0;
        for (size_t j = 0; j < got.size(); j++) error += std::pow(got[j] - expected[l][j], 2), power += std::pow(expected[l][j], 2);
        INFO("step " << i << " layer " << l << " error " << error << " of " << power);
        REQUIRE(error <= 1e-5 * power);
      }
      const Floats scores = random.normals(kSeqs);
      for (uint32_t side = 0; side < 2; side++) ok(kvq_step_end(caches[side], steps[side], nullptr, scored ? scores.data() : nullptr));
    }
    for (uint32_t s = 0; s < kSeqs; s++)
      REQUIRE((export_wire(caches[0], seqs[0][s], 1, 1, KVQ_TENSOR_K) == export_wire(caches[1], seqs[1][s], 1, 1, KVQ_TENSOR_K)));
    cudaGraphExecDestroy(exec), cudaStreamDestroy(stream);
    for (kvq_cache *cache : caches) kvq_destroy(cache);
  }
}

TEST_CASE("a graph is captured when something is packed, not before") {
  constexpr uint32_t kHeads = 2, kRatio = 2, kDim = 128, kFirst = 10;
  const kvq_layer layer = layer_of(kHeads, kRatio, kDim);
  for (const char *recipe : {"tq-3", "fp16"}) {
    INFO(recipe);
    auto config = sized<kvq_config>();
    config.backend = KVQ_BACKEND_CUDA, config.n_layers = config.n_layer_structs = 1, config.layers = &layer, config.recipe = recipe;
    kvq_cache *cache = nullptr;
    kvq_seq seq = 0;
    ok(kvq_create(&config, &cache));
    ok(kvq_seq_create(cache, &seq));
    Random random(3);
    const Tensor k(random.rows(kFirst, kHeads, kDim), kHeads, kDim), v(random.rows(kFirst, kHeads, kDim), kHeads, kDim);
    auto prompt = sized<kvq_prefill>();
    prompt.n_tokens = kFirst, prompt.flags = KVQ_PREFILL_FINAL, prompt.k = k.view(), prompt.v = v.view();
    ok(kvq_prefill_commit(cache, seq, &prompt, nullptr));
    DeviceFloats key(kHeads * kDim), value(key.n), query(key.n * kRatio), out(query.n);
    const kvq_tensor tk = key.tensor(), tv = value.tensor(), tq = query.tensor(), to = out.tensor();
    cudaStream_t stream;
    REQUIRE(cudaStreamCreate(&stream) == cudaSuccess);
    const uint32_t one = 1;
    uint32_t refusals = 0;
    for (uint32_t i = 0; i < 400; i++) {
      key.set(random.rows(1, kHeads, kDim)), value.set(random.rows(1, kHeads, kDim)), query.set(random.normals(query.n, 0.2));
      kvq_step step;
      ok(kvq_step_begin(cache, &seq, &one, 1, 0, &step));
      int32_t status = KVQ_OK;
      const cudaGraphExec_t exec = record(stream, [&] {
        status = kvq_append(cache, step, 0, &tk, &tv, nullptr, stream);
        if (status == KVQ_OK) ok(kvq_attend(cache, step, 0, &tq, &to, nullptr, nullptr, stream));
      });
      const bool packed = lengths(cache, seq).packed > 0;
      REQUIRE(status == (packed ? KVQ_OK : KVQ_E_UNSUPPORTED));
      refusals += !packed;
      if (packed) {
        REQUIRE(cudaGraphLaunch(exec, stream) == cudaSuccess);
        REQUIRE(cudaStreamSynchronize(stream) == cudaSuccess);
        const Floats replayed = out.get();
        ok(kvq_attend(cache, step, 0, &tq, &to, nullptr, nullptr, stream));
        REQUIRE(cudaStreamSynchronize(stream) == cudaSuccess);
        REQUIRE(out.get() == replayed);
      } else {  // the step goes on without a graph
        ok(kvq_append(cache, step, 0, &tk, &tv, nullptr, stream));
        ok(kvq_attend(cache, step, 0, &tq, &to, nullptr, nullptr, stream));
      }
      ok(kvq_step_end(cache, step, nullptr, nullptr));
      cudaGraphExecDestroy(exec);
    }
    REQUIRE((refusals > 0 && refusals < 300));
    cudaStreamDestroy(stream);
    kvq_destroy(cache);
  }
}

// The first step has a sequence of 20000 tokens in many splits, the second one of 3000 in few; the other sequence is one item.  A graph
// of either step is right in both, to the bits of a call.
TEST_CASE("a graph serves steps with more splits and fewer than its own") {
  constexpr uint32_t kHeads = 2, kRatio = 4, kDim = 128, kTokens[2] = {20000, 500}, kShort = 3000, kPairs = 2;
  const kvq_layer layer = layer_of(kHeads, kRatio, kDim);
  for (const char *recipe : {"tq-3", "tq-split", "kivi-2"}) {
    INFO(recipe);
    kvq_cache *caches[2];
    kvq_seq pairs[2][kPairs][2];  // [side][pair]: of different lengths, and of short ones
    Random random(23);
    for (uint32_t side = 0; side < 2; side++) {
      auto config = sized<kvq_config>();
      config.backend = side, config.n_layers = config.n_layer_structs = 1, config.layers = &layer, config.recipe = recipe;
      ok(kvq_create(&config, &caches[side]));
      for (kvq_seq &seq : pairs[side][0]) ok(kvq_seq_create(caches[side], &seq));
    }
    for (uint32_t s = 0; s < 2; s++) {
      const Tensor k(random.rows(kTokens[s], kHeads, kDim), kHeads, kDim), v(random.rows(kTokens[s], kHeads, kDim), kHeads, kDim);
      auto chunk = sized<kvq_prefill>();
      chunk.n_tokens = kTokens[s], chunk.k = k.view(), chunk.v = v.view(), chunk.flags = KVQ_PREFILL_FINAL;
      for (uint32_t side = 0; side < 2; side++) ok(kvq_prefill_commit(caches[side], pairs[side][0][s], &chunk, nullptr));
    }
    for (uint32_t side = 0; side < 2; side++) {
      ok(kvq_seq_fork(caches[side], pairs[side][0][0], kShort, &pairs[side][1][0]));
      pairs[side][1][1] = pairs[side][0][1];
    }
    DeviceFloats query(2 * kHeads * kRatio * kDim), out(query.n);
    const Floats values = random.normals(query.n, 0.3);
    const Tensor host_query(values, kHeads * kRatio, kDim);
    query.set(values);
    const kvq_tensor tq = query.tensor(), to = out.tensor();
    const uint32_t ones[2] = {1, 1};
    cudaStream_t stream;
    REQUIRE(cudaStreamCreate(&stream) == cudaSuccess);
    cudaGraphExec_t graphs[kPairs];
    Floats called[kPairs];
    const auto in_step = [&](uint32_t pair, auto &&work) {
      kvq_step step;
      ok(kvq_step_begin(caches[1], pairs[1][pair], ones, 2, KVQ_STEP_QUERY_ONLY, &step));
      work(step);
      REQUIRE(cudaStreamSynchronize(stream) == cudaSuccess);
      ok(kvq_step_end(caches[1], step, nullptr, nullptr));
    };
    for (uint32_t pair = 0; pair < kPairs; pair++) {
      in_step(pair, [&](kvq_step step) { ok(kvq_attend(caches[1], step, 0, &tq, &to, nullptr, nullptr, stream)); });
      called[pair] = out.get();
      in_step(pair, [&](kvq_step step) { graphs[pair] = record(stream, [&] { ok(kvq_attend(caches[1], step, 0, &tq, &to, nullptr, nullptr, stream)); }); });
      kvq_step step;
      Tensor expected(2, kHeads * kRatio, kDim, KVQ_DTYPE_F32, Lay::packed);
      ok(kvq_step_begin(caches[0], pairs[0][pair], ones, 2, KVQ_STEP_QUERY_ONLY, &step));
      ok(kvq_attend(caches[0], step, 0, host_query.view(), expected.view(), nullptr, nullptr, nullptr));
      ok(kvq_step_end(caches[0], step, nullptr, nullptr));
      double error = 0, power = 0;
      const Floats wanted = expected.values();
      for (size_t i = 0; i < wanted.size(); i++) error += std::pow(called[pair][i] - wanted[i], 2), power += std::pow(wanted[i], 2);
      INFO("pair " << pair << ": error " << error << " of " << power);
      REQUIRE(error <= 1e-6 * power);
    }
    for (uint32_t graph = 0; graph < kPairs; graph++)
      for (uint32_t pair = 0; pair < kPairs; pair++) {
        INFO("graph of pair " << graph << ", step of pair " << pair);
        out.set(Floats(out.n, -1));
        in_step(pair, [&](kvq_step) { REQUIRE(cudaGraphLaunch(graphs[graph], stream) == cudaSuccess); });
        REQUIRE(same_bits(out.get(), called[pair]));
      }
    for (cudaGraphExec_t graph : graphs) cudaGraphExecDestroy(graph);
    cudaStreamDestroy(stream);
    for (kvq_cache *cache : caches) kvq_destroy(cache);
  }
}
