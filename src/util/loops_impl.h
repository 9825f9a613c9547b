// Source of the loops (loops.h) for the instruction set that the including file is compiled for.  Everything but the table has
// internal linkage.
#include <utility>

#include "util/loops.h"
#include "util/loops_sums.h"
#include "util/loops_vector.h"

namespace kvq {
namespace {

// ---- entry

template <class V>
KVQ_LOOP_INLINE bool any(V mask) {
  uint64_t words[sizeof mask / 8], all = 0;
  store(words, mask);
  for (const uint64_t word : words) all |= word;
  return all != 0;
}

struct Seen {
  VInt special{}, saturated{};  // all ones where an element is, or minus their number
};

KVQ_LOOP_INLINE VHalf enter_floats(VFloat x, Seen *seen) {
  const VInt a = (VInt)x & 0x7fffffff;
  seen->special |= a > 0x7f7fffff;
  seen->saturated += a > 0x477fe000;
  return to_halves(smaller(larger(x, all(-65504.0f)), all(65504.0f)));
}

KVQ_LOOP_INLINE Entered summary(const Seen &seen) {
  Entered entered{!any(seen.special), 0};
  if (any(seen.saturated))
    for (uint32_t i = 0; i < kLanes; i++) entered.saturated -= uint32_t(seen.saturated[i]);
  return entered;
}

KVQ_LOOP_INLINE VFloat floats_of(VFloat x) { return x; }
KVQ_LOOP_INLINE VFloat floats_of(VHalf bf16) { return (VFloat)(__builtin_convertvector(bf16, VInt) << 16); }

template <class V>
Entered enter(const char *x, uint32_t n, uint16_t *out) {
  constexpr size_t kBytes = sizeof(V) / kLanes;
  Seen seen;
  uint32_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(out + i, enter_floats(floats_of(load<V>(x + i * kBytes)), &seen));
  if (i < n) {
    V rest{};
    __builtin_memcpy(&rest, x + i * kBytes, (n - i) * kBytes);
    const VHalf entered = enter_floats(floats_of(rest), &seen);
    __builtin_memcpy(out + i, &entered, (n - i) * 2);
  }
  return summary(seen);
}

Entered enter_f32(const void *x, uint32_t n, uint16_t *out) { return enter<VFloat>(static_cast<const char *>(x), n, out); }
Entered enter_bf16(const void *x, uint32_t n, uint16_t *out) { return enter<VHalf>(static_cast<const char *>(x), n, out); }

Entered enter_f16(const void *halves, uint32_t n, uint16_t *out) {
  const char *x = static_cast<const char *>(halves);
  constexpr uint32_t kHalves = KVQ_LOOPS_BYTES / 2;
  VShort special{};
  bool finite = true;
  uint32_t i = 0;
  for (; i + kHalves <= n; i += kHalves) {
    const VShort h = load<VShort>(x + 2 * i);
    special |= (h & 0x7fff) > 0x7bff;
    store(out + i, h & (VShort)(h != int16_t(0x8000)));
  }
  for (; i < n; i++) {
    const uint16_t h = load<uint16_t>(x + 2 * i);
    finite = finite && (h & 0x7fff) < 0x7c00;
    out[i] = h == 0x8000 ? 0 : h;
  }
  return {finite && !any(special), 0};
}

// ---- transposes: squares of 8 x 8 halves and 16 x 16 bytes by interleaving, as many side by side as a vector has parts of 16 bytes

typedef uint16_t Halves8 __attribute__((vector_size(16)));
typedef uint8_t Bytes16 __attribute__((vector_size(16)));
typedef uint8_t VByte __attribute__((vector_size(KVQ_LOOPS_BYTES)));

// Of __builtin_shuffle: element i of the lower or the upper halves of each part of two vectors, element by element.
template <class V>
constexpr uint32_t interleaved(uint32_t i, bool upper) {
  constexpr uint32_t kElements = sizeof(V) / sizeof(V{}[0]), kPart = kElements * 16 / sizeof(V);
  return i / kPart * kPart + i % kPart / 2 + i % 2 * kElements + upper * kPart / 2;
}
template <class V, uint32_t... I>
KVQ_LOOP_INLINE void interleave(V a, V b, V *low, V *high, std::integer_sequence<uint32_t, I...>) {
  *low = __builtin_shuffle(a, b, V{interleaved<V>(I, false)...});
  *high = __builtin_shuffle(a, b, V{interleaved<V>(I, true)...});
}
template <class V>
KVQ_LOOP_INLINE void interleave(V a, V b, V *low, V *high) {
  interleave(a, b, low, high, std::make_integer_sequence<uint32_t, sizeof(V) / sizeof(V{}[0])>());
}

// Interleaving row i with row i + N / 2, log2(N) times, transposes N rows of N, from column `column` on.
template <class V, class T>
KVQ_LOOP_INLINE void transpose_squares(const T *const *in, uint32_t column, T *out, size_t out_stride) {
  constexpr uint32_t N = 16 / sizeof(T);
  V a[N], b[N];
  for (uint32_t i = 0; i < N; i++) a[i] = load<V>(in[i] + column);
  for (uint32_t turn = N; turn > 1; turn /= 2) {
    for (uint32_t i = 0; i < N / 2; i++) interleave(a[i], a[i + N / 2], &b[2 * i], &b[2 * i + 1]);
    for (uint32_t i = 0; i < N; i++) a[i] = b[i];
  }
  for (uint32_t i = 0; i < N; i++)
    for (uint32_t part = 0; part < sizeof(V) / 16; part++)
      __builtin_memcpy(out + (part * N + i) * out_stride, reinterpret_cast<const char *>(&a[i]) + 16 * part, 16);
}
template <class Wide, class Narrow, class T, class Row>
KVQ_LOOP_INLINE void transpose(Row row, uint32_t rows, uint32_t columns, T *out, size_t out_stride) {
  constexpr uint32_t N = 16 / sizeof(T), kWide = sizeof(Wide) / sizeof(T);
  const uint32_t whole_rows = rows / N * N, whole_columns = columns / N * N;
  for (uint32_t r = 0; r < whole_rows; r += N) {
    const T *in[N];
    for (uint32_t i = 0; i < N; i++) in[i] = row(r + i);
    uint32_t c = 0;
    for (; c + kWide <= columns; c += kWide) transpose_squares<Wide>(in, c, out + c * out_stride + r, out_stride);
    for (; c < whole_columns; c += N) transpose_squares<Narrow>(in, c, out + c * out_stride + r, out_stride);
  }
  for (uint32_t r = 0; r < rows; r++)
    for (uint32_t c = r < whole_rows ? whole_columns : 0; c < columns; c++) out[c * out_stride + r] = row(r)[c];
}

void transpose_halves(const uint16_t *in, size_t in_stride, const uint32_t *index, uint32_t rows, uint32_t columns, uint16_t *out, size_t out_stride) {
  transpose<VWord, Halves8>([=](uint32_t r) __attribute__((always_inline)) { return in + (index ? index[r] : r) * in_stride; },
                            rows, columns, out, out_stride);
}
void transpose_bytes(const uint8_t *in, size_t in_stride, uint32_t rows, uint32_t columns, uint8_t *out, size_t out_stride) {
  transpose<VByte, Bytes16>([=](uint32_t r) __attribute__((always_inline)) { return in + r * in_stride; }, rows, columns, out, out_stride);
}

void pick_halves(const uint16_t *in, size_t in_stride, uint32_t rows, const uint32_t *column, uint32_t n, uint16_t *out, size_t out_stride) {
#if KVQ_LOOPS_BYTES == 64
  VWord index{};
  for (uint32_t i = 0; i < n; i++) index[i] = uint16_t(column[i]);
  const __mmask32 wanted = __mmask32(~0u >> (32 - n)), all = __mmask32(~0u >> (31 - column[n - 1]));
  for (uint32_t r = 0; r < rows; r++)
    _mm512_mask_storeu_epi16(out + r * out_stride, wanted, _mm512_permutexvar_epi16((__m512i)index, _mm512_maskz_loadu_epi16(all, in + r * in_stride)));
#else
  const bool run = column[n - 1] - column[0] + 1 == n;
  for (uint32_t r = 0; r < rows; r++, in += in_stride, out += out_stride)
    if (run)
      __builtin_memcpy(out, in + column[0], size_t(2) * n);
    else
      for (uint32_t i = 0; i < n; i++) out[i] = in[column[i]];
#endif
}

// ---- words and planes of codes

typedef uint32_t Words4 __attribute__((vector_size(16)));

void key_words(const uint8_t *codes, size_t stride, uint32_t tokens, uint32_t quads, uint8_t *line, size_t line_stride) {
  const auto ordered = [](auto word) __attribute__((always_inline)) {
    return (word & 0xff0000ffu) | (word & 0xff00u) << 8 | (word >> 8 & 0xff00u);
  };
  const uint32_t whole_tokens = tokens / 4 * 4, whole_quads = quads / 4 * 4;
  for (uint32_t q = 0; q < whole_quads; q += 4)
    for (uint32_t t = 0; t < whole_tokens; t += 4) {
      Words4 a[4];
      for (uint32_t i = 0; i < 4; i++) a[i] = ordered(load<Words4>(codes + (t + i) * stride + 4 * q));
      const Words4 low02 = __builtin_shuffle(a[0], a[2], Words4{0, 4, 1, 5}), high02 = __builtin_shuffle(a[0], a[2], Words4{2, 6, 3, 7});
      const Words4 low13 = __builtin_shuffle(a[1], a[3], Words4{0, 4, 1, 5}), high13 = __builtin_shuffle(a[1], a[3], Words4{2, 6, 3, 7});
      uint8_t *to = line + q * line_stride + 4 * t;
      store(to, __builtin_shuffle(low02, low13, Words4{0, 4, 1, 5}));
      store(to + line_stride, __builtin_shuffle(low02, low13, Words4{2, 6, 3, 7}));
      store(to + 2 * line_stride, __builtin_shuffle(high02, high13, Words4{0, 4, 1, 5}));
      store(to + 3 * line_stride, __builtin_shuffle(high02, high13, Words4{2, 6, 3, 7}));
    }
  for (uint32_t q = 0; q < quads; q++)
    for (uint32_t t = q < whole_quads ? whole_tokens : 0; t < tokens; t++)
      store(line + q * line_stride + 4 * t, ordered(load<uint32_t>(codes + t * stride + 4 * q)));
}

void value_words(const uint8_t *codes, size_t stride, uint32_t slots, uint8_t *line) {
  const uint8_t *a = codes, *b = a + stride, *c = b + stride, *d = c + stride;
  uint32_t s = 0;
  for (; s + 16 <= slots; s += 16) {
    Bytes16 even[2], odd[2];
    interleave(load<Bytes16>(a + s), load<Bytes16>(c + s), &even[0], &even[1]);
    interleave(load<Bytes16>(b + s), load<Bytes16>(d + s), &odd[0], &odd[1]);
    for (uint32_t half = 0; half < 2; half++) {
      Halves8 low, high;
      interleave((Halves8)even[half], (Halves8)odd[half], &low, &high);
      store(line + 4 * s + 32 * half, low), store(line + 4 * s + 32 * half + 16, high);
    }
  }
  for (; s < slots; s++) line[4 * s] = a[s], line[4 * s + 1] = c[s], line[4 * s + 2] = b[s], line[4 * s + 3] = d[s];
}

// Shifts of 16 bits move no wanted bit into another byte.
void join_digits(const DigitRule &rule, const uint8_t *line, uint8_t *fields) {
  const auto field = [&](VWord n) __attribute__((always_inline)) { return n + ((n * rule.factor + rule.offset) >> rule.shift); };
  for (uint32_t i = 0; i < 64; i += sizeof(VWord)) {
    VWord even{}, odd{};
    for (uint32_t d = 0; d < rule.digits; d++) {
      const VWord digits = load<VWord>(line + 64 * d + i);
      even = even * uint16_t(rule.base) + (digits & 0xff);
      odd = odd * uint16_t(rule.base) + (digits >> 8);
    }
    store(fields + i, field(even) | field(odd) << 8);
  }
}

void put_bits(const uint8_t *bytes, uint32_t from, uint32_t n, uint32_t to, uint8_t *out) {
  const int16_t both = int16_t(((1u << n) - 1) * 0x0101u);
  const VShort mask = both - VShort{}, place = mask << int16_t(to);
  for (uint32_t i = 0; i < 64; i += sizeof mask) {
    const VShort wanted = load<VShort>(bytes + i) >> int16_t(from) & mask;
    store(out + i, (load<VShort>(out + i) & ~place) | wanted << int16_t(to));
  }
}

// ---- rows in lanes

float half_value(uint16_t h) {
  VHalf halves{};
  halves[0] = h;
  return to_floats(halves)[0];
}

void load_lanes(const uint16_t *x, size_t stride, const uint32_t *channel, uint32_t n, const uint16_t *mu, RowLanes *y) {
  for (uint32_t j = 0; j < n; j++)
    for (uint32_t l = 0; l < kRowLanes; l += kLanes) store(y[j] + l, load_halves(x + channel[j] * stride + l));
  for (uint32_t j = 0; mu && j < n; j++) {
    const VFloat center = all(half_value(mu[channel[j]]));
    for (uint32_t l = 0; l < kRowLanes; l += kLanes) store(y[j] + l, load<VFloat>(y[j] + l) - center);
  }
}

void flip_lanes(RowLanes *y, uint32_t n, const uint64_t *words) {
  for (uint32_t j = 0; j < n; j++) {
    const VInt sign = VInt{} + int32_t(uint32_t(words[j / 64] >> j % 64 & 1) << 31);
    for (uint32_t l = 0; l < kRowLanes; l += kLanes) store(y[j] + l, load<VInt>(y[j] + l) ^ sign);
  }
}

// log2(R) butterfly distances at once, the first of them `distance` rows.
template <uint32_t R, bool kLast>
KVQ_LOOP_INLINE void butterfly_pass(RowLanes *y, uint32_t n, uint32_t distance, float factor) {
  for (uint32_t base = 0; base < n; base += R * distance)
    for (uint32_t i = base; i < base + distance; i++)
      for (uint32_t l = 0; l < kRowLanes; l += kLanes) {
        VFloat a[R];
        for (uint32_t r = 0; r < R; r++) a[r] = load<VFloat>(y[i + r * distance] + l);
        for (uint32_t d = 1; d < R; d *= 2)
          for (uint32_t r = 0; r < R; r++)
            if (!(r & d)) {
              const VFloat lower = a[r], upper = a[r + d];
              a[r] = lower + upper, a[r + d] = lower - upper;
            }
        for (uint32_t r = 0; r < R; r++) store(y[i + r * distance] + l, kLast ? a[r] * all(factor) : a[r]);
      }
}

void butterfly_lanes(RowLanes *y, uint32_t n, float factor) {
  uint32_t distance = 1;
  for (; n / distance > 8; distance *= 8) butterfly_pass<8, false>(y, n, distance, factor);
  if (n / distance == 8) butterfly_pass<8, true>(y, n, distance, factor);
  if (n / distance == 4) butterfly_pass<4, true>(y, n, distance, factor);
  if (n / distance == 2) butterfly_pass<2, true>(y, n, distance, factor);
}

// tree() of f(0), f(1), ...: `stack` holds the finished subtrees from the largest on.  Padding with +0 changes nothing but the sign of
// a zero, so what is left at the end is added from the smallest on.
template <class F>
KVQ_LOOP_INLINE VFloat tree(uint32_t n, F &&f) {
  VFloat stack[12];
  uint32_t top = 0, i = 0;
  for (; i + 8 <= n; i += 8) {
    VFloat v = ((f(i) + f(i + 1)) + (f(i + 2) + f(i + 3))) + ((f(i + 4) + f(i + 5)) + (f(i + 6) + f(i + 7)));
    for (uint32_t k = i / 8; k & 1; k >>= 1) v = stack[--top] + v;
    stack[top++] = v;
  }
  for (; i < n; i++) {
    VFloat v = f(i);
    for (uint32_t k = i; k & 1; k >>= 1) v = stack[--top] + v;
    stack[top++] = v;
  }
  VFloat sum = stack[--top];
  while (top) sum = stack[--top] + sum;
  return sum;
}

void square_lanes(const RowLanes *y, uint32_t n, float *sum) {
  for (uint32_t l = 0; l < kRowLanes; l += kLanes)
    store(sum + l, tree(n, [&](uint32_t j) __attribute__((always_inline)) {
            const VFloat v = load<VFloat>(y[j] + l);
            return v * v;
          }));
}

void product_lanes(const RowLanes *y, const CodeLanes *codes, const int16_t *level, uint32_t n, float *sum) {
  for (uint32_t l = 0; l < kRowLanes; l += kLanes)
    store(sum + l, tree(n, [&](uint32_t j) __attribute__((always_inline)) {
            VFloat m;
            for (uint32_t i = 0; i < kLanes; i++) m[i] = float(level[codes[j][l + i]]);
            return load<VFloat>(y[j] + l) * m;
          }));
}

KVQ_LOOP_INLINE void store_codes(uint8_t *out, VInt codes) { store(out, __builtin_convertvector(codes, VCode)); }

#if KVQ_LOOPS_BYTES == 64
// The same for T = 2^b - 1 by b comparisons: thresholds ascend, so each halves those that are left.
template <uint32_t T>
KVQ_LOOP_INLINE __m512i search(__m512 y, const VFloat *threshold) {
  __m512 left[T];
  for (uint32_t i = 0; i < T; i++) left[i] = (__m512)threshold[i];
  __m512i count = _mm512_setzero_si512();
  for (uint32_t half = T / 2;; half /= 2) {
    const __mmask16 below = _mm512_cmp_ps_mask(y, left[half], _CMP_GT_OQ);
    count = _mm512_mask_add_epi32(count, below, count, _mm512_set1_epi32(int32_t(half + 1)));
    if (half == 0) return count;
    for (uint32_t i = 0; i < half; i++) left[i] = _mm512_mask_blend_ps(below, left[i], left[half + 1 + i]);
  }
}
#endif

// Number of thresholds below y: T of them, or `n` where T is 0.
template <uint32_t T>
KVQ_LOOP_INLINE VInt count_below(VFloat y, const VFloat *threshold, uint32_t n) {
#if KVQ_LOOPS_BYTES == 64
  if constexpr (T == 7 || T == 15) return (VInt)search<T>((__m512)y, threshold);
#endif
  VInt count{};
  for (uint32_t i = 0; i < (T ? T : n); i++) {
#if KVQ_LOOPS_BYTES == 64
    const __mmask16 below = _mm512_cmp_ps_mask((__m512)y, (__m512)threshold[i], _CMP_GT_OQ);
    count = (VInt)_mm512_mask_add_epi32((__m512i)count, below, (__m512i)count, _mm512_set1_epi32(1));
#else
    count -= y > threshold[i];
#endif
  }
  return count;
}

// Levels [16] of codes.
KVQ_LOOP_INLINE VFloat level_of(const float *levels, VInt code) {
#if KVQ_LOOPS_BYTES == 64
  return (VFloat)_mm512_permutexvar_ps((__m512i)code, _mm512_loadu_ps(levels));
#elif KVQ_LOOPS_BYTES == 32
  const __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(levels), (__m256i)code);
  const __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(levels + 8), (__m256i)code);
  return (VFloat)_mm256_blendv_ps(low, high, (__m256)(code << 28));  // bit 3 chooses
#else
  VFloat m;
  for (uint32_t i = 0; i < kLanes; i++) m[i] = levels[code[i]];
  return m;
#endif
}

