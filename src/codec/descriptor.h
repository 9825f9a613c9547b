// What the library knows of a codec, in one record: its text, its slots, its numerics and its wire bytes.
//
// A new codec is a record in its own file and a line in the table of descriptor.cpp.  Codecs of a family share functions: rows of
// fp16 (raw.cpp), affine rows (affine_rows.cpp), codebook rows (book_rows.cpp), columns with a scale and zero (columns.h).
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "codec/codec.h"

namespace kvq {

// A key of a codec text.  Keys are shared between codecs; keys.h lists them.
struct TextKey {
  std::string_view name;
  std::string_view allowed;                                // for messages
  bool required;
  bool (*set)(std::string_view value, Codec *codec);       // false: the value is not allowed
  void (*print)(const Codec &codec, std::string *value);   // appends nothing where the key is at its default
};

// What the entries of a mask or width list stand for.  Codec::by_channel turns pairs into channels.
enum class TableUnit : uint8_t {
  none,
  pair,
  channel
};

struct ColumnCodec;

struct Descriptor {
  std::string_view name;
  std::span<const TextKey *const> keys;  // in the order of the canonical text
  bool rotates = false;                  // rotate=1 where the text does not say
  TableUnit table_unit = TableUnit::none;
  uint8_t table_min = 0, table_max = 0;  // of an entry
  const ColumnCodec *column = nullptr;   // column codecs: what the shared loops of columns.h need; row codecs: nullptr

  // Check what depends on the shape, beyond the common rules.  May be nullptr.
  Status (*resolve)(Codec *codec, const HeadShape &shape) = nullptr;
  // Fill channel, classes and token_params; codec, shape and table are set.
  void (*arrange)(HeadFormat *format) = nullptr;

  // As in codec.h; `rows` begin at the first token, `block` is sized, `wire` has the right size.
  void (*encode)(const HeadFormat &format, const HalfRows &rows, Block *block) = nullptr;
  void (*decode)(const HeadFormat &format, const Block &block, float *out) = nullptr;
  size_t (*wire_size)(const HeadFormat &format, uint32_t tokens) = nullptr;
  void (*write)(const HeadFormat &format, const Block &block, uint8_t *wire) = nullptr;
  Status (*read)(const HeadFormat &format, const uint8_t *wire, Block *block) = nullptr;
};

const Descriptor &descriptor(Kind kind);
// The codec of that name, or the number of kinds.
Kind find_kind(std::string_view name);
inline constexpr uint32_t kKinds = 11;

// The records, in their own files.
extern const Descriptor kRaw, kAffineChannel, kAffineToken, kLloyd, kPairMix, kWidthGroups, kChannelSplit, kKitty, kChannelWidths,
    kPolar, kProgressive;

// ---- pieces that records share

// The record, for a codec with a mask (entries 0..1) or a width list.
constexpr Descriptor with_table(Descriptor record, TableUnit unit, uint8_t table_min, uint8_t table_max) {
  record.table_unit = unit;
  record.table_min = table_min;
  record.table_max = table_max;
  return record;
}

inline constexpr uint32_t kMaxDim = 1024;

// Slots in channel order, one class: what `arrange` does for most codecs.
void arrange_plain(HeadFormat *format, uint32_t levels);
// Append the slots of the channels for which entry `table[unit]` is `value`, ascending; a class if there is any.
void arrange_class(HeadFormat *format, uint8_t value, uint32_t levels);
// Channels of unit `i` of the codec's table.
struct UnitChannels {
  uint32_t channel[2], count;
};
UnitChannels unit_channels(const HeadFormat &format, uint32_t unit);

}  // namespace kvq
