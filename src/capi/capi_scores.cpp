// Token scores (SemKV).
#include "capi/boundary.h"
#include "policy/indicators.h"

using namespace kvq;
using namespace kvq::capi;

int32_t kvq_scores_hidden(uint32_t kind, const float *const *hidden, uint32_t n_hidden, uint64_t n_tokens, uint32_t dim,
                          float *scores) {
  return guarded([&]() -> Status {
    KVQ_REQUIRE(hidden);
    KVQ_TRY(check_tokens("n_tokens", n_tokens));
    if (n_tokens > 0) {
      KVQ_REQUIRE(scores);
      for (uint32_t i = 0; i < n_hidden; i++)
        if (!hidden[i]) return fail(KVQ_E_INVALID, "hidden[%u] is NULL", i);
    }
    return score_hidden(kind, hidden, n_hidden, n_tokens, dim, scores);
  });
}

int32_t kvq_scores_norms(const kvq_tensor *rows, uint32_t n_layers, uint64_t n_tokens, uint32_t heads, uint32_t dim, float *scores) {
  return guarded([&]() -> Status {
    KVQ_REQUIRE(rows);
    KVQ_TRY(check_tokens("n_tokens", n_tokens));
    if (n_layers < 1 || n_layers > 65535) return fail(KVQ_E_INVALID, "n_layers=%u is not in 1..65535", n_layers);
    if (heads < 1 || dim < 1) return fail(KVQ_E_INVALID, "heads=%u and dim=%u must be at least 1", heads, dim);
    if (n_tokens > 0) KVQ_REQUIRE(scores);
    Memory scratch;
    Vector<kvq_tensor> resolved(n_layers, &scratch);
    for (uint32_t l = 0; l < n_layers; l++) {
      const char *at = reinterpret_cast<const char *>(rows) + size_t(l) * rows->struct_size;
      KVQ_TRY(read_tensor(reinterpret_cast<const kvq_tensor *>(at), "rows", n_tokens, heads, dim, capi::Use::input, &resolved[l]));
    }
    return score_norms(resolved.data(), n_layers, n_tokens, heads, dim, scores);
  });
}

int32_t kvq_scores_self_information(const float *logits, const uint32_t *targets, uint64_t n_tokens, uint32_t vocab, float *scores) {
  return guarded([&]() -> Status {
    KVQ_TRY(check_tokens("n_tokens", n_tokens));
    if (n_tokens > 0) {
      KVQ_REQUIRE(logits);
      KVQ_REQUIRE(targets);
      KVQ_REQUIRE(scores);
    }
    return score_self_information(logits, targets, n_tokens, vocab, scores);
  });
}

int32_t kvq_scores_attention(const float *weights, uint32_t heads, uint64_t n_queries, uint64_t n_keys, float *scores) {
  return guarded([&]() -> Status {
    KVQ_TRY(check_tokens("n_queries", n_queries));
    KVQ_TRY(check_tokens("n_keys", n_keys));
    if (n_keys > 0) KVQ_REQUIRE(scores);
    if (n_keys > 0 && n_queries > 0 && heads > 0) KVQ_REQUIRE(weights);
    return score_attention(weights, heads, n_queries, n_keys, scores);
  });
}

int32_t kvq_scores_random(uint64_t seed, uint64_t first, uint64_t n_tokens, float *scores) {
  return guarded([&]() -> Status {
    KVQ_TRY(check_tokens("n_tokens", n_tokens));
    if (n_tokens > 0) KVQ_REQUIRE(scores);
    score_random(seed, first, n_tokens, scores);
    return KVQ_OK;
  });
}
