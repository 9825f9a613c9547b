// The fused kernel: decode attention straight on packed pages with integer tensor cores.
//
// A warp takes pages of one KV head; a tile is 64 tokens.  lane = 4 * r + t.  Queries and probabilities are 16-bit integers whose high
// and low bytes are neighbouring columns of B, so with four rows (kRows) the eight columns are full and the accumulators of a lane
// are (high, low) of one number: logits of row t for tokens 8 * x + r, and outputs of row t for channels 8 * y + r.
// Scales never meet a code: scales of channels go into the query, scales of tokens into logits and probabilities.
#pragma once
#include <cuda_fp16.h>

#include "cuda/attend.cuh"
#include "cuda/fragments.cuh"
#include "cuda/step.h"

namespace kvq::cuda {

constexpr float kUnseen = -1e30f;  // m of a row that has seen nothing

struct Lane {
  uint32_t lane, r, t;   // as an owner of logits and outputs
  uint32_t row, low;     // as a column of B: its row, and whether it has the low bytes
};

// What a warp has of a row t: m, l, sum of p * zero, and outputs.
struct Soft {
  float m = kUnseen, l = 0, zero = 0;
  float o[16] = {};
};

// ---- parameters of eight tokens 8 * x + r

__device__ __forceinline__ void load_scales(const uint8_t *params, uint32_t r, uint32_t bytes, float (&s)[8]) {
  if (bytes == 1) {  // e5m3
    const uint2 v = *reinterpret_cast<const uint2 *>(params + r * 8);
#pragma unroll
    for (int x = 0; x < 8; x++) s[x] = __uint_as_float(((x < 4 ? v.x : v.y) >> (8 * (x % 4)) & 0xffu) << 20) * 0x1p107f;
    return;
  }
  const uint4 v = *reinterpret_cast<const uint4 *>(params + r * 16);
  const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int x = 0; x < 4; x++) {
    const float2 pair = __half22float2(*reinterpret_cast<const __half2 *>(&w[x]));
    s[2 * x] = pair.x, s[2 * x + 1] = pair.y;
  }
}

__device__ __forceinline__ void load_scales_zeros(const uint8_t *params, uint32_t r, float (&s)[8], float (&z)[8]) {
#pragma unroll
  for (int k = 0; k < 2; k++) {
    const uint4 v = *reinterpret_cast<const uint4 *>(params + r * 32 + k * 16);
    const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int x = 0; x < 4; x++) {
      const float2 pair = __half22float2(*reinterpret_cast<const __half2 *>(&w[x]));
      s[4 * k + x] = pair.x, z[4 * k + x] = pair.y;
    }
  }
}

// ---- queries as integers

// v = high * 256 + low with signed bytes; f holds v + 1.5 * 2^23 + 128, so that byte 1 is high and byte 0 is low + 128.
constexpr float kDigits = 12582912.0f + 128.0f;

struct QueryBytes {
  uint32_t high, low;
};
__device__ __forceinline__ QueryBytes split_query(const float (&f)[4]) {
  const uint32_t a = __float_as_uint(f[0]), b = __float_as_uint(f[1]), c = __float_as_uint(f[2]), d = __float_as_uint(f[3]);
  return {gather_bytes(a, b, c, d, 0x51u), gather_bytes(a, b, c, d, 0x40u) ^ 0x80808080u};
}

// Columns of B for a row of 128 products: each of a pair's lanes makes half of them and they trade bytes.  products(slot, x) gives
// four.  Returns the value of one unit for the row that the lane owns.
template <class Products>
__device__ __forceinline__ float quantize_query(const Lane &me, Products &&products, uint32_t (&b)[8]) {
  float x[16], top = 1e-30f;
#pragma unroll
  for (int k = 0; k < 4; k++) {
    float four[4];
    products((me.low * 4 + k) * 16 + me.t * 4, four);
#pragma unroll
    for (int j = 0; j < 4; j++) x[4 * k + j] = four[j], top = fmaxf(top, fabsf(four[j]));
  }
  top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
  top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
  top = fmaxf(top, __shfl_xor_sync(~0u, top, 4));
  const float inverse = __fdividef(32600.0f, top);
#pragma unroll
  for (int k = 0; k < 4; k++) {
    float f[4];
#pragma unroll
    for (int j = 0; j < 4; j++) f[j] = fmaf(x[4 * k + j], inverse, kDigits);
    const QueryBytes bytes = split_query(f);
    const uint32_t mine = me.low ? bytes.low : bytes.high, other = __shfl_xor_sync(~0u, me.low ? bytes.high : bytes.low, 4);
    b[k] = me.low ? other : mine;
    b[4 + k] = me.low ? mine : other;
  }
  return __shfl_sync(~0u, top * (1.0f / 32600.0f), me.t * 8);
}

