// The fused kernel: decode attention straight on packed pages with integer tensor cores.
//
// A warp takes pages of one KV head; a tile is 64 tokens.  lane = 4 * r + t.  Queries and probabilities are 16-bit integers whose high
// and low bytes are neighbouring columns of B, so with four rows (kRows) the eight columns are full and the accumulators of a lane
// are (high, low) of one number: logits of row t for tokens 8 * x + r, and outputs of row t for channels 8 * y + r.  More rows take
// further columns on the same decoded codes: everything is for N blocks of four rows and U units of 16 channels.
// Scales never meet a code: scales of channels go into the query, scales of tokens into logits and probabilities.
#pragma once
#include <cuda_fp16.h>

#include <utility>

#include "codec/minifloat.h"
#include "cuda/fragments.cuh"
#include "cuda/soft.cuh"

namespace kvq::cuda {

// A number that is the same in all lanes, so that branches on it are taken by the warp.
__device__ __forceinline__ uint32_t uniform(uint32_t x) {
#if __CUDA_ARCH__ >= 800
  return __reduce_or_sync(~0u, x);
#else
  return x;
#endif
}

// ---- parameters of eight tokens 8 * x + r

// Bytes are e5m3.
__device__ __forceinline__ void load_scales(const uint8_t *params, uint32_t r, uint32_t bytes, float (&s)[8]) {
  if (bytes == 1) {
    const uint2 v = *reinterpret_cast<const uint2 *>(params + r * 8);
#pragma unroll
    for (int x = 0; x < 8; x++) s[x] = e5m3_to_float(uint8_t((x < 4 ? v.x : v.y) >> 8 * (x % 4)));
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

// ---- queries as integers

// Between rows of queries in shared memory, in floats: four rows at once meet few banks.
__host__ __device__ constexpr int query_stride(int units) { return 16 * units + 16; }

// v = high * 256 + low with signed bytes; f holds v + 1.5 * 2^23 + 128, so that byte 1 is high and byte 0 is low + 128.
constexpr float kDigits = 12582912.0f + 128.0f;

// The lane's own bytes of four, and the other lane's.
struct QueryBytes {
  uint32_t mine, other;
};
__device__ __forceinline__ QueryBytes split_query(const Lane &me, const float (&f)[4]) {
  const uint32_t a = permute(__float_as_uint(f[0]), __float_as_uint(f[1]), 0x5410u) ^ 0x00800080u;
  const uint32_t b = permute(__float_as_uint(f[2]), __float_as_uint(f[3]), 0x5410u) ^ 0x00800080u;
  return {permute(a, b, me.low ? 0x6420u : 0x7531u), permute(a, b, me.low ? 0x7531u : 0x6420u)};
}

struct NoRest {
  __device__ __forceinline__ void operator()(uint32_t, float) const {}
};

// Columns of B for a row of products x, of which each of a pair's lanes has made half: they trade bytes.  rest(k, x) takes what rounding
// leaves of those of the lane's unit k, in sum.  Returns the value of one unit for the row that the lane owns.
template <int U, class Rest = NoRest>
__device__ __forceinline__ float trade_query(const Lane &me, const float (&x)[2 * U], uint32_t (&b)[U], Rest &&rest = {}) {
  constexpr int kHalf = U / 2;
  float top = 1e-30f;
#pragma unroll
  for (int i = 0; i < 4 * kHalf; i++) top = fmaxf(top, fabsf(x[i]));
  top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
  top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
  top = fmaxf(top, __shfl_xor_sync(~0u, top, 4));
  const float inverse = __fdividef(32600.0f, top);
#pragma unroll
  for (int k = 0; k < kHalf; k++) {
    float f[4];
#pragma unroll
    for (int j = 0; j < 4; j++) f[j] = fmaf(x[4 * k + j], inverse, kDigits);
    const uint32_t digits = __float_as_uint(f[0]) + __float_as_uint(f[1]) + __float_as_uint(f[2]) + __float_as_uint(f[3]) - 4 * __float_as_uint(kDigits);
    rest(k, fmaf(float(int(digits)), top * (-1.0f / 32600.0f), x[4 * k] + x[4 * k + 1] + x[4 * k + 2] + x[4 * k + 3]));
    const QueryBytes bytes = split_query(me, f);
    const uint32_t other = __shfl_xor_sync(~0u, bytes.other, 4);
    b[k] = me.low ? other : bytes.mine;
    b[kHalf + k] = me.low ? bytes.mine : other;
  }
  return __shfl_sync(~0u, top * (1.0f / 32600.0f), me.t * 8);
}
// The same for products(slot, x), which gives four.
template <int U, class Products, class Rest = NoRest>
__device__ __forceinline__ float quantize_query(const Lane &me, Products &&products, uint32_t (&b)[U], Rest &&rest = {}) {
  float x[2 * U];
#pragma unroll
  for (int k = 0; k < U / 2; k++) {
    float four[4];
    products((me.low * (U / 2) + k) * 16 + me.t * 4, four);
#pragma unroll
    for (int j = 0; j < 4; j++) x[4 * k + j] = four[j];
  }
  return trade_query<U>(me, x, b, rest);
}
// A sum over the pair's and the quad's lanes, for the row that the lane owns.
__device__ __forceinline__ float query_sum(const Lane &me, float sum) {
  sum += __shfl_xor_sync(~0u, sum, 1);
  sum += __shfl_xor_sync(~0u, sum, 2);
  sum += __shfl_xor_sync(~0u, sum, 4);
  return __shfl_sync(~0u, sum, me.t * 8);
}
__device__ __forceinline__ void read_four(const float *q, float (&x)[4]) {
  const float4 v = *reinterpret_cast<const float4 *>(q);
  x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
}

// ---- keys

// What the rows of a page class need besides their bytes.
struct RowClass {
  LevelTable table;
  float scale;
  uint32_t param_bytes;
  __device__ __forceinline__ void load(const TensorFormat &f) {
    table = {f.table[0], f.table[1]}, scale = f.book_scale, param_bytes = uniform(f.param_bytes);
  }
};

// Sums of query times level for the tokens of a tile.
template <class Code, int U, int N>
struct KeySums {
  const uint32_t (&b)[N][U];
  int acc[N][4][4] = {};
  __device__ __forceinline__ void add(int p, const uint32_t (&u)[8], const uint32_t (&v)[8]) {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        multiply_query<Code::kUnsigned>(acc[n][i], u[2 * i], u[2 * i + 1], v[2 * i], v[2 * i + 1], b[n][2 * p], b[n][2 * p + 1]);
  }
  __device__ __forceinline__ float sum(int n, int x) const { return float(acc[n][x / 2][2 * (x & 1)] * 256 + acc[n][x / 2][2 * (x & 1) + 1]); }
};

// Rows: the query is quantized once; a token's scale multiplies its logit.  Classes of pages share it.
template <int U, int N>
struct RowKeys {
  static constexpr bool kColumns = false;
  uint32_t b[N][U];
  float unit[N], total[N], center[N];  // total: the sum of the query, as rounded: what a zero counts is then what a code counts

  __device__ __forceinline__ void begin_item(const Lane &me, const TensorFormat &, const float *q, const float *centers, uint32_t *) {
#pragma unroll
    for (int n = 0; n < N; n++) {
      float sum = 0;
      unit[n] = quantize_query<U>(me, [&](uint32_t slot, float (&x)[4]) {
        read_four(q + (4 * n + me.row) * query_stride(U) + slot, x);
        sum += x[0] + x[1] + x[2] + x[3];
      }, b[n], [&](uint32_t, float rest) { sum -= rest; });
      total[n] = query_sum(me, sum);
      center[n] = centers[4 * n + me.t];
    }
  }
  template <class Code>
  __device__ __forceinline__ void logits(const Lane &me, const RowClass &rows, const uint8_t *codes, const float (&from)[N], float (&s)[N][8]) const {
    KeySums<Code, U, N> sums{b};
    Code::template for_pairs<U>(codes, me.lane, rows.table, sums);
    float h[8], z[8];
    if constexpr (Code::kAffine)
      load_scales(codes + Code::bytes(U), me.r, 2, h), load_scales(codes + Code::bytes(U) + 2 * kTile, me.r, 2, z);
    else
      load_scales(codes + Code::bytes(U), me.r, rows.param_bytes, h);
#pragma unroll
    for (int n = 0; n < N; n++) {
      const float factor = Code::kAffine ? unit[n] : unit[n] * rows.scale, less = total[n] * rows.scale, base = center[n] - from[n];
#pragma unroll
      for (int x = 0; x < 8; x++) {
        if constexpr (Code::kAffine)
          s[n][x] = fmaf(sums.sum(n, x), factor * h[x], fmaf(z[x], total[n], base));
        else if constexpr (Code::kFromOne)
          s[n][x] = fmaf(fmaf(sums.sum(n, x), factor, -less), h[x], base);
        else
          s[n][x] = fmaf(sums.sum(n, x), factor * h[x], base);
      }
    }
  }
};

// Affine columns of any widths up to 6 (planes): scales go into the query once per group, zeros into one number.  So does what rounding
// has left of the query, times the middle of the levels: codes count from 0, and would carry it into the logits of all tokens of the
// group alike.  Two bits of a register's codes stay where they lie: in register x they count 4^(x % 4) times, which the logit undoes.
struct Planes : CodeTraits {};

// Logits, relative to `from`, of sums of codes that lie so.
template <int N>
__device__ __forceinline__ void column_logits(const int (&acc)[N][4][4], const float (&unit)[N], const float (&zero)[N], const float (&from)[N], float (&s)[N][8]) {
#pragma unroll
  for (int n = 0; n < N; n++) {
    const float base = zero[n] - from[n];
#pragma unroll
    for (int x = 0; x < 8; x++) {
      const int *c = &acc[n][x / 2][2 * (x & 1)];
      s[n][x] = fmaf(fmaf(float(c[0]), 256.0f, float(c[1])), unit[n] * (1.0f / float(1 << 2 * (x % 4))), base);
    }
  }
}

template <int U, int N>
struct ColumnKeys {
  static constexpr bool kColumns = true;
  float unit[N], zero[N];
  uint32_t b[N][U];
  static constexpr uint32_t kMost = 3;  // planes
  uint32_t pairs[kMost];        // of TensorFormat
  uint32_t twice[(U + 7) / 8];  // middles of the levels, twice, of the lane's units in quantize_query: bytes
  int planes;               // the highest
  bool halves;              // half of the units have one bit, half three (PN-Mix): known when this is compiled, so nothing is looked up
  static constexpr uint32_t half_units(int p) {
    constexpr uint32_t all = ~0u >> (32 - 2 * U), low = all >> U, one = 0x55555555;
    return p ? one & all & ~low : (one & low) | (2 * one & all & ~low);
  }

  __device__ __forceinline__ void begin_item(const Lane &me, const TensorFormat &f, const float *, const float *, uint32_t *) {
#pragma unroll
    for (uint32_t p = 0; p < kMost; p++) pairs[p] = uniform(f.pairs[p]);
#pragma unroll
    for (uint32_t k = 0; k < U / 2; k++) {
      const uint32_t unit = me.low * (U / 2) + k, width = plane_words(pairs[0], unit) + plane_words(pairs[1], unit) + plane_words(pairs[2], unit);
      twice[k / 4] = (k % 4 ? twice[k / 4] : 0) | ((1u << width) - 1) << 8 * (k % 4);
    }
    planes = pairs[2] ? 2 : pairs[1] ? 1 : 0;
    halves = pairs[0] == half_units(0) && pairs[1] == half_units(1) && planes == 1;
  }
  template <class Load>
  __device__ __forceinline__ void fold(const Lane &me, const float *q, Load &&load) {
#pragma unroll
    for (int n = 0; n < N; n++) {
      float sum = 0;
      unit[n] = quantize_query<U>(me, [&](uint32_t slot, float (&x)[4]) {
        float s[4], z[4], v[4];
        load(slot, s, z);
        read_four(q + (4 * n + me.row) * query_stride(U) + slot, v);
#pragma unroll
        for (int j = 0; j < 4; j++) x[j] = v[j] * s[j], sum = fmaf(v[j], z[j], sum);
      }, b[n], [&](uint32_t k, float rest) { sum = fmaf(rest, 0.5f * float(twice[k / 4] >> 8 * (k % 4) & 0xff), sum); });
      zero[n] = query_sum(me, sum);
    }
  }
  // The parameters of one group: scales, then zeros, of all slots.
  __device__ __forceinline__ void begin_group(const Lane &me, const float *q, const uint8_t *params, uint32_t param_bytes) {
    if (param_bytes == 1)
      fold(me, q, [&](uint32_t slot, float (&s)[4], float (&z)[4]) {
        const uint32_t a = *reinterpret_cast<const uint32_t *>(params + slot), c = *reinterpret_cast<const uint32_t *>(params + 16 * U + slot);
#pragma unroll
        for (int j = 0; j < 4; j++) s[j] = e4m3(a >> 8 * j), z[j] = e4m3(c >> 8 * j);
      });
    else
      fold(me, q, [&](uint32_t slot, float (&s)[4], float (&z)[4]) {
        read_halves(params + 2 * slot, s);
        read_halves(params + 32 * U + 2 * slot, z);
      });
  }
  __device__ static float e4m3(uint32_t h) {
    const float magnitude = __uint_as_float((h & 0x7fu) << 20) * 0x1p120f;
    return h & 0x80u ? -magnitude : magnitude;
  }
  __device__ static __forceinline__ void read_halves(const uint8_t *at, float (&x)[4]) {
    const uint2 v = *reinterpret_cast<const uint2 *>(at);
    const float2 a = __half22float2(*reinterpret_cast<const __half2 *>(&v.x)), c = __half22float2(*reinterpret_cast<const __half2 *>(&v.y));
    x[0] = a.x, x[1] = a.y, x[2] = c.x, x[3] = c.y;
  }
  // Register x of a unit: `field` at bit 2 * (x % 4) of the bytes of word x / 4.
  __device__ static __forceinline__ uint32_t pick(uint32_t low, uint32_t high, uint32_t field, int x) { return (x < 4 ? low : high) & field << 2 * (x % 4); }
  // Units 2 * p and 2 * p + 1, or the second only: words and fields of each.
  template <int P>
  __device__ __forceinline__ void add_two(uint32_t u0, uint32_t u1, uint32_t field_u, uint32_t v0, uint32_t v1, uint32_t field_v, int (&acc)[N][4][4]) const {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint32_t a0 = pick(u0, u1, field_u, 2 * i), a1 = pick(u0, u1, field_u, 2 * i + 1);
      const uint32_t a2 = pick(v0, v1, field_v, 2 * i), a3 = pick(v0, v1, field_v, 2 * i + 1);
#pragma unroll
      for (int n = 0; n < N; n++) multiply_query<true>(acc[n][i], a0, a1, a2, a3, b[n][2 * P], b[n][2 * P + 1]);
    }
  }
  template <int P>
  __device__ __forceinline__ void add_one(uint32_t v0, uint32_t v1, uint32_t field, int (&acc)[N][4][4]) const {
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int n = 0; n < N; n++) multiply_unit(acc[n][i], pick(v0, v1, field, 2 * i), pick(v0, v1, field, 2 * i + 1), b[n][2 * P + 1]);
  }
  // A pair's words of a plane: widths ascend, so the second unit has as many as the first, or more.
  template <int P>
  __device__ __forceinline__ void add_pair(const Lane &me, uint32_t all, const uint8_t *&codes, int (&acc)[N][4][4]) const {
    constexpr uint32_t kBit = 0x01010101u, kCrumb = 0x03030303u;
    const uint32_t words = all & 0xfu << 4 * P;
    if (words == 0) return;
    if (words == 10u << 4 * P) {
      const uint4 w = *reinterpret_cast<const uint4 *>(codes + me.lane * 16);
      add_two<P>(w.x, w.y, kCrumb, w.z, w.w, kCrumb, acc);
      codes += 512;
    } else if (words == 5u << 4 * P) {
      const uint2 w = *reinterpret_cast<const uint2 *>(codes + me.lane * 8);
      add_two<P>(w.x, w.x >> 1, kBit, w.y, w.y >> 1, kBit, acc);
      codes += 256;
    } else if (words == 9u << 4 * P) {
      const uint32_t u = *reinterpret_cast<const uint32_t *>(codes + me.lane * 4);
      const uint2 v = *reinterpret_cast<const uint2 *>(codes + 128 + me.lane * 8);
      add_two<P>(u, u >> 1, kBit, v.x, v.y, kCrumb, acc);
      codes += 384;
    } else if (words == 8u << 4 * P) {
      const uint2 v = *reinterpret_cast<const uint2 *>(codes + me.lane * 8);
      add_one<P>(v.x, v.y, kCrumb, acc);
      codes += 256;
    } else {
      const uint32_t v = *reinterpret_cast<const uint32_t *>(codes + me.lane * 4);
      add_one<P>(v, v >> 1, kBit, acc);
      codes += 128;
    }
  }
  // Four units, most often equally wide: more to do between two branches.
  template <int Q>
  __device__ __forceinline__ void add_quad(const Lane &me, uint32_t all, const uint8_t *&codes, int (&acc)[N][4][4]) const {
    constexpr uint32_t kBit = 0x01010101u, kCrumb = 0x03030303u;
    const uint32_t words = all >> 8 * Q & 0xffu;
    if (words == 0xaa) {
      const uint4 v = *reinterpret_cast<const uint4 *>(codes + me.lane * 16), w = *reinterpret_cast<const uint4 *>(codes + 512 + me.lane * 16);
      add_two<2 * Q>(v.x, v.y, kCrumb, v.z, v.w, kCrumb, acc);
      add_two<2 * Q + 1>(w.x, w.y, kCrumb, w.z, w.w, kCrumb, acc);
      codes += 1024;
    } else if (words == 0x55) {
      const uint2 v = *reinterpret_cast<const uint2 *>(codes + me.lane * 8), w = *reinterpret_cast<const uint2 *>(codes + 256 + me.lane * 8);
      add_two<2 * Q>(v.x, v.x >> 1, kBit, v.y, v.y >> 1, kBit, acc);
      add_two<2 * Q + 1>(w.x, w.x >> 1, kBit, w.y, w.y >> 1, kBit, acc);
      codes += 512;
    } else if (words != 0) {
      add_pair<2 * Q>(me, all, codes, acc);
      add_pair<2 * Q + 1>(me, all, codes, acc);
    }
  }
  template <int... Q>
  __device__ __forceinline__ void add_quads(const Lane &me, uint32_t all, const uint8_t *&codes, int (&acc)[N][4][4], std::integer_sequence<int, Q...>) const {
    (add_quad<Q>(me, all, codes, acc), ...);
  }
  __device__ __forceinline__ void add_plane(const Lane &me, uint32_t all, const uint8_t *&codes, int (&acc)[N][4][4]) const {
    add_quads(me, all, codes, acc, std::make_integer_sequence<int, U / 4>());
  }
  __device__ __forceinline__ static void times_four(int (&acc)[N][4][4]) {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int i = 0; i < 16; i++) acc[n][i / 4][i % 4] *= 4;
  }
  template <class>
  __device__ __forceinline__ void logits(const Lane &me, const RowClass &, const uint8_t *codes, const float (&from)[N], float (&s)[N][8]) const {
    int acc[N][4][4] = {};
    if (halves) {
      add_plane(me, half_units(1), codes, acc);
      times_four(acc);
      add_plane(me, half_units(0), codes, acc);
    } else {
#pragma unroll 1
      for (int p = planes;; p--) {
        add_plane(me, p == 0 ? pairs[0] : p == 1 ? pairs[1] : pairs[2], codes, acc);
        if (p == 0) break;
        times_four(acc);
      }
    }
    column_logits(acc, unit, zero, from, s);
  }
};

