// Packed pages on a device: what kernels know of a page format, and where a code lies.
//
// A page is one blob per KV head; a blob holds the codes and parameters of K and V.  Codes of a tensor lie in one of two layouts:
//   streams    per region (slots that share a level count) a stream of words, `digits` codes in `bits` bits as on the wire;
//              rows: code token * count + j, columns: code j * page_tokens + token.  Any codec, any dimension.
//   fragments  tiles of 64 tokens in the order of the operands of mma.m16n8k32 (below), for head dimensions of 64, 128 and 256.
//
// Fragments.  lane = 4 * r + t.  A register is four codes, byte j = 0..3; a unit is eight registers of all 32 lanes:
//   keys    unit hs: slots 16 * hs + 4 * t + j of tokens 8 * x + r, register x
//   values  unit m: channels 16 * m + 8 * (y & 1) + r of tokens 32 * s + 8 * j + 2 * t + b, register 4 * s + 2 * b + (y & 1)
// Both number registers 2 * q + (y & 1) of unit y / 2, q = 0..3.  A tile's codes are words of all 32 lanes, in one of these codings:
//   nibbles  books of 2^w levels (or fewer), each unit of its own width w, in w words; selectors of a byte permutation lie in nibbles (code_bit).
//            A unit of several books has the width of the largest, and codes of the others lie around its middle (centre); those of 7
//            and 8 bits are bytes
//   planes   key columns of any widths to 6: plane p has bits 2 p and 2 p + 1 of a code.  Planes come from the highest one down; in a
//            plane unit after unit as many words as it has bits.  The words of units 2 i and 2 i + 1, if they are equally many, are
//            one vector of every lane
//            Kitty's have, behind those, two bits more of boosted channels, which take the lanes of as many slots (upper_word).
//   crumbs   values of 4 levels: word 4 * (y / 4) + q has, in each byte, two bits for each of four y
//   fields   values of 2^w levels: planes as those of keys, a plane of two bits as crumbs, one of one bit with eight y in a word
//   radix    books and rows of 3, 5 and 6 levels: a byte is a number of several digits (struct DigitShape); beside columns, whose pages
//            have room for it, books of 3 and 6 levels are so in part, and the others of their codes are bits (loose)
#pragma once
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "util/hd.h"

