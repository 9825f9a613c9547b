// Reading one code or parameter of a packed page: any layout, one element at a time.  What is in a hurry reads fragments itself.
#pragma once
#include "codec/affine.h"
#include "cuda/layout.h"
#include "cuda/rows.h"
#include "util/polar.h"

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

// A code of radix words: byte `byte` of register 4 * y + q.
__device__ inline uint32_t radix_code(const uint32_t *words, DigitShape shape, uint32_t lane, uint32_t y, uint32_t q, uint32_t byte) {
  const uint32_t whole = shape.whole_words(), reg = 4 * y + q;
  const auto bit = [&](BitPlace at) {
    if (at.word < whole || !shape.half) return words[lane_word(whole, lane, at.word)] >> at.bit & 1u;
    return uint32_t(reinterpret_cast<const uint16_t *>(words + 32 * whole)[lane]) >> half_bit(at.bit) & 1u;
  };
  if (reg >= shape.first_single()) {
    uint32_t code = 0;
    for (uint32_t b = 0; b < (shape.levels == 3 ? 2 : 3); b++) code |= bit(single_bit(shape, reg - shape.first_single(), byte, b)) << b;
    return code;
  }
  const uint32_t left = reg - min(reg, shape.first_left());
  const bool block = reg < shape.first_left();
  const uint32_t i = block ? 4 * (y / shape.digits) + q : 4 * shape.blocks() + left / shape.digits;
  uint32_t number = 0;
  if (shape.levels == 5 && i + 1 == shape.numbers())
    for (uint32_t b = 0; b < 7; b++) number |= bit({b, 8 * byte}) << b;
  else
    number = (words[lane_word(whole, lane, i)] >> 8 * byte & 0xffu) >> (shape.levels == 5 ? 1 : 0);
  for (uint32_t d = (block ? y : left) % shape.digits; d; d--) number /= shape.levels;
  return number % shape.levels;
}

// Kitty: the upper bits of a channel's code.
__device__ inline uint32_t boosted_bits(const TensorFormat &f, const uint8_t *blob, const uint32_t *words, uint32_t token, uint32_t slot) {
  const uint32_t position = blob[positions_of(f, token / f.group) + slot];
  if (position == 0xff) return 0;
  const Place p = key_place(token % kTile, position);
  return words[code_bytes(f) / 4 + upper_word(upper_lanes(f.boosted), p.lane, p.reg / 4)] >> (8 * p.byte + 2 * (p.reg % 4)) & 3u;
}

__device__ inline uint32_t fragment_code(const TensorFormat &f, const uint8_t *blob, const Region &region, uint32_t token, uint32_t slot) {
  const Place p = f.tensor ? value_place(token % kTile, slot) : key_place(token % kTile, slot);
  const uint32_t *words = reinterpret_cast<const uint32_t *>(blob + f.codes + tile_offset(f, token / kTile));
  const uint32_t width = f.width[p.unit], y = 2 * p.unit + (p.reg & 1), q = p.reg / 2;
  uint32_t code = 0;
  switch (f.coding) {
    case Coding::nibbles:
      words += 32 * f.unit_word[p.unit];
      if (width == 8) return (words[lane_word(8, p.lane, p.reg)] >> 8 * p.byte & 0xff) - region_centre(f, region, p.unit);
      for (uint32_t b = 0; b < width; b++) {
        const BitPlace at = code_bit(width, p.reg, p.byte, b);
        code |= (words[lane_word(width, p.lane, at.word)] >> at.bit & 1u) << b;
      }
      return plain_code(width, code) - region_centre(f, region, p.unit);
    case Coding::planes:
      for (uint32_t plane = 0; 2 * plane < width; plane++) {
        const PlanePlace place = plane_place(f, plane, p.unit);
        const uint32_t *at = words + place.first + p.lane * place.step;
        const bool crumb = width >= 2 * plane + 2;
        const uint32_t bits = crumb ? at[p.reg / 4] >> (8 * p.byte + 2 * (p.reg % 4)) & 3u : at[0] >> (8 * p.byte + 2 * (p.reg % 4) + p.reg / 4) & 1u;
        code |= bits << 2 * plane;
      }
      return f.boosted ? code | boosted_bits(f, blob, words, token, slot) << 2 : code;
    case Coding::fields:
      for (uint32_t plane = 0; 2 * plane < width; plane++) {
        const BitPlace at = field_place(f.dim / 16, width, plane, y, q, p.lane);
        code |= (words[at.word] >> (8 * p.byte + at.bit) & (width >= 2 * plane + 2 ? 3u : 1u)) << 2 * plane;
      }
      return code;
    case Coding::crumbs:
      return words[y / 4 * 128 + p.lane * 4 + q] >> (8 * p.byte + 2 * (y % 4)) & 3u;
    default:
      const QByte at = swizzle(swizzles(f, y), q, p.byte);
      const DigitShape shape = digits_of(f);
      return radix_code(words + y / 16 * 32 * shape.words, shape, p.lane, y % 16, at.q, at.byte);
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
  if (f.layout == Layout::fragments) return fragment_code(f, blob, region, token, slot);
  const uint8_t *codes = blob + f.codes;
  uint32_t code = stream_code(region, codes + region.offset, stream_element(f, region, token, slot - region.first));
  if (!f.positions) return code;
  const uint32_t position = blob[positions_of(f, token / f.group) + slot];
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
  const uint32_t shared = tile_groups(f), among = group % shared * 2;
  return f.params + group / shared * f.group_stride + ((among + zero) * f.dim + slot) * f.param_bytes;
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