// How a Code's keys are multiplied.
template <class Code, int U, int N>
struct KeysFor {
  using Type = RowKeys<U, N>;
};
template <int U, int N>
struct KeysFor<Planes, U, N> {
  using Type = ColumnKeys<U, N>;
};
// Shared memory of a warp for what keys are multiplied with.
template <class Keys>
struct ScratchOf {
  static constexpr uint32_t kBytes = 0;
};

// ---- values

// Sums of a tile go to the outputs: of a unit at once, or, where registers hold quotients, behind the last.
template <class Code, int U, int N>
struct ValueSums {
  const uint32_t (&b)[N][4];
  const float (&unit_of)[N];  // of a level
  Soft<U> (&soft)[N];
  int sum[Code::kNested ? N : 1][2 * U];  // by y

  __device__ __forceinline__ void add_output(int n, int y, int value) {
    soft[n].o[y] = fmaf(float(value), unit_of[n] * (1.0f / float(Code::weight(y))), soft[n].o[y]);
  }
  __device__ __forceinline__ void unit(int m, const uint32_t (&r)[8]) {
#pragma unroll
    for (int n = 0; n < N; n++) {
      int acc[4] = {};
      multiply_weights<Code::kUnsigned>(acc, r[0], r[1], r[2], r[3], b[n][0], b[n][1]);
      multiply_weights<Code::kUnsigned>(acc, r[4], r[5], r[6], r[7], b[n][2], b[n][3]);
      const int even = acc[0] * 256 + acc[1], odd = acc[2] * 256 + acc[3];
      if constexpr (Code::kNested)
        sum[n][2 * m] = even, sum[n][2 * m + 1] = odd;
      else
        add_output(n, 2 * m, even), add_output(n, 2 * m + 1, odd);
    }
  }
  __device__ __forceinline__ void add(int p, const uint32_t (&u)[8], const uint32_t (&v)[8]) { unit(2 * p, u), unit(2 * p + 1, v); }
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int n = 0; n < N && Code::kNested; n++)
#pragma unroll
      for (int y = 0; y < 2 * U; y++) add_output(n, y, Code::nested(y) ? sum[n][y] - Code::nested(y) * sum[n][y + 1] : sum[n][y]);
  }
};