// Section 3 on the four channels 4 * lane + j of a row of 128, by one warp; no barrier, no memory.
__device__ __forceinline__ void rotate_row(uint32_t lane, const TensorFormat &f, bool inverse, float (&x)[4]) {
  const uint64_t signs = splitmix64(sign_seed(f.seed, f.tensor, 0, f.region[0].rotation) ^ lane / 16) >> (4 * (lane % 16));
  const auto sign = [&] {
#pragma unroll
    for (int j = 0; j < 4; j++) x[j] = signs >> j & 1u ? -x[j] : x[j];
  };
  if (!inverse) sign();
  const float a = x[0] + x[1], b = x[0] - x[1], c = x[2] + x[3], d = x[2] - x[3];
  x[0] = a + c, x[1] = b + d, x[2] = a - c, x[3] = b - d;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2)
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const float other = __shfl_xor_sync(~0u, x[j], distance);
      x[j] = lane & distance ? other - x[j] : x[j] + other;
    }
#pragma unroll
  for (int j = 0; j < 4; j++) x[j] *= 0.0883883476f;  // 1 / sqrt(128)
  if (inverse) sign();
}

// ---- keys

// Codebook rows: the query is quantized once; a token's scale multiplies its logit.
template <int W>
struct BookKeys {
  static constexpr bool kColumns = false;
  LevelTable table;
  uint32_t b[8];
  float unit, center;
  uint32_t param_bytes;

  __device__ __forceinline__ void begin_item(const Lane &me, const TensorFormat &f, const float *q, const float *centers) {
    table = {f.table[0], f.table[1]};
    unit = quantize_query(me, [&](uint32_t slot, float (&x)[4]) { read_four(q + me.row * kFastDim + slot, x); }, b) * f.book_scale;
    center = centers[me.t];
    param_bytes = f.param_bytes;
  }
  __device__ static void read_four(const float *q, float (&x)[4]) {
    const float4 v = *reinterpret_cast<const float4 *>(q);
    x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
  }
  __device__ static __forceinline__ void decode(const uint8_t *unit, uint32_t lane, LevelTable table, uint32_t (&r)[8]) {
    uint32_t w[W];
    load_unit<W>(unit, lane, w);
    if constexpr (W == 4)
      look_up_signed(w, table, r);
    else
      look_up<W>(w, table, r);
  }
  __device__ __forceinline__ void begin_page(const Lane &, const TensorFormat &, const float *, const uint8_t *) {}
  __device__ __forceinline__ void logits(const Lane &me, const TensorFormat &, const uint8_t *codes, float (&s)[8]) const {
    int acc[4][4] = {};
#pragma unroll
    for (int k = 0; k < 4; k++) {
      uint32_t u[8], v[8];
      decode(codes + 2 * k * W * 128, me.lane, table, u);
      decode(codes + (2 * k + 1) * W * 128, me.lane, table, v);
#pragma unroll
      for (int i = 0; i < 4; i++) multiply_query(acc[i], u[2 * i], u[2 * i + 1], v[2 * i], v[2 * i + 1], b[2 * k], b[2 * k + 1]);
    }
    float h[8];
    load_scales(codes + 8 * W * 128, me.r, param_bytes, h);
#pragma unroll
    for (int x = 0; x < 8; x++)
      s[x] = fmaf(float(acc[x / 2][2 * (x & 1)] * 256 + acc[x / 2][2 * (x & 1) + 1]), unit * h[x], center);
  }
};

// Affine columns of any widths up to 6: scales go into the query once per group, zeros into one number.  kWidths: a digit per unit
// where the widths are always the same, else 0.
template <uint32_t kWidths>
struct ColumnKeys {
  static constexpr bool kColumns = true;
  uint32_t b[8];
  float unit, zero;
  uint2 widths;

