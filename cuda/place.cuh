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
    const uint32_t position = tile.blob[positions_of(f, group) + channel];
    if (position == 0xff) continue;
    uint32_t byte = 0;
    for (uint32_t k = 0; k < 4; k++) byte |= uint32_t(tile.codes_of(group * f.group + 4 * quad + k)[channel] >> 2) << 2 * k;
    tile.blob[f.codes + f.region[1].offset + (group * f.boosted + position) * quads + quad] = uint8_t(byte);
  }
}

// ---- fragments: a warp packs the parts of a tile, a lane its own words

// A register of values is four tokens of one channel.  All of a page's, from rows of slots: blocks of four by four codes are turned.
// Words are exchanged so that neither side meets the same bank twice: those of a lane and its next three, of a register and the next
// but one, lie in a row.  The dimension is a power of two, of at most 4 * blockDim.x.
__device__ inline uint32_t turned_word(uint32_t unit, uint32_t reg, uint32_t lane) {
  return (unit * 8 + reg) * 32 + (lane ^ ((2 * unit + (reg & 1)) & 3) * 4);
}
__device__ inline void turn_values(const Tile &tile, uint32_t *turned) {
  const uint32_t dim = tile.f.dim, shift = 31 - __clz(dim / 4);  // 2^shift blocks of four channels
  const uint32_t block = threadIdx.x & ((1u << shift) - 1), unit = block / 4, odd = block / 2 & 1;
  const uint8_t *from = tile.codes + 4 * block;
  uint32_t place[4];  // of a block's four channels
#pragma unroll
  for (uint32_t c = 0; c < 4; c++) place[c] = turned_word(unit, odd, 16 * (block & 1) + 4 * c);
  for (uint32_t four = threadIdx.x >> shift; four < tile.f.page_tokens / 4; four += blockDim.x >> shift) {
    const uint32_t t = four % 4, b = four / 4 % 2, s = four / 8 % 2, token = four / 16 * kTile;
    const uint8_t *rows = from + (token + 32 * s + 2 * t + b) * tile.code_stride;
    uint32_t row[4];
#pragma unroll
    for (uint32_t j = 0; j < 4; j++) row[j] = *reinterpret_cast<const uint32_t *>(rows + 8 * j * tile.code_stride);
    const uint32_t low[2] = {__byte_perm(row[0], row[1], 0x5140), __byte_perm(row[2], row[3], 0x5140)};
    const uint32_t high[2] = {__byte_perm(row[0], row[1], 0x7362), __byte_perm(row[2], row[3], 0x7362)};
    uint32_t *to = turned + token * dim / 4 + (4 * s + 2 * b) * 32 + t;
    to[place[0]] = __byte_perm(low[0], low[1], 0x5410);
    to[place[1]] = __byte_perm(low[0], low[1], 0x7632);
    to[place[2]] = __byte_perm(high[0], high[1], 0x5410);
    to[place[3]] = __byte_perm(high[0], high[1], 0x7632);
  }
}

// Registers of codes of a tile: four codes, a byte each.
struct KeyRegisters {
  const uint8_t *codes;  // of the tile's first row
  uint32_t stride, lane;
  __device__ uint32_t operator()(uint32_t unit, uint32_t reg) const {
    return *reinterpret_cast<const uint32_t *>(codes + key_token(reg, lane) * stride + key_slot(unit, lane, 0));
  }
};
struct ValueRegisters {
  const uint32_t *turned;  // of the tile
  uint32_t lane;
  __device__ uint32_t operator()(uint32_t unit, uint32_t reg) const { return turned[turned_word(unit, reg, lane)]; }
};

// stored_code of four codes.
template <uint32_t kWidth>
__device__ uint32_t stored_codes(uint32_t codes) {
  constexpr uint32_t kHalf = 1u << (kWidth - 1), kOnes = 0x01010101;
  if constexpr (kWidth < 4) return codes;
  const uint32_t negative = (codes >> (kWidth - 1) & kOnes) ^ kOnes;
  return codes ^ kHalf * kOnes ^ negative * (kHalf - 1);
}

