#include "codec/rows.h"

#include <cstring>

#include "codec/bits.h"
#include "codec/rotation.h"
#include "codec/wire.h"
#include "util/fp.h"

namespace kvq {

RowBlock::RowBlock(std::pmr::memory_resource *memory, uint32_t dim)
    : memory_(memory), dim_(dim), bytes_(size_t(dim) * (sizeof *y + sizeof *codes + kRowLanes * sizeof *own_)) {
  y = static_cast<RowLanes *>(memory->allocate(bytes_, 64));
  own_ = reinterpret_cast<uint16_t *>(y + dim);
  codes = reinterpret_cast<CodeLanes *>(own_ + size_t(dim) * kRowLanes);
}

RowLanes *RowBlock::zeros() {
  std::memset(y, 0, dim_ * sizeof *y);
  return y;
}

RowBlock::~RowBlock() { memory_->deallocate(y, bytes_, 64); }

void RowBlock::take(const HeadFormat &format, const HalfRows &rows, uint32_t count) {
  const bool in_lanes = rows.token_stride == 1;
  x_ = in_lanes && count == kRowLanes ? rows.x : own_;
  stride_ = x_ == own_ ? kRowLanes : rows.channel_stride;
  if (x_ != own_) return;
  if (count < kRowLanes) std::memset(own_, 0, dim_ * kRowLanes * sizeof *own_);
  if (!in_lanes) return format.loops->transpose_halves(rows.x, rows.token_stride, nullptr, count, dim_, own_, kRowLanes);
  for (size_t c = 0; c < dim_; c++) std::memcpy(own_ + c * kRowLanes, rows.x + c * rows.channel_stride, count * sizeof *own_);
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
