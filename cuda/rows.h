// Rows of fp16 on the device: entering them (rule 1.4), moving them, and their statistics.
//
// A raw page is [head] blobs of [token][dim_k] keys, then [token][dim_v] values.  Channels of a row lie in the order of raw_place,
// which gives a lane of the attention kernel its channels 8 y + r in one piece.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "util/hd.h"

namespace kvq::cuda {

constexpr uint32_t kRawTokens = 64;

KVQ_HD inline uint32_t raw_place(uint32_t dim, uint32_t channel) {
  return dim % 8 ? channel : channel % 8 * (dim / 8) + channel / 8;
}

struct RawShape {
  uint32_t kv_heads, dim_k, dim_v;
  KVQ_HD size_t head_elements() const { return size_t(kRawTokens) * (dim_k + dim_v); }
  // Element 0 of a row.
  KVQ_HD size_t row(uint32_t head, uint32_t tensor, uint32_t token) const {
    return head * head_elements() + (tensor ? size_t(kRawTokens) * dim_k + size_t(token) * dim_v : size_t(token) * dim_k);
  }
};

// A tensor [token][head][channel] in device memory.
struct DeviceTensor {
  const void *data;
  uint32_t dtype;
  int64_t token_stride, head_stride;
};

// Rows of a page, in a list on the device; `start` is the number of rows before it in the list.
struct DevicePiece {
  void *page;
  uint32_t first, count, start, pad;
};

// The piece that holds row `row` of a list: often the one that whole raw pages would make it, or the next.
KVQ_HD inline const DevicePiece &find_piece(const DevicePiece *pieces, uint32_t n, uint32_t row) {
  for (uint32_t guess = row / kRawTokens; guess < n && guess < row / kRawTokens + 2; guess++)
    if (row - pieces[guess].start < pieces[guess].count) return pieces[guess];
  uint32_t low = 0, high = n;
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    (pieces[middle].start <= row ? low : high) = middle;
  }
  return pieces[low];
}

// What entering found: the smallest key of a non-finite element (none: all ones), and elements beyond +-65504.
struct Findings {
  unsigned long long bad, saturated;
};
constexpr uint64_t kNothingBad = ~uint64_t(0);
// Order of report: token, tensor, head, channel.
KVQ_HD inline uint64_t bad_key(uint64_t token, uint32_t tensor, uint32_t head, uint32_t channel) {
  return ((token * 2 + tensor) << 13 | head) << 10 | channel;
}

// Enter row `start + i` of k and v (from token `first` on) into row first + i of each piece.
cudaError_t enter_rows(const RawShape &shape, const DeviceTensor &k, const DeviceTensor &v, uint64_t first, const DevicePiece *pieces,
                       uint32_t n_pieces, uint32_t rows, Findings *findings, cudaStream_t stream);
// Rows to fp16 [count][heads][dim].
cudaError_t enter_dense(const DeviceTensor &x, uint64_t count, uint32_t heads, uint32_t dim, uint16_t *out, Findings *findings,
                        cudaStream_t stream);
// Look for what entering would find.
cudaError_t check_rows(const DeviceTensor &x, uint64_t count, uint32_t heads, uint32_t dim, Findings *findings, cudaStream_t stream);
cudaError_t copy_raw(const RawShape &shape, const void *from, uint32_t from_row, void *to, uint32_t to_row, uint32_t count,
                     cudaStream_t stream);
// One head and tensor as fp16 [rows][dim] by channel.
cudaError_t load_raw(const RawShape &shape, const DevicePiece *pieces, uint32_t n_pieces, uint32_t rows, uint32_t head, uint32_t tensor,
                     uint16_t *out, cudaStream_t stream);

// 128-bit sums of section 6 of one head: pairs {k1, k2, q1, q2}, channels {sum, abs} of K, then of V; low and high word.
struct Wide {
  unsigned long long low, high;
};
struct StatisticsLayout {
  uint32_t kv_heads, ratio, dim_k, dim_v;
  KVQ_HD uint32_t sums() const { return dim_k / 2 * 4 + 2 * dim_k + 2 * dim_v; }      // Wide, per head
  KVQ_HD uint32_t ranges() const { return 2 * (dim_k + dim_v); }                      // {~min, max} of ordered fp16, per head
};
// Adds what is wanted (of policy/statistics.h, and perhaps more) to sums [kv_heads][sums()] and ranges [kv_heads][ranges()], which may
// begin as zeros.  pairs [dim_k/2]{u, v}.  q: [tokens][q_heads][dim_k] or nullptr; what is not finite there counts as 0.
cudaError_t sum_statistics(const StatisticsLayout &layout, uint32_t wanted, const DevicePiece *pieces, uint32_t n_pieces, uint32_t rows,
                           const DeviceTensor *q, const uint16_t *pairs, uint32_t processors, Wide *sums, uint32_t *ranges, Findings *findings,
                           cudaStream_t stream);

}  // namespace kvq::cuda
