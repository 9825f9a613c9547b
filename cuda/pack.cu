// A block of threads packs the rows that pages get, of one head and tensor: they are read once, encoded, and written once.  There is a
// kernel for each way of encoding, and one for all of them, whose tiles may lie in device memory.
#include "cuda/pack.h"

#include <algorithm>

#include "cuda/encode_columns.cuh"
#include "cuda/encode_groups.cuh"
#include "cuda/place.cuh"

namespace kvq::cuda {
namespace {

extern __shared__ __align__(16) uint8_t shared_tile[];

template <bool kShared>
__device__ Tile make_tile(const TileShape &shape, uint8_t *scratch, const TensorFormat &f) {
  uint8_t *memory = kShared ? shared_tile : scratch;
  return {f, nullptr, 0, 0, reinterpret_cast<uint16_t *>(memory), memory + shape.raw_bytes(), memory + shape.raw_bytes() + shape.code_bytes(),
          shape.raw_stride(), shape.code_stride()};
}

__device__ const uint16_t *source_row(const RawShape &shape, const DevicePiece *pieces, uint32_t n, uint32_t row, uint32_t head,
                                      uint32_t tensor) {
  const DevicePiece &piece = find_piece(pieces, n, row);
  return static_cast<const uint16_t *>(piece.page) + shape.row(head, tensor, piece.first + row - piece.start);
}

// Rows [start, start + count) of the sources into the tile, 16 bytes a thread where rows are made of them.
__device__ void load_rows(const Tile &tile, const RawShape &shape, const DevicePiece *sources, uint32_t n_sources, uint32_t start,
                          uint32_t head, uint32_t tensor) {
  const uint32_t dim = tile.f.dim, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool vectors = shape.dim_k % 8 == 0 && shape.dim_v % 8 == 0;
  const uint32_t pieces = vectors ? dim / 8 : dim;
  // A warp's 32 rows are looked up by its lanes, one each.
  for (uint32_t begin = warp * 32; begin < tile.count; begin += blockDim.x) {
    const uint64_t mine = reinterpret_cast<uint64_t>(source_row(shape, sources, n_sources, start + min(begin + lane, tile.count - 1), head, tensor));
    const uint32_t rows = min(32u, tile.count - begin);
    uint16_t *to = tile.raw + size_t(begin) * tile.raw_stride;
    if (vectors && 32 % pieces == 0 && rows == 32) {  // whole rows at once
      const uint32_t together = 32 / pieces, own = lane / pieces, piece = lane % pieces * 8;
      to += own * tile.raw_stride + piece;
#pragma unroll 4
      for (uint32_t row = 0; row < 32; row += together, to += together * tile.raw_stride)
        *reinterpret_cast<uint4 *>(to) = *reinterpret_cast<const uint4 *>(reinterpret_cast<const uint16_t *>(__shfl_sync(~0u, mine, int(row + own))) + piece);
    } else {
      for (uint32_t i = lane; i < (rows * pieces + 31) / 32 * 32; i += 32) {
        const uint32_t row = min(i / pieces, rows - 1), piece = i % pieces;
        const uint16_t *from = reinterpret_cast<const uint16_t *>(__shfl_sync(~0u, mine, int(row)));
        if (i >= rows * pieces) continue;
        if (vectors)
          *reinterpret_cast<uint4 *>(to + row * tile.raw_stride + 8 * piece) = *reinterpret_cast<const uint4 *>(from + 8 * piece);
        else
          to[row * tile.raw_stride + piece] = from[piece];
      }
    }
  }
  __syncthreads();
}

// ---- encoders

KVQ_HD inline Encoder encoder_of(const TensorFormat &f) {
  if (f.family == Family::raw) return Encoder::raw;
  if (f.group) return Encoder::columns;
  if (fits_group_lanes(f)) return Encoder::groups;
  if (!fits_registers(f)) return Encoder::general;
  if (f.family == Family::rows_affine) return Encoder::affine;
  const uint32_t levels = f.region[0].levels;
  return levels <= 4 ? Encoder::book4 : levels <= 8 ? Encoder::book8 : Encoder::book16;
}

// All of them.
class AnyCodes {
 public:
  static constexpr uint32_t kCodings = kAllCodings, kBlocks = 2;
  __device__ explicit AnyCodes(const Tile &) {}
  __device__ void encode(const Tile &tile) const {
    switch (encoder_of(tile.f)) {
      case Encoder::raw:
        return RawRows(tile).encode(tile);
      case Encoder::columns:
        return ColumnCodes(tile).encode(tile);
      case Encoder::groups:
        return GroupRows(tile).encode(tile);
      case Encoder::affine:
        return AffineRows(tile).encode(tile);
      case Encoder::book4:
        return BookRows<2, false>(tile).encode(tile);
      case Encoder::book8:
        return BookRows<2, true>(tile).encode(tile);
      case Encoder::book16:
        return BookRows<3, true>(tile).encode(tile);
      default:
        return GeneralRows(tile).encode(tile);
    }
  }
};

struct PackArguments {
  RawShape shape;
  TileShape tile;
  DeviceFormat format;
  uint32_t tensors;  // bits: keys, values
  const DevicePiece *sources, *targets;
  uint32_t n_sources, n_targets;
  uint8_t *scratch;
  size_t scratch_bytes;
};

// blockIdx.x: head and tensor; the pages are shared by gridDim.y blocks.
template <class Codes, bool kShared>
__global__ void __launch_bounds__(kMaxPackThreads, Codes::kBlocks) pack_kernel(const __grid_constant__ PackArguments a) {
  const uint32_t tensor = a.tensors == 3 ? blockIdx.x % 2 : a.tensors - 1, head = a.tensors == 3 ? blockIdx.x / 2 : blockIdx.x;
  const TensorFormat &f = a.format.tensors[2 * head + tensor];
  Tile tile = make_tile<kShared>(a.tile, a.scratch + (size_t(blockIdx.y) * gridDim.x + blockIdx.x) * a.scratch_bytes, f);
  const Codes codes(tile);
  for (uint32_t i = blockIdx.y; i < a.n_targets; i += gridDim.y) {
    const DevicePiece target = a.targets[i];
    tile.blob = static_cast<uint8_t *>(target.page) + f.blob, tile.first = target.first, tile.count = target.count;
    load_rows(tile, a.shape, a.sources, a.n_sources, target.start, head, tensor);
    codes.encode(tile);
    place<Codes::kCodings>(tile);
    __syncthreads();
  }
}

// In the order of Encoder.
using PackKernel = void (*)(PackArguments);
constexpr PackKernel kPackKernels[] = {
    pack_kernel<AnyCodes, false>,          pack_kernel<GeneralRows, true>,       pack_kernel<RawRows, true>,
    pack_kernel<ColumnCodes, true>,        pack_kernel<GroupRows, true>,         pack_kernel<AffineRows, true>,
    pack_kernel<BookRows<2, false>, true>, pack_kernel<BookRows<2, true>, true>, pack_kernel<BookRows<3, true>, true>,
};

// ---- narrowing

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
  Tile tile = make_tile<kShared>(a.tile, a.scratch + blockIdx.x * a.scratch_bytes, to);
  tile.blob = a.narrower + to.blob, tile.count = a.count;
  if (from.family == Family::raw) {
    for (uint32_t i = threadIdx.x; i < a.count * to.dim; i += blockDim.x) {
      const uint32_t token = i / to.dim, channel = i % to.dim;
      tile.raw[size_t(token) * tile.raw_stride + raw_place(to.dim, channel)] = load_stored(from, blob, row_param(from, token, channel));
    }
    __syncthreads();
    AnyCodes(tile).encode(tile);
  } else {
    shrink(tile, from, blob);
  }
  place<kAllCodings>(tile);
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

// ---- plans

// Memory that an encoder needs besides, in blocks of so many threads.
uint32_t work_bytes(Encoder encoder, const TileShape &tile) {
  switch (encoder) {
    case Encoder::general:
      return GeneralRows::bytes(tile.dim, tile.threads);
    case Encoder::columns:
      return Columns::bytes(tile.dim, tile.threads);
    case Encoder::groups:
      return GroupRows::bytes();
    case Encoder::book4:
    case Encoder::book8:
    case Encoder::book16:
      return RowSums::bytes(tile.page_tokens);
    default:
      return 0;
  }
}

size_t whole(size_t bytes) { return (bytes + 255) / 256 * 256; }

}  // namespace

// Small blocks of threads wait less for one another, but columns and large pages are long.
PackPlan::PackPlan(const RawShape &raw, uint32_t page_tokens, std::span<const TensorFormat> tensors, size_t shared_limit, uint32_t n_processors)
    : shape(raw), tile{page_tokens, std::max(raw.dim_k, raw.dim_v), 0, kMaxPackThreads}, processors(n_processors) {
  for (uint32_t tensor = 0; tensor < 2; tensor++) {
    Encoder encoder = encoder_of(tensors[tensor]);
    for (size_t i = tensor; i < tensors.size(); i += 2) {
      if (encoder_of(tensors[i]) != encoder) encoder = Encoder::general;  // heads whose classes differ: it knows all rows
      tile.work_bytes = std::max(tile.work_bytes, work_bytes(encoder_of(tensors[i]), tile));
    }
    if (tensor && launch[0].encoder == encoder) {
      launch[0].tensors = 3, launch[0].tile.dim = tile.dim;
      continue;
    }
    PackLaunch &own = launch[launches++];
    own = {encoder, 1u << tensor, {page_tokens, tensor ? raw.dim_v : raw.dim_k, 0, encoder == Encoder::columns || page_tokens > 64 ? kMaxPackThreads : kMaxPackThreads / 2}};
  }
  for (uint32_t i = 0; i < launches; i++) {
    launch[i].tile.work_bytes = work_bytes(launch[i].encoder, launch[i].tile);
    tile.work_bytes = std::max(tile.work_bytes, launch[i].tile.work_bytes);
  }
  bytes = whole(tile.bytes());
  shared = bytes <= shared_limit;
  blocks = 2 * std::max(processors, raw.kv_heads);
}

cudaError_t prepare_packing(size_t shared_limit) {
  const auto allow = [&](auto kernel) { return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared_limit)); };
  for (const PackKernel kernel : kPackKernels)
    if (const cudaError_t error = allow(kernel); error != cudaSuccess) return error;
  return allow(narrow_kernel<true>);
}

