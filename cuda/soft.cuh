// What a warp of the fused kernel has of its rows, between the pages that it reads: lane = 4 * r + t, and a row t.
#pragma once
#include "cuda/attend.cuh"

namespace kvq::cuda {

constexpr float kUnseen = -1e30f;  // m of a row that has seen nothing

struct Lane {
  uint32_t lane, r, t;   // as an owner of logits and outputs
  uint32_t row, low;     // as a column of B: its row, and whether it has the low bytes
};

// Soft cap of a logit in base 2.
__device__ __forceinline__ float cap_logit(float x, float softcap) {
  const float scale = softcap * kLog2E;
  return scale - __fdividef(2 * scale, exp2_fast(x * __fdividef(2.0f, softcap)) + 1);  // tanh(u) = 1 - 2 / (e^2u + 1)
}

// What a warp has of a row t: m, l, sum of p * zero, and outputs.
template <int U>
struct Soft {
  float m = kUnseen, l = 0, zero = 0;
  float o[2 * U] = {};
};

__device__ __forceinline__ float lanes_max(float x) {  // over r
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 4));
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 8));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 16));
}
__device__ __forceinline__ float lanes_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 4);
  x += __shfl_xor_sync(~0u, x, 8);
  return x + __shfl_xor_sync(~0u, x, 16);
}

// Returns what sums that a row has elsewhere are to be multiplied by.
template <int U>
__device__ __forceinline__ float move_reference(Soft<U> &soft, float top) {
  const float m = fmaxf(soft.m, top), scale = exp2_fast(soft.m - m);
  soft.m = m, soft.l *= scale, soft.zero *= scale;
#pragma unroll
  for (int i = 0; i < 2 * U; i++) soft.o[i] *= scale;
  return scale;
}

}  // namespace kvq::cuda
