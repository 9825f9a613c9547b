// Token scores (SemKV).
#include "backend/call_stream.h"
#include "capi/boundary.h"
#include "capi/devices.h"
#include "policy/indicators.h"

using namespace kvq;
using namespace kvq::capi;

namespace {

// Tensors [n], spaced by the first one's struct_size and all in one memory.
struct Inputs {
  Memory scratch;
  Vector<kvq_tensor> tensors{&scratch};

  Status read(const kvq_tensor *in, const char *name, uint32_t n, uint64_t tokens, uint32_t heads, uint32_t dim) {
    tensors.resize(n);
    for (uint32_t i = 0; i < n; i++) {
      const char *at = reinterpret_cast<const char *>(in) + size_t(i) * struct_size_of(in);
      KVQ_TRY(read_tensor(reinterpret_cast<const kvq_tensor *>(at), name, tokens, heads, dim, capi::Use::input, &tensors[i], Place::any));
      if (tensors[i].memory != tensors[0].memory)
        return fail(KVQ_E_INVALID, "%s[%u]: memory=%u, but %s[0] has %u", name, i, tensors[i].memory, name, tensors[0].memory);
    }
    return KVQ_OK;
  }
};

Status check_list(const char *name, uint32_t n, uint32_t heads, uint32_t dim) {
  if (n < 1 || n > 65535) return fail(KVQ_E_INVALID, "%s=%u is not in 1..65535", name, n);
  if (heads < 1 || dim < 1) return fail(KVQ_E_INVALID, "heads=%u and dim=%u must be at least 1", heads, dim);
  return KVQ_OK;
}

}  // namespace

int32_t kvq_scores_hidden(uint32_t kind, const kvq_tensor *hidden, uint32_t n_hidden, uint64_t n_tokens, uint32_t dim, float *scores,
                          void *stream) {
  const CallStream call(stream);
  return guarded([&]() -> Status {
    KVQ_REQUIRE(hidden);
    KVQ_TRY(check_tokens("n_tokens", n_tokens));
    KVQ_TRY(check_list("n_hidden", n_hidden, 1, dim));
    if (n_tokens > 0) KVQ_REQUIRE(scores);
    Inputs in;
    const Indicators *indicators;
    KVQ_TRY(in.read(hidden, "hidden", n_hidden, n_tokens, 1, dim));
    KVQ_TRY(find_indicators(in.tensors[0].memory, &indicators));
    return indicators->hidden(kind, in.tensors.data(), n_hidden, n_tokens, dim, scores);
  });
}

int32_t kvq_scores_norms(const kvq_tensor *rows, uint32_t n_layers, uint64_t n_tokens, uint32_t heads, uint32_t dim, float *scores,
                         void *stream) {
  const CallStream call(stream);
  return guarded([&]() -> Status {
    KVQ_REQUIRE(rows);
    KVQ_TRY(check_tokens("n_tokens", n_tokens));
    KVQ_TRY(check_list("n_layers", n_layers, heads, dim));
    if (n_tokens > 0) KVQ_REQUIRE(scores);
    Inputs in;
    const Indicators *indicators;
    KVQ_TRY(in.read(rows, "rows", n_layers, n_tokens, heads, dim));
    KVQ_TRY(find_indicators(in.tensors[0].memory, &indicators));
    return indicators->norms(in.tensors.data(), n_layers, n_tokens, heads, dim, scores);
  });
}

int32_t kvq_scores_self_information(const kvq_tensor *logits, const uint32_t *targets, uint64_t n_tokens, uint32_t vocab, float *scores,
                                    void *stream) {
  const CallStream call(stream);
  return guarded([&]() -> Status {
    KVQ_TRY(check_tokens("n_tokens", n_tokens));
    if (vocab == 0) return fail(KVQ_E_INVALID, "vocab=0");
    if (n_tokens == 0) return KVQ_OK;
    KVQ_REQUIRE(logits);
    KVQ_REQUIRE(targets);
    KVQ_REQUIRE(scores);
    Inputs in;
    const Indicators *indicators;
    KVQ_TRY(in.read(logits, "logits", 1, n_tokens, 1, vocab));
    KVQ_TRY(find_indicators(in.tensors[0].memory, &indicators));
    return indicators->self_information(in.tensors[0], targets, n_tokens, vocab, scores);
  });
}

int32_t kvq_scores_attention(const kvq_tensor *weights, uint32_t heads, uint64_t n_queries, uint64_t n_keys, float *scores, void *stream) {
  const CallStream call(stream);
  return guarded([&]() -> Status {
    KVQ_TRY(check_tokens("n_queries", n_queries));
    KVQ_TRY(check_tokens("n_keys", n_keys));
    if (n_keys > 0) KVQ_REQUIRE(scores);
    if (n_keys == 0 || n_queries == 0 || heads == 0) return KVQ_OK;
    KVQ_REQUIRE(weights);
    Inputs in;
    const Indicators *indicators;
    KVQ_TRY(in.read(weights, "weights", 1, n_queries, heads, uint32_t(n_keys)));
    KVQ_TRY(find_indicators(in.tensors[0].memory, &indicators));
    return indicators->attention(in.tensors[0], heads, n_queries, n_keys, scores);
  });
}

int32_t kvq_scores_random(uint64_t seed, uint64_t first, uint64_t n_tokens, uint32_t memory, float *scores, void *stream) {
  const CallStream call(stream);
  return guarded([&]() -> Status {
    KVQ_TRY(check_tokens("n_tokens", n_tokens));
    if (n_tokens > 0) KVQ_REQUIRE(scores);
    if (memory > KVQ_MEMORY_DEVICE) return fail(KVQ_E_INVALID, "memory=%u is none of KVQ_MEMORY_*", memory);
    const Indicators *indicators;
    KVQ_TRY(find_indicators(memory, &indicators));
    return indicators->random(seed, first, n_tokens, scores);
  });
}
