// Vectors of the instruction set that this file is compiled for; GCC and clang vector extensions, and an intrinsic where these
// have no word for an operation.  Included by kernels_impl.h only, inside its anonymous namespace.
#if defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define KVQ_VECTOR_BYTES 64
#elif defined(__AVX2__)
#define KVQ_VECTOR_BYTES 32
#else
#define KVQ_VECTOR_BYTES 16
#endif
#define KVQ_INLINE static inline __attribute__((always_inline))
#define KVQ_INLINE_MEMBER inline __attribute__((always_inline))

constexpr uint32_t kLanes = KVQ_VECTOR_BYTES / 4;
typedef float VFloat __attribute__((vector_size(KVQ_VECTOR_BYTES)));
typedef int32_t VInt __attribute__((vector_size(KVQ_VECTOR_BYTES)));
typedef int16_t VInt16 __attribute__((vector_size(KVQ_VECTOR_BYTES / 2)));
typedef uint16_t VShort __attribute__((vector_size(KVQ_VECTOR_BYTES)));
typedef uint8_t VByte __attribute__((vector_size(KVQ_VECTOR_BYTES)));

template <class V>
KVQ_INLINE V load(const void *p) {
  V v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
template <class V>
KVQ_INLINE void store(void *p, V v) {
  __builtin_memcpy(p, &v, sizeof v);
}
// A vector of floats, or zeros.
#if KVQ_VECTOR_BYTES == 64
typedef __mmask16 Kept;
KVQ_INLINE Kept kept_if(bool keep) { return keep ? 0xffff : 0; }
KVQ_INLINE VFloat load_kept(const float *p, Kept kept) { return (VFloat)_mm512_maskz_loadu_ps(kept, p); }
#else
typedef int32_t Kept;
KVQ_INLINE Kept kept_if(bool keep) { return keep ? -1 : 0; }
KVQ_INLINE VFloat load_kept(const float *p, Kept kept) { return (VFloat)(load<VInt>(p) & kept); }
#endif
// The same value, of which the compiler knows nothing.
template <class V>
KVQ_INLINE V opaque(V x) {
#if KVQ_VECTOR_BYTES == 64
  __asm__("" : "+v"(x));
#elif defined(__SSE2__)
  __asm__("" : "+x"(x));
#elif defined(__aarch64__)
  __asm__("" : "+w"(x));
#endif
  return x;
}
KVQ_INLINE VFloat all(float x) { return x - VFloat{}; }
KVQ_INLINE VInt all_int(int32_t x) { return x - VInt{}; }
KVQ_INLINE VShort all_short(uint16_t x) { return x - VShort{}; }
// A broadcast from memory, which needs no shuffle port.
KVQ_INLINE VInt all_pairs(const int16_t *p) {
  int32_t x;
  __builtin_memcpy(&x, p, 4);
  return all_int(x);
}
KVQ_INLINE VFloat to_float(VInt x) { return __builtin_convertvector(x, VFloat); }
// To the nearest integer.
KVQ_INLINE VInt to_int(VFloat x) {
#if KVQ_VECTOR_BYTES == 64
  return (VInt)_mm512_cvtps_epi32((__m512)x);
#elif KVQ_VECTOR_BYTES == 32
  return (VInt)_mm256_cvtps_epi32((__m256)x);
#elif defined(__SSE2__)
  return (VInt)_mm_cvtps_epi32((__m128)x);
#elif defined(__ARM_FEATURE_DOTPROD)
  return (VInt)vcvtnq_s32_f32((float32x4_t)x);
#else
  return (VInt)(x + 12582912.0f) - 0x4b400000;  // 1.5 * 2^23: the low bits then hold it
#endif
}
// a * b + c, rounded once where the processor can: always the same, so that rows do not depend on how they are computed.
KVQ_INLINE VFloat multiply_add(VFloat a, VFloat b, VFloat c) {
#if KVQ_VECTOR_BYTES == 64
  return (VFloat)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif KVQ_VECTOR_BYTES == 32
  return (VFloat)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  for (uint32_t i = 0; i < kLanes; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);  // one instruction
  return c;
#else
  return opaque(a * b) + c;
#endif
}
KVQ_INLINE VFloat greater(VFloat a, VFloat b) { return a > b ? a : b; }
KVQ_INLINE VFloat magnitude(VFloat a) { return (VFloat)((VInt)a & 0x7fffffff); }

// Lane i gets lane i ^ D.
template <uint32_t D>
KVQ_INLINE VFloat swap_lanes(VFloat v) {
#if KVQ_VECTOR_BYTES == 64
  if (D >= 4) return (VFloat)_mm512_shuffle_f32x4((__m512)v, (__m512)v, D == 4 ? 0xb1 : 0x4e);
  return (VFloat)_mm512_permute_ps((__m512)v, D == 1 ? 0xb1 : 0x4e);
#elif KVQ_VECTOR_BYTES == 32
  if (D == 4) return (VFloat)_mm256_permute2f128_ps((__m256)v, (__m256)v, 1);
  return (VFloat)_mm256_permute_ps((__m256)v, D == 1 ? 0xb1 : 0x4e);
#elif defined(__SSE2__)
  return (VFloat)_mm_shuffle_ps((__m128)v, (__m128)v, D == 1 ? 0xb1 : 0x4e);
#else
  VFloat swapped;
  for (uint32_t i = 0; i < kLanes; i++) swapped[i] = v[i ^ D];
  return swapped;
#endif
}
template <class V>
KVQ_INLINE auto sum_lanes(V v) {
  if constexpr (kLanes > 8) v += (V)swap_lanes<8>((VFloat)v);
  if constexpr (kLanes > 4) v += (V)swap_lanes<4>((VFloat)v);
  v += (V)swap_lanes<2>((VFloat)v);
  v += (V)swap_lanes<1>((VFloat)v);
  return v[0];
}
// Lanes 0 to 3: the results of four vectors, other lanes the same again.
template <class F>
KVQ_INLINE VFloat reduce_four(const VFloat (&x)[4], F &&f) {
#if KVQ_VECTOR_BYTES == 64
  const auto fold = [&](__m512 a, __m512 b) { return (__m512)f((VFloat)_mm512_unpacklo_ps(a, b), (VFloat)_mm512_unpackhi_ps(a, b)); };
  const __m512d first = (__m512d)fold((__m512)x[0], (__m512)x[1]), second = (__m512d)fold((__m512)x[2], (__m512)x[3]);
  VFloat v = f((VFloat)_mm512_unpacklo_pd(first, second), (VFloat)_mm512_unpackhi_pd(first, second));
  v = f(v, swap_lanes<8>(v));
  return f(v, swap_lanes<4>(v));
#elif KVQ_VECTOR_BYTES == 32
  const auto fold = [&](__m256 a, __m256 b) { return (__m256)f((VFloat)_mm256_unpacklo_ps(a, b), (VFloat)_mm256_unpackhi_ps(a, b)); };
  const __m256d first = (__m256d)fold((__m256)x[0], (__m256)x[1]), second = (__m256d)fold((__m256)x[2], (__m256)x[3]);
  const VFloat v = f((VFloat)_mm256_unpacklo_pd(first, second), (VFloat)_mm256_unpackhi_pd(first, second));
  return f(v, swap_lanes<4>(v));
#else
  const auto fold = [&](VFloat a, VFloat b) { return f(__builtin_shufflevector(a, b, 0, 4, 1, 5), __builtin_shufflevector(a, b, 2, 6, 3, 7)); };
  const VFloat first = fold(x[0], x[1]), second = fold(x[2], x[3]);
  return f(__builtin_shufflevector(first, second, 0, 1, 4, 5), __builtin_shufflevector(first, second, 2, 3, 6, 7));
#endif
}
KVQ_INLINE VFloat sum_four(const VFloat (&x)[4]) {
  return reduce_four(x, [](VFloat a, VFloat b) __attribute__((always_inline)) { return a + b; });
}
KVQ_INLINE VFloat sum_four(const VInt (&x)[4]) {
  const VFloat bits[4] = {(VFloat)x[0], (VFloat)x[1], (VFloat)x[2], (VFloat)x[3]};
  return reduce_four(bits, [](VFloat a, VFloat b) __attribute__((always_inline)) { return (VFloat)((VInt)a + (VInt)b); });
}
KVQ_INLINE VFloat max_four(const VFloat (&x)[4]) {
  return reduce_four(x, [](VFloat a, VFloat b) __attribute__((always_inline)) { return greater(a, b); });
}
// Lanes 0 to 3; zeros to the others.
KVQ_INLINE void store_four(void *p, VFloat v) { __builtin_memcpy(p, &v, 16); }
KVQ_INLINE VFloat load_four(const float *p) {
#if KVQ_VECTOR_BYTES == 64
  return (VFloat)_mm512_zextps128_ps512(_mm_loadu_ps(p));
#elif KVQ_VECTOR_BYTES == 32
  return (VFloat)_mm256_zextps128_ps256(_mm_loadu_ps(p));
#else
  return load<VFloat>(p);
#endif
}

KVQ_INLINE float max_lanes(VFloat v) {
  if constexpr (kLanes > 8) v = greater(v, swap_lanes<8>(v));
  if constexpr (kLanes > 4) v = greater(v, swap_lanes<4>(v));
  v = greater(v, swap_lanes<2>(v));
  v = greater(v, swap_lanes<1>(v));
  return v[0];
}

// Products of words of four codes with four weights.  A word's neighbours lie in bytes {0, 2, 1, 3} (layout.h).
//
// With VNNI a weight is 256 * high + low, both signed bytes; four weights are stored as their high bytes in the order of a word's
// bytes, then their low bytes.  Elsewhere they are int16 in natural order, since even bytes of a word are the first pair of neighbours
// and odd bytes the second.
#if (KVQ_VECTOR_BYTES == 64 && defined(__AVX512VNNI__)) || (KVQ_VECTOR_BYTES == 32 && defined(__AVXVNNI__))
constexpr float kMostWeight = 127 * 256 + 126;  // and a little more
constexpr uint32_t kWordVectors = KVQ_VECTOR_BYTES == 64 ? 2 : 1;  // vectors of words times four rows: what the registers hold
constexpr uint32_t kQuads = 2;                                     // in one step

struct Words {
  VInt bytes;
};
KVQ_INLINE Words to_words(VByte bytes) { return {(VInt)bytes}; }

struct Sums {
  VInt high, low;
};
KVQ_INLINE Sums start_sums(int32_t x) { return {VInt{}, all_int(x)}; }
KVQ_INLINE VInt total(const Sums &sums) { return (sums.high << 8) + sums.low; }
KVQ_INLINE VInt add_products(VInt sum, VInt bytes, VInt weights) {
#if KVQ_VECTOR_BYTES == 64
  return (VInt)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)bytes, (__m512i)weights);