namespace kvq::cuda {

enum class Family : uint8_t {
  rows_book,
  rows_affine,
  columns,
  polar,
  raw
};
enum class Layout : uint8_t {
  streams,
  fragments
};
enum class Coding : uint8_t {
  nibbles,
  planes,
  crumbs,
  fields,
  radix
};

// A code of a book of up to 64 levels, from y in two steps: buckets of sigma / 16 from -4 sigma on, of which none meets two thresholds,
// know the number of thresholds before them, give or take kSlack buckets; one comparison then decides.
struct alignas(16) BookGuess {
  static constexpr uint32_t kLevels = 64, kBuckets = 128, kPerSigma = 16;
  static constexpr float kSlack = 1.0f / 64;
  uint8_t first[kBuckets];
  float threshold[kLevels];  // infinite behind the last
  uint8_t magnitude[kLevels];
  float scale;
  // per_sigma: kPerSigma / sigma; where sigma is 0, so is y, and the bucket 0.
  KVQ_HD static uint32_t bucket(float y, float per_sigma) {
    const float at = fminf(fmaxf(fmaf(y, per_sigma, kBuckets / 2 - 0.5f), 0.0f), kBuckets - 1.0f);
    return std::bit_cast<uint32_t>(at + 0x1.8p23f) & (kBuckets - 1);
  }
};

// One book of section 2.3 in device memory.
struct DeviceBook {
  BookGuess guess;  // up to 64 levels
  float scale;
  uint32_t levels;
  int16_t level[256];
  float threshold[256];
};

constexpr uint32_t kMaxRegions = 9;
constexpr uint32_t kTile = 64, kMaxUnits = 16, kPlanes = 4;

// Slots [first, first + count) of one level count.
struct Region {
  uint32_t levels, digits, bits;
  uint32_t first, count, rotation;
  uint32_t offset;          // of its stream in the codes
  const DeviceBook *book;   // or nullptr
};

// One tensor of one head.  What attention reads before its first page comes first, in one line of the cache.
struct alignas(128) TensorFormat {
  Family family;
  Layout layout;
  uint8_t tensor, kind, param_type, scale_rule, param_bytes;
  uint8_t rotate, midpoint, high_plain;  // high_plain: pair-mix, classes of 3 bits take no midpoint
  Coding coding;                         // fragments
  uint8_t swizzled;                      // radix with a table of levels: bytes are exchanged as swizzle() says
  uint8_t loose;                         // radix: see DigitShape
  uint8_t mixed;                         // nibbles: some units hold several books, or bytes
  uint32_t dim, page_tokens, group, groups;  // groups of tokens in a page (columns)
  uint32_t blob;                             // of the head, in the page
  // in the blob
  uint32_t codes, params;                    // fragments: of tile 0
  uint32_t tile_stride;                      // fragments: between tiles of a group of columns, and between groups
  uint32_t group_tiles, group_shift, group_stride;  // columns: group_tiles is 2^group_shift; groups of less than a tile count as one
  uint32_t table[2];                         // fragments: levels of codes 0..7 as bytes (16 levels: magnitudes), repeated if fewer
  float book_scale;                          // fragments: of a level, or of a digit where levels are linear
  uint32_t pairs[kPlanes];                   // planes: nibble i: words of unit 2 i, and 4 times those of unit 2 i + 1
  uint64_t seed;
  const uint16_t *channel;                   // [dim] slot -> channel
  const uint16_t *mu;                        // fp16 [dim] or nullptr
  Region region[kMaxRegions];
  uint32_t regions, row_params, channel_group;  // parameters of a token; affine rows: channels of a group
  uint32_t boosted;                          // kitty
  uint32_t progressive;                      // PM-KVQ: levels, 0 otherwise
  uint32_t positions;                        // in the blob.  kitty: position bytes [groups][dim]
  uint8_t width[kMaxUnits];                  // nibbles, planes: of a unit; 0: no codes
  uint8_t unit_word[kMaxUnits];              // nibbles: number of its first word
};

// Everything of a page format that kernels read: tensor formats [kv_heads][2].
struct DeviceFormat {
  const TensorFormat *tensors;
  uint32_t kv_heads, page_tokens;
};

// ---- fragments

struct Place {
  uint32_t unit, reg, lane, byte;
};

KVQ_HD inline Place key_place(uint32_t token, uint32_t slot) {
  return {slot / 16, token / 8, token % 8 * 4 + slot % 16 / 4, slot % 4};
}
KVQ_HD inline Place value_place(uint32_t token, uint32_t channel) {
  const uint32_t y = channel / 8;
  return {y / 2, token / 32 * 4 + (token & 1) * 2 + (y & 1), channel % 8 * 4 + token % 8 / 2, token / 8 % 4};
}
KVQ_HD inline uint32_t key_token(uint32_t reg, uint32_t lane) { return reg * 8 + lane / 4; }
KVQ_HD inline uint32_t key_slot(uint32_t unit, uint32_t lane, uint32_t byte) { return unit * 16 + lane % 4 * 4 + byte; }
KVQ_HD inline uint32_t value_token(uint32_t reg, uint32_t lane, uint32_t byte) {
  return reg / 4 * 32 + byte * 8 + lane % 4 * 2 + (reg >> 1 & 1);
}
KVQ_HD inline uint32_t value_channel(uint32_t unit, uint32_t reg, uint32_t lane) { return unit * 16 + (reg & 1) * 8 + lane / 4; }

// Word i of a lane among n: vectors of four words lane by lane, then of two, then one.
KVQ_HD inline uint32_t lane_word(uint32_t n, uint32_t lane, uint32_t i) {
  const uint32_t fours = n / 4 * 4;
  if (i < fours) return i / 4 * 128 + lane * 4 + i % 4;
  if (i < n / 2 * 2) return fours * 32 + lane * 2 + (i - fours);
  return (n - 1) * 32 + lane;
}

// ---- nibbles

// One bit of a code: bit `bit` of word `word`.
struct BitPlace {
  uint32_t word, bit;
};
// Codes of 4 bits and more are stored as magnitude and, in the highest bit, sign: levels are antisymmetric.
KVQ_HD inline uint32_t stored_code(uint32_t width, uint32_t code) {
  const uint32_t half = 1u << (width - 1);
  return width < 4 ? code : code >= half ? code - half
                                         : (half - 1 - code) | half;
}
KVQ_HD inline uint32_t plain_code(uint32_t width, uint32_t stored) {
  const uint32_t half = 1u << (width - 1);
  return width < 4 ? stored : stored & half ? half - 1 - (stored & (half - 1))
                                            : stored + half;
}
// Where bit b of the stored code of (register, byte) lies in a unit of a width.
KVQ_HD constexpr BitPlace code_bit(uint32_t width, uint32_t reg, uint32_t byte, uint32_t b) {
  if (width == 1) return {0, 16 * (reg & 1) + 4 * byte + reg / 2};
  if (width == 2) return {reg / 4, 16 * (reg & 1) + 4 * byte + 2 * (reg >> 1 & 1) + b};
  if (width == 3 && reg >= 6) return {b, 16 * (reg - 6) + 4 * byte + 3};
  if (b < 3) return {reg / 2, 16 * (reg & 1) + 4 * byte + b};
  if (b == width - 1) return {reg / 2, 8 * byte + (reg & 1 ? 3u : 7u)};
  return {1 + b, 8 * byte + reg};
}
// What is added to a code of a book of fewer bits than the unit that holds it.
KVQ_HD constexpr uint32_t centre(uint32_t width, uint32_t book_width) { return (1u << (width - 1)) - (1u << (book_width - 1)); }
KVQ_HD inline uint32_t region_centre(const TensorFormat &f, const Region &region, uint32_t unit) {
  return region.digits == 1 ? centre(f.width[unit], region.bits) : 0;
}

// ---- planes

// Words of a unit in a plane, and of several units.
KVQ_HD inline uint32_t plane_words(uint32_t pairs, uint32_t unit) { return pairs >> 2 * unit & 3u; }
KVQ_HD inline uint32_t sum_words(uint32_t pairs) {
  pairs = (pairs & 0x33333333u) + (pairs >> 2 & 0x33333333u);
  pairs = (pairs + (pairs >> 4)) & 0x0f0f0f0fu;
  return pairs * 0x01010101u >> 24;
}
// A unit's words of plane p: word i of a lane is at first + lane * step + i.
struct PlanePlace {
  uint32_t first, step;
};
KVQ_HD inline PlanePlace plane_place(const TensorFormat &f, uint32_t p, uint32_t unit) {
  const uint32_t pairs = f.pairs[p], even = unit & ~1u, words = plane_words(pairs, unit), others = plane_words(pairs, unit ^ 1u);
  uint32_t before = sum_words(pairs & ((1u << 2 * even) - 1));  // of a lane
  for (uint32_t above = p + 1; above < kPlanes; above++) before += sum_words(f.pairs[above]);
  if (words == others) return {32 * before + (unit & 1) * words, 2 * words};
  return {32 * (before + (unit & 1) * others), words};
}

// Kitty: word x / 4 of a lane's four slots of boosted channels; `lanes` of the four t have some.
KVQ_HD inline uint32_t upper_lanes(uint32_t boosted) { return (boosted + 3) / 4; }
KVQ_HD inline uint32_t upper_word(uint32_t lanes, uint32_t lane, uint32_t half) { return (lane / 4 * lanes + lane % 4) * 2 + half; }

// ---- fields

// Bits of plane p, from 2 * p on, of channels 8 * y + r: where register q of y lies in a tile of `units` units.
KVQ_HD inline BitPlace field_place(uint32_t units, uint32_t width, uint32_t p, uint32_t y, uint32_t q, uint32_t lane) {
  if (width < 2 * p + 2) return {y / 8 * 128 + lane * 4 + q, 2 * (y % 4) + (y / 4 & 1)};
  return {units * (width % 2 * 32 + (width / 2 - 1 - p) * 64) + y / 4 * 128 + lane * 4 + q, 2 * (y % 4)};
}

// ---- radix

// A byte holds the number x = d0 + d1 * L + ... of n digits.  Word 4 * k + q has the digits d of y = n * k + d.  Of registers 4 * y + q
// that are left, 64 channels have two numbers more, of n registers in a row; the others are singles, which bits hold.  Five levels: n = 3
// in bits 1..7, and bit 0 of the words holds the last number, then singles.  So for 64 and for 128 channels; 256 are twice 128.
// Loose: eight words of numbers, the rest are singles: of 3 levels two bits, four y in a word, of the last two y with two q in a word;
// of 6 levels units of nibbles.
struct DigitShape {
  uint32_t levels, digits;
  bool half;       // of 64 channels
  bool loose;      // of 128
  uint32_t words;  // of 128 channels; of 64 half as many, of which the last may be half a word
  KVQ_HD constexpr uint32_t whole_words() const { return half ? words / 2 : words; }
  KVQ_HD constexpr uint32_t blocks() const { return loose ? 2 : (half ? 8 : 15) / digits; }  // k
  KVQ_HD constexpr uint32_t numbers() const { return 4 * blocks() + (half ? 2 : 0); }
  KVQ_HD constexpr uint32_t first_left() const { return 4 * blocks() * digits; }
  KVQ_HD constexpr uint32_t first_single() const { return loose ? first_left() : half ? 30
                                                                                      : 60; }
  // The register of digit d of number i.
  KVQ_HD constexpr uint32_t digit_register(uint32_t i, uint32_t d) const {
    return i < 4 * blocks() ? 4 * (i / 4 * digits + d) + i % 4 : first_left() + (i - 4 * blocks()) * digits + d;
  }
};
KVQ_HD constexpr DigitShape digits_of(uint32_t levels, bool half, bool loose = false) {
  return levels == 3   ? DigitShape{3, 5, half, loose, loose ? 14u : 13u}
         : levels == 5 ? DigitShape{5, 3, half, false, 19}
                       : DigitShape{6, 3, half, loose, loose ? 23u : 22u};
}
KVQ_HD inline DigitShape digits_of(const TensorFormat &f) { return digits_of(f.region[0].levels, f.dim == 64, f.loose); }
// Where bit b of single s lies in four bytes.
KVQ_HD constexpr BitPlace single_bit(DigitShape shape, uint32_t s, uint32_t byte, uint32_t b) {
  const uint32_t whole = shape.whole_words(), i = 7 + 3 * s + b, q = s % 4, y = s / 4;
  if (shape.loose && shape.levels == 3) return y < 4 ? BitPlace{8 + q, 8 * byte + 2 * y + b} : BitPlace{12 + q / 2, 8 * byte + 4 * (q & 1) + 2 * (y - 4) + b};
  if (shape.loose) {
    const BitPlace at = code_bit(3, 2 * q + (y & 1), byte, b);
    return {8 + 3 * (y / 2) + at.word, at.bit};
  }
  if (shape.levels == 3) return {shape.numbers(), 8 * byte + 2 * s + b};
  if (shape.levels == 5) return i < whole ? BitPlace{i, 8 * byte} : BitPlace{whole, 8 * byte + i - whole};
  return {shape.numbers() + s / 2, 8 * byte + 4 * (s & 1) + b};
}
// Half a word: the lower nibbles of bytes, those of bytes 2 and 3 above those of bytes 0 and 1.
KVQ_HD constexpr uint32_t half_bit(uint32_t bit) { return (bit & 8) + bit / 16 * 4 + bit % 4; }
// Levels are looked up for two q at once, which exchanges bytes: where code (q, byte) is stored.
struct QByte {
  uint32_t q, byte;
};
KVQ_HD inline QByte swizzle(bool swizzled, uint32_t q, uint32_t byte) {
  return swizzled ? QByte{(q & 2) | (byte & 1), 2 * (q & 1) + byte / 2} : QByte{q, byte};
}
// Registers of y of which that is so.
KVQ_HD inline bool swizzles(const TensorFormat &f, uint32_t y) { return f.swizzled && (!f.loose || 4 * (y % 16) < digits_of(f).first_single()); }
KVQ_HD constexpr QByte unswizzle(bool swizzled, uint32_t q, uint32_t byte) {
  return swizzled ? QByte{(q & 2) | byte / 2, 2 * (byte & 1) + (q & 1)} : QByte{q, byte};
}

// Groups of columns that share a tile.
KVQ_HD inline uint32_t tile_groups(const TensorFormat &f) { return f.group && f.group < kTile ? kTile / f.group : 1; }
// Kitty's position bytes of a group.
KVQ_HD inline uint32_t positions_of(const TensorFormat &f, uint32_t group) {
  return f.positions + group * (f.layout == Layout::streams ? f.dim : f.group_stride);
}

// Offset of a tile from tile 0.
KVQ_HD inline uint32_t tile_offset(const TensorFormat &f, uint32_t tile) {
  return tile / f.group_tiles * f.group_stride + tile % f.group_tiles * f.tile_stride;
}
// Bytes of a tile's codes.
KVQ_HD inline uint32_t code_bytes(const TensorFormat &f) {
  uint32_t words = 0;
  if (f.coding == Coding::radix) return f.dim * digits_of(f).words;
  for (uint32_t u = 0; u < f.dim / 16; u++) words += f.width[u];
  return words * 128;
}

// Row parameters of a tile: each of a token's lies with those of the other tokens, in the order [token % 8][token / 8], so that a
// lane's eight lie together.
KVQ_HD inline uint32_t row_place(uint32_t token) { return token % 8 * 8 + token / 8; }

}  // namespace kvq::cuda
