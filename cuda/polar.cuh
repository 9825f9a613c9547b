// Polar keys of 4 radii and 4 angles in the fused kernels.
//
// A pair's product with the query is (zero + step * radius) * g(angle): of the four values of g one is the base, and three are what the
// angle's bits a0, a1 and both together add.  So a logit is a sum of seven products of queries, one for each of
//   a0, a1, a0 a1, radius, radius a0, radius a1, radius a0 a1
// which masks make of the codes where they lie (planes, layout.h: units of radii, then as many of angles), and of a number.
#pragma once
#include "cuda/fused.cuh"

namespace kvq::cuda {

struct Polar : CodeTraits {
  static constexpr uint32_t kWarps = 12;
};

template <int U, int N>
struct PolarKeys {
  static constexpr bool kColumns = true;
  static constexpr int kTerms = 7, kPairs = 8 * U, kPairUnits = U / 2;
  float unit[N], zero[N];
  uint32_t b[N][kPairUnits * kTerms];
  float2 *turns;  // [angle][pair]: cosine and sine

  __device__ __forceinline__ void begin_item(const Lane &, const TensorFormat &, const float *, const float *, uint32_t *scratch) {
    turns = reinterpret_cast<float2 *>(scratch);
  }
  __device__ __forceinline__ void find_turns(const Lane &me, const uint8_t *params) const {
    __syncwarp();
    for (uint32_t pair = me.lane; pair < kPairs; pair += 32) {
      const float step = half_at(params + 2 * (kPairs + pair)), zero_angle = half_at(params + 2 * (3 * kPairs + pair));
#pragma unroll
      for (int a = 0; a < 4; a++) {
        float sine, cosine;  // fast ones are best between -pi and pi
        __sincosf(fmaf(float(a), step, zero_angle) - 3.14159265f, &sine, &cosine);
        turns[a * kPairs + pair] = make_float2(-cosine, -sine);
      }
    }
    __syncwarp();
  }
  __device__ static __forceinline__ float half_at(const uint8_t *at) { return __half2float(*reinterpret_cast<const __half *>(at)); }

  // Seven products of four pairs for a row, and their sum of the eighth.
  __device__ __forceinline__ float multiply_pairs(const float *q, const uint8_t *params, uint32_t pair, float *x) const {
    float step[4], base[4], g[4][4], sum = 0;
    ColumnKeys<U, N>::read_halves(params + 2 * pair, step);
    ColumnKeys<U, N>::read_halves(params + 4 * kPairs + 2 * pair, base);
    const float4 q01 = *reinterpret_cast<const float4 *>(q + 2 * pair), q23 = *reinterpret_cast<const float4 *>(q + 2 * pair + 4);
#pragma unroll
    for (int a = 0; a < 4; a++) {
      const float4 t01 = *reinterpret_cast<const float4 *>(turns + a * kPairs + pair), t23 = *reinterpret_cast<const float4 *>(turns + a * kPairs + pair + 2);
      g[a][0] = fmaf(q01.x, t01.x, q01.y * t01.y), g[a][1] = fmaf(q01.z, t01.z, q01.w * t01.w);
      g[a][2] = fmaf(q23.x, t23.x, q23.y * t23.y), g[a][3] = fmaf(q23.z, t23.z, q23.w * t23.w);
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const float first = g[1][j] - g[0][j], second = g[2][j] - g[0][j], both = g[3][j] - g[2][j] - first;
      const float terms[3] = {first, 0.5f * second, both};  // a1 counts twice where it lies
      x[12 + j] = step[j] * g[0][j];
      sum = fmaf(base[j], g[0][j], sum);
#pragma unroll
      for (int i = 0; i < 3; i++) x[4 * i + j] = base[j] * terms[i];
      x[16 + j] = step[j] * first, x[20 + j] = step[j] * second, x[24 + j] = step[j] * both;
    }
    return sum;
  }
  __device__ __forceinline__ void begin_group(const Lane &me, const float *q, const uint8_t *params, uint32_t) {
    find_turns(me, params);
#pragma unroll
    for (int n = 0; n < N; n++) {
      float x[4 * kTerms * kPairUnits / 2], sum = 0;
#pragma unroll
      for (int k = 0; k < kPairUnits / 2; k++)
        sum += multiply_pairs(q + (4 * n + me.row) * query_stride(U), params, (me.low * (kPairUnits / 2) + k) * 16 + me.t * 4, x + 4 * kTerms * k);
      unit[n] = trade_query<kTerms * kPairUnits>(me, x, b[n]);
      zero[n] = query_sum(me, sum);
    }
  }