cudaError_t pack(const PackPlan &plan, const DeviceFormat &format, const DevicePiece *sources, uint32_t n_sources,
                 const DevicePiece *targets, uint32_t n_targets, void *scratch, cudaStream_t stream) {
  if (n_targets == 0) return cudaSuccess;
  PackArguments a{plan.shape, plan.tile, format, 3, sources, targets, n_sources, n_targets, static_cast<uint8_t *>(scratch), plan.bytes};
  if (!plan.shared) {
    const uint32_t heads = 2 * format.kv_heads;
    kPackKernels[uint32_t(Encoder::any)]<<<dim3(heads, std::min(n_targets, plan.blocks / heads)), plan.tile.threads, 0, stream>>>(a);
    return cudaGetLastError();
  }
  for (uint32_t i = 0; i < plan.launches; i++) {
    const PackLaunch &launch = plan.launch[i];
    const PackKernel kernel = kPackKernels[uint32_t(launch.encoder)];
    const size_t bytes = whole(launch.tile.bytes());
    const uint32_t heads = format.kv_heads * (launch.tensors == 3 ? 2 : 1);
    // As many blocks as there is room for: what an encoder prepares serves several pages.
    int resident = 1;
    if (const cudaError_t error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, int(launch.tile.threads), bytes); error != cudaSuccess)
      return error;
    const uint32_t shares = std::clamp<uint32_t>(plan.processors * uint32_t(resident) / heads, 1, n_targets);
    a.tile = launch.tile, a.tensors = launch.tensors;
    kernel<<<dim3(heads, std::min(shares, 65535u)), launch.tile.threads, bytes, stream>>>(a);
  }
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
