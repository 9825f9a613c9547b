// Pages to images (prompt.cuh).  A block of threads takes a tile of one KV head and tensor: codes to numbers, back from the rotation
// and the order of slots to channels, then to fp16.
//
// Three ways: raw rows are copied; pages in fragments are read by units of 16 channels, a warp each, as the fused kernels do; any other
// page goes element by element.
#include "cuda/decode.cuh"
#include "cuda/fused.cuh"
#include "cuda/prompt.cuh"

namespace kvq::cuda {
namespace {

constexpr uint32_t kThreads = 256, kWarps = kThreads / 32, kPad = 4;  // kPad: floats behind a row, against bank conflicts
constexpr uint32_t kAtOnce = 3;  // blocks of a processor

// What a block works on, and where it goes.
template <int P>
struct Tile {
  static constexpr uint32_t kStride = 64 * P + kPad;
  TilePart part;
  uint32_t head, tensor, dim;
  const TensorFormat *format;
  RawShape shape;
  float *x;  // [64][kStride] in shared memory
  uint8_t *image, *low;
  float *scale;
  __device__ __forceinline__ float *row(uint32_t i) const { return x + i * kStride; }
  __device__ __forceinline__ const uint8_t *blob() const { return static_cast<const uint8_t *>(part.page) + format->blob; }
};

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
  decode_rows({tile.part.page, tile.format, tile.head, tile.tensor}, tile.shape, tile.part.row, tile.part.count, tile.x, tile.kStride);
  __syncthreads();
  float top = 0;
  for (uint32_t row = threadIdx.x / 32; row < tile.part.count; row += kWarps) {
    for (uint32_t r = 0; r < f.regions && f.rotate && f.family != Family::polar; r++) rotate_warp(tile.row(row), f, f.region[r], true);
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

  __device__ __forceinline__ void store(uint32_t unit, const uint32_t (&r)[8], const uint32_t (&masks)[8]) const {
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (uint32_t reg = 0; reg < 8; reg++) {
      float x[4];
#pragma unroll
      for (uint32_t b = 0; b < 4; b++) {
        const uint32_t byte = r[reg] >> 8 * b & 0xff;
        x[b] = is_signed ? float(int8_t(byte)) + float(masks[reg] >> 8 * b & 1u) : float(byte) - less;  // -m is ~m + 1
      }
      if (tile.tensor == 0) {
        *reinterpret_cast<float4 *>(tile.row(key_token(reg, lane)) + key_slot(unit, lane, 0)) = make_float4(x[0], x[1], x[2], x[3]);
      } else {
#pragma unroll
        for (uint32_t b = 0; b < 4; b++) tile.row(value_token(reg, lane, b))[value_channel(unit, reg, lane)] = x[b];
      }
    }
  }
  __device__ __forceinline__ void add(int p, const uint32_t (&u)[8], const uint32_t (&v)[8]) const {
    const uint32_t none[8] = {};
    store(2 * p, u, none), store(2 * p + 1, v, none);
  }
};

template <int W, int P>
__device__ __forceinline__ void unpack_nibbles(const Unpacked<P> &to, const uint8_t *at, uint32_t unit, bool groups) {
  using Code = Nibbles<W>;
  const TensorFormat &f = *to.tile.format;
  uint32_t w[W], r[8], masks[8] = {};
  load_unit<W>(at, threadIdx.x % 32, w);
  if constexpr (W > 4)
    Code::look_up_far(w, r);
  else
    Code::look_up(w, groups ? Code::levels(0) : LevelTable{f.table[0], f.table[1]}, r);
  if constexpr (Code::kSigns) Code::negate(w, r, masks);
  to.store(unit, r, masks);
}

template <int P>
__device__ void unpack_nibbles(const Unpacked<P> &to, const uint8_t *codes, uint32_t unit) {
  const TensorFormat &f = *to.tile.format;
  const uint8_t *at = codes + unit_word(f, unit) * 128;
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
  uint32_t r[8] = {}, none[8] = {};
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
  to.store(unit, r, none);
}

template <int P>
__device__ void unpack_crumbs(const Unpacked<P> &to, const uint32_t *words, uint32_t unit) {
  uint32_t r[8], none[8] = {};
#pragma unroll
  for (uint32_t reg = 0; reg < 8; reg++) {
    const uint32_t y = 2 * unit + (reg & 1);
    r[reg] = words[y / 4 * 128 + threadIdx.x % 32 * 4 + reg / 2] >> 2 * (y % 4) & 0x03030303u;
  }
  to.store(unit, r, none);
}

// Digits lie across units: one warp takes all of them.
template <int P>
__device__ void unpack_digits(const Unpacked<P> &to, const uint8_t *codes) {
  const TensorFormat &f = *to.tile.format;
  const LevelTable table{f.table[0], f.table[1]};
  const uint32_t lane = threadIdx.x % 32, levels = f.region[0].levels;
  if constexpr (P == 2) {
    if (levels == 3) Digits<3, false, false>::for_pairs<8>(codes, lane, table, to);
    if (levels == 5 && f.swizzled) Digits<5, true, false>::for_pairs<8>(codes, lane, table, to);
    if (levels == 5 && !f.swizzled) Digits<5, false, false>::for_pairs<8>(codes, lane, table, to);
    if (levels == 6 && f.swizzled) Digits<6, true, false>::for_pairs<8>(codes, lane, table, to);
    if (levels == 6 && !f.swizzled) Digits<6, false, false>::for_pairs<8>(codes, lane, table, to);
  }
}

template <int P>
__device__ void unpack_fragments(const Tile<P> &tile) {
  const TensorFormat &f = *tile.format;
  const uint8_t *codes = tile.blob() + f.codes + tile_offset(f, tile.part.row / kTile);
  const bool book = f.family == Family::rows_book, three = book && f.region[0].levels == 3 && f.coding == Coding::radix;
  const Unpacked<P> to{tile, book && !three, three ? 1.0f : 0.0f};
  if (f.coding == Coding::radix) {
    if (threadIdx.x < 32) unpack_digits(to, codes);
    return;
  }
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

// A lane's scale and zero of slots C * lane and on: of a whole tile for columns, of a token for rows.
template <int C>
struct Line {
  float scale[C], zero[C];
  __device__ __forceinline__ void load_columns(const TensorFormat &f, const uint8_t *blob, uint32_t token) {
    for (int j = 0; j < C; j++) {
      const uint32_t at = (token / f.group * f.dim + C * (threadIdx.x % 32) + j) * 2;
      scale[j] = stored_value(f, blob, column_param(f, at)), zero[j] = stored_value(f, blob, column_param(f, at + 1));
    }
  }
  // region: of the lane's slots; book: its scale.
  __device__ __forceinline__ void load_row(const TensorFormat &f, const uint8_t *blob, uint32_t token, uint32_t region, float book) {
    const bool affine = f.family == Family::rows_affine;
    const float s = affine ? stored_value(f, blob, row_param(f, token, 0)) : stored_value(f, blob, row_param(f, token, region)) * book;
    const float z = affine ? stored_value(f, blob, row_param(f, token, 1)) : 0.0f;
#pragma unroll
    for (int j = 0; j < C; j++) scale[j] = s, zero[j] = z;
  }
};

template <int P>
__device__ float read_fragments(const Tile<P> &tile) {
  constexpr int C = 2 * P;
  const TensorFormat &f = *tile.format;
  const uint32_t lane = threadIdx.x % 32;
  unpack_fragments(tile);
  Line<C> line;
  const uint32_t region = region_of(f, C * lane);
  const bool columns = f.family == Family::columns, groups = Kind(f.kind) == Kind::width_groups, whole = f.rotate && !groups;
  const float book = f.family != Family::rows_book ? 1.0f : groups ? f.region[region].book->scale : f.book_scale;
  const uint32_t signs = whole ? row_signs<C>(lane, f) : 0;
  if (columns) line.load_columns(f, tile.blob(), tile.part.row);
  __syncthreads();
  float top = 0;
  for (uint32_t row = threadIdx.x / 32; row < tile.part.count; row += kWarps) {
    if (!columns) line.load_row(f, tile.blob(), tile.part.row + row, region, book);
    float x[C], *at = tile.row(row) + C * lane;
#pragma unroll
    for (int j = 0; j < C; j++) x[j] = fmaf(at[j], line.scale[j], line.zero[j]);
    if (whole) rotate_row<C>(lane, signs, true, x);
    const bool ordered = whole && !f.mu;  // slots are channels
#pragma unroll
    for (int j = 0; j < C; j++) at[j] = x[j], top = fmaxf(top, ordered ? fabsf(x[j]) : 0.0f);
    if (ordered) continue;
    for (uint32_t r = 0; r < f.regions && groups && f.rotate; r++) rotate_warp(tile.row(row), f, f.region[r], true);
    top = fmaxf(top, order_channels(tile, tile.row(row)));
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

__device__ uint32_t pack_halves(float x, float y) {
  const __half2 both = __floats2half2_rn(x, y);
  return *reinterpret_cast<const uint32_t *>(&both);
}

// Eight channels times `scale`: the nearest fp16 numbers, and what they leave.
__device__ void split_eight(const float (&x)[8], float scale, uint4 *high, uint4 *low) {
  uint32_t h[4], l[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float a = x[2 * i] * scale, b = x[2 * i + 1] * scale;
    h[i] = pack_halves(a, b);
    const float2 near = __half22float2(*reinterpret_cast<const __half2 *>(&h[i]));
    l[i] = pack_halves(a - near.x, b - near.y);
  }
  *high = make_uint4(h[0], h[1], h[2], h[3]), *low = make_uint4(l[0], l[1], l[2], l[3]);
}

// A thread's pieces of a tile are 2 P times eight channels: piece i.
template <int P>
__device__ __forceinline__ void locate(uint32_t i, uint32_t *token, uint32_t *eight) {
  const uint32_t piece = threadIdx.x + i * kThreads;
  *token = piece / (8 * P), *eight = piece % (8 * P);
}

// read(token, channel) of all channels that exist.
template <int P, class Read>
__device__ __forceinline__ void read_eight(const Tile<P> &tile, uint32_t token, uint32_t eight, Read &&read, float (&x)[8]) {
#pragma unroll
  for (uint32_t j = 0; j < 8; j++) x[j] = token < tile.part.count && 8 * eight + j < tile.dim ? read(token, 8 * eight + j) : 0.0f;
}

template <int P>
__device__ void write_images(const Tile<P> &tile, float top) {
  const float scale = choose_scale(block_max(top));
  const bool low = tile.tensor == 0 && !is_exact(tile.format);
#pragma unroll
  for (uint32_t i = 0; i < 2 * P; i++) {
    uint32_t token, eight;
    locate<P>(i, &token, &eight);
    float x[8];
    read_eight(tile, token, eight, [&](uint32_t t, uint32_t c) { return tile.row(t)[c]; }, x);
    uint4 h, l;
    split_eight(x, 1 / scale, &h, &l);
    *reinterpret_cast<uint4 *>(tile.image + image_offset(token, eight)) = h;
    if (low) *reinterpret_cast<uint4 *>(tile.low + image_offset(token, eight)) = l;
  }
  if (threadIdx.x == 0) *tile.scale = scale;
}

// Raw rows, which are fp16 already.
template <int P>
__device__ void copy_raw(const Tile<P> &tile) {
  const uint16_t *rows = static_cast<const uint16_t *>(tile.part.page) + tile.shape.row(tile.head, tile.tensor, tile.part.row);
  float x[2 * P][8], top = 0;
#pragma unroll
  for (uint32_t i = 0; i < 2 * P; i++) {
    uint32_t token, eight;
    locate<P>(i, &token, &eight);
    read_eight(tile, token, eight, [&](uint32_t t, uint32_t c) { return widen(rows[t * tile.dim + raw_place(tile.dim, c)]); }, x[i]);
#pragma unroll
    for (int j = 0; j < 8; j++) top = fmaxf(top, fabsf(x[i][j]));
  }
  const float scale = choose_scale(block_max(top));
#pragma unroll
  for (uint32_t i = 0; i < 2 * P; i++) {
    uint32_t token, eight;
    locate<P>(i, &token, &eight);
    uint4 h, l;
    split_eight(x[i], 1 / scale, &h, &l);
    *reinterpret_cast<uint4 *>(tile.image + image_offset(token, eight)) = h;
  }
  if (threadIdx.x == 0) *tile.scale = scale;
}

template <int P>
__device__ void make_images(const Tile<P> &tile) {
  if (!tile.format) return copy_raw(tile);
  const bool fragments = tile.format->layout == Layout::fragments && tile.part.row % kTile == 0;
  write_images(tile, fragments ? read_fragments(tile) : read_elements(tile));
  __syncthreads();
}

template <int P>
__global__ void __launch_bounds__(kThreads, kAtOnce) images_kernel(const __grid_constant__ AttendArguments a, uint32_t group) {
  extern __shared__ float x[];
  const Plan plan = *a.plan;
  const HeadGroup heads(plan, a, group);
  const Images images(plan, P);
  for (uint32_t i = blockIdx.x; i < plan.tiles * heads.count * 2; i += gridDim.x) {
    const uint32_t tensor = i % 2, head = i / 2 % heads.count, index = i / 2 / heads.count;
    const SequenceEntry &sequence = find_sequence(plan, index);
    const TilePart part = find_part(plan, sequence, index - sequence.first_tile);
    if (!is_seen(sequence, part, a.window)) continue;
    make_images(Tile<P>{part, heads.first + head, tensor, tensor ? a.dim_v : a.dim_k, part_format(sequence, part.kind, heads.first + head, tensor),
                        {a.kv_heads, a.dim_k, a.dim_v}, x, images.at(head, index, tensor ? Image::values : Image::keys),
                        images.at(head, index, Image::keys_low), images.scales(head, index) + tensor});
  }
}

template <int P>
cudaError_t launch(const AttendArguments &a, uint32_t group, uint32_t processors, cudaStream_t stream) {
  constexpr uint32_t kBytes = kTile * Tile<P>::kStride * sizeof(float);
  const cudaError_t error = cudaFuncSetAttribute(images_kernel<P>, cudaFuncAttributeMaxDynamicSharedMemorySize, int(kBytes));
  if (error != cudaSuccess) return error;
  images_kernel<P><<<processors * kAtOnce, kThreads, kBytes, stream>>>(a, group);
  return cudaGetLastError();
}

}  // namespace

cudaError_t make_images(const AttendArguments &arguments, uint32_t group, uint32_t processors, cudaStream_t stream) {
  const uint32_t panels = prompt_panels(arguments.dim_k, arguments.dim_v);
  return panels == 1 ? launch<1>(arguments, group, processors, stream) : panels == 2 ? launch<2>(arguments, group, processors, stream)
                                                                                     : launch<4>(arguments, group, processors, stream);
}

}  // namespace kvq::cuda
