// Token scores against long double, and the places where a straight formula loses all digits.
#include <catch2/catch_test_macros.hpp>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "half.hpp"
#include "policy/indicator_rules.h"
#include "policy/indicators.h"
#include "random.hpp"

using namespace kvq;

namespace {

using Real = long double;

void near(float score, Real expected) {
  INFO(score << " against " << double(expected));
  CHECK(std::abs(Real(score) - expected) <= 1e-5L * std::abs(expected));
}

Real norm(const float *x, uint32_t n) {
  Real sum = 0;
  for (uint32_t i = 0; i < n; i++) sum += Real(x[i]) * x[i];
  return std::sqrt(sum);
}

Real cosine(const float *a, const float *b, uint32_t n) {
  Real dot = 0;
  for (uint32_t i = 0; i < n; i++) dot += Real(a[i]) * b[i];
  return dot / norm(a, n) / norm(b, n);
}

kvq_tensor tensor_of(const void *data, uint32_t dtype, int64_t token_stride, int64_t head_stride) {
  kvq_tensor tensor{};
  tensor.struct_size = sizeof tensor;
  tensor.dtype = dtype, tensor.data = const_cast<void *>(data), tensor.token_stride = token_stride, tensor.head_stride = head_stride;
  return tensor;
}

std::vector<float> hidden_scores(uint32_t kind, const std::vector<std::vector<float>> &layers, uint32_t dim) {
  std::vector<kvq_tensor> tensors;
  for (const auto &layer : layers) tensors.push_back(tensor_of(layer.data(), KVQ_DTYPE_F32, dim, dim));
  std::vector<float> scores(layers[0].size() / dim);
  if (score_hidden(kind, tensors.data(), uint32_t(tensors.size()), scores.size(), dim, scores.data()) != KVQ_OK)
    FAIL(failure_detail());
  return scores;
}

}  // namespace

TEST_CASE("scores of hidden states have their definitions") {
  kvq_test::Random random(5);
  const uint32_t dim = 300, tokens = 7, layers = 4;
  std::vector<std::vector<float>> h;
  for (uint32_t l = 0; l < layers; l++) h.push_back(random.normals(dim * tokens, 3, 1));
  const auto delta = hidden_scores(KVQ_SCORE_DELTA_NORM, h, dim), turn = hidden_scores(KVQ_SCORE_COSINE_DELTA, h, dim);
  const auto size = hidden_scores(KVQ_SCORE_NORM, h, dim), spread = hidden_scores(KVQ_SCORE_VARIANCE, h, dim);
  for (uint32_t t = 0; t < tokens; t++) {
    Real steps = 0, turns = 0, mean = 0, squares = 0;
    for (uint32_t l = 1; l < layers; l++) {
      const float *a = &h[l][t * dim], *b = &h[l - 1][t * dim];
      Real sum = 0;
      for (uint32_t i = 0; i < dim; i++) sum += (Real(a[i]) - b[i]) * (Real(a[i]) - b[i]);
      steps += std::sqrt(sum);
      turns += 1 - cosine(a, b, dim);
    }
    const float *last = &h[layers - 1][t * dim];
    for (uint32_t i = 0; i < dim; i++) mean += Real(last[i]) / dim;
    for (uint32_t i = 0; i < dim; i++) squares += (last[i] - mean) * (last[i] - mean);
    near(delta[t], steps / (layers - 1));
    near(turn[t], turns / (layers - 1));
    near(size[t], norm(last, dim));
    near(spread[t], squares / dim);
  }
}

TEST_CASE("small turns keep their digits") {
  // b differs from a = (1, 1, ...) by e in one coordinate: 1 - cos = e^2 (n - 1) / (2 n^2) to first order, here 1e-14.
  const uint32_t dim = 64;
  std::vector<float> a(dim, 1.0f), b(dim, 1.0f);
  const float e = 0x1p-20f;
  b[3] += e;
  const Real expected = Real(e) * e * (dim - 1) / (2.0L * dim * dim);
  near(hidden_scores(KVQ_SCORE_COSINE_DELTA, {a, b}, dim)[0], expected);
  CHECK(hidden_scores(KVQ_SCORE_COSINE_DELTA, {a, a}, dim)[0] == 0);
}

TEST_CASE("a zero state turns nowhere") {
  CHECK(hidden_scores(KVQ_SCORE_COSINE_DELTA, {{0, 0}, {1, 2}}, 2)[0] == 0);
  CHECK(hidden_scores(KVQ_SCORE_COSINE_DELTA, {{0, 0}, {0, 0}}, 2)[0] == 0);
  CHECK(hidden_scores(KVQ_SCORE_COSINE_DELTA, {{1, 0}, {-2, 0}}, 2)[0] == 2);
}

