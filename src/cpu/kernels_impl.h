// Source of the kernels: kernels_NAME.cpp includes it with KVQ_KERNELS set to the name of its table.  Everything is in an anonymous
// namespace and nothing of the standard library's templates is used (kernels.h says why).
#include "cpu/kernels.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // g++ 12 means its own AVX-512 header (bug 105593)
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

namespace kvq::cpu {
namespace {

#include "cpu/simd.h"

// ---------------------------------------------------------------------------------------------------- planes to codes

// A scheme's numbers as constants.
template <SchemeId S>
struct SchemeOf {
  static constexpr uint32_t kBits = kSchemeTable[S].bits, kDigits = kSchemeTable[S].digits, kBase = kSchemeTable[S].base;
  static constexpr uint32_t kDirect = kSchemeTable[S].direct, kSpare = kSchemeTable[S].spare;
  static constexpr uint32_t kPlanes = kSchemeTable[S].planes, kFields = kSchemeTable[S].fields;
};

template <uint32_t SHIFT>
KVQ_INLINE VByte shift_right(VByte x) {
  if (SHIFT == 0) return x;
  return (VByte)((VShort)x >> (int)SHIFT);  // bits of the neighbour come in: mask them
}

template <uint32_t SHIFT>
KVQ_INLINE VByte shift_left(VByte x) {
  if (SHIFT == 0) return x;
  return (VByte)((VShort)x << (int)SHIFT);
}

KVQ_INLINE VByte mask_low(VByte x, uint32_t bits) {
  const uint8_t mask = (uint8_t)((1u << bits) - 1);  // named: GCC 12 with -fsanitize=undefined takes the expression for an int
  return x & mask;
}

// Where decoded vectors go: through the table if there is one.
template <bool MAP>
struct Sink {
  Table table;
  uint8_t *out;
};

template <uint32_t BITS, bool MAP>
KVQ_INLINE void put(const Sink<MAP> &sink, uint32_t vector, uint32_t part, VByte x) {
  if (!(MAP && kLooseIndex && BITS <= 6)) x = mask_low(x, BITS);
  if (MAP) x = look_up(sink.table, x);
  store(sink.out + vector * 64 + part * KVQ_VECTOR_BYTES, x);
}

// Digits of a field of `bits` bits, first digit first: field / 2^bits is at least the mixed radix number and less than the next one, so
// as a fraction of 256 each multiplication by the base carries a digit over the point.
template <class S, bool MAP>
KVQ_INLINE void put_digits(const Sink<MAP> &sink, uint32_t field, uint32_t part, VByte x, uint32_t digits, uint32_t bits) {
  const VShort fraction = (VShort)x << int(8 - bits);
  VShort even = fraction & (uint16_t)0xff, odd = fraction >> 8;
#pragma GCC unroll 5
  for (uint32_t d = 0; d < digits; d++) {
    even *= (uint16_t)S::kBase;
    odd *= (uint16_t)S::kBase;
    VByte code = (VByte)(even >> 8 | (odd & (uint16_t)0xff00));
    if (MAP) code = look_up(sink.table, code);
    store(sink.out + (field * S::kDigits + d) * 64 + part * KVQ_VECTOR_BYTES, code);
    even &= (uint16_t)0xff;
    odd &= (uint16_t)0xff;
  }
}

template <class S, bool MAP>
KVQ_INLINE void put_field(const Sink<MAP> &sink, uint32_t field, uint32_t part, VByte x) {
  if (S::kDigits == 1)
    put<S::kBits, MAP>(sink, field, part, x);
  else
    put_digits<S, MAP>(sink, field, part, S::kBits < 8 ? mask_low(x, S::kBits) : x, S::kDigits, S::kBits);
}

template <uint32_t SHIFT, class S, bool MAP>
KVQ_INLINE void put_direct(const Sink<MAP> &sink, uint32_t plane, uint32_t part, VByte x) {
  if constexpr (SHIFT < S::kDirect) {
    put_field<S, MAP>(sink, plane * S::kDirect + SHIFT, part, shift_right<SHIFT * S::kBits>(x));
    put_direct<SHIFT + 1, S, MAP>(sink, plane, part, x);
  }
}

// Bits BIT to BITS of a field whose bit 0 is bit FIRST of the spare bits of a unit's planes, which follow each other from plane 0 on.
template <class S, uint32_t FIRST, uint32_t BITS, uint32_t BIT = 0>
KVQ_INLINE VByte gather_spare(const VByte *x) {
  constexpr uint32_t kAt = (FIRST + BIT) % S::kSpare;  // bits [kAt, kAt + kCount) of what a plane has spare
  constexpr uint32_t kCount = S::kSpare - kAt < BITS - BIT ? S::kSpare - kAt : BITS - BIT;
  constexpr uint32_t kFrom = S::kDirect * S::kBits + kAt;
  constexpr uint32_t kRight = kFrom > BIT ? kFrom - BIT : 0, kLeft = BIT > kFrom ? BIT - kFrom : 0;
  constexpr uint8_t kMask = uint8_t(((1u << kCount) - 1) << BIT);
  const VByte bits = shift_left<kLeft>(shift_right<kRight>(x[(FIRST + BIT) / S::kSpare])) & kMask;
  if constexpr (BIT + kCount < BITS)
    return bits | gather_spare<S, FIRST, BITS, BIT + kCount>(x);
  else
    return bits;
}

template <uint32_t I, class S, bool MAP>
KVQ_INLINE void put_spares(const Sink<MAP> &sink, uint32_t part, const VByte *x) {
  if constexpr (S::kPlanes * S::kDirect + I < S::kFields) {
    put_field<S, MAP>(sink, S::kPlanes * S::kDirect + I, part, gather_spare<S, I * S::kBits, S::kBits>(x));
    put_spares<I + 1, S, MAP>(sink, part, x);
  }
}

template <class S, bool MAP>
KVQ_INLINE void unpack_unit(const uint8_t *planes, const Sink<MAP> &sink) {
#pragma GCC unroll 4
  for (uint32_t part = 0; part < 64 / KVQ_VECTOR_BYTES; part++) {
    VByte x[S::kPlanes];
#pragma GCC unroll 8
    for (uint32_t p = 0; p < S::kPlanes; p++) {
      x[p] = load<VByte>(planes + p * 64 + part * KVQ_VECTOR_BYTES);
      put_direct<0, S, MAP>(sink, p, part, x[p]);
    }
    if constexpr (S::kSpare != 0) put_spares<0, S, MAP>(sink, part, x);
  }
}

// `bits` bits from bit `first` of the shared planes; bits above are garbage.
KVQ_INLINE VByte shared_field(const uint8_t *planes, uint32_t first, uint32_t bits) {
  const uint32_t shift = first % 8;
  VShort field = load<VShort>(planes + first / 8 * 64) >> int(shift);
  if (shift + bits <= 8) return (VByte)field;
  const VShort rest = load<VShort>(planes + first / 8 * 64 + 64) << int(8 - shift);
  const uint16_t low = (uint16_t)(0x0101 * ((1u << (8 - shift)) - 1));
  return (VByte)((field & low) | (rest & (uint16_t)~low));
}

template <class S, bool MAP>
KVQ_INLINE void unpack_tail(const Packing &packing, const uint8_t *shared, const Sink<MAP> &sink) {
  for (uint32_t part = 0; part < 64 / KVQ_VECTOR_BYTES; part++, shared += KVQ_VECTOR_BYTES) {
    const bool is_short = packing.last_digits < S::kDigits;
    uint32_t bit = packing.tail_bit;
    for (uint32_t f = 0; f + is_short < packing.tail_fields; f++, bit += S::kBits)
      put_field<S, MAP>(sink, f, part, shared_field(shared, bit, S::kBits));
    if (packing.tail_fields && is_short) {
      const uint32_t bits = kShortBits[packing.scheme][packing.last_digits];
      put_digits<S, MAP>(sink, packing.tail_fields - 1, part, mask_low(shared_field(shared, bit, bits), bits), packing.last_digits, bits);
    }
  }
}

template <SchemeId ID, bool MAP>
void unpack_scheme(const Packing &packing, const uint8_t *planes, const uint8_t *shared, const uint8_t *table, uint8_t *codes) {
  using S = SchemeOf<ID>;
  Sink<MAP> sink{MAP ? load_table(table) : Table{}, codes};
  for (uint32_t u = 0; u < packing.units; u++) {
    unpack_unit<S, MAP>(planes, sink);
    planes += S::kPlanes * 64;
    sink.out += S::kFields * S::kDigits * 64;
  }
  unpack_tail<S, MAP>(packing, shared, sink);
}

// codes = table[codes] where the vector look-up does not reach: small tables by comparisons, others one byte at a time.
void map_codes(uint8_t *codes, uint32_t n, const uint8_t *table, uint32_t levels) {
  if (levels > 16) {
    for (uint32_t i = 0; i < n; i++) codes[i] = table[codes[i]];
    return;
  }
  typedef int8_t VSigned __attribute__((vector_size(KVQ_VECTOR_BYTES)));
  VByte step[16];  // from level k - 1 to level k
  for (uint32_t k = 1; k < levels; k++) step[k] = (uint8_t)(table[k] - table[k - 1]) - VByte{};
  for (uint32_t i = 0; i < n; i += KVQ_VECTOR_BYTES) {
    VSigned x = load<VSigned>(codes + i);
    VByte y = table[0] - VByte{};
    for (uint32_t k = 1; k < levels; k++, x -= (int8_t)1) y += (VByte)(x > (int8_t)0) & step[k];
    store(codes + i, y);
  }
}

using Unpack = void (*)(const Packing &, const uint8_t *, const uint8_t *, const uint8_t *, uint8_t *);
template <bool MAP>
constexpr Unpack kUnpack[kSchemes] = {
    unpack_scheme<kBits1, MAP>, unpack_scheme<kBits2, MAP>, unpack_scheme<kBits3, MAP>, unpack_scheme<kBits4, MAP>,
    unpack_scheme<kBits5, MAP>, unpack_scheme<kBits6, MAP>, unpack_scheme<kBits7, MAP>, unpack_scheme<kBits8, MAP>,
    unpack_scheme<kBase3, MAP>, unpack_scheme<kBase5, MAP>, unpack_scheme<kBase6, MAP>};

void unpack(const Packing &packing, const uint8_t *planes, const uint8_t *shared, const uint8_t *table, uint8_t *codes) {
  const uint32_t levels = kSchemeTable[packing.scheme].base;
  if (table && levels <= kTableEntries) return kUnpack<true>[packing.scheme](packing, planes, shared, table, codes);
  kUnpack<false>[packing.scheme](packing, planes, shared, nullptr, codes);
  if (table) map_codes(codes, packing.vectors * 64, table, levels);
}

// ---------------------------------------------------------------------------------------------------- dot products

// The next lines, to the second level: the first has few buffers for lines that are on their way.  `lines` is a copy in registers.
template <uint32_t LINES>
KVQ_INLINE void fetch(Prefetch *lines) {
  if (lines->at >= lines->end) return;
  for (uint32_t i = 0; i < LINES; i++) __builtin_prefetch(lines->at + i * 64, 0, 2);
  lines->at += LINES * 64;
}

// The first n of kLanes floats, and zeros.
KVQ_INLINE VFloat load_some(const float *x, uint32_t n) {
  if (n >= kLanes) return load<VFloat>(x);
  float some[kLanes] = {};
  for (uint32_t i = 0; i < n; i++) some[i] = x[i];
  return load<VFloat>(some);
}
KVQ_INLINE void store_some(float *x, uint32_t n, VFloat v) {
  if (n >= kLanes) return store(x, v);
  float some[kLanes];
  store(some, v);
  for (uint32_t i = 0; i < n; i++) x[i] = some[i];
}

// Results of one row and one vector of lanes: scaled, shifted, added, stored.
KVQ_INLINE void finish(const Dot &dot, uint32_t row, uint32_t lane, VFloat sum) {
  float *out = dot.out + row * dot.out_stride + lane;
  const uint32_t left = dot.lanes - lane;
  if (dot.lane_scale) sum *= load<VFloat>(dot.lane_scale + lane);
  if (dot.offset) sum += dot.lane_offset ? dot.offset[row] * load<VFloat>(dot.lane_offset + lane) : all(dot.offset[row]);
  store_some(out, left, dot.add ? load_some(out, left) + sum : sum);
}

// ROWS rows x VECTORS vectors of lanes over quads [first, end): the accumulators stay in registers.
template <uint32_t ROWS, uint32_t VECTORS>
KVQ_INLINE void dot_codes_block(const Dot &dot, uint32_t row, uint32_t lane, uint32_t first, uint32_t end) {
  const int16_t *w = (const int16_t *)dot.w + row * dot.w_stride;
  const uint8_t *x = (const uint8_t *)dot.x + first * dot.stride + lane * 4;
  Sums sums[ROWS][VECTORS];
  for (uint32_t r = 0; r < ROWS; r++)
    for (uint32_t v = 0; v < VECTORS; v++)
      sums[r][v] = start_sums(dot.bias ? -dot.bias * dot.sum[(row + r) * dot.sum_stride + first / (kSumSpan / 4)] : 0);
  Prefetch lines = dot.prefetch ? *dot.prefetch : Prefetch{};
#pragma GCC unroll 1
  for (uint32_t q = first; q < end; q++, x += dot.stride) {
    fetch<1>(&lines);
    Words words[VECTORS];
#pragma GCC unroll 4
    for (uint32_t v = 0; v < VECTORS; v++) words[v] = load_words(x + v * KVQ_VECTOR_BYTES);
#pragma GCC unroll 4
    for (uint32_t r = 0; r < ROWS; r++) {
      const int16_t *four = w + r * dot.w_stride + q * 4;
      const VInt first_pair = all_pairs(four), second_pair = all_pairs(four + 2);
#pragma GCC unroll 4
      for (uint32_t v = 0; v < VECTORS; v++) add_products(&sums[r][v], words[v], first_pair, second_pair);
    }
  }
  if (dot.prefetch) *dot.prefetch = lines;
  for (uint32_t r = 0; r < ROWS; r++)
    for (uint32_t v = 0; v < VECTORS; v++)
      if (v == 0 || lane + v * kLanes < dot.lanes) finish(dot, row + r, lane + v * kLanes, dot.scale[row + r] * to_float(total(sums[r][v])));
}

template <uint32_t ROWS>
KVQ_INLINE void dot_codes_rows(const Dot &dot, uint32_t row, uint32_t first, uint32_t end) {
  constexpr uint32_t kWide = kWordVectors;
  uint32_t lane = 0;
  for (; lane + (kWide - 1) * kLanes < dot.lanes; lane += kWide * kLanes) dot_codes_block<ROWS, kWide>(dot, row, lane, first, end);
  if (kWide > 2 && lane + kLanes < dot.lanes) dot_codes_block<ROWS, 2>(dot, row, lane, first, end), lane += 2 * kLanes;
  for (; lane < dot.lanes; lane += kLanes) dot_codes_block<ROWS, 1>(dot, row, lane, first, end);
}

// One span of at most kSumSpan weights, for all rows.
void dot_codes_span(const Dot &dot, uint32_t first, uint32_t end) {
  uint32_t row = 0;
  for (; row + 4 <= dot.rows; row += 4) dot_codes_rows<4>(dot, row, first, end);
  switch (dot.rows - row) {
    case 3:
      return dot_codes_rows<3>(dot, row, first, end);
    case 2:
      return dot_codes_rows<2>(dot, row, first, end);
    case 1:
      return dot_codes_rows<1>(dot, row, first, end);
  }
}

void dot_codes(const Dot &dot) {
  constexpr uint32_t kSpan = kSumSpan / 4;
  if (dot.depth <= kSpan) return dot_codes_span(dot, 0, dot.depth);
  Dot rest = dot;
  for (uint32_t first = 0; first < dot.depth; first += kSpan) {
    dot_codes_span(rest, first, dot.depth - first < kSpan ? dot.depth : first + kSpan);
    rest.add = true;
    rest.offset = nullptr;
  }
}

struct Halves {
  static constexpr uint32_t kBytes = 2;
  KVQ_INLINE VFloat get(const void *p) { return load_halves((const uint16_t *)p); }
};
struct Floats {
  static constexpr uint32_t kBytes = 4;
  KVQ_INLINE VFloat get(const void *p) { return load<VFloat>(p); }
};

template <class X, uint32_t ROWS, uint32_t VECTORS>
KVQ_INLINE void dot_block(const Dot &dot, uint32_t row, uint32_t lane) {
  const float *w = (const float *)dot.w + row * dot.w_stride;
  const uint8_t *x = (const uint8_t *)dot.x + lane * X::kBytes;
  VFloat sum[ROWS][VECTORS] = {};
  Prefetch lines = dot.prefetch ? *dot.prefetch : Prefetch{};
#pragma GCC unroll 1
  for (uint32_t i = 0; i < dot.depth; i++, x += dot.stride) {
    fetch<2>(&lines);
    VFloat value[VECTORS];
#pragma GCC unroll 4
    for (uint32_t v = 0; v < VECTORS; v++) value[v] = X::get(x + v * kLanes * X::kBytes);
#pragma GCC unroll 4
    for (uint32_t r = 0; r < ROWS; r++) {
      const VFloat weight = all(w[r * dot.w_stride + i]);
#pragma GCC unroll 4
      for (uint32_t v = 0; v < VECTORS; v++) sum[r][v] += weight * value[v];
    }
  }
  if (dot.prefetch) *dot.prefetch = lines;
  for (uint32_t r = 0; r < ROWS; r++)
    for (uint32_t v = 0; v < VECTORS; v++)
      if (v == 0 || lane + v * kLanes < dot.lanes) finish(dot, row + r, lane + v * kLanes, sum[r][v]);
}

constexpr uint32_t kWide = KVQ_VECTOR_BYTES == 64 ? 4 : 2;  // vectors of lanes in a block of four rows: what the registers hold

template <class X, uint32_t ROWS>
KVQ_INLINE void dot_rows(const Dot &dot, uint32_t row) {
  uint32_t lane = 0;
  for (; lane + (kWide - 1) * kLanes < dot.lanes; lane += kWide * kLanes) dot_block<X, ROWS, kWide>(dot, row, lane);
  if (kWide > 2 && lane + kLanes < dot.lanes) dot_block<X, ROWS, 2>(dot, row, lane), lane += 2 * kLanes;
  for (; lane < dot.lanes; lane += kLanes) dot_block<X, ROWS, 1>(dot, row, lane);
}

template <class X>
void dot_values(const Dot &dot) {
  uint32_t row = 0;
  for (; row + 4 <= dot.rows; row += 4) dot_rows<X, 4>(dot, row);
  switch (dot.rows - row) {
    case 3:
      return dot_rows<X, 3>(dot, row);
    case 2:
      return dot_rows<X, 2>(dot, row);
    case 1:
      return dot_rows<X, 1>(dot, row);
  }
}

// ---------------------------------------------------------------------------------------------------- rows of floats

constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, which the low bits then hold
constexpr int32_t kRoundBits = 0x4b400000;

// w = rne(x * inverse), and the sums of spans; x is zero from n to the end of its vector, and so is w.  What remains of x * inverse
// takes its place, and its sum is returned.
KVQ_INLINE float round_row(float *x, uint32_t n, float inverse, int16_t *w, int32_t *sum) {
  VFloat remains = {};
  for (uint32_t first = 0; first < n; first += kSumSpan, sum++) {
    const uint32_t end = n - first < kSumSpan ? n : first + kSumSpan;
    VInt total = {};
    for (uint32_t i = first; i < end; i += kLanes) {
      const VFloat wanted = load<VFloat>(x + i) * inverse, shifted = wanted + kRound, left = wanted - (shifted - kRound);
      const VInt rounded = (VInt)shifted - kRoundBits;
      store_weights(w + i, rounded);
      store(x + i, left);
      total += rounded;
      remains += left;
    }
    *sum = sum_lanes(total);
  }
  return sum_lanes(remains);
}

void quantize(Quantize *q) {
  constexpr uint32_t kMaxWeights = 2560;
  float x[kMaxWeights];
  VFloat most = {};
  for (uint32_t i = 0; i < q->n; i += kLanes) {
    VFloat v = load_some(q->x + i, q->n - i);
    if (q->s) v *= load_some(q->s + i, q->n - i);
    store(x + i, v);
    most = greater(most, magnitude(v));
  }
  const float largest = max_lanes(most), inverse = largest > 1e-30f ? kMostWeight / largest : 0.0f;
  q->scale = largest / kMostWeight;
  q->error = round_row(x, q->n, inverse, q->w, q->sum) * q->scale;
  if (q->fine) round_row(x, q->n, 32768.0f, q->fine, q->fine_sum);
}

void enter_floats(const float *x, uint32_t n, float scale, float *out) {
  for (uint32_t i = 0; i < n; i++) {
    // Nearest even at 10 bits of fraction, or at steps of 2^-24 below 2^-14, whose sum with 1/2 has them as its last bit.
    float a = __builtin_fabsf(x[i]);
    a = a < 65504.0f ? a : 65504.0f;
    int32_t bits;
    __builtin_memcpy(&bits, &a, 4);
    bits = (bits + 0xfff + (bits >> 13 & 1)) & ~0x1fff;
    float normal;
    __builtin_memcpy(&normal, &bits, 4);
    const float rounded = a < 0x1p-14f ? (a + 0.5f) - 0.5f : normal;
    out[i] = (x[i] < 0 ? -rounded : rounded) * scale;
  }
}

bool all_finite(const float *x, uint32_t n) {
  int32_t most = 0;
  for (uint32_t i = 0; i < n; i++) {
    int32_t bits;
    __builtin_memcpy(&bits, x + i, 4);
    bits &= 0x7fffffff;
    most = most > bits ? most : bits;
  }
  return most < 0x7f800000;
}

// Butterflies of one vector: distances 1, 2, ... between its lanes.
template <uint32_t D>
KVQ_INLINE VFloat butterfly(VFloat v) {
  if constexpr (D < kLanes) {
    VFloat sign;
    for (uint32_t i = 0; i < kLanes; i++) sign[i] = i & D ? -1.0f : 1.0f;
    return butterfly<2 * D>(v * sign + swap_lanes<D>(v));
  }
  return v;
}

void hadamard(float *x, uint32_t n, float scale) {
  uint32_t distance = 1;
  if (n >= kLanes) {
    for (uint32_t i = 0; i < n; i += kLanes) store(x + i, butterfly<1>(load<VFloat>(x + i)) * scale);
    distance = kLanes;
  } else {
    for (uint32_t i = 0; i < n; i++) x[i] *= scale;
  }
  for (; distance < n; distance *= 2)
    for (uint32_t base = 0; base < n; base += 2 * distance)
      for (uint32_t i = base; i < base + distance; i++) {
        const float a = x[i], b = x[i + distance];
        x[i] = a + b;
        x[i + distance] = a - b;
      }
}

void halves_to_floats(const uint16_t *x, uint32_t n, float scale, float *out) {
  for (uint32_t i = 0; i < n; i += kLanes) store(out + i, load_halves(x + i) * scale);
}

float maximum(const float *x, uint32_t n) {
  VFloat most = load<VFloat>(x);
  for (uint32_t i = kLanes; i < n; i += kLanes) most = greater(most, load<VFloat>(x + i));
  return max_lanes(most);
}

void moments(const float *x, uint32_t n, float *sum, float *squares) {
  VFloat first = {}, second = {};
  for (uint32_t i = 0; i < n; i += kLanes) {
    const VFloat v = load<VFloat>(x + i);
    first += v;
    second += v * v;
  }
  *sum = sum_lanes(first);
  *squares = sum_lanes(second);
}

float power(const float *x, const float *y, const float *factor, uint32_t n) {
  VFloat total = {};
  for (uint32_t i = 0; i < n; i += kLanes) {
    const VFloat v = y ? load<VFloat>(x + i) * load<VFloat>(y + i) : load<VFloat>(x + i);
    total += v * v * load<VFloat>(factor + i);
  }
  return sum_lanes(total);
}

float dot_product(const float *x, const float *y, uint32_t n) {
  VFloat total = {};
  for (uint32_t i = 0; i < n; i += kLanes) total += load<VFloat>(x + i) * load<VFloat>(y + i);
  return sum_lanes(total);
}

// 2^x for x <= 128, 0 below -126: the nearest integer goes to the exponent, a polynomial of degree 6 takes the rest (Taylor, error
// below 2e-7 on [-1/2, 1/2]).
KVQ_INLINE VFloat exp2_lanes(VFloat x) {
  const VFloat low = all(-126.0f), clamped = greater(x, low);
  const VFloat shifted = clamped + 12582912.0f, f = clamped - (shifted - 12582912.0f);
  VFloat p = all(1.5403530e-4f);
  p = p * f + 1.3333558e-3f;
  p = p * f + 9.6181291e-3f;
  p = p * f + 5.5504109e-2f;
  p = p * f + 2.4022651e-1f;
  p = p * f + 6.9314718e-1f;
  p = p * f + 1.0f;
  const VInt y = (VInt)p + ((VInt)shifted << 23);
  return (VFloat)(y & (VInt)(x >= low));
}

float exponentials(float *x, uint32_t n, float reference) {
  VFloat sum = {};
  for (uint32_t i = 0; i < n; i += kLanes) {
    const VFloat p = exp2_lanes(load<VFloat>(x + i) - reference);
    store(x + i, p);
    sum += p;
  }
  return sum_lanes(sum);
}

// tanh(y) = 1 - 2 / (e^(2y) + 1); |y| beyond 40 is 1 to the last bit.
void softcap(float *x, uint32_t n, float cap) {
  constexpr float kLog2e = 1.44269504f;
  for (uint32_t i = 0; i < n; i += kLanes) {
    VFloat y = load<VFloat>(x + i) * (2.0f * kLog2e / cap);
    y = y < 100.0f ? y : all(100.0f);
    store(x + i, (1.0f - 2.0f / (exp2_lanes(y) + 1.0f)) * (kLog2e * cap));
  }
}

void expand(const uint8_t *words, uint32_t byte, uint32_t n, const float *scale, const float *zero, uint32_t step, float *out) {
  const VFloat one_scale = all(scale[0]), one_zero = all(zero[0]);
  for (uint32_t i = 0; i < n; i += kLanes) {
    const VFloat code = to_float(load<VInt>(words + i * 4) >> int(8 * byte) & 0xff);
    const uint32_t left = n - i;
    const VFloat s = step ? load_some(scale + i, left) : one_scale, z = step ? load_some(zero + i, left) : one_zero;
    store_some(out + i, left, z + s * code);
  }
}

// Quarter turns are taken off first; sine and cosine of the rest by their Taylor polynomials, 1e-7 on [-pi/4, pi/4].
KVQ_INLINE void polar_lanes(VFloat *radius, VFloat *angle) {
  const VFloat shifted = *angle * 0.636619772f + 12582912.0f, quarters = shifted - 12582912.0f;
  const VFloat r = (*angle - quarters * 0x1.92p+0f) - quarters * 0x1.fb5444p-12f, t = r * r;
  VFloat sine = all(2.7557319e-6f), cosine = all(2.4801587e-5f);
  sine = sine * t - 1.9841270e-4f;
  sine = sine * t + 8.3333333e-3f;
  sine = sine * t - 1.6666667e-1f;
  sine = (sine * t + 1.0f) * r;
  cosine = cosine * t - 1.3888889e-3f;
  cosine = cosine * t + 4.1666667e-2f;
  cosine = cosine * t - 0.5f;
  cosine = cosine * t + 1.0f;
  const VInt quarter = (VInt)shifted, odd = -(quarter & 1);
  const VInt x = ((VInt)cosine & ~odd) | ((VInt)sine & odd), y = ((VInt)sine & ~odd) | ((VInt)cosine & odd);
  *angle = *radius * (VFloat)(y ^ ((quarter & 2) << 30));
  *radius = *radius * (VFloat)(x ^ (((quarter + 1) & 2) << 30));
}

void polar(float *radius, float *angle, uint32_t n) {
  for (uint32_t i = 0; i < n; i += kLanes) {
    VFloat r = load_some(radius + i, n - i), a = load_some(angle + i, n - i);
    polar_lanes(&r, &a);
    store_some(radius + i, n - i, r);
    store_some(angle + i, n - i, a);
  }
}

constexpr Kernels kTable = {
    .name = KVQ_KERNELS_NAME,
    .unpack = unpack,
    .dot_codes = dot_codes,
    .dot_halves = dot_values<Halves>,
    .dot_floats = dot_values<Floats>,
    .quantize = quantize,
    .halves_to_floats = halves_to_floats,
    .maximum = maximum,
    .dot_product = dot_product,
    .moments = moments,
    .power = power,
    .exponentials = exponentials,
    .softcap = softcap,
    .expand = expand,
    .polar = polar,
    .enter_floats = enter_floats,
    .all_finite = all_finite,
    .hadamard = hadamard,
};

}  // namespace
}  // namespace kvq::cpu