// Books of up to 16 levels.  Levels of 8 bits: 127^2 * 1024 < 2^24, so fp32 holds the sum of their squares.
template <uint32_t T>
void narrow_book(const BookView &book, const RowLanes *y, uint32_t n, const float *sigma, CodeLanes *codes, uint64_t *squares) {
  float levels[16] = {};
  for (uint32_t i = 0; i < book.levels; i++) levels[i] = float(book.level[i]);
  for (uint32_t l = 0; l < kRowLanes; l += kLanes) {
    VFloat threshold[T], sum{};
    for (uint32_t i = 0; i < T; i++) threshold[i] = all(book.threshold[i]) * load<VFloat>(sigma + l);
    for (uint32_t j = 0; j < n; j++) {
      const VInt code = count_below<T>(load<VFloat>(y[j] + l), threshold, T);
      const VFloat m = level_of(levels, code);
      store_codes(codes[j] + l, code);
      sum += m * m;
    }
    for (uint32_t i = 0; i < kLanes; i++) squares[l + i] = uint64_t(sum[i]);
  }
}

void wide_book(const BookView &book, const RowLanes *y, uint32_t n, const float *sigma, CodeLanes *codes, uint64_t *squares) {
  for (uint32_t l = 0; l < kRowLanes; l++) squares[l] = 0;
  for (uint32_t l = 0; l < kRowLanes; l += kLanes) {
    VFloat threshold[255];
    for (uint32_t i = 0; i + 1 < book.levels; i++) threshold[i] = all(book.threshold[i]) * load<VFloat>(sigma + l);
    for (uint32_t j = 0; j < n; j++) store_codes(codes[j] + l, count_below<0>(load<VFloat>(y[j] + l), threshold, book.levels - 1));
  }
  for (uint32_t j = 0; j < n; j++)
    for (uint32_t l = 0; l < kRowLanes; l++) {
      const int32_t m = book.level[codes[j][l]];
      squares[l] += uint64_t(m * m);
    }
}

