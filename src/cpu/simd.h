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
KVQ_INLINE float max_lanes(VFloat v) {
  if constexpr (kLanes > 8) v = greater(v, swap_lanes<8>(v));
  if constexpr (kLanes > 4) v = greater(v, swap_lanes<4>(v));
  v = greater(v, swap_lanes<2>(v));
  v = greater(v, swap_lanes<1>(v));
  return v[0];
}

// c + a0 * b0 + a1 * b1 in every 32-bit lane, a and b two int16 each.
KVQ_INLINE VInt multiply_pairs(VInt c, VInt a, VInt b) {
#if KVQ_VECTOR_BYTES == 64 && defined(__AVX512VNNI__)
  return (VInt)_mm512_dpwssd_epi32((__m512i)c, (__m512i)a, (__m512i)b);
#elif KVQ_VECTOR_BYTES == 64
  return c + (VInt)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif KVQ_VECTOR_BYTES == 32
  return c + (VInt)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
  return c + (VInt)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
  return c + (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
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
#elif KVQ_VECTOR_BYTES == 32
constexpr uint32_t kTableEntries = 16;
constexpr bool kLooseIndex = false;
struct Table {
  __m256i t;
};
KVQ_INLINE Table load_table(const uint8_t *table) { return {_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table))}; }
KVQ_INLINE VByte look_up(const Table &t, VByte x) { return (VByte)_mm256_shuffle_epi8(t.t, (__m256i)x); }
#else
constexpr uint32_t kTableEntries = 0;
constexpr bool kLooseIndex = false;
struct Table {};
KVQ_INLINE Table load_table(const uint8_t *) { return {}; }
KVQ_INLINE VByte look_up(const Table &, VByte x) { return x; }
#endif
