#include "codec/affine_rows.h"

#include <algorithm>

#include "codec/affine.h"
#include "codec/keys.h"
#include "codec/rows.h"
#include "codec/wire.h"

namespace kvq {
namespace affine_rows {
namespace {

// Codes and parameters of channels [first, first + group) in all lanes.
void encode_group(const Loops &loops, RowBlock &rows, uint32_t first, uint32_t group, uint32_t levels, AffineParams *params) {
  float mn[kRowLanes], mx[kRowLanes], zero[kRowLanes], step[kRowLanes], top[kRowLanes];
  loops.range_lanes(rows.y + first, group, mn, mx);
  for (uint32_t l = 0; l < kRowLanes; l++) {
    params[l] = affine_params(mn[l], mx[l], levels, false, ParamType::fp16);
    const AffineCoder coder = affine_coder(params[l], levels, ParamType::fp16);
    zero[l] = coder.zero, step[l] = coder.step, top[l] = coder.top;
  }
  loops.affine_lanes(rows.y + first, group, zero, step, top, rows.codes + first);
}

}  // namespace

void arrange(HeadFormat *format) {
  arrange_plain(format, format->codec.levels);
  format->token_params = 2 * (format->shape.dim / format->codec.group);
}

void encode_levels(const HeadFormat &format, uint32_t levels, const HalfRows &rows, Block *block) {
  const SlotClass &cls = format.classes[0];
  const uint32_t group = format.codec.group;
  RowBlock lanes(block->codes.get_allocator().resource(), format.shape.dim);
  for (uint32_t t = 0; t < block->tokens; t += kRowLanes) {
    const uint32_t count = std::min(kRowLanes, block->tokens - t);
    lanes.take(format, rows.from(t), count);
    lanes.load(format, cls);
    rotate_rows(format, cls, lanes.y);
    for (uint32_t first = 0; first < cls.count; first += group) {
      AffineParams params[kRowLanes];
      encode_group(*format.loops, lanes, first, group, levels, params);
      for (uint32_t l = 0; l < count; l++) {
        uint16_t *stored = block->params.data() + size_t(t + l) * format.token_params + 2 * (first / group);
        stored[0] = params[l].s, stored[1] = params[l].z;
      }
    }
    store_codes(format, cls, lanes.codes, count, block->codes.data() + size_t(t) * format.shape.dim);
  }
}

void encode(const HeadFormat &format, const HalfRows &rows, Block *block) {
  encode_levels(format, format.codec.levels, rows, block);
}

void decode(const HeadFormat &format, const Block &block, float *out) {
  const SlotClass &cls = format.classes[0];
  const size_t dim = format.shape.dim;
  const uint32_t group = format.codec.group;
  RowBlock lanes(block.codes.get_allocator().resource(), format.shape.dim);
  RowLanes *y = lanes.zeros();
  for (uint32_t t = 0; t < block.tokens; t += kRowLanes) {
    const uint32_t count = std::min(kRowLanes, block.tokens - t);
    for (uint32_t l = 0; l < count; l++) {
      const uint8_t *codes = block.codes.data() + (t + l) * dim;
      const uint16_t *params = block.params.data() + size_t(t + l) * format.token_params;
      for (uint32_t first = 0; first < dim; first += group, params += 2) {
        const float s = half_to_float(params[0]), z = half_to_float(params[1]);
        for (uint32_t j = first; j < first + group; j++) y[j][l] = affine_value(codes[j], s, z);
      }
    }
    unrotate_rows(format, cls, y);
    store_rows(format, cls, y, count, out + t * dim);
  }
}

size_t wire_size(const HeadFormat &format, uint32_t tokens) {
  return row_stream_bytes(format, tokens) + size_t(tokens) * format.token_params * 2;
}

void write(const HeadFormat &format, const Block &block, uint8_t *wire) {
  wire = write_row_streams(format, block, wire);
  for (const uint16_t param : block.params) wire = write_param(param, ParamType::fp16, wire);
}

Status read(const HeadFormat &format, const uint8_t *wire, Block *block) {
  KVQ_TRY(read_row_streams(format, &wire, block));
  for (size_t i = 0; i < block->params.size(); i++)
    if (!read_param(&wire, ParamType::fp16, i % 2 ? ParamRole::zero : ParamRole::scale, &block->params[i]))
      return corrupt(format, i % 2 ? "a zero is not finite" : "a scale is not finite, negative or -0");
  return KVQ_OK;
}

}  // namespace affine_rows

static constexpr const TextKey *kKeys[] = {&keys::levels, &keys::group_channels, &keys::rotate_off, &keys::seed, &keys::center};

constexpr Descriptor kAffineToken = {
    .name = "affine-token",
    .keys = kKeys,
    .arrange = affine_rows::arrange,
    .encode = affine_rows::encode,
    .decode = affine_rows::decode,
    .wire_size = affine_rows::wire_size,
    .write = affine_rows::write,
    .read = affine_rows::read,
};

}  // namespace kvq