// By levels; null where thresholds have no loop of their own.
using BookLanes = void (*)(const BookView &, const RowLanes *, uint32_t, const float *, CodeLanes *, uint64_t *);
constexpr BookLanes kNarrowBooks[17] = {nullptr, nullptr, narrow_book<1>, narrow_book<2>, narrow_book<3>, narrow_book<4>,
                                        narrow_book<5>, narrow_book<6>, narrow_book<7>, nullptr, nullptr, nullptr,
                                        nullptr, nullptr, nullptr, nullptr, narrow_book<15>};

void book_lanes(const BookView &book, const RowLanes *y, uint32_t n, const float *sigma, CodeLanes *codes, uint64_t *squares) {
  const BookLanes narrow = book.levels < 17 ? kNarrowBooks[book.levels] : nullptr;
  (narrow ? narrow : wide_book)(book, y, n, sigma, codes, squares);
}

void range_lanes(const RowLanes *y, uint32_t n, float *mn, float *mx) {
  for (uint32_t l = 0; l < kRowLanes; l += kLanes) {
    VFloat low = load<VFloat>(y[0] + l), high = low;
    for (uint32_t j = 1; j < n; j++) {
      const VFloat v = load<VFloat>(y[j] + l);
      low = smaller(v, low), high = larger(v, high);
    }
    store(mn + l, low), store(mx + l, high);
  }
}

