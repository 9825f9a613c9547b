// One block of threads packs the rows that one page gets, of one head and tensor: they are read once, encoded, and written once.
#include "cuda/pack.h"

#include <algorithm>

#include "cuda/encode_columns.cuh"
#include "cuda/encode_groups.cuh"
#include "cuda/place.cuh"

namespace kvq::cuda {
namespace {

extern __shared__ __align__(16) uint8_t shared_tile[];

template <bool kShared>
__device__ Tile make_tile(const TileShape &shape, uint8_t *scratch, size_t bytes, const TensorFormat &f, uint8_t *blob, uint32_t first,
                          uint32_t count) {
  uint8_t *memory = kShared ? shared_tile : scratch + blockIdx.x * bytes;
  return {f, blob, first, count, reinterpret_cast<uint16_t *>(memory), memory + shape.raw_bytes(),
          memory + shape.raw_bytes() + shape.code_bytes(), shape.raw_stride(), shape.code_stride()};
}

__device__ const uint16_t *source_row(const RawShape &shape, const DevicePiece *pieces, uint32_t n, uint32_t row, uint32_t head,
                                      uint32_t tensor) {
  const DevicePiece &piece = find_piece(pieces, n, row);
  return static_cast<const uint16_t *>(piece.page) + shape.row(head, tensor, piece.first + row - piece.start);
}

// 16 bytes of a row to the tile; wait_rows() waits for those that are under way.
template <bool kShared>
__device__ void copy_piece(const uint16_t *from, uint16_t *to) {
  if constexpr (kShared)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(uint32_t(__cvta_generic_to_shared(to))), "l"(from) : "memory");
  else
    *reinterpret_cast<uint4 *>(to) = *reinterpret_cast<const uint4 *>(from);
}
template <bool kShared>
__device__ void wait_rows() {
  if constexpr (kShared) asm volatile("cp.async.wait_all;" ::: "memory");
  __syncthreads();
}

// Rows [start, start + count) of the sources into the tile, 16 bytes a thread where rows are made of them.
template <bool kShared>
__device__ void load_rows(const Tile &tile, const RawShape &shape, const DevicePiece *sources, uint32_t n_sources, uint32_t start,
                          uint32_t head, uint32_t tensor) {
  const uint32_t dim = tile.f.dim, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool vectors = shape.dim_k % 8 == 0 && shape.dim_v % 8 == 0;
  const uint32_t pieces = vectors ? dim / 8 : dim, together = pieces <= 32 ? 32 / pieces : 0;  // rows that a warp copies at once
  // A warp's 32 rows are looked up by its lanes, one each.
  for (uint32_t begin = warp * 32; begin < tile.count; begin += blockDim.x) {
    const uint64_t mine = reinterpret_cast<uint64_t>(source_row(shape, sources, n_sources, start + min(begin + lane, tile.count - 1), head, tensor));
    const uint32_t rows = min(32u, tile.count - begin);
    uint16_t *to = tile.raw + size_t(begin) * tile.raw_stride;
    if (vectors && together) {
      const uint32_t own = lane / pieces, piece = lane % pieces * 8;
      for (uint32_t first = 0; first < rows; first += together) {
        const uint32_t row = first + own;
        const uint16_t *from = reinterpret_cast<const uint16_t *>(__shfl_sync(~0u, mine, int(row % 32)));
        if (own < together && row < rows) copy_piece<kShared>(from + piece, to + row * tile.raw_stride + piece);
      }
    } else {
      for (uint32_t i = lane; i < (rows * pieces + 31) / 32 * 32; i += 32) {
        const uint32_t row = min(i / pieces, rows - 1), piece = i % pieces;
        const uint16_t *from = reinterpret_cast<const uint16_t *>(__shfl_sync(~0u, mine, int(row)));
        if (i >= rows * pieces) continue;
        if (vectors)
          copy_piece<kShared>(from + 8 * piece, to + row * tile.raw_stride + 8 * piece);
        else
          to[row * tile.raw_stride + piece] = from[piece];
      }
    }
  }
  wait_rows<kShared>();
}

__device__ void encode(const Tile &tile) {
  if (tile.f.group) return encode_columns(tile);
  if (fits_group_lanes(tile.f)) return encode_group_rows(tile);
  encode_rows(tile);
}

struct PackArguments {
  RawShape shape;
  TileShape tile;
  DeviceFormat format;
  const DevicePiece *sources, *targets;
  uint32_t n_sources, n_targets;
  uint8_t *scratch;
  size_t scratch_bytes;
};

template <bool kShared>
__global__ void __launch_bounds__(kMaxPackThreads, 3) pack_kernel(const __grid_constant__ PackArguments a) {
  const uint32_t jobs = a.n_targets * 2 * a.format.kv_heads;
  for (uint32_t job = blockIdx.x; job < jobs; job += gridDim.x) {
    const uint32_t tensor = job % 2, head = job / 2 % a.format.kv_heads;
    const TensorFormat &f = a.format.tensors[2 * head + tensor];
    const DevicePiece target = a.targets[job / (2 * a.format.kv_heads)];
    const Tile tile = make_tile<kShared>(a.tile, a.scratch, a.scratch_bytes, f,
                                         static_cast<uint8_t *>(target.page) + f.blob, target.first, target.count);
    load_rows<kShared>(tile, a.shape, a.sources, a.n_sources, target.start, head, tensor);
    encode(tile);
    place(tile);
    if (job + gridDim.x < jobs) __syncthreads();
  }
}

struct NarrowArguments {
  TileShape tile;
  DeviceFormat from, to;
  const uint8_t *page;
  uint8_t *narrower;
  uint32_t count;
  uint8_t *scratch;
  size_t scratch_bytes;
};

// Codes and scales a step or two further down the chain of section 2.5.
__device__ void shrink(const Tile &tile, const TensorFormat &from, const uint8_t *blob) {
  const TensorFormat &to = tile.f;
  const auto steps = [&](auto value, auto by) {
    if (from.progressive > 16 && to.progressive <= 16) value = by(value, 17u);
    if (from.progressive > 4 && to.progressive <= 4) value = by(value, 5u);
    return value;
  };
  for (uint32_t i = threadIdx.x; i < tile.count * to.dim; i += blockDim.x) {
    const uint32_t token = i / to.dim, slot = i % to.dim;
    tile.codes_of(token)[slot] = steps(uint8_t(page_code(from, blob, 0, token, slot)), shrink_code);
  }
  for (uint32_t token = threadIdx.x; token < tile.count; token += blockDim.x) {
    tile.store_param(row_param(to, token, 0), steps(load_stored(from, blob, row_param(from, token, 0)), shrink_scale));
    tile.store_param(row_param(to, token, 1), load_stored(from, blob, row_param(from, token, 1)));
  }
}

template <bool kShared>
__global__ void __launch_bounds__(kMaxPackThreads) narrow_kernel(const __grid_constant__ NarrowArguments a) {
  const TensorFormat &from = a.from.tensors[blockIdx.x], &to = a.to.tensors[blockIdx.x];
  const uint8_t *blob = a.page + from.blob;
  const Tile tile = make_tile<kShared>(a.tile, a.scratch, a.scratch_bytes, to, a.narrower + to.blob, 0, a.count);
  if (from.family == Family::raw) {
    for (uint32_t i = threadIdx.x; i < a.count * to.dim; i += blockDim.x) {
      const uint32_t token = i / to.dim, channel = i % to.dim;
      tile.raw[size_t(token) * tile.raw_stride + raw_place(to.dim, channel)] = load_stored(from, blob, row_param(from, token, channel));
    }
    __syncthreads();
    encode(tile);
  } else {
    shrink(tile, from, blob);
  }
  place(tile);
}

// f(offset in the blob, number in the Block) for the parameters of rows [first, first + count).
template <class F>
__device__ void for_params(const TensorFormat &format, uint32_t first, uint32_t count, F &&f) {
  const uint32_t n = uint32_t(params_of(format, count)), per_row = format.family == Family::raw ? format.dim : format.row_params;
  const uint32_t before = per_row ? 0 : first / format.group * format.dim * 2;
  for (uint32_t i = threadIdx.x; i < n; i += blockDim.x)
    f(per_row ? row_param(format, first + i / per_row, i % per_row) : column_param(format, before + i), i);
}

__global__ void unpack_kernel(DeviceFormat format, const uint8_t *page, uint32_t first, uint32_t count, uint32_t head, uint32_t tensor,
                              BlockRows block) {
  const TensorFormat &f = format.tensors[2 * head + tensor];
  const uint8_t *blob = page + f.blob;
  for_params(f, first, count, [&](uint32_t at, uint32_t i) { block.params[i] = load_stored(f, blob, at); });
  if (f.family == Family::raw) return;
  for (uint32_t i = threadIdx.x; i < count * f.dim; i += blockDim.x)
    block.codes[i] = uint8_t(page_code(f, blob, region_of(f, i % f.dim), first + i / f.dim, i % f.dim));
  for (uint32_t i = threadIdx.x; f.positions && i < count / f.group * f.dim; i += blockDim.x)
    block.boosted[i] = blob[f.positions + (first / f.group) * f.dim + i];
}

// What encoders need besides: two fp32 rows a warp, or what columns need, or the sums of rows.  Small blocks of threads wait less for one another, but columns are long.
TileShape tile_shape(const RawShape &shape, uint32_t page_tokens, std::span<const TensorFormat> tensors) {
  TileShape tile{page_tokens, std::max(shape.dim_k, shape.dim_v), RowSums::bytes(page_tokens), 128};
  bool general = false, groups = false;
  for (const TensorFormat &f : tensors) {
    if (f.group) tile.threads = kMaxPackThreads;
    if (fits_group_lanes(f))
      groups = true;
    else if (!f.group && f.family != Family::raw && !fits_registers(f))
      general = true;
  }
  if (tile.threads == kMaxPackThreads)
    tile.work_bytes = std::max(tile.work_bytes, Columns::bytes(tile.dim, kMaxPackThreads));
  if (groups) tile.work_bytes = std::max(tile.work_bytes, GroupBooks::bytes());
  if (general) tile.work_bytes = std::max<uint32_t>(tile.work_bytes, tile.threads / 32 * 2 * tile.dim * sizeof(float));
  return tile;
}

}  // namespace