// Weights p * scale of a tile.
template <class Code, int U>
__device__ __forceinline__ void weigh(const RowClass &rows, const float (&s)[8], const float (&z)[8], const float (&p)[8], float (&w)[8], Soft<U> &soft) {
#pragma unroll
  for (int x = 0; x < 8; x++) {
    w[x] = p[x] * s[x];
    if constexpr (Code::kAffine) soft.zero = fmaf(p[x], z[x], soft.zero);
    if constexpr (Code::kFromOne) soft.zero = fmaf(-rows.scale, w[x], soft.zero);
  }
}

template <class Code, int U, int N>
__device__ __forceinline__ void add_values(const Lane &me, const RowClass &rows, const uint8_t *codes, const uint32_t (&b)[N][4],
                                           float (&units)[N], Soft<U> (&soft)[N]) {
#pragma unroll
  for (int n = 0; n < N && !Code::kAffine; n++) units[n] *= rows.scale;
  ValueSums<Code, U, N> sums{b, units, soft};
  Code::template for_pairs<U>(codes, me.lane, rows.table, sums);
  sums.finish();
}

__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Weights as integers in bytes B and B + 1, of which each of a pair's lanes takes one byte, to columns of B: the matrix of tokens r and
// (row, byte) is transposed.
template <int B>
__device__ __forceinline__ void trade_weights(const uint32_t (&v)[8], uint32_t (&b)[4]) {
  uint32_t columns[4];
#pragma unroll
  for (int i = 0; i < 4; i++) columns[i] = transposed(permute(v[2 * i], v[2 * i + 1], 0x4051u + 0x1111u * B));  // high bytes, then low ones
#pragma unroll
  for (int i = 0; i < 4; i += 2) b[i] = permute(columns[i], columns[i + 1], 0x5410u), b[i + 1] = permute(columns[i], columns[i + 1], 0x7632u);
}

