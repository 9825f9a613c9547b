// Rule 1.4 on the device.
#pragma once
#include "cuda/rows.h"
#include "kvq/kvq.h"
#include "util/fp.h"

namespace kvq::cuda {

// half_to_float in one instruction.
__device__ inline float widen(uint16_t h) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h));
  return x;
}

// float_to_half of a finite x, likewise.
__device__ inline uint16_t narrow(float x) {
  uint16_t h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(fminf(fmaxf(x, -65504.0f), 65504.0f)));
  return h == 0x8000 ? 0 : h;
}

__device__ inline float load_element(const DeviceTensor &x, int64_t at) {
  switch (x.dtype) {
    case KVQ_DTYPE_F16:
      return widen(static_cast<const uint16_t *>(x.data)[at]);
    case KVQ_DTYPE_BF16:
      return __uint_as_float(uint32_t(static_cast<const uint16_t *>(x.data)[at]) << 16);
    case KVQ_DTYPE_F64:
      return float(static_cast<const double *>(x.data)[at]);
    default:
      return static_cast<const float *>(x.data)[at];
  }
}

// N elements in a row, all on their way at once.
template <int N>
__device__ __forceinline__ void load_elements(const DeviceTensor &x, int64_t at, float (&out)[N]) {
  const auto all = [&](auto *from, auto &&value) {
#pragma unroll
    for (int i = 0; i < N; i++) out[i] = value(from[at + i]);
  };
  switch (x.dtype) {
    case KVQ_DTYPE_F16:
      return all(static_cast<const uint16_t *>(x.data), [](uint16_t h) { return widen(h); });
    case KVQ_DTYPE_BF16:
      return all(static_cast<const uint16_t *>(x.data), [](uint16_t h) { return __uint_as_float(uint32_t(h) << 16); });
    case KVQ_DTYPE_F64:
      return all(static_cast<const double *>(x.data), [](double d) { return float(d); });
    default:
      return all(static_cast<const float *>(x.data), [](float f) { return f; });
  }
}

// Up to four fp16 elements in a row, zeros behind them.
__device__ inline uint2 load_four(const DeviceTensor &x, int64_t at, uint32_t count) {
  const uint16_t *from = static_cast<const uint16_t *>(x.data) + at;
  if (count == 4 && reinterpret_cast<uintptr_t>(from) % 8 == 0) return *reinterpret_cast<const uint2 *>(from);
  uint2 four = make_uint2(0, 0);
  for (uint32_t i = 0; i < count; i++) (i < 2 ? four.x : four.y) |= uint32_t(from[i]) << i % 2 * 16;
  return four;
}

// Are both finite?  All four?  A field of ones carries.
__device__ inline bool is_plain(uint32_t two) { return (((two & 0x7c007c00u) + 0x04000400u) & 0x80008000u) == 0; }
__device__ inline bool is_plain(uint2 four) {
  return ((((four.x & 0x7c007c00u) + 0x04000400u) | ((four.y & 0x7c007c00u) + 0x04000400u)) & 0x80008000u) == 0;
}

__device__ inline bool is_finite(float x) { return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u; }

// What is not finite enters as +0 and is reported.
__device__ inline uint16_t enter(float x, uint64_t key, Findings *findings) {
  if (!is_finite(x)) {
    atomicMin(&findings->bad, static_cast<unsigned long long>(key));
    return 0;
  }
  if (fabsf(x) > 65504.0f) atomicAdd(&findings->saturated, 1ull);
  return narrow(x);
}

}  // namespace kvq::cuda
