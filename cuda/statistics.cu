// Statistics of section 6 on the device: exact integer sums, whatever the order.
#include <algorithm>
#include <type_traits>

#include "cuda/enter.cuh"
#include "policy/statistics.h"

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

// f(row) for the rows of a share, run after run; between(): behind each run.
template <class F, class G>
__device__ void for_runs(Share rows, F &&f, G &&between) {
  for (uint32_t run = rows.first; run < rows.end; run += kRun * rows.step) {
    const uint32_t end = min(run + kRun * rows.step, rows.end);
#pragma unroll 4
    for (uint32_t row = run; row < end; row += rows.step) f(row);
    between();
  }
}

template <uint32_t kWanted>
struct PairSum {
  Sum norm, square;
  int64_t norms = 0, squares = 0;  // of a run
  __device__ void add(float u, float v) {
    const float uu = u * u, vv = v * v, s = uu + vv;
    if constexpr (kWanted & kPairNorms) norms += units(sqrtf(s));
    if constexpr (kWanted & kPairSquares) squares += units(s);
  }
  __device__ void end_run() {
    norm.add(norms), square.add(squares);
    norms = squares = 0;
  }
  __device__ void add_to(Wide *to) const {
    if constexpr (kWanted & kPairNorms) norm.add_to(to);
    if constexpr (kWanted & kPairSquares) square.add_to(to + 1);
  }
};

// kAll: all of ChannelSums, else sums.
template <bool kAll>
struct ChannelSum {
  Sum sum, abs;
  int64_t sums = 0, magnitudes = 0;
  uint32_t low = 0xffff, high = 0;
  __device__ void add(uint16_t h) {
    const int64_t n = units(widen(h));
    sums += n;
    if constexpr (kAll) magnitudes += n < 0 ? -n : n, low = min(low, ordered(h)), high = max(high, ordered(h));
  }
  __device__ void end_run() {
    sum.add(sums), abs.add(magnitudes);
    sums = magnitudes = 0;
  }
  __device__ void add_to(Wide *to, uint32_t *range) const {
    sum.add_to(to);
    if constexpr (!kAll) return;
    abs.add_to(to + 1);
    atomicMax(range, 0xffffu - low), atomicMax(range + 1, high);
  }
};

// Rows [blockIdx.x * share, ...), at most `share`: where those of a head and tensor lie.
struct BlockRowsAt {
  const uint16_t *at[kRun * kMaxRuns];
  __device__ uint32_t find(const RawShape &shape, const DevicePiece *pieces, uint32_t n_pieces, uint32_t rows, uint32_t share, uint32_t tensor) {
    const uint32_t head = blockIdx.y, begin = blockIdx.x * share, count = min(share, rows - begin);
    for (uint32_t i = threadIdx.x; i < count; i += kThreads) {
      const DevicePiece &piece = find_piece(pieces, n_pieces, begin + i);
      at[i] = static_cast<const uint16_t *>(piece.page) + shape.row(head, tensor, piece.first + begin + i - piece.start);
    }
    __syncthreads();
    return count;
  }
};

template <uint32_t kWanted>
__global__ void __launch_bounds__(kThreads) key_kernel(StatisticsLayout layout, const DevicePiece *pieces, uint32_t n_pieces, uint32_t rows,
                                                       uint32_t share, const uint16_t *pairs, Wide *sums, uint32_t *ranges) {
  __shared__ BlockRowsAt keys;
  const uint32_t count = keys.find({layout.kv_heads, layout.dim_k, layout.dim_v}, pieces, n_pieces, rows, share, 0);
  constexpr bool kChannels = (kWanted & (kKeySums | kKeyChannels)) != 0;
  Wide *out = sums + size_t(blockIdx.y) * layout.sums(), *channels = out + 4 * (layout.dim_k / 2);
  uint32_t *range = ranges + size_t(blockIdx.y) * layout.ranges();
  for_columns(layout.dim_k / 2, count, [&](uint32_t p, Share share) {
    const uint32_t channel[2] = {pairs[2 * p], pairs[2 * p + 1]};
    const uint32_t place[2] = {raw_place(layout.dim_k, channel[0]), raw_place(layout.dim_k, channel[1])};
    PairSum<kWanted> pair;
    ChannelSum<(kWanted & kKeyChannels) != 0> channel_sum[2];
    for_runs(share,
             [&](uint32_t row) {
               const uint16_t h[2] = {keys.at[row][place[0]], keys.at[row][place[1]]};
               pair.add(widen(h[0]), widen(h[1]));
               if constexpr (kChannels) channel_sum[0].add(h[0]), channel_sum[1].add(h[1]);
             },
             [&] { pair.end_run(), channel_sum[0].end_run(), channel_sum[1].end_run(); });
    pair.add_to(out + 4 * p);
    if constexpr (kChannels)
      for (uint32_t i = 0; i < 2; i++) channel_sum[i].add_to(channels + 2 * channel[i], range + 2 * channel[i]);
  });
}

__global__ void __launch_bounds__(kThreads) value_kernel(StatisticsLayout layout, const DevicePiece *pieces, uint32_t n_pieces, uint32_t rows,
                                                         uint32_t share, Wide *sums, uint32_t *ranges) {
  __shared__ BlockRowsAt values;
  const uint32_t count = values.find({layout.kv_heads, layout.dim_k, layout.dim_v}, pieces, n_pieces, rows, share, 1);
  Wide *out = sums + size_t(blockIdx.y) * layout.sums() + 4 * (layout.dim_k / 2) + 2 * layout.dim_k;
  uint32_t *range = ranges + size_t(blockIdx.y) * layout.ranges() + 2 * layout.dim_k;
  for_columns(layout.dim_v, count, [&](uint32_t c, Share share) {
    const uint32_t place = raw_place(layout.dim_v, c);
    ChannelSum<true> sum;
    for_runs(share, [&](uint32_t row) { sum.add(values.at[row][place]); }, [&] { sum.end_run(); });
    sum.add_to(out + 2 * c, range + 2 * c);
  });
}

