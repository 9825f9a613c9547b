// Steps: begin, append, attend, end.
#include <cmath>

#include "backend/call_stream.h"
#include "capi/boundary.h"

using namespace kvq;
using namespace kvq::capi;

namespace {

// Run `body` with a step of a cache.
template <class F>
int32_t with_step(kvq_cache *cache, kvq_step step, F &&body) noexcept {
  return guarded([&]() -> Status {
    KVQ_REQUIRE(cache);
    Cache::StepUse use;
    KVQ_TRY(from(cache)->steps.use(step, &use));
    return body(*from(cache), use);
  });
}

Status read_options(const kvq_attend_options *in, const LayerShape &shape, AttendInput *out) {
  kvq_attend_options read{};
  if (in) KVQ_TRY(read_struct(in, &read, "options"));
  if (!std::isfinite(read.scale)) return fail(KVQ_E_INVALID, "options: scale is not finite");
  if (!(read.softcap >= 0) || std::isinf(read.softcap)) return fail(KVQ_E_INVALID, "options: softcap=%g is not 0 or a positive number", double(read.softcap));
  for (uint32_t h = 0; read.sinks && h < shape.q_heads; h++)
    if (!std::isfinite(read.sinks[h])) return fail(KVQ_E_INVALID, "options: sinks[%u] is not finite", h);
  out->window = read.window;
  out->scale = read.scale != 0 ? read.scale : 1.0f / std::sqrt(float(shape.dim_k));
  out->softcap = read.softcap;
  out->sinks = read.sinks;
  return KVQ_OK;
}

}  // namespace

int32_t kvq_step_begin(kvq_cache *cache, const kvq_seq *seqs, const uint32_t *new_tokens, uint32_t n_seqs, uint32_t flags,
                       kvq_step *step) {
  return guarded([&]() -> Status {
    KVQ_REQUIRE(cache);
    KVQ_REQUIRE(step);
    Cache &own = *from(cache);
    if (flags & ~KVQ_STEP_QUERY_ONLY) return fail(KVQ_E_INVALID, "flags=0x%x has unknown bits", flags);
    if (n_seqs > own.sequences.capacity())
      return fail(KVQ_E_INVALID, "n_seqs=%u: a cache has at most %u sequences", n_seqs, own.sequences.capacity());
    if (n_seqs > 0) {
      KVQ_REQUIRE(seqs);
      KVQ_REQUIRE(new_tokens);
    }
    return own.begin_step({seqs, n_seqs}, new_tokens, flags & KVQ_STEP_QUERY_ONLY, step);
  });
}

int32_t kvq_append(kvq_cache *cache, kvq_step step, uint32_t layer, const kvq_tensor *k, const kvq_tensor *v, const kvq_tensor *q,
                   void *stream) {
  const CallStream call(stream);
  return with_step(cache, step, [&](Cache &own, Cache::StepUse &use) -> Status {
    KVQ_TRY(own.check_layer(layer));
    const LayerShape &shape = own.shapes[layer];
    kvq_tensor keys{}, values{}, queries{};
    const kvq_tensor *with_q = nullptr;
    if (use->tokens > 0) {
      KVQ_TRY(read_tensor(k, "k", use->tokens, shape.kv_heads, shape.dim_k, capi::Use::input, &keys, place_of(own)));
      KVQ_TRY(read_tensor(v, "v", use->tokens, shape.kv_heads, shape.dim_v, capi::Use::input, &values, place_of(own)));
      KVQ_TRY(read_optional(q, "q", use->tokens, shape.q_heads, shape.dim_k, &queries, &with_q, place_of(own)));
    }
    return in_layer(layer, own.append(*use, layer, keys, values, with_q));
  });
}

int32_t kvq_attend(kvq_cache *cache, kvq_step step, uint32_t layer, const kvq_tensor *q, const kvq_tensor *out, float *lse,
                   const kvq_attend_options *options, void *stream) {
  const CallStream call(stream);
  return with_step(cache, step, [&](Cache &own, Cache::StepUse &use) -> Status {
    KVQ_TRY(own.check_layer(layer));
    const LayerShape &shape = own.shapes[layer];
    kvq_tensor queries{}, output{};
    AttendInput input{};
    KVQ_TRY(read_options(options, shape, &input));
    if (use->tokens > 0) {
      KVQ_TRY(read_tensor(q, "q", use->tokens, shape.q_heads, shape.dim_k, capi::Use::input, &queries, place_of(own)));
      KVQ_TRY(read_tensor(out, "out", use->tokens, shape.q_heads, shape.dim_v, capi::Use::output, &output, place_of(own)));
    }
    input.layer = layer;
    input.q = &queries, input.out = &output, input.lse = lse;
    return in_layer(layer, own.attend(*use, input));
  });
}

int32_t kvq_step_end(kvq_cache *cache, kvq_step step, const uint32_t *keep, const float *scores) {
  return with_step(cache, step, [&](Cache &own, Cache::StepUse &use) { return own.end_step(use, keep, scores); });
}

int32_t kvq_step_abort(kvq_cache *cache, kvq_step step) {
  return with_step(cache, step, [&](Cache &own, Cache::StepUse &use) { return own.abort_step(use); });
}
