// Column codecs: rule 2.1 over the tokens of a group for each slot, bit for bit as in src/codec.  Compiled without contraction.
#pragma once
#include "codec/affine.h"
#include "codec/polar_rules.h"
#include "codec/row_rules.h"
#include "cuda/tile.cuh"

namespace kvq::cuda {

// Threads share the tokens of a slot: `parts` of them, slot by slot, so that neighbours read neighbours.
struct Columns {
  uint16_t *place;   // [dim] of a slot in a row
  float *low, *high; // [parts][dim]
  uint32_t dim, parts;
  __device__ explicit Columns(const Tile &tile)
      : place(reinterpret_cast<uint16_t *>(tile.work)), low(reinterpret_cast<float *>(tile.work + 4 * tile.f.dim)),
        high(low + kMaxPackThreads + tile.f.dim), dim(tile.f.dim), parts(max(1u, blockDim.x / tile.f.dim)) {}
  // f(slot, part) in the threads that share slots.
  template <class F>
  __device__ void for_slots(F &&f) const {
    if (parts == 1) {
      for (uint32_t slot = threadIdx.x; slot < dim; slot += blockDim.x) f(slot, 0u);
    } else if (threadIdx.x < parts * dim) {
      f(threadIdx.x % dim, threadIdx.x / dim);
    }
  }
};

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
  unsigned long long *sums = reinterpret_cast<unsigned long long *>(columns.low);
  for (uint32_t c = threadIdx.x; c < f.dim; c += blockDim.x) sums[c] = 0;
  __syncthreads();
  columns.for_slots([&](uint32_t slot, uint32_t part) {
    unsigned long long sum = 0;
    for (uint32_t t = part; t < f.group; t += columns.parts) sum += magnitude(tile.row(from + t)[columns.place[slot]]);
    atomicAdd(sums + slot, sum);
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

// Rows [from, from + group) of the tile.
__device__ inline void encode_group(const Tile &tile, const Columns &columns, uint32_t from) {
  const TensorFormat &f = tile.f;
  const uint32_t group = (tile.first + from) / f.group;
  const ParamType type = ParamType(f.param_type);
  uint8_t *positions = f.positions ? tile.blob + positions_of(f, group) : nullptr;
  if (positions) choose_boosted(tile, columns, from, positions);
  columns.for_slots([&](uint32_t slot, uint32_t part) {
    const uint32_t place = columns.place[slot];
    float mn = widen(tile.row(from)[place]), mx = mn;
    for (uint32_t t = part; t < f.group; t += columns.parts) {
      const float x = widen(tile.row(from + t)[place]);
      mn = fminf(mn, x), mx = fmaxf(mx, x);
    }
    columns.low[part * f.dim + slot] = mn, columns.high[part * f.dim + slot] = mx;
  });
  __syncthreads();
  columns.for_slots([&](uint32_t slot, uint32_t part) {
    const uint32_t place = columns.place[slot];
    float mn = columns.low[slot], mx = columns.high[slot];
    for (uint32_t p = 1; p < columns.parts; p++) mn = fminf(mn, columns.low[p * f.dim + slot]), mx = fmaxf(mx, columns.high[p * f.dim + slot]);
    const ColumnRule rule(f, slot, positions);
    const AffineParams stored = affine_params(mn, mx, rule.levels, rule.midpoint, type);
    const AffineCoder coder = affine_coder(stored, rule.levels, type);
    if (part == 0) {
      tile.store_param(column_param(f, 2 * (group * f.dim + slot)), stored.s);
      tile.store_param(column_param(f, 2 * (group * f.dim + slot) + 1), stored.z);
    }
    for (uint32_t t = part; t < f.group; t += columns.parts)
      tile.codes_of(tile.first + from + t)[slot] = affine_code(widen(tile.row(from + t)[place]), coder.zero, coder.step, coder.top);
  });
  __syncthreads();
}

__device__ inline void encode_columns(const Tile &tile) {
  const Columns columns(tile);
  for (uint32_t slot = threadIdx.x; slot < tile.f.dim; slot += blockDim.x) columns.place[slot] = uint16_t(slot_place(tile.f, slot));
  __syncthreads();
  if (tile.f.family == Family::polar) to_polar(tile);
  for (uint32_t from = 0; from < tile.count; from += tile.f.group) encode_group(tile, columns, from);
}

}  // namespace kvq::cuda
