// Elements in device memory that are not finite: they mark their sequence from the next call on, and touch no other by a bit.
#include <limits>

#include "device_kit.hpp"
#include "mirror.hpp"

using namespace kvq_test;

namespace {

constexpr uint32_t kHeads = 2, kRatio = 2, kDim = 64, kSeqs = 3, kPrompt = 100, kNew = 2, kTokens = kSeqs * kNew;

// Three sequences, and a step of two tokens each whose inputs may be spoiled.
struct World {
  World() {
    const kvq_layer layer = layer_of(kHeads, kRatio, kDim);
    auto config = sized<kvq_config>();
    config.backend = KVQ_BACKEND_CUDA;
    config.n_layers = config.n_layer_structs = 1, config.layers = &layer, config.recipe = "tq-3";
    ok(kvq_create(&config, &cache));
    for (kvq_seq &seq : seqs) {
      ok(kvq_seq_create(cache, &seq));
      const Tensor k(random.rows(kPrompt, kHeads, kDim), kHeads, kDim), v(random.rows(kPrompt, kHeads, kDim), kHeads, kDim);
      auto prompt = sized<kvq_prefill>();
      prompt.n_tokens = kPrompt, prompt.flags = KVQ_PREFILL_FINAL, prompt.k = k.view(), prompt.v = v.view();
      ok(kvq_prefill_commit(cache, seq, &prompt, nullptr));
    }
    k = random.rows(kTokens, kHeads, kDim), v = random.rows(kTokens, kHeads, kDim), q = random.normals(kTokens * kHeads * kRatio * kDim, 0.3);
  }
  ~World() { kvq_destroy(cache); }
  World(const World &) = delete;

  // Ends without a complaint, whatever the input is.
  Floats step(const uint32_t *keep = nullptr) {
    const uint32_t counts[kSeqs] = {kNew, kNew, kNew};
    kvq_step step = 0;
    ok(kvq_step_begin(cache, seqs, counts, kSeqs, 0, &step));
    DeviceFloats keys(k.size()), values(v.size()), queries(q.size()), out(q.size());
    keys.set(k), values.set(v), queries.set(q);
    const kvq_tensor tk = keys.tensor(), tv = values.tensor(), tq = queries.tensor(), to = out.tensor();
    ok(kvq_append(cache, step, 0, &tk, &tv, nullptr, nullptr));
    ok(kvq_attend(cache, step, 0, &tq, &to, nullptr, nullptr, nullptr));
    ok(kvq_step_end(cache, step, keep, nullptr));
    return out.get();
  }
  int32_t begin(kvq_seq seq, uint32_t flags) {
    const uint32_t one = 1;
    kvq_step step = 0;
    const int32_t status = kvq_step_begin(cache, &seq, &one, 1, flags, &step);
    if (status == KVQ_OK) ok(kvq_step_abort(cache, step));
    return status;
  }

  Random random{31};
  kvq_cache *cache = nullptr;
  kvq_seq seqs[kSeqs];
  Floats k, v, q;
};

// The first element of a token in K or V; in Q.
size_t kv_at(uint32_t token) { return size_t(token) * kHeads * kDim; }
size_t q_at(uint32_t token) { return size_t(token) * kHeads * kRatio * kDim; }

}  // namespace

TEST_CASE("an element that is not finite marks its sequence and no other") {
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  World clean;
  const Floats expected = clean.step();
  for (int where = 0; where < 3; where++) {
    World w;
    const uint32_t token = 3;  // the second one of sequence 1: position kPrompt + 1
    if (where == 0) w.k[kv_at(token) + kDim + 5] = nan;
    if (where == 1) w.v[kv_at(token) + 7] = -inf;
    if (where == 2) w.q[q_at(token) + 9] = inf;
    const Floats out = w.step();
    for (const uint32_t other : {0u, 2u}) {
      for (size_t i = q_at(other * kNew); i < q_at((other + 1) * kNew); i++) REQUIRE(std::bit_cast<uint32_t>(out[i]) == std::bit_cast<uint32_t>(expected[i]));
      REQUIRE(export_wire(w.cache, w.seqs[other], 0, 0, KVQ_TENSOR_K) == export_wire(clean.cache, clean.seqs[other], 0, 0, KVQ_TENSOR_K));
      REQUIRE(same_bits(export_values(w.cache, w.seqs[other], 0, 1, KVQ_TENSOR_V, kPrompt + kNew, kDim),
                        export_values(clean.cache, clean.seqs[other], 0, 1, KVQ_TENSOR_V, kPrompt + kNew, kDim)));
      ok(w.begin(w.seqs[other], 0));
    }
    const kvq_seq marked = w.seqs[1];
    for (const uint32_t flags : {0u, KVQ_STEP_QUERY_ONLY}) refused(w.begin(marked, flags), KVQ_E_NONFINITE);
    REQUIRE(detail().find("position " + std::to_string(kPrompt + 1)) != std::string::npos);
    float value;
    kvq_seq child;
    refused(kvq_export_values(w.cache, marked, 0, 0, KVQ_TENSOR_K, 0, 0, &value), KVQ_E_NONFINITE);
    refused(kvq_end_turn(w.cache, marked), KVQ_E_NONFINITE);
    refused(kvq_seq_fork(w.cache, marked, UINT64_MAX, &child), KVQ_E_NONFINITE);
    refused(kvq_seq_truncate(w.cache, marked, kPrompt + 2), KVQ_E_NONFINITE);
    REQUIRE(lengths(w.cache, marked).total == kPrompt + kNew);
    ok(kvq_seq_fork(w.cache, marked, kPrompt + 1, &child));
    ok(w.begin(child, 0));
    ok(kvq_seq_truncate(w.cache, marked, kPrompt + 1));
    ok(w.begin(marked, 0));
  }
}

TEST_CASE("a rejected token leaves no mark, and a marked sequence can be removed") {
  World w;
  w.k[kv_at(1)] = std::numeric_limits<float>::quiet_NaN();
  const uint32_t keep[kSeqs] = {1, 2, 2};
  w.step(keep);
  ok(w.begin(w.seqs[0], 0));
  w.step();
  refused(w.begin(w.seqs[0], 0), KVQ_E_NONFINITE);
  ok(kvq_seq_remove(w.cache, w.seqs[0]));
}
