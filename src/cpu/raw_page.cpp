#include "cpu/raw_page.h"

#include <algorithm>
#include <cstring>

#include "codec/codec.h"
#include "util/entry.h"

namespace kvq::cpu {
namespace {

constexpr uint32_t kMostChannels = 1024;  // kvq.h: dim_k, dim_v

Status refuse(const char *name, uint64_t token, uint32_t head, uint32_t channel) {
  return fail(KVQ_E_NONFINITE, "%s: token %llu, head %u, channel %u is NaN or infinite; only finite numbers are allowed", name,
              (unsigned long long)token, head, channel);
}

}  // namespace

const void *tensor_row(const kvq_tensor &x, uint64_t row, uint32_t head, uint32_t heads, uint32_t dim) {
  const int64_t head_stride = x.head_stride ? x.head_stride : dim;
  const int64_t token_stride = x.token_stride ? x.token_stride : int64_t(heads) * dim;
  return static_cast<const char *>(x.data) + (int64_t(row) * token_stride + head * head_stride) * int64_t(dtype_bytes(x.dtype));
}

RawRow raw_row(const LayerShape &shape, void *page, uint32_t head, uint32_t tensor, uint32_t token) {
  uint16_t *blob = reinterpret_cast<uint16_t *>(static_cast<char *>(page) + head * raw_head_bytes(shape));
  if (tensor == KVQ_TENSOR_K) return {blob + token, kRawTokens};
  return {blob + raw_values_offset(shape) / 2 + size_t(token) * shape.dim_v, 1};
}

namespace {

// Tokens whose keys are entered before they are transposed into their page.
constexpr uint32_t kBlock = 8;

// Rows of neighbouring heads are neighbours in memory, but are entered one head after the other: ask for the next one early.
void prefetch_next(const void *row, uint32_t dtype, uint32_t dim) {
  const size_t bytes = size_t(dim) * dtype_bytes(dtype);
  for (size_t at = 0; at < bytes; at += 64) __builtin_prefetch(static_cast<const char *>(row) + bytes + at);
}

// Keys of rows.count tokens of a head, or false: an element is not finite.
bool store_keys(const Loops &loops, const LayerShape &shape, const kvq_tensor &k, uint64_t first, PageRows rows, uint32_t head,
                uint64_t *saturated) {
  const uint32_t dim = shape.dim_k;
  uint16_t block[kBlock * kMostChannels];
  for (uint32_t i = 0; i < rows.count; i += kBlock) {
    const uint32_t count = std::min(kBlock, rows.count - i);
    for (uint32_t t = 0; t < count; t++) {
      const void *row = tensor_row(k, first + i + t, head, shape.kv_heads, dim);
      prefetch_next(row, k.dtype, dim);
      if (enter_row(row, k.dtype, dim, block + t * dim, saturated, loops) < dim) return false;
    }
    const RawRow to = raw_row(shape, rows.page, head, KVQ_TENSOR_K, rows.first + i);
    loops.transpose_halves(block, dim, nullptr, count, dim, to.first, kRawTokens);
  }
  return true;
}

bool store_values(const Loops &loops, const LayerShape &shape, const kvq_tensor &v, uint64_t first, PageRows rows, uint32_t head,
                  uint64_t *saturated) {
  const uint32_t dim = shape.dim_v;
  for (uint32_t i = 0; i < rows.count; i++) {
    const RawRow to = raw_row(shape, rows.page, head, KVQ_TENSOR_V, rows.first + i);
    const void *row = tensor_row(v, first + i, head, shape.kv_heads, dim);
    prefetch_next(row, v.dtype, dim);
    if (enter_row(row, v.dtype, dim, to.first, saturated, loops) < dim) return false;
  }
  return true;
}

}  // namespace

Status store_raw_rows(const Loops &loops, const LayerShape &shape, const kvq_tensor &k, const kvq_tensor &v, uint64_t first,
                      PageRows rows, uint64_t *saturated) {
  bool finite = true;
  for (uint32_t head = 0; finite && head < shape.kv_heads; head++)
    finite = store_keys(loops, shape, k, first, rows, head, saturated) && store_values(loops, shape, v, first, rows, head, saturated);
  for (uint64_t i = first; !finite && i < first + rows.count; i++) {  // the words name the earliest token
    KVQ_TRY(check_rows(loops, k, i, 1, shape.kv_heads, shape.dim_k, "k", saturated));
    KVQ_TRY(check_rows(loops, v, i, 1, shape.kv_heads, shape.dim_v, "v", saturated));
  }
  return KVQ_OK;
}

Status check_row(const Loops &loops, const kvq_tensor &x, uint64_t row, uint32_t head, uint32_t heads, uint32_t dim, const char *name,
                 uint64_t *saturated) {
  uint16_t entered[kMostChannels];
  const uint32_t bad = enter_row(tensor_row(x, row, head, heads, dim), x.dtype, dim, entered, saturated, loops);
  return bad < dim ? refuse(name, row, head, bad) : KVQ_OK;
}

Status check_rows(const Loops &loops, const kvq_tensor &x, uint64_t first, uint64_t count, uint32_t heads, uint32_t dim,
                  const char *name, uint64_t *saturated) {
  for (uint64_t i = first; i < first + count; i++)
    for (uint32_t head = 0; head < heads; head++) KVQ_TRY(check_row(loops, x, i, head, heads, dim, name, saturated));
  return KVQ_OK;
}

void copy_raw_rows(const LayerShape &shape, const void *from, uint32_t from_row, void *to, uint32_t to_row, uint32_t count) {
  const char *source = static_cast<const char *>(from);
  char *target = static_cast<char *>(to);
  for (uint32_t head = 0; head < shape.kv_heads; head++) {
    for (uint32_t c = 0; c < shape.dim_k; c++) {
      const size_t channel = size_t(2) * kRawTokens * c;
      std::memcpy(target + channel + 2 * to_row, source + channel + 2 * from_row, size_t(2) * count);
    }
    const size_t values = raw_values_offset(shape), row = size_t(2) * shape.dim_v;
    std::memcpy(target + values + row * to_row, source + values + row * from_row, row * count);
    source += raw_head_bytes(shape);
    target += raw_head_bytes(shape);
  }
}

void load_raw_rows(const Loops &loops, const LayerShape &shape, PageRows rows, uint32_t head, uint32_t tensor, uint16_t *out) {
  const RawRow from = raw_row(shape, rows.page, head, tensor, rows.first);
  if (tensor == KVQ_TENSOR_K)
    loops.transpose_halves(from.first, from.stride, nullptr, shape.dim_k, rows.count, out, shape.dim_k);
  else
    std::memcpy(out, from.first, size_t(2) * rows.count * shape.dim_v);
}

}  // namespace kvq::cpu
