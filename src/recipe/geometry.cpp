// Layers: ranges and defaults of kvq_layer.
#include "recipe/recipe.h"

namespace kvq {

namespace {

constexpr uint32_t kMaxHeads = 4096, kMaxQueriesPerHead = 64, kMaxDim = 1024;

Status check_dim(uint32_t layer, const char *name, uint32_t dim) {
  if (dim < 2 || dim > kMaxDim || dim % 2)
    return fail(KVQ_E_INVALID, "layer %u: %s=%u is not an even number in 2..%u", layer, name, dim, kMaxDim);
  return KVQ_OK;
}

Status check_heads(uint32_t layer, uint32_t kv_heads, uint32_t q_heads) {
  if (kv_heads < 1 || kv_heads > kMaxHeads)
    return fail(KVQ_E_INVALID, "layer %u: kv_heads=%u is not in 1..%u", layer, kv_heads, kMaxHeads);
  if (q_heads == 0 || q_heads % kv_heads || q_heads / kv_heads > kMaxQueriesPerHead)
    return fail(KVQ_E_INVALID, "layer %u: q_heads=%u is not a multiple of kv_heads=%u up to %u times it", layer, q_heads, kv_heads,
                kMaxQueriesPerHead);
  return KVQ_OK;
}

Status check_rotary(uint32_t layer, const LayerShape &shape) {
  if (shape.rope_layout != KVQ_ROPE_HALF && shape.rope_layout != KVQ_ROPE_ADJACENT)
    return fail(KVQ_E_INVALID, "layer %u: rope_layout=%u is neither KVQ_ROPE_HALF nor KVQ_ROPE_ADJACENT", layer, shape.rope_layout);
  if (shape.rotary_dim % 2 || shape.rotary_dim > shape.dim_k)
    return fail(KVQ_E_INVALID, "layer %u: rotary_dim=%u is not an even number up to dim_k=%u", layer, shape.rotary_dim, shape.dim_k);
  if (shape.rotary_first % 2 || shape.rotary_first > shape.dim_k - shape.rotary_dim)
    return fail(KVQ_E_INVALID, "layer %u: rotary_first=%u is not an even number up to dim_k - rotary_dim = %u", layer,
                shape.rotary_first, shape.dim_k - shape.rotary_dim);
  return KVQ_OK;
}

}  // namespace

Status resolve_layer(const kvq_layer &layer, uint32_t index, LayerShape *shape) {
  KVQ_TRY(check_heads(index, layer.kv_heads, layer.q_heads));
  KVQ_TRY(check_dim(index, "dim_k", layer.dim_k));
  if (layer.dim_v) KVQ_TRY(check_dim(index, "dim_v", layer.dim_v));
  if (layer.kv_source > index)
    return fail(KVQ_E_INVALID, "layer %u: kv_source=%u does not name an earlier layer (n + 1 stands for layer n)", index,
                layer.kv_source);
  LayerShape resolved{};
  resolved.kv_heads = layer.kv_heads;
  resolved.q_heads = layer.q_heads;
  resolved.dim_k = layer.dim_k;
  resolved.dim_v = layer.dim_v ? layer.dim_v : layer.dim_k;
  resolved.rope_layout = layer.rope_layout;
  resolved.rotary_dim = layer.rotary_dim ? layer.rotary_dim : layer.dim_k;
  resolved.rotary_first = layer.rotary_first;
  resolved.window = layer.window;
  resolved.source = layer.kv_source ? layer.kv_source - 1 : index;
  KVQ_TRY(check_rotary(index, resolved));
  *shape = resolved;
  return KVQ_OK;
}

}  // namespace kvq
