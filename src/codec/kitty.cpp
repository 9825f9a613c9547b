// kitty: 2 bits for every channel, and 2 more for the channels that are largest in this group of tokens.
#include <algorithm>
#include <numeric>

#include "codec/columns.h"
#include "codec/keys.h"

namespace kvq {
namespace {

constexpr uint8_t kNotBoosted = 0xff;
constexpr uint32_t kPlane = 2;  // bits of the low and of the high plane

uint32_t boosted_channels(const Codec &codec, uint32_t dim) {
  return uint32_t((unsigned __int128)(codec.boost.p) * dim / codec.boost.q);
}

Status resolve(Codec *codec, const HeadShape &shape) {
  const uint32_t count = boosted_channels(*codec, shape.dim);
  if (count >= kNotBoosted + 1u)
    return fail(KVQ_E_INVALID, "codec kitty: boost=%llu/%llu of %u channels are %u; at most %u may be boosted",
                (unsigned long long)codec->boost.p, (unsigned long long)codec->boost.q, shape.dim, count, kNotBoosted);
  return KVQ_OK;
}

void arrange(HeadFormat *format) { arrange_plain(format, 1u << 2 * kPlane); }

// The channels with the largest sum of |x|, ties to the lower, get their positions among themselves; then the rules follow.
void rules(const HeadFormat &format, const uint16_t *values, ColumnRule *rules, uint8_t *boosted) {
  const uint32_t dim = format.shape.dim, count = boosted_channels(format.codec, dim);
  int64_t sum[kMaxDim] = {};
  ChannelUnits some[kMaxDim];
  for (uint32_t t = 0; t < format.codec.group; t += kSumTokens) {
    format.loops->sum_channels(values + size_t(t) * dim, dim, std::min(format.codec.group - t, kSumTokens), dim, some);
    for (uint32_t c = 0; c < dim; c++) sum[c] += some[c].abs;
  }
  uint32_t order[kMaxDim];
  std::iota(order, order + dim, 0u);
  std::partial_sort(order, order + count, order + dim,
                    [&](uint32_t a, uint32_t b) { return sum[a] != sum[b] ? sum[a] > sum[b] : a < b; });
  std::sort(order, order + count);
  std::fill_n(boosted, dim, kNotBoosted);
  std::fill_n(rules, dim, ColumnRule{1u << kPlane, false});
  for (uint32_t i = 0; i < count; i++) {
    boosted[order[i]] = uint8_t(i);
    rules[order[i]].levels = 1u << 2 * kPlane;
  }
}

size_t code_bytes(const HeadFormat &format) {
  const size_t dim = format.shape.dim, planes = dim + boosted_channels(format.codec, format.shape.dim);
  return planes * kPlane * format.codec.group / 8 + dim;
}

uint8_t *write_codes(const HeadFormat &format, const uint8_t *codes, const uint8_t *boosted, uint8_t *wire) {
  const uint32_t dim = format.shape.dim;
  for (uint32_t c = 0; c < dim; c++) wire = columns::write_plane(format, codes, c, 0, kPlane, wire);
  for (uint32_t c = 0; c < dim; c++)
    if (boosted[c] != kNotBoosted) wire = columns::write_plane(format, codes, c, kPlane, kPlane, wire);
  return std::copy_n(boosted, dim, wire);
}

const char *read_codes(const HeadFormat &format, const uint8_t **wire, uint8_t *codes, uint8_t *boosted) {
  const uint32_t dim = format.shape.dim, count = boosted_channels(format.codec, dim);
  std::copy_n(*wire + code_bytes(format) - dim, dim, boosted);  // they say which channels the high plane has
  uint32_t next = 0;
  for (uint32_t c = 0; c < dim; c++)
    if (boosted[c] != kNotBoosted && boosted[c] != next++) return "positions of boosted channels do not ascend";
  if (next != count) return "the number of boosted channels is not the codec's";
  std::fill_n(codes, size_t(format.codec.group) * dim, uint8_t(0));
  for (uint32_t c = 0; c < dim; c++) *wire = columns::read_plane(format, *wire, c, 0, kPlane, codes);
  for (uint32_t c = 0; c < dim; c++)
    if (boosted[c] != kNotBoosted) *wire = columns::read_plane(format, *wire, c, kPlane, kPlane, codes);
  *wire += dim;
  return nullptr;
}

constexpr ColumnCodec kColumn = {
    .load = columns::load,
    .rules = rules,
    .store = columns::store,
    .code_bytes = code_bytes,
    .write_codes = write_codes,
    .read_codes = read_codes,
};

constexpr const TextKey *kKeys[] = {&keys::boost, &keys::group_tokens_4};

constexpr Descriptor with_resolve(Descriptor record) {
  record.resolve = resolve;
  return record;
}

}  // namespace

constexpr Descriptor kKitty = with_resolve(columns::record("kitty", kKeys, &kColumn, arrange));

}  // namespace kvq
