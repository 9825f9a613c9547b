// Blocks to packed pages and back: codes through lines of bytes (layout.h), parameters as they are.
#include <algorithm>
#include <cstring>

#include "cpu/layout.h"

namespace kvq::cpu {
namespace {

// ---- lines to planes

// Digits as a field of a scheme of several: field / 2^bits is at least number / base^digits and less than the next one (unpack.h).
struct DigitRules {
  DigitRule of[kSchemes - kBase3][6];  // [scheme][digits]
};
constexpr uint32_t power(uint32_t base, uint32_t exponent) { return exponent ? base * power(base, exponent - 1) : 1; }
constexpr uint32_t field_bits(uint32_t scheme, uint32_t digits) {
  return digits == kSchemeTable[scheme].digits ? kSchemeTable[scheme].bits : kShortBits[scheme][digits];
}
constexpr DigitRule make_digit_rule(uint32_t base, uint32_t digits, uint32_t bits) {
  const int32_t whole = int32_t(power(base, digits));
  for (uint32_t shift = 0; shift < 16; shift++) {
    const int32_t factor = (((1 << bits) - whole) << shift) / whole;
    int32_t least = 0, most = 65535 - (whole - 1) * factor;  // of the offset; products stay in 16 bits
    for (int32_t n = 0; n < whole; n++) {
      const auto first = [&](int32_t number) { return ((number << bits) + whole - 1) / whole; };
      least = std::max(least, ((first(n) - n) << shift) - n * factor);
      most = std::min(most, ((first(n + 1) - n) << shift) - 1 - n * factor);
    }
    if (least <= most) return {uint8_t(base), uint8_t(digits), uint8_t(shift), uint16_t(factor), uint16_t(least)};
  }
  return {};
}
constexpr DigitRules make_digit_rules() {
  DigitRules rules{};
  for (uint32_t scheme = kBase3; scheme < kSchemes; scheme++)
    for (uint32_t digits = 1; digits <= kSchemeTable[scheme].digits; digits++)
      rules.of[scheme - kBase3][digits] = make_digit_rule(kSchemeTable[scheme].base, digits, field_bits(scheme, digits));
  return rules;
}
constexpr DigitRules kDigitRules = make_digit_rules();
constexpr bool complete(const DigitRules &rules) {
  for (uint32_t scheme = kBase3; scheme < kSchemes; scheme++)
    for (uint32_t digits = 1; digits <= kSchemeTable[scheme].digits; digits++)
      if (rules.of[scheme - kBase3][digits].digits != digits) return false;
  return true;
}
static_assert(complete(kDigitRules));

// The 64 fields of one field number: byte i holds the digits of byte i of its vectors.
const uint8_t *make_fields(const Loops &loops, const Packing &packing, const uint8_t *line, uint32_t number, uint32_t digits, uint8_t *fields) {
  if (kSchemeTable[packing.scheme].digits == 1) return line + size_t(number) * 64;
  uint8_t vectors[5 * 64];
  for (uint32_t d = 0; d < digits; d++) std::memcpy(vectors + d * 64, line + size_t(vector_of(kSchemeTable[packing.scheme].digits, packing.spread, number, d)) * 64, 64);
  loops.join_digits(kDigitRules.of[packing.scheme - kBase3][digits], vectors, fields);
  return fields;
}

// Bits [0, bits) of the fields to bits [bit, bit + bits) of planes: bit b is bit b mod 8 of plane b / 8.
void store_bits(const Loops &loops, const uint8_t *fields, uint32_t bits, uint32_t bit, uint8_t *planes) {
  for (uint32_t b = 0; b < bits;) {
    const uint32_t shift = (bit + b) % 8, n = std::min(8 - shift, bits - b);
    loops.put_bits(fields, b, n, shift, planes + (bit + b) / 8 * 64);
    b += n;
  }
}

// Field `index` of a unit.
void store_in_unit(const Loops &loops, const Scheme &scheme, const uint8_t *fields, uint32_t index, uint8_t *planes) {
  const uint32_t direct = scheme.planes * scheme.direct;
  if (index < direct)
    return store_bits(loops, fields, scheme.bits, index / scheme.direct * 8 + index % scheme.direct * scheme.bits, planes);
  for (uint32_t b = 0; b < scheme.bits; b++) {
    const uint32_t spare = (index - direct) * scheme.bits + b;
    loops.put_bits(fields, b, 1, scheme.direct * scheme.bits + spare % scheme.spare, planes + spare / scheme.spare * 64);
  }
}

void pack_line(const Loops &loops, const Packing &packing, const uint8_t *line, uint8_t *planes, uint8_t *shared) {
  const Scheme &scheme = kSchemeTable[packing.scheme];
  uint8_t fields[64];
  const uint32_t in_units = packing.units * scheme.fields;
  for (uint32_t f = 0; f < in_units; f++)
    store_in_unit(loops, scheme, make_fields(loops, packing, line, f, scheme.digits, fields), f % scheme.fields,
                  planes + f / scheme.fields * scheme.planes * 64);
  uint32_t bit = packing.tail_bit;
  for (uint32_t f = 0; f < packing.tail_fields; f++) {
    const uint32_t digits = f + packing.short_fields < packing.tail_fields ? scheme.digits : packing.last_digits;
    const uint32_t bits = field_bits(packing.scheme, digits);
    store_bits(loops, make_fields(loops, packing, line, in_units + f, digits, fields), bits, bit, shared);
    bit += bits;
  }
}

// ---- codes in a line

// Place of a code in its line: first + token * step for keys, first of the token + slot * 4 for values.
struct Place {
  size_t first, step;
};
Place key_place(const TensorLayout &layout, const Region &region, uint32_t slot) {
  const uint32_t whole = region.count / 4 * 4, rest = region.count - whole;
  if (slot < whole) return {size_t(slot / 4) * layout.tile_tokens * 4 + kByte[slot % 4], 4};
  return {size_t(whole) * layout.tile_tokens + (slot - whole), rest};
}
size_t value_place(const Region &region, uint32_t token) { return size_t(token / 4) * region.count * 4 + kByte[token % 4]; }

// Room for the line of a region's tile.
struct Lines {
  Lines(const TensorLayout &layout, std::pmr::memory_resource *memory) : bytes(memory) {
    uint32_t most = 0;
    for (const Region &region : layout.regions) most = std::max(most, region.line);
    bytes.resize(most + kSlack);
  }
  // Decoded if `old`; else the caller fills it.  Zeros behind it: what codes leave of the last vector.
  uint8_t *open(const Region &region, const uint8_t *planes, const uint8_t *shared, bool old) {
    if (old) kernels_portable.unpack(region.packing, planes, shared, nullptr, bytes.data());
    std::memset(bytes.data() + region.line, 0, kSlack);
    return bytes.data();
  }
  std::pmr::vector<uint8_t> bytes;
};

// Rows [first, first + count) of a page lie in tiles; what one call of `f` gets.
struct TileRows {
  uint32_t tile, token, count, row;  // row: of the first token, counted from `first`
};
template <class F>
void for_tiles(const TensorLayout &layout, uint32_t first, uint32_t count, F &&f) {
  for (uint32_t row = 0; row < count;) {
    const uint32_t tile = (first + row) / layout.tile_tokens, token = (first + row) % layout.tile_tokens;
    const uint32_t n = std::min(count - row, layout.tile_tokens - token);
    f(TileRows{tile, token, n, row});
    row += n;
  }
}

// Channels of kitty's upper region in the group of a token: slot -> channel, from the position bytes [groups][dim].
void boosted_of(const uint8_t *positions, uint32_t dim, uint16_t *channel) {
  for (uint32_t c = 0; c < dim; c++)
    if (positions[c] != 0xff) channel[positions[c]] = uint16_t(c);
}

// A call's rows: codes [row][dim], and kitty's positions of its groups.
struct Rows {
  const uint8_t *positions;
  uint8_t *codes;
};

// f(byte of the line, code) for every code of a region's rows; of keys, from slot `begin` on.
template <class F>
void for_codes(const TensorLayout &layout, const Region &region, const TileRows &rows, const Rows &block, uint8_t *line,
               uint32_t begin, F &&f) {
  uint8_t *codes = block.codes + size_t(rows.row) * layout.dim + region.first;
  if (layout.keys) {
    for (uint32_t slot = begin; slot < region.count; slot++) {
      const Place place = key_place(layout, region, slot);
      uint8_t *at = line + place.first + rows.token * place.step;
      for (uint32_t i = 0; i < rows.count; i++) f(at[i * place.step], codes[size_t(i) * layout.dim + slot]);
    }
    return;
  }
  for (uint32_t i = 0; i < rows.count; i++) {
    uint8_t *at = line + value_place(region, rows.token + i);
    for (uint32_t slot = 0; slot < region.count; slot++) f(at[size_t(slot) * 4], codes[size_t(i) * layout.dim + slot]);
  }
}

// The same for kitty's upper region, whose slots are other channels in every group.
template <class F>
void for_upper_codes(const TensorLayout &layout, const Region &region, const TileRows &rows, const Rows &block, uint8_t *line, F &&f) {
  uint16_t channel[256];
  for (uint32_t i = 0; i < rows.count; i++) {
    const uint32_t row = rows.row + i;
    if (i == 0 || row % layout.group == 0) boosted_of(block.positions + size_t(row / layout.group) * layout.dim, layout.dim, channel);
    for (uint32_t slot = 0; slot < region.count; slot++) {
      const Place place = key_place(layout, region, slot);
      const size_t token = rows.token + i;
      const size_t at = layout.keys ? place.first + token * place.step : value_place(region, uint32_t(token)) + size_t(slot) * 4;
      f(line[at], block.codes[size_t(row) * layout.dim + channel[slot]]);
    }
  }
}

void write_region(const Loops &loops, const TensorLayout &layout, const Region &region, const TileRows &rows, const Rows &block, uint8_t *line) {
  const auto put = [](uint8_t &byte, uint8_t code) { byte = code; };
  const uint8_t *codes = block.codes + size_t(rows.row) * layout.dim + region.first;
  if (layout.keys) {
    loops.key_words(codes, layout.dim, rows.count, region.count / 4, line + rows.token * 4, size_t(layout.tile_tokens) * 4);
    return for_codes(layout, region, rows, block, line, region.count / 4 * 4, put);
  }
  for (uint32_t i = 0; i < rows.count;) {
    const uint32_t token = rows.token + i, n = token % 4 == 0 && rows.count - i >= 4 ? 4 : 1;
    if (n == 4)
      loops.value_words(codes + size_t(i) * layout.dim, layout.dim, region.count, line + value_place(region, token));
    else
      for_codes(layout, region, {rows.tile, token, 1, rows.row + i}, block, line, 0, put);
    i += n;
  }
}

void write_codes(const Loops &loops, const TensorLayout &layout, uint8_t *blob, uint32_t first, uint32_t count, const Rows &block,
                 std::pmr::memory_resource *memory) {
  Lines lines(layout, memory);
  for_tiles(layout, first, count, [&](const TileRows &rows) {
    uint8_t *tile = blob + layout.tile_offset + rows.tile * layout.tile_stride;
    uint8_t *shared = blob + layout.tail_offset + rows.tile * layout.tile_stride;
    for (const Region &region : layout.regions) {
      uint8_t *planes = tile + region.offset, *line = lines.open(region, planes, shared, rows.count < layout.tile_tokens);
      if (region.upper)
        for_upper_codes(layout, region, rows, block, line, [](uint8_t &byte, uint8_t code) { byte = code >> 2; });
      else
        write_region(loops, layout, region, rows, block, line);  // of kitty's codes only the bits of a field are packed
      pack_line(loops, region.packing, line, planes, shared);
    }
  });
}

void read_codes(const TensorLayout &layout, const uint8_t *blob, uint32_t first, uint32_t count, const Rows &block,
                std::pmr::memory_resource *memory) {
  Lines lines(layout, memory);
  for_tiles(layout, first, count, [&](const TileRows &rows) {
    const uint8_t *tile = blob + layout.tile_offset + rows.tile * layout.tile_stride;
    const uint8_t *shared = blob + layout.tail_offset + rows.tile * layout.tile_stride;
    for (const Region &region : layout.regions) {
      uint8_t *line = lines.open(region, tile + region.offset, shared, true);
      if (region.upper)
        for_upper_codes(layout, region, rows, block, line, [](uint8_t byte, uint8_t &code) { code |= uint8_t(byte << 2); });
      else
        for_codes(layout, region, rows, block, line, 0, [](uint8_t byte, uint8_t &code) { code = byte; });
    }
  });
}

// ---- fp16 values and parameters

uint16_t load_param(const uint8_t *at, uint32_t bytes) {
  uint16_t value = at[0];
  if (bytes == 2) std::memcpy(&value, at, 2);
  return value;
}
void store_param(uint8_t *at, uint32_t bytes, uint16_t value) {
  if (bytes == 2)
    std::memcpy(at, &value, 2);
  else
    *at = uint8_t(value);
}

// Raw values of rows [first, first + count), between a page and [row][dim].
void write_halves(const Loops &loops, const TensorLayout &layout, uint8_t *blob, uint32_t first, uint32_t count, const uint16_t *x) {
  for_tiles(layout, first, count, [&](const TileRows &rows) {
    uint16_t *tile = reinterpret_cast<uint16_t *>(blob + layout.tile_offset + rows.tile * layout.tile_stride);
    const uint16_t *from = x + size_t(rows.row) * layout.dim;
    if (layout.keys)
      loops.transpose_halves(from, layout.dim, nullptr, rows.count, layout.dim, tile + rows.token, layout.tile_tokens);
    else
      std::memcpy(tile + size_t(rows.token) * layout.dim, from, size_t(2) * rows.count * layout.dim);
  });
}
void read_halves(const Loops &loops, const TensorLayout &layout, const uint8_t *blob, uint32_t first, uint32_t count, uint16_t *x) {
  for_tiles(layout, first, count, [&](const TileRows &rows) {
    const uint16_t *tile = reinterpret_cast<const uint16_t *>(blob + layout.tile_offset + rows.tile * layout.tile_stride);
    uint16_t *to = x + size_t(rows.row) * layout.dim;
    if (layout.keys)
      loops.transpose_halves(tile + rows.token, layout.tile_tokens, nullptr, layout.dim, rows.count, to, layout.dim);
    else
      std::memcpy(to, tile + size_t(rows.token) * layout.dim, size_t(2) * rows.count * layout.dim);
  });
}

// f(place in the blob, bytes, number in Block::params) for every parameter of rows [first, first + count).
template <class F>
void for_params(const HeadFormat &format, const TensorLayout &layout, uint32_t first, uint32_t count, F &&f) {
  const uint32_t bytes = layout.param_bytes, dim = layout.dim;
  if (layout.group == 0) {
    for (uint32_t i = 0; i < count; i++)
      for (uint32_t p = 0; p < format.token_params; p++)
        f(layout.params + (size_t(p) * layout.page_tokens + first + i) * bytes, bytes, size_t(i) * format.token_params + p);
  } else {
    for (uint32_t g = 0; g < count / layout.group; g++) {
      const size_t group = layout.params + (first / layout.group + g) * layout.group_stride;
      for (uint32_t c = 0; c < dim; c++)
        for (uint32_t zero = 0; zero < 2; zero++) f(group + (size_t(zero) * dim + c) * bytes, bytes, (size_t(g) * dim + c) * 2 + zero);
    }
  }
}

// Kitty's list of boosted channels of a group, behind its scales and zeros.
size_t boosted_list(const TensorLayout &layout, uint32_t group) {
  return layout.params + group * layout.group_stride + size_t(2) * layout.dim * layout.param_bytes;
}

void write_boosted(const TensorLayout &layout, uint8_t *blob, uint32_t first, const Block &block) {
  for (uint32_t g = 0; g < block.tokens / layout.group; g++) {
    uint16_t channel[256];
    boosted_of(block.boosted.data() + size_t(g) * layout.dim, layout.dim, channel);
    std::memcpy(blob + boosted_list(layout, first / layout.group + g), channel, size_t(2) * layout.boosted);
  }
}

void read_boosted(const TensorLayout &layout, const uint8_t *blob, uint32_t first, uint32_t groups, uint8_t *positions) {
  std::memset(positions, 0xff, size_t(groups) * layout.dim);
  for (uint32_t g = 0; g < groups; g++) {
    uint16_t channel[256];
    std::memcpy(channel, blob + boosted_list(layout, first / layout.group + g), size_t(2) * layout.boosted);
    for (uint32_t i = 0; i < layout.boosted; i++) positions[size_t(g) * layout.dim + channel[i]] = uint8_t(i);
  }
}

}  // namespace

void write_rows(const CpuPageFormat &format, void *page, uint32_t head, uint32_t tensor, uint32_t first, const Block &block) {
  const HeadFormat &head_format = format.head_format(head, tensor);
  const Loops &loops = *head_format.loops;
  const TensorLayout &layout = format.layout(head, tensor);
  uint8_t *blob = format.blob(page, head);
  if (layout.family == Family::halves) return write_halves(loops, layout, blob, first, block.tokens, block.params.data());
  for_params(head_format, layout, first, block.tokens,
             [&](size_t at, uint32_t bytes, size_t i) { store_param(blob + at, bytes, block.params[i]); });
  if (head_format.codec.kind == Kind::kitty) write_boosted(layout, blob, first, block);
  const Rows rows{block.boosted.data(), const_cast<uint8_t *>(block.codes.data())};
  write_codes(loops, layout, blob, first, block.tokens, rows, block.codes.get_allocator().resource());
}

void read_rows(const CpuPageFormat &format, const void *page, uint32_t head, uint32_t tensor, uint32_t first, uint32_t count,
               Block *block) {
  const HeadFormat &head_format = format.head_format(head, tensor);
  const TensorLayout &layout = format.layout(head, tensor);
  const uint8_t *blob = format.blob(page, head);
  const size_t params = block->params.size(), codes = block->codes.size(), positions = block->boosted.size();
  block->tokens += count;
  block->params.resize(params + block_params(head_format, count));
  if (layout.family == Family::halves) return read_halves(*head_format.loops, layout, blob, first, count, block->params.data() + params);
  for_params(head_format, layout, first, count,
             [&](size_t at, uint32_t bytes, size_t i) { block->params[params + i] = load_param(blob + at, bytes); });
  block->codes.resize(codes + size_t(count) * layout.dim);
  if (head_format.codec.kind == Kind::kitty) {
    block->boosted.resize(positions + size_t(count / layout.group) * layout.dim);
    read_boosted(layout, blob, first, count / layout.group, block->boosted.data() + positions);
  }
  const Rows rows{block->boosted.data() + positions, block->codes.data() + codes};
  read_codes(layout, blob, first, count, rows, block->codes.get_allocator().resource());
}

}  // namespace kvq::cpu