TEST_CASE("variance of far numbers keeps its digits, and huge numbers do not overflow") {
  near(hidden_scores(KVQ_SCORE_VARIANCE, {{1e6f, 1e6f + 1, 1e6f + 2, 1e6f + 3}}, 4)[0], 1.25L);
  near(hidden_scores(KVQ_SCORE_NORM, {{2e38f, 0, 0, 1e38f}}, 4)[0], std::sqrt(5.0L) * Real(1e38f));
}

TEST_CASE("hidden states are refused where they are few, not finite or of an unknown kind") {
  const float good[] = {1, 2}, bad[] = {1, std::numeric_limits<float>::infinity()};
  const kvq_tensor fine = tensor_of(good, KVQ_DTYPE_F32, 2, 2), two[] = {fine, fine}, broken[] = {tensor_of(bad, KVQ_DTYPE_F32, 2, 2), fine};
  float score = 42;
  CHECK(score_hidden(KVQ_SCORE_DELTA_NORM, two, 1, 1, 2, &score) == KVQ_E_INVALID);
  CHECK(score_hidden(KVQ_SCORE_NORM, two, 0, 1, 2, &score) == KVQ_E_INVALID);
  CHECK(score_hidden(4, two, 2, 1, 2, &score) == KVQ_E_INVALID);
  CHECK(score_hidden(KVQ_SCORE_NORM, two, 2, 1, 0, &score) == KVQ_E_INVALID);
  CHECK(score_hidden(KVQ_SCORE_DELTA_NORM, broken, 2, 1, 2, &score) == KVQ_E_NONFINITE);
  CHECK(score == 42);
  CHECK(score_hidden(KVQ_SCORE_NORM, broken, 2, 1, 2, &score) == KVQ_OK);  // only the last layer is used
}

TEST_CASE("key and value norms are means over layers and heads of the entered rows") {
  // Two layers, two tokens, two heads, D = 2; layer 1 has gaps between heads and tokens.
  float a[] = {3, 4, 0, 0, 6, 8, 5, 12};
  float b[] = {1, 0, 99, 0, 2, 99, 99, 99, 0, 0, 99, 3, 4, 99};
  const kvq_tensor rows[] = {tensor_of(a, KVQ_DTYPE_F32, 4, 2), tensor_of(b, KVQ_DTYPE_F32, 8, 3)};
  float scores[2];
  REQUIRE(score_norms(rows, 2, 2, 2, 2, scores) == KVQ_OK);
  near(scores[0], (5 + 0 + 1 + 2) / 4.0L);
  near(scores[1], (10 + 13 + 0 + 5) / 4.0L);
  float huge[] = {1e6f, 0};  // saturates at 65504 like every key
  const kvq_tensor one = tensor_of(huge, KVQ_DTYPE_F32, 2, 2);
  REQUIRE(score_norms(&one, 1, 1, 1, 2, scores) == KVQ_OK);
  CHECK(scores[0] == 65504);
  huge[1] = std::numeric_limits<float>::quiet_NaN();
  CHECK(score_norms(&one, 1, 1, 1, 2, scores) == KVQ_E_NONFINITE);
  CHECK(scores[0] == 65504);
  CHECK(score_norms(&one, 0, 1, 1, 2, scores) == KVQ_E_INVALID);
}

TEST_CASE("self-information is the negative log of a softmax") {
  kvq_test::Random random(6);
  const uint32_t vocab = 1000, tokens = 5;
  const std::vector<float> logits = random.normals(vocab * tokens, 4);
  std::vector<uint32_t> targets;
  for (uint32_t t = 0; t < tokens; t++) targets.push_back(uint32_t(random.below(vocab)));
  std::vector<float> scores(tokens);
  REQUIRE(score_self_information(tensor_of(logits.data(), KVQ_DTYPE_F32, vocab, vocab), targets.data(), tokens, vocab, scores.data()) == KVQ_OK);
  for (uint32_t t = 0; t < tokens; t++) {
    Real sum = 0;
    for (uint32_t i = 0; i < vocab; i++) sum += std::exp(Real(logits[t * vocab + i]));
    near(scores[t], std::log(sum) - Real(logits[t * vocab + targets[t]]));
  }
}

