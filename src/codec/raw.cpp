#include "codec/raw.h"

#include <algorithm>

#include "codec/descriptor.h"
#include "codec/wire.h"
#include "util/fp.h"

namespace kvq {
namespace raw {

void arrange(HeadFormat *format) { arrange_plain(format, 0); }

void encode(const HeadFormat &format, const HalfRows &rows, Block *block) {
  const uint32_t dim = format.shape.dim;
  if (rows.channel_stride != 1)
    return format.loops->transpose_halves(rows.x, rows.channel_stride, nullptr, dim, block->tokens, block->params.data(), dim);
  for (size_t t = 0; t < block->tokens; t++) std::copy_n(rows.from(t).x, dim, block->params.data() + t * dim);
}

void decode(const HeadFormat &, const Block &block, float *out) {
  for (size_t i = 0; i < block.params.size(); i++) out[i] = half_to_float(block.params[i]) + 0.0f;
}

size_t wire_size(const HeadFormat &format, uint32_t tokens) { return size_t(tokens) * format.shape.dim * 2; }

void write(const HeadFormat &, const Block &block, uint8_t *wire) {
  for (const uint16_t x : block.params) wire = write_param(x, ParamType::fp16, wire);
}

Status read(const HeadFormat &format, const uint8_t *wire, Block *block) {
  for (uint16_t &x : block->params)
    if (!read_param(&wire, ParamType::fp16, ParamRole::zero, &x)) return corrupt(format, "a value is not finite");
  return KVQ_OK;
}

}  // namespace raw

constexpr Descriptor kRaw = {
    .name = "raw",
    .keys = {},
    .arrange = raw::arrange,
    .encode = raw::encode,
    .decode = raw::decode,
    .wire_size = raw::wire_size,
    .write = raw::write,
    .read = raw::read,
};

}  // namespace kvq