  __device__ __forceinline__ void begin_item(const Lane &, const TensorFormat &f, const float *, const float *) {
    widths = *reinterpret_cast<const uint2 *>(f.width);
  }
  template <class Load>
  __device__ __forceinline__ void fold(const Lane &me, const float *q, Load &&load) {
    float sum = 0;
    unit = quantize_query(me, [&](uint32_t slot, float (&x)[4]) {
      float s[4], z[4];
      load(slot, s, z);
      const float4 v = *reinterpret_cast<const float4 *>(q + me.row * kFastDim + slot);
      x[0] = v.x * s[0], x[1] = v.y * s[1], x[2] = v.z * s[2], x[3] = v.w * s[3];
      sum = fmaf(v.x, z[0], fmaf(v.y, z[1], fmaf(v.z, z[2], fmaf(v.w, z[3], sum))));
    }, b);
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    sum += __shfl_xor_sync(~0u, sum, 4);
    zero = __shfl_sync(~0u, sum, me.t * 8);
  }
  // The parameters of one group: scales, then zeros, of 128 slots.
  __device__ __forceinline__ void begin_page(const Lane &me, const TensorFormat &f, const float *q, const uint8_t *params) {
    if (f.param_bytes == 1)
      fold(me, q, [&](uint32_t slot, float (&s)[4], float (&z)[4]) {
        const uint32_t a = *reinterpret_cast<const uint32_t *>(params + slot), c = *reinterpret_cast<const uint32_t *>(params + kFastDim + slot);
#pragma unroll
        for (int j = 0; j < 4; j++) s[j] = e4m3(a >> 8 * j), z[j] = e4m3(c >> 8 * j);
      });
    else
      fold(me, q, [&](uint32_t slot, float (&s)[4], float (&z)[4]) {
        halves(params + 2 * slot, s);
        halves(params + 2 * kFastDim + 2 * slot, z);
      });
  }
  __device__ static float e4m3(uint32_t h) {
    const float magnitude = __uint_as_float((h & 0x7fu) << 20) * 0x1p120f;
    return h & 0x80u ? -magnitude : magnitude;
  }
  __device__ static __forceinline__ void halves(const uint8_t *at, float (&x)[4]) {
    const uint2 v = *reinterpret_cast<const uint2 *>(at);
    const float2 a = __half22float2(*reinterpret_cast<const __half2 *>(&v.x)), c = __half22float2(*reinterpret_cast<const __half2 *>(&v.y));
    x[0] = a.x, x[1] = a.y, x[2] = c.x, x[3] = c.y;
  }
  template <int W>
  __device__ static __forceinline__ void read(const uint8_t *unit, uint32_t lane, uint32_t (&r)[8]) {
    uint32_t w[W];
    load_unit<W>(unit, lane, w);
    if constexpr (W <= 3)
      look_up<W>(w, LevelTable{W == 1 ? 0x01000100u : 0x03020100u, 0x07060504u}, r);
    else
      plain_codes<W>(w, r);
  }
  __device__ static __forceinline__ const uint8_t *decode(uint32_t width, const uint8_t *unit, uint32_t lane, uint32_t (&r)[8]) {
    switch (width) {
      case 1: read<1>(unit, lane, r); break;
      case 2: read<2>(unit, lane, r); break;
      case 3: read<3>(unit, lane, r); break;
      case 4: read<4>(unit, lane, r); break;
      case 5: read<5>(unit, lane, r); break;
      case 6: read<6>(unit, lane, r); break;
      default:
#pragma unroll
        for (int i = 0; i < 8; i++) r[i] = 0;
    }
    return unit + width * 128;
  }
  __device__ __forceinline__ void logits(const Lane &me, const TensorFormat &, const uint8_t *codes, float (&s)[8]) const {
    int acc[4][4] = {};
#pragma unroll
    for (int k = 0; k < 4; k++) {
      uint32_t u[8], v[8];
      if constexpr (kWidths != 0) {
        codes = decode(kWidths >> (8 * k) & 0xf, codes, me.lane, u);
        codes = decode(kWidths >> (8 * k + 4) & 0xf, codes, me.lane, v);
      } else {
        const uint32_t pair = (k < 2 ? widths.x : widths.y) >> (16 * (k & 1));
        codes = decode(pair & 0xff, codes, me.lane, u);
        codes = decode(pair >> 8 & 0xff, codes, me.lane, v);
      }
#pragma unroll
      for (int i = 0; i < 4; i++) multiply_query(acc[i], u[2 * i], u[2 * i + 1], v[2 * i], v[2 * i + 1], b[2 * k], b[2 * k + 1]);
    }
#pragma unroll
    for (int x = 0; x < 8; x++) s[x] = fmaf(float(acc[x / 2][2 * (x & 1)] * 256 + acc[x / 2][2 * (x & 1) + 1]), unit, zero);
  }
};

// ---- values

