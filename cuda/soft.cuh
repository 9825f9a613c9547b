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

// ---- while packed pages are read
//
// Logits are made relative to m at once, and m stays where the first tile has put it: sums are floats, whose precision does not depend
// on it, so it moves only when they are large.  It lies 2^kBelow above the largest, so that weights are small (round_weight).  A row that
// has seen nothing has a reference of 0, and an infinite l says so.

constexpr float kBelow = 40, kMostSum = 0x1p-20f;

template <int U>
__device__ __forceinline__ void move_to(Soft<U> &soft, float m, float scale) {
  soft.m = m, soft.l *= scale, soft.zero *= scale;
#pragma unroll
  for (int i = 0; i < 2 * U; i++) soft.o[i] *= scale;
}
template <int U>
__device__ __forceinline__ void begin_packed(Soft<U> &soft) {
  if (soft.m == kUnseen)
    soft.m = 0, soft.l = INFINITY;
  else
    move_to(soft, soft.m + kBelow, exp2_fast(-kBelow));
}
template <int U>
__device__ __forceinline__ void end_packed(Soft<U> &soft) {
  if (soft.l == INFINITY) soft.m = kUnseen, soft.l = 0;
}

// Probabilities of eight logits; returns their sum.
__device__ __forceinline__ float exponentials(const float (&s)[8], float (&p)[8]) {
#pragma unroll
  for (int x = 0; x < 8; x++) p[x] = exp2_fast(s[x]);
  return ((p[0] + p[1]) + (p[2] + p[3])) + ((p[4] + p[5]) + (p[6] + p[7]));
}

// Moves a row's reference to what it has seen, with these logits, and their probabilities along.  Returns what sums that the row has
// elsewhere are to be multiplied by.
template <int U>
__device__ __forceinline__ float lift_reference(Soft<U> &soft, float (&s)[8], float (&p)[8], float *sum) {
  const bool first = soft.l == INFINITY;
  float top = first ? -INFINITY : fmaxf(__log2f(soft.l), -kBelow);
#pragma unroll
  for (int x = 0; x < 8; x++) top = fmaxf(top, s[x]);
  top = lanes_max(top);
  if (top == -INFINITY) return 1;  // all is hidden
  if (first) soft.l = 0;
  const float by = top + kBelow, scale = first ? 0.0f : exp2_fast(-by);  // all sums of the first are 0
  move_to(soft, soft.m + by, scale);
#pragma unroll
  for (int x = 0; x < 8; x++) s[x] -= by;
  *sum = exponentials(s, p);
  return scale;
}

// ---- while raw pages are read
template <int U>
__device__ __forceinline__ void move_reference(Soft<U> &soft, float top) {
  const float m = fmaxf(soft.m, top);
  move_to(soft, m, exp2_fast(soft.m - m));
}

}  // namespace kvq::cuda
