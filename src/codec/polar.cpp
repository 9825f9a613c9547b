// polar (PolarQuant, section 2.4): a pair of channels as radius and angle, each an affine column.
#include <cmath>

#include "codec/columns.h"
#include "codec/keys.h"
#include "codec/polar_rules.h"
#include "util/fp.h"

namespace kvq {
namespace {

void arrange(HeadFormat *format) {
  const uint32_t pairs = format->shape.dim / 2;
  arrange_plain(format, format->codec.levels);
  format->classes = {{format->codec.levels, 0, pairs, 0}, {format->codec.high, pairs, pairs, 1}};
}

void load(const HeadFormat &format, const uint16_t *x, size_t token_stride, uint16_t *values) {
  const uint32_t pairs = format.shape.dim / 2;
  for (uint32_t p = 0; p < pairs; p++) {
    const Pair pair = pair_channels(format.shape, p);
    for (uint32_t t = 0; t < format.codec.group; t++) {
      const uint16_t *row = x + t * token_stride;
      const float u = half_to_float(row[pair.u]), v = half_to_float(row[pair.v]);
      uint16_t *out = values + size_t(t) * 2 * pairs + p;
      out[0] = float_to_half(std::sqrt(u * u + v * v));
      out[pairs] = float_to_half(polar_angle(u, v));
    }
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
