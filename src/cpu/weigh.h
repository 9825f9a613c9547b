// Floats to 16-bit weights, by way of exponentials where they are still logits.  Included by kernels_impl.h only, inside its anonymous
// namespace.

// 2^x for x <= 128, 0 below -126: an integer goes to the exponent, a polynomial of degree 5 takes the rest (minimax, error 8e-8).
KVQ_INLINE VFloat exp2_lanes(VFloat x) {
#if KVQ_VECTOR_BYTES == 64
  const VFloat f = (VFloat)_mm512_reduce_ps((__m512)x, 1);  // what is above the floor; 0 for infinity
  VFloat p = all(1.8775767e-3f);
  p = p * f + 8.9893397e-3f;
  p = p * f + 5.5826318e-2f;
  p = p * f + 2.4015361e-1f;
  p = p * f + 6.9315308e-1f;
  p = p * f + 0.99999994f;
  return (VFloat)_mm512_scalef_ps((__m512)p, (__m512)x);
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

KVQ_INLINE VFloat load_product(const Quantize &q, const float *x, uint32_t i) {
  const VFloat v = load_some(x + i, q.n - i);
  return q.s ? v * load_some(q.s + i, q.n - i) : v;
}

// What lanes from `i` on add to `power`; v = x * s.
KVQ_INLINE VFloat doubtful_square(const Quantize &q, const float *doubt, uint32_t i, VFloat x, VFloat v) {
  if (!q.share) return v * v * load<VFloat>(doubt + i);
  const VFloat square = x * x * load<VFloat>(q.share + i);
  return doubt ? square * load<VFloat>(doubt + i) : square;
}

// ---- up to four rows at once

struct alignas(64) FourRows {
  int32_t of[4][kSumSpan];
};

// x, or 2^(x - reference), which takes its place.
template <bool EXP>
KVQ_INLINE VFloat next_float(const Quantize &q, float *x, uint32_t i, VFloat reference) {
  if (!EXP) return load_some(x + i, q.n - i);
  const VFloat p = exp2_lanes(load<VFloat>(x + i) - reference);
  store(x + i, p);
  return p;
}

KVQ_INLINE VFloat largest_product(const Quantize &q, uint32_t r, uint32_t first, uint32_t end) {
  VFloat most = {};
  for (uint32_t i = first; i < end; i += kLanes) most = greater(most, magnitude(load_product(q, q.x + r * q.x_stride, i)));
  return most;
}

// What becomes of a row, by lane.
struct RowSums {
  VFloat power, products, exponentials, zeros;
  VInt total;
};

template <bool EXP>
KVQ_INLINE RowSums round_row(const Quantize &q, uint32_t r, uint32_t first, uint32_t end, float inverse, int32_t *rounded) {
  float *x = q.x + r * q.x_stride;
  const float *doubt = q.doubt ? q.doubt + r * q.doubt_stride : nullptr;
  const VFloat reference = all(EXP ? q.reference[r] : 0.0f), factor = all(inverse);
  RowSums sums{};
#pragma GCC unroll 1
  for (uint32_t i = first; i < end; i += kLanes) {
    const VFloat p = next_float<EXP>(q, x, i, reference), v = q.s ? p * (EXP ? load<VFloat>(q.s + i) : load_some(q.s + i, q.n - i)) : p;
    const VInt whole = to_int(v * factor);
    store(rounded + i, whole);
    sums.total += whole;
    sums.products += v;
    if (EXP) sums.exponentials += p;
    if (q.zero) sums.zeros += p * load<VFloat>(q.zero + i);
    if (q.share || doubt) sums.power += doubtful_square(q, doubt, i, p, v);
  }
  return sums;
}

// The largest |x * s| of rows [row, row + ROWS) of a span.
template <bool EXP, uint32_t ROWS>
KVQ_INLINE VFloat find_bounds(const Quantize &q, uint32_t row, uint32_t first, uint32_t end) {
  if (!q.bound) {
    VFloat most[4] = {};
    for (uint32_t r = 0; r < ROWS; r++) most[r] = largest_product(q, row + r, first, end);
    return max_four(most);
  }
  if (!EXP) return load_four(q.bound + row);
  const VFloat largest = exp2_lanes(load_four(q.most + row) - load_four(q.reference + row));
  store_four(q.largest + row, largest);
  return load_four(q.bound + row) * largest;
}

// Weights [first, end) of rows [row, row + ROWS).
template <bool EXP, uint32_t ROWS>
KVQ_INLINE void round_span(const Quantize &q, uint32_t row, uint32_t first, uint32_t end, uint32_t span, FourRows *rounded) {
  const VFloat bound = find_bounds<EXP, ROWS>(q, row, first, end), inverse = bound > 1e-30f ? kMostWeight / bound : VFloat{};
  VFloat power[4] = {}, products[4] = {}, exponentials[4] = {}, zeros[4] = {};
  VInt total[4] = {};
#pragma GCC unroll 4
  for (uint32_t r = 0; r < ROWS; r++) {
    const RowSums sums = round_row<EXP>(q, row + r, first, end, inverse[r], rounded->of[r]);
    power[r] = sums.power, products[r] = sums.products, exponentials[r] = sums.exponentials, zeros[r] = sums.zeros, total[r] = sums.total;
  }
  const size_t at = row + span * q.span_stride;
  const VInt sum = (VInt)sum_four(total);
  const VFloat scale = bound / kMostWeight, product = sum_four(products);
  for (uint32_t r = 0; r < 4; r++) q.sum[(row + r) * q.sum_stride + span * q.span_stride] = sum[r];
  store_four(q.scale + at, scale);
  store_four(q.error + at, product - to_float(sum) * scale);
  store_four(q.total + at, product);
  if (q.share || q.doubt) store_four(q.power + at, sum_four(power));
  if (q.zero) store_four(q.zeros + at, sum_four(zeros));
  if (EXP) store_four(q.exponentials + row, sum_four(exponentials));
}

template <uint32_t ROWS>
void round_group(const Quantize &q, uint32_t row) {
  FourRows rounded;
  if (q.reference) round_span<true, ROWS>(q, row, 0, q.n, 0, &rounded);
  for (uint32_t at = 0, span = 0; !q.reference && at < q.n; span++) {
    const uint32_t end = q.ends ? q.ends[span] : q.n;
    round_span<false, ROWS>(q, row, at, end, span, &rounded);
    at = end;
  }
  int16_t *w = q.w + weight_place(q.w_stride, row, 0);
  for (uint32_t i = 0; i < q.n; i += kLanes) {
    VInt x[4];
    for (uint32_t r = 0; r < 4; r++) x[r] = load<VInt>(rounded.of[r < ROWS ? r : 0] + i);
    store_four_weights(w + i * 4, x);
  }
}

void round_rows(const Quantize &q) {
  uint32_t row = 0;
  for (; row + 4 <= q.rows; row += 4) round_group<4>(q, row);
  switch (q.rows - row) {
    case 3:
      return round_group<3>(q, row);
    case 2:
      return round_group<2>(q, row);
    case 1:
      return round_group<1>(q, row);
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
      const VFloat wanted = load<VFloat>(x + i) * inverse;
      const VInt whole = to_int(wanted);
      const VFloat left = wanted - to_float(whole);
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
    const VFloat p = load_some(q.x + r * q.x_stride + i, q.n - i), v = q.s ? p * load_some(q.s + i, q.n - i) : p;
    store(x + i, v);
    floats += v;
    most = greater(most, magnitude(v));
    if (q.share || doubt) power += doubtful_square(q, doubt, i, p, v);
  }
  const float largest = q.bound && q.bound[r] > 1e-30f ? q.bound[r] : max_lanes(most);
  const float inverse = largest > 1e-30f ? kMostWeight / largest : 0.0f;
  q.scale[r] = largest / kMostWeight;
  q.error[r] = round_rest(x, q.n, inverse, q.w + weight_place(q.w_stride, q.row + r, 0), q.sum + r * q.sum_stride) * q.scale[r];
  if (q.share || doubt) q.power[r] = sum_lanes(power);
  q.total[r] = sum_lanes(floats);
  if (q.fine) round_rest(x, q.n, kFineSteps, q.fine, q.fine_sum);
}

void quantize(const Quantize &q) {
  if (q.row % 4 == 0 && !q.fine && q.n <= kSumSpan) return round_rows(q);
  for (uint32_t r = 0; r < q.rows; r++) quantize_row(q, r);
}
