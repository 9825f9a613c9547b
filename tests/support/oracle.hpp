// Attention in float64, written from its definition: what every backend is measured against.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace kvq_test {

// The newest n_queries tokens of a sequence of `tokens` look at it.
struct Attention {
  size_t tokens, n_queries, q_heads, kv_heads, dim_k, dim_v;
  const float *q;                // [n_queries][q_heads][dim_k]
  const float *k, *v;            // [kv_heads][tokens][dim]: decoded values, head by head as kvq_export_values gives them
  double scale = 0, softcap = 0;  // 0: 1/sqrt(dim_k); none
  size_t window = 0;             // 0: none
  const float *sinks = nullptr;  // [q_heads]
};

struct Attended {
  std::vector<double> out, lse;           // [n_queries][q_heads][dim_v], [n_queries][q_heads]
  std::vector<double> variance, largest;  // of the scaled logits before the cap, per [n_queries][q_heads]
};

inline Attended attend(const Attention &a) {
  Attended result;
  result.out.resize(a.n_queries * a.q_heads * a.dim_v);
  const double scale = a.scale != 0 ? a.scale : 1 / std::sqrt(static_cast<double>(a.dim_k));
  for (size_t row = 0; row < a.n_queries * a.q_heads; ++row) {
    const size_t query = row / a.q_heads, head = row % a.q_heads, kv = head * a.kv_heads / a.q_heads;
    const size_t end = a.tokens - a.n_queries + query + 1;
    const size_t begin = a.window && end > a.window ? end - a.window : 0;
    const float *q = a.q + row * a.dim_k, *k = a.k + kv * a.tokens * a.dim_k, *v = a.v + kv * a.tokens * a.dim_v;
    double *out = result.out.data() + row * a.dim_v;

    std::vector<double> logits;
    double sum = 0, squares = 0, largest = 0;
    for (size_t t = begin; t < end; ++t) {
      double logit = 0;
      for (size_t c = 0; c < a.dim_k; ++c) logit += static_cast<double>(q[c]) * k[t * a.dim_k + c];
      logit *= scale;
      sum += logit, squares += logit * logit, largest = std::max(largest, std::fabs(logit));
      logits.push_back(a.softcap != 0 ? a.softcap * std::tanh(logit / a.softcap) : logit);
    }
    const double n = static_cast<double>(std::max<size_t>(logits.size(), 1));
    result.variance.push_back(std::max(0.0, squares / n - (sum / n) * (sum / n)));
    result.largest.push_back(largest);

    double top = a.sinks ? a.sinks[head] : -std::numeric_limits<double>::infinity();
    for (double logit : logits) top = std::max(top, logit);
    double total = a.sinks ? std::exp(a.sinks[head] - top) : 0;
    for (size_t i = 0; i < logits.size(); ++i) {
      const double weight = std::exp(logits[i] - top);
      total += weight;
      for (size_t c = 0; c < a.dim_v; ++c) out[c] += weight * v[(begin + i) * a.dim_v + c];
    }
    for (size_t c = 0; c < a.dim_v; ++c) out[c] = total > 0 ? out[c] / total : 0;
    result.lse.push_back(total > 0 ? top + std::log(total) : -std::numeric_limits<double>::infinity());
  }
  return result;
}

// Tolerance of section 9 for one output row; a value above 1 fails.
inline double attention_error(const float *out, const double *expected, size_t dim_v, double variance, double largest_v) {
  double error = 0, power = 0, worst = 0;
  for (size_t c = 0; c < dim_v; ++c) {
    const double difference = out[c] - expected[c];
    error += difference * difference, power += expected[c] * expected[c], worst = std::max(worst, std::fabs(difference));
  }
  const double nmse = error == 0 ? 0 : error / power;
  return std::max(nmse / (1e-7 * std::max(1.0, variance)), worst == 0 ? 0 : worst / (1e-3 * largest_v));
}

}  // namespace kvq_test
