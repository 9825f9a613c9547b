// polar (PolarQuant, section 2.4): a pair of channels as radius and angle, each an affine column.
#include "util/polar.h"

#include <algorithm>

#include "codec/columns.h"
#include "codec/keys.h"

namespace kvq {
namespace {

void arrange(HeadFormat *format) {
  const uint32_t pairs = format->shape.dim / 2;
  arrange_plain(format, format->codec.levels);
  format->classes = {{format->codec.levels, 0, pairs, 0}, {format->codec.high, pairs, pairs, 1}};
}

void load(const HeadFormat &format, const HalfRows &rows, uint16_t *values) {
  const uint32_t dim = format.shape.dim, pairs = dim / 2;
  uint32_t u[kMaxDim / 2], v[kMaxDim / 2];
  for (uint32_t p = 0; p < pairs; p++) {
    const Pair pair = pair_channels(format.shape, p);
    u[p] = pair.u, v[p] = pair.v;
  }
  if (rows.channel_stride == 1) return format.loops->polar_columns(rows.x, rows.token_stride, format.codec.group, u, v, pairs, values);
  constexpr uint32_t kTokens = 16;
  uint16_t some[kTokens * kMaxDim];
  for (uint32_t t = 0; t < format.codec.group; t += kTokens) {
    const uint32_t n = std::min(kTokens, format.codec.group - t);
    format.loops->transpose_halves(rows.from(t).x, rows.channel_stride, nullptr, dim, n, some, dim);
    format.loops->polar_columns(some, dim, n, u, v, pairs, values + size_t(t) * dim);
  }
}

void store(const HeadFormat &format, const float *values, float *out) {
  const uint32_t pairs = format.shape.dim / 2;
  for (uint32_t p = 0; p < pairs; p++) {
    const Pair pair = pair_channels(format.shape, p);
    const SinCos unit = polar_sin_cos(values[pairs + p]);
    out[pair.u] = values[p] * unit.cos + 0.0f;
    out[pair.v] = values[p] * unit.sin + 0.0f;
  }
}

constexpr ColumnCodec kColumn = {
    .load = load,
    .rules = columns::class_rules,
    .store = store,
    .code_bytes = columns::stream_code_bytes,
    .write_codes = columns::write_streams,
    .read_codes = columns::read_streams,
};

constexpr const TextKey *kKeys[] = {&keys::radius, &keys::angle, &keys::group_tokens};

}  // namespace

constexpr Descriptor kPolar = columns::record("polar", kKeys, &kColumn, arrange);

}  // namespace kvq
