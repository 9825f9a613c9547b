// Row codecs: rules 2.1 and 2.2 with the rotation of section 3, bit for bit as in src/codec.  Compiled without contraction.
//
// Rows whose dimension is a power of two, with one class of slots in channel order, stay in registers: a lane has 32 consecutive
// channels, so that most steps of a butterfly or a tree need no other lane, and come from where they lie.  All others are a warp's work
// in shared memory.
#pragma once
#include <cmath>

#include "codec/affine.h"
#include "codec/row_rules.h"
#include "cuda/butterfly.cuh"
#include "cuda/tile.cuh"

namespace kvq::cuda {

// ---- rows in registers

constexpr uint32_t kLane = 32;  // channels of a lane

struct LaneRow {
  uint32_t lanes, lane;  // of a row; this thread's among them
  float y[kLane];
};

KVQ_HD inline bool fits_registers(const TensorFormat &f) {
  const bool plain = f.kind == uint8_t(Kind::lloyd) || f.kind == uint8_t(Kind::affine_token) || f.kind == uint8_t(Kind::progressive);
  if (!plain || f.dim % kLane || (f.dim & (f.dim - 1)) || f.dim > 32 * kLane) return false;
  if (f.family == Family::rows_affine) return f.channel_group % kLane == 0;
  const ScaleRule rule = ScaleRule(f.scale_rule);
  return f.family == Family::rows_book && f.region[0].levels <= 16 && (rule == ScaleRule::matched || rule == ScaleRule::plain);
}

// float(1 / sqrt(dim)) of a power of two.
__device__ inline float inverse_root(uint32_t dim) {
  const uint32_t power = 31 - __clz(dim);
  return __uint_as_float((127 - (power + 1) / 2) << 23) * (power % 2 ? 0x1.6a09e6p+0f : 1.0f);  // sqrt(2), as 1 / sqrt(2) is rounded
}

// The signs of pass 0 for the channels of a lane, and c(dim).
struct LaneRotation {
  uint32_t signs[kLane / 2] = {};  // of channels r + 16 k and r + 16 k + 8, in the sign bits of the halves of word 2 r + k
  float c = 1;
  __device__ explicit LaneRotation(const TensorFormat &f) {
    if (!f.rotate) return;
    const uint32_t lane = threadIdx.x % (f.dim / kLane);
    const uint32_t bits = uint32_t(splitmix64(sign_seed(f.seed, f.tensor, 0, f.region[0].rotation) ^ lane / 2) >> lane % 2 * 32);
#pragma unroll
    for (uint32_t i = 0; i < kLane / 2; i++) signs[i] = (bits >> (i / 2 + i % 2 * 16) & 1u) << 15 | (bits >> (i / 2 + i % 2 * 16 + 8) & 1u) << 31;
    c = inverse_root(f.dim);
  }
};

// A row with the rotation's signs, which change no square and no tree of them.  The channels of a lane lie in eight pairs of words:
// raw_place puts channels c, c + 8, c + 16 and c + 24 side by side.
__device__ inline void load_row(const TensorFormat &f, const LaneRotation &rotation, const uint16_t *x, LaneRow *row) {
  const uint2 *words = reinterpret_cast<const uint2 *>(x) + row->lane;
#pragma unroll
  for (uint32_t r = 0; r < 8; r++) {
    const uint2 four = words[r * (f.dim / kLane)];
    const uint32_t low = four.x ^ rotation.signs[2 * r], high = four.y ^ rotation.signs[2 * r + 1];
    row->y[r] = widen(uint16_t(low)), row->y[r + 8] = widen(uint16_t(low >> 16));
    row->y[r + 16] = widen(uint16_t(high)), row->y[r + 24] = widen(uint16_t(high >> 16));
  }
  if (!f.mu) return;
  const uint16_t *mu = f.mu + row->lane * kLane;
#pragma unroll
  for (uint32_t r = 0; r < 8; r++)
#pragma unroll
    for (uint32_t k = 0; k < 4; k++) row->y[r + 8 * k] -= widen(uint16_t(mu[r + 8 * k] ^ rotation.signs[2 * r + k / 2] >> k % 2 * 16));
}

// tree() of section 1.3: neighbours first.
__device__ inline float tree(const LaneRow &row, float (&v)[kLane]) {
#pragma unroll
  for (uint32_t d = 1; d < kLane; d *= 2)
#pragma unroll
    for (uint32_t i = 0; i < kLane; i += 2 * d) v[i] = v[i] + v[i + d];
  float sum = v[0];
  for (uint32_t d = 1; d < row.lanes; d *= 2) sum += __shfl_xor_sync(~0u, sum, d);
  return sum;
}

// The butterfly of a row that has its signs.
__device__ inline void rotate(const LaneRotation &rotation, LaneRow *row) {
  float(&y)[kLane] = row->y;
  butterfly(y);
  for (uint32_t d = 1; d < row->lanes; d *= 2) {
    const float own = row->lane & d ? -1.0f : 1.0f;  // the upper one's part is a - b; a product with 1 is exact
#pragma unroll
    for (uint32_t i = 0; i < kLane; i++) y[i] = fmaf(y[i], own, __shfl_xor_sync(~0u, y[i], d));
  }
#pragma unroll
  for (uint32_t i = 0; i < kLane; i++) y[i] *= rotation.c;
}

// Adds the number of thresholds below y, which ascend, to byte `byte` of *codes: each comparison chooses the half that is left.
template <uint32_t kBits>
__device__ void add_below(const float (&threshold)[(1u << kBits) - 1], float y, uint32_t byte, uint32_t *codes) {
  constexpr uint32_t kHalf = 1u << (kBits - 1);
  const bool high = y > threshold[kHalf - 1];
  if (high) *codes |= kHalf << 8 * byte;
  if constexpr (kBits > 1) {
    float left[kHalf - 1];
#pragma unroll
    for (uint32_t i = 0; i < kHalf - 1; i++) left[i] = high ? threshold[kHalf + i] : threshold[i];
    add_below<kBits - 1>(left, y, byte, codes);
  }
}

// Bytes as selectors of __byte_perm.
__device__ inline uint32_t selectors(uint32_t bytes) {
  bytes |= bytes >> 4;
  return (bytes & 0xff) | (bytes >> 8 & 0xff00);
}

// Codes as bytes, four to a word.
template <uint32_t kCodes>
__device__ void store_codes(uint8_t *to, const uint32_t (&code)[kCodes]) {
  const auto four = [&](uint32_t i) { return __byte_perm(__byte_perm(code[i], code[i + 1], 0x0040), __byte_perm(code[i + 2], code[i + 3], 0x0040), 0x5410); };
#pragma unroll
  for (uint32_t i = 0; i < kCodes; i += 16) *reinterpret_cast<uint4 *>(to + i) = make_uint4(four(i), four(i + 4), four(i + 8), four(i + 12));
}

// Codes of a lane's channels, four to a word.
__device__ inline void store_lane(const Tile &tile, const LaneRow &row, uint32_t i, const uint32_t (&codes)[kLane / 4]) {
  uint4 *to = reinterpret_cast<uint4 *>(tile.codes_of(tile.first + i) + row.lane * kLane);
  to[0] = make_uint4(codes[0], codes[1], codes[2], codes[3]), to[1] = make_uint4(codes[4], codes[5], codes[6], codes[7]);
}

// f(row, its number, whether it is one) for the rows of a tile, whose warps take them in turn, from where they lie.
template <class F>
__device__ void for_lane_rows(const Tile &tile, const LaneRotation &rotation, F &&f) {
  const uint32_t lanes = tile.f.dim / kLane, rows = 32 / lanes, warp = threadIdx.x / 32;
  LaneRow row;
  row.lanes = lanes, row.lane = threadIdx.x % lanes;
  for (uint32_t first = warp * rows; first < tile.count; first += blockDim.x / 32 * rows) {
    const uint32_t i = first + threadIdx.x % 32 / lanes;
    load_row(tile.f, rotation, tile.row_in_place(min(i, tile.count - 1)), &row);
    f(row, i, i < tile.count);
  }
}

// How the codes of a book are found.  Up to four levels: by their thresholds.  More: books are antisymmetric, so |y| is compared with
// the positive thresholds.  A threshold itself belongs to the code below it: where y <= 0, |y| = t counts as beyond it, by the number
// next to |y|.  `index` is 2^kBits * (y > 0) + the number of thresholds passed; levels and codes are tables of it.
template <uint32_t kBits, bool kFolded>
struct BookSearch {
  static constexpr uint32_t kThresholds = (1u << kBits) - 1, kEntries = kFolded ? 2u << kBits : 1u << kBits;
  float unit[kThresholds];        // thresholds of a standard normal distribution; infinite where there are fewer
  uint32_t magnitude[2], code[2];  // by index, bytes of two words
  __device__ explicit BookSearch(const DeviceBook &book) {
    const uint32_t levels = book.levels, first = kFolded ? levels / 2 : 0;  // of the thresholds
#pragma unroll
    for (uint32_t j = 0; j < kThresholds; j++) unit[j] = first + j + 1 < levels ? book.threshold[first + j] : INFINITY;
    magnitude[0] = magnitude[1] = code[0] = code[1] = 0;
    for (uint32_t i = 0; i < 8; i++) {
      const uint32_t passed = i & kThresholds, above = levels / 2 + passed, below = (levels - 1) / 2 - passed;
      const uint32_t c = !kFolded ? i : i > kThresholds || kEntries > 8 ? above : below;
      if (c < levels) magnitude[i / 4] |= uint32_t(abs(book.level[c])) << 8 * (i % 4), code[i / 4] |= c << 8 * (i % 4);
    }
  }
  // Index of y, added to a byte.
  __device__ static void add_index(const float (&threshold)[kThresholds], float y, uint32_t byte, uint32_t *index) {
    if constexpr (kFolded) {
      const bool positive = y > 0.0f;
      if (positive) *index |= (kThresholds + 1) << 8 * byte;
      y = __uint_as_float((__float_as_uint(y) & 0x7fffffffu) + (positive ? 0 : 1));
    }
    add_below<kBits>(threshold, y, byte, index);
  }
  // Four indices to codes; adds their squared levels.
  __device__ uint32_t codes(uint32_t index, uint32_t *squares) const {
    const uint32_t select = selectors(kEntries > 8 ? index & 0x07070707u : index);
    const uint32_t magnitudes = __byte_perm(magnitude[0], magnitude[1], select);
    *squares = __dp4a(magnitudes, magnitudes, *squares);
    if constexpr (!kFolded) return index;
    if constexpr (kEntries > 8) return index ^ 0x07070707u ^ (index >> 3 & 0x01010101u) * 7;  // 16 levels: 8 + m, or 7 - m
    return __byte_perm(code[0], code[1], select);
  }
};

// Norm and sum of squares of each row, for the scales, which one thread a row computes behind all codes.
struct RowSums {
  float *norm;
  uint32_t *squares;
  __device__ explicit RowSums(const Tile &tile) : norm(reinterpret_cast<float *>(tile.work)), squares(reinterpret_cast<uint32_t *>(norm + tile.f.page_tokens)) {}
  static KVQ_HD uint32_t bytes(uint32_t page_tokens) { return 8 * page_tokens; }
};

template <uint32_t kBits, bool kFolded>
class BookRows {
 public:
  static constexpr uint32_t kCodings = kBits == 3 ? kNibbles : kNibbles | kRadix, kBlocks = 3;
  static constexpr bool kInPlace = true;
  __device__ explicit BookRows(const Tile &tile)
      : rotated_(tile.f.rotate), factor_(inverse_root(tile.f.dim)), scale_(tile.f.region[0].book->scale), rotation_(tile.f),
        search_(*tile.f.region[0].book), sums_(tile) {}
  __device__ void encode(const Tile &tile) const {
    for_lane_rows(tile, rotation_, [&](LaneRow &row, uint32_t i, bool real) { encode_row(tile, row, i, real); });
    __syncthreads();
    const TensorFormat &f = tile.f;
    for (uint32_t i = threadIdx.x; i < tile.count; i += blockDim.x) {
      const float n = sums_.norm[i], h = row_scale(ScaleRule(f.scale_rule), scale_, n, n * factor_, sums_.squares[i], 0);
      tile.store_param(row_param(f, tile.first + i, 0), round_param(h, ParamType(f.param_type)));
    }
  }

