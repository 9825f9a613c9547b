// affine-channel (KIVI's keys) and channel-widths (ChanMix, kvq-*): plain affine columns, of one width or of several.
#include "codec/columns.h"
#include "codec/keys.h"

namespace kvq {
namespace {

void arrange_affine(HeadFormat *format) { arrange_plain(format, format->codec.levels); }

void arrange_widths(HeadFormat *format) {
  for (uint8_t width = 0; width <= 8; width++) arrange_class(format, width, 1u << width);
}

constexpr ColumnCodec kStreams = {
    .load = columns::load,
    .rules = columns::class_rules,
    .store = columns::store,
    .code_bytes = columns::stream_code_bytes,
    .write_codes = columns::write_streams,
    .read_codes = columns::read_streams,
};

constexpr const TextKey *kAffineKeys[] = {&keys::levels, &keys::group_tokens, &keys::midpoint};
constexpr const TextKey *kWidthKeys[] = {&keys::widths, &keys::group_tokens_8, &keys::midpoint, &keys::params_e4m3,
                                         &keys::unit_channel};

}  // namespace

constexpr Descriptor kAffineChannel = columns::record("affine-channel", kAffineKeys, &kStreams, arrange_affine);
constexpr Descriptor kChannelWidths =
    with_table(columns::record("channel-widths", kWidthKeys, &kStreams, arrange_widths), TableUnit::pair, 0, 8);

}  // namespace kvq
