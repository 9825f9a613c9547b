// Sizes and places of everything in a packed page; layout.h describes them.
#include "cpu/layout.h"

#include <algorithm>
#include <bit>

#include "util/fp.h"

namespace kvq::cpu {
namespace {

constexpr uint32_t kBookLevels[12] = {2, 3, 4, 5, 6, 7, 8, 16, 32, 64, 128, 256};
constexpr uint32_t kVector = 64;  // bytes of a code vector and of a plane

uint32_t round_up(uint32_t n, uint32_t to) { return (n + to - 1) / to * to; }

CodeTable make_book(uint32_t levels) {
  CodeTable table{levels, levels > 64, {}, {}};
  const auto book = book_levels(levels);
  for (uint32_t i = 0; i < 256; i++) {
    const uint32_t code = std::min(i % std::bit_ceil(levels), levels - 1);
    const uint32_t level = uint32_t(book[code] + (table.wide ? 32768 : 128));
    table.low[i] = uint8_t(level);
    table.high[i] = uint8_t(level >> 8);
  }
  return table;
}

SchemeId scheme_of(uint32_t levels) {
  switch (levels) {
    case 3:
      return kBase3;
    case 5:
      return kBase5;
    case 6:
      return kBase6;
    default:
      return SchemeId(std::bit_width(levels - 1) - 1);
  }
}

// `across`: vectors whose digits do not share fields, a power of two; `tail`: bits of the shared planes that are taken.
Packing make_packing(uint32_t levels, uint32_t line, uint32_t across, uint32_t *tail) {
  Packing packing{};
  packing.scheme = scheme_of(levels);
  const Scheme &scheme = kSchemeTable[packing.scheme];
  packing.vectors = (line + kVector - 1) / kVector;
  const uint32_t rows = packing.vectors / across, rest = rows % scheme.digits, whole = rows / scheme.digits * across;
  packing.spread = uint8_t(std::countr_zero(across));
  packing.units = whole / scheme.fields;
  packing.short_fields = uint8_t(rest ? across : 0);
  packing.tail_fields = uint8_t(whole % scheme.fields + packing.short_fields);
  packing.last_digits = uint8_t(rest ? rest : scheme.digits);
  packing.tail_bit = uint16_t(*tail);
  *tail += tail_bits(packing);
  return packing;
}

Family family_of(const HeadFormat &format) {
  const Codec &codec = format.codec;
  if (codec.kind == Kind::raw || (codec.kind == Kind::progressive && codec.levels == 0)) return Family::halves;
  if (codec.kind == Kind::polar) return Family::values;
  if (!is_row(codec.kind)) return Family::columns;
  const bool small_groups = format.token_params > 2 && codec.kind == Kind::affine_token && codec.group % 16 != 0;
  return small_groups ? Family::values : Family::rows;
}

bool is_book(const HeadFormat &format) { return format.token_params == format.classes.size() && family_of(format) == Family::rows; }

// Rows of books keep their norm (FORMATS 2.2), so the mean square of scale * level is 1.  Affine codes: from the least to the largest of
// 64 to 128 normal values are about 5.5 deviations; rounding adds 1/12.
Spread spread_of(const Region &region, Family family) {
  if (region.table) {
    const float mean = 1.0f / (region.scale * region.scale);
    return {mean, mean, mean};
  }
  const float last = float(region.levels - 1), deviation = last / 5.5f, bias = float(region.bias), farther = std::max(bias, last - bias);
  const float most = family == Family::rows ? last / 2 : farther;  // rows: weigh_segment() adds the middle
  return {region.levels == 2 ? 0.25f : deviation * deviation + 1.0f / 12.0f, last * (last + 2) / 12.0f, most * most};
}

// Slots or tokens whose products are computed together: those of a group.
uint32_t group_of(const HeadFormat &format, const Region &region) {
  if (!is_row(format.codec.kind)) return format.codec.group;
  return is_book(format) ? region.count : 2 * format.shape.dim / format.token_params;
}

// Whether attention may read the region's planes as they are, and then the vectors of a quad.
uint32_t vectors_across(const HeadFormat &format, const TensorLayout &layout, const Region &region) {
  constexpr uint32_t kLanes = 64, kDepth = 8;  // of a block of vectors, and of two quads
  const bool rows = layout.family == Family::rows, by_lane = rows != layout.keys;
  if (region.upper || !(rows || (layout.keys && layout.family == Family::columns))) return 0;
  const Scheme &scheme = kSchemeTable[scheme_of(region.levels)];
  const uint32_t lanes = layout.keys ? layout.tile_tokens : region.count, depth = layout.keys ? region.count : layout.tile_tokens;
  const uint32_t across = lanes / 16, group = group_of(format, region);
  if ((scheme.digits == 1 && scheme.bits > 6) || (across % scheme.fields && 2 * across != scheme.fields)) return 0;
  if (scheme.digits > 1 && (!rows || !std::has_single_bit(across) || across > 16 || (layout.keys && group != depth))) return 0;
  return lanes % kLanes || depth % kDepth || depth > kSumSpan || group % (by_lane ? kLanes : kDepth) ? 0 : across;
}

void add_region(const Tables &tables, const HeadFormat &format, const SlotClass &cls, bool upper, TensorLayout *out) {
  if (cls.levels < 2 || cls.count == 0) return;
  Region region{};
  region.first = cls.first, region.count = cls.count, region.levels = cls.levels, region.upper = upper;
  region.line = out->tile_tokens * cls.count;
  region.across = vectors_across(format, *out, region);
  const uint32_t digits = kSchemeTable[scheme_of(cls.levels)].digits;
  region.packing = make_packing(cls.levels, region.line, digits > 1 && region.across ? region.across : 1, &out->tail);
  region.offset = out->codes;
  region.table = is_book(format) ? tables.book(cls.levels) : nullptr;
  region.scale = region.table ? book_scale(cls.levels) : 1.0f;
  region.bias = region.table ? 128 : out->family == Family::values ? 0
                                                                   : int32_t(cls.levels / 2);
  region.middle = region.table ? 0.0f : float(region.levels - 1) / 2 - float(region.bias);
  region.spread = spread_of(region, out->family);
  region.quad = out->quads;
  region.byte = out->decoded;
  const uint32_t arrays = region.table && region.table->wide ? 2 : 1;
  const uint32_t quads = (cls.count + 3) / 4;
  out->quads += quads * arrays;
  out->decoded += (out->keys ? quads * 4 * out->tile_tokens : region.line) * arrays;
  out->codes += size_t(kVector) * region.packing.units * kSchemeTable[region.packing.scheme].planes;
  out->regions.push_back(region);
}

void add_segments(const HeadFormat &format, TensorLayout *out) {
  if (out->family != Family::rows) return;
  if (is_book(format)) {
    for (uint32_t i = 0; i < out->regions.size(); i++) out->segments.push_back({i, out->regions[i].first, out->regions[i].count, i});
    return;
  }
  const uint32_t group = 2 * out->dim / format.token_params;
  for (uint32_t i = 0; i < out->dim / group; i++) out->segments.push_back({0, i * group, group, 2 * i});
}

// Kitty's channels have 4 levels, and the boosted ones two bits more.
void add_regions(const Tables &tables, const HeadFormat &format, TensorLayout *out) {
  if (out->family == Family::halves) {
    out->codes = size_t(2) * out->tile_tokens * out->dim;
    return;
  }
  if (format.codec.kind != Kind::kitty) {
    for (const SlotClass &cls : format.classes) add_region(tables, format, cls, false, out);
    return;
  }
  out->boosted = uint32_t(uint64_t(out->dim) * format.codec.boost.p / format.codec.boost.q);
  add_region(tables, format, {4, 0, out->dim, 0}, false, out);
  add_region(tables, format, {4, 0, out->boosted, 0}, true, out);
}

// Weights are made a vector at a time, at most kSumSpan in a sum.
void set_ends(TensorLayout *out) {
  const bool whole = std::all_of(out->regions.begin(), out->regions.end(), [](const Region &region) { return (region.first | region.count) % 16 == 0; });
  if (!out->keys || out->family != Family::columns || out->boosted || !whole || 4 * out->quads > kSumSpan) return;
  for (const Region &region : out->regions) out->ends.push_back(4 * region.quad + region.count);
}

void set_params(const HeadFormat &format, TensorLayout *out) {
  out->param_bytes = format.codec.params == ParamType::fp16 ? 2 : 1;
  if (out->family == Family::halves) return;
  if (is_row(format.codec.kind)) {
    out->params_size = size_t(format.token_params) * out->page_tokens * out->param_bytes;
    return;
  }
  out->group = format.codec.group;
  out->groups = out->page_tokens / out->group;
  out->group_stride = size_t(2) * out->dim * out->param_bytes + 2 * out->boosted;
  out->params_size = out->group_stride * out->groups;
}

// Vector loads of rows or parameters pass their end.
bool ends_inside_vector(const TensorLayout &layout) {
  const bool by_slot = layout.family == Family::halves || layout.group;
  return (by_slot ? layout.dim : layout.page_tokens) % 16 != 0;
}

TensorLayout make_layout(std::pmr::memory_resource *memory, const Tables &tables, const HeadFormat &format, uint32_t tokens, uint32_t tail) {
  TensorLayout layout(memory);
  layout.tail = tail;
  layout.family = family_of(format);
  layout.keys = format.shape.tensor == KVQ_TENSOR_K;
  layout.dim = format.shape.dim;
  layout.page_tokens = tokens;
  layout.tiles = (tokens + kTileTokens - 1) / kTileTokens;
  layout.tile_tokens = round_up((tokens + layout.tiles - 1) / layout.tiles, 4);
  add_regions(tables, format, &layout);
  add_segments(format, &layout);
  set_ends(&layout);
  set_params(format, &layout);
  return layout;
}

}  // namespace

Tables::Tables() {
  for (uint32_t i = 0; i < 12; i++) books[i] = make_book(kBookLevels[i]);
  HeadFormat format(std::pmr::get_default_resource());
  for (uint32_t i = 0; i < 256; i++) {
    format.codec.params = ParamType::e4m3;
    e4m3[i] = param_value(format, uint16_t(i));
    format.codec.params = ParamType::e5m3;
    e5m3[i] = param_value(format, uint16_t(i));
  }
}

const CodeTable *Tables::book(uint32_t levels) const {
  for (const CodeTable &book : books)
    if (book.levels == levels) return &book;
  return nullptr;
}

uint32_t tail_bits(const Packing &packing) {
  if (packing.tail_fields == 0) return 0;
  const Scheme &scheme = kSchemeTable[packing.scheme];
  const uint32_t bits = packing.short_fields ? kShortBits[packing.scheme][packing.last_digits] : 0;
  return (packing.tail_fields - packing.short_fields) * scheme.bits + packing.short_fields * bits;
}

// Every code twice (wide books), a word of rest per class, and kitty's boosted channels; then what products of kDepth quads may read.
size_t code_bytes(uint32_t dim) {
  return size_t(kTileTokens) * (2 * dim + 4 * 9 + std::min(dim, 256u)) + kSlack + size_t(kDepth) * 4 * std::max(dim, kTileTokens);
}

CpuPageFormat::CpuPageFormat(std::pmr::memory_resource *memory, const Tables &tables, uint32_t tokens,
                             std::pmr::vector<HeadFormat> &&keys, std::pmr::vector<HeadFormat> &&values)
    : PageFormat(memory), layouts(memory), offsets(memory) {
  k = std::move(keys);
  v = std::move(values);
  page_tokens = tokens;
  layouts.reserve(2 * k.size());
  for (size_t head = 0; head < k.size(); head++) {
    TensorLayout key = make_layout(memory, tables, k[head], tokens, 0);
    TensorLayout value = make_layout(memory, tables, v[head], tokens, key.tail);
    value.tile_offset = key.codes;
    key.tail_offset = value.tail_offset = key.codes + value.codes;
    key.tile_stride = value.tile_stride = key.tail_offset + (value.tail + 7) / 8 * kVector;
    key.params = key.tile_stride * key.tiles;
    value.params = key.params + (key.params_size + 15) / 16 * 16;
    offsets.push_back(bytes);
    bytes += (value.params + value.params_size + kVector - 1) / kVector * kVector;
    if (head + 1 == k.size() && (ends_inside_vector(key) || ends_inside_vector(value))) bytes += kVector;
    layouts.push_back(std::move(key));
    layouts.push_back(std::move(value));
  }
}

}  // namespace kvq::cpu
