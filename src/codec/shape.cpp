// Which channels form pairs (section 5, "Pairs").
#include "codec/descriptor.h"

namespace kvq {
namespace {

// Values pair up over the whole head.
struct Rotary {
  uint32_t first, count;
};
Rotary rotary(const HeadShape &shape) {
  if (shape.tensor == KVQ_TENSOR_V) return {0, shape.dim};
  return {shape.rotary_first, shape.rotary_dim};
}

}  // namespace

Pair pair_channels(const HeadShape &shape, uint32_t p) {
  const Rotary r = rotary(shape);
  if (p < r.count / 2) {
    if (shape.rope_layout == KVQ_ROPE_HALF) return {r.first + p, r.first + p + r.count / 2};
    return {r.first + 2 * p, r.first + 2 * p + 1};
  }
  const uint32_t rest = 2 * p - r.count;  // among the channels that are not rotary
  const uint32_t u = rest < r.first ? rest : rest + r.count;
  return {u, u + 1};
}

Status check_shape(const HeadShape &shape) {
  if (shape.dim < 2 || shape.dim > kMaxDim || shape.dim % 2)
    return fail(KVQ_E_INVALID, "head dimension %u is not an even number in 2..%u", shape.dim, kMaxDim);
  if (shape.tensor != KVQ_TENSOR_K && shape.tensor != KVQ_TENSOR_V)
    return fail(KVQ_E_INVALID, "tensor %u is neither K (%d) nor V (%d)", shape.tensor, KVQ_TENSOR_K, KVQ_TENSOR_V);
  if (shape.rope_layout != KVQ_ROPE_HALF && shape.rope_layout != KVQ_ROPE_ADJACENT)
    return fail(KVQ_E_INVALID, "rope_layout %u is neither half (%d) nor adjacent (%d)", shape.rope_layout, KVQ_ROPE_HALF,
                KVQ_ROPE_ADJACENT);
  const Rotary r = rotary(shape);
  if (r.count < 2 || r.count % 2 || r.count > shape.dim)
    return fail(KVQ_E_INVALID, "rotary_dim %u is not an even number in 2..%u, the head dimension", r.count, shape.dim);
  if (r.first % 2 || r.first > shape.dim - r.count)
    return fail(KVQ_E_INVALID, "rotary_first %u is not an even number with rotary_first + rotary_dim (%u) <= %u", r.first,
                r.count, shape.dim);
  return KVQ_OK;
}

}  // namespace kvq
