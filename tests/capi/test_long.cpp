// Long sequences: 32768 tokens, many at once, and a needle among them.  (Cases T9, Q12.)
#include <array>

#include "mirror.hpp"

using namespace kvq_test;

namespace {

constexpr uint32_t kTokens = 32768;

}  // namespace

TEST_CASE("eight sequences of 32768 tokens") {  // T9
  Mirror m(Setup{.layers = {layer_of(2, 2, 128)}});
  Random random(9);
  std::vector<kvq_seq> seqs;
  for (int i = 0; i < 8; ++i) {
    Ids list(kTokens);
    for (uint32_t &id : list) id = uint32_t(random.below(1000));
    seqs.push_back(m.create());
    m.commit(seqs.back(), list, 10000);
    m.append(seqs.back(), {1, 2, 3, 4, 5});
  }
  for (size_t i = 0; i < seqs.size(); i += kSlow) m.query(seqs[i], 1);
  m.query(seqs, std::vector<uint32_t>(seqs.size(), 1), {.check = false});
  REQUIRE(stats(m.cache).tokens == 8 * (kTokens + 5));
}

// Keys and queries N(0, 1); at each of 11 depths one key is moved along the query until its logit is 3 above the largest of all
// others.  After quantization every needle must still be above all the others.
TEST_CASE("a needle in 32768 tokens stays the first at two bits and more") {  // Q12
  constexpr uint32_t kDim = 128, kDepths = 11;
  for (uint64_t stream = 0; stream < 3; ++stream) {
    Random random(1200 + stream);
    Floats keys = random.normals(size_t(kTokens) * kDim);
    const Floats query = random.normals(kDim);
    const auto logit = [&](const float *key) {
      double sum = 0;
      for (uint32_t c = 0; c < kDim; ++c) sum += double(query[c]) * key[c];
      return sum / std::sqrt(double(kDim));
    };
    double top = -1e9, norm = 0;
    for (uint32_t t = 0; t < kTokens; ++t) top = std::max(top, logit(&keys[size_t(t) * kDim]));
    for (float q : query) norm += double(q) * q;
    std::array<uint32_t, kDepths> needles;
    for (uint32_t d = 0; d < kDepths; ++d) {
      needles[d] = 100 + uint32_t(uint64_t(d) * (kTokens - 400) / (kDepths - 1));  // in packed blocks, between sinks and tail
      float *key = &keys[size_t(needles[d]) * kDim];
      const double step = (top + 3 - logit(key)) * std::sqrt(double(kDim)) / norm;
      for (uint32_t c = 0; c < kDim; ++c) key[c] += float(step * query[c]);
    }
    const Tensor k(keys, 1, kDim), q(Floats(keys.size(), 1.0f), 1, kDim);
    for (const char *recipe : {"kivi-2", "tq-2", "tq-3", "pnmix", "blockgtq-k2v2", "kvq-2", "kvq-3"}) {
      if (kSlow > 1 && stream > 0) continue;
      Cache cache(Setup{.recipe = recipe, .layers = {layer_of(1, 1, kDim)}});
      kvq_seq seq = 0;
      ok(kvq_seq_create(cache, &seq));
      auto chunk = sized<kvq_prefill>();
      chunk.flags = KVQ_PREFILL_FINAL, chunk.n_tokens = kTokens;
      chunk.k = chunk.v = k.view(), chunk.q = q.view();
      ok(kvq_prefill_commit(cache, seq, &chunk, nullptr));
      const Floats seen = export_values(cache, seq, 0, 0, KVQ_TENSOR_K, kTokens, kDim);
      double others = -1e9;
      for (uint32_t t = 0; t < kTokens; ++t)
        if (std::find(needles.begin(), needles.end(), t) == needles.end()) others = std::max(others, logit(&seen[size_t(t) * kDim]));
      for (uint32_t d = 0; d < kDepths; ++d) {
        INFO(recipe << ", needle at " << needles[d]);
        REQUIRE(logit(&seen[size_t(needles[d]) * kDim]) > others);
      }
    }
  }
}
