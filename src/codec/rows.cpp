#include "codec/rows.h"

#include <cstring>

#include "codec/bits.h"
#include "codec/rotation.h"
#include "codec/wire.h"
#include "util/fp.h"

namespace kvq {

RowBlock::RowBlock(std::pmr::memory_resource *memory, uint32_t dim)
    : memory_(memory), bytes_(size_t(dim) * (sizeof *y + sizeof *x + sizeof *codes)) {
  y = static_cast<RowLanes *>(memory->allocate(bytes_, 64));
  x = reinterpret_cast<uint16_t(*)[kRowLanes]>(y + dim);
  codes = reinterpret_cast<CodeLanes *>(x + dim);
  std::memset(y, 0, bytes_);
}

RowBlock::~RowBlock() { memory_->deallocate(y, bytes_, 64); }

void RowBlock::take(const HeadFormat &format, const uint16_t *rows, size_t token_stride, uint32_t count) {
  const uint32_t dim = format.shape.dim;
  if (count < kRowLanes) std::memset(x, 0, dim * sizeof *x);
  format.loops->transpose_halves(rows, token_stride, count, dim, x[0], kRowLanes);
}

void store_rows(const HeadFormat &format, const SlotClass &cls, const RowLanes *y, uint32_t count, float *out) {
  const uint32_t *channel = format.channel.data() + cls.first;
  for (uint32_t l = 0; l < count; l++) {
    float *row = out + size_t(l) * format.shape.dim;
    if (format.mu.empty())
      for (uint32_t j = 0; j < cls.count; j++) row[channel[j]] = y[j][l] + 0.0f;
    else
      for (uint32_t j = 0; j < cls.count; j++) row[channel[j]] = y[j][l] + half_to_float(format.mu[channel[j]]) + 0.0f;
  }
}

void store_codes(const HeadFormat &format, const SlotClass &cls, const CodeLanes *codes, uint32_t count, uint8_t *out) {
  format.loops->transpose_bytes(codes[0], kRowLanes, cls.count, count, out + cls.first, format.shape.dim);
}

void rotate_rows(const HeadFormat &format, const SlotClass &cls, RowLanes *y) {
  if (format.codec.rotate) rotate_lanes(*format.loops, y, cls.count, format.codec.seed, format.shape.tensor, cls.rotation);
}

void unrotate_rows(const HeadFormat &format, const SlotClass &cls, RowLanes *y) {
  if (format.codec.rotate) unrotate_lanes(*format.loops, y, cls.count, format.codec.seed, format.shape.tensor, cls.rotation);
}

size_t row_stream_bytes(const HeadFormat &format, uint32_t tokens) {
  size_t bytes = 0;
  for (const SlotClass &cls : format.classes) bytes += stream_bytes(uint64_t(tokens) * cls.count, cls.levels);
  return bytes;
}

uint8_t *write_row_streams(const HeadFormat &format, const Block &block, uint8_t *wire) {
  for (const SlotClass &cls : format.classes) {
    CodeWriter writer(wire, cls.levels);
    for (size_t t = 0; t < block.tokens; t++) {
      const uint8_t *row = block.codes.data() + t * format.shape.dim + cls.first;
      for (uint32_t j = 0; j < cls.count; j++) writer.put(row[j]);
    }
    wire = writer.finish();
  }
  return wire;
}

Status read_row_streams(const HeadFormat &format, const uint8_t **wire, Block *block) {
  for (const SlotClass &cls : format.classes) {
    CodeReader reader(*wire, cls.levels, uint64_t(block->tokens) * cls.count);
    for (size_t t = 0; t < block->tokens; t++) {
      uint8_t *row = block->codes.data() + t * format.shape.dim + cls.first;
      for (uint32_t j = 0; j < cls.count; j++) row[j] = reader.get();
    }
    *wire = reader.finish();
    if (!reader.ok()) return corrupt(format, "a code word or its padding is none that an encoder writes");
  }
  return KVQ_OK;
}

}  // namespace kvq
