// Pages to images (prompt.cuh).  A block of threads takes a tile of one KV head and tensor: codes to numbers, back from the rotation
// and the order of slots to channels, then to fp16.
//
// Three ways: raw rows are copied; pages in fragments are read by units of 16 channels, a warp each, as the fused kernels do; any other
// page goes element by element.
#include "cuda/decode.cuh"
#include "cuda/prompt_results.cuh"

namespace kvq::cuda {
namespace {

constexpr uint32_t kThreads = 256, kWarps = kThreads / 32;
constexpr uint32_t kAtOnce = 3;  // blocks of a processor
constexpr uint32_t kBatch = 4;   // rows of a warp that are read at once

// What a block works on, and where it goes.
template <int P>
struct Tile {
  TilePart part;
  uint32_t head, tensor, dim;
  const TensorFormat *format, *space;  // space: of values
  RawShape shape;
  float *x;  // [64][stride] in shared memory
  uint8_t *image, *low;
  TokenLine *line;
  TileNote *note;
  // Fragments are stored without bank conflicts: keys four channels, values four tokens at a time.
  __device__ __forceinline__ uint32_t stride() const { return 64 * P + (tensor ? 4 : 16); }
  __device__ __forceinline__ float *row(uint32_t i) const { return x + i * stride(); }
  __device__ __forceinline__ const uint8_t *blob() const { return static_cast<const uint8_t *>(part.page) + format->blob; }
  __device__ __forceinline__ bool in_space() const { return tensor && space; }
};
template <int P>
constexpr uint32_t kTileBytes = kTile * (64 * P + 16) * sizeof(float);

__device__ const SequenceEntry &find_sequence(const Plan &plan, uint32_t tile) {
  uint32_t low = 0, high = plan.n_sequences;
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    (plan.sequences[middle].first_tile <= tile ? low : high) = middle;
  }
  return plan.sequences[low];
}

// Does any query see the part?
__device__ bool is_seen(const SequenceEntry &sequence, const TilePart &part, uint32_t window) {
  if (part.count == 0) return false;
  const uint32_t oldest = sequence.length - sequence.n_queries + 1;  // positions that the oldest query sees, without a window
  return !window || oldest <= window || part.high >= oldest - window;
}

// ---- element by element

// Slots to channels, and the centre; a warp a row.  Returns the largest magnitude that the lane has seen.
template <int P>
__device__ float order_channels(const Tile<P> &tile, float *row) {
  const TensorFormat &f = *tile.format;
  const uint32_t lane = threadIdx.x % 32;
  float values[2 * P], top = 0;
  __syncwarp();
#pragma unroll
  for (uint32_t i = 0; i < 2 * P; i++)
    if (32 * i + lane < f.dim) values[i] = row[32 * i + lane];
  __syncwarp();
#pragma unroll
  for (uint32_t i = 0; i < 2 * P; i++) {
    if (32 * i + lane >= f.dim) continue;
    const uint32_t channel = f.channel[32 * i + lane];
    const float value = values[i] + (f.mu ? widen(f.mu[channel]) : 0.0f);
    row[channel] = value, top = fmaxf(top, fabsf(value));
  }
  return top;
}

template <int P>
__device__ float read_elements(const Tile<P> &tile) {
  const TensorFormat &f = *tile.format;
  decode_rows({tile.part.page, tile.format, tile.head, tile.tensor}, tile.shape, tile.part.row, tile.part.count, tile.x, tile.stride());
  __syncthreads();
  float top = 0;
  for (uint32_t row = threadIdx.x / 32; row < tile.part.count; row += kWarps) {
    for (uint32_t r = 0; r < f.regions && f.rotate && !tile.in_space(); r++) rotate_warp(tile.row(row), f, f.region[r], true);
    top = fmaxf(top, order_channels(tile, tile.row(row)));
  }
  return top;
}

// ---- fragments

// Registers of four codes or levels to numbers in shared memory.
template <int P>
struct Unpacked {
  const Tile<P> &tile;
  bool is_signed;
  float less;  // what digits count from

