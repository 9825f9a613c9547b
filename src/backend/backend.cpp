// What every backend shares of backend.h.
#include "backend/backend.h"

#include "backend/call_stream.h"
#include "util/entry.h"

namespace kvq {

HeadShape LayerShape::head(uint32_t tensor) const {
  if (tensor == KVQ_TENSOR_K) return {dim_k, KVQ_TENSOR_K, rope_layout, rotary_dim, rotary_first};
  return {dim_v, KVQ_TENSOR_V, rope_layout, dim_v, 0};  // section 5, "Pairs": values use R = D, rotary_first 0, the same layout
}

Status Backend::store_pieces(const LayerShape &shape, const kvq_tensor &k, const kvq_tensor &v, uint64_t first,
                             std::span<const PageRows> pieces, uint64_t *saturated) {
  for (const PageRows &piece : pieces) {
    KVQ_TRY(store_rows(shape, k, v, first, piece, saturated));
    first += piece.count;
  }
  return KVQ_OK;
}

void Backend::enter_rows(const kvq_tensor &x, uint64_t count, uint32_t heads, uint32_t dim, uint16_t *out) {
  uint64_t saturated = 0;  // counted by the check before
  const char *data = static_cast<const char *>(x.data);
  const int64_t size = dtype_bytes(x.dtype);
  for (uint64_t t = 0; t < count; t++)
    for (uint32_t h = 0; h < heads; h++, out += dim)
      enter_row(data + (int64_t(t) * x.token_stride + h * x.head_stride) * size, x.dtype, dim, out, &saturated);
}

Status Backend::check_statistics(const LayerShape &shape, std::span<const PageRows> kv, const kvq_tensor *q, LayerStatistics *statistics,
                                 uint64_t *saturated) {
  uint64_t count = 0;
  for (const PageRows &piece : kv) count += piece.count;
  if (q) KVQ_TRY(check_rows(*q, 0, count, shape.q_heads, shape.dim_k, "q", saturated));
  add_statistics(shape, kv, q, 0, statistics);
  return KVQ_OK;
}

void Backend::sum_keys(const LayerShape &shape, std::span<const PageRows> rows, std::span<CenterSum> sums) {
  Vector<uint16_t> values(sums[0].resource());
  for (uint32_t h = 0; h < shape.kv_heads; h++)
    for (const PageRows &piece : rows) {
      values.resize(size_t(piece.count) * shape.dim_k);
      load_rows(shape, piece, h, KVQ_TENSOR_K, values.data());
      sums[h].add(values.data(), piece.count);
    }
}

namespace {

thread_local const CallStream *innermost = nullptr;

}  // namespace

CallStream::CallStream(void *stream) : stream_(stream), outer_(innermost) { innermost = this; }
CallStream::~CallStream() { innermost = outer_; }
const CallStream *CallStream::current() { return innermost; }

}  // namespace kvq
