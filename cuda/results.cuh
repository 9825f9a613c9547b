// From partial results to outputs: a warp adds what the warps of a block have of a row, or the splits of its sequence, in registers, and
// stores it.
#pragma once
#include "cuda/attend.cuh"

namespace kvq::cuda {

// What a warp has of a row: C channels in each lane.  A row that has seen nothing has l = 0.
template <int C>
struct RowResult {
  float m, l, o[C];
};

// The sum of n parts of a row, at most kMost, in their order.  state(i): m and l of one; load(i, x): a lane's channels of it.
template <int C, uint32_t kMost, class State, class Load>
__device__ __forceinline__ RowResult<C> add_parts(uint32_t lane, uint32_t n, State &&state, Load &&load) {
  constexpr uint32_t kEach = (kMost + 31) / 32, kAtOnce = C > 4 ? 64 / C : 16;
  static_assert(kEach <= 2);
  RowResult<C> sum{-1e30f, 0, {}};  // below every logit
  float weight[kEach] = {};         // of parts 32 * k + lane
  // Unrolled: registers are given away by the depth of loops, and the one over tiles needs them more.
#pragma unroll
  for (uint32_t first = 0; first < kMost; first += kAtOnce) {
    if (first >= n) break;
    float x[kAtOnce][C] = {};  // on their way while the weights are made
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; i++)
      if (first + i < n) load(first + i, x[i]);
    if (first == 0) {
      float2 each[kEach];
#pragma unroll
      for (uint32_t k = 0; k < kEach; k++) {
        each[k] = 32 * k + lane < n ? state(32 * k + lane) : make_float2(-INFINITY, 0);
        sum.m = fmaxf(sum.m, each[k].x);
      }
      for (int d = 16; d; d /= 2) sum.m = fmaxf(sum.m, __shfl_xor_sync(~0u, sum.m, d));
#pragma unroll
      for (uint32_t k = 0; k < kEach; k++) weight[k] = exp2_fast(each[k].x - sum.m), sum.l = fmaf(weight[k], each[k].y, sum.l);
      for (int d = 16; d; d /= 2) sum.l += __shfl_xor_sync(~0u, sum.l, d);
    }
    const float some = kEach == 1 || first < 32 ? weight[0] : weight[kEach - 1];
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; i++) {
      const float w = __shfl_sync(~0u, some, (first + i) % 32);  // 0 behind the last
#pragma unroll
      for (int j = 0; j < C; j++) sum.o[j] = fmaf(w, x[i][j], sum.o[j]);
    }
  }
  return sum;
}

// C floats, by the widest loads; aligned to 4 * C bytes, 16 at most.
template <int C, class Read>
__device__ __forceinline__ void read_floats(const float *at, float (&x)[C], Read &&read) {
  if constexpr (C == 1) {
    x[0] = read(at);
  } else if constexpr (C == 2) {
    const float2 v = read(reinterpret_cast<const float2 *>(at));
    x[0] = v.x, x[1] = v.y;
  } else {
#pragma unroll
    for (int j = 0; j < C; j += 4) {
      const float4 v = read(reinterpret_cast<const float4 *>(at + j));
      x[j] = v.x, x[j + 1] = v.y, x[j + 2] = v.z, x[j + 3] = v.w;
    }
  }
}
template <int C>
__device__ __forceinline__ void read_shared(const float *at, float (&x)[C]) {
  read_floats(at, x, [](auto *from) { return *from; });
}
// Of other blocks: by the L2 cache.
template <int C>
__device__ __forceinline__ void read_others(const float *at, float (&x)[C]) {
  read_floats(at, x, [](auto *from) { return __ldcg(from); });
}
template <int C>
__device__ __forceinline__ void write_for_others(const float (&x)[C], float *at) {
  if constexpr (C == 1) {
    __stcg(at, x[0]);
  } else if constexpr (C == 2) {
    __stcg(reinterpret_cast<float2 *>(at), make_float2(x[0], x[1]));
  } else {
#pragma unroll
    for (int j = 0; j < C; j += 4) __stcg(reinterpret_cast<float4 *>(at + j), make_float4(x[j], x[j + 1], x[j + 2], x[j + 3]));
  }
}

// Where a row goes, and what its sums are multiplied with; the row's logarithm is stored.
struct RowEnd {
  int64_t at;
  float factor;
};
__device__ __forceinline__ RowEnd end_row(const AttendArguments &a, const Item &item, uint32_t row, float m, float l, bool first_lane) {
  const uint32_t head = row_head(item, a, row), token = item.sequence->first_query + row_query(item, a, row);
  float scale = 1;
  if (l == 0) m = -INFINITY;
  if (a.sinks) {
    const float sink = a.sinks[head] * kLog2E, top = fmaxf(m, sink);
    scale = l == 0 ? 0.0f : exp2f(m - top), l = l * scale + exp2f(sink - top), m = top;
  }
  if (a.lse && first_lane) a.lse[size_t(token) * a.kv_heads * a.ratio + head] = l > 0 ? (m + log2f(l)) * kLn2 : -INFINITY;
  return {int64_t(token) * a.out.token_stride + int64_t(head) * a.out.head_stride, l > 0 ? scale / l : 0.0f};
}