 private:
  using Search = BookSearch<kBits, kFolded>;
  __device__ void encode_row(const Tile &tile, LaneRow &row, uint32_t i, bool real) const {
    float v[kLane];
#pragma unroll
    for (uint32_t j = 0; j < kLane; j++) v[j] = row.y[j] * row.y[j];
    const float n = sqrtf(tree(row, v)), sigma = n * factor_;
    if (rotated_) rotate(rotation_, &row);
    float threshold[Search::kThresholds];
#pragma unroll
    for (uint32_t j = 0; j < Search::kThresholds; j++) threshold[j] = search_.unit[j] * sigma;  // infinity or NaN: never below y
    uint32_t index[kLane / 4] = {}, squares = 0;
#pragma unroll
    for (uint32_t j = 0; j < kLane; j++) Search::add_index(threshold, row.y[j], j % 4, index + j / 4);
#pragma unroll
    for (uint32_t j = 0; j < kLane / 4; j++) index[j] = search_.codes(index[j], &squares);
    for (uint32_t d = 1; d < row.lanes; d *= 2) squares += __shfl_xor_sync(~0u, squares, d);
    if (!real) return;
    store_lane(tile, row, i, index);
    if (row.lane == 0) sums_.norm[i] = n, sums_.squares[i] = squares;
  }
  bool rotated_;
  float factor_, scale_;
  LaneRotation rotation_;
  Search search_;
  RowSums sums_;
};

// Rule 2.1 with stored codes of the chain 8 -> 4 -> 2 bits where the codec is progressive.
struct AffineRule {
  uint32_t levels, progressive;
  __device__ explicit AffineRule(const TensorFormat &f) : levels(f.progressive ? 256 : f.region[0].levels), progressive(f.progressive) {}
  __device__ uint32_t shrunk(uint32_t code) const {
    if (progressive && progressive <= 16) code = shrink_code(uint8_t(code), 17);
    if (progressive && progressive <= 4) code = shrink_code(uint8_t(code), 5);
    return code;
  }
  __device__ uint16_t scale(uint16_t s) const {
    if (progressive && progressive <= 16) s = shrink_scale(s, 17);
    if (progressive && progressive <= 4) s = shrink_scale(s, 5);
    return s;
  }
};

class AffineRows {
 public:
  static constexpr uint32_t kCodings = kPlaneBits | kCrumbs | kFields | kRadix, kBlocks = 3;
  static constexpr bool kInPlace = true;
  __device__ explicit AffineRows(const Tile &tile) : rotated_(tile.f.rotate), group_lanes_(tile.f.channel_group / kLane), rule_(tile.f), rotation_(tile.f) {}
  __device__ void encode(const Tile &tile) const {
    for_lane_rows(tile, rotation_, [&](LaneRow &row, uint32_t i, bool real) { encode_row(tile, row, i, real); });
  }