#else
  return (VInt)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)bytes, (__m256i)weights);
#endif
}
KVQ_INLINE void add_products(Sums *sums, const Words &words, VInt first, VInt second) {
  sums->high = add_products(sums->high, words.bytes, first);
  sums->low = add_products(sums->low, words.bytes, second);
}
// Low byte, and high byte of x + 128, of the four neighbours of a word.
KVQ_INLINE VInt16 split_weights(VInt x) {
  const VInt16 low = __builtin_convertvector(x, VInt16), high = __builtin_convertvector(x + 128, VInt16);
  const __m128i order = _mm_setr_epi8(1, 5, 3, 7, 0, 4, 2, 6, 9, 13, 11, 15, 8, 12, 10, 14);
#if KVQ_VECTOR_BYTES == 64
  const __m256i mixed = _mm256_blendv_epi8((__m256i)low, (__m256i)high, _mm256_set1_epi16((int16_t)0xff00));
  return (VInt16)_mm256_shuffle_epi8(mixed, _mm256_broadcastsi128_si256(order));
#else
  const __m128i mixed = _mm_blendv_epi8((__m128i)low, (__m128i)high, _mm_set1_epi16((int16_t)0xff00));
  return (VInt16)_mm_shuffle_epi8(mixed, order);
#endif
}
// The weights of two rows as store_weights() has them: [quad][row].
#if KVQ_VECTOR_BYTES == 64
KVQ_INLINE __m512i pack_weights(VInt a, VInt b) {
  const __m512i half = _mm512_set1_epi16(0x80), x = _mm512_packs_epi32((__m512i)a, (__m512i)b);
  const __m512i split = _mm512_xor_si512(_mm512_add_epi16(x, half), half);  // the high byte of x + 128, the low byte of x
  return _mm512_shuffle_epi8(split, _mm512_broadcast_i32x4(_mm_setr_epi8(1, 5, 3, 7, 0, 4, 2, 6, 9, 13, 11, 15, 8, 12, 10, 14)));
}
#else
KVQ_INLINE __m256i pack_weights(VInt a, VInt b) {
  const __m256i half = _mm256_set1_epi16(0x80), x = _mm256_packs_epi32((__m256i)a, (__m256i)b);
  const __m256i split = _mm256_xor_si256(_mm256_add_epi16(x, half), half);
  return _mm256_shuffle_epi8(split, _mm256_broadcastsi128_si256(_mm_setr_epi8(1, 5, 3, 7, 0, 4, 2, 6, 9, 13, 11, 15, 8, 12, 10, 14)));
}
#endif
#else
constexpr float kMostWeight = 32766;  // and a little more
constexpr uint32_t kWordVectors = KVQ_VECTOR_BYTES == 64 ? 4 : 2, kQuads = 1;