// Weights that are alike are not rounded alike (by x, a lane's tokens): beside one that is thousands of times as large, 63 roundings
// of small ones would add up to more than 16 bits allow.
constexpr float kMostWeight = 65528.0f;
__device__ __forceinline__ constexpr float rounding(int x) { return (float(x) + 0.5f) / 8.0f; }

// A weight as an integer in bytes 1 and 2: in units of `units` * 2^141 it is a float whose bits are that integer and eight binary places,
// since below 2^-125 all floats are as far from one another.  The weight is not above 2, so that `units` has all its bits.
constexpr float kLeast = 0x1p-141f;
__device__ __forceinline__ uint32_t round_weight(float w, float units, int x) { return __float_as_uint(fmaf(w, units, rounding(x) * kLeast)); }

// The largest of a row's weights, none of which is negative: the order of floats is that of their bits.
__device__ __forceinline__ float largest_weight(const float (&w)[8]) {
  const auto of = [](float a, float b, float c) { return __int_as_float(__vimax3_s32(__float_as_int(a), __float_as_int(b), __float_as_int(c))); };
  return lanes_max(of(of(w[0], w[1], w[2]), of(w[3], w[4], w[5]), of(w[6], w[7], 1e-30f)));
}

// Probabilities of a tile as columns of B; returns the value of one unit.
__device__ __forceinline__ float spread_weights(const float (&w)[8], uint32_t (&b)[4]) {
  const float top = largest_weight(w), units = kMostWeight * kLeast * reciprocal(top);
  uint32_t v[8];
#pragma unroll
  for (int x = 0; x < 8; x++) v[x] = round_weight(w[x], units, x);
  trade_weights<1>(v, b);
  return top * (1.0f / kMostWeight);
}

