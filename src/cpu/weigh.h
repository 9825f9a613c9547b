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

// What lanes from `i` on add to `power`; v = x * s.
KVQ_INLINE VFloat doubtful_square(const float *share, const float *doubt, uint32_t i, VFloat x, VFloat v) {
  if (!share) return v * v * load<VFloat>(doubt + i);
  const VFloat square = x * x * load<VFloat>(share + i);
  return doubt ? square * load<VFloat>(doubt + i) : square;
}

// ---- up to four rows at once

struct alignas(64) FourRows {
  int32_t of[4][kSumSpan];
};

// What becomes of four rows, by lane.
struct FourSums {
  VFloat power[4], products[4], exponentials[4], zeros[4];
  VInt total[4];
};

// How floats become weights: as they are, of which the last vector may be in part; whole vectors; logits of whole vectors.
enum class Mode {
  any,
  whole,
  logits
};
template <Mode MODE>
KVQ_INLINE VFloat load_floats(const float *x, uint32_t n) {
  return MODE == Mode::any ? load_some(x, n) : load<VFloat>(x);
}

template <Mode MODE>
KVQ_INLINE VFloat largest_product(const Quantize &q, uint32_t r, uint32_t first, uint32_t end) {
  const float *x = q.x + r * q.x_stride, *s = q.s;
  const uint32_t n = q.n;
  VFloat most = {};
  for (uint32_t i = first; i < end; i += kLanes) {
    const VFloat v = load_floats<MODE>(x + i, n - i);
    most = greater(most, magnitude(s ? v * load_floats<MODE>(s + i, n - i) : v));
  }
  return most;
}

// Weights [first, end) of row `r`, which is row `to` of the group.  Logits x become 2^(x - reference) first.
template <Mode MODE>
KVQ_INLINE void round_row(const Quantize &q, uint32_t r, uint32_t first, uint32_t end, float inverse, uint32_t to, FourRows *rounded, FourSums *sums) {
  float *x = q.x + r * q.x_stride;  // copies of all that q has: stores could be to it
  const float *s = q.s, *zero = q.zero, *share = q.share, *doubt = q.doubt ? q.doubt + r * q.doubt_stride : nullptr;
  const uint32_t n = q.n;
  constexpr bool kExp = MODE == Mode::logits;
  const VFloat reference = all(kExp ? q.reference[r] : 0.0f), factor = all(inverse);
  VFloat power = {}, products = {}, exponentials = {}, zeros = {};
  VInt total = {};
#pragma GCC unroll 1
  for (uint32_t i = first; i < end; i += kLanes) {
    VFloat p = load_floats<MODE>(x + i, n - i);
    if (kExp) {
      p = exp2_lanes(p - reference);
      store(x + i, p);
      exponentials += p;
    }
    const VFloat v = kExp || s ? p * load_floats<MODE>(s + i, n - i) : p;
    const VInt whole = to_int(v * factor);
    store(rounded->of[to] + i, whole);
    total += whole;
    products += v;
    if (zero) zeros += p * load<VFloat>(zero + i);
    if (share || doubt) power += doubtful_square(share, doubt, i, p, v);
  }
  sums->power[to] = power, sums->products[to] = products, sums->exponentials[to] = exponentials, sums->zeros[to] = zeros, sums->total[to] = total;
}

// The largest |x * s| of a span of rows [row, row + rows).
template <Mode MODE>
KVQ_INLINE VFloat find_bounds(const Quantize &q, uint32_t row, uint32_t rows, uint32_t first, uint32_t end) {
  if (!q.bound) {
    VFloat most[4];
    for (uint32_t r = 0; r < 4; r++) most[r] = r < rows ? largest_product<MODE>(q, row + r, first, end) : VFloat{};
    return max_four(most);
  }
  if (MODE != Mode::logits) return load_four(q.bound + row);
  const VFloat largest = exp2_lanes(load_four(q.most + row) - load_four(q.reference + row));
  store_four(q.largest + row, largest);
  return load_four(q.bound + row) * largest;
}

// Weights [first, end) of rows [row, row + rows).
template <Mode MODE>
void round_span(const Quantize &q, uint32_t row, uint32_t rows, uint32_t first, uint32_t end, uint32_t span, FourRows *rounded) {
  const VFloat bound = find_bounds<MODE>(q, row, rows, first, end), inverse = bound > 1e-30f ? kMostWeight / bound : VFloat{};
  FourSums sums;
  for (uint32_t r = 0; r < rows; r++) round_row<MODE>(q, row + r, first, end, inverse[r], r, rounded, &sums);
  for (uint32_t r = rows; r < 4; r++) sums.power[r] = sums.products[r] = sums.exponentials[r] = sums.zeros[r] = VFloat{}, sums.total[r] = VInt{};
  const size_t at = row + span * q.span_stride;
  const VInt sum = (VInt)sum_four(sums.total);
  const VFloat scale = bound / kMostWeight, product = sum_four(sums.products);
  for (uint32_t r = 0; r < 4; r++) q.sum[(row + r) * q.sum_stride + span * q.span_stride] = sum[r];
  store_four(q.scale + at, scale);
  store_four(q.error + at, product - to_float(sum) * scale);
  store_four(q.total + at, product);
  if (q.share || q.doubt) store_four(q.power + at, sum_four(sums.power));
  if (q.zero) store_four(q.zeros + at, sum_four(sums.zeros));
  if (MODE == Mode::logits) store_four(q.exponentials + row, sum_four(sums.exponentials));
}

void round_group(const Quantize &q, uint32_t row, uint32_t rows) {
  FourRows rounded;
  const auto round = q.reference ? round_span<Mode::logits> : q.n % kLanes ? round_span<Mode::any>
                                                                           : round_span<Mode::whole>;
  for (uint32_t at = 0, span = 0; at < q.n; span++) {
    const uint32_t end = q.ends ? q.ends[span] : q.n;
    round(q, row, rows, at, end, span, &rounded);
    at = end;
  }
  int16_t *w = q.w + weight_place(q.w_stride, row, 0);
  const uint32_t n = q.n;
  for (uint32_t i = 0; i < n; i += kLanes) {
    VInt x[4];
#pragma GCC unroll 4
    for (uint32_t r = 0; r < 4; r++) x[r] = load<VInt>(rounded.of[r < rows ? r : 0] + i);
    store_four_weights(w + i * 4, x);
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
    if (q.share || doubt) power += doubtful_square(q.share, doubt, i, p, v);
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
  if (q.row % 4 == 0 && !q.fine && q.n <= kSumSpan) {
    for (uint32_t row = 0; row < q.rows; row += 4) round_group(q, row, q.rows - row < 4 ? q.rows - row : 4);
    return;
  }
  for (uint32_t r = 0; r < q.rows; r++) quantize_row(q, r);
}