// Words of a unit, as code_bit says, four codes at a time: their lowest bits, up to three, in the nibbles of half a word; the sign in
// the fourth bits of nibbles; what is between, a word for each bit.
template <uint32_t kWidth, class Codes>
__device__ void place_nibbles(const Codes &codes, uint32_t unit, uint32_t *words) {  // from the unit's first
  uint32_t four[8], pair[4];
#pragma unroll
  for (uint32_t reg = 0; reg < 8; reg++) four[reg] = stored_codes<kWidth>(codes(unit, reg));
#pragma unroll
  for (uint32_t k = 0; k < 4; k++) {
    constexpr uint32_t kLow = kWidth < 4 ? ~0u : 0x07070707u;
    const uint32_t even = four[2 * k] & kLow, odd = four[2 * k + 1] & kLow;
    pair[k] = __byte_perm(even | even >> 4, odd | odd >> 4, 0x6420);
  }
  uint32_t out[kWidth];
  if constexpr (kWidth == 1) {
    out[0] = pair[0] | pair[1] << 1 | pair[2] << 2 | pair[3] << 3;
  } else if constexpr (kWidth == 2) {
#pragma unroll
    for (uint32_t w = 0; w < 2; w++) out[w] = pair[2 * w] | pair[2 * w + 1] << 2;
  } else if constexpr (kWidth == 3) {
#pragma unroll
    for (uint32_t w = 0; w < 3; w++) out[w] = pair[w] | (pair[3] << (3 - w) & 0x88888888u);
  } else {
    constexpr uint32_t kSign = kWidth - 1;
#pragma unroll
    for (uint32_t k = 0; k < 4; k++)
      out[k] = pair[k] | (four[2 * k] >> kSign & 0x01010101u) << 7 | (four[2 * k + 1] >> kSign & 0x01010101u) << 3;
#pragma unroll
    for (uint32_t b = 3; b < kSign; b++) {
      out[1 + b] = 0;
#pragma unroll
      for (uint32_t reg = 0; reg < 8; reg++) out[1 + b] |= (four[reg] >> b & 0x01010101u) << reg;
    }
  }
  if constexpr (kWidth >= 4) *reinterpret_cast<uint4 *>(words + codes.lane * 4) = make_uint4(out[0], out[1], out[2], out[3]);
  if constexpr (kWidth % 4 >= 2) {
    constexpr uint32_t kFirst = kWidth / 4 * 4;
    *reinterpret_cast<uint2 *>(words + lane_word(kWidth, codes.lane, kFirst)) = make_uint2(out[kFirst], out[kFirst + 1]);
  }
  if constexpr (kWidth % 2) words[lane_word(kWidth, codes.lane, kWidth - 1)] = out[kWidth - 1];
}

template <class Codes>
__device__ void place_nibbles(uint32_t width, const Codes &codes, uint32_t unit, uint32_t *words) {
  switch (width) {
    case 1:
      return place_nibbles<1>(codes, unit, words);
    case 2:
      return place_nibbles<2>(codes, unit, words);
    case 3:
      return place_nibbles<3>(codes, unit, words);
    case 4:
      return place_nibbles<4>(codes, unit, words);
    case 5:
      return place_nibbles<5>(codes, unit, words);
    case 6:
      return place_nibbles<6>(codes, unit, words);
    default:
      for (uint32_t reg = 0; reg < 8; reg++) words[lane_word(8, codes.lane, reg)] = codes(unit, reg);
  }
}

// Codes of a unit of several books: those of each count from where its codes lie in the unit's.
template <class Codes>
struct Centred {
  const Codes &codes;
  uint32_t lane, add[2];  // of registers of even and of odd numbers
  __device__ Centred(const TensorFormat &f, const Codes &all, uint32_t unit) : codes(all), lane(all.lane), add{0, 0} {
    for (uint32_t byte = 0; byte < 4; byte++)
      for (uint32_t odd = 0; odd < 2; odd++) {
        const uint32_t slot = f.tensor ? value_channel(unit, odd, lane) : key_slot(unit, lane, byte);
        add[odd] |= region_centre(f, f.region[region_of(f, slot)], unit) << 8 * byte;
      }
  }
  __device__ uint32_t operator()(uint32_t unit, uint32_t reg) const { return codes(unit, reg) + add[reg & 1]; }
};

