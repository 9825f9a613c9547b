// A block of threads packs the rows that pages get, of one head and tensor: they are read once, encoded, and written once.  There is a
// kernel for each pair of encoders that presets have, and one for all of them.  Encoders that need a row once take it from its raw page;
// for the others rows are brought to shared memory first.
#include "cuda/pack.h"

#include <algorithm>
#include <iterator>
#include <type_traits>

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
          shape.raw_stride(), shape.code_stride(), {}};
}

// The rows of a source into the tile, 16 bytes a thread where rows are made of them.
__device__ void load_rows(const Tile &tile, const RowSource &source) {
  const RawShape &shape = source.shape;
  const uint32_t dim = tile.f.dim, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool vectors = shape.dim_k % 8 == 0 && shape.dim_v % 8 == 0;
  const uint32_t pieces = vectors ? dim / 8 : dim;
  // A warp's rows, up to 32, are looked up by its lanes, one each.
  const uint32_t most = min(32u, (tile.count + blockDim.x / 32 - 1) / (blockDim.x / 32));
  for (uint32_t begin = warp * most; begin < tile.count; begin += blockDim.x / 32 * most) {
    const uint64_t mine = reinterpret_cast<uint64_t>(source.row(min(begin + lane, tile.count - 1)));
    const uint32_t rows = min(most, tile.count - begin);
    uint16_t *to = tile.raw + size_t(begin) * tile.raw_stride;
    const uint32_t together = pieces <= 32 ? 32 / pieces : 1;
    if (vectors && together * pieces == 32 && rows % (4 * together) == 0) {  // whole rows at once
      const uint32_t own = lane / pieces, piece = lane % pieces * 8;
      to += own * tile.raw_stride + piece;
#pragma unroll 4
      for (uint32_t row = 0; row < rows; row += together, to += together * tile.raw_stride)
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
  static constexpr bool kInPlace = false;
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
  const DevicePiece *sources, *targets;
  uint32_t n_sources, n_targets;
  uint8_t *scratch;
  size_t scratch_bytes;
};

template <class Codes>
__device__ void pack_pages(const PackArguments &a, Tile &tile, uint32_t head, uint32_t tensor) {
  const Codes codes(tile);
  for (uint32_t i = blockIdx.y; i < a.n_targets; i += gridDim.y) {
    const DevicePiece target = a.targets[i];
    tile.blob = static_cast<uint8_t *>(target.page) + tile.f.blob, tile.first = target.first, tile.count = target.count;
    const RowSource source{a.shape, a.sources, a.n_sources, head, tensor, target.start};
    if constexpr (Codes::kInPlace)
      tile.source = source;
    else
      load_rows(tile, source);
    codes.encode(tile);
    place<Codes::kCodings>(tile);
    __syncthreads();
  }
}

// blockIdx.x: head and tensor; pages are shared by gridDim.y blocks.
template <class Keys, class Values, bool kShared = true>
__global__ void __launch_bounds__(kMaxPackThreads, Keys::kBlocks < Values::kBlocks ? Keys::kBlocks : Values::kBlocks)
    pack_kernel(const __grid_constant__ PackArguments a) {
  const uint32_t head = blockIdx.x / 2, tensor = blockIdx.x % 2;
  Tile tile = make_tile<kShared>(a.tile, a.scratch + (size_t(blockIdx.y) * gridDim.x + blockIdx.x) * a.scratch_bytes, a.format.tensors[blockIdx.x]);
  if constexpr (std::is_same_v<Keys, Values>)
    pack_pages<Keys>(a, tile, head, tensor);
  else if (tensor)
    pack_pages<Values>(a, tile, head, 1);
  else
    pack_pages<Keys>(a, tile, head, 0);
}

// The pairs that presets have; the first is for all others, and the second for tiles in device memory.
using PackKernel = void (*)(PackArguments);
struct PairKernel {
  Encoder keys, values;
  PackKernel kernel;
  bool staged;  // is there an encoder that reads rows in shared memory?
};
template <class Keys, class Values = Keys, bool kShared = true>
constexpr PairKernel pair(Encoder keys, Encoder values) {
  return {keys, values, pack_kernel<Keys, Values, kShared>, !Keys::kInPlace || !Values::kInPlace};
}
using Book4 = BookRows<2, false>;
using Book8 = BookRows<2, true>;
using Book16 = BookRows<3, true>;
constexpr PairKernel kPackKernels[] = {
    pair<AnyCodes>(Encoder::any, Encoder::any),
    pair<AnyCodes, AnyCodes, false>(Encoder::any, Encoder::any),
    pair<RawRows>(Encoder::raw, Encoder::raw),
    pair<AffineRows>(Encoder::affine, Encoder::affine),
    pair<Book4>(Encoder::book4, Encoder::book4),
    pair<Book8>(Encoder::book8, Encoder::book8),
    pair<Book16>(Encoder::book16, Encoder::book16),
    pair<ColumnCodes, AffineRows>(Encoder::columns, Encoder::affine),
    pair<ColumnCodes, Book4>(Encoder::columns, Encoder::book4),
    pair<ColumnCodes, Book8>(Encoder::columns, Encoder::book8),
    pair<GroupRows, Book4>(Encoder::groups, Encoder::book4),
    pair<GroupRows, Book8>(Encoder::groups, Encoder::book8),
    pair<GeneralRows, Book4>(Encoder::general, Encoder::book4),
    pair<GeneralRows, Book8>(Encoder::general, Encoder::book8),
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
    block.boosted[i] = blob[positions_of(f, first / f.group + i / f.dim) + i % f.dim];
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

}  // namespace

// Small blocks of threads wait less for one another, but columns and large pages are long.
PackPlan::PackPlan(const RawShape &raw, uint32_t page_tokens, std::span<const TensorFormat> tensors, size_t shared_limit, uint32_t processors,
                   bool narrows)
    : shape(raw), tile{page_tokens, std::max(raw.dim_k, raw.dim_v), 0, kMaxPackThreads / 2, true} {
  Encoder encoder[2];
  for (uint32_t i = 0; i < tensors.size(); i++) {
    const Encoder own = encoder_of(tensors[i]);
    encoder[i % 2] = i < 2 || encoder[i % 2] == own ? own : Encoder::general;  // heads whose classes differ: it knows all rows
    if (own == Encoder::columns || page_tokens > kTile) tile.threads = kMaxPackThreads;
  }
  for (uint32_t i = 0; i < tensors.size(); i++)
    tile.work_bytes = std::max({tile.work_bytes, work_bytes(encoder_of(tensors[i]), tile), work_bytes(encoder[i % 2], tile)});
  for (uint32_t i = 2; i < std::size(kPackKernels); i++)
    if (kPackKernels[i].keys == encoder[0] && kPackKernels[i].values == encoder[1]) kernel = i;
  tile.staged = narrows || kPackKernels[kernel].staged;
  bytes = (tile.bytes() + 255) / 256 * 256;
  shared = bytes <= shared_limit;
  blocks = 2 * std::max(processors, raw.kv_heads);
}

cudaError_t prepare_packing(size_t shared_limit) {
  const auto allow = [&](auto kernel) { return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared_limit)); };
  for (const PairKernel &pair : kPackKernels)
    if (const cudaError_t error = allow(pair.kernel); error != cudaSuccess) return error;
  return allow(narrow_kernel<true>);
}

cudaError_t pack(const PackPlan &plan, const DeviceFormat &format, const DevicePiece *sources, uint32_t n_sources,
                 const DevicePiece *targets, uint32_t n_targets, void *scratch, cudaStream_t stream) {
  if (n_targets == 0) return cudaSuccess;
  constexpr uint32_t kMostBlocks = 65535;  // of a grid's second dimension
  const PackArguments a{plan.shape, plan.tile, format, sources, targets, n_sources, n_targets, static_cast<uint8_t *>(scratch), plan.bytes};
  const uint32_t tensors = 2 * format.kv_heads;
  // Where there are blocks enough for every processor, one takes several pages, so that its encoder is prepared once for them.
  const uint32_t pages = uint32_t(std::clamp<uint64_t>(uint64_t(tensors) * n_targets / (12 * plan.blocks), 1, 4));
  const dim3 grid(tensors, std::min({(n_targets + pages - 1) / pages, kMostBlocks, plan.shared ? kMostBlocks : plan.blocks / tensors}));
  kPackKernels[plan.shared ? plan.kernel : 1].kernel<<<grid, plan.tile.threads, plan.shared ? plan.bytes : 0, stream>>>(a);
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
