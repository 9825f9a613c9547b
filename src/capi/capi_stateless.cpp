// Codecs and policies without a cache.
#include "capi/boundary.h"
#include "policy/decide.h"
#include "util/entry.h"

using namespace kvq;
using namespace kvq::capi;

namespace {

Status read_shape(uint32_t dim, uint32_t tensor, uint32_t layout, uint32_t rotary_dim, uint32_t rotary_first, HeadShape *shape) {
  if (tensor > KVQ_TENSOR_V) return fail(KVQ_E_INVALID, "tensor=%u is neither KVQ_TENSOR_K nor KVQ_TENSOR_V", tensor);
  *shape = {dim, tensor, layout, rotary_dim ? rotary_dim : dim, rotary_first};
  KVQ_TRY(check_shape(*shape));
  if (tensor == KVQ_TENSOR_V) shape->rotary_dim = dim, shape->rotary_first = 0;
  return KVQ_OK;
}

Status read_format(const kvq_codec *in, HeadFormat *format) {
  kvq_codec read;
  KVQ_TRY(read_struct(in, &read, "codec"));
  if (!read.text) return fail(KVQ_E_INVALID, "codec: text is NULL");
  HeadShape shape;
  Codec codec;
  KVQ_TRY(read_shape(read.dim, read.tensor, read.rope_layout, read.rotary_dim, read.rotary_first, &shape));
  KVQ_TRY(parse_codec(read.text, true, &codec));
  KVQ_TRY(resolve_codec(&codec, shape));
  if (codec.center && !read.mu) return fail(KVQ_E_INVALID, "codec: center=1 needs mu");
  if (!codec.center && read.mu) return fail(KVQ_E_INVALID, "codec: mu is for center=1 only");
  const std::span<const uint16_t> mu(read.mu, read.mu ? read.dim : 0);
  return make_format(codec, shape, codec.table, mu, format);
}

Status enter_tensor(const kvq_tensor &x, uint64_t tokens, uint32_t dim, Vector<uint16_t> *out) {
  uint64_t saturated = 0;
  out->resize(size_t(tokens) * dim);
  for (uint64_t t = 0; t < tokens; t++) {
    const char *row = static_cast<const char *>(x.data) + int64_t(t) * x.token_stride * dtype_bytes(x.dtype);
    const uint32_t bad = enter_row(row, x.dtype, dim, out->data() + t * dim, &saturated);
    if (bad < dim) return fail(KVQ_E_NONFINITE, "x: token %llu, channel %u is not finite", (unsigned long long)t, bad);
  }
  return KVQ_OK;
}

// kvq_policy, translated; `tensors` hold k and q.
struct PolicyTensors {
  kvq_tensor k, q;
};

Status read_policy(const kvq_policy *in, PolicyTensors *tensors, DecisionInput *out, const char **text) {
  kvq_policy read;
  KVQ_TRY(read_struct(in, &read, "policy"));
  KVQ_TRY(check_tokens("n_tokens", read.n_tokens));
  KVQ_TRY(check_tokens("n_scores", read.n_scores));
  *text = read.text;
  out->shape = {read.dim, KVQ_TENSOR_K, read.rope_layout, read.rotary_dim ? read.rotary_dim : read.dim, read.rotary_first};
  out->q_heads = read.q_heads;
  out->n_tokens = read.n_tokens;
  if (read.k || read.q) KVQ_TRY(check_shape(out->shape));
  KVQ_TRY(read_optional(read.k, "k", read.n_tokens, 1, read.dim, &tensors->k, &out->k));
  if (read.q && (read.q_heads < 1 || read.q_heads > 64)) return fail(KVQ_E_INVALID, "q_heads=%u is not in 1..64", read.q_heads);
  KVQ_TRY(read_optional(read.q, "q", read.n_tokens, read.q_heads, read.dim, &tensors->q, &out->q));
  if (read.pair_scores) out->pair_scores = {read.pair_scores, size_t(read.n_scores)};
  if (read.token_scores) out->token_scores = {read.token_scores, size_t(read.n_scores)};
  return KVQ_OK;
}

void write_sum(UInt128 sum, uint64_t out[2]) { out[0] = uint64_t(sum), out[1] = uint64_t(sum >> 64); }

void write_statistics(const HeadStatistics &from, kvq_pair_sums *pairs, kvq_channel_sums *channels) {
  for (size_t p = 0; pairs && p < from.pairs.size(); p++) {
    write_sum(from.pairs[p].k1, pairs[p].k1), write_sum(from.pairs[p].k2, pairs[p].k2);
    write_sum(from.pairs[p].q1, pairs[p].q1), write_sum(from.pairs[p].q2, pairs[p].q2);
  }
  for (size_t c = 0; channels && c < from.k.size(); c++) {
    write_sum(UInt128(from.k[c].sum), channels[c].sum), write_sum(from.k[c].abs, channels[c].abs);
    channels[c].min = from.k[c].min, channels[c].max = from.k[c].max;
  }
}

}  // namespace

