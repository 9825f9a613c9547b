#include "cuda/rows.h"

#include "kvq/kvq.h"
#include "util/fp.h"

namespace kvq::cuda {
namespace {

constexpr uint32_t kThreads = 128;

__device__ float load_element(const DeviceTensor &x, int64_t at) {
  switch (x.dtype) {
    case KVQ_DTYPE_F16:
      return half_to_float(static_cast<const uint16_t *>(x.data)[at]);
    case KVQ_DTYPE_BF16:
      return __uint_as_float(uint32_t(static_cast<const uint16_t *>(x.data)[at]) << 16);
    case KVQ_DTYPE_F64:
      return float(static_cast<const double *>(x.data)[at]);
    default:
      return static_cast<const float *>(x.data)[at];
  }
}

// Rule 1.4; what is not finite enters as +0 and is reported.
__device__ uint16_t enter(float x, uint64_t key, Findings *findings) {
  const uint32_t a = __float_as_uint(x) & 0x7fffffffu;
  if (a >= 0x7f800000u) {
    atomicMin(&findings->bad, static_cast<unsigned long long>(key));
    return 0;
  }
  if (a > 0x477fe000u) atomicAdd(&findings->saturated, 1ull);
  return float_to_half(x);
}

// The piece that holds row `row` of a list.
__device__ const DevicePiece &find_piece(const DevicePiece *pieces, uint32_t n, uint32_t row) {
  uint32_t low = 0, high = n;
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    (pieces[middle].start <= row ? low : high) = middle;
  }
  return pieces[low];
}

__global__ void enter_kernel(RawShape shape, DeviceTensor k, DeviceTensor v, uint64_t first, const DevicePiece *pieces,
                             uint32_t n_pieces, uint32_t rows, Findings *findings) {
  const uint32_t row = blockIdx.x, head = blockIdx.y;
  if (row >= rows) return;
  const DevicePiece &piece = find_piece(pieces, n_pieces, row);
  const uint32_t target = piece.first + row - piece.start;
  uint16_t *page = static_cast<uint16_t *>(piece.page);
  for (uint32_t i = threadIdx.x; i < shape.dim_k + shape.dim_v; i += blockDim.x) {
    const uint32_t tensor = i >= shape.dim_k, channel = tensor ? i - shape.dim_k : i;
    const DeviceTensor &x = tensor ? v : k;
    const float value = load_element(x, int64_t(first + row) * x.token_stride + head * x.head_stride + channel);
    const uint32_t dim = tensor ? shape.dim_v : shape.dim_k;
    page[shape.row(head, tensor, target) + raw_place(dim, channel)] = enter(value, bad_key(first + row, tensor, head, channel), findings);
  }
}

__global__ void dense_kernel(DeviceTensor x, uint32_t heads, uint32_t dim, uint16_t *out, Findings *findings) {
  const uint64_t token = blockIdx.x;
  for (uint32_t i = threadIdx.x; i < heads * dim; i += blockDim.x) {
    const uint32_t head = i / dim, channel = i % dim;
    const float value = load_element(x, int64_t(token) * x.token_stride + head * x.head_stride + channel);
    const uint16_t entered = enter(value, bad_key(token, 0, head, channel), findings);
    if (out) out[token * heads * dim + i] = entered;
  }
}

__global__ void copy_kernel(RawShape shape, const uint16_t *from, uint32_t from_row, uint16_t *to, uint32_t to_row, uint32_t count) {
  const uint32_t head = blockIdx.x, tensor = blockIdx.y, dim = tensor ? shape.dim_v : shape.dim_k;
  const uint16_t *source = from + shape.row(head, tensor, from_row);
  uint16_t *target = to + shape.row(head, tensor, to_row);
  for (uint32_t i = threadIdx.x; i < count * dim; i += blockDim.x) target[i] = source[i];
}

__global__ void load_kernel(RawShape shape, const DevicePiece *pieces, uint32_t n_pieces, uint32_t head, uint32_t tensor,
                            uint16_t *out) {
  const uint32_t row = blockIdx.x, dim = tensor ? shape.dim_v : shape.dim_k;
  const DevicePiece &piece = find_piece(pieces, n_pieces, row);
  const uint16_t *source = static_cast<const uint16_t *>(piece.page) + shape.row(head, tensor, piece.first + row - piece.start);
  for (uint32_t c = threadIdx.x; c < dim; c += blockDim.x) out[size_t(row) * dim + c] = source[raw_place(dim, c)];
}

// ---- statistics

__device__ void add_wide(Wide *to, uint64_t low, uint64_t high) {
  const unsigned long long before = atomicAdd(&to->low, static_cast<unsigned long long>(low));
  high += before + low < before;
  if (high) atomicAdd(&to->high, static_cast<unsigned long long>(high));
}

__device__ uint64_t units(float v) { return uint64_t(int64_t(v * 0x1p24f)); }

__device__ uint32_t ordered(uint16_t h) { return uint16_t(h ^ (uint16_t(int16_t(h) >> 15) & 0x7fffu)) ^ 0x8000u; }

// 64 tokens fit 64-bit sums (u*u + v*v < 2^33).
constexpr uint32_t kRun = 64;

struct PairSum {
  uint64_t norm = 0, square = 0;
  __device__ void add(float u, float v) {
    const float uu = u * u, vv = v * v, s = uu + vv;
    square += units(s);
    norm += units(sqrtf(s));
  }
};

__global__ void key_kernel(StatisticsLayout layout, const DevicePiece *pieces, uint32_t n_pieces, uint32_t rows, const uint16_t *pairs,
                           Wide *sums, uint32_t *ranges) {
  const RawShape shape{layout.kv_heads, layout.dim_k, layout.dim_v};
  const uint32_t head = blockIdx.y, begin = blockIdx.x * kRun, end = min(begin + kRun, rows);
  Wide *out = sums + size_t(head) * layout.sums();
  uint32_t *range = ranges + size_t(head) * layout.ranges();
  const uint32_t n_pairs = layout.dim_k / 2;
  for (uint32_t p = threadIdx.x; p < n_pairs; p += blockDim.x) {
    PairSum sum;
    for (uint32_t row = begin; row < end; row++) {
      const DevicePiece &piece = find_piece(pieces, n_pieces, row);
      const uint16_t *x = static_cast<const uint16_t *>(piece.page) + shape.row(head, 0, piece.first + row - piece.start);
      sum.add(half_to_float(x[raw_place(layout.dim_k, pairs[2 * p])]), half_to_float(x[raw_place(layout.dim_k, pairs[2 * p + 1])]));
    }
    add_wide(out + 4 * p, sum.norm, 0);
    add_wide(out + 4 * p + 1, sum.square, 0);
  }
  for (uint32_t i = threadIdx.x; i < layout.dim_k + layout.dim_v; i += blockDim.x) {
    const uint32_t tensor = i >= layout.dim_k, channel = tensor ? i - layout.dim_k : i, dim = tensor ? layout.dim_v : layout.dim_k;
    int64_t sum = 0, abs = 0;
    uint32_t low = ~0u, high = 0;
    for (uint32_t row = begin; row < end; row++) {
      const DevicePiece &piece = find_piece(pieces, n_pieces, row);
      const uint16_t *x = static_cast<const uint16_t *>(piece.page) + shape.row(head, tensor, piece.first + row - piece.start);
      const uint16_t h = x[raw_place(dim, channel)];
      const int64_t n = int64_t(half_to_float(h) * 0x1p24f);
      sum += n, abs += n < 0 ? -n : n;
      low = min(low, ordered(h)), high = max(high, ordered(h));
    }
    Wide *to = out + 4 * n_pairs + 2 * i;
    add_wide(to, uint64_t(sum), sum < 0 ? ~uint64_t(0) : 0);
    add_wide(to + 1, uint64_t(abs), 0);
    atomicMin(range + 2 * i, low);
    atomicMax(range + 2 * i + 1, high);
  }
}

__global__ void query_kernel(StatisticsLayout layout, const uint16_t *q, uint32_t rows, const uint16_t *pairs, Wide *sums) {
  const uint32_t head = blockIdx.y, begin = blockIdx.x * kRun, end = min(begin + kRun, rows);
  Wide *out = sums + size_t(head) * layout.sums();
  for (uint32_t p = threadIdx.x; p < layout.dim_k / 2; p += blockDim.x)
    for (uint32_t h = 0; h < layout.ratio; h++) {
      PairSum sum;
      for (uint32_t row = begin; row < end; row++) {
        const uint16_t *x = q + (size_t(row) * layout.kv_heads * layout.ratio + head * layout.ratio + h) * layout.dim_k;
        sum.add(half_to_float(x[pairs[2 * p]]), half_to_float(x[pairs[2 * p + 1]]));
      }
      add_wide(out + 4 * p + 2, sum.norm, 0);
      add_wide(out + 4 * p + 3, sum.square, 0);
    }
}

}  // namespace

