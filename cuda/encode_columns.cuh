// Column codecs: rule 2.1 over the tokens of a group for each slot, bit for bit as in src/codec.  Compiled without contraction.
#pragma once
#include <cuda_fp16.h>

#include "codec/affine.h"
#include "codec/row_rules.h"
#include "cuda/tile.cuh"
#include "util/polar.h"

namespace kvq::cuda {

// A thread has two neighbours of the rows, every so many tokens: `parts` threads share a pair.
struct Columns {
  uint16_t *place, *slot;  // [dim] of a slot in a row, and back
  float4 *coder;           // [2 * pairs] by place: zero, step, 1 / step, top.  Kitty: before them, the sums
  __half2 *low, *high;     // [parts][pairs]
  uint32_t dim, pairs, parts;
  static KVQ_HD uint32_t pairs_of(uint32_t dim) { return (dim + 1) / 2; }
  static KVQ_HD uint32_t table_bytes(uint32_t dim) { return (4 * dim + 15) / 16 * 16; }
  static KVQ_HD uint32_t bytes(uint32_t dim, uint32_t threads) {
    const uint32_t pairs = pairs_of(dim);
    return table_bytes(dim) + 2 * pairs * uint32_t(sizeof(float4)) + 2 * (threads > pairs ? threads : pairs) * uint32_t(sizeof(__half2));
  }
  __device__ explicit Columns(const Tile &tile)
      : place(reinterpret_cast<uint16_t *>(tile.work)), slot(place + tile.f.dim), coder(reinterpret_cast<float4 *>(tile.work + table_bytes(tile.f.dim))),
        low(reinterpret_cast<__half2 *>(coder + 2 * pairs_of(tile.f.dim))), dim(tile.f.dim), pairs(pairs_of(dim)), parts(max(1u, blockDim.x / pairs)) {
    high = low + parts * pairs;
  }
  // f(pair, part) in the threads that share pairs.
  template <class F>
  __device__ void for_pairs(F &&f) const {
    if (parts == 1) {
      for (uint32_t pair = threadIdx.x; pair < pairs; pair += blockDim.x) f(pair, 0u);
    } else if (threadIdx.x < parts * pairs) {
      f(threadIdx.x % pairs, threadIdx.x / pairs);
    }
  }
};

// Two neighbours of a row.
__device__ inline __half2 load_pair(const Tile &tile, uint32_t row, uint32_t pair) { return reinterpret_cast<const __half2 *>(tile.row(row))[pair]; }

// Where the value of a slot lies in a row.  Polar: radii where u was, angles where v was.
__device__ inline uint32_t slot_place(const TensorFormat &f, uint32_t slot) {
  if (f.family != Family::polar) return raw_place(f.dim, f.channel[slot]);
  const uint32_t half = f.dim / 2;
  return raw_place(f.dim, f.channel[slot < half ? 2 * slot : 2 * (slot - half) + 1]);
}

__device__ inline void to_polar(const Tile &tile) {
  const TensorFormat &f = tile.f;
  for (uint32_t i = threadIdx.x; i < tile.count * (f.dim / 2); i += blockDim.x) {
    const uint32_t pair = i % (f.dim / 2);
    uint16_t *x = tile.raw + size_t(i / (f.dim / 2)) * tile.raw_stride;
    uint16_t &first = x[raw_place(f.dim, f.channel[2 * pair])], &second = x[raw_place(f.dim, f.channel[2 * pair + 1])];
    const float u = widen(first), v = widen(second);
    first = float_to_half(sqrtf(u * u + v * v)), second = float_to_half(polar_angle(u, v));
  }
  __syncthreads();
}

// Kitty: is the channel among the `count` largest sums, ties to the lower?
__device__ inline bool is_boosted(const unsigned long long *sums, uint32_t dim, uint32_t channel, uint32_t count) {
  uint32_t before = 0;
  for (uint32_t c = 0; c < dim; c++) before += sums[c] > sums[channel] || (sums[c] == sums[channel] && c < channel);
  return before < count;
}

// Position bytes of a group: the number of boosted channels before this one, or 0xFF.
__device__ inline void choose_boosted(const Tile &tile, const Columns &columns, uint32_t from, uint8_t *positions) {
  const TensorFormat &f = tile.f;
  unsigned long long *sums = reinterpret_cast<unsigned long long *>(columns.coder);
  for (uint32_t c = threadIdx.x; c < f.dim; c += blockDim.x) sums[c] = 0;
  __syncthreads();
  columns.for_pairs([&](uint32_t pair, uint32_t part) {
    unsigned long long sum[2] = {};
    for (uint32_t t = part; t < f.group; t += columns.parts) {
      const __half2 two = load_pair(tile, from + t, pair);
      sum[0] += magnitude(__half_as_ushort(__low2half(two))), sum[1] += magnitude(__half_as_ushort(__high2half(two)));
    }
    for (uint32_t i = 0; i < 2 && 2 * pair + i < f.dim; i++) atomicAdd(sums + columns.slot[2 * pair + i], sum[i]);
  });
  __syncthreads();
  bool *boosted = reinterpret_cast<bool *>(sums + f.dim);
  for (uint32_t c = threadIdx.x; c < f.dim; c += blockDim.x) boosted[c] = is_boosted(sums, f.dim, c, f.boosted);
  __syncthreads();
  for (uint32_t c = threadIdx.x; c < f.dim; c += blockDim.x) {
    uint32_t position = 0;
    for (uint32_t lower = 0; lower < c; lower++) position += boosted[lower];
    positions[c] = boosted[c] ? uint8_t(position) : uint8_t(0xff);
  }
  __syncthreads();
}

struct ColumnRule {
  uint32_t levels;
  bool midpoint;
  __device__ ColumnRule(const TensorFormat &f, uint32_t slot, const uint8_t *positions) {
    levels = positions ? (positions[slot] == 0xff ? 4 : 16) : f.region[region_of(f, slot)].levels;
    midpoint = f.midpoint && !(f.high_plain && levels == 8);
  }
};

// Rows [from, from + group) of the tile: the extremes of pairs, parameters of slots, codes of pairs.
__device__ inline void encode_group(const Tile &tile, const Columns &columns, uint32_t from) {
  const TensorFormat &f = tile.f;
  const uint32_t group = (tile.first + from) / f.group, tokens = f.group;
  const ParamType type = ParamType(f.param_type);
  uint8_t *positions = f.positions ? tile.blob + positions_of(f, group) : nullptr;
  if (positions) choose_boosted(tile, columns, from, positions);
  columns.for_pairs([&](uint32_t pair, uint32_t part) {
    __half2 mn = load_pair(tile, from, pair), mx = mn;
#pragma unroll 4
    for (uint32_t t = part; t < tokens; t += columns.parts) {
      const __half2 two = load_pair(tile, from + t, pair);
      mn = __hmin2(mn, two), mx = __hmax2(mx, two);
    }
    columns.low[part * columns.pairs + pair] = mn, columns.high[part * columns.pairs + pair] = mx;
  });
  __syncthreads();
  for (uint32_t slot = threadIdx.x; slot < columns.dim; slot += blockDim.x) {
    const uint32_t place = columns.place[slot];
    const __half *low = reinterpret_cast<const __half *>(columns.low) + place, *high = reinterpret_cast<const __half *>(columns.high) + place;
    float mn = __half2float(*low), mx = __half2float(*high);
    for (uint32_t p = 1; p < columns.parts; p++) mn = fminf(mn, __half2float(low[2 * p * columns.pairs])), mx = fmaxf(mx, __half2float(high[2 * p * columns.pairs]));
    const ColumnRule rule(f, slot, positions);
    const AffineParams stored = affine_params<round_param>(mn, mx, rule.levels, rule.midpoint, type);
    const AffineCoder coder = affine_coder<widen_param>(stored, rule.levels, type);
    columns.coder[place] = make_float4(coder.zero, coder.step, 1.0f / coder.step, coder.top);
    tile.store_param(column_param(f, 2 * (group * f.dim + slot)), stored.s);
    tile.store_param(column_param(f, 2 * (group * f.dim + slot) + 1), stored.z);
  }
  __syncthreads();
  columns.for_pairs([&](uint32_t pair, uint32_t part) {
    const bool both = 2 * pair + 1 < columns.dim;
    const float4 a = columns.coder[2 * pair], b = columns.coder[2 * pair + both];
    uint8_t *to = tile.codes_of(tile.first + from);
    uint8_t *first = to + columns.slot[2 * pair], *second = to + columns.slot[2 * pair + both];
#pragma unroll 4
    for (uint32_t t = part; t < tokens; t += columns.parts) {
      const float2 x = __half22float2(load_pair(tile, from + t, pair));
      second[size_t(t) * tile.code_stride] = uint8_t(affine_code_fast(x.y, b.x, b.y, b.z, b.w));  // alone: first writes it again
      first[size_t(t) * tile.code_stride] = uint8_t(affine_code_fast(x.x, a.x, a.y, a.z, a.w));
    }
  });
  __syncthreads();
}

class ColumnCodes {
 public:
  static constexpr uint32_t kCodings = kPlaneBits, kBlocks = 4;
  static constexpr bool kInPlace = false;
  __device__ explicit ColumnCodes(const Tile &tile) : columns_(tile) {
    for (uint32_t slot = threadIdx.x; slot < tile.f.dim; slot += blockDim.x) {
      const uint32_t place = slot_place(tile.f, slot);
      columns_.place[slot] = uint16_t(place), columns_.slot[place] = uint16_t(slot);
    }
    __syncthreads();
  }
  __device__ void encode(const Tile &tile) const {
    if (tile.f.family == Family::polar) to_polar(tile);
    for (uint32_t from = 0; from < tile.count; from += tile.f.group) encode_group(tile, columns_, from);
  }

 private:
  Columns columns_;
};

}  // namespace kvq::cuda
