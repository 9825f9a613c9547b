// Codebook rows (section 2.2): lloyd (the whole head is one row), width-groups (Block-GTQ: a row per width of a pair) and
// channel-split (TurboQuant's outlier split: two rows).
#include <algorithm>
#include <cmath>

#include "codec/books.h"
#include "codec/descriptor.h"
#include "codec/keys.h"
#include "codec/minifloat.h"
#include "codec/rotation.h"
#include "codec/row_rules.h"
#include "codec/rows.h"
#include "codec/wire.h"
#include "util/fp.h"

namespace kvq {
namespace {

// One class of kRowLanes rows: codes, and the scalars h of the first `count`.
void encode_class(const HeadFormat &format, const SlotClass &cls, RowBlock &rows, uint32_t count, uint16_t *h) {
  const Loops &loops = *format.loops;
  const Book &book = find_book(cls.levels);
  const ScaleRule rule = format.codec.scale;
  const float inverse = inverse_sqrt(cls.count);
  float n[kRowLanes], sigma[kRowLanes], p[kRowLanes] = {};  // norm; n * c(w); tree(y * m)
  uint64_t s[kRowLanes];                                    // sum of m * m
  rows.load(format, cls);
  loops.square_lanes(rows.y, cls.count, n);
  for (uint32_t l = 0; l < kRowLanes; l++) n[l] = std::sqrt(n[l]), sigma[l] = n[l] * inverse;
  rotate_rows(format, cls, rows.y);
  loops.book_lanes({cls.levels, book.threshold.data(), book.level.data()}, rows.y, cls.count, sigma, rows.codes, s);
  if (rule == ScaleRule::ls || rule == ScaleRule::unbiased)
    loops.product_lanes(rows.y, rows.codes, book.level.data(), cls.count, p);
  for (uint32_t l = 0; l < count; l++)
    h[size_t(l) * format.token_params] = store_param(row_scale(rule, book.scale, n[l], sigma[l], s[l], p[l]), format.codec.params);
}

void encode(const HeadFormat &format, const HalfRows &rows, Block *block) {
  RowBlock lanes(block->codes.get_allocator().resource(), format.shape.dim);
  for (uint32_t t = 0; t < block->tokens; t += kRowLanes) {
    const uint32_t count = std::min(kRowLanes, block->tokens - t);
    lanes.take(format, rows.from(t), count);
    for (size_t c = 0; c < format.classes.size(); c++) {
      encode_class(format, format.classes[c], lanes, count, block->params.data() + size_t(t) * format.token_params + c);
      store_codes(format, format.classes[c], lanes.codes, count, block->codes.data() + size_t(t) * format.shape.dim);
    }
  }
}

void decode(const HeadFormat &format, const Block &block, float *out) {
  const size_t dim = format.shape.dim;
  RowBlock lanes(block.codes.get_allocator().resource(), format.shape.dim);
  RowLanes *y = lanes.zeros();
  for (uint32_t t = 0; t < block.tokens; t += kRowLanes) {
    const uint32_t count = std::min(kRowLanes, block.tokens - t);
    for (size_t c = 0; c < format.classes.size(); c++) {
      const SlotClass &cls = format.classes[c];
      const Book &book = find_book(cls.levels);
      for (uint32_t l = 0; l < count; l++) {
        const uint8_t *codes = block.codes.data() + (t + l) * dim + cls.first;
        const float h = load_param(block.params[size_t(t + l) * format.token_params + c], format.codec.params);
        const float unit = h * book.scale;
        for (uint32_t j = 0; j < cls.count; j++) y[j][l] = unit * float(book.level[codes[j]]);
      }
      unrotate_rows(format, cls, y);
      store_rows(format, cls, y, count, out + t * dim);
    }
  }
}

size_t wire_size(const HeadFormat &format, uint32_t tokens) {
  return row_stream_bytes(format, tokens) + size_t(tokens) * format.token_params * param_bytes(format.codec.params);
}

void write(const HeadFormat &format, const Block &block, uint8_t *wire) {
  wire = write_row_streams(format, block, wire);
  for (const uint16_t h : block.params) wire = write_param(h, format.codec.params, wire);
}

Status read(const HeadFormat &format, const uint8_t *wire, Block *block) {
  KVQ_TRY(read_row_streams(format, &wire, block));
  for (uint16_t &h : block->params)
    if (!read_param(&wire, format.codec.params, ParamRole::scale, &h)) return corrupt(format, "h is not finite, negative or -0");
  return KVQ_OK;
}

void arrange_lloyd(HeadFormat *format) {
  arrange_plain(format, format->codec.levels);
  format->token_params = 1;
}

void arrange_width_groups(HeadFormat *format) {
  for (uint8_t width = 1; width <= 8; width++) arrange_class(format, width, 1u << width);
  format->token_params = uint32_t(format->classes.size());
}

void arrange_channel_split(HeadFormat *format) {
  arrange_class(format, 0, format->codec.low);
  arrange_class(format, 1, format->codec.high);
  format->token_params = uint32_t(format->classes.size());
}

// The three differ in text and classes only.
constexpr Descriptor book_rows(std::string_view name, std::span<const TextKey *const> keys, void (*arrange)(HeadFormat *)) {
  Descriptor record = {.name = name, .keys = keys, .rotates = true};
  record.arrange = arrange;
  record.encode = encode;
  record.decode = decode;
  record.wire_size = wire_size;
  record.write = write;
  record.read = read;
  return record;
}

constexpr const TextKey *kLloydKeys[] = {&keys::levels, &keys::scale, &keys::rotate_on,
                                         &keys::seed, &keys::params_e5m3, &keys::center};
constexpr const TextKey *kWidthKeys[] = {&keys::widths, &keys::scale, &keys::rotate_on,
                                         &keys::seed, &keys::params_e5m3, &keys::center};
constexpr const TextKey *kSplitKeys[] = {&keys::high, &keys::low, &keys::mask, &keys::scale,
                                         &keys::rotate_on, &keys::seed, &keys::params_e5m3, &keys::center};

}  // namespace

constexpr Descriptor kLloyd = book_rows("lloyd", kLloydKeys, arrange_lloyd);
constexpr Descriptor kWidthGroups =
    with_table(book_rows("width-groups", kWidthKeys, arrange_width_groups), TableUnit::pair, 1, 8);
constexpr Descriptor kChannelSplit =
    with_table(book_rows("channel-split", kSplitKeys, arrange_channel_split), TableUnit::channel, 0, 1);

}  // namespace kvq
