// Row codecs work on kRowLanes tokens at once: y[slot][lane], a lane per token, so that every step of a row is the same plain
// fp32 operation on kRowLanes rows.
#pragma once
#include <cstdint>

#include "codec/descriptor.h"

namespace kvq {

inline constexpr uint32_t kRowLanes = 8;
using RowLanes = float[kRowLanes];

// y = x - mu of the channels of a class for `count` tokens; the other lanes are 0.
void load_rows(const HeadFormat &format, const SlotClass &cls, const uint16_t *x, size_t token_stride, uint32_t count,
               RowLanes *y);
// out[token][channel] = y + mu, never -0.
void store_rows(const HeadFormat &format, const SlotClass &cls, const RowLanes *y, uint32_t count, float *out);

// Codes of `count` tokens of a class, between lanes and a block's [token][dim].
void store_codes(const HeadFormat &format, const SlotClass &cls, const uint8_t (*codes)[kRowLanes], uint32_t count, uint8_t *out);

void rotate_rows(const HeadFormat &format, const SlotClass &cls, RowLanes *y);
void unrotate_rows(const HeadFormat &format, const SlotClass &cls, RowLanes *y);

// Wire: the codes of every class, one stream each over the block's tokens.
size_t row_stream_bytes(const HeadFormat &format, uint32_t tokens);
uint8_t *write_row_streams(const HeadFormat &format, const Block &block, uint8_t *wire);
Status read_row_streams(const HeadFormat &format, const uint8_t **wire, Block *block);

}  // namespace kvq