// Rows of one scale a token: codebooks, or two bits with a zero.
template <int W, bool kAffine>
struct RowValues {
  LevelTable table;
  float scale;
  uint32_t param_bytes;
  __device__ __forceinline__ void begin_item(const TensorFormat &f) {
    table = kAffine ? LevelTable{0x03020100u, 0x03020100u} : LevelTable{f.table[0], f.table[1]};
    scale = kAffine ? 1.0f : f.book_scale;
    param_bytes = f.param_bytes;
  }
  // Weights p * scale of a tile; tokens of p = 0 may lie where nothing was written.
  template <bool masked>
  __device__ __forceinline__ void weigh(const Lane &me, const uint8_t *codes, const float (&p)[8], float (&w)[8], Soft &soft) const {
    float s[8], z[8];
    if constexpr (kAffine)
      load_scales_zeros(codes + 8 * W * 128, me.r, s, z);
    else
      load_scales(codes + 8 * W * 128, me.r, param_bytes, s);
#pragma unroll
    for (int x = 0; x < 8; x++) {
      w[x] = p[x] * s[x];
      if (masked && p[x] == 0) w[x] = 0;
      if constexpr (kAffine)
        if (!masked || p[x] > 0) soft.zero = fmaf(p[x], z[x], soft.zero);
    }
  }
  __device__ __forceinline__ void add(const Lane &me, const uint8_t *codes, const uint32_t (&b)[4], float unit, Soft &soft) const {
    unit *= scale;
#pragma unroll
    for (int m = 0; m < 8; m++) {
      uint32_t r[8];
      BookKeys<W>::decode(codes + m * W * 128, me.lane, table, r);
      int acc[4] = {};
      multiply_weights(acc, r[0], r[1], r[2], r[3], b[0], b[1]);
      multiply_weights(acc, r[4], r[5], r[6], r[7], b[2], b[3]);
      soft.o[2 * m] = fmaf(float(acc[0] * 256 + acc[1]), unit, soft.o[2 * m]);
      soft.o[2 * m + 1] = fmaf(float(acc[2] * 256 + acc[3]), unit, soft.o[2 * m + 1]);
    }
  }
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

__device__ __forceinline__ void move_reference(Soft &soft, float top) {
  const float m = fmaxf(soft.m, top), scale = exp2_fast(soft.m - m);
  soft.m = m, soft.l *= scale, soft.zero *= scale;
#pragma unroll
  for (int i = 0; i < 16; i++) soft.o[i] *= scale;
}

// Probabilities of a tile as columns of B; returns the value of one unit.
__device__ __forceinline__ float spread_weights(const Lane &me, const float (&w)[8], uint32_t (&b)[4]) {
  float top = 1e-30f;
#pragma unroll
  for (int x = 0; x < 8; x++) top = fmaxf(top, w[x]);
  top = lanes_max(top);
  const float inverse = __fdividef(65528.0f, top);
#pragma unroll
  for (int s = 0; s < 2; s++) {
    uint32_t v[4];
#pragma unroll
    for (int j = 0; j < 4; j++) v[j] = __float_as_uint(fmaf(w[4 * s + j], inverse, 8388608.0f));
    const uint32_t high = gather_bytes(v[0], v[1], v[2], v[3], 0x51u), low = gather_bytes(v[0], v[1], v[2], v[3], 0x40u);
    // A lane gives its high bytes to one of two readers and its low bytes to the other: even r high first, odd r low first.
    const uint32_t first = __shfl_sync(~0u, me.r & 1 ? low : high, (2 * me.t + me.low) * 4 + me.row);
    const uint32_t second = __shfl_sync(~0u, me.r & 1 ? high : low, (2 * me.t + 1 - me.low) * 4 + me.row);
    b[2 * s] = me.low ? second : first;
    b[2 * s + 1] = me.low ? first : second;
  }
  return top * (1.0f / 65528.0f);
}

// Positions that the lane's row sees, as token numbers of the tile.
struct Mask {
  int begin, end;
};

template <bool masked, class Keys, class Values>
__device__ __forceinline__ void run_tile(const Lane &me, const Keys &keys, const Values &values, const TensorFormat &key, const uint8_t *key_codes,
                                         const uint8_t *value_codes, float softcap, const Mask &mask, Soft &soft) {
  float s[8];
  keys.logits(me, key, key_codes, s);
  if (softcap > 0) {
#pragma unroll
    for (int x = 0; x < 8; x++) s[x] = softcap * kLog2E * tanhf(s[x] / (softcap * kLog2E));
  }
  if constexpr (masked) {
#pragma unroll
    for (int x = 0; x < 8; x++) {
      const int token = 8 * x + int(me.r);
      if (token < mask.begin || token >= mask.end) s[x] = -INFINITY;
    }
  }
  const float top = fmaxf(fmaxf(fmaxf(s[0], s[1]), fmaxf(s[2], s[3])), fmaxf(fmaxf(s[4], s[5]), fmaxf(s[6], s[7])));
  if (__any_sync(~0u, top > soft.m + 4.0f)) move_reference(soft, lanes_max(top));
  float p[8], w[8];
#pragma unroll
  for (int x = 0; x < 8; x++) p[x] = exp2_fast(s[x] - soft.m), soft.l += p[x];
  values.template weigh<masked>(me, value_codes, p, w, soft);
  uint32_t b[4];
  const float unit = spread_weights(me, w, b);
  values.add(me, value_codes, b, unit, soft);
}

}  // namespace kvq::cuda