template <class Codes>
__device__ void place_planes(const TensorFormat &f, const Codes &codes, uint32_t unit, uint32_t *words) {
  const uint32_t width = f.width[unit];
  uint32_t four[8];
#pragma unroll
  for (uint32_t reg = 0; reg < 8; reg++) four[reg] = codes(unit, reg);
  for (uint32_t plane = 0; 2 * plane < width; plane++) {
    const bool crumb = width >= 2 * plane + 2;
    uint32_t low = 0, high = 0;  // of registers 0..3 and 4..7
#pragma unroll
    for (uint32_t reg = 0; reg < 4; reg++) {
      low |= (four[reg] >> 2 * plane & 0x03030303u) << 2 * reg;
      high |= (four[reg + 4] >> 2 * plane & 0x03030303u) << 2 * reg;
    }
    const PlanePlace at = plane_place(f, plane, unit);
    uint32_t *to = words + at.first + codes.lane * at.step;
    if (crumb)
      *reinterpret_cast<uint2 *>(to) = make_uint2(low, high);
    else
      *to = low | high << 1;
  }
}

template <class Codes>
__device__ void place_crumbs(const Codes &codes, uint32_t part, uint32_t *words) {
  uint32_t out[4] = {};
#pragma unroll
  for (uint32_t half = 0; half < 2; half++)
#pragma unroll
    for (uint32_t reg = 0; reg < 8; reg++) out[reg / 2] |= (codes(2 * part + half, reg) & 0x03030303u) << (4 * half + 2 * (reg & 1));
  *reinterpret_cast<uint4 *>(words + part * 128 + codes.lane * 4) = make_uint4(out[0], out[1], out[2], out[3]);
}

// A pair of units; a plane of one bit is placed with the first of the two pairs that share its words.
template <class Codes>
__device__ void place_fields(const TensorFormat &f, const Codes &codes, uint32_t pair, uint32_t *words) {
  const uint32_t width = f.width[0];
  for (uint32_t plane = 0; 2 * plane < width; plane++) {
    const bool crumb = width >= 2 * plane + 2;
    if (!crumb && pair % 2) continue;
    for (uint32_t q = 0; q < 4; q++) {
      uint32_t out = 0;
      for (uint32_t y = 4 * pair; y < 4 * pair + (crumb ? 4 : 8); y++)
        out |= (codes(y / 2, 2 * q + (y & 1)) >> 2 * plane & (crumb ? 0x03030303u : 0x01010101u)) << field_place(f.dim / 16, width, plane, y, q, codes.lane).bit;
      words[field_place(f.dim / 16, width, plane, 4 * pair, q, codes.lane).word] = out;
    }
  }
}

// Kitty: the upper bits of the boosted channels of a tile.
__device__ inline void place_boosted(const Tile &tile, uint32_t token, uint32_t lane, uint32_t *words) {
  const TensorFormat &f = tile.f;
  const uint32_t lanes = upper_lanes(f.boosted), first = lane % 4 * 4;
  if (lane % 4 >= lanes) return;
  const uint8_t *positions = tile.blob + positions_of(f, token / f.group);
  uint32_t out[2] = {0, 0};
  for (uint32_t channel = 0; channel < f.dim; channel++) {
    const uint32_t byte = positions[channel] - first;
    if (byte >= 4) continue;
    for (uint32_t reg = 0; reg < 8; reg++)
      out[reg / 4] |= uint32_t(tile.codes_of(token + key_token(reg, lane))[channel] >> 2 & 3) << (8 * byte + 2 * (reg % 4));
  }
  for (uint32_t half = 0; half < 2; half++) words[code_bytes(f) / 4 + upper_word(lanes, lane, half)] = out[half];
}

