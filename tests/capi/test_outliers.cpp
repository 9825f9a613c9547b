// Attention over tokens that are very unlike one another: values thousands of times as large as the others', beside which roundings of
// small weights add up unless they differ; logits that climb or fall by more than a float's exponents from tile to tile.
#include "kit.hpp"
#include "oracle.hpp"

using namespace kvq_test;

namespace {

constexpr uint32_t kHeads = 8, kRatio = 4, kTokens = 321, kTile = 64;

// One vector, and in every tile another one `factor` times as large; a factor for each head.
Floats values_with_outliers(uint32_t dim, double first_factor, Random *random) {
  const Floats common = random->normals(kHeads * dim), large = random->normals(kHeads * dim);
  Floats values(size_t(kTokens) * kHeads * dim);
  for (uint32_t t = 0; t < kTokens; t++)
    for (uint32_t h = 0; h < kHeads; h++)
      for (uint32_t c = 0; c < dim; c++) {
        const float factor = t % kTile == 17 + h ? float(first_factor * std::pow(1.09, h)) : 0;
        values[(size_t(t) * kHeads + h) * dim + c] = factor > 0 ? factor * large[h * dim + c] : common[h * dim + c];
      }
  return values;
}

// The largest NMSE of all rows for a query of each head.
double largest_error(const Setup &setup, const kvq_layer &layer, const Floats &keys, const Floats &values, const Floats &queries, Random *random) {
  const uint32_t dim = layer.dim_k;
  const Cache cache(setup);
  kvq_seq seq = 0;
  ok(kvq_seq_create(cache, &seq));
  const size_t packed = size_t(kTokens - 1) * kHeads * dim;
  const Tensor k(Floats(keys.begin(), keys.begin() + long(packed)), kHeads, dim), v(Floats(values.begin(), values.begin() + long(packed)), kHeads, dim);
  const Tensor q(random->normals(size_t(kTokens - 1) * kHeads * kRatio * dim), kHeads * kRatio, dim);
  const Floats scores(kTokens - 1, 1.0f);
  auto prompt = sized<kvq_prefill>();
  prompt.n_tokens = kTokens - 1, prompt.flags = KVQ_PREFILL_FINAL;
  prompt.k = k.view(), prompt.v = v.view(), prompt.q = q.view();
  prompt.scores = scores.data(), prompt.n_scores = kTokens - 1;
  ok(kvq_prefill_commit(cache, seq, &prompt, nullptr));

  const uint32_t one = 1;
  kvq_step step = 0;
  ok(kvq_step_begin(cache, &seq, &one, 1, 0, &step));
  const Tensor new_k(Floats(keys.begin() + long(packed), keys.end()), kHeads, dim), new_v(Floats(values.begin() + long(packed), values.end()), kHeads, dim);
  const Tensor query(queries, kHeads * kRatio, dim), out(1, kHeads * kRatio, dim, KVQ_DTYPE_F32, Lay::packed);
  ok(kvq_append(cache, step, 0, new_k.view(), new_v.view(), nullptr, nullptr));
  ok(kvq_attend(cache, step, 0, query.view(), out.view(), nullptr, nullptr, nullptr));
  ok(kvq_step_end(cache, step, nullptr, scores.data()));

  const uint32_t total = uint32_t(lengths(cache, seq).total);
  Floats all[2];
  for (uint32_t h = 0; h < kHeads; h++)
    for (uint32_t tensor = 0; tensor < 2; tensor++) {
      const Floats head = export_values(cache, seq, 0, h, tensor, total, dim);
      all[tensor].insert(all[tensor].end(), head.begin(), head.end());
    }
  const Attended expected = attend({.tokens = total, .n_queries = 1, .q_heads = kHeads * kRatio, .kv_heads = kHeads, .dim_k = dim, .dim_v = dim, .q = queries.data(), .k = all[0].data(), .v = all[1].data()});
  const Floats got = out.values();
  double largest = 0;
  for (uint32_t row = 0; row < kHeads * kRatio; row++) {
    double error = 0, power = 0;
    for (size_t i = size_t(row) * dim; i < size_t(row + 1) * dim; i++)
      error += (got[i] - expected.out[i]) * (got[i] - expected.out[i]), power += expected.out[i] * expected.out[i];
    largest = error / power > largest || error != error ? error / power : largest;  // keeps what is no number
  }
  return largest;
}

}  // namespace

TEST_CASE("small values beside an outlier in every tile keep their sum") {
  for (const char *recipe : {"tq-2", "tq-3", "tq-4", "tq-1.585", "tq-2.585", "kivi-2", "kivi-2-g32", "kitty", "kvq-2", "kvq-3", "pnmix", "semkv", "tq-split",
                             "blockgtq-k3v3", "polar-2"})
    for (const uint32_t dim : {64u, 128u, 256u}) {
      Setup setup{.recipe = recipe, .layers = {layer_of(kHeads, kRatio, dim)}};
      Random random(7);
      double largest = 0;
      const Floats keys = random.normals(size_t(kTokens) * kHeads * dim), queries(kHeads * kRatio * dim);  // which see every token alike
      for (const double factor : {900.0, 2100.0, 4300.0})
        largest = std::max(largest, largest_error(setup, setup.layers[0], keys, values_with_outliers(dim, factor, &random), queries, &random));
      INFO(recipe << " at " << dim << ": NMSE " << largest);
      CHECK(largest <= 1e-7);
    }
}

TEST_CASE("logits climb and fall by hundreds from tile to tile") {
  constexpr float kSteps[][6] = {{-2, -1, 0, 1, 2, 1}, {2, 1, 0, -1, -2, -2}, {0, 1, -1, 1, 0, -1}, {-2, -2, -2, -2, -2, -2}};
  for (const char *recipe : {"tq-2", "tq-3", "tq-4", "tq-1.585", "kivi-2", "kivi-2-g32", "kitty", "kvq-2", "kvq-3", "pnmix", "semkv", "tq-split", "blockgtq-k3v3", "polar-2", "fp16"})
    for (const uint32_t dim : {64u, 128u, 256u}) {
      Setup setup{.recipe = recipe, .layers = {layer_of(kHeads, kRatio, dim)}};
      Random random(11);
      const Floats common = random.normals(kHeads * dim), values = random.normals(size_t(kTokens) * kHeads * dim);
      for (const auto &steps : kSteps) {
        Floats keys(values.size()), queries;
        for (uint32_t t = 0; t < kTokens; t++)
          for (size_t i = 0; i < common.size(); i++) keys[t * common.size() + i] = steps[t / kTile] * common[i];
        for (uint32_t row = 0; row < kHeads * kRatio; row++)  // a step is 70 to 280 in logits
          for (uint32_t c = 0; c < dim; c++) queries.push_back(float(1 + row % kRatio) * 70.0f / std::sqrt(float(dim)) * common[row / kRatio * dim + c]);
        const double error = largest_error(setup, setup.layers[0], keys, values, queries, &random);
        INFO(recipe << " at " << dim << ", from " << steps[0] << " by " << steps[1] << " to " << steps[4] << ": NMSE " << error);
        CHECK(error <= 1e-3);  // the rounding of a query, times logits of hundreds
      }
    }
}