template <int C>
__device__ __forceinline__ void store_outputs(const DeviceTensor &x, int64_t at, float factor, const float (&o)[C]) {
  const auto all = [&](auto *to, auto &&bits) {
#pragma unroll
    for (int j = 0; j < C; j++) to[at + j] = bits(o[j] * factor);
  };
  void *data = const_cast<void *>(x.data);
  switch (x.dtype) {
    case KVQ_DTYPE_F16:
      return all(static_cast<uint16_t *>(data), [](float v) { return narrow(v); });
    case KVQ_DTYPE_BF16:
      return all(static_cast<uint16_t *>(data), [](float v) { return uint16_t((__float_as_uint(v) + 0x7fffu + (__float_as_uint(v) >> 16 & 1u)) >> 16); });
    default:
      return all(static_cast<float *>(data), [](float v) { return v; });
  }
}

// Partial results of an item's rows in memory: [rows][dim], then m and l of each.
struct Partials {
  uint32_t rows, dim;
  __device__ __forceinline__ size_t size() const { return size_t(rows) * (dim + 2); }
  __device__ __forceinline__ size_t state(uint32_t row) const { return size_t(rows) * dim + 2 * row; }
};

// The sum of all splits of an item's row, for a lane's channels from one on.  have: does it have any?
template <int C>
__device__ __forceinline__ RowResult<C> add_splits(const Plan &plan, const AttendArguments &a, const Item &item, const Partials &partials, uint32_t lane,
                                                   uint32_t row, uint32_t channel, bool have) {
  const float *first = plan.partials + size_t(item.partial - item.split * a.kv_heads) * partials.size();
  const size_t step = size_t(a.kv_heads) * partials.size();
  return add_parts<C, kMaxSplits>(
      lane, item.sequence->splits, [&](uint32_t s) { return __ldcg(reinterpret_cast<const float2 *>(first + s * step + partials.state(row))); },
      [&](uint32_t s, float(&x)[C]) {
        if (have) read_others(first + s * step + row * partials.dim + channel, x);
      });
}

// How many came before.  What this block has written before its last barrier comes before the ticket, and what others wrote before
// theirs is there after the next barrier.
__device__ inline uint32_t take_ticket(uint32_t *tickets) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(tickets) : "memory");
  return before;
}

// Outputs of a block's item; all threads meet before it ends.  result(row, channel, have): complete sums of this block, by one warp, for its
// lanes' channels from `channel` on, if there are any.  With several splits they go to memory, and the block that comes last adds all of them.
// kDim: of values, 32 * C, or 0: any.
template <uint32_t kRowsOf, int C, uint32_t kDim, class Result>
__device__ __forceinline__ void finish_item(const Plan &plan, const AttendArguments &a, const Item &item, Result &&result) {
  static_assert(kDim == 0 || kDim == 32 * C);
  __shared__ bool is_last;
  const uint32_t dim = kDim ? kDim : a.dim_v, splits = item.sequence->splits, lane = threadIdx.x % 32;
  const Partials partials{kRowsOf, dim};
  const auto for_rows = [&](auto &&use) {
    for (uint32_t row = threadIdx.x / 32; row < item.rows; row += blockDim.x / 32)
      for (uint32_t first = 0; first < dim; first += 32 * C) use(row, first + C * lane, kDim || first + C * lane < dim);
  };
  const auto store = [&](uint32_t row, uint32_t channel, bool have, const RowResult<C> &r) {
    const RowEnd end = end_row(a, item, row, r.m, r.l, channel == 0);
    if (have) store_outputs(a.out, end.at + channel, end.factor, r.o);
  };
  for_rows([&](uint32_t row, uint32_t channel, bool have) {
    const RowResult<C> r = result(row, channel, have);
    if (splits == 1) return store(row, channel, have, r);
    float *mine = plan.partials + item.partial * partials.size();
    if (channel == 0) __stcg(reinterpret_cast<float2 *>(mine + partials.state(row)), make_float2(r.m, r.l));
    if (have) write_for_others(r.o, mine + row * dim + channel);
  });
  __syncthreads();
  if (splits == 1) return;
  if (threadIdx.x == 0) {
    is_last = take_ticket(plan.tickets + item.group) == splits - 1;
    if (is_last) plan.tickets[item.group] = 0;
  }
  __syncthreads();
  if (!is_last) return;
  for_rows([&](uint32_t row, uint32_t channel, bool have) { store(row, channel, have, add_splits<C>(plan, a, item, partials, lane, row, channel, have)); });
  __syncthreads();
}

}  // namespace kvq::cuda
