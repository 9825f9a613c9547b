// Sequences: life, prompts, turns, exports.
#include "backend/call_stream.h"
#include "capi/boundary.h"

using namespace kvq;
using namespace kvq::capi;

namespace {

// Run `body` with a sequence of a cache.
template <class F>
int32_t with_sequence(kvq_cache *cache, kvq_seq seq, F &&body) noexcept {
  return guarded([&]() -> Status {
    KVQ_REQUIRE(cache);
    Cache::SequenceUse use;
    KVQ_TRY(from(cache)->sequences.use(seq, &use));
    return body(*from(cache), use);
  });
}

// The tensors of a chunk, resolved for its layer.
struct ChunkTensors {
  kvq_tensor k, v, q;
};

Status read_chunk(const Cache &cache, const kvq_prefill &in, ChunkTensors *tensors, PromptChunk *chunk) {
  if (in.flags & ~(KVQ_PREFILL_FINAL | KVQ_PREFILL_DEVICE_SCORES)) return fail(KVQ_E_INVALID, "flags=0x%x has unknown bits", in.flags);
  KVQ_TRY(check_score_place(cache, in.flags & KVQ_PREFILL_DEVICE_SCORES));
  KVQ_TRY(check_tokens("n_tokens", in.n_tokens));
  chunk->layer = in.layer;
  chunk->final = in.flags & KVQ_PREFILL_FINAL;
  chunk->n_tokens = in.n_tokens;
  if (in.n_scores != 0 && in.n_scores != in.n_tokens)
    return fail(KVQ_E_INVALID, "n_scores=%u is neither 0 nor n_tokens=%llu", in.n_scores, (unsigned long long)in.n_tokens);
  if (in.n_scores != 0 && !in.scores) return fail(KVQ_E_INVALID, "scores is NULL, but n_scores is %u", in.n_scores);
  chunk->scores = {in.scores, in.n_scores};
  chunk->device_scores = in.flags & KVQ_PREFILL_DEVICE_SCORES;
  if (in.layer == KVQ_ALL_LAYERS && in.n_tokens != 0)
    return fail(KVQ_E_INVALID, "n_tokens=%llu: with KVQ_ALL_LAYERS there are only flags", (unsigned long long)in.n_tokens);
  if (in.layer == KVQ_ALL_LAYERS) return KVQ_OK;
  KVQ_TRY(cache.check_layer(in.layer));
  if (in.n_tokens == 0) return KVQ_OK;
  const LayerShape &shape = cache.shapes[in.layer];
  KVQ_TRY(read_tensor(in.k, "k", in.n_tokens, shape.kv_heads, shape.dim_k, capi::Use::input, &tensors->k, place_of(cache)));
  KVQ_TRY(read_tensor(in.v, "v", in.n_tokens, shape.kv_heads, shape.dim_v, capi::Use::input, &tensors->v, place_of(cache)));
  chunk->k = &tensors->k, chunk->v = &tensors->v;
  return read_optional(in.q, "q", in.n_tokens, shape.q_heads, shape.dim_k, &tensors->q, &chunk->q, place_of(cache));
}

}  // namespace

int32_t kvq_seq_create(kvq_cache *cache, kvq_seq *seq) {
  return guarded([&]() -> Status {
    KVQ_REQUIRE(cache);
    KVQ_REQUIRE(seq);
    return from(cache)->create_sequence(seq);
  });
}

int32_t kvq_seq_fork(kvq_cache *cache, kvq_seq parent, uint64_t keep, kvq_seq *child) {
  return with_sequence(cache, parent, [&](Cache &own, Cache::SequenceUse &use) -> Status {
    KVQ_REQUIRE(child);
    return own.fork(*use, keep, child);
  });
}

int32_t kvq_seq_truncate(kvq_cache *cache, kvq_seq seq, uint64_t length) {
  return with_sequence(cache, seq, [&](Cache &own, Cache::SequenceUse &use) { return own.truncate(*use, length); });
}

int32_t kvq_seq_remove(kvq_cache *cache, kvq_seq seq) {
  return with_sequence(cache, seq, [&](Cache &own, Cache::SequenceUse &use) { return own.remove(use); });
}

int32_t kvq_seq_length(kvq_cache *cache, kvq_seq seq, kvq_lengths *lengths) {
  return with_sequence(cache, seq, [&](Cache &own, Cache::SequenceUse &use) -> Status {
    KVQ_TRY(check_struct(lengths, sizeof *lengths, "lengths"));
    kvq_lengths out{};
    own.lengths(*use, &out);
    write_struct(out, lengths);
    return KVQ_OK;
  });
}

int32_t kvq_prefill_commit(kvq_cache *cache, kvq_seq seq, const kvq_prefill *desc, void *stream) {
  const CallStream call(stream);
  return with_sequence(cache, seq, [&](Cache &own, Cache::SequenceUse &use) -> Status {
    kvq_prefill in;
    ChunkTensors tensors;
    PromptChunk chunk;
    KVQ_TRY(read_struct(desc, &in, "desc"));
    KVQ_TRY(read_chunk(own, in, &tensors, &chunk));
    return in_layer(in.layer, own.prefill(*use, chunk));
  });
}

int32_t kvq_end_turn(kvq_cache *cache, kvq_seq seq) {
  return with_sequence(cache, seq, [&](Cache &own, Cache::SequenceUse &use) { return own.end_turn(*use); });
}

int32_t kvq_export_values(kvq_cache *cache, kvq_seq seq, uint32_t layer, uint32_t head, uint32_t tensor, uint64_t first,
                          uint64_t count, float *out) {
  return with_sequence(cache, seq, [&](Cache &own, Cache::SequenceUse &use) {
    return own.export_values(*use, {layer, head, tensor}, first, count, out);
  });
}

int32_t kvq_export_wire(kvq_cache *cache, kvq_seq seq, uint32_t layer, uint32_t head, uint32_t tensor, uint64_t block, void *buf,
                        size_t cap, size_t *needed, uint64_t *tokens) {
  return with_sequence(cache, seq, [&](Cache &own, Cache::SequenceUse &use) -> Status {
    Vector<uint8_t> wire(&own.memory);
    uint64_t valid = 0;
    KVQ_TRY(own.export_wire(*use, {layer, head, tensor}, block, &wire, &valid));
    KVQ_TRY(write_bytes(wire.data(), wire.size(), buf, cap, needed));
    if (tokens) *tokens = valid;
    return KVQ_OK;
  });
}
