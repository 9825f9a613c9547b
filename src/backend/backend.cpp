// What every backend shares of backend.h.
#include "backend/backend.h"

namespace kvq {

HeadShape LayerShape::head(uint32_t tensor) const {
  if (tensor == KVQ_TENSOR_K) return {dim_k, KVQ_TENSOR_K, rope_layout, rotary_dim, rotary_first};
  return {dim_v, KVQ_TENSOR_V, rope_layout, dim_v, 0};  // section 5, "Pairs": values use R = D, rotary_first 0, the same layout
}

}  // namespace kvq
