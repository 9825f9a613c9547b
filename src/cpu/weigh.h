// Floats to 16-bit weights, by way of exponentials where they are still logits.  Included by kernels_impl.h only, inside its anonymous
// namespace.

// 2^x for x <= 128, 0 below -126: an integer goes to the exponent, a polynomial of degree 5 takes the rest (minimax, error 8e-8).
KVQ_INLINE VFloat exp2_lanes(VFloat x) {
#if KVQ_VECTOR_BYTES == 64
  const VFloat clamped = greater(x, all(-200.0f)), f = (VFloat)_mm512_reduce_ps((__m512)clamped, 1);  // what is above the floor
  VFloat p = all(1.8775767e-3f);
  p = p * f + 8.9893397e-3f;
  p = p * f + 5.5826318e-2f;
  p = p * f + 2.4015361e-1f;
  p = p * f + 6.9315308e-1f;
  p = p * f + 0.99999994f;
  return (VFloat)_mm512_scalef_ps((__m512)p, (__m512)clamped);
#else
  const VFloat low = all(-126.0f), clamped = greater(x, low);
  const VFloat shifted = clamped + 12582912.0f, f = clamped - (shifted - 12582912.0f);
  VFloat p = all(1.3276472e-3f);
  p = p * f + 9.6755410e-3f;
  p = p * f + 5.5507131e-2f;
  p = p * f + 2.4022120e-1f;
  p = p * f + 6.9314694e-1f;
  p = p * f + 1.0000001f;
  const VInt y = (VInt)p + ((VInt)shifted << 23);
  return (VFloat)(y & (VInt)(x >= low));
#endif
}

void exponentials(float *x, size_t stride, uint32_t rows, uint32_t n, const float *reference, const float *most, float *sum,
                  float *largest) {
  for (uint32_t r = 0; r < rows; r++, x += stride) {
    VFloat total = {};
    for (uint32_t i = 0; i < n; i += kLanes) {
      const VFloat p = exp2_lanes(load<VFloat>(x + i) - reference[r]);
      store(x + i, p);
      total += p;
    }
    largest[r] = exp2_lanes(all(most[r] - reference[r]))[0];
    sum[r] = sum_lanes(total);
  }
}

constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, which the low bits then hold
constexpr int32_t kRoundBits = 0x4b400000;

KVQ_INLINE VFloat load_product(const Quantize &q, const float *x, uint32_t i) {
  const VFloat v = load_some(x + i, q.n - i);
  return q.s ? v * load_some(q.s + i, q.n - i) : v;
}

// ---- up to four rows at once

struct alignas(64) FourRows {
  int32_t of[4][kSumSpan];
};

// x, or 2^(x - reference), which takes its place, times s.
template <bool EXP>
KVQ_INLINE VFloat next_product(const Quantize &q, float *x, uint32_t i, float reference, VFloat *sum) {
  if (!EXP) return load_product(q, x, i);
  const VFloat p = exp2_lanes(load<VFloat>(x + i) - reference);
  store(x + i, p);
  *sum += p;
  return p * load<VFloat>(q.s + i);
}

KVQ_INLINE float largest_product(const Quantize &q, const float *x) {
  VFloat most = {};
  for (uint32_t i = 0; i < q.n; i += kLanes) most = greater(most, magnitude(load_product(q, x, i)));
  return max_lanes(most);
}