// The codes that lie in bytes 0..3 for (y, q).
template <class Codes>
__device__ uint32_t radix_codes(const TensorFormat &f, const Codes &codes, uint32_t y, uint32_t q) {
  const auto at = [&](uint32_t from) { return codes(y / 2, 2 * from + (y & 1)); };
  if (!f.swizzled) return at(q);
  static_assert(unswizzle(true, 2, 3).q == 3 && unswizzle(true, 2, 3).byte == 2, "the bytes below");
  return __byte_perm(at(q & 2), at((q & 2) | 1), q & 1 ? 0x7531 : 0x6420);
}

// Word `word` of those of a loose shape that have no numbers (single_bit): codes(y, q).
template <uint32_t kLevels, class At>
__device__ uint32_t loose_word(uint32_t word, const At &codes) {
  if constexpr (kLevels == 3) {
    if (word < 4) return codes(10, word) | codes(11, word) << 2 | codes(12, word) << 4 | codes(13, word) << 6;
    const uint32_t q = 2 * (word - 4);
    return codes(14, q) | codes(15, q) << 2 | codes(14, q + 1) << 4 | codes(15, q + 1) << 6;
  } else {
    const uint32_t y = 6 + word / 3 * 2, i = word % 3;
    const auto pair = [&](uint32_t q) {
      const uint32_t even = codes(y, q), odd = codes(y + 1, q);
      return __byte_perm(even | even >> 4, odd | odd >> 4, 0x6420);
    };
    return pair(i) | (pair(3) << (3 - i) & 0x88888888u);
  }
}

// Word `word` of a lane.  Digits of four codes at once: a number of several is below 256, so bytes do not meet.
template <uint32_t kLevels, bool kHalf, bool kLoose, class Codes>
__device__ void place_radix(const TensorFormat &f, const Codes &codes, uint32_t word, uint32_t *words) {
  constexpr DigitShape kShape = digits_of(kLevels, kHalf, kLoose);
  constexpr uint32_t kWhole = kShape.whole_words(), kNumbers = kShape.numbers() - (kLevels == 5), kSingles = kHalf ? 2 : 4;  // kNumbers: in words of their own
  const uint32_t part = kHalf ? 0 : word / kWhole;  // of 128 channels
  word -= part * kWhole, words += part * 32 * kWhole;
  const auto codes_at = [&](uint32_t reg) { return radix_codes(f, codes, 16 * part + reg / 4, reg % 4); };
  const auto numbers = [&](uint32_t i) {
    uint32_t out = 0;
#pragma unroll
    for (uint32_t d = kShape.digits; d; d--) out = out * kLevels + codes_at(kShape.digit_register(i, d - 1));
    return kLevels == 5 ? 2 * out : out;
  };
  uint32_t out = word < kNumbers ? numbers(word) : 0;
  if (kLevels == 5 && word < 7) out |= numbers(kNumbers) >> (word + 1) & 0x01010101u;
  if constexpr (kLoose) {
    if (word >= kNumbers) out = loose_word<kLevels>(word - kNumbers, [&](uint32_t y, uint32_t q) { return codes(8 * part + y / 2, 2 * q + (y & 1)); });
  } else if (kLevels == 5 ? word >= 7 : word >= kNumbers)
#pragma unroll
    for (uint32_t s = 0; s < kSingles; s++)
#pragma unroll
      for (uint32_t b = 0; b < (kLevels == 3 ? 2 : 3); b++) {
        const BitPlace at = single_bit(kShape, s, 0, b);
        if (at.word == word) out |= (codes_at(kShape.first_single() + s) >> b & 0x01010101u) << at.bit;
      }
  if (word < kWhole)
    words[lane_word(kWhole, codes.lane, word)] = out;
  else
    reinterpret_cast<uint16_t *>(words + 32 * kWhole)[codes.lane] = uint16_t(out | out >> 12);
}

template <uint32_t kLevels, class Codes>
__device__ void place_radix(const TensorFormat &f, const Codes &codes, uint32_t word, uint32_t *words) {
  if constexpr (kLevels != 5)
    if (f.loose) return place_radix<kLevels, false, true>(f, codes, word, words);
  return f.dim == 64 ? place_radix<kLevels, true, false>(f, codes, word, words) : place_radix<kLevels, false, false>(f, codes, word, words);
}

