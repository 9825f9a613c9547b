// The table of codecs, and the functions of codec.h that go through it.
#include "codec/descriptor.h"

#include <algorithm>

#include "codec/minifloat.h"

namespace kvq {
namespace {

// In the order of Kind.
constexpr const Descriptor *kTable[kKinds] = {&kRaw, &kAffineChannel, &kAffineToken, &kLloyd, &kPairMix, &kWidthGroups,
                                              &kChannelSplit, &kKitty, &kChannelWidths, &kPolar, &kProgressive};

bool is_raw(const Codec &codec) { return codec.kind == Kind::raw || (codec.kind == Kind::progressive && codec.levels == 0); }

}  // namespace

const Descriptor &descriptor(Kind kind) { return *kTable[uint32_t(kind)]; }

Kind find_kind(std::string_view name) {
  return Kind(std::ranges::find(kTable, name, &Descriptor::name) - std::begin(kTable));
}

bool is_row(Kind kind) { return !descriptor(kind).column; }

uint32_t table_entries(const Codec &codec, const HeadShape &shape) {
  const TableUnit unit = descriptor(codec.kind).table_unit;
  if (unit == TableUnit::none) return 0;
  return unit == TableUnit::channel || codec.by_channel ? shape.dim : shape.dim / 2;
}

uint32_t group_tokens(const Codec &codec) { return is_row(codec.kind) ? 1 : codec.group; }

bool is_rotated(const HeadFormat &format) { return format.codec.rotate; }

float param_value(const HeadFormat &format, uint16_t bits) { return load_param(bits, format.codec.params); }

size_t block_params(const HeadFormat &format, uint32_t tokens) {
  if (is_raw(format.codec)) return size_t(tokens) * format.shape.dim;
  if (is_row(format.codec.kind)) return size_t(tokens) * format.token_params;
  const uint32_t group = format.codec.group;
  return size_t((uint64_t(tokens) + group - 1) / group) * format.shape.dim * 2;
}

// Give `block` the sizes of `tokens` tokens.
static void size_block(const HeadFormat &format, uint32_t tokens, Block *block) {
  const size_t dim = format.shape.dim, params = block_params(format, tokens);
  block->tokens = tokens;
  block->codes.resize(is_raw(format.codec) ? 0 : tokens * dim);
  block->params.resize(params);
  block->boosted.resize(format.codec.kind == Kind::kitty ? params / 2 : 0);
}

void encode(const HeadFormat &format, const HalfRows &rows, uint32_t tokens, Block *block) {
  size_block(format, tokens, block);
  descriptor(format.codec.kind).encode(format, rows, block);
}

void decode(const HeadFormat &format, const Block &block, float *out) {
  descriptor(format.codec.kind).decode(format, block, out);
}

size_t wire_size(const HeadFormat &format, uint32_t tokens) { return descriptor(format.codec.kind).wire_size(format, tokens); }

void write_wire(const HeadFormat &format, const Block &block, uint8_t *wire) {
  descriptor(format.codec.kind).write(format, block, wire);
}

Status read_wire(const HeadFormat &format, const uint8_t *wire, size_t size, uint32_t tokens, Block *block) {
  const Descriptor &record = descriptor(format.codec.kind);
  if (tokens % group_tokens(format.codec))
    return fail(KVQ_E_INVALID, "%u tokens are no whole groups of %u, which %s needs", tokens, group_tokens(format.codec),
                record.name.data());
  const size_t expected = record.wire_size(format, tokens);
  if (size != expected)
    return fail(KVQ_E_CORRUPT, "wire block of %zu bytes: %u tokens of %s take %zu", size, tokens, record.name.data(), expected);
  size_block(format, tokens, block);
  return record.read(format, wire, block);
}

}  // namespace kvq
