// Raw pages: kRawTokens tokens in fp16, per KV head K as [channel][token] and V as [token][channel], so that attention reads both
// with neighbouring results in neighbouring lanes.
#pragma once
#include <cstddef>
#include <cstdint>

#include "backend/backend.h"

namespace kvq::cpu {

inline constexpr uint32_t kRawTokens = 32;

inline size_t raw_head_bytes(const LayerShape &shape) { return size_t(2) * kRawTokens * (shape.dim_k + shape.dim_v); }
inline size_t raw_values_offset(const LayerShape &shape) { return size_t(2) * kRawTokens * shape.dim_k; }

// Where a row lies: element c is at first[c * stride].
struct RawRow {
  uint16_t *first;
  size_t stride;
};
RawRow raw_row(const LayerShape &shape, void *page, uint32_t head, uint32_t tensor, uint32_t token);

// The pieces of Backend that concern raw rows; backend.h describes them.
Status store_raw_rows(const Loops &loops, const LayerShape &shape, const kvq_tensor &k, const kvq_tensor &v, uint64_t first, PageRows rows,
                      uint64_t *saturated);
// A row of one head, and rows of all heads.
Status check_row(const Loops &loops, const kvq_tensor &x, uint64_t row, uint32_t head, uint32_t heads, uint32_t dim, const char *name,
                 uint64_t *saturated);
Status check_rows(const Loops &loops, const kvq_tensor &x, uint64_t first, uint64_t count, uint32_t heads, uint32_t dim, const char *name,
                  uint64_t *saturated);
void copy_raw_rows(const LayerShape &shape, const void *from, uint32_t from_row, void *to, uint32_t to_row, uint32_t count);
void load_raw_rows(const Loops &loops, const LayerShape &shape, PageRows rows, uint32_t head, uint32_t tensor, uint16_t *out);

// Element [row][head][0] of a tensor whose zero strides mean packed.
const void *tensor_row(const kvq_tensor &x, uint64_t row, uint32_t head, uint32_t heads, uint32_t dim);

}  // namespace kvq::cpu