cudaError_t enter_rows(const RawShape &shape, const DeviceTensor &k, const DeviceTensor &v, uint64_t first, const DevicePiece *pieces,
                       uint32_t n_pieces, uint32_t rows, Findings *findings, cudaStream_t stream) {
  if (rows == 0) return cudaSuccess;
  enter_kernel<<<dim3(rows, shape.kv_heads), kThreads, 0, stream>>>(shape, k, v, first, pieces, n_pieces, rows, findings);
  return cudaGetLastError();
}

cudaError_t enter_dense(const DeviceTensor &x, uint64_t count, uint32_t heads, uint32_t dim, uint16_t *out, Findings *findings,
                        cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  dense_kernel<<<uint32_t(count), 256, 0, stream>>>(x, heads, dim, out, findings);
  return cudaGetLastError();
}

cudaError_t copy_raw(const RawShape &shape, const void *from, uint32_t from_row, void *to, uint32_t to_row, uint32_t count,
                     cudaStream_t stream) {
  copy_kernel<<<dim3(shape.kv_heads, 2), 256, 0, stream>>>(shape, static_cast<const uint16_t *>(from), from_row,
                                                           static_cast<uint16_t *>(to), to_row, count);
  return cudaGetLastError();
}

cudaError_t load_raw(const RawShape &shape, const DevicePiece *pieces, uint32_t n_pieces, uint32_t rows, uint32_t head, uint32_t tensor,
                     uint16_t *out, cudaStream_t stream) {
  if (rows == 0) return cudaSuccess;
  load_kernel<<<rows, kThreads, 0, stream>>>(shape, pieces, n_pieces, head, tensor, out);
  return cudaGetLastError();
}

cudaError_t sum_statistics(const StatisticsLayout &layout, const DevicePiece *pieces, uint32_t n_pieces, uint32_t rows,
                           const uint16_t *q, const uint16_t *pairs, Wide *sums, uint32_t *ranges, cudaStream_t stream) {
  if (rows == 0) return cudaSuccess;
  const dim3 grid((rows + kRun - 1) / kRun, layout.kv_heads);
  key_kernel<<<grid, kThreads, 0, stream>>>(layout, pieces, n_pieces, rows, pairs, sums, ranges);
  if (q) query_kernel<<<grid, kThreads, 0, stream>>>(layout, q, rows, pairs, sums);
  return cudaGetLastError();
}

}  // namespace kvq::cuda
