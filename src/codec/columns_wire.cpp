// Wire form of column codecs: the codes of all groups, then the parameters of all groups.
#include <algorithm>

#include "codec/columns.h"
#include "codec/wire.h"

namespace kvq::columns {
namespace {

const ColumnCodec &column_codec(const HeadFormat &format) { return *descriptor(format.codec.kind).column; }

// levels[j] of slot j.
void slot_levels(const HeadFormat &format, uint32_t *levels) {
  for (const SlotClass &cls : format.classes) std::fill_n(levels + cls.first, cls.count, cls.levels);
}

// Parameters of one group; width-0 slots must have the scale 0.
Status read_params(const HeadFormat &format, const ChannelOrder &order, const uint32_t *levels, const uint8_t **wire,
                   uint16_t *params) {
  const ParamType type = format.codec.params;
  for (uint32_t c = 0; c < format.shape.dim; c++) {
    const uint32_t j = order.slot[c];
    if (!read_param(wire, type, ParamRole::scale, &params[2 * j]))
      return corrupt(format, "a scale is not finite, negative or -0");
    if (!read_param(wire, type, ParamRole::zero, &params[2 * j + 1])) return corrupt(format, "a zero is not finite");
    if (levels[j] == 1 && params[2 * j]) return corrupt(format, "the scale of a channel of width 0 is not 0");
  }
  return KVQ_OK;
}

}  // namespace

ChannelOrder::ChannelOrder(const HeadFormat &format) {
  for (uint32_t j = 0; j < format.shape.dim; j++) slot[format.channel[j]] = j;
}

size_t stream_code_bytes(const HeadFormat &format) {
  size_t bytes = 0;
  for (const SlotClass &cls : format.classes) bytes += cls.count * stream_bytes(format.codec.group, cls.levels);
  return bytes;
}

uint8_t *write_streams(const HeadFormat &format, const uint8_t *codes, const uint8_t *, uint8_t *wire) {
  const uint32_t dim = format.shape.dim, group = format.codec.group;
  const ChannelOrder order(format);
  uint32_t levels[kMaxDim];
  slot_levels(format, levels);
  for (uint32_t c = 0; c < dim; c++) {
    const uint32_t j = order.slot[c];
    CodeWriter writer(wire, levels[j]);
    for (size_t t = 0; t < group; t++) writer.put(codes[t * dim + j]);
    wire = writer.finish();
  }
  return wire;
}

const char *read_streams(const HeadFormat &format, const uint8_t **wire, uint8_t *codes, uint8_t *) {
  const uint32_t dim = format.shape.dim, group = format.codec.group;
  const ChannelOrder order(format);
  uint32_t levels[kMaxDim];
  slot_levels(format, levels);
  for (uint32_t c = 0; c < dim; c++) {
    const uint32_t j = order.slot[c];
    CodeReader reader(*wire, levels[j], group);
    for (size_t t = 0; t < group; t++) codes[t * dim + j] = reader.get();
    *wire = reader.finish();
    if (!reader.ok()) return "a code word or its padding is none that an encoder writes";
  }
  return nullptr;
}

uint8_t *write_plane(const HeadFormat &format, const uint8_t *codes, uint32_t slot, uint32_t shift, uint32_t width,
                     uint8_t *wire) {
  CodeWriter writer(wire, 1u << width);
  for (size_t t = 0; t < format.codec.group; t++)
    writer.put(uint8_t(codes[t * format.shape.dim + slot] >> shift & ((1u << width) - 1)));
  return writer.finish();
}

const uint8_t *read_plane(const HeadFormat &format, const uint8_t *wire, uint32_t slot, uint32_t shift, uint32_t width,
                          uint8_t *codes) {
  CodeReader reader(wire, 1u << width, format.codec.group);
  for (size_t t = 0; t < format.codec.group; t++) codes[t * format.shape.dim + slot] |= uint8_t(reader.get() << shift);
  return reader.finish();
}

size_t wire_size(const HeadFormat &format, uint32_t tokens) {
  return tokens / format.codec.group * column_codec(format).code_bytes(format) +
         block_params(format, tokens) * param_bytes(format.codec.params);
}

void write(const HeadFormat &format, const Block &block, uint8_t *wire) {
  const ColumnCodec &codec = column_codec(format);
  const uint32_t dim = format.shape.dim, group = format.codec.group, groups = block.tokens / group;
  const ChannelOrder order(format);
  for (uint32_t g = 0; g < groups; g++)
    wire = codec.write_codes(format, block.codes.data() + size_t(g) * group * dim,
                             block.boosted.empty() ? nullptr : block.boosted.data() + size_t(g) * dim, wire);
  for (uint32_t g = 0; g < groups; g++) {
    const uint16_t *params = block.params.data() + size_t(g) * dim * 2;
    for (uint32_t c = 0; c < dim; c++) {
      wire = write_param(params[2 * order.slot[c]], format.codec.params, wire);
      wire = write_param(params[2 * order.slot[c] + 1], format.codec.params, wire);
    }
  }
}

Status read(const HeadFormat &format, const uint8_t *wire, Block *block) {
  const ColumnCodec &codec = column_codec(format);
  const uint32_t dim = format.shape.dim, group = format.codec.group, groups = block->tokens / group;
  const ChannelOrder order(format);
  uint32_t levels[kMaxDim];
  slot_levels(format, levels);
  for (uint32_t g = 0; g < groups; g++) {
    const char *wrong = codec.read_codes(format, &wire, block->codes.data() + size_t(g) * group * dim,
                                         block->boosted.empty() ? nullptr : block->boosted.data() + size_t(g) * dim);
    if (wrong) return corrupt(format, wrong);
  }
  for (uint32_t g = 0; g < groups; g++)
    KVQ_TRY(read_params(format, order, levels, &wire, block->params.data() + size_t(g) * dim * 2));
  return KVQ_OK;
}

}  // namespace kvq::columns