// As affine_code of codec/affine.h; with a fused multiply-add as affine_code_fast, `inverse` being 1 / step.
KVQ_LOOP_INLINE VInt affine_codes(VFloat x, VFloat zero, VFloat step, [[maybe_unused]] VFloat inverse, VFloat top) {
  const VFloat d = x - zero;
#ifdef KVQ_LOOPS_FMA
  const VFloat near = d * inverse, quotient = multiply_add(multiply_add(-step, near, d), inverse, near);
#else
  const VFloat quotient = d / step;
#endif
  return (VInt)(smaller(larger(quotient, VFloat{}), top) + all(0x1.8p23f)) & 0xff;
}

void affine_lanes(const RowLanes *y, uint32_t n, const float *zero, const float *step, const float *top, CodeLanes *codes) {
  for (uint32_t l = 0; l < kRowLanes; l += kLanes) {
    const VFloat z = load<VFloat>(zero + l), s = load<VFloat>(step + l), inverse = all(1) / s, t = load<VFloat>(top + l);
    for (uint32_t j = 0; j < n; j++) store_codes(codes[j] + l, affine_codes(load<VFloat>(y[j] + l), z, s, inverse, t));
  }
}

// ---- columns

// fp16 bits as integers in the order of their values; its own inverse.
KVQ_LOOP_INLINE VShort ordered(VShort h) { return h ^ (h >> 15 & 0x7fff); }

