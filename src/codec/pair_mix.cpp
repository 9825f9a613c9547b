// pair-mix (PN-Mix): 3 bits for the channels of salient pairs, 1 bit, usually at bin middles, for the others.  The low bit of
// every channel is one plane, the upper two bits of salient channels another.
#include <algorithm>

#include "codec/columns.h"
#include "codec/keys.h"

namespace kvq {
namespace {

void arrange(HeadFormat *format) {
  arrange_class(format, 0, 1u << format->codec.low);
  arrange_class(format, 1, 1u << format->codec.high);
}

bool is_high(const HeadFormat &format, const SlotClass &cls) { return cls.levels == 1u << format.codec.high; }

// Slot of every channel, and whether it is salient.
bool is_high(const HeadFormat &format, uint32_t slot) {
  const SlotClass &last = format.classes.back();
  return is_high(format, last) && slot >= last.first;
}

// Only 1-bit channels take midpoint (Eq. 7).
void rules(const HeadFormat &format, const uint16_t *, ColumnRule *rules, uint8_t *) {
  for (const SlotClass &cls : format.classes)
    std::fill_n(rules + cls.first, cls.count, ColumnRule{cls.levels, format.codec.midpoint && !is_high(format, cls)});
}

size_t code_bytes(const HeadFormat &format) {
  size_t bits = 0;
  for (const SlotClass &cls : format.classes) bits += cls.count * (is_high(format, cls) ? format.codec.high : format.codec.low);
  return bits * format.codec.group / 8;
}

uint8_t *write_codes(const HeadFormat &format, const uint8_t *codes, const uint8_t *, uint8_t *wire) {
  const uint32_t low = format.codec.low, dim = format.shape.dim;
  const columns::ChannelOrder order(format);
  for (uint32_t c = 0; c < dim; c++) wire = columns::write_plane(format, codes, order.slot[c], 0, low, wire);
  for (uint32_t c = 0; c < dim; c++)
    if (is_high(format, order.slot[c]))
      wire = columns::write_plane(format, codes, order.slot[c], low, format.codec.high - low, wire);
  return wire;
}

const char *read_codes(const HeadFormat &format, const uint8_t **wire, uint8_t *codes, uint8_t *) {
  const uint32_t low = format.codec.low, dim = format.shape.dim;
  const columns::ChannelOrder order(format);
  std::fill_n(codes, size_t(format.codec.group) * dim, uint8_t(0));
  for (uint32_t c = 0; c < dim; c++) *wire = columns::read_plane(format, *wire, order.slot[c], 0, low, codes);
  for (uint32_t c = 0; c < dim; c++)
    if (is_high(format, order.slot[c]))
      *wire = columns::read_plane(format, *wire, order.slot[c], low, format.codec.high - low, codes);
  return nullptr;  // every bit has a meaning
}

constexpr ColumnCodec kColumn = {
    .load = columns::load,
    .rules = rules,
    .store = columns::store,
    .code_bytes = code_bytes,
    .write_codes = write_codes,
    .read_codes = read_codes,
};

constexpr const TextKey *kKeys[] = {&keys::low_bits, &keys::high_bits, &keys::group_tokens_8,
                                    &keys::mask, &keys::midpoint, &keys::unit_channel};

}  // namespace

constexpr Descriptor kPairMix = with_table(columns::record("pair-mix", kKeys, &kColumn, arrange), TableUnit::pair, 0, 1);

}  // namespace kvq