struct Words {
  VInt even, odd;
};
KVQ_INLINE Words to_words(VByte bytes) { return {(VInt)((VShort)bytes & (uint16_t)0xff), (VInt)((VShort)bytes >> 8)}; }

struct Sums {
  VInt all;
};
KVQ_INLINE Sums start_sums(int32_t x) { return {all_int(x)}; }
KVQ_INLINE VInt total(const Sums &sums) { return sums.all; }
// a0 * b0 + a1 * b1 in every 32-bit lane, a and b two int16 each.
KVQ_INLINE VInt multiply_pairs(VInt a, VInt b) {
#if KVQ_VECTOR_BYTES == 64
  return (VInt)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif KVQ_VECTOR_BYTES == 32
  return (VInt)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
  return (VInt)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
  return (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}
KVQ_INLINE void add_products(Sums *sums, const Words &words, VInt first, VInt second) {
  sums->all += multiply_pairs(words.even, first) + multiply_pairs(words.odd, second);
}
KVQ_INLINE VInt16 split_weights(VInt x) { return __builtin_convertvector(x, VInt16); }
#if KVQ_VECTOR_BYTES == 32
KVQ_INLINE __m256i pack_weights(VInt a, VInt b) { return _mm256_packs_epi32((__m256i)a, (__m256i)b); }
#endif
#endif

// With 16 registers GCC must neither load weights of later rows nor leave additions for later: both take registers from sums.
template <uint32_t N>
KVQ_INLINE void keep_order(Sums (&sums)[N]) {
#if KVQ_VECTOR_BYTES == 32 && !defined(__AVXVNNI__)
  for (uint32_t i = 0; i < N; i++) __asm__ volatile("" : "+x"(sums[i].all) : : "memory");
#elif KVQ_VECTOR_BYTES == 32
  for (uint32_t i = 0; i < N; i++) __asm__ volatile("" : "+x"(sums[i].high), "+x"(sums[i].low) : : "memory");
#else
  (void)sums;
#endif
}

// Fours of weights, spaced by 16 elements (kernels.h).
KVQ_INLINE void store_weights(int16_t *w, VInt x) {
  typedef int64_t Fours __attribute__((vector_size(KVQ_VECTOR_BYTES / 2)));
  const Fours fours = (Fours)split_weights(x);
  for (uint32_t i = 0; i < kLanes / 4; i++) {
    const int64_t four = fours[i];
    __builtin_memcpy(w + i * 16, &four, 8);
  }
}

// The same of four rows: at w + 4 * row.
KVQ_INLINE void store_four_weights(int16_t *w, const VInt (&x)[4]) {
#if KVQ_VECTOR_BYTES == 64
  const __m512i first = pack_weights(x[0], x[1]), second = pack_weights(x[2], x[3]);  // [quad][two rows]
  const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), high = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
  store(w, _mm512_permutex2var_epi64(first, low, second));
  store(w + 32, _mm512_permutex2var_epi64(first, high, second));
#elif KVQ_VECTOR_BYTES == 32
  const __m256i first = pack_weights(x[0], x[1]), second = pack_weights(x[2], x[3]);
  store(w, _mm256_permute2x128_si256(first, second, 0x20));
  store(w + 16, _mm256_permute2x128_si256(first, second, 0x31));
#else
  for (uint32_t r = 0; r < 4; r++) store_weights(w + 4 * r, x[r]);
#endif
}