TEST_CASE("self-information of near certainty and near impossibility") {
  const float logits[] = {40, 0, -1e5f};
  const uint32_t targets[] = {0, 1, 2};
  float scores[3];
  const kvq_tensor row = tensor_of(logits, KVQ_DTYPE_F32, 3, 3);
  for (int i = 0; i < 3; i++) REQUIRE(score_self_information(row, targets + i, 1, 3, scores + i) == KVQ_OK);
  near(scores[0], std::exp(-40.0L));  // log1p(e^-40)
  near(scores[1], 40 + std::exp(-40.0L));
  near(scores[2], 100040);
  const uint32_t beyond = 3;
  CHECK(score_self_information(row, &beyond, 1, 3, scores) == KVQ_E_INVALID);
  const float bad[] = {0, -std::numeric_limits<float>::infinity()};
  CHECK(score_self_information(tensor_of(bad, KVQ_DTYPE_F32, 2, 2), targets, 1, 2, scores) == KVQ_E_NONFINITE);
  CHECK(score_self_information(row, targets, 1, 0, scores) == KVQ_E_INVALID);
  const float alone = 3;
  REQUIRE(score_self_information(tensor_of(&alone, KVQ_DTYPE_F32, 1, 1), targets, 1, 1, scores) == KVQ_OK);
  CHECK(scores[0] == 0);
}

TEST_CASE("attention adds up over heads and queries, or not at all") {
  const float weights[] = {1, 0, 0.5f, 0.5f, 0.25f, 0.75f, 0, 1};  // 2 heads, 2 queries, 2 keys
  float scores[] = {10, 20};
  REQUIRE(score_attention(tensor_of(weights, KVQ_DTYPE_F32, 2, 4), 2, 2, 2, scores) == KVQ_OK);
  CHECK(scores[0] == 11.75f);
  CHECK(scores[1] == 22.25f);
  const float broken[] = {1, 1, std::numeric_limits<float>::quiet_NaN(), 1};
  CHECK(score_attention(tensor_of(broken, KVQ_DTYPE_F32, 2, 2), 1, 2, 2, scores) == KVQ_E_NONFINITE);
  CHECK(scores[0] == 11.75f);
}

TEST_CASE("small weights are not lost among many") {
  const size_t queries = 1 << 22;
  std::vector<float> weights(queries, 1e-3f);
  float score = 0;
  REQUIRE(score_attention(tensor_of(weights.data(), KVQ_DTYPE_F32, 1, 1), 1, queries, 1, &score) == KVQ_OK);
  near(score, Real(1e-3f) * queries);
}

TEST_CASE("random scores are the upper 24 bits of splitmix64") {
  // splitmix64(0) = 0xE220A8397B1DCDAF, the generator's published first output.
  float scores[3];
  score_random(0, 0, 3, scores);
  CHECK(scores[0] == float(0xE220A8));
  float later[2];
  score_random(0, 1, 2, later);
  CHECK(later[0] == scores[1]);
  CHECK(later[1] == scores[2]);
  score_random(1, 0, 1, later);
  CHECK(later[0] == scores[1]);  // seed + index
}

TEST_CASE("exp and ln(1 + x) of IEEE operations are right to the last bits") {
  kvq_test::Random random(7);
  const auto close = [](double value, Real expected) {
    INFO(value << " against " << double(expected));
    CHECK(std::abs(Real(value) - expected) <= 5e-16L * std::abs(expected));
  };
  for (int i = 0; i < 20000; i++) {
    const double x = -std::exp(8 * random.normal() - 4);
    if (x >= -700) close(score_exp(x), std::exp(Real(x)));
    const double y = std::exp(12 * random.normal());
    close(score_log1p(y), std::log1p(Real(y)));
  }
  CHECK(score_exp(0) == 1);
  CHECK(score_exp(-1e300) == 0);
  CHECK(score_log1p(0) == 0);
  close(score_log1p(1), std::log(2.0L));
}

TEST_CASE("scores of half precision are those of the same numbers in fp32") {
  const float values[] = {1.5f, -2, 0.25f, 3};
  const uint16_t half[] = {0x3e00, 0xc000, 0x3400, 0x4200}, brain[] = {0x3fc0, 0xc000, 0x3e80, 0x4040};
  const double wide[] = {1.5, -2, 0.25, 3};
  float expected[2];
  const kvq_tensor exact = tensor_of(values, KVQ_DTYPE_F32, 2, 2);
  REQUIRE(score_hidden(KVQ_SCORE_VARIANCE, &exact, 1, 2, 2, expected) == KVQ_OK);
  const kvq_tensor others[] = {tensor_of(half, KVQ_DTYPE_F16, 2, 2), tensor_of(brain, KVQ_DTYPE_BF16, 2, 2), tensor_of(wide, KVQ_DTYPE_F64, 2, 2)};
  for (const kvq_tensor &other : others) {
    float scores[2];
    REQUIRE(score_hidden(KVQ_SCORE_VARIANCE, &other, 1, 2, 2, scores) == KVQ_OK);
    CHECK(scores[0] == expected[0]);
    CHECK(scores[1] == expected[1]);
  }
}
