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

// tree() in every lane.  v is overwritten.  Padding with +0 changes nothing but the sign of a zero, so an odd element moves up
// alone.
void tree_lanes(RowLanes *v, uint32_t n, float *sum) {
  for (; n > 1; n = (n + 1) / 2)
    for (uint32_t i = 0; i < (n + 1) / 2; i++)
      for (uint32_t l = 0; l < kRowLanes; l++) v[i][l] = v[2 * i][l] + (2 * i + 1 < n ? v[2 * i + 1][l] : 0.0f);
  std::copy_n(v[0], kRowLanes, sum);
}

// What rule 2.2 knows of kRowLanes rows before it chooses h.
struct RowSums {
  float n[kRowLanes];                                     // norm of the row
  float sigma[kRowLanes];
  uint64_t s[kRowLanes];                                  // sum of m * m
  float p[kRowLanes];                                     // tree(y * m)
};

// Step 3: code = number of thresholds below y.
void choose_codes(const Book &book, const float *sigma, const RowLanes *y, uint32_t width, uint8_t (*codes)[kRowLanes]) {
  RowLanes threshold[255];
  const uint32_t n = uint32_t(book.threshold.size());
  for (uint32_t i = 0; i < n; i++)
    for (uint32_t l = 0; l < kRowLanes; l++) threshold[i][l] = book.threshold[i] * sigma[l];
  for (uint32_t j = 0; j < width; j++) {
    int32_t below[kRowLanes] = {};
    for (uint32_t i = 0; i < n; i++)
      for (uint32_t l = 0; l < kRowLanes; l++) below[l] += y[j][l] > threshold[i][l];
    for (uint32_t l = 0; l < kRowLanes; l++) codes[j][l] = uint8_t(below[l]);
  }
}

// Step 4 without its last division.
void sum_levels(const Book &book, const RowLanes *y, uint32_t width, const uint8_t (*codes)[kRowLanes], RowLanes *scratch,
                RowSums *sums) {
  std::fill_n(sums->s, kRowLanes, 0);
  for (uint32_t j = 0; j < width; j++) {
    for (uint32_t l = 0; l < kRowLanes; l++) {
      const int32_t m = book.level[codes[j][l]];
      sums->s[l] += uint64_t(m * m);
      scratch[j][l] = y[j][l] * float(m);
    }
  }
  tree_lanes(scratch, width, sums->p);
}

void encode(const HeadFormat &format, const uint16_t *x, size_t token_stride, Block *block) {
  RowLanes y[kMaxDim], scratch[kMaxDim];
  uint8_t codes[kMaxDim][kRowLanes];
  for (uint32_t t = 0; t < block->tokens; t += kRowLanes) {
    const uint32_t count = std::min(kRowLanes, block->tokens - t);
    for (size_t c = 0; c < format.classes.size(); c++) {
      const SlotClass &cls = format.classes[c];
      const Book &book = find_book(cls.levels);
      const float inverse = inverse_sqrt(cls.count);
      RowSums sums;
      load_rows(format, cls, x + t * token_stride, token_stride, count, y);
      for (uint32_t j = 0; j < cls.count; j++)
        for (uint32_t l = 0; l < kRowLanes; l++) scratch[j][l] = y[j][l] * y[j][l];
      tree_lanes(scratch, cls.count, sums.n);
      for (uint32_t l = 0; l < kRowLanes; l++) {
        sums.n[l] = std::sqrt(sums.n[l]);
        sums.sigma[l] = sums.n[l] * inverse;
      }
      rotate_rows(format, cls, y);
      choose_codes(book, sums.sigma, y, cls.count, codes);
      sum_levels(book, y, cls.count, codes, scratch, &sums);
      store_codes(format, cls, codes, count, block->codes.data() + size_t(t) * format.shape.dim);
      for (uint32_t l = 0; l < count; l++) {
        const float h = row_scale(format.codec.scale, book.scale, sums.n[l], sums.sigma[l], sums.s[l], sums.p[l]);
        block->params[size_t(t + l) * format.token_params + c] = store_param(h, format.codec.params);
      }
    }
  }
}

void decode(const HeadFormat &format, const Block &block, float *out) {
  const size_t dim = format.shape.dim;
  RowLanes y[kMaxDim] = {};
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
