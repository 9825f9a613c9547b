// What a lane has of its rows in the second kernel of prompt.h, and the way to the caller's memory.
#pragma once
#include "cuda/fused.cuh"
#include "cuda/prompt.cuh"
#include "cuda/results.cuh"

namespace kvq::cuda {

__device__ __forceinline__ uint32_t pack_halves(float x, float y) {
  const __half2 both = __floats2half2_rn(x, y);
  return *reinterpret_cast<const uint32_t *>(&both);
}

// What a lane has of its two rows.
template <int P>
struct RowSums {
  float m[2] = {kUnseen, kUnseen}, l[2] = {0, 0};  // the largest logarithm of a weight; sum of probabilities
  float zero[2] = {0, 0};                          // sum of weight times zero
  float o[P][32];
  __device__ __forceinline__ void scale_outputs(const float (&alpha)[2]) {
#pragma unroll
    for (int p = 0; p < P; p++)
#pragma unroll
      for (int i = 0; i < 32; i++) o[p][i] *= alpha[i / 2 % 2];
  }
};

__device__ __forceinline__ void store_pair(const DeviceTensor &x, int64_t at, float first, float second) {
  if (x.dtype == KVQ_DTYPE_F32 && reinterpret_cast<uintptr_t>(static_cast<const float *>(x.data) + at) % 8 == 0) {
    *reinterpret_cast<float2 *>(static_cast<float *>(const_cast<void *>(x.data)) + at) = make_float2(first, second);
  } else if (x.dtype == KVQ_DTYPE_F16 && reinterpret_cast<uintptr_t>(static_cast<const uint16_t *>(x.data) + at) % 4 == 0) {
    *reinterpret_cast<uint32_t *>(static_cast<uint16_t *>(const_cast<void *>(x.data)) + at) =
        pack_halves(fminf(fmaxf(first, -65504.0f), 65504.0f), fminf(fmaxf(second, -65504.0f), 65504.0f));
  } else {
    store_outputs(x, at, 1, {first, second});
  }
}

// Outputs of two rows back from their rotation (section 3): channel 64 * p + 8 * j + 2 * t + odd.
template <int P>
__device__ __forceinline__ void unrotate(const TensorFormat &f, uint32_t t, float (&o)[P][32]) {
#pragma unroll
  for (int bit = 1; bit < 64 * P; bit *= 2)
#pragma unroll
    for (int i = 0; i < 32 * P; i++) {
      // Bits of i: odd, row, j (three), panel.
      float &x = o[i / 32][i % 32];
      if (bit == 2 || bit == 4) {
        const float other = __shfl_xor_sync(~0u, x, bit / 2);
        x = t & (bit / 2) ? other - x : x + other;
      } else {
        const int partner = bit == 1 ? 1 : bit / 2;
        if (i & partner) continue;
        float &y = o[(i | partner) / 32][(i | partner) % 32];
        const float sum = x + y, difference = x - y;
        x = sum, y = difference;
      }
    }
  const float scale = rsqrtf(64.0f * P);
  const uint64_t seed = sign_seed(f.seed, f.tensor, 0, f.region[0].rotation);
#pragma unroll
  for (int p = 0; p < P; p++) {
    const uint64_t signs = splitmix64(seed ^ p) >> 2 * t;
#pragma unroll
    for (int i = 0; i < 32; i++) o[p][i] *= signs >> (i / 4 * 8 + i % 2) & 1u ? -scale : scale;
  }
}

// use(channel, x, y): two channels of a row.
template <int P, class Use>
__device__ __forceinline__ void for_outputs(const RowSums<P> &sums, int i, uint32_t t, uint32_t dim_v, Use &&use) {
#pragma unroll
  for (int p = 0; p < P; p++)
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const uint32_t channel = 64 * p + 8 * j + 2 * t;
      if (channel < dim_v) use(channel, sums.o[p][4 * j + 2 * i], sums.o[p][4 * j + 2 * i + 1]);
    }
}

// The only split of its rows goes to the caller's memory, others as [row][dim_v], then [row]{m, l}.
template <int P>
__device__ __forceinline__ void store_rows(const Plan &plan, const AttendArguments &a, const Item &item, uint32_t first_row, uint32_t t, const RowSums<P> &sums) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const uint32_t row = first_row + 8 * i;
    if (row >= item.rows) continue;
    if (item.sequence->splits == 1) {
      const RowEnd end = end_row(a, item, row, sums.m[i], sums.l[i], t == 0);
      for_outputs(sums, i, t, a.dim_v, [&](uint32_t channel, float x, float y) { store_pair(a.out, end.at + channel, x * end.factor, y * end.factor); });
    } else {
      float *o = plan.partials + size_t(item.partial) * kPromptRows * (a.dim_v + 2), *ml = o + kPromptRows * a.dim_v + 2 * row;
      for_outputs(sums, i, t, a.dim_v, [&](uint32_t channel, float x, float y) { *reinterpret_cast<float2 *>(o + row * a.dim_v + channel) = make_float2(x, y); });
      if (t == 0) ml[0] = sums.m[i], ml[1] = sums.l[i];
    }
  }
}

// Splits of a row, in their order, by a warp.
__device__ inline void merge_row(const Plan &plan, const AttendArguments &a, const Item &item, uint32_t row) {
  const uint32_t lane = threadIdx.x % 32;
  for (uint32_t channel = 2 * lane; channel - 2 * lane < a.dim_v; channel += 64) {
    const bool have = channel < a.dim_v;  // dimensions are even
    const RowResult<2> r = add_splits<2>(plan, a, item, {kPromptRows, a.dim_v}, lane, row, channel, have);
    const RowEnd end = end_row(a, item, row, r.m, r.l, channel == 0);
    if (have) store_pair(a.out, end.at + channel, r.o[0] * end.factor, r.o[1] * end.factor);
  }
}

}  // namespace kvq::cuda
