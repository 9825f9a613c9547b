// Column codecs: a scale and a zero per slot and group of G tokens.  The loops are shared; a codec says how a group's values are
// made from its tokens, which rule each slot has, and how its codes lie on the wire.
#pragma once
#include <cstdint>

#include "codec/bits.h"
#include "codec/descriptor.h"

namespace kvq {

// Rule 2.1 of one slot.
struct ColumnRule {
  uint32_t levels;
  bool midpoint;
};

struct ColumnCodec {
  // The fp16 values [G][dim] of the slots of one group of tokens.
  void (*load)(const HeadFormat &format, const HalfRows &rows, uint16_t *values);
  // The rules of all slots for such a group.  Kitty also fills `boosted` [dim]; others get nullptr.
  void (*rules)(const HeadFormat &format, const uint16_t *values, ColumnRule *rules, uint8_t *boosted);
  // The channels of one token from the decoded values of its slots.
  void (*store)(const HeadFormat &format, const float *values, float *out);
  // The codes of one group [G][dim] on the wire.  read: nullptr, or what is wrong.
  size_t (*code_bytes)(const HeadFormat &format);
  uint8_t *(*write_codes)(const HeadFormat &format, const uint8_t *codes, const uint8_t *boosted, uint8_t *wire);
  const char *(*read_codes)(const HeadFormat &format, const uint8_t **wire, uint8_t *codes, uint8_t *boosted);
};

namespace columns {

void encode(const HeadFormat &format, const HalfRows &rows, Block *block);
void decode(const HeadFormat &format, const Block &block, float *out);
size_t wire_size(const HeadFormat &format, uint32_t tokens);
void write(const HeadFormat &format, const Block &block, uint8_t *wire);
Status read(const HeadFormat &format, const uint8_t *wire, Block *block);

// A record with these functions.
constexpr Descriptor record(std::string_view name, std::span<const TextKey *const> keys, const ColumnCodec *column,
                            void (*arrange)(HeadFormat *)) {
  Descriptor record = {.name = name, .keys = keys, .column = column, .arrange = arrange};
  record.encode = encode;
  record.decode = decode;
  record.wire_size = wire_size;
  record.write = write;
  record.read = read;
  return record;
}

// Pieces for most codecs: slots hold channels, and the rule is the class's (midpoint from the text).
void load(const HeadFormat &format, const HalfRows &rows, uint16_t *values);
void class_rules(const HeadFormat &format, const uint16_t *values, ColumnRule *rules, uint8_t *boosted);
void store(const HeadFormat &format, const float *values, float *out);

// slot[c] is the slot of channel c: the order of the wire.
struct ChannelOrder {
  explicit ChannelOrder(const HeadFormat &format);
  uint32_t slot[kMaxDim];
};

// One stream of G codes per channel, each padded to a byte.
size_t stream_code_bytes(const HeadFormat &format);
uint8_t *write_streams(const HeadFormat &format, const uint8_t *codes, const uint8_t *boosted, uint8_t *wire);
const char *read_streams(const HeadFormat &format, const uint8_t **wire, uint8_t *codes, uint8_t *boosted);

// A plane: `width` bits of the codes of one slot over the group, from bit `shift` on, LSB first (whole bytes by the choice of G).
uint8_t *write_plane(const HeadFormat &format, const uint8_t *codes, uint32_t slot, uint32_t shift, uint32_t width,
                     uint8_t *wire);
// Adds the plane to codes that have 0 there.
const uint8_t *read_plane(const HeadFormat &format, const uint8_t *wire, uint32_t slot, uint32_t shift, uint32_t width,
                          uint8_t *codes);

}  // namespace columns
}  // namespace kvq
