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

KVQ_INLINE VFloat largest_product(const Quantize &q, uint32_t r, uint32_t first, uint32_t end) {
  VFloat most = {};
  for (uint32_t i = first; i < end; i += kLanes) most = greater(most, magnitude(load_product(q, q.x + r * q.x_stride, i)));
  return most;
}

// What becomes of a row, by lane.
struct RowSums {
  VFloat left, power, products, exponentials;
  VInt total;
};

template <bool EXP>
KVQ_INLINE RowSums round_row(const Quantize &q, uint32_t r, uint32_t first, uint32_t end, float inverse, int32_t *rounded) {
  float *x = q.x + r * q.x_stride;
  const float *doubt = q.doubt ? q.doubt + r * q.doubt_stride : nullptr, reference = EXP ? q.reference[r] : 0.0f;
  RowSums sums{};
  for (uint32_t i = first; i < end; i += kLanes) {
    const VFloat v = next_product<EXP>(q, x, i, reference, &sums.exponentials), wanted = v * inverse, shifted = wanted + kRound;
    const VInt whole = (VInt)shifted - kRoundBits;
    store(rounded + i, whole);
    sums.total += whole;
    if (!EXP) sums.products += v;
    sums.left += wanted - (shifted - kRound);
    if (doubt) sums.power += v * v * (EXP ? load<VFloat>(doubt + i) : load_some(doubt + i, q.n - i));
  }
  return sums;
}

// The largest |x * s| of rows [row, row + rows) of a span.
template <bool EXP>
KVQ_INLINE void find_bounds(const Quantize &q, uint32_t row, uint32_t rows, uint32_t first, uint32_t end, float *bound) {
  if (!q.bound) {
    VFloat most[4] = {};
    for (uint32_t r = 0; r < rows; r++) most[r] = largest_product(q, row + r, first, end);
    return store_four(bound, max_four(most));
  }
  for (uint32_t r = 0; r < rows; r++) {
    if (EXP) q.largest[row + r] = exp2_lanes(all(q.most[row + r] - q.reference[row + r]))[0];
    bound[r] = EXP ? q.bound[row + r] * q.largest[row + r] : q.bound[row + r];
  }
}

// Weights [first, end) of rows [row, row + rows), at most four.
template <bool EXP>
KVQ_INLINE void round_span(const Quantize &q, uint32_t row, uint32_t rows, uint32_t first, uint32_t end, uint32_t span, FourRows *rounded) {
  float bound[4] = {};
  find_bounds<EXP>(q, row, rows, first, end, bound);
  VFloat left[4] = {}, power[4] = {}, products[4] = {}, exponentials[4] = {};
  VInt total[4] = {};
  for (uint32_t r = 0; r < rows; r++) {
    const RowSums sums = round_row<EXP>(q, row + r, first, end, bound[r] > 1e-30f ? kMostWeight / bound[r] : 0.0f, rounded->of[r]);
    left[r] = sums.left, power[r] = sums.power, products[r] = sums.products, exponentials[r] = sums.exponentials, total[r] = sums.total;
  }
  const size_t at = row + span * q.span_stride;
  int32_t sum[4];
  store_four(sum, sum_four(total));
  store_four(q.error + at, sum_four(left));
  store_four(q.power + at, sum_four(power));
  if (EXP)
    store_four(q.exponentials + row, sum_four(exponentials));
  else
    store_four(q.total + at, sum_four(products));
  for (uint32_t r = 0; r < 4; r++) {
    q.sum[(row + r) * q.sum_stride + span * q.span_stride] = sum[r];
    q.scale[at + r] = bound[r] / kMostWeight;
    q.error[at + r] *= q.scale[at + r];
  }
}

void round_rows(const Quantize &q) {
  FourRows rounded;
  for (uint32_t row = 0; row < q.rows; row += 4) {
    const uint32_t rows = q.rows - row < 4 ? q.rows - row : 4;
    if (q.reference) round_span<true>(q, row, rows, 0, q.n, 0, &rounded);
    for (uint32_t at = 0, span = 0; !q.reference && at < q.n; span++) {
      const uint32_t end = q.ends ? q.ends[span] : q.n;
      round_span<false>(q, row, rows, at, end, span, &rounded);
      at = end;
    }
    int16_t *w = q.w + weight_place(q.w_stride, row, 0);
    for (uint32_t i = 0; i < q.n; i += kLanes) {
      VInt x[4];
      for (uint32_t r = 0; r < 4; r++) x[r] = load<VInt>(rounded.of[r < rows ? r : 0] + i);
      store_four_weights(w + i * 4, x);
    }
  }
}

// ---- one row, which may have many weights, and what rounding leaves of them

// w = rne(x * inverse), and the sums of spans; x is zero from n to the end of its vector.  What remains of x * inverse takes its place.
KVQ_INLINE float round_rest(float *x, uint32_t n, float inverse, int16_t *w, int32_t *sum) {
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
  q.error[r] = round_rest(x, q.n, inverse, q.w + weight_place(q.w_stride, q.row + r, 0), q.sum + r * q.sum_stride) * q.scale[r];
  q.power[r] = doubt ? sum_lanes(power) : 0.0f;
  q.total[r] = sum_lanes(floats);
  if (q.fine) round_rest(x, q.n, kFineSteps, q.fine, q.fine_sum);
}

void quantize(const Quantize &q) {
  if (q.row % 4 == 0 && !q.fine && q.n <= kSumSpan) return round_rows(q);
  for (uint32_t r = 0; r < q.rows; r++) quantize_row(q, r);
}
