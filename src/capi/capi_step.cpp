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
  if (read.head_count > shape.kv_heads || read.head_first > shape.kv_heads - read.head_count || (read.head_count == 0 && read.head_first))
    return fail(KVQ_E_INVALID, "options: head_first=%u, head_count=%u is no range of %u KV heads", read.head_first, read.head_count,
                shape.kv_heads);
  out->head_first = read.head_first;
  out->head_count = read.head_count ? read.head_count : shape.kv_heads;
  out->window = read.window;
  out->scale = read.scale != 0 ? read.scale : 1.0f / std::sqrt(float(shape.dim_k));
  out->softcap = read.softcap;
  out->sinks = read.sinks;
  return KVQ_OK;
}

// The arguments of kvq_attend, checked.
struct AttendCopy {
  AttendInput input{};
  kvq_tensor queries{}, output{};
  uint32_t heads = 0;

  bool is_range() const { return input.head_count != heads; }
  Status read(const Cache &own, uint32_t tokens, uint32_t layer, const kvq_tensor *q, const kvq_tensor *out, float *lse,
              const kvq_attend_options *options) {
    KVQ_TRY(own.check_layer(layer));
    const LayerShape &shape = own.shapes[layer];
    heads = shape.kv_heads;
    KVQ_TRY(read_options(options, shape, &input));
    if (is_range() && own.backend->plans_steps()) return fail(KVQ_E_UNSUPPORTED, "options: head_count=%u: head ranges are for the CPU", input.head_count);
    if (tokens > 0) {
      KVQ_TRY(read_tensor(q, "q", tokens, shape.q_heads, shape.dim_k, capi::Use::input, &queries, place_of(own)));
      KVQ_TRY(read_tensor(out, "out", tokens, shape.q_heads, shape.dim_v, capi::Use::output, &output, place_of(own)));
    }
    input.layer = layer;
    input.q = &queries, input.out = &output, input.lse = lse;
    return KVQ_OK;
  }
};

}  // namespace

int32_t kvq_step_begin(kvq_cache *cache, const kvq_seq *seqs, const uint32_t *new_tokens, uint32_t n_seqs, uint32_t flags,
                       kvq_step *step) {
  return guarded([&]() -> Status {
    KVQ_REQUIRE(cache);
    KVQ_REQUIRE(step);
    Cache &own = *from(cache);
    if (flags & ~(KVQ_STEP_QUERY_ONLY | KVQ_STEP_DEVICE_SCORES | KVQ_STEP_INVARIANT))
      return fail(KVQ_E_INVALID, "flags=0x%x has unknown bits", flags);
    KVQ_TRY(check_score_place(own, flags & KVQ_STEP_DEVICE_SCORES));
    if (n_seqs > own.sequences.capacity())
      return fail(KVQ_E_INVALID, "n_seqs=%u: a cache has at most %u sequences", n_seqs, own.sequences.capacity());
    if (n_seqs > 0) {
      KVQ_REQUIRE(seqs);
      KVQ_REQUIRE(new_tokens);
    }
    return own.begin_step({seqs, n_seqs}, new_tokens, flags, step);
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
  return guarded([&]() -> Status {
    KVQ_REQUIRE(cache);
    Cache &own = *from(cache);
    Cache::StepShare share;
    KVQ_TRY(own.steps.share(step, &share));
    AttendCopy input;
    KVQ_TRY(input.read(own, share->tokens, layer, q, out, lse, options));
    if (input.is_range() && !share->query_only) return in_layer(layer, own.attend_heads(*share, input.input));
    share.release();
    Cache::StepUse use;
    KVQ_TRY(own.steps.use(step, &use));
    return in_layer(layer, own.attend(*use, input.input));
  });
}

int32_t kvq_step_end(kvq_cache *cache, kvq_step step, const uint32_t *keep, const float *scores) {
  return with_step(cache, step, [&](Cache &own, Cache::StepUse &use) { return own.end_step(use, keep, scores); });
}

int32_t kvq_step_abort(kvq_cache *cache, kvq_step step) {
  return with_step(cache, step, [&](Cache &own, Cache::StepUse &use) { return own.abort_step(use); });
}