  // Two units of pairs, registers 4 * H and on: words of radii and of angles.
  template <int P>
  __device__ __forceinline__ void add_half(int h, uint32_t radius_u, uint32_t radius_v, uint32_t angle_u, uint32_t angle_v, int (&acc)[N][4][4]) const {
    constexpr uint32_t kLow = 0x55555555u, kBit = 0x01010101u, kCrumb = 0x03030303u;
    const uint32_t both_u = angle_u & angle_u >> 1 & kLow, both_v = angle_v & angle_v >> 1 & kLow;
    const uint32_t a0_u = angle_u & kLow, a0_v = angle_v & kLow, a1_u = angle_u >> 1 & kLow, a1_v = angle_v >> 1 & kLow;
    add<P>(h, 0, angle_u, angle_v, kBit, acc);
    add<P>(h, 1, angle_u, angle_v, 2 * kBit, acc);
    add<P>(h, 2, both_u, both_v, kBit, acc);
    add<P>(h, 3, radius_u, radius_v, kCrumb, acc);
    add<P>(h, 4, radius_u & 3 * a0_u, radius_v & 3 * a0_v, kCrumb, acc);
    add<P>(h, 5, radius_u & 3 * a1_u, radius_v & 3 * a1_v, kCrumb, acc);
    add<P>(h, 6, radius_u & 3 * both_u, radius_v & 3 * both_v, kCrumb, acc);
  }
  template <int P>
  __device__ __forceinline__ void add(int h, int term, uint32_t u, uint32_t v, uint32_t field, int (&acc)[N][4][4]) const {
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int n = 0; n < N; n++)
        multiply_query<true>(acc[n][2 * h + i], u & field << 4 * i, u & field << (4 * i + 2), v & field << 4 * i, v & field << (4 * i + 2),
                             b[n][2 * P * kTerms + term], b[n][(2 * P + 1) * kTerms + term]);
  }
  template <int... P>
  __device__ __forceinline__ void add_all(const Lane &me, const uint8_t *codes, int (&acc)[N][4][4], std::integer_sequence<int, P...>) const {
    const auto two = [&]<int I>() {
      const uint4 radius = *reinterpret_cast<const uint4 *>(codes + I * 512 + me.lane * 16);
      const uint4 angle = *reinterpret_cast<const uint4 *>(codes + (U / 4 + I) * 512 + me.lane * 16);
      add_half<I>(0, radius.x, radius.z, angle.x, angle.z, acc);
      add_half<I>(1, radius.y, radius.w, angle.y, angle.w, acc);
    };
    (two.template operator()<P>(), ...);
  }
  template <class>
  __device__ __forceinline__ void logits(const Lane &me, const RowClass &, const uint8_t *codes, const float (&from)[N], float (&s)[N][8]) const {
    int acc[N][4][4] = {};
    add_all(me, codes, acc, std::make_integer_sequence<int, U / 4>());
    column_logits(acc, unit, zero, from, s);
  }
};

template <int U, int N>
struct KeysFor<Polar, U, N> {
  using Type = PolarKeys<U, N>;
};
template <int U, int N>
struct ScratchOf<PolarKeys<U, N>> {
  static constexpr uint32_t kBytes = 4 * PolarKeys<U, N>::kPairs * sizeof(float2);
};

}  // namespace kvq::cuda
