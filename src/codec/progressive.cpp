// progressive (PM-KVQ, section 2.5): 16 bits raw, or affine rows whose codes are those of the chain 8 -> 4 -> 2 bits.
#include "codec/affine_rows.h"
#include "codec/descriptor.h"
#include "codec/keys.h"
#include "codec/raw.h"
#include "codec/row_rules.h"

namespace kvq {
namespace progressive {

// From `levels` levels to the next fewer: code' = (2 * code + ratio) div (2 * ratio), s' = hp(ratio * s), where the coarser step
// is `ratio` finer ones.
struct Shrink {
  uint32_t levels, ratio;
};
constexpr Shrink kChain[] = {{16, 17}, {4, 5}};

static void shrink(Shrink step, Block *block) {
  for (uint8_t &code : block->codes) code = shrink_code(code, step.ratio);
  for (size_t i = 0; i < block->params.size(); i += 2) block->params[i] = shrink_scale(block->params[i], step.ratio);
}

static bool is_raw(const HeadFormat &format) { return format.codec.levels == 0; }

static Status resolve(Codec *codec, const HeadShape &shape) {
  codec->group = shape.dim;
  return KVQ_OK;
}

static void arrange(HeadFormat *format) { is_raw(*format) ? raw::arrange(format) : affine_rows::arrange(format); }

// Down from `levels` levels to those of the format.
static void shrink_from(uint32_t levels, const HeadFormat &format, Block *block) {
  for (const Shrink &step : kChain)
    if (levels > step.levels && format.codec.levels <= step.levels) shrink(step, block);
}

static void encode(const HeadFormat &format, const HalfRows &rows, Block *block) {
  if (is_raw(format)) return raw::encode(format, rows, block);
  affine_rows::encode_levels(format, 256, rows, block);
  shrink_from(256, format, block);
}

static void decode(const HeadFormat &format, const Block &block, float *out) {
  is_raw(format) ? raw::decode(format, block, out) : affine_rows::decode(format, block, out);
}

static size_t wire_size(const HeadFormat &format, uint32_t tokens) {
  return is_raw(format) ? raw::wire_size(format, tokens) : affine_rows::wire_size(format, tokens);
}

static void write(const HeadFormat &format, const Block &block, uint8_t *wire) {
  is_raw(format) ? raw::write(format, block, wire) : affine_rows::write(format, block, wire);
}

static Status read(const HeadFormat &format, const uint8_t *wire, Block *block) {
  return is_raw(format) ? raw::read(format, wire, block) : affine_rows::read(format, wire, block);
}

}  // namespace progressive

void narrow(const HeadFormat &from, const Block &block, const HeadFormat &to, Block *out) {
  if (progressive::is_raw(from)) return encode(to, {block.params.data(), from.shape.dim}, block.tokens, out);
  *out = block;
  progressive::shrink_from(from.codec.levels, to, out);
}

static constexpr const TextKey *kKeys[] = {&keys::progressive_bits};

constexpr Descriptor kProgressive = {
    .name = "progressive",
    .keys = kKeys,
    .resolve = progressive::resolve,
    .arrange = progressive::arrange,
    .encode = progressive::encode,
    .decode = progressive::decode,
    .wire_size = progressive::wire_size,
    .write = progressive::write,
    .read = progressive::read,
};

}  // namespace kvq