int32_t kvq_codec_encode(const kvq_codec *codec, const kvq_tensor *x, uint64_t tokens, void *wire, size_t cap, size_t *needed) {
  return guarded([&]() -> Status {
    Memory scratch;
    HeadFormat format(&scratch);
    kvq_tensor rows;
    Vector<uint16_t> entered(&scratch);
    Block block(&scratch);
    KVQ_TRY(read_format(codec, &format));
    const uint32_t dim = format.shape.dim, group = group_tokens(format.codec);
    KVQ_TRY(check_tokens("tokens", tokens));
    if (tokens % group)
      return fail(KVQ_E_INVALID, "tokens=%llu is no multiple of the group, %u", (unsigned long long)tokens, group);
    KVQ_TRY(read_tensor(x, "x", tokens, 1, dim, capi::Use::input, &rows));
    KVQ_TRY(enter_tensor(rows, tokens, dim, &entered));
    encode(format, {entered.data(), dim}, uint32_t(tokens), &block);
    Vector<uint8_t> bytes(wire_size(format, uint32_t(tokens)), &scratch);
    write_wire(format, block, bytes.data());
    return write_bytes(bytes.data(), bytes.size(), wire, cap, needed);
  });
}

int32_t kvq_codec_decode(const kvq_codec *codec, const void *wire, size_t size, uint64_t tokens, float *out) {
  return guarded([&]() -> Status {
    Memory scratch;
    HeadFormat format(&scratch);
    Block block(&scratch);
    KVQ_TRY(read_format(codec, &format));
    KVQ_TRY(check_tokens("tokens", tokens));
    if (size > 0) KVQ_REQUIRE(wire);
    if (tokens > 0) KVQ_REQUIRE(out);
    KVQ_TRY(read_wire(format, static_cast<const uint8_t *>(wire), size, uint32_t(tokens), &block));
    decode(format, block, out);
    return KVQ_OK;
  });
}

int32_t kvq_policy_decide(const kvq_policy *policy, void *buf, size_t cap, size_t *needed) {
  return guarded([&]() -> Status {
    Memory scratch;
    PolicyTensors tensors;
    DecisionInput input;
    const char *text;
    KVQ_TRY(read_policy(policy, &tensors, &input, &text));
    if (!text) return fail(KVQ_E_INVALID, "policy: text is NULL");
    Vector<uint8_t> out(&scratch);
    KVQ_TRY(decide_policy(text, input, &out));
    return write_bytes(out.data(), out.size(), buf, cap, needed);
  });
}

int32_t kvq_policy_stats(const kvq_policy *policy, kvq_pair_sums *pairs, kvq_channel_sums *channels, uint64_t counts[2]) {
  return guarded([&]() -> Status {
    KVQ_REQUIRE(counts);
    Memory scratch;
    PolicyTensors tensors;
    DecisionInput input;
    const char *text;
    HeadStatistics statistics(&scratch);
    KVQ_TRY(read_policy(policy, &tensors, &input, &text));
    KVQ_TRY(check_shape(input.shape));
    KVQ_TRY(collect_statistics(input, &statistics));
    write_statistics(statistics, pairs, channels);
    counts[0] = statistics.nk, counts[1] = statistics.nq;
    return KVQ_OK;
  });
}