// An element of a query as it enters; what is not finite, as 0, raises *bad.
template <bool kHalf>
__device__ float query_element(const DeviceTensor &q, int64_t at, bool *bad, unsigned long long *saturated) {
  const uint16_t half = kHalf ? static_cast<const uint16_t *>(q.data)[at] : 0;
  const float x = kHalf ? widen(half) : load_element(q, at);
  const bool finite = kHalf ? (half & 0x7c00u) != 0x7c00u : is_finite(x);
  *bad |= !finite;
  if (!kHalf && finite && fabsf(x) > 65504.0f) ++*saturated;
  return !finite ? 0.0f : kHalf ? x : widen(float_to_half(x));
}

// The queries of a KV head are those of blockIdx.z among its query heads.  What check_rows would find is found on the way.
template <uint32_t kWanted, bool kHalf>
__global__ void __launch_bounds__(kThreads) query_kernel(StatisticsLayout layout, DeviceTensor q, uint32_t rows, uint32_t share,
                                                         const uint16_t *pairs, Wide *sums, Findings *findings) {
  const uint32_t head = blockIdx.y, begin = blockIdx.x * share, count = min(share, rows - begin), q_head = head * layout.ratio + blockIdx.z;
  const int64_t from = int64_t(begin) * q.token_stride + int64_t(q_head) * q.head_stride;
  Wide *out = sums + size_t(head) * layout.sums();
  for_columns(layout.dim_k / 2, count, [&](uint32_t p, Share share) {
    const uint32_t channel[2] = {pairs[2 * p], pairs[2 * p + 1]};
    PairSum<kWanted> sum;
    bool bad = false;
    unsigned long long saturated = 0;
    for_runs(share,
             [&](uint32_t row) {
               const int64_t at = from + int64_t(row) * q.token_stride;
               const float u = query_element<kHalf>(q, at + channel[0], &bad, &saturated);
               sum.add(u, query_element<kHalf>(q, at + channel[1], &bad, &saturated));
             },
             [&] { sum.end_run(); });
    sum.add_to(out + 4 * p + 2);
    if (saturated) atomicAdd(&findings->saturated, saturated);
    for (uint32_t row = share.first; bad && row < share.end; row += share.step)
      for (uint32_t i = 0; i < 2; i++)
        if (!is_finite(load_element(q, from + int64_t(row) * q.token_stride + channel[i])))
          atomicMin(&findings->bad, static_cast<unsigned long long>(bad_key(begin + row, 0, q_head, channel[i])));
  });
}

// Rows of a block: whole runs, few enough that there are blocks for every processor.
uint32_t share_of(uint32_t rows, uint32_t columns, uint32_t processors) {
  const uint64_t blocks = std::max<uint64_t>(1, uint64_t(16) * processors / columns);
  const uint64_t share = (rows / blocks + kRun) / kRun * kRun;
  return uint32_t(std::min<uint64_t>(share, kRun * kMaxRuns));
}

// The kernels that there are: the first that has all that is wanted is taken.
constexpr uint32_t kPairs = kPairNorms | kPairSquares;

template <uint32_t kHas, class F>
bool try_kernel(uint32_t wanted, F &&launch) {
  if (wanted & ~kHas) return false;
  launch(std::integral_constant<uint32_t, kHas>());
  return true;
}
template <uint32_t... kHas, class F>
void choose_kernel(uint32_t wanted, F &&launch) {
  (try_kernel<kHas>(wanted, launch) || ...);
}

}  // namespace

cudaError_t sum_statistics(const StatisticsLayout &layout, uint32_t wanted, const DevicePiece *pieces, uint32_t n_pieces, uint32_t rows,
                           const DeviceTensor *q, const uint16_t *pairs, uint32_t processors, Wide *sums, uint32_t *ranges, Findings *findings,
                           cudaStream_t stream) {
  if (rows == 0) return cudaSuccess;
  const uint32_t share = share_of(rows, layout.kv_heads, processors);
  const dim3 blocks((rows + share - 1) / share, layout.kv_heads);
  const uint32_t of_keys = wanted & (kPairs | kKeySums | kKeyChannels), of_queries = wanted & kPairs;
  if (of_keys)
    choose_kernel<kPairNorms, kKeySums, kPairSquares | kKeySums, kPairs | kKeySums | kKeyChannels>(of_keys, [&](auto has) {
      key_kernel<has()><<<blocks, kThreads, 0, stream>>>(layout, pieces, n_pieces, rows, share, pairs, sums, ranges);
    });
  if (wanted & kValueChannels) value_kernel<<<blocks, kThreads, 0, stream>>>(layout, pieces, n_pieces, rows, share, sums, ranges);
  if (!q) return cudaGetLastError();
  const uint32_t queries = share_of(rows, layout.kv_heads * layout.ratio, processors);
  const dim3 grid((rows + queries - 1) / queries, layout.kv_heads, layout.ratio);
  choose_kernel<kPairNorms, kPairSquares, kPairs>(of_queries, [&](auto has) {
    (q->dtype == KVQ_DTYPE_F16 ? query_kernel<has(), true> : query_kernel<has(), false>)<<<grid, kThreads, 0, stream>>>(
        layout, *q, rows, queries, pairs, sums, findings);
  });
  return cudaGetLastError();
}

}  // namespace kvq::cuda
