#include "cuda/rows.h"

#include <algorithm>
#include <utility>

#include "cuda/fragments.cuh"
#include "cuda/tile.cuh"

namespace kvq::cuda {
namespace {

constexpr uint32_t kThreads = 128, kCheckTokens = 8;

// A row of a page from shared memory, 16 bytes a lane where rows are made of them.
__device__ void store_row(uint16_t *to, const uint16_t *from, uint32_t dim, uint32_t lane, bool vectors) {
  if (vectors)
    for (uint32_t i = lane; i < dim / 8; i += 32) reinterpret_cast<uint4 *>(to)[i] = reinterpret_cast<const uint4 *>(from)[i];
  else
    for (uint32_t i = lane; i < dim; i += 32) to[i] = from[i];
}

// Two elements side by side as they enter; `key` is bad_key of the first.
__device__ inline uint32_t enter_two(const DeviceTensor &x, int64_t at, uint64_t key, Findings *findings) {
  const uint32_t low = enter(load_element(x, at), key, findings);
  return low | uint32_t(enter(load_element(x, at + 1), key + 1, findings)) << 16;
}

// -0 becomes +0.
__device__ inline uint32_t without_sign_of_zero(uint32_t two) {
  uint32_t out;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(two), "r"(0));
  return out;
}

constexpr uint32_t kEnterRows = 8;  // of a warp

// Rows of 64 * kMatrices channels, a warp's eight of one head.  A page has channel 8 y + r of a row at place r * dim / 8 + y
// (raw_place), so a row is a matrix [y][r] that is transposed: eight y at a time, those whose results a lane stores in one piece.
template <uint32_t kMatrices>
__global__ void __launch_bounds__(kThreads) enter_matrices(RawShape shape, DeviceTensor k, DeviceTensor v, uint64_t first,
                                                           const DevicePiece *pieces, uint32_t n_pieces, uint32_t rows, Findings *findings) {
  constexpr uint32_t kDim = 64 * kMatrices;
  const uint32_t lane = threadIdx.x % 32, job = blockIdx.y * (kThreads / 32) + threadIdx.x / 32;
  if (job >= 2 * shape.kv_heads) return;
  const uint32_t head = job / 2, tensor = job % 2, begin = blockIdx.x * kEnterRows;
  const DeviceTensor x = tensor ? v : k;
  const RowSource to{shape, pieces, n_pieces, head, tensor, begin};
  const uint64_t mine = reinterpret_cast<uint64_t>(to.row(min(lane, rows - begin - 1)));
  const auto channel = [&](uint32_t m) { return 8 * (lane / 8 * 2 * kMatrices + 2 * m + lane / 4 % 2) + lane % 4 * 2; };
  const int64_t from = head * x.head_stride + int64_t(first + begin) * x.token_stride;
  uint32_t two[kEnterRows][kMatrices];
  bool plain = x.dtype == KVQ_DTYPE_F16;
  if (plain) {
#pragma unroll
    for (uint32_t i = 0; i < kEnterRows; i++)
#pragma unroll
      for (uint32_t m = 0; m < kMatrices; m++)
        two[i][m] = *reinterpret_cast<const uint32_t *>(static_cast<const uint16_t *>(x.data) + from + int64_t(min(i, rows - begin - 1)) * x.token_stride + channel(m));
#pragma unroll
    for (uint32_t i = 0; i < kEnterRows; i++)
#pragma unroll
      for (uint32_t m = 0; m < kMatrices; m++) plain &= is_plain(two[i][m]), two[i][m] = without_sign_of_zero(two[i][m]);
  }
  if (!plain)
    for (uint32_t i = 0; i < min(kEnterRows, rows - begin); i++)
#pragma unroll
      for (uint32_t m = 0; m < kMatrices; m++)
        two[i][m] = enter_two(x, from + int64_t(i) * x.token_stride + channel(m), bad_key(first + begin + i, tensor, head, channel(m)), findings);
  __syncwarp();
#pragma unroll
  for (uint32_t i = 0; i < kEnterRows; i++) {
    uint16_t *const row = reinterpret_cast<uint16_t *>(__shfl_sync(~0u, mine, int(i)));
    uint32_t out[kMatrices];
#pragma unroll
    for (uint32_t m = 0; m < kMatrices; m++) out[m] = transposed(two[i][m]);
    if (begin + i >= rows) continue;
    uint16_t *const at = row + lane / 4 * (kDim / 8) + lane % 4 * 2 * kMatrices;
    if constexpr (kMatrices == 1) *reinterpret_cast<uint32_t *>(at) = out[0];
    if constexpr (kMatrices == 2) *reinterpret_cast<uint2 *>(at) = make_uint2(out[0], out[1]);
    if constexpr (kMatrices == 4) *reinterpret_cast<uint4 *>(at) = make_uint4(out[0], out[1], out[2], out[3]);
  }
}

// Rows of any dimension, one a warp: loads follow the channels, stores the order of the page, and shared memory turns one into the
// other.
__global__ void __launch_bounds__(kThreads) enter_kernel(RawShape shape, DeviceTensor k, DeviceTensor v, uint64_t first,
                                                         const DevicePiece *pieces, uint32_t n_pieces,
                                                         Findings *findings) {
  extern __shared__ __align__(16) uint16_t turned[];
  const uint32_t dims = max(shape.dim_k, shape.dim_v), lane = threadIdx.x % 32;
  uint16_t *mine = turned + threadIdx.x / 32 * ((dims + 7) / 8 * 8);
  const uint32_t row = blockIdx.x, job = blockIdx.y * (kThreads / 32) + threadIdx.x / 32;
  if (job >= 2 * shape.kv_heads) return;
  const uint32_t head = job / 2, tensor = job % 2, dim = tensor ? shape.dim_v : shape.dim_k;
  DeviceTensor x = k;
  if (tensor) x = v;
  const int64_t from = int64_t(first + row) * x.token_stride + head * x.head_stride;
  for (uint32_t c = 4 * lane; c < dim; c += 128) {
    const uint32_t count = min(4u, dim - c);
    const uint2 four = x.dtype == KVQ_DTYPE_F16 ? load_four(x, from + c, count) : make_uint2(~0u, ~0u);
    if (is_plain(four)) {
      const uint16_t h[4] = {uint16_t(four.x), uint16_t(four.x >> 16), uint16_t(four.y), uint16_t(four.y >> 16)};
#pragma unroll
      for (uint32_t i = 0; i < 4; i++)
        if (i < count) mine[raw_place(dim, c + i)] = h[i] == 0x8000 ? 0 : h[i];
    } else {
      for (uint32_t i = 0; i < count; i++)
        mine[raw_place(dim, c + i)] = enter(load_element(x, from + c + i), bad_key(first + row, tensor, head, c + i), findings);
    }
  }
  __syncwarp();
  const DevicePiece &piece = find_piece(pieces, n_pieces, row);
  store_row(static_cast<uint16_t *>(piece.page) + shape.row(head, tensor, piece.first + row - piece.start), mine, dim, lane,
            shape.dim_k % 8 == 0 && shape.dim_v % 8 == 0);
}

__global__ void dense_kernel(DeviceTensor x, uint32_t heads, uint32_t dim, uint16_t *out, Findings *findings) {
  const uint64_t token = blockIdx.x;
  for (uint32_t i = threadIdx.x; i < heads * dim; i += blockDim.x) {
    const uint32_t head = i / dim, channel = i % dim;
    const float value = load_element(x, int64_t(token) * x.token_stride + head * x.head_stride + channel);
    out[token * heads * dim + i] = enter(value, bad_key(token, 0, head, channel), findings);
  }
}

// Four channels a thread, of kCheckTokens tokens.
__global__ void check_kernel(DeviceTensor x, uint64_t count, uint32_t heads, uint32_t dim, Findings *findings) {
  const uint32_t pieces = (dim + 3) / 4;
  const uint64_t token = uint64_t(blockIdx.x) * kCheckTokens;
  const uint32_t tokens = uint32_t(min(uint64_t(kCheckTokens), count - token));
  for (uint32_t i = threadIdx.x; i < heads * pieces; i += blockDim.x) {
    const uint32_t head = i / pieces, channel = i % pieces * 4, channels = min(4u, dim - channel);
    const int64_t at = int64_t(token) * x.token_stride + head * x.head_stride + channel;
    bool plain = x.dtype == KVQ_DTYPE_F16;
    if (plain) {
#pragma unroll
      for (uint32_t t = 0; t < kCheckTokens; t++) plain &= is_plain(load_four(x, at + min(t, tokens - 1) * x.token_stride, channels));
    }
    for (uint32_t t = 0; t < tokens && !plain; t++)
      for (uint32_t c = 0; c < channels; c++) enter(load_element(x, at + t * x.token_stride + c), bad_key(token + t, 0, head, channel + c), findings);
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

// May elements be read two at a time?
bool in_pairs(const DeviceTensor &x) {
  return x.dtype != KVQ_DTYPE_F16 || (reinterpret_cast<uintptr_t>(x.data) % 4 == 0 && x.token_stride % 2 == 0 && x.head_stride % 2 == 0);
}

}  // namespace

cudaError_t enter_rows(const RawShape &shape, const DeviceTensor &k, const DeviceTensor &v, uint64_t first, const DevicePiece *pieces,
                       uint32_t n_pieces, uint32_t rows, Findings *findings, cudaStream_t stream) {
  if (rows == 0) return cudaSuccess;
  const uint32_t warps = kThreads / 32, dims = (std::max(shape.dim_k, shape.dim_v) + 7) / 8 * 8;
  const uint32_t jobs = (2 * shape.kv_heads + warps - 1) / warps;
  for (const auto &[dim, kernel] : {std::pair(64u, &enter_matrices<1>), std::pair(128u, &enter_matrices<2>), std::pair(256u, &enter_matrices<4>)})
    if (shape.dim_k == dim && shape.dim_v == dim && in_pairs(k) && in_pairs(v)) {
      kernel<<<dim3((rows + kEnterRows - 1) / kEnterRows, jobs), kThreads, 0, stream>>>(shape, k, v, first, pieces, n_pieces, rows, findings);
      return cudaGetLastError();
    }
  const dim3 grid(rows, jobs);
  enter_kernel<<<grid, kThreads, warps * dims * sizeof(uint16_t), stream>>>(shape, k, v, first, pieces, n_pieces, findings);
  return cudaGetLastError();
}

cudaError_t enter_dense(const DeviceTensor &x, uint64_t count, uint32_t heads, uint32_t dim, uint16_t *out, Findings *findings,
                        cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  dense_kernel<<<uint32_t(count), 256, 0, stream>>>(x, heads, dim, out, findings);
  return cudaGetLastError();
}

cudaError_t check_rows(const DeviceTensor &x, uint64_t count, uint32_t heads, uint32_t dim, Findings *findings, cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  check_kernel<<<uint32_t((count + kCheckTokens - 1) / kCheckTokens), 256, 0, stream>>>(x, count, heads, dim, findings);
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

}  // namespace kvq::cuda