// fp16 bits to fp32: kLanes of them.  Finite values only.
KVQ_INLINE VFloat load_halves(const uint16_t *p) {
#if KVQ_VECTOR_BYTES == 64
  return (VFloat)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif KVQ_VECTOR_BYTES == 32 && defined(__F16C__)
  return (VFloat)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#else
  typedef int16_t Halves __attribute__((vector_size(KVQ_VECTOR_BYTES / 2)));
  const VInt x = __builtin_convertvector(load<Halves>(p), VInt);      // sign-extended
  const VFloat m = (VFloat)((x & 0x7fff) << 13) * 0x1p112f;           // exact, also for subnormal halves
  return (VFloat)((VInt)m | (x & (int32_t)0x80000000));
#endif
}

// table[x mod 16] for bytes x < 16 (levels <= 16), or a table of up to 64 entries.  Wider tables than kTableEntries are mapped one
// byte at a time.  kLooseIndex: only the low 6 bits of x count.
#if KVQ_VECTOR_BYTES == 64 && defined(__AVX512VBMI__)
constexpr uint32_t kTableEntries = 64;
constexpr bool kLooseIndex = true;
struct Table {
  __m512i t;
};
KVQ_INLINE Table load_table(const uint8_t *table) { return {_mm512_loadu_si512(table)}; }
KVQ_INLINE VByte look_up(const Table &t, VByte x) { return (VByte)_mm512_permutexvar_epi8((__m512i)x, t.t); }

