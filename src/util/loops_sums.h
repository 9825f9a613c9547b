// Loops over pairs of channels, and exact sums: a part of loops_impl.h, which alone includes this file.
#pragma once
#include "util/loops_vector.h"
#include "util/polar.h"

namespace kvq {
namespace {

// ---- pairs of channels

KVQ_LOOP_INLINE bool ascend(const uint32_t *index, uint32_t n) {
  bool yes = n == kLanes;
  for (uint32_t i = 1; i < n; i++) yes = yes && index[i] == index[0] + i;
  return yes;
}
KVQ_LOOP_INLINE VFloat gather(const uint16_t *row, const uint32_t *index, uint32_t n, bool ascending) {
  VHalf h{};
  if (ascending) return load_halves(row + index[0]);
  for (uint32_t i = 0; i < n; i++) h[i] = row[index[i]];
  return to_floats(h);
}

// use(t, a, b) of n pairs (u, v) of channels in every row t.
template <class Use>
KVQ_LOOP_INLINE void for_pairs(const uint16_t *x, size_t stride, uint32_t rows, const uint32_t *u, const uint32_t *v, uint32_t n, Use &&use) {
  const bool straight_u = ascend(u, n), straight_v = ascend(v, n);
  for (uint32_t t = 0; t < rows; t++) use(t, gather(x + t * stride, u, n, straight_u), gather(x + t * stride, v, n, straight_v));
}

void polar_columns(const uint16_t *x, size_t stride, uint32_t rows, const uint32_t *u, const uint32_t *v, uint32_t pairs, uint16_t *out) {
  for (uint32_t p = 0; p < pairs; p += kLanes) {
    const uint32_t n = pairs - p < kLanes ? pairs - p : kLanes;
    for_pairs(x, stride, rows, u + p, v + p, n, [&](uint32_t t, VFloat a, VFloat b) {
      const VHalf radius = to_halves(smaller(square_root(a * a + b * b), all(65504.0f))), angle = to_halves(polar_angle(a, b));
      uint16_t *at = out + size_t(t) * 2 * pairs + p;
      __builtin_memcpy(at, &radius, 2 * n), __builtin_memcpy(at + pairs, &angle, 2 * n);
    });
  }
}

// ---- sums: a term is cut into integers of at most 20 bits and a sign, whose sums over kSumTokens fit 32 bits

void sum_norms(const uint16_t *x, size_t stride, uint32_t rows, const uint32_t *u, const uint32_t *v, uint32_t pairs, uint64_t *out) {
  for (uint32_t p = 0; p < pairs; p += kLanes) {
    const uint32_t n = pairs - p < kLanes ? pairs - p : kLanes;
    VInt high{}, low{};  // in units of 2^-4, 2^-24
    for_pairs(x, stride, rows, u + p, v + p, n, [&](uint32_t, VFloat a, VFloat b) {
      const VFloat norm = square_root(a * a + b * b);
      const VInt whole = to_int(norm * 0x1p4f);
      high += whole, low += to_int((norm - to_float(whole) * 0x1p-4f) * 0x1p24f);
    });
    for (uint32_t i = 0; i < n; i++) out[p + i] = (uint64_t(high[i]) << 20) + uint64_t(low[i]);
  }
}

void sum_squares(const uint16_t *x, size_t stride, uint32_t rows, const uint32_t *u, const uint32_t *v, uint32_t pairs, uint64_t *out) {
  for (uint32_t p = 0; p < pairs; p += kLanes) {
    const uint32_t n = pairs - p < kLanes ? pairs - p : kLanes;
    VInt high{}, middle{}, low{};  // in units of 2^16, 2^-4, 2^-24
    for_pairs(x, stride, rows, u + p, v + p, n, [&](uint32_t, VFloat a, VFloat b) {
      const VFloat square = a * a + b * b;
      const VInt most = to_int(square * 0x1p-16f);
      const VFloat rest = square - to_float(most) * 0x1p16f;
      const VInt more = to_int(rest * 0x1p4f);
      high += most, middle += more, low += to_int((rest - to_float(more) * 0x1p-4f) * 0x1p24f);
    });
    for (uint32_t i = 0; i < n; i++) out[p + i] = (uint64_t(high[i]) << 40) + (uint64_t(middle[i]) << 20) + uint64_t(low[i]);
  }
}

typedef double VDouble __attribute__((vector_size(KVQ_LOOPS_BYTES)));

// Adds the lower and the upper half of v.
KVQ_LOOP_INLINE void add_halves(VDouble *sum, VFloat v) {
#if KVQ_LOOPS_BYTES == 64
  sum[0] += (VDouble)_mm512_cvtps_pd(_mm512_castps512_ps256((__m512)v));
  sum[1] += (VDouble)_mm512_cvtps_pd(_mm512_extractf32x8_ps((__m512)v, 1));
#elif KVQ_LOOPS_BYTES == 32
  sum[0] += (VDouble)_mm256_cvtps_pd(_mm256_castps256_ps128((__m256)v));
  sum[1] += (VDouble)_mm256_cvtps_pd(_mm256_extractf128_ps((__m256)v, 1));
#else
  for (uint32_t i = 0; i < kLanes; i++) sum[i / (kLanes / 2)][i % (kLanes / 2)] += double(v[i]);
#endif
}

// use(t, values) of channels [c, c + width) in every row.
template <class Use>
KVQ_LOOP_INLINE void for_channels(const uint16_t *x, size_t stride, uint32_t rows, uint32_t width, Use &&use) {
  for (uint32_t t = 0; t < rows; t++) {
    VHalf h{};
    if (width == kLanes)
      h = load<VHalf>(x + t * stride);
    else
      __builtin_memcpy(&h, x + t * stride, size_t(2) * width);
    use(t, to_floats(h));
  }
}
// fp64 holds sums of up to 64 fp16 numbers exactly.
KVQ_LOOP_INLINE int64_t channel_units(const VDouble (&sum)[2], uint32_t i) { return int64_t(sum[i / (kLanes / 2)][i % (kLanes / 2)] * 0x1p24); }

void sum_channels(const uint16_t *x, size_t stride, uint32_t rows, uint32_t n, ChannelUnits *out) {
  for (uint32_t c = 0; c < n; c += kLanes) {
    const uint32_t width = n - c < kLanes ? n - c : kLanes;
    VDouble sum[2] = {}, abs[2] = {};
    VFloat low{}, high{};
    for_channels(x + c, stride, rows, width, [&](uint32_t t, VFloat value) {
      if (t == 0) low = high = value;
      low = smaller(value, low), high = larger(value, high);
      add_halves(sum, value);
      add_halves(abs, (VFloat)((VInt)value & 0x7fffffff));
    });
    for (uint32_t i = 0; i < width; i++) out[c + i] = {channel_units(sum, i), channel_units(abs, i), low[i], high[i]};
  }
}

void sum_values(const uint16_t *x, size_t stride, uint32_t rows, uint32_t n, int64_t *out) {
  for (uint32_t c = 0; c < n; c += kLanes) {
    const uint32_t width = n - c < kLanes ? n - c : kLanes;
    VDouble sum[2] = {};
    for_channels(x + c, stride, rows, width, [&](uint32_t, VFloat value) { add_halves(sum, value); });
    for (uint32_t i = 0; i < width; i++) out[c + i] = channel_units(sum, i);
  }
}

}  // namespace
}  // namespace kvq