// Parts of a tile: units, or pairs of them, or words.
__device__ inline uint32_t tile_parts(const TensorFormat &f) {
  if (f.coding == Coding::radix) return (code_bytes(f) + 127) / 128;
  return f.coding == Coding::crumbs || f.coding == Coding::fields ? f.dim / 32 : f.dim / 16 + (f.boosted > 0);
}

template <uint32_t kCodings, class Codes>
__device__ void place_part(const TensorFormat &f, const Codes &codes, uint32_t part, uint32_t *words) {
  const auto is = [&](uint32_t coding) { return (kCodings & coding) && (kCodings == coding || 1u << uint32_t(f.coding) == coding); };
  if constexpr (kCodings == kAllCodings)
    if (f.mixed) return place_nibbles(f.width[part], Centred<Codes>(f, codes, part), part, words + 32 * f.unit_word[part]);
  if (is(kNibbles)) return place_nibbles(f.width[part], codes, part, words + 32 * f.unit_word[part]);
  if (is(kPlaneBits)) return place_planes(f, codes, part, words);
  if (is(kCrumbs)) return place_crumbs(codes, part, words);
  if (is(kFields)) return place_fields(f, codes, part, words);
  if constexpr ((kCodings & kRadix) != 0) {
    const uint32_t levels = f.region[0].levels;
    return levels == 3   ? place_radix<3>(f, codes, part, words)
           : levels == 5 ? place_radix<5>(f, codes, part, words)
                         : place_radix<6>(f, codes, part, words);
  }
}

// Calls place_part for the parts of the tiles that have new rows, which the warps share; registers(its first row) are a tile's codes.
template <uint32_t kCodings, class F>
__device__ void place_tiles(const Tile &tile, F &&registers) {
  const TensorFormat &f = tile.f;
  const uint32_t parts = tile_parts(f), warp = threadIdx.x / 32, warps = blockDim.x / 32;
  uint32_t part = warp;
  for (uint32_t token = 0; token < f.page_tokens; token += kTile, part -= parts) {
    if (token + kTile <= tile.first || token >= tile.first + tile.count) {
      part = warp + parts;
      continue;
    }
    uint32_t *words = reinterpret_cast<uint32_t *>(tile.blob + f.codes + tile_offset(f, token / kTile));
    const auto codes = registers(token);
    for (; part < parts; part += warps) {
      if ((kCodings & kPlaneBits) && f.boosted && part == f.dim / 16)
        place_boosted(tile, token, threadIdx.x % 32, words);
      else
        place_part<kCodings>(f, codes, part, words);
    }
  }
}

template <uint32_t kCodings>
__device__ void place_fragments(const Tile &tile) {
  const uint32_t lane = threadIdx.x % 32;
  if (!tile.f.tensor) {
    place_tiles<kCodings>(tile, [&](uint32_t token) { return KeyRegisters{tile.codes_of(token), tile.code_stride, lane}; });
    return;
  }
  uint32_t *turned = reinterpret_cast<uint32_t *>(tile.raw);  // rows are no longer needed
  turn_values(tile, turned);
  __syncthreads();
  place_tiles<kCodings>(tile, [&](uint32_t token) { return ValueRegisters{turned + token * tile.f.dim / 4, lane}; });
}

// The page's bytes; `codes` of the tile's rows are complete.
template <uint32_t kCodings>
__device__ void place(const Tile &tile) {
  const TensorFormat &f = tile.f;
  if (kCodings == 0 || f.family == Family::raw) return;
  if (tile.count < f.page_tokens) load_others(tile);
  __syncthreads();
  if (f.layout == Layout::fragments) return place_fragments<kCodings>(tile);
  for (uint32_t r = 0; r < (f.positions ? 1 : f.regions); r++)
    if (f.region[r].levels > 1) place_stream(tile, f.region[r], f.positions ? 3 : 0xff);
  if (f.positions) place_upper(tile);
}

}  // namespace kvq::cuda
