// Raw pages in the fused kernels: sinks, tails, and the pages of a cache in fp16.
//
// 16 tokens at a time by the tensor cores, in fp16 with sums in fp32.  Queries and weights, which are no fp16 numbers, are the columns
// of B in two parts each: rounded, and what is left; so the four rows of a row block fill its eight columns.  Fragments come straight
// from memory: the order in which the channels of a dot product come is free, so that a lane takes 8 neighbours of a key, and
// raw_place lets it take its channels 8 y + r of a value in one piece.
#pragma once
#include "cuda/fragments.cuh"
#include "cuda/soft.cuh"

namespace kvq::cuda {

constexpr uint32_t kRawGroup = 16;

// x as two fp16 numbers, the rounded one in the lower half.
__device__ __forceinline__ uint32_t two_halves(float x) {
  const __half high = __float2half_rn(x);
  const __half2 both = __halves2half2(high, __float2half_rn(x - __half2float(high)));
  return *reinterpret_cast<const uint32_t *>(&both);
}

// Where the eight halves `unit` of the rounded (part 0) or remaining (part 1) query of a row begin, in halves.  Parts are turned against
// each other: lanes read both at once, from different banks.
__device__ __forceinline__ uint32_t query_unit(uint32_t dim, uint32_t unit, uint32_t part) { return part * dim + 8 * (unit ^ 4 * part); }

// A row of queries to its two parts in the order of raw_place, in place; by one warp, whose lanes have the C channels x from C * lane
// on.  Returns what a product with it is to be multiplied by: powers of two keep the row within the range of fp16.
template <int C>
__device__ __forceinline__ float split_query(uint32_t lane, const float (&x)[C], float *row) {
  constexpr uint32_t kDim = 32 * C;
  float top = 0;
#pragma unroll
  for (int j = 0; j < C; j++) top = fmaxf(top, fabsf(x[j]));
  for (int d = 16; d; d /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
  const uint32_t exponent = max(__float_as_uint(top) >> 23, 15u);
  const float scale = __uint_as_float((268 - exponent) << 23);  // the largest to [2^14, 2^15)
  uint16_t *halves = reinterpret_cast<uint16_t *>(row);
  __syncwarp();
#pragma unroll
  for (int j = 0; j < C; j++) {
    const uint32_t place = raw_place(kDim, C * lane + j), both = two_halves(x[j] * scale);
    halves[query_unit(kDim, place / 8, 0) + place % 8] = uint16_t(both);
    halves[query_unit(kDim, place / 8, 1) + place % 8] = uint16_t(both >> 16);
  }
  return __uint_as_float((exponent - 14) << 23);
}

// Tokens [begin, begin + 16) of a page; those that do not exist are hidden.  queries: the parts [row][2 * dim]; units: of split_query.
template <int U, int N>
__device__ __forceinline__ void raw_group(const AttendArguments &a, const Item &item, const Lane &me, const PageEntry &page, uint32_t begin,
                                          const Visible (&sees)[N], const float *queries, const float *units, Soft<U> (&soft)[N]) {
  constexpr uint32_t kDim = 16 * U;
  constexpr float kWeight = 1024;  // so that small weights are no subnormal numbers
  const RawShape shape{a.kv_heads, kDim, kDim};
  const uint16_t *base = static_cast<const uint16_t *>(page.page);
  const auto row = [&](uint32_t i) { return page.first + min(begin + i, page.count - 1); };
  uint4 keys[2][U / 2], values[4][U / 4];  // tokens r, r + 8; 2 t, 2 t + 1, 2 t + 8, 2 t + 9
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const uint4 *at = reinterpret_cast<const uint4 *>(base + shape.row(item.head, 0, row(me.r + 8 * h))) + me.t;
#pragma unroll
    for (int i = 0; i < U / 2; i++) keys[h][i] = __ldg(at + 4 * i);
  }
#pragma unroll
  for (int h = 0; h < 4; h++) {
    const uint4 *at = reinterpret_cast<const uint4 *>(base + shape.row(item.head, 1, row(2 * me.t + h % 2 + h / 2 * 8)) + me.r * (2 * U));
#pragma unroll
    for (int i = 0; i < U / 4; i++) values[h][i] = __ldg(at + i);
  }
  uint32_t weights[N][2];
#pragma unroll
  for (int n = 0; n < N; n++) {
    float c[4] = {};
    const uint16_t *query = reinterpret_cast<const uint16_t *>(queries + (4 * n + me.r / 2) * kDim);
#pragma unroll
    for (int i = 0; i < U / 2; i++) {
      const uint4 b = *reinterpret_cast<const uint4 *>(query + query_unit(kDim, 4 * i + me.t, me.r % 2));
      multiply_halves(c, {keys[0][i].x, keys[1][i].x, keys[0][i].y, keys[1][i].y}, b.x, b.y);
      multiply_halves(c, {keys[0][i].z, keys[1][i].z, keys[0][i].w, keys[1][i].w}, b.z, b.w);
    }
    float logit[2], top = soft[n].m;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const uint32_t token = begin + me.r + 8 * h, position = page.position + token;
      logit[h] = (c[2 * h] + c[2 * h + 1]) * units[4 * n + me.t];
      if (a.softcap > 0) logit[h] = cap_logit(logit[h], a.softcap);
      if (token >= page.count || position < sees[n].begin || position >= sees[n].end) logit[h] = -INFINITY;
      top = fmaxf(top, logit[h]);
    }
    top = lanes_max(top);
    if (__any_sync(~0u, top > soft[n].m)) move_reference(soft[n], top);
    uint32_t mine[2], all[4];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float p = exp2_fast(logit[h] - soft[n].m);
      soft[n].l += p;
      mine[h] = two_halves(p * kWeight);
    }
    const uint32_t from = 8 * me.t + me.r / 2;  // the owner of token 2 t of the column's row; the owner of the next token is 4 lanes on
#pragma unroll
    for (int h = 0; h < 4; h++) all[h] = __shfl_sync(~0u, mine[h / 2], from + h % 2 * 4);
    const uint32_t part = me.r % 2 ? 0x7632u : 0x5410u;
    weights[n][0] = permute(all[0], all[1], part), weights[n][1] = permute(all[2], all[3], part);
  }
