// Reading one code or parameter of a packed page: any layout, one element at a time.  What is in a hurry reads fragments itself.
#pragma once
#include "codec/affine.h"
#include "codec/polar_rules.h"
#include "cuda/layout.h"
#include "cuda/rows.h"

namespace kvq::cuda {

// Digit of element e of a region's stream.
__device__ inline uint32_t stream_code(const Region &region, const uint8_t *stream, uint32_t e) {
  const uint32_t word = e / region.digits, bit = word * region.bits;
  const uint8_t *at = stream + bit / 8;
  const uint32_t raw = at[0] | uint32_t(at[1]) << 8 | uint32_t(at[2]) << 16;
  uint32_t value = raw >> bit % 8 & ((1u << region.bits) - 1);
  for (uint32_t i = e % region.digits; i; i--) value /= region.levels;
  return value % region.levels;
}

// ---- fragments: the words of one tile

// A code of a radix word: digit d of byte `byte` of word 4 * k + q, or a single (y = 15).
__device__ inline uint32_t radix_code(const uint32_t *words, uint32_t levels, uint32_t lane, uint32_t y, uint32_t q, uint32_t byte) {
  const DigitShape r = digits_of(levels);
  const auto bit = [&](BitPlace at) { return words[lane_word(r.words, lane, at.word)] >> at.bit & 1u; };
  if (y == 15) {
    uint32_t code = 0;
    for (uint32_t b = 0; b < (levels == 3 ? 2 : 3); b++) code |= bit(single_bit(levels, q, byte, b)) << b;
    return code;
  }
  const uint32_t i = 4 * (y / r.digits) + q;
  uint32_t number = 0;
  if (levels == 5 && i == 19)
    for (uint32_t b = 0; b < 7; b++) number |= bit({b, 8 * byte}) << b;
  else
    number = (words[lane_word(r.words, lane, i)] >> 8 * byte & 0xffu) >> (levels == 5 ? 1 : 0);
  for (uint32_t d = y % r.digits; d; d--) number /= levels;
  return number % levels;
}

__device__ inline uint32_t fragment_code(const TensorFormat &f, const uint8_t *blob, uint32_t token, uint32_t slot) {
  const Place p = f.tensor ? value_place(token % kTile, slot) : key_place(token % kTile, slot);
  const uint32_t *words = reinterpret_cast<const uint32_t *>(blob + f.codes + tile_offset(f, token / kTile));
  const uint32_t width = f.width[p.unit], y = 2 * p.unit + (p.reg & 1), q = p.reg / 2;
  uint32_t code = 0;
  switch (f.coding) {
    case Coding::nibbles:
      for (uint32_t b = 0; b < width; b++) {
        const BitPlace at = code_bit(width, p.reg, p.byte, b);
        code |= (words[f.unit_word[p.unit] * 32 + lane_word(width, p.lane, at.word)] >> at.bit & 1u) << b;
      }
      return plain_code(width, code);
    case Coding::planes:
      for (uint32_t plane = 0; 2 * plane < width; plane++) {
        const PlanePlace place = plane_place(f, plane, p.unit);
        const uint32_t *at = words + place.first + p.lane * place.step;
        const bool crumb = width >= 2 * plane + 2;
        const uint32_t bits = crumb ? at[p.reg / 4] >> (8 * p.byte + 2 * (p.reg % 4)) & 3u : at[0] >> (8 * p.byte + 2 * (p.reg % 4) + p.reg / 4) & 1u;
        code |= bits << 2 * plane;
      }
      return code;
    case Coding::crumbs:
      return words[y / 4 * 128 + p.lane * 4 + q] >> (8 * p.byte + 2 * (y % 4)) & 3u;
    default:
      const QByte at = swizzle(f.swizzled, q, p.byte);
      return radix_code(words, f.region[0].levels, p.lane, y, at.q, at.byte);
  }
}

// Place of `slot` in a region's stream.
__device__ inline uint32_t stream_element(const TensorFormat &f, const Region &region, uint32_t token, uint32_t j) {
  return f.group ? j * f.page_tokens + token : token * region.count + j;
}

__device__ inline uint32_t region_of(const TensorFormat &f, uint32_t slot) {
  uint32_t r = 0;
  while (slot >= f.region[r].first + f.region[r].count) r++;
  return r;
}

__device__ inline uint32_t page_code(const TensorFormat &f, const uint8_t *blob, uint32_t r, uint32_t token, uint32_t slot) {
  const Region &region = f.region[r];
  if (region.levels <= 1) return 0;
  if (f.layout == Layout::fragments) return fragment_code(f, blob, token, slot);
  const uint8_t *codes = blob + f.codes;
  uint32_t code = stream_code(region, codes + region.offset, stream_element(f, region, token, slot - region.first));
  if (!f.positions) return code;
  const uint32_t position = blob[f.positions + token / f.group * f.dim + slot];
  if (position == 0xff) return code;
  const uint32_t e = (token / f.group * f.boosted + position) * f.group + token % f.group;
  return code | uint32_t(codes[f.region[1].offset + e / 4] >> e % 4 * 2 & 3) << 2;
}

// Offset in the blob of parameter i of a token (rows) or of the whole page (columns: (group * dim + slot) * 2 + {s, z}).
__device__ inline uint32_t row_param(const TensorFormat &f, uint32_t token, uint32_t i) {
  if (f.family == Family::raw) return f.params + (token * f.dim + raw_place(f.dim, i)) * 2;
  if (f.layout == Layout::streams) return f.params + (token * f.row_params + i) * f.param_bytes;
  return f.params + tile_offset(f, token / kTile) + (i * kTile + row_place(token % kTile)) * f.param_bytes;
}
__device__ inline uint32_t column_param(const TensorFormat &f, uint32_t i) {
  if (f.layout == Layout::streams) return f.params + i * f.param_bytes;
  const uint32_t zero = i & 1, slot = i / 2 % f.dim, group = i / 2 / f.dim;
  return f.params + group * f.group_stride + (zero * f.dim + slot) * f.param_bytes;
}
__device__ inline uint16_t load_stored(const TensorFormat &f, const uint8_t *blob, uint32_t at) {
  return f.param_bytes == 1 ? blob[at] : *reinterpret_cast<const uint16_t *>(blob + at);
}
__device__ inline float stored_value(const TensorFormat &f, const uint8_t *blob, uint32_t at) {
  return load_param(load_stored(f, blob, at), ParamType(f.param_type));
}

// Decoded value of a slot: by channel for polar and raw, else in the order (and the rotation) of the slots, without mu.
__device__ inline float page_value(const TensorFormat &f, const uint8_t *blob, uint32_t r, uint32_t token, uint32_t slot) {
  if (f.family == Family::raw) return half_to_float(load_stored(f, blob, row_param(f, token, slot)));
  const uint32_t code = page_code(f, blob, r, token, slot);
  if (f.family == Family::rows_book) {
    const float h = stored_value(f, blob, row_param(f, token, r));
    return h * f.region[r].book->scale * float(f.region[r].book->level[code]);
  }
  const uint32_t at = f.family == Family::rows_affine ? slot / f.channel_group * 2 : (token / f.group * f.dim + slot) * 2;
  const bool row = f.family == Family::rows_affine;
  const float s = stored_value(f, blob, row ? row_param(f, token, at) : column_param(f, at));
  const float z = stored_value(f, blob, row ? row_param(f, token, at + 1) : column_param(f, at + 1));
  return affine_value(uint8_t(code), s, z);
}

}  // namespace kvq::cuda