 private:
  __device__ void encode_row(const Tile &tile, LaneRow &row, uint32_t i, bool real) const {
    const TensorFormat &f = tile.f;
    if (rotated_) rotate(rotation_, &row);
    float mn = row.y[0], mx = mn;
#pragma unroll
    for (uint32_t j = 1; j < kLane; j++) mn = fminf(mn, row.y[j]), mx = fmaxf(mx, row.y[j]);
    for (uint32_t d = 1; d < group_lanes_; d *= 2) mn = fminf(mn, __shfl_xor_sync(~0u, mn, d)), mx = fmaxf(mx, __shfl_xor_sync(~0u, mx, d));
    const AffineParams stored = affine_params<round_param>(mn, mx, rule_.levels, false, ParamType::fp16);
    const AffineCoder coder = affine_coder<widen_param>(stored, rule_.levels, ParamType::fp16);
    const float inverse = 1.0f / coder.step;
    uint32_t codes[kLane / 4] = {};  // four to a word
#pragma unroll
    for (uint32_t j = 0; j < kLane; j++) codes[j / 4] += affine_code_fast(row.y[j], coder.zero, coder.step, inverse, coder.top) << 8 * (j % 4);
    if (rule_.progressive) {
#pragma unroll
      for (uint32_t j = 0; j < kLane / 4; j++) {
        const uint32_t four = codes[j];
        codes[j] = 0;
#pragma unroll
        for (uint32_t byte = 0; byte < 4; byte++) codes[j] |= rule_.shrunk(four >> 8 * byte & 0xff) << 8 * byte;
      }
    }
    if (!real) return;
    store_lane(tile, row, i, codes);
    if (row.lane % group_lanes_) return;
    const uint32_t param = 2 * (row.lane / group_lanes_);
    tile.store_param(row_param(f, tile.first + i, param), rule_.scale(stored.s));
    tile.store_param(row_param(f, tile.first + i, param + 1), stored.z);
  }
  bool rotated_;
  uint32_t group_lanes_;
  AffineRule rule_;
  LaneRotation rotation_;
};

// ---- rows of any shape: a warp's, in shared memory

struct WarpRow {
  float *y, *v;  // [dim] each: the row, and terms of sums
  uint32_t lane;
};

// tree() over v[0..n), which is overwritten.
__device__ inline float tree(const WarpRow &row, uint32_t n) {
  for (uint32_t d = 1, shift = 1; d < n; d *= 2, shift++) {
    __syncwarp();
    for (uint32_t i = row.lane << shift; i < n; i += 32u << shift) row.v[i] = row.v[i] + (i + d < n ? row.v[i + d] : 0.0f);
  }
  __syncwarp();
  const float sum = row.v[0];
  __syncwarp();
  return sum;
}

__device__ inline void rotate(const WarpRow &row, const TensorFormat &f, const Region &region) {
  const uint32_t width = region.count, power = 1u << (31 - __clz(width));
  const float c = float(1.0 / sqrt(double(power)));
  for (uint32_t q = 0; q < (power == width ? 1u : 2u); q++) {
    const uint64_t seed = sign_seed(f.seed, f.tensor, q, region.rotation);
    __syncwarp();
    uint64_t signs = 0;
    for (uint32_t i = row.lane; i < width; i += 32) {
      if (i % 64 == row.lane) signs = splitmix64(seed ^ i / 64);
      row.y[i] *= signs >> i % 64 & 1u ? -1.0f : 1.0f;
    }
    float *y = row.y + (q ? width - power : 0);
    for (uint32_t d = 1, shift = 0; d < power; d *= 2, shift++) {
      __syncwarp();
      for (uint32_t i = row.lane; i < power / 2; i += 32) {
        float *at = y + (i >> shift << (shift + 1)) + (i & (d - 1));
        const float a = at[0], b = at[d];
        at[0] = a + b, at[d] = a - b;
      }
    }
    __syncwarp();
    for (uint32_t i = row.lane; i < power && power > 1; i += 32) y[i] *= c;
  }
  __syncwarp();
}

__device__ inline void load_row(const WarpRow &row, const TensorFormat &f, const Region &region, const uint16_t *x) {
  __syncwarp();
  for (uint32_t j = row.lane; j < region.count; j += 32) {
    const uint32_t channel = f.channel[region.first + j];
    const float value = widen(x[raw_place(f.dim, channel)]);
    row.y[j] = f.mu ? value - widen(f.mu[channel]) : value;
  }
  __syncwarp();
}

__device__ inline uint64_t warp_sum(uint64_t n) {
  for (int d = 16; d; d /= 2) n += __shfl_xor_sync(~0u, n, d);
  return n;
}

// Number of thresholds t_j * sigma below y: they ascend, so a search finds it.
__device__ inline uint32_t book_code(const DeviceBook &book, float sigma, float y) {
  uint32_t low = 0, high = book.levels - 1;
  while (low < high) {
    const uint32_t middle = (low + high) / 2;
    if (y > book.threshold[middle] * sigma)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

__device__ inline void encode_book(const WarpRow &row, const Tile &tile, uint32_t r, uint32_t i) {
  const TensorFormat &f = tile.f;
  const Region &region = f.region[r];
  const DeviceBook &book = *region.book;
  uint8_t *codes = tile.codes_of(tile.first + i) + region.first;
  load_row(row, f, region, tile.row(i));
  for (uint32_t j = row.lane; j < region.count; j += 32) row.v[j] = row.y[j] * row.y[j];
  const float n = sqrtf(tree(row, region.count)), sigma = n * float(1.0 / sqrt(double(region.count)));
  if (f.rotate) rotate(row, f, region);
  uint64_t s = 0;
  for (uint32_t j = row.lane; j < region.count; j += 32) {
    const uint32_t code = book_code(book, sigma, row.y[j]);
    const int32_t m = book.level[code];
    s += uint64_t(int64_t(m) * m);
    row.v[j] = row.y[j] * float(m);
    codes[j] = uint8_t(code);
  }
  s = warp_sum(s);
  const ScaleRule rule = ScaleRule(f.scale_rule);
  const float p = rule == ScaleRule::ls || rule == ScaleRule::unbiased ? tree(row, region.count) : 0.0f;
  if (row.lane == 0)
    tile.store_param(row_param(f, tile.first + i, r), store_param(row_scale(rule, book.scale, n, sigma, s, p), ParamType(f.param_type)));
}

__device__ inline void encode_affine(const WarpRow &row, const Tile &tile, uint32_t i) {
  const TensorFormat &f = tile.f;
  const AffineRule rule(f);
  uint8_t *codes = tile.codes_of(tile.first + i);
  load_row(row, f, f.region[0], tile.row(i));
  if (f.rotate) rotate(row, f, f.region[0]);
  for (uint32_t first = 0, param = 0; first < f.dim; first += f.channel_group, param += 2) {
    float mn = row.y[first], mx = mn;
    for (uint32_t j = row.lane; j < f.channel_group; j += 32) mn = fminf(mn, row.y[first + j]), mx = fmaxf(mx, row.y[first + j]);
    for (int d = 16; d; d /= 2) mn = fminf(mn, __shfl_xor_sync(~0u, mn, d)), mx = fmaxf(mx, __shfl_xor_sync(~0u, mx, d));
    const AffineParams stored = affine_params(mn, mx, rule.levels, false, ParamType::fp16);
    const AffineCoder coder = affine_coder(stored, rule.levels, ParamType::fp16);
    const float inverse = 1.0f / coder.step;
    for (uint32_t j = row.lane; j < f.channel_group; j += 32)
      codes[first + j] = uint8_t(rule.shrunk(affine_code_fast(row.y[first + j], coder.zero, coder.step, inverse, coder.top)));
    if (row.lane) continue;
    tile.store_param(row_param(f, tile.first + i, param), rule.scale(stored.s));
    tile.store_param(row_param(f, tile.first + i, param + 1), stored.z);
  }
}

class GeneralRows {
 public:
  static constexpr uint32_t kCodings = kAllCodings, kBlocks = 3;
  static constexpr bool kInPlace = false;
  __device__ explicit GeneralRows(const Tile &) {}
  static KVQ_HD uint32_t bytes(uint32_t dim, uint32_t threads) { return threads / 32 * 2 * dim * uint32_t(sizeof(float)); }
  __device__ void encode(const Tile &tile) const {
    const TensorFormat &f = tile.f;
    float *memory = reinterpret_cast<float *>(tile.work) + size_t(threadIdx.x / 32) * 2 * f.dim;
    const WarpRow row{memory, memory + f.dim, threadIdx.x % 32};
    for (uint32_t i = threadIdx.x / 32; i < tile.count; i += blockDim.x / 32) {
      if (f.family == Family::rows_affine)
        encode_affine(row, tile, i);
      else
        for (uint32_t r = 0; r < f.regions; r++) encode_book(row, tile, r, i);
    }
  }
};

// Rows of a page are those of the tile.
class RawRows {
 public:
  static constexpr uint32_t kCodings = 0, kBlocks = 4;
  static constexpr bool kInPlace = true;
  __device__ explicit RawRows(const Tile &) {}
  __device__ void encode(const Tile &tile) const {
    const TensorFormat &f = tile.f;
    uint8_t *to = tile.blob + f.params + size_t(tile.first) * f.dim * 2;
    if (f.dim % 8 || f.params % 16) {
      for (uint32_t i = threadIdx.x; i < tile.count * f.dim; i += blockDim.x)
        reinterpret_cast<uint16_t *>(to)[i] = tile.row_in_place(i / f.dim)[i % f.dim];
      return;
    }
    const uint32_t pieces = f.dim / 8;
    for (uint32_t i = threadIdx.x; i < tile.count * pieces; i += blockDim.x)
      reinterpret_cast<uint4 *>(to)[i] = reinterpret_cast<const uint4 *>(tile.row_in_place(i / pieces))[i % pieces];
  }
};

}  // namespace kvq::cuda