// Digits of the 7 bits of three base-5 digits (layout.h), or what a table has for them: bit 7 of an index does not count.
#define KVQ_DIGIT_TABLES 1
struct Digits {
  __m512i low, high;
};
struct DigitTable {
  alignas(64) uint8_t digit[3][128];
};
constexpr DigitTable make_digit_table() {
  DigitTable table{};
  for (uint32_t x = 0; x < 128; x++) {
    const uint32_t number = x * 125 / 128;
    table.digit[0][x] = uint8_t(number / 25), table.digit[1][x] = uint8_t(number / 5 % 5), table.digit[2][x] = uint8_t(number % 5);
  }
  return table;
}
constexpr DigitTable kDigitTable = make_digit_table();
KVQ_INLINE Digits load_digits(uint32_t digit) {
  return {_mm512_load_si512(kDigitTable.digit[digit]), _mm512_load_si512(kDigitTable.digit[digit] + 64)};
}
KVQ_INLINE Digits load_digits(uint32_t digit, const Table &t) {
  const Digits plain = load_digits(digit);
  return {_mm512_permutexvar_epi8(plain.low, t.t), _mm512_permutexvar_epi8(plain.high, t.t)};
}
KVQ_INLINE VByte look_up(const Digits &digits, VByte x) {
  return (VByte)_mm512_permutex2var_epi8(digits.low, (__m512i)x, digits.high);
}
#elif KVQ_VECTOR_BYTES == 32
constexpr uint32_t kTableEntries = 16;
constexpr bool kLooseIndex = false;
struct Table {
  __m256i t;
};
KVQ_INLINE Table load_table(const uint8_t *table) { return {_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table))}; }
KVQ_INLINE VByte look_up(const Table &t, VByte x) { return (VByte)_mm256_shuffle_epi8(t.t, (__m256i)x); }
#elif defined(__ARM_FEATURE_DOTPROD)
constexpr uint32_t kTableEntries = 16;
constexpr bool kLooseIndex = false;
struct Table {
  uint8x16_t t;
};
KVQ_INLINE Table load_table(const uint8_t *table) { return {vld1q_u8(table)}; }
KVQ_INLINE VByte look_up(const Table &t, VByte x) { return (VByte)vqtbl1q_u8(t.t, (uint8x16_t)x); }
#else
constexpr uint32_t kTableEntries = 0;
constexpr bool kLooseIndex = false;
struct Table {};
KVQ_INLINE Table load_table(const uint8_t *) { return {}; }
KVQ_INLINE VByte look_up(const Table &, VByte x) { return x; }
#endif