  __device__ __forceinline__ void store(uint32_t unit, const uint32_t (&r)[8]) const {
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (uint32_t reg = 0; reg < 8; reg++) {
      float x[4];
#pragma unroll
      for (uint32_t b = 0; b < 4; b++) {
        const uint32_t byte = r[reg] >> 8 * b & 0xff;
        x[b] = is_signed ? float(int8_t(byte)) : float(byte) - less;
      }
      if (tile.tensor == 0) {
        *reinterpret_cast<float4 *>(tile.row(key_token(reg, lane)) + key_slot(unit, lane, 0)) = make_float4(x[0], x[1], x[2], x[3]);
      } else {
#pragma unroll
        for (uint32_t b = 0; b < 4; b++) tile.row(value_token(reg, lane, b))[value_channel(unit, reg, lane)] = x[b];
      }
    }
  }
  // Digits lie across units: all warps read all of them, and each stores a unit.
  __device__ __forceinline__ void add(int p, const uint32_t (&u)[8], const uint32_t (&v)[8]) const {
    const uint32_t warp = threadIdx.x / 32;
    if (warp == 2 * uint32_t(p)) store(2 * p, u);
    if (warp == 2 * uint32_t(p) + 1) store(2 * p + 1, v);
  }
};

template <int W, int P>
__device__ __forceinline__ void unpack_nibbles(const Unpacked<P> &to, const uint8_t *at, uint32_t unit, bool groups) {
  const TensorFormat &f = *to.tile.format;
  uint32_t r[8];
  Nibbles<W>::unit(at, threadIdx.x % 32, groups ? Nibbles<W>::levels() : LevelTable{f.table[0], f.table[1]}, r);
  to.store(unit, r);
}

template <int P>
__device__ void unpack_nibbles(const Unpacked<P> &to, const uint8_t *codes, uint32_t unit) {
  const TensorFormat &f = *to.tile.format;
  const uint8_t *at = codes + f.unit_word[unit] * 128;
  const bool groups = Kind(f.kind) == Kind::width_groups;
  switch (f.width[unit]) {
    case 1:
      return unpack_nibbles<1>(to, at, unit, groups);
    case 2:
      return unpack_nibbles<2>(to, at, unit, groups);
    case 3:
      return unpack_nibbles<3>(to, at, unit, groups);
    case 4:
      return unpack_nibbles<4>(to, at, unit, groups);
    case 5:
      return unpack_nibbles<5>(to, at, unit, groups);
    case 6:
      return unpack_nibbles<6>(to, at, unit, groups);
  }
}

template <int P>
__device__ void unpack_planes(const Unpacked<P> &to, const uint32_t *words, uint32_t unit) {
  const TensorFormat &f = *to.tile.format;
  uint32_t r[8] = {};
  for (uint32_t plane = 0; 2 * plane < f.width[unit]; plane++) {
    const PlanePlace place = plane_place(f, plane, unit);
    const uint32_t *at = words + place.first + threadIdx.x % 32 * place.step;
    const bool crumb = f.width[unit] >= 2 * plane + 2;
    const uint32_t low = at[0], high = crumb ? at[1] : 0;
#pragma unroll
    for (uint32_t x = 0; x < 8; x++) {
      const uint32_t bits = crumb ? (x < 4 ? low : high) >> 2 * (x % 4) & 0x03030303u : low >> (2 * (x % 4) + x / 4) & 0x01010101u;
      r[x] |= bits << 2 * plane;
    }
  }
  to.store(unit, r);
}

template <int P>
__device__ void unpack_crumbs(const Unpacked<P> &to, const uint32_t *words, uint32_t unit) {
  uint32_t r[8];
#pragma unroll
  for (uint32_t reg = 0; reg < 8; reg++) {
    const uint32_t y = 2 * unit + (reg & 1);
    r[reg] = words[y / 4 * 128 + threadIdx.x % 32 * 4 + reg / 2] >> 2 * (y % 4) & 0x03030303u;
  }
  to.store(unit, r);
}

template <int P>
__device__ void unpack_digits(const Unpacked<P> &to, const uint8_t *codes) {
  const TensorFormat &f = *to.tile.format;
  const LevelTable table{f.table[0], f.table[1]};
  const uint32_t lane = threadIdx.x % 32, levels = f.region[0].levels;
  if constexpr (P == 2) {
    static_assert(kWarps == 4 * P);
    if (levels == 3 && f.loose) Digits<3, false, false, false, true>::for_pairs<8>(codes, lane, table, to);
    if (levels == 3 && !f.loose) Digits<3, false, false>::for_pairs<8>(codes, lane, table, to);
    if (levels == 5 && f.swizzled) Digits<5, true, false>::for_pairs<8>(codes, lane, table, to);
    if (levels == 5 && !f.swizzled) Digits<5, false, false>::for_pairs<8>(codes, lane, table, to);
    if (levels == 6 && f.loose) Digits<6, true, false, false, true>::for_pairs<8>(codes, lane, table, to);
    if (levels == 6 && f.swizzled && !f.loose) Digits<6, true, false>::for_pairs<8>(codes, lane, table, to);
    if (levels == 6 && !f.swizzled) Digits<6, false, false>::for_pairs<8>(codes, lane, table, to);
  }
}

template <int P>
__device__ void unpack_fragments(const Tile<P> &tile) {
  const TensorFormat &f = *tile.format;
  const uint8_t *codes = tile.blob() + f.codes + tile_offset(f, tile.part.row / kTile);
  const bool book = f.family == Family::rows_book, three = book && f.region[0].levels == 3 && f.coding == Coding::radix;
  const Unpacked<P> to{tile, book && !three, three ? 1.0f : 0.0f};
  if (f.coding == Coding::radix) return unpack_digits(to, codes);
  const uint32_t *words = reinterpret_cast<const uint32_t *>(codes);
  for (uint32_t unit = threadIdx.x / 32; unit < 4 * P; unit += kWarps) {
    if (f.coding == Coding::nibbles)
      unpack_nibbles(to, codes, unit);
    else if (f.coding == Coding::planes)
      unpack_planes(to, words, unit);
    else
      unpack_crumbs(to, words, unit);
  }
}

// A lane's scales and zeros of columns, slots C * lane and on.
template <int C>
struct Columns {
  float scale[C], zero[C];
  __device__ __forceinline__ Columns(const TensorFormat &f, const uint8_t *blob, uint32_t token) {
    if (f.family != Family::columns) return;
#pragma unroll
    for (int j = 0; j < C; j++) {
      const uint32_t at = (token / f.group * f.dim + C * (threadIdx.x % 32) + j) * 2;
      scale[j] = stored_value(f, blob, column_param(f, at)), zero[j] = stored_value(f, blob, column_param(f, at + 1));
    }
  }
};

// Numbers to keys, or to values that have left their rotation.
template <int P>
__device__ float scale_fragments(const Tile<P> &tile) {
  constexpr int C = 2 * P;
  const TensorFormat &f = *tile.format;
  const uint32_t lane = threadIdx.x % 32, region = region_of(f, C * lane);
  const bool columns = f.family == Family::columns, affine = f.family == Family::rows_affine, groups = Kind(f.kind) == Kind::width_groups;
  const bool whole = f.rotate && !groups, ordered = whole && !f.mu;  // ordered: slots are channels
  const float book = f.family != Family::rows_book ? 1.0f : groups ? f.region[region].book->scale : f.book_scale;
  const uint32_t signs = whole ? row_signs<C>(lane, f) : 0;
  const Columns<C> column(f, tile.blob(), tile.part.row);
  float top = 0;
  for (uint32_t first = threadIdx.x / 32; first < tile.part.count; first += kWarps * kBatch) {
    float scale[kBatch], zero[kBatch];
#pragma unroll
    for (uint32_t i = 0; i < kBatch && !columns; i++) {
      const uint32_t token = min(first + i * kWarps, tile.part.count - 1) + tile.part.row;
      scale[i] = stored_value(f, tile.blob(), row_param(f, token, affine ? 0 : region)) * book;
      zero[i] = affine ? stored_value(f, tile.blob(), row_param(f, token, 1)) : 0.0f;
    }
#pragma unroll
    for (uint32_t i = 0; i < kBatch; i++) {
      float x[C], *row = tile.row(first + i * kWarps), *at = row + C * lane;
#pragma unroll
      for (int j = 0; j < C; j++) x[j] = fmaf(at[j], columns ? column.scale[j] : scale[i], columns ? column.zero[j] : zero[i]);
      if (whole) rotate_row<C>(lane, signs, true, x);
#pragma unroll
      for (int j = 0; j < C; j++) at[j] = x[j], top = fmaxf(top, ordered ? fabsf(x[j]) : 0.0f);
      if (ordered) continue;
      for (uint32_t r = 0; r < f.regions && groups && f.rotate; r++) rotate_warp(row, f, f.region[r], true);
      top = fmaxf(top, order_channels(tile, row));
    }
  }
  return top;
}

// ---- images

// A power of two that brings numbers up to `top` into the better part of fp16.
__device__ float choose_scale(float top) { return top >= 0x1p15f ? 0x1p4f : top > 0 && top < 0x1p-4f ? 0x1p-16f : 1.0f; }

__device__ float block_max(float x) {
  __shared__ float tops[kWarps];
  for (int d = 16; d; d /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, d));
  __syncthreads();
  if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = x;
  __syncthreads();
  x = 0;
  for (uint32_t w = 0; w < kWarps; w++) x = fmaxf(x, tops[w]);
  return x;
}

