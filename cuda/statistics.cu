// Statistics of section 6 on the device: exact integer sums, whatever the order.
#include <algorithm>

#include "cuda/enter.cuh"

namespace kvq::cuda {
namespace {

constexpr uint32_t kThreads = 128;
// Rows that 64-bit sums hold: u*u + v*v < 2^33, in units of 2^-24.
constexpr uint32_t kRun = 64;
constexpr uint32_t kMaxRuns = 16;  // of a block of threads, which adds to memory once

struct Sum {
  uint64_t low = 0, high = 0;
  __device__ void add(int64_t part) {
    const uint64_t before = low;
    low += uint64_t(part);
    high += uint64_t(part >> 63) + (low < before);
  }
  __device__ void add_to(Wide *to) const {
    const unsigned long long before = atomicAdd(&to->low, static_cast<unsigned long long>(low));
    const uint64_t carry = high + (before + low < before);
    if (carry) atomicAdd(&to->high, static_cast<unsigned long long>(carry));
  }
};

__device__ int64_t units(float v) { return int64_t(v * 0x1p24f); }

__device__ uint32_t ordered(uint16_t h) { return uint16_t(h ^ (uint16_t(int16_t(h) >> 15) & 0x7fffu)) ^ 0x8000u; }

// Rows first, first + step, ... of a thread.
struct Share {
  uint32_t first, end, step;
};

// f(column, share) for `columns` columns of `rows` rows; where there are more threads than columns, they share the rows of one.
template <class F>
__device__ void for_columns(uint32_t columns, uint32_t rows, F &&f) {
  const uint32_t parts = max(1u, kThreads / columns), part = threadIdx.x / columns;
  if (parts > 1 && part >= parts) return;
  for (uint32_t c = parts > 1 ? threadIdx.x % columns : threadIdx.x; c < columns; c += parts > 1 ? columns : kThreads)
    f(c, Share{parts > 1 ? part : 0, rows, parts});
}

struct PairSum {
  Sum norm, square;
  // x(row, which): u or v of the pair.
  template <class X>
  __device__ void add_rows(Share rows, X &&x) {
    for (uint32_t run = rows.first; run < rows.end; run += kRun * rows.step) {
      int64_t norms = 0, squares = 0;
#pragma unroll 4
      for (uint32_t row = run; row < min(run + kRun * rows.step, rows.end); row += rows.step) {
        const float u = x(row, 0), v = x(row, 1), uu = u * u, vv = v * v, s = uu + vv;
        squares += units(s), norms += units(sqrtf(s));
      }
      norm.add(norms), square.add(squares);
    }
  }
};

struct ChannelSum {
  Sum sum, abs;
  uint32_t low = ~0u, high = 0;
  template <class X>
  __device__ void add_rows(Share rows, X &&x) {
    for (uint32_t run = rows.first; run < rows.end; run += kRun * rows.step) {
      int64_t sums = 0, magnitudes = 0;
#pragma unroll 4
      for (uint32_t row = run; row < min(run + kRun * rows.step, rows.end); row += rows.step) {
        const uint16_t h = x(row);
        const int64_t n = units(widen(h));
        sums += n, magnitudes += n < 0 ? -n : n;
        low = min(low, ordered(h)), high = max(high, ordered(h));
      }
      sum.add(sums), abs.add(magnitudes);
    }
  }
};

// Rows [blockIdx.x * share, ...), at most `share`, which shared memory points to.
__global__ void __launch_bounds__(kThreads) key_kernel(StatisticsLayout layout, const DevicePiece *pieces, uint32_t n_pieces, uint32_t rows,
                                                       uint32_t share, const uint16_t *pairs, Wide *sums, uint32_t *ranges) {
  __shared__ const uint16_t *at[2][kRun * kMaxRuns];
  const RawShape shape{layout.kv_heads, layout.dim_k, layout.dim_v};
  const uint32_t head = blockIdx.y, begin = blockIdx.x * share, count = min(share, rows - begin);
  for (uint32_t i = threadIdx.x; i < count; i += kThreads) {
    const DevicePiece &piece = find_piece(pieces, n_pieces, begin + i);
    for (uint32_t tensor = 0; tensor < 2; tensor++)
      at[tensor][i] = static_cast<const uint16_t *>(piece.page) + shape.row(head, tensor, piece.first + begin + i - piece.start);
  }
  __syncthreads();
  Wide *out = sums + size_t(head) * layout.sums();
  uint32_t *range = ranges + size_t(head) * layout.ranges();
  const uint32_t n_pairs = layout.dim_k / 2;
  for_columns(n_pairs, count, [&](uint32_t p, Share share) {
    const uint32_t u = raw_place(layout.dim_k, pairs[2 * p]), v = raw_place(layout.dim_k, pairs[2 * p + 1]);
    PairSum sum;
    sum.add_rows(share, [&](uint32_t row, uint32_t which) { return widen(at[0][row][which ? v : u]); });
    sum.norm.add_to(out + 4 * p), sum.square.add_to(out + 4 * p + 1);
  });
  for_columns(layout.dim_k + layout.dim_v, count, [&](uint32_t i, Share share) {
    const uint32_t tensor = i >= layout.dim_k, place = tensor ? raw_place(layout.dim_v, i - layout.dim_k) : raw_place(layout.dim_k, i);
    ChannelSum sum;
    sum.add_rows(share, [&](uint32_t row) { return at[tensor][row][place]; });
    sum.sum.add_to(out + 4 * n_pairs + 2 * i), sum.abs.add_to(out + 4 * n_pairs + 2 * i + 1);
    atomicMin(range + 2 * i, sum.low);
    atomicMax(range + 2 * i + 1, sum.high);
  });
}

template <bool kHalf>
__device__ float query_element(const DeviceTensor &q, int64_t at) {
  const uint16_t half = kHalf ? static_cast<const uint16_t *>(q.data)[at] : 0;
  const float x = kHalf ? widen(half) : load_element(q, at);
  return !is_finite(x) ? 0.0f : kHalf ? x : widen(float_to_half(x));
}

// The queries of a KV head are those of blockIdx.z among its query heads.
template <bool kHalf>
__global__ void __launch_bounds__(kThreads) query_kernel(StatisticsLayout layout, DeviceTensor q, uint32_t rows, uint32_t share,
                                                         const uint16_t *pairs, Wide *sums) {
  const uint32_t head = blockIdx.y, begin = blockIdx.x * share, count = min(share, rows - begin);
  const int64_t from = int64_t(begin) * q.token_stride + int64_t(head * layout.ratio + blockIdx.z) * q.head_stride;
  Wide *out = sums + size_t(head) * layout.sums();
  for_columns(layout.dim_k / 2, count, [&](uint32_t p, Share share) {
    const uint32_t channel[2] = {pairs[2 * p], pairs[2 * p + 1]};
    PairSum sum;
    sum.add_rows(share, [&](uint32_t row, uint32_t which) {
      return query_element<kHalf>(q, from + int64_t(row) * q.token_stride + channel[which]);
    });
    sum.norm.add_to(out + 4 * p + 2), sum.square.add_to(out + 4 * p + 3);
  });
}

// Rows of a block: whole runs, few enough that there are blocks for every processor.
uint32_t share_of(uint32_t rows, uint32_t columns, uint32_t processors) {
  const uint64_t blocks = std::max<uint64_t>(1, uint64_t(16) * processors / columns);
  const uint64_t share = (rows / blocks + kRun) / kRun * kRun;
  return uint32_t(std::min<uint64_t>(share, kRun * kMaxRuns));
}

}  // namespace

cudaError_t sum_statistics(const StatisticsLayout &layout, const DevicePiece *pieces, uint32_t n_pieces, uint32_t rows,
                           const DeviceTensor *q, const uint16_t *pairs, uint32_t processors, Wide *sums, uint32_t *ranges,
                           cudaStream_t stream) {
  if (rows == 0) return cudaSuccess;
  const uint32_t share = share_of(rows, layout.kv_heads, processors);
  key_kernel<<<dim3((rows + share - 1) / share, layout.kv_heads), kThreads, 0, stream>>>(layout, pieces, n_pieces, rows, share, pairs,
                                                                                       sums, ranges);
  if (!q) return cudaGetLastError();
  const uint32_t queries = share_of(rows, layout.kv_heads * layout.ratio, processors);
  const dim3 grid((rows + queries - 1) / queries, layout.kv_heads, layout.ratio);
  (q->dtype == KVQ_DTYPE_F16 ? query_kernel<true> : query_kernel<false>)<<<grid, kThreads, 0, stream>>>(layout, *q, rows, queries, pairs, sums);
  return cudaGetLastError();
}

}  // namespace kvq::cuda
