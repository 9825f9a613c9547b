// Codes of a tile into the bytes of its page.
#pragma once
#include "cuda/tile.cuh"

namespace kvq::cuda {

// Codes of the page's other rows: those before are kept, those behind become 0.
__device__ inline void load_others(const Tile &tile) {
  const TensorFormat &f = tile.f;
  for (uint32_t i = threadIdx.x; i < f.page_tokens * f.dim; i += blockDim.x) {
    const uint32_t token = i / f.dim, slot = i % f.dim;
    if (token >= tile.first && token < tile.first + tile.count) continue;
    tile.codes_of(token)[slot] = token < tile.first ? uint8_t(page_code(f, tile.blob, region_of(f, slot), token, slot)) : uint8_t(0);
  }
}

// ---- streams

// Eight words of a stream are `bits` bytes: the work of one thread.
__device__ inline void place_stream(const Tile &tile, const Region &region, uint32_t mask) {
  const TensorFormat &f = tile.f;
  const uint32_t total = f.page_tokens * region.count, per_unit = 8 * region.digits, units = (total + per_unit - 1) / per_unit;
  uint8_t *stream = tile.blob + f.codes + region.offset;
  for (uint32_t unit = threadIdx.x; unit < units; unit += blockDim.x) {
    uint32_t e = unit * per_unit;
    uint32_t token = f.group ? e % f.page_tokens : e / region.count, slot = f.group ? e / f.page_tokens : e % region.count;
    uint8_t *to = stream + unit * region.bits;
    uint32_t pending = 0, filled = 0;
    for (uint32_t w = 0; w < 8; w++) {
      uint32_t word = 0, weight = 1;
      for (uint32_t d = 0; d < region.digits && e < total; d++, e++) {
        word += (tile.codes_of(token)[region.first + slot] & mask) * weight;
        weight *= region.levels;
        if (f.group) {
          if (++token == f.page_tokens) token = 0, slot++;
        } else {
          if (++slot == region.count) slot = 0, token++;
        }
      }
      pending |= word << filled;
      for (filled += region.bits; filled >= 8; filled -= 8, pending >>= 8) *to++ = uint8_t(pending);
    }
  }
}

// Kitty: the upper two bits of boosted channels, whole groups.
__device__ inline void place_upper(const Tile &tile) {
  const TensorFormat &f = tile.f;
  const uint32_t groups = tile.count / f.group, quads = f.group / 4;
  for (uint32_t i = threadIdx.x; i < groups * f.dim * quads; i += blockDim.x) {
    const uint32_t channel = i / quads % f.dim, group = tile.first / f.group + i / (quads * f.dim), quad = i % quads;
    const uint32_t position = tile.blob[f.positions + group * f.dim + channel];
    if (position == 0xff) continue;
    uint32_t byte = 0;
    for (uint32_t k = 0; k < 4; k++) byte |= uint32_t(tile.codes_of(group * f.group + 4 * quad + k)[channel] >> 2) << 2 * k;
    tile.blob[f.codes + f.region[1].offset + (group * f.boosted + position) * quads + quad] = uint8_t(byte);
  }
}

// ---- fragments

// One lane's words of a unit, from token `token` of the page on.
template <uint32_t kWidth, bool kBook16, bool kValues>
__device__ void place_unit(const Tile &tile, uint32_t token, uint32_t unit, uint32_t lane, uint32_t *to) {
  uint32_t words[kWidth] = {};
#pragma unroll
  for (uint32_t reg = 0; reg < 8; reg++) {
    uint32_t four = 0;
    if constexpr (kValues) {
#pragma unroll
      for (uint32_t byte = 0; byte < 4; byte++)
        four |= uint32_t(tile.codes_of(token + value_token(reg, lane, byte))[value_channel(unit, reg, lane)]) << 8 * byte;
    } else {
      four = *reinterpret_cast<const uint32_t *>(tile.codes_of(token + key_token(reg, lane)) + key_slot(unit, lane, 0));
    }
#pragma unroll
    for (uint32_t byte = 0; byte < 4; byte++) {
      const uint32_t code = stored_code(kBook16, four >> 8 * byte & 0xff);
#pragma unroll
      for (uint32_t b = 0; b < kWidth; b++) {
        const BitPlace at = code_bit(kWidth, kBook16, reg, byte, b);
        words[at.word] |= (code >> b & 1u) << at.bit;
      }
    }
  }
#pragma unroll
  for (uint32_t w = 0; w < kWidth; w++) to[lane_word(kWidth, lane, w)] = words[w];
}

template <bool kValues>
__device__ void place_unit(const Tile &tile, uint32_t token, uint32_t unit, uint32_t lane, uint32_t *to) {
  switch (tile.f.width[unit]) {
    case 0:
      return;
    case 1:
      return place_unit<1, false, kValues>(tile, token, unit, lane, to);
    case 2:
      return place_unit<2, false, kValues>(tile, token, unit, lane, to);
    case 3:
      return place_unit<3, false, kValues>(tile, token, unit, lane, to);
    case 4:
      if (tile.f.book16) return place_unit<4, true, kValues>(tile, token, unit, lane, to);
      return place_unit<4, false, kValues>(tile, token, unit, lane, to);
    case 5:
      return place_unit<5, false, kValues>(tile, token, unit, lane, to);
    default:
      return place_unit<6, false, kValues>(tile, token, unit, lane, to);
  }
}

__device__ inline void place_fragments(const Tile &tile) {
  const TensorFormat &f = tile.f;
  for (uint32_t i = threadIdx.x / 32; i < f.page_tokens / kTile * kUnits; i += blockDim.x / 32) {
    const uint32_t token = i / kUnits * kTile, unit = i % kUnits;
    if (token + kTile <= tile.first || token >= tile.first + tile.count) continue;
    uint32_t *to = reinterpret_cast<uint32_t *>(tile.blob + f.codes + i / kUnits * f.tile_stride + f.unit[unit]);
    if (f.tensor)
      place_unit<true>(tile, token, unit, threadIdx.x % 32, to);
    else
      place_unit<false>(tile, token, unit, threadIdx.x % 32, to);
  }
}

// The page's bytes; `codes` of the tile's rows are complete.
__device__ inline void place(const Tile &tile) {
  const TensorFormat &f = tile.f;
  if (f.family == Family::raw) return;
  if (tile.count < f.page_tokens) load_others(tile);
  __syncthreads();
  if (f.layout == Layout::fragments) return place_fragments(tile);
  for (uint32_t r = 0; r < (f.positions ? 1 : f.regions); r++)
    if (f.region[r].levels > 1) place_stream(tile, f.region[r], f.positions ? 3 : 0xff);
  if (f.positions) place_upper(tile);
}

}  // namespace kvq::cuda
