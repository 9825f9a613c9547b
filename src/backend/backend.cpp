// What every backend shares of backend.h.
#include "backend/backend.h"

#include "backend/call_stream.h"
#include "util/entry.h"

namespace kvq {

HeadShape LayerShape::head(uint32_t tensor) const {
  if (tensor == KVQ_TENSOR_K) return {dim_k, KVQ_TENSOR_K, rope_layout, rotary_dim, rotary_first};
  return {dim_v, KVQ_TENSOR_V, rope_layout, dim_v, 0};  // section 5, "Pairs": values use R = D, rotary_first 0, the same layout
}

void Backend::allocate_pages(size_t bytes, std::span<void *> pages) {
  size_t n = 0;
  try {
    for (; n < pages.size(); n++) pages[n] = allocate_page(bytes);
  } catch (...) {
    release_pages(bytes, pages.first(n));
    throw;
  }
}

void Backend::release_pages(size_t bytes, std::span<void *const> pages) noexcept {
  for (void *page : pages) release_page(page, bytes);
}

Status Backend::store_chunk(const LayerShape &shape, const ChunkRows &rows, std::span<const PageRows> pieces, LayerStatistics *statistics,
                            uint64_t *saturated) {
  uint64_t count = 0;
  for (const PageRows &piece : pieces) {
    KVQ_TRY(store_rows(shape, rows.k, rows.v, rows.first + count, piece, saturated));
    count += piece.count;
  }
  if (rows.q) KVQ_TRY(check_rows(*rows.q, rows.first, count, shape.q_heads, shape.dim_k, "q", saturated));
  if (statistics) add_statistics(shape, pieces, rows.q, rows.first, statistics);
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
