#include "codec/rows.h"

#include "codec/bits.h"
#include "codec/rotation.h"
#include "codec/wire.h"
#include "util/fp.h"

namespace kvq {

void load_rows(const HeadFormat &format, const SlotClass &cls, const uint16_t *x, size_t token_stride, uint32_t count,
               RowLanes *y) {
  const uint32_t *channel = format.channel.data() + cls.first;
  for (uint32_t l = 0; l < kRowLanes; l++) {
    const uint16_t *row = x + l * token_stride;
    if (l >= count)
      for (uint32_t j = 0; j < cls.count; j++) y[j][l] = 0.0f;
    else if (format.mu.empty())
      for (uint32_t j = 0; j < cls.count; j++) y[j][l] = half_to_float(row[channel[j]]);
    else
      for (uint32_t j = 0; j < cls.count; j++) y[j][l] = half_to_float(row[channel[j]]) - half_to_float(format.mu[channel[j]]);
  }
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

void store_codes(const HeadFormat &format, const SlotClass &cls, const uint8_t (*codes)[kRowLanes], uint32_t count,
                 uint8_t *out) {
  for (uint32_t l = 0; l < count; l++) {
    uint8_t *row = out + size_t(l) * format.shape.dim + cls.first;
    for (uint32_t j = 0; j < cls.count; j++) row[j] = codes[j][l];
  }
}

void rotate_rows(const HeadFormat &format, const SlotClass &cls, RowLanes *y) {
  if (format.codec.rotate) rotate_lanes(y[0], cls.count, kRowLanes, format.codec.seed, format.shape.tensor, cls.rotation);
}

void unrotate_rows(const HeadFormat &format, const SlotClass &cls, RowLanes *y) {
  if (format.codec.rotate) unrotate_lanes(y[0], cls.count, kRowLanes, format.codec.seed, format.shape.tensor, cls.rotation);
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