template <bool EXP>
KVQ_INLINE void round_row(const Quantize &q, uint32_t r, int32_t *rounded) {
  float *x = q.x + r * q.x_stride;
  const float *doubt = q.doubt ? q.doubt + r * q.doubt_stride : nullptr, reference = EXP ? q.reference[r] : 0.0f;
  if (EXP) q.largest[r] = exp2_lanes(all(q.most[r] - reference))[0];
  const float bound = EXP ? q.bound[r] * q.largest[r] : q.bound ? q.bound[r] : largest_product(q, x);
  const float inverse = bound > 1e-30f ? kMostWeight / bound : 0.0f;
  VFloat left = {}, power = {}, floats = {}, sum = {};
  for (uint32_t span = 0, i = 0; i < q.n; span++) {
    VInt total = {};
    for (const uint32_t end = q.ends ? q.ends[span] : q.n; i < end; i += kLanes) {
      const VFloat v = next_product<EXP>(q, x, i, reference, &sum), wanted = v * inverse, shifted = wanted + kRound;
      const VInt whole = (VInt)shifted - kRoundBits;
      store(rounded + i, whole);
      total += whole;
      floats += v;
      left += wanted - (shifted - kRound);
      if (doubt) power += v * v * load_some(doubt + i, q.n - i);
    }
    q.sum[r * q.sum_stride + span * q.span_stride] = sum_lanes(total);
  }
  q.scale[r] = bound / kMostWeight;
  q.error[r] = sum_lanes(left) * q.scale[r];
  q.power[r] = doubt ? sum_lanes(power) : 0.0f;
  q.total[r] = sum_lanes(floats);
  if (EXP) q.exponentials[r] = sum_lanes(sum);
}

void round_rows(const Quantize &q) {
  FourRows rounded;
  for (uint32_t first = 0; first < q.rows; first += 4) {
    const uint32_t rows = q.rows - first < 4 ? q.rows - first : 4;
    for (uint32_t r = 0; r < rows; r++) {
      if (q.reference)
        round_row<true>(q, first + r, rounded.of[r]);
      else
        round_row<false>(q, first + r, rounded.of[r]);
    }
    int16_t *w = q.w + weight_place(q.w_stride, first, 0);
    for (uint32_t i = 0; i < q.n; i += kLanes) {
      VInt x[4];
      for (uint32_t r = 0; r < 4; r++) x[r] = load<VInt>(rounded.of[r < rows ? r : 0] + i);
      store_four_weights(w + i * 4, x);
    }
  }
}

// ---- one row, which may have many weights, and what rounding leaves of them

// w = rne(x * inverse), and the sums of spans; x is zero from n to the end of its vector.  What remains of x * inverse takes its place.
KVQ_INLINE float round_span(float *x, uint32_t n, float inverse, int16_t *w, int32_t *sum) {
  VFloat remains = {};
  for (uint32_t first = 0; first < n; first += kSumSpan, sum++) {
    const uint32_t end = n - first < kSumSpan ? n : first + kSumSpan;
    VInt total = {};
    for (uint32_t i = first; i < end; i += kLanes) {
      const VFloat wanted = load<VFloat>(x + i) * inverse, shifted = wanted + kRound, left = wanted - (shifted - kRound);
      const VInt whole = (VInt)shifted - kRoundBits;
      store_weights(w + i * 4, whole);
      total += whole;
      store(x + i, left);
      remains += left;
    }
    *sum = sum_lanes(total);
  }
  return sum_lanes(remains);
}

void quantize_row(const Quantize &q, uint32_t r) {
  constexpr uint32_t kMaxWeights = 2560;
  float x[kMaxWeights];
  const float *doubt = q.doubt ? q.doubt + r * q.doubt_stride : nullptr;
  VFloat most = {}, power = {}, floats = {};
  for (uint32_t i = 0; i < q.n; i += kLanes) {
    const VFloat v = load_product(q, q.x + r * q.x_stride, i);
    store(x + i, v);
    floats += v;
    most = greater(most, magnitude(v));
    if (doubt) power += v * v * load_some(doubt + i, q.n - i);
  }
  const float largest = q.bound && q.bound[r] > 1e-30f ? q.bound[r] : max_lanes(most);
  const float inverse = largest > 1e-30f ? kMostWeight / largest : 0.0f;
  q.scale[r] = largest / kMostWeight;
  q.error[r] = round_span(x, q.n, inverse, q.w + weight_place(q.w_stride, q.row + r, 0), q.sum + r * q.sum_stride) * q.scale[r];
  q.power[r] = doubt ? sum_lanes(power) : 0.0f;
  q.total[r] = sum_lanes(floats);
  if (q.fine) round_span(x, q.n, kFineSteps, q.fine, q.fine_sum);
}

void quantize(const Quantize &q) {
  if (q.row % 4 == 0 && !q.fine && q.n <= kSumSpan) return round_rows(q);
  for (uint32_t r = 0; r < q.rows; r++) quantize_row(q, r);
}
