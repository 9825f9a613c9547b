// Vectors of the instruction set that loops_impl.h is compiled for, which alone includes this file and loops_sums.h: GCC and clang vector
// extensions, and an intrinsic where these have no good word for an operation.
#pragma once
#include "util/loops.h"

#if defined(__x86_64__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // g++ 12 means its own AVX-512 header (bug 105593)
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

namespace kvq {
namespace {

#if defined(__AVX512BW__)
#define KVQ_LOOPS_BYTES 64
#elif defined(__AVX2__)
#define KVQ_LOOPS_BYTES 32
#else
#define KVQ_LOOPS_BYTES 16
#endif
#define KVQ_LOOP_INLINE static inline __attribute__((always_inline))

constexpr uint32_t kLanes = KVQ_LOOPS_BYTES / 4;
constexpr uint32_t kParts = kRowLanes / kLanes;  // vectors of a RowLanes
typedef float VFloat __attribute__((vector_size(KVQ_LOOPS_BYTES)));
typedef int32_t VInt __attribute__((vector_size(KVQ_LOOPS_BYTES)));
typedef int16_t VShort __attribute__((vector_size(KVQ_LOOPS_BYTES)));
typedef uint16_t VWord __attribute__((vector_size(KVQ_LOOPS_BYTES)));
typedef uint16_t VHalf __attribute__((vector_size(KVQ_LOOPS_BYTES / 2)));  // kLanes of them, as are the bytes
typedef uint8_t VCode __attribute__((vector_size(KVQ_LOOPS_BYTES / 4)));

template <class V>
KVQ_LOOP_INLINE V load(const void *p) {
  V v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
template <class V>
KVQ_LOOP_INLINE void store(void *p, V v) {
  __builtin_memcpy(p, &v, sizeof v);
}
KVQ_LOOP_INLINE VFloat all(float x) { return x - VFloat{}; }
KVQ_LOOP_INLINE VInt to_int(VFloat x) { return __builtin_convertvector(x, VInt); }  // toward zero
KVQ_LOOP_INLINE VFloat to_float(VInt x) { return __builtin_convertvector(x, VFloat); }
KVQ_LOOP_INLINE VInt select(VInt mask, VInt yes, VInt no) { return (mask & yes) | (~mask & no); }

// The operations of affine.h: the second operand where both are equal.
KVQ_LOOP_INLINE VFloat smaller(VFloat a, VFloat b) {
#if KVQ_LOOPS_BYTES == 64
  return (VFloat)_mm512_min_ps((__m512)a, (__m512)b);
#elif KVQ_LOOPS_BYTES == 32
  return (VFloat)_mm256_min_ps((__m256)a, (__m256)b);
#elif defined(__SSE2__)
  return (VFloat)_mm_min_ps((__m128)a, (__m128)b);
#else
  return a < b ? a : b;
#endif
}
KVQ_LOOP_INLINE VFloat larger(VFloat a, VFloat b) {
#if KVQ_LOOPS_BYTES == 64
  return (VFloat)_mm512_max_ps((__m512)a, (__m512)b);
#elif KVQ_LOOPS_BYTES == 32
  return (VFloat)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(__SSE2__)
  return (VFloat)_mm_max_ps((__m128)a, (__m128)b);
#else
  return a > b ? a : b;
#endif
}

KVQ_LOOP_INLINE VShort smaller(VShort a, VShort b) {
#if KVQ_LOOPS_BYTES == 64
  return (VShort)_mm512_min_epi16((__m512i)a, (__m512i)b);
#elif KVQ_LOOPS_BYTES == 32
  return (VShort)_mm256_min_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
  return (VShort)_mm_min_epi16((__m128i)a, (__m128i)b);
#else
  return a < b ? a : b;
#endif
}
KVQ_LOOP_INLINE VShort larger(VShort a, VShort b) { return ~smaller(~a, ~b); }

// a * b + c, rounded once.
#if KVQ_LOOPS_BYTES == 64
#define KVQ_LOOPS_FMA
KVQ_LOOP_INLINE VFloat multiply_add(VFloat a, VFloat b, VFloat c) { return (VFloat)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
#elif defined(__FMA__)
#define KVQ_LOOPS_FMA
KVQ_LOOP_INLINE VFloat multiply_add(VFloat a, VFloat b, VFloat c) { return (VFloat)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
#endif

KVQ_LOOP_INLINE VFloat square_root(VFloat x) {
#if KVQ_LOOPS_BYTES == 64
  return (VFloat)_mm512_sqrt_ps((__m512)x);
#elif KVQ_LOOPS_BYTES == 32
  return (VFloat)_mm256_sqrt_ps((__m256)x);
#elif defined(__SSE2__)
  return (VFloat)_mm_sqrt_ps((__m128)x);
#else
  for (uint32_t i = 0; i < kLanes; i++) x[i] = __builtin_sqrtf(x[i]);
  return x;
#endif
}

// ---- fp16

KVQ_LOOP_INLINE VFloat to_floats(VHalf h) {
#if KVQ_LOOPS_BYTES == 64
  return (VFloat)_mm512_cvtph_ps((__m256i)h);
#elif defined(__F16C__)
  return (VFloat)_mm256_cvtph_ps((__m128i)h);
#else
  const VInt x = __builtin_convertvector(h, VInt), magnitude = (x & 0x7fff) << 13;
  return (VFloat)((VInt)((VFloat)magnitude * 0x1p112f) | (x & 0x8000) << 16);  // exact, also for subnormal numbers
#endif
}
KVQ_LOOP_INLINE VFloat load_halves(const uint16_t *p) { return to_floats(load<VHalf>(p)); }

// hp(x) + 0 of values up to 65504 in size.
KVQ_LOOP_INLINE VHalf to_halves(VFloat x) {
#if KVQ_LOOPS_BYTES == 64
  const VHalf h = (VHalf)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT);
  return h & (VHalf)(h != 0x8000);
#elif defined(__F16C__)
  const VHalf h = (VHalf)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
  return h & (VHalf)(h != 0x8000);
#else
  const VInt a = (VInt)x & 0x7fffffff, sign = (VInt)x >> 16 & 0x8000;
  const VInt small = (VInt)((VFloat)a + 0.5f) - 0x3f000000;  // the sum aligns the subnormal step 2^-24 with the last bit of 0.5
  const VInt normal = ((a + 0xfff + (a >> 13 & 1)) >> 13) - 0x1c000;
  const VInt h = select(a < 0x38800000, small, normal);
  return __builtin_convertvector(h | (sign & (h != 0)), VHalf);
#endif
}

}  // namespace
}  // namespace kvq