#pragma unroll
  for (int y = 0; y < U; y++) {  // word y: channels 8 (2 y) + r and 8 (2 y + 1) + r
    uint32_t word[4];
#pragma unroll
    for (int h = 0; h < 4; h++) {
      const uint4 &v = values[h][y / 4];
      word[h] = y % 4 == 0 ? v.x : y % 4 == 1 ? v.y : y % 4 == 2 ? v.z : v.w;
    }
    const uint32_t pairs[4] = {permute(word[0], word[1], 0x5410u), permute(word[0], word[1], 0x7632u), permute(word[2], word[3], 0x5410u),
                               permute(word[2], word[3], 0x7632u)};
#pragma unroll
    for (int n = 0; n < N; n++) {
      float c[4] = {};
      multiply_halves(c, pairs, weights[n][0], weights[n][1]);
      soft[n].o[2 * y] = fmaf(c[0] + c[1], 1 / kWeight, soft[n].o[2 * y]);
      soft[n].o[2 * y + 1] = fmaf(c[2] + c[3], 1 / kWeight, soft[n].o[2 * y + 1]);
    }
  }
}

// Groups of raw tokens go round all warps of all splits: those of the pages before and behind the table's, then, where the recipe
// packs to fp16, those of the table, which may be many: nobody walks along pages of others.  (As a function of its own, not inlined,
// it takes 5 us more of a short context: its state goes through local memory.)
template <int U, int N>
__device__ __forceinline__ void run_raw(const Plan &plan, const AttendArguments &a, const Item &item, const Lane &me, uint32_t warp, uint32_t warps,
                                        const Visible (&sees)[N], const float *queries, const float *units, Soft<U> (&soft)[N]) {
  constexpr uint32_t kGroups = kRawTokens / kRawGroup;
  const SequenceEntry &sequence = *item.sequence;
  const uint32_t all = sequence.splits * warps, listed = sequence.packed ? 0 : sequence.listed, others = sequence.pages - sequence.listed;
  uint32_t next = item.split * warps + warp;  // groups until this warp's
  for (uint32_t p = 0; p < others; p++) {
    const PageEntry page = plan.pages[sequence.raw_begin + p];
    const uint32_t groups = (page.count + kRawGroup - 1) / kRawGroup;
    for (; next < groups; next += all) raw_group<U, N>(a, item, me, page, kRawGroup * next, sees, queries, units, soft);
    next -= groups;
  }
  for (next %= all; next < listed * kGroups; next += all) {
    const PageEntry page = sequence.table[next / kGroups];
    const uint32_t begin = next % kGroups * kRawGroup;
    if (begin < page.count) raw_group<U, N>(a, item, me, page, begin, sees, queries, units, soft);
  }
}

}  // namespace kvq::cuda