PackPlan::PackPlan(const RawShape &raw, uint32_t page_tokens, std::span<const TensorFormat> tensors, size_t shared_limit, uint32_t processors)
    : shape(raw), tile(tile_shape(raw, page_tokens, tensors)) {
  bytes = (tile.bytes() + 255) / 256 * 256;
  shared = bytes <= shared_limit;
  blocks = 2 * std::max(processors, raw.kv_heads);
}

cudaError_t prepare_packing(size_t shared_limit) {
  for (const void *kernel : {reinterpret_cast<const void *>(pack_kernel<true>), reinterpret_cast<const void *>(narrow_kernel<true>)})
    if (const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared_limit)); error != cudaSuccess)
      return error;
  return cudaSuccess;
}

cudaError_t pack(const PackPlan &plan, const DeviceFormat &format, const DevicePiece *sources, uint32_t n_sources,
                 const DevicePiece *targets, uint32_t n_targets, void *scratch, cudaStream_t stream) {
  if (n_targets == 0) return cudaSuccess;
  const PackArguments a{plan.shape, plan.tile, format, sources, targets, n_sources, n_targets, static_cast<uint8_t *>(scratch), plan.bytes};
  const uint32_t jobs = n_targets * 2 * format.kv_heads;
  if (plan.shared)
    pack_kernel<true><<<jobs, plan.tile.threads, plan.bytes, stream>>>(a);
  else
    pack_kernel<false><<<std::min(jobs, plan.blocks), plan.tile.threads, 0, stream>>>(a);
  return cudaGetLastError();
}

cudaError_t narrow(const PackPlan &plan, const DeviceFormat &from, const void *page, const DeviceFormat &to, void *narrower,
                   uint32_t count, void *scratch, cudaStream_t stream) {
  const NarrowArguments a{plan.tile, from, to, static_cast<const uint8_t *>(page), static_cast<uint8_t *>(narrower), count,
                          static_cast<uint8_t *>(scratch), plan.bytes};
  if (plan.shared)
    narrow_kernel<true><<<2 * to.kv_heads, plan.tile.threads, plan.bytes, stream>>>(a);
  else
    narrow_kernel<false><<<2 * to.kv_heads, plan.tile.threads, 0, stream>>>(a);
  return cudaGetLastError();
}

cudaError_t unpack(const DeviceFormat &format, const void *page, uint32_t first, uint32_t count, uint32_t head, uint32_t tensor,
                   const BlockRows &block, cudaStream_t stream) {
  unpack_kernel<<<1, 1024, 0, stream>>>(format, static_cast<const uint8_t *>(page), first, count, head, tensor, block);
  return cudaGetLastError();
}

}  // namespace kvq::cuda
