// The indicators on host memory.
#include "policy/indicators.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "policy/indicator_rules.h"
#include "util/entry.h"
#include "util/fp.h"

namespace kvq {

namespace {

constexpr Lanes kLanes;

struct Row {
  const float *x;
  float operator()(uint32_t i) const { return x[i]; }
};

struct HiddenRow {
  uint32_t n_least;  // of hidden states
  double (*score)(const std::vector<float> *h, size_t n, uint32_t dim);  // from the rows of a token
};

template <class F>
double mean_step(F &&measure, const std::vector<float> *h, size_t n) {
  double sum = 0;
  for (size_t l = 1; l < n; l++) sum += measure(Row{h[l].data()}, Row{h[l - 1].data()});
  return sum / double(n - 1);
}

// In the order of KVQ_SCORE_*.
constexpr HiddenRow kHidden[] = {
    {2, [](const std::vector<float> *h, size_t n, uint32_t dim) {
       return mean_step([&](Row a, Row b) { return row_distance(kLanes, a, b, dim); }, h, n);
     }},
    {2, [](const std::vector<float> *h, size_t n, uint32_t dim) {
       return mean_step([&](Row a, Row b) { return row_cosine_distance(kLanes, a, b, dim); }, h, n);
     }},
    {1, [](const std::vector<float> *h, size_t, uint32_t dim) { return row_norm(kLanes, Row{h->data()}, dim); }},
    {1, [](const std::vector<float> *h, size_t, uint32_t dim) { return row_variance(kLanes, Row{h->data()}, dim); }},
};

float element(const void *data, uint32_t dtype, int64_t at) {
  switch (dtype) {
    case KVQ_DTYPE_F16:
      return half_to_float(static_cast<const uint16_t *>(data)[at]);
    case KVQ_DTYPE_BF16:
      return std::bit_cast<float>(uint32_t(static_cast<const uint16_t *>(data)[at]) << 16);
    case KVQ_DTYPE_F64:
      return float(static_cast<const double *>(data)[at]);
    default:
      return static_cast<const float *>(data)[at];
  }
}

// Row [token][head] as fp32; every element must be finite.
Status load_row(const char *name, const kvq_tensor &x, uint64_t token, uint32_t head, std::vector<float> *out) {
  const int64_t at = int64_t(token) * x.token_stride + int64_t(head) * x.head_stride;
  for (size_t i = 0; i < out->size(); i++) {
    (*out)[i] = element(x.data, x.dtype, at + int64_t(i));
    if (!std::isfinite((*out)[i]))
      return fail(KVQ_E_NONFINITE, "%s: token %llu, head %u, element %zu is not finite", name, (unsigned long long)token, head, i);
  }
  return KVQ_OK;
}

}  // namespace

Status check_hidden(uint32_t kind, uint32_t n_hidden, uint32_t *first) {
  if (kind >= std::size(kHidden)) return fail(KVQ_E_INVALID, "kind=%u is no KVQ_SCORE_*", kind);
  const uint32_t least = kHidden[kind].n_least;
  if (n_hidden < least) return fail(KVQ_E_INVALID, "n_hidden=%u is below the %u of this kind", n_hidden, least);
  *first = least == 1 ? n_hidden - 1 : 0;
  return KVQ_OK;
}

Status score_hidden(uint32_t kind, const kvq_tensor *hidden, uint32_t n_hidden, uint64_t n_tokens, uint32_t dim, float *scores) {
  uint32_t first = 0;
  KVQ_TRY(check_hidden(kind, n_hidden, &first));
  if (dim == 0) return fail(KVQ_E_INVALID, "dim=0");
  std::vector<std::vector<float>> h(n_hidden - first, std::vector<float>(dim));
  std::vector<float> out(n_tokens);
  for (uint64_t t = 0; t < n_tokens; t++) {
    for (uint32_t l = first; l < n_hidden; l++) KVQ_TRY(load_row("hidden", hidden[l], t, 0, &h[l - first]));
    out[t] = float(kHidden[kind].score(h.data(), h.size(), dim));
  }
  std::copy(out.begin(), out.end(), scores);
  return KVQ_OK;
}

Status score_norms(const kvq_tensor *rows, uint32_t n_layers, uint64_t n_tokens, uint32_t heads, uint32_t dim, float *scores) {
  if (n_layers == 0 || heads == 0 || dim == 0)
    return fail(KVQ_E_INVALID, "n_layers=%u, heads=%u, dim=%u: none may be 0", n_layers, heads, dim);
  std::vector<double> sums(n_tokens, 0.0);
  std::vector<uint16_t> row(dim);
  const auto entered = [&](uint32_t i) { return half_to_float(row[i]); };
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
        sums[t] += row_norm(kLanes, entered, dim);
      }
  }
  for (uint64_t t = 0; t < n_tokens; t++) scores[t] = float(sums[t] / (double(n_layers) * heads));
  return KVQ_OK;
}

Status score_self_information(const kvq_tensor &logits, const uint32_t *targets, uint64_t n_tokens, uint32_t vocab, float *scores) {
  if (vocab == 0) return fail(KVQ_E_INVALID, "vocab=0");
  std::vector<float> row(vocab), out(n_tokens);
  for (uint64_t t = 0; t < n_tokens; t++) {
    if (targets[t] >= vocab)
      return fail(KVQ_E_INVALID, "targets[%llu]=%u is beyond vocab=%u", (unsigned long long)t, targets[t], vocab);
    KVQ_TRY(load_row("logits", logits, t, 0, &row));
    out[t] = float(row_self_information(kLanes, Row{row.data()}, targets[t], vocab));
  }
  std::copy(out.begin(), out.end(), scores);
  return KVQ_OK;
}

// Lane i adds queries i, i + 32, ... of head 0, then of head 1 and so on.
Status score_attention(const kvq_tensor &weights, uint32_t heads, uint64_t n_queries, uint64_t n_keys, float *scores) {
  constexpr uint64_t kTile = 256;  // keys at a time
  std::vector<double> lanes(kTile * kScoreLanes);
  std::vector<float> out(n_keys);
  for (uint64_t first = 0; first < n_keys; first += kTile) {
    const uint64_t keys = std::min(kTile, n_keys - first);
    std::fill(lanes.begin(), lanes.end(), 0.0);
    for (uint32_t h = 0; h < heads; h++)
      for (uint64_t q = 0; q < n_queries; q++) {
        const int64_t at = int64_t(q) * weights.token_stride + int64_t(h) * weights.head_stride + int64_t(first);
        for (uint64_t key = 0; key < keys; key++) {
          const float weight = element(weights.data, weights.dtype, at + int64_t(key));
          if (!std::isfinite(weight))
            return fail(KVQ_E_NONFINITE, "weights: query %llu, head %u, key %llu is not finite", (unsigned long long)q, h,
                        (unsigned long long)(first + key));
          lanes[key * kScoreLanes + q % kScoreLanes] += double(weight);
        }
      }
    for (uint64_t key = 0; key < keys; key++)
      out[first + key] = float(double(scores[first + key]) + add_lanes(&lanes[key * kScoreLanes]));
  }
  std::copy(out.begin(), out.end(), scores);
  return KVQ_OK;
}

Status score_random(uint64_t seed, uint64_t first, uint64_t n_tokens, float *scores) {
  for (uint64_t i = 0; i < n_tokens; i++) scores[i] = float(splitmix64(seed + first + i) >> 40);
  return KVQ_OK;
}

constinit const Indicators host_indicators = {score_hidden, score_norms, score_self_information, score_attention, score_random};

}  // namespace kvq
