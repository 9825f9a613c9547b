#include "codec/columns.h"

#include <algorithm>

#include "codec/affine.h"

namespace kvq::columns {
namespace {

const ColumnCodec &column_codec(const HeadFormat &format) { return *descriptor(format.codec.kind).column; }

// Rule 2.1 on every slot of one group of values [G][dim].
void encode_group(const HeadFormat &format, const uint16_t *values, const ColumnRule *rules, uint16_t *params, uint8_t *codes) {
  const uint32_t dim = format.shape.dim, group = format.codec.group;
  const ParamType type = format.codec.params;
  float mn[kMaxDim], mx[kMaxDim], zero[kMaxDim], step[kMaxDim], top[kMaxDim];
  format.loops->range_columns(values, group, dim, mn, mx);
  for (uint32_t j = 0; j < dim; j++) {
    const AffineParams stored = affine_params(mn[j], mx[j], rules[j].levels, rules[j].midpoint, type);
    const AffineCoder coder = affine_coder(stored, rules[j].levels, type);
    params[2 * j] = stored.s, params[2 * j + 1] = stored.z;
    zero[j] = coder.zero, step[j] = coder.step, top[j] = coder.top;
  }
  format.loops->affine_columns(values, group, dim, zero, step, top, codes);
}

}  // namespace

void encode(const HeadFormat &format, const HalfRows &rows, Block *block) {
  const ColumnCodec &codec = column_codec(format);
  const uint32_t dim = format.shape.dim, group = format.codec.group;
  std::pmr::vector<uint16_t> values(size_t(group) * dim, block->params.get_allocator());
  ColumnRule rules[kMaxDim];
  for (uint32_t first = 0, g = 0; first < block->tokens; first += group, g++) {
    codec.load(format, rows.from(first), values.data());
    codec.rules(format, values.data(), rules, block->boosted.empty() ? nullptr : block->boosted.data() + size_t(g) * dim);
    encode_group(format, values.data(), rules, block->params.data() + size_t(g) * dim * 2,
                 block->codes.data() + size_t(first) * dim);
  }
}

void decode(const HeadFormat &format, const Block &block, float *out) {
  const ColumnCodec &codec = column_codec(format);
  const uint32_t dim = format.shape.dim, group = format.codec.group;
  float s[kMaxDim], z[kMaxDim], values[kMaxDim];
  for (uint32_t t = 0; t < block.tokens; t++) {
    if (t % group == 0) {
      const uint16_t *params = block.params.data() + size_t(t / group) * dim * 2;
      for (uint32_t j = 0; j < dim; j++) {
        s[j] = load_param(params[2 * j], format.codec.params);
        z[j] = load_param(params[2 * j + 1], format.codec.params);
      }
    }
    const uint8_t *codes = block.codes.data() + size_t(t) * dim;
    for (uint32_t j = 0; j < dim; j++) values[j] = affine_value(codes[j], s[j], z[j]);
    codec.store(format, values, out + size_t(t) * dim);
  }
}

void load(const HeadFormat &format, const HalfRows &rows, uint16_t *values) {
  const uint32_t *channel = format.channel.data();
  const uint32_t dim = format.shape.dim, group = format.codec.group;
  if (rows.token_stride == 1) return format.loops->transpose_halves(rows.x, rows.channel_stride, channel, dim, group, values, dim);
  const bool in_order = std::is_sorted(channel, channel + dim);
  for (uint32_t t = 0; t < group; t++, values += dim) {
    const uint16_t *x = rows.from(t).x;
    if (in_order)
      std::copy_n(x, dim, values);
    else
      for (uint32_t j = 0; j < dim; j++) values[j] = x[channel[j]];
  }
}

void class_rules(const HeadFormat &format, const uint16_t *, ColumnRule *rules, uint8_t *) {
  for (const SlotClass &cls : format.classes)
    std::fill_n(rules + cls.first, cls.count, ColumnRule{cls.levels, format.codec.midpoint});
}

void store(const HeadFormat &format, const float *values, float *out) {
  const uint32_t *channel = format.channel.data();
  for (uint32_t j = 0; j < format.shape.dim; j++) out[channel[j]] = values[j] + 0.0f;
}

}  // namespace kvq::columns