// Four channels: the nearest fp16 numbers, and what they leave.
__device__ void split_four(const float (&x)[4], uint2 *high, uint2 *low) {
  *high = make_uint2(pack_halves(x[0], x[1]), pack_halves(x[2], x[3]));
  const float2 a = __half22float2(*reinterpret_cast<const __half2 *>(&high->x)), b = __half22float2(*reinterpret_cast<const __half2 *>(&high->y));
  *low = make_uint2(pack_halves(x[0] - a.x, x[1] - a.y), pack_halves(x[2] - b.x, x[3] - b.y));
}

// A thread's pieces of a tile are 4 P times four channels.  factor: of a token's numbers, less `middle`.
template <int P, class Factor>
__device__ void write_images(const Tile<P> &tile, bool low, float middle, Factor &&factor) {
#pragma unroll
  for (uint32_t i = 0; i < 4 * P; i++) {
    const uint32_t piece = threadIdx.x + i * kThreads, token = piece / (16 * P), four = piece % (16 * P);
    const float4 v = *reinterpret_cast<const float4 *>(tile.row(token) + 4 * four);
    const float scale = factor(token);
    float x[4] = {(v.x - middle) * scale, (v.y - middle) * scale, (v.z - middle) * scale, (v.w - middle) * scale};
#pragma unroll
    for (uint32_t j = 0; j < 4; j++)
      if (token >= tile.part.count || 4 * four + j >= tile.dim) x[j] = 0;  // what lies there may be anything
    uint2 h, l;
    split_four(x, &h, &l);
    const uint32_t at = image_offset(token, four / 2) + four % 2 * 8;
    *reinterpret_cast<uint2 *>(tile.image + at) = h;
    if (low) *reinterpret_cast<uint2 *>(tile.low + at) = l;
  }
}

