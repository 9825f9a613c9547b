// SemKV's indicators (section 3.3; delta-norm is Eq. 3).
#include "policy/indicators.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "util/entry.h"
#include "util/fp.h"

namespace kvq {

namespace {

// ---- hidden states: one score from the rows h of a token in n >= 1 layers

double norm(const float *x, uint32_t dim) {
  double sum = 0;
  for (uint32_t i = 0; i < dim; i++) sum += double(x[i]) * double(x[i]);
  return std::sqrt(sum);
}

double distance(const float *a, const float *b, uint32_t dim) {
  double sum = 0;
  for (uint32_t i = 0; i < dim; i++) {
    const double d = double(a[i]) - double(b[i]);
    sum += d * d;
  }
  return std::sqrt(sum);
}

// 1 - cos as half the squared distance of the unit vectors: no cancellation where the directions are close.
double cosine_distance(const float *a, const float *b, uint32_t dim) {
  const double norm_a = norm(a, dim), norm_b = norm(b, dim);
  if (norm_a == 0 || norm_b == 0) return 0;
  double sum = 0;
  for (uint32_t i = 0; i < dim; i++) {
    const double d = double(a[i]) / norm_a - double(b[i]) / norm_b;
    sum += d * d;
  }
  return sum / 2;
}

double variance(const float *x, uint32_t dim) {
  double sum = 0, squares = 0;
  for (uint32_t i = 0; i < dim; i++) sum += double(x[i]);
  const double mean = sum / dim;
  for (uint32_t i = 0; i < dim; i++) squares += (double(x[i]) - mean) * (double(x[i]) - mean);
  return squares / dim;
}

double mean_step(double (*measure)(const float *, const float *, uint32_t), const std::vector<const float *> &h, uint32_t dim) {
  double sum = 0;
  for (size_t l = 1; l < h.size(); l++) sum += measure(h[l], h[l - 1], dim);
  return sum / double(h.size() - 1);
}

struct HiddenRow {
  uint32_t n_least;  // of hidden states
  double (*score)(const std::vector<const float *> &h, uint32_t dim);
};
// In the order of KVQ_SCORE_*.
constexpr HiddenRow kHidden[] = {
    {2, [](const std::vector<const float *> &h, uint32_t dim) { return mean_step(distance, h, dim); }},
    {2, [](const std::vector<const float *> &h, uint32_t dim) { return mean_step(cosine_distance, h, dim); }},
    {1, [](const std::vector<const float *> &h, uint32_t dim) { return norm(h.back(), dim); }},
    {1, [](const std::vector<const float *> &h, uint32_t dim) { return variance(h.back(), dim); }},
};

uint32_t first_nonfinite(const float *x, uint32_t n) {
  uint32_t i = 0;
  while (i < n && std::isfinite(x[i])) i++;
  return i;
}

Status check_finite(const char *name, uint64_t row, const float *x, uint32_t n) {
  const uint32_t bad = first_nonfinite(x, n);
  if (bad == n) return KVQ_OK;
  return fail(KVQ_E_NONFINITE, "%s: element %u of row %llu is not finite", name, bad, (unsigned long long)row);
}

// -ln softmax(logits)[target] without cancellation: the likeliest token by log1p, the others as a sum of two terms >= 0.
double self_information(const float *logits, uint32_t target, uint32_t vocab) {
  const double top = *std::max_element(logits, logits + vocab), own = logits[target];
  double others = 0;
  for (uint32_t i = 0; i < vocab; i++)
    if (i != target) others += std::exp(double(logits[i]) - top);
  return own == top ? std::log1p(others) : (top - own) + std::log(others + std::exp(own - top));
}

}  // namespace

Status score_hidden(uint32_t kind, const float *const *hidden, uint32_t n_hidden, uint64_t n_tokens, uint32_t dim, float *scores) {
  if (kind >= std::size(kHidden)) return fail(KVQ_E_INVALID, "kind=%u is no KVQ_SCORE_*", kind);
  const HiddenRow &row = kHidden[kind];
  if (n_hidden < row.n_least) return fail(KVQ_E_INVALID, "n_hidden=%u is below the %u of this kind", n_hidden, row.n_least);
  if (dim == 0) return fail(KVQ_E_INVALID, "dim=0");
  const uint32_t first = row.n_least == 1 ? n_hidden - 1 : 0;  // of the layers that are used
  for (uint32_t l = first; l < n_hidden; l++)
    for (uint64_t t = 0; t < n_tokens; t++) KVQ_TRY(check_finite("hidden", t, hidden[l] + t * dim, dim));
  std::vector<const float *> h(n_hidden - first);
  for (uint64_t t = 0; t < n_tokens; t++) {
    for (uint32_t l = first; l < n_hidden; l++) h[l - first] = hidden[l] + t * dim;
    scores[t] = float(row.score(h, dim));
  }
  return KVQ_OK;
}

Status score_norms(const kvq_tensor *rows, uint32_t n_layers, uint64_t n_tokens, uint32_t heads, uint32_t dim, float *scores) {
  if (n_layers == 0 || heads == 0 || dim == 0)
    return fail(KVQ_E_INVALID, "n_layers=%u, heads=%u, dim=%u: none may be 0", n_layers, heads, dim);
  std::vector<double> sums(n_tokens, 0.0);
  std::vector<uint16_t> row(dim);
  for (uint32_t l = 0; l < n_layers; l++) {
    const int64_t size = dtype_bytes(rows[l].dtype);
    for (uint64_t t = 0; t < n_tokens; t++)
      for (uint32_t h = 0; h < heads; h++) {
        const int64_t offset = int64_t(t) * rows[l].token_stride + int64_t(h) * rows[l].head_stride;
        uint64_t saturated = 0;
        const uint32_t bad =
            enter_row(static_cast<const char *>(rows[l].data) + offset * size, rows[l].dtype, dim, row.data(), &saturated);
        if (bad < dim)
          return fail(KVQ_E_NONFINITE, "rows[%u]: token %llu, head %u, channel %u is not finite", l, (unsigned long long)t, h, bad);
        double sum = 0;
        for (const uint16_t x : row) sum += double(half_to_float(x)) * double(half_to_float(x));
        sums[t] += std::sqrt(sum);
      }
  }
  for (uint64_t t = 0; t < n_tokens; t++) scores[t] = float(sums[t] / (double(n_layers) * heads));
  return KVQ_OK;
}

Status score_self_information(const float *logits, const uint32_t *targets, uint64_t n_tokens, uint32_t vocab, float *scores) {
  if (vocab == 0) return fail(KVQ_E_INVALID, "vocab=0");
  for (uint64_t t = 0; t < n_tokens; t++) {
    if (targets[t] >= vocab)
      return fail(KVQ_E_INVALID, "targets[%llu]=%u is beyond vocab=%u", (unsigned long long)t, targets[t], vocab);
    KVQ_TRY(check_finite("logits", t, logits + t * vocab, vocab));
  }
  for (uint64_t t = 0; t < n_tokens; t++) scores[t] = float(self_information(logits + t * vocab, targets[t], vocab));
  return KVQ_OK;
}

Status score_attention(const float *weights, uint32_t heads, uint64_t n_queries, uint64_t n_keys, float *scores) {
  std::vector<double> sums(scores, scores + n_keys);
  for (uint64_t row = 0; row < heads * n_queries; row++)
    for (uint64_t key = 0; key < n_keys; key++) {
      const float weight = weights[row * n_keys + key];
      if (!std::isfinite(weight))
        return fail(KVQ_E_NONFINITE, "weights: head %llu, query %llu, key %llu is not finite", (unsigned long long)(row / n_queries),
                    (unsigned long long)(row % n_queries), (unsigned long long)key);
      sums[key] += double(weight);
    }
  std::transform(sums.begin(), sums.end(), scores, [](double sum) { return float(sum); });
  return KVQ_OK;
}

void score_random(uint64_t seed, uint64_t first, uint64_t n_tokens, float *scores) {
  for (uint64_t i = 0; i < n_tokens; i++) scores[i] = float(splitmix64(seed + first + i) >> 40);
}

}  // namespace kvq
