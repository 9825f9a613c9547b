// polar (PolarQuant, section 2.4): a pair of channels as radius and angle, each an affine column.  The polynomials are part of
// the format: plain fp32 steps, the same on every machine.
#include <cmath>

#include "codec/columns.h"
#include "codec/keys.h"
#include "util/fp.h"

namespace kvq {
namespace {

// Coefficients of polar.json, lowest power first: atan and sin divided by x, cos; all in x * x.
constexpr float kAtan[] = {0x1.ffffeap-1f, -0x1.554c3ap-2f, 0x1.988174p-3f, -0x1.1cd946p-3f,
                           0x1.8af1bap-4f, -0x1.ca0882p-5f, 0x1.6633a8p-6f, -0x1.09b80ep-8f};
constexpr float kSin[] = {0x1p+0f, -0x1.555556p-3f, 0x1.111102p-7f, -0x1.a00c12p-13f, 0x1.6c345ep-19f};
constexpr float kCos[] = {0x1p+0f, -0x1p-1f, 0x1.55553ap-5f, -0x1.6c0788p-10f, 0x1.99072ap-16f};
constexpr float kPi = 0x1.921fb6p+1f, kHalfPi = 0x1.921fb6p+0f, kTwoPi = 0x1.921fb6p+2f;
constexpr float kTwoOverPi = 0x1.45f306p-1f;
constexpr float kHalfPiHigh = 0x1.92p+0f, kHalfPiLow = 0x1.fb5444p-12f;  // their sum is pi/2 to 40 bits

template <size_t N>
float polynomial(const float (&coefficient)[N], float t) {
  float sum = coefficient[N - 1];
  for (size_t i = N - 1; i-- > 0;) sum = sum * t + coefficient[i];
  return sum;
}

// Angle of (u, v) in [0, 2 pi).
float polar_angle(float u, float v) {
  const float au = std::fabs(u), av = std::fabs(v), mx = au > av ? au : av, mn = au > av ? av : au;
  if (mx == 0.0f) return 0.0f;
  const float q = mn / mx;
  float r = q * polynomial(kAtan, q * q);
  if (av > au) r = kHalfPi - r;
  if (u < 0.0f) r = kPi - r;
  if (v < 0.0f) r = kTwoPi - r;
  return r >= kTwoPi ? 0.0f : r;
}

struct SinCos {
  float sin, cos;
};

SinCos polar_sin_cos(float theta) {
  const float j = rne(theta * kTwoOverPi);  // quarters; an int32 whatever the parameters are
  const float r = (theta - j * kHalfPiHigh) - j * kHalfPiLow, t = r * r;
  const float s = r * polynomial(kSin, t), c = polynomial(kCos, t);
  switch (int32_t(j) & 3) {
    case 0:
      return {s, c};
    case 1:
      return {c, -s};
    case 2:
      return {-s, -c};
    default:
      return {-c, s};
  }
}

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