// Values with a power of two as their scale, or keys.
template <int P>
__device__ void write_values(const Tile<P> &tile, float top, bool exact) {
  const float scale = choose_scale(block_max(top));
  const bool low = !exact;
  write_images(tile, low, 0, [&](uint32_t) { return 1 / scale; });
  if (tile.tensor == 0) {
    if (threadIdx.x == 0) tile.note->key_scale = scale, tile.note->keys_low = low;
    return;
  }
  if (threadIdx.x == 0) tile.note->values_low = low, tile.note->zeros = 0;
  if (threadIdx.x < kTile) tile.line->log_scale[threadIdx.x] = log2f(scale), tile.line->inverse[threadIdx.x] = 1 / scale;
}

// Numbers with the scales of their tokens.  Codes count from the middle of their levels: sums of weights times numbers stay small where
// values cancel.
template <int P>
__device__ void write_numbers(const Tile<P> &tile) {
  const TensorFormat &f = *tile.format;
  const bool affine = f.family == Family::rows_affine;
  const float middle = affine ? 0.5f * float(f.region[0].levels - 1) : 0.0f;
  const auto param = [&](uint32_t token, uint32_t i) { return stored_value(f, tile.blob(), row_param(f, tile.part.row + token, i)); };
  // A token of scale 0: its codes mean nothing, its zero may.
  write_images(tile, false, middle, [&](uint32_t token) { return param(token, 0) > 0 ? 1.0f : 0.0f; });
  if (threadIdx.x == 0) tile.note->values_low = 0, tile.note->zeros = affine;
  if (threadIdx.x >= kTile) return;
  const bool exists = threadIdx.x < tile.part.count;
  const float s = exists ? param(threadIdx.x, 0) * (affine ? 1.0f : f.book_scale) : 0, scale = s > 0 ? s : 1.0f;
  tile.line->log_scale[threadIdx.x] = log2f(scale), tile.line->inverse[threadIdx.x] = 1 / scale;
  if (affine) tile.line->zero[threadIdx.x] = exists ? param(threadIdx.x, 1) / scale + (s > 0 ? middle : 0.0f) : 0.0f;
}