// Which tokens of a tile exist, and their positions: from a list, or one after the other.
struct Mask {
  const uint32_t *positions;  // of the tile's first token, or nullptr
  uint32_t position, count;
  __device__ __forceinline__ uint32_t position_of(uint32_t token) const { return positions ? positions[token] : position + token; }
};

// What a kernel has of its values from tile to tile besides outputs, and the values of one tile.
struct NoState {
  __device__ __forceinline__ void scale(int, float) {}
  template <class Rows, class Soft>
  __device__ __forceinline__ void finish(const Rows &, Soft &) {}
};
template <class Code, int U, int N>
struct StateFor {
  using Type = NoState;
};
// Of values with several scales a token, which are weighed when all rows' probabilities are there.
template <int U, int N>
struct KeptProbabilities {
  float p[N][8];
  uint32_t hidden = 0;  // tokens that do not exist: nothing was written there
  __device__ __forceinline__ void hide(int x) { hidden |= 1u << x; }
  __device__ __forceinline__ void weigh(int n, const float (&probability)[8], Soft<U> &) {
#pragma unroll
    for (int x = 0; x < 8; x++) p[n][x] = probability[x];
  }
};
template <class Code, int U, int N>
struct TileValues {
  const RowClass &rows;
  const uint8_t *codes;
  float h[8], z[8];
  uint32_t b[N][4];
  float units[N];

