#include "cuda/rows.h"

#include <algorithm>

#include "cuda/enter.cuh"

namespace kvq::cuda {
namespace {

constexpr uint32_t kThreads = 128;

// A row of a page from shared memory, 16 bytes a lane where rows are made of them.
__device__ void store_row(uint16_t *to, const uint16_t *from, uint32_t dim, uint32_t lane, bool vectors) {
  if (vectors)
    for (uint32_t i = lane; i < dim / 8; i += 32) reinterpret_cast<uint4 *>(to)[i] = reinterpret_cast<const uint4 *>(from)[i];
  else
    for (uint32_t i = lane; i < dim; i += 32) to[i] = from[i];
}

// A warp enters a row of one head: loads follow the channels, stores the order of the page, and shared memory turns one into the
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

// Four channels a thread.
__global__ void check_kernel(DeviceTensor x, uint32_t heads, uint32_t dim, Findings *findings) {
  const uint64_t token = blockIdx.x;
  const uint32_t pieces = (dim + 3) / 4;
  for (uint32_t i = threadIdx.x; i < heads * pieces; i += blockDim.x) {
    const uint32_t head = i / pieces, channel = i % pieces * 4, count = min(4u, dim - channel);
    const int64_t at = int64_t(token) * x.token_stride + head * x.head_stride + channel;
    if (x.dtype == KVQ_DTYPE_F16 && is_plain(load_four(x, at, count))) continue;
    for (uint32_t c = 0; c < count; c++) enter(load_element(x, at + c), bad_key(token, 0, head, channel + c), findings);
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

}  // namespace

cudaError_t enter_rows(const RawShape &shape, const DeviceTensor &k, const DeviceTensor &v, uint64_t first, const DevicePiece *pieces,
                       uint32_t n_pieces, uint32_t rows, Findings *findings, cudaStream_t stream) {
  if (rows == 0) return cudaSuccess;
  const uint32_t warps = kThreads / 32, dims = (std::max(shape.dim_k, shape.dim_v) + 7) / 8 * 8;
  const dim3 grid(rows, (2 * shape.kv_heads + warps - 1) / warps);
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
  check_kernel<<<uint32_t(count), 256, 0, stream>>>(x, heads, dim, findings);
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