// Raw rows, which are fp16 already; a warp has some under way at once.
template <int P>
__device__ void copy_raw(const Tile<P> &tile) {
  constexpr int C = 2 * P;
  const uint16_t *rows = static_cast<const uint16_t *>(tile.part.page) + tile.shape.row(tile.head, tile.tensor, tile.part.row);
  const uint32_t lane = threadIdx.x % 32, dim = tile.dim;
  const uint32_t signs = tile.in_space() ? row_signs<C>(lane, *tile.space) : 0;
  float top = 0;
  for (uint32_t first = threadIdx.x / 32; first < tile.part.count; first += kWarps * kBatch) {
    float x[kBatch][C];
#pragma unroll
    for (uint32_t i = 0; i < kBatch; i++)
#pragma unroll
      for (uint32_t j = 0; j < C; j++) {
        const uint32_t row = first + i * kWarps, channel = C * lane + j;
        x[i][j] = row < tile.part.count && channel < dim ? widen(rows[row * dim + raw_place(dim, channel)]) : 0.0f;
      }
#pragma unroll
    for (uint32_t i = 0; i < kBatch; i++) {
      if (tile.in_space()) rotate_row<C>(lane, signs, false, x[i]);
#pragma unroll
      for (uint32_t j = 0; j < C; j++) tile.row(first + i * kWarps)[C * lane + j] = x[i][j], top = fmaxf(top, fabsf(x[i][j]));
    }
  }
  write_values(tile, top, !tile.in_space());
}

// Do the functions above read a page of this format?
__device__ bool reads_fragments(const TensorFormat &f) {
  if (f.layout != Layout::fragments || f.coding == Coding::fields || f.boosted || tile_groups(f) > 1) return false;
  if (Kind(f.kind) == Kind::channel_split || f.family == Family::polar) return false;
  for (uint32_t r = 0; r < f.regions && f.family == Family::rows_book; r++)
    if (f.region[r].first % 16 || f.region[r].levels > 64) return false;
  return f.coding != Coding::radix || f.dim == 128;
}

template <int P>
__device__ void make_images(const Tile<P> &tile) {
  const TensorFormat *f = tile.format;
  if (!f) {
    copy_raw(tile);
  } else if (!reads_fragments(*f) || tile.part.row % kTile) {
    write_values(tile, read_elements(tile), f->family == Family::raw);
  } else {
    unpack_fragments(tile);
    __syncthreads();
    if (tile.tensor && has_numbers(*f) && !!tile.space == !!f->rotate)
      write_numbers(tile);
    else
      write_values(tile, scale_fragments(tile), false);
  }
  __syncthreads();
}

template <int P>
__global__ void __launch_bounds__(kThreads, kAtOnce) images_kernel(const __grid_constant__ AttendArguments a, uint32_t group) {
  extern __shared__ float x[];
  const Plan plan = *a.plan;
  const HeadGroup heads(plan, a, group);
  const Images images(plan, P);
  await_earlier(), let_next_begin();  // rows that were appended; images that are still read
  for (uint32_t i = blockIdx.x; i < plan.tiles * heads.count * 2; i += gridDim.x) {
    const uint32_t tensor = i % 2, head = i / 2 % heads.count, index = i / 2 / heads.count;
    const SequenceEntry &sequence = find_sequence(plan, index);
    const TilePart part = find_part(plan, sequence, index - sequence.first_tile);
    if (!is_seen(sequence, part, a.window)) continue;
    make_images(Tile<P>{part, heads.first + head, tensor, tensor ? a.dim_v : a.dim_k, part_format(sequence, part.kind, heads.first + head, tensor),
                        value_space(sequence, heads.first + head), {a.kv_heads, a.dim_k, a.dim_v}, x,
                        images.at(head, index, tensor ? Image::values : Image::keys), images.at(head, index, tensor ? Image::values_low : Image::keys_low),
                        images.line(head, index), images.note(head, index)});
  }
}

template <int P>
cudaError_t launch(const AttendArguments &a, uint32_t group, const Processors &processors, cudaStream_t stream) {
  constexpr uint32_t kBytes = kTileBytes<P>;
  const cudaError_t error = cudaFuncSetAttribute(images_kernel<P>, cudaFuncAttributeMaxDynamicSharedMemorySize, int(kBytes));
  if (error != cudaSuccess) return error;
  return launch_early(images_kernel<P>, processors.count * kAtOnce, kThreads, kBytes, processors, stream, a, group);
}

}  // namespace

cudaError_t make_images(const AttendArguments &arguments, uint32_t group, const Processors &processors, cudaStream_t stream) {
  const uint32_t panels = prompt_panels(arguments.dim_k, arguments.dim_v);
  return panels == 1 ? launch<1>(arguments, group, processors, stream) : panels == 2 ? launch<2>(arguments, group, processors, stream)
                                                                                     : launch<4>(arguments, group, processors, stream);
}

}  // namespace kvq::cuda
