// Row codecs work on kRowLanes tokens at once: y[slot][lane], a lane per token (util/loops.h).
#pragma once
#include <cstdint>

#include "codec/descriptor.h"

namespace kvq {

// Scratch for kRowLanes tokens of a head.
class RowBlock {
 public:
  RowBlock(std::pmr::memory_resource *memory, uint32_t dim);
  ~RowBlock();
  RowBlock(const RowBlock &) = delete;
  RowBlock &operator=(const RowBlock &) = delete;

  // Take over `count` rows, which may stay where they are; the other lanes are 0.
  void take(const HeadFormat &format, const HalfRows &rows, uint32_t count);
  // y = x - mu of the channels of a class.
  void load(const HeadFormat &format, const SlotClass &cls) {
    format.loops->load_lanes(x_, stride_, format.channel.data() + cls.first, cls.count, format.mu.empty() ? nullptr : format.mu.data(), y);
  }

  // For lanes that are not all written: numbers to work on.
  RowLanes *zeros();

  RowLanes *y;       // [dim]
  CodeLanes *codes;  // [dim]

 private:
  uint16_t *own_;      // [dim][kRowLanes], by channel
  const uint16_t *x_;  // of channel c from x_[c * stride_] on
  size_t stride_;
  std::pmr::memory_resource *memory_;
  uint32_t dim_;
  size_t bytes_;
};

// out[token][channel] = y + mu, never -0.
void store_rows(const HeadFormat &format, const SlotClass &cls, const RowLanes *y, uint32_t count, float *out);

// Codes of `count` tokens of a class, from lanes to a block's [token][dim].
void store_codes(const HeadFormat &format, const SlotClass &cls, const CodeLanes *codes, uint32_t count, uint8_t *out);

void rotate_rows(const HeadFormat &format, const SlotClass &cls, RowLanes *y);
void unrotate_rows(const HeadFormat &format, const SlotClass &cls, RowLanes *y);

// Wire: the codes of every class, one stream each over the block's tokens.
size_t row_stream_bytes(const HeadFormat &format, uint32_t tokens);
uint8_t *write_row_streams(const HeadFormat &format, const Block &block, uint8_t *wire);
Status read_row_streams(const HeadFormat &format, const uint8_t **wire, Block *block);

}  // namespace kvq