  __device__ __forceinline__ TileValues(const Lane &me, const RowClass &rows_of, const uint8_t *at) : rows(rows_of), codes(at) {
    const uint8_t *params = codes + Code::bytes(U);
    load_scales(params, me.r, Code::kAffine ? 2 : rows.param_bytes, h);
    if constexpr (Code::kAffine) load_scales(params + 2 * kTile, me.r, 2, z);
  }
  __device__ __forceinline__ void hide(int x) { h[x] = 0, z[x] = 0; }  // nothing was written there
  __device__ __forceinline__ void weigh(int n, const float (&p)[8], Soft<U> &soft) {
    float w[8];
    cuda::weigh<Code>(rows, h, z, p, w, soft);
    units[n] = spread_weights(w, b[n]);
  }
  __device__ __forceinline__ void finish(const Lane &me, NoState &, Soft<U> (&soft)[N]) { add_values<Code>(me, rows, codes, b, units, soft); }
};

// Not masked: every query sees the whole tile, and there is no soft cap.
template <class KeyCode, class ValueCode, class Keys, class State, int U, int N>
__device__ __forceinline__ void run_tile(const Lane &me, Keys &keys, const typename KeyCode::Rows &key, const typename ValueCode::Rows &value,
                                         const uint8_t *key_codes, const uint8_t *value_codes, float softcap, bool masked, const Mask &mask,
                                         const Visible (&sees)[N], State &state, Soft<U> (&soft)[N]) {
  float s[N][8], from[N];
#pragma unroll
  for (int n = 0; n < N; n++) from[n] = soft[n].m;
  keys.template logits<KeyCode>(me, key, key_codes, from, s);
  TileValues<ValueCode, U, N> values(me, value, value_codes);
  if (masked) {
    if (softcap > 0) {
#pragma unroll
      for (int n = 0; n < N; n++)
#pragma unroll
        for (int x = 0; x < 8; x++) s[n][x] = cap_logit(s[n][x] + from[n], softcap) - from[n];
    }
#pragma unroll
    for (int x = 0; x < 8; x++) {
      const uint32_t token = 8 * x + me.r;
      const bool exists = token < mask.count;
      if (!exists) values.hide(x);
      const uint32_t at = exists ? mask.position_of(token) : 0;
#pragma unroll
      for (int n = 0; n < N; n++)
        if (!exists || at < sees[n].begin || at >= sees[n].end) s[n][x] = -INFINITY;
    }
  }
#pragma unroll
  for (int n = 0; n < N; n++) {
    float p[8], sum = exponentials(s[n], p);
    if (__any_sync(~0u, soft[n].l + sum > kMostSum)) state.scale(n, lift_reference(soft[n], s[n], p, &sum));
    soft[n].l += sum;
    values.weigh(n, p, soft[n]);
  }
  values.finish(me, state, soft);
}

}  // namespace kvq::cuda