void range_columns(const uint16_t *x, uint32_t rows, uint32_t n, float *mn, float *mx) {
  constexpr uint32_t kHalves = KVQ_LOOPS_BYTES / 2;
  for (uint32_t c = 0; c < n; c += kHalves) {
    const uint32_t width = n - c < kHalves ? n - c : kHalves;
    VShort low{}, high{};
    for (uint32_t t = 0; t < rows; t++) {
      VShort h{};
      if (width == kHalves)
        h = load<VShort>(x + size_t(t) * n + c);
      else
        __builtin_memcpy(&h, x + size_t(t) * n + c, size_t(2) * width);
      h = ordered(h);
      if (t == 0) low = high = h;
      low = smaller(h, low), high = larger(h, high);
    }
    uint16_t lows[kHalves], highs[kHalves];
    store(lows, ordered(low)), store(highs, ordered(high));
    for (uint32_t i = 0; i < width; i++) mn[c + i] = half_value(lows[i]), mx[c + i] = half_value(highs[i]);
  }
}

void affine_columns(const uint16_t *x, uint32_t rows, uint32_t n, const float *zero, const float *step, const float *top,
                    uint8_t *codes) {
  uint32_t c = 0;
  for (; c + kLanes <= n; c += kLanes) {
    const VFloat z = load<VFloat>(zero + c), s = load<VFloat>(step + c), inverse = all(1) / s, m = load<VFloat>(top + c);
    for (uint32_t t = 0; t < rows; t++) {
      const size_t at = size_t(t) * n + c;
      store_codes(codes + at, affine_codes(load_halves(x + at), z, s, inverse, m));
    }
  }
  for (; c < n; c++)
    for (uint32_t t = 0; t < rows; t++) {
      const size_t at = size_t(t) * n + c;
      codes[at] = uint8_t(affine_codes(all(half_value(x[at])), all(zero[c]), all(step[c]), all(1) / all(step[c]), all(top[c]))[0]);
    }
}

constexpr Loops kTable = {
    .name = KVQ_LOOPS_NAME,
    .enter_f16 = enter_f16,
    .enter_f32 = enter_f32,
    .enter_bf16 = enter_bf16,
    .transpose_halves = transpose_halves,
    .pick_halves = pick_halves,
    .transpose_bytes = transpose_bytes,
    .load_lanes = load_lanes,
    .flip_lanes = flip_lanes,
    .butterfly_lanes = butterfly_lanes,
    .square_lanes = square_lanes,
    .product_lanes = product_lanes,
    .book_lanes = book_lanes,
    .range_lanes = range_lanes,
    .affine_lanes = affine_lanes,
    .range_columns = range_columns,
    .affine_columns = affine_columns,
    .polar_columns = polar_columns,
    .key_words = key_words,
    .value_words = value_words,
    .join_digits = join_digits,
    .put_bits = put_bits,
    .sum_norms = sum_norms,
    .sum_squares = sum_squares,
    .sum_channels = sum_channels,
    .sum_values = sum_values,
};

}  // namespace
}  // namespace kvq
