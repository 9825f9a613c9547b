// What the attention kernels share: an item of the plan, its queries, and the way from partial results to outputs.
//
// Logits are kept in base 2: a row's state is m (a reference), l = sum of 2^(logit - m) and o = sum of 2^(logit - m) * value.
#pragma once
#include "codec/row_rules.h"
#include "cuda/butterfly.cuh"
#include "cuda/enter.cuh"
#include "cuda/plan.h"
#include "kvq/kvq.h"
#include "util/fp.h"

namespace kvq::cuda {

constexpr float kLog2E = 1.44269504f, kLn2 = 0.693147181f;

struct Item {
  const SequenceEntry *sequence;
  uint32_t head, split, first_row, rows;  // rows that exist in it, of all (query, head) pairs of a sequence
  uint32_t partial, group;  // where its results go among those of other splits; its ticket
};

__device__ inline Item find_item(const Plan &plan, const AttendArguments &a, uint32_t index) {
  const ShareEntry &share = plan.shares[index / a.kv_heads];
  Item item;
  item.sequence = &share.sequence;
  item.head = index % a.kv_heads;
  item.split = share.split;
  item.first_row = share.block * plan.item_rows;
  item.rows = min(plan.item_rows, item.sequence->n_queries * a.ratio - item.first_row);
  item.partial = share.partial + item.head;
  item.group = share.group + item.head;
  return item;
}

__device__ inline uint32_t row_query(const Item &item, const AttendArguments &a, uint32_t row) { return (item.first_row + row) / a.ratio; }
__device__ inline uint32_t row_head(const Item &item, const AttendArguments &a, uint32_t row) {
  return item.head * a.ratio + (item.first_row + row) % a.ratio;
}

// Positions that a row sees: [begin, end).
struct Visible {
  uint32_t begin, end;
};
__device__ inline Visible visible(const Item &item, const AttendArguments &a, uint32_t row) {
  if (row >= item.rows) return {0, 0};
  const uint32_t end = item.sequence->length - item.sequence->n_queries + row_query(item, a, row) + 1;
  return {a.window && end > a.window ? end - a.window : 0, end};
}

// Have a line in the L2 cache soon.
__device__ inline void prefetch(const void *at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

// A fused kernel may begin before the one in front of it has ended.  What that writes is there after await_earlier(); before,
// a kernel reads what lay there when the step began: its tables, formats, packed pages.
__device__ inline void await_earlier() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// The next kernel may begin.  All that came before this one has ended: behind await_earlier(), or where it was launched the usual way.
__device__ inline void let_next_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Launches such a kernel.
template <class... Parameters, class... Arguments>
cudaError_t launch_early(void (*kernel)(Parameters...), uint32_t blocks, uint32_t threads, size_t bytes, const Processors &processors, cudaStream_t stream,
                         const Arguments &...arguments) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  const cudaLaunchConfig_t config{blocks, threads, bytes, stream, &early, processors.early ? 1u : 0u};
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

// The queries of an item.
__device__ inline void prefetch_queries(const Item &item, const AttendArguments &a) {
  const uint32_t size = a.q.dtype == KVQ_DTYPE_F64 ? 8 : a.q.dtype == KVQ_DTYPE_F32 ? 4 : 2, lines = (a.dim_k * size + 127) / 128;
  const uint32_t row = threadIdx.x / lines, line = threadIdx.x % lines;
  if (row >= item.rows) return;
  const int64_t at = int64_t(item.sequence->first_query + row_query(item, a, row)) * a.q.token_stride + int64_t(row_head(item, a, row)) * a.q.head_stride;
  prefetch(static_cast<const char *>(a.q.data) + at * size + line * 128);
}

// Elements of a query from a channel on, entered by rule 1.4; what is not finite is +0 and reported.
template <int N>
__device__ __forceinline__ void load_query(const Item &item, const AttendArguments &a, uint32_t row, uint32_t channel, float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) x[i] = 0;
  if (row >= item.rows) return;
  const uint32_t token = item.sequence->first_query + row_query(item, a, row), head = row_head(item, a, row);
  load_elements(a.q, int64_t(token) * a.q.token_stride + int64_t(head) * a.q.head_stride + channel, x);
  bool finite = true;
#pragma unroll
  for (int i = 0; i < N; i++) finite = finite && is_finite(x[i]);
  if (!finite) {
#pragma unroll
    for (int i = 0; i < N; i++) {
      if (is_finite(x[i])) continue;
      atomicMin(&a.plan->findings[item.sequence->index].bad, static_cast<unsigned long long>(bad_key(token, 0, head, channel + i)));
      x[i] = 0;
    }
  }
  if (a.q.dtype == KVQ_DTYPE_F16) return;
#pragma unroll
  for (int i = 0; i < N; i++) x[i] = hp(x[i]);
}
__device__ inline float load_query(const Item &item, const AttendArguments &a, uint32_t row, uint32_t channel) {
  float x[1];
  load_query(item, a, row, channel, x);
  return x[0];
}

__device__ inline float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Section 3 on `region` of a row in shared memory, by one warp.
__device__ inline void rotate_warp(float *y, const TensorFormat &f, const Region &region, bool inverse) {
  const uint32_t lane = threadIdx.x % 32, width = region.count, power = 1u << (31 - __clz(width));
  const uint32_t passes = power == width ? 1 : 2;
  const float c = power > 1 ? rsqrtf(float(power)) : 1.0f;
  y += region.first;
  for (uint32_t pass = 0; pass < passes; pass++) {
    const uint32_t q = inverse ? passes - 1 - pass : pass;
    const uint64_t seed = sign_seed(f.seed, f.tensor, q, region.rotation);
    const auto signs = [&] {
      __syncwarp();
      for (uint32_t i = lane; i < width; i += 32) y[i] *= splitmix64(seed ^ i / 64) >> i % 64 & 1u ? -1.0f : 1.0f;
    };
    if (!inverse) signs();
    float *part = y + (q ? width - power : 0);
    for (uint32_t d = 1; d < power; d *= 2) {
      __syncwarp();
      for (uint32_t i = lane; i < power / 2; i += 32) {
        float *at = part + i / d * 2 * d + i % d;
        const float s = at[0], t = at[d];
        at[0] = s + t, at[d] = s - t;
      }
    }
    __syncwarp();
    for (uint32_t i = lane; i < power; i += 32) part[i] *= c;
    if (inverse) signs();
  }
  __syncwarp();
}

// Signs of section 3 for channels C * lane + j of a row of 32 * C: bit j.
template <int C>
__device__ __forceinline__ uint32_t row_signs(uint32_t lane, const TensorFormat &f) {
  return uint32_t(splitmix64(sign_seed(f.seed, f.tensor, 0, f.region[0].rotation) ^ C * lane / 64) >> (C * lane % 64));
}
// Section 3 on such a row, by one warp; no barrier, no memory.
template <int C>
__device__ __forceinline__ void rotate_row(uint32_t lane, uint32_t signs, bool inverse, float (&x)[C]) {
  const auto sign = [&] {
#pragma unroll
    for (int j = 0; j < C; j++) x[j] = signs >> j & 1u ? -x[j] : x[j];
  };
  if (!inverse) sign();
  butterfly(x);
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2)
#pragma unroll
    for (int j = 0; j < C; j++) {
      const float other = __shfl_xor_sync(~0u, x[j], distance);
      x[j] = lane & distance ? other - x[j] : x[j] + other;
    }
  const float scale = rsqrtf(32.0f * C);
#pragma unroll
  for (int j = 0; j < C; j++) x[j] *= scale;
  if (inverse) sign();
}

__device__ inline void store_output(const DeviceTensor &x, int64_t at, float value) {
  void *data = const_cast<void *>(x.data);
  if (x.dtype == KVQ_DTYPE_F16)
    static_cast<uint16_t *>(data)[at] = float_to_half(value);
  else if (x.dtype == KVQ_DTYPE_BF16)
    static_cast<uint16_t *>(data)[at] = uint16_t((__float_as_uint(value) + 0x7fffu + (__float_as_uint(value) >> 16 & 1u)) >> 16);
  else
    static_cast<float *>(data)[at] = value;
}

// How much every split counts: weights [row][kMaxSplits], and m and l of the sum, from the splits' states.
template <uint32_t kRowsOf>
__device__ void weigh_splits(const float *states, size_t step, uint32_t splits, float *ml, float *weights) {
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (uint32_t row = warp; row < kRowsOf; row += blockDim.x / 32) {
    float m[kMaxSplits / 32], l[kMaxSplits / 32], top = -1e30f, sum = 0;  // top: below every logit
#pragma unroll
    for (uint32_t k = 0; k < kMaxSplits / 32; k++) {
      const uint32_t s = 32 * k + lane;
      const float2 state = s < splits ? __ldcg(reinterpret_cast<const float2 *>(states + s * step + 2 * row)) : make_float2(-INFINITY, 0);
      m[k] = state.x, l[k] = state.y, top = fmaxf(top, m[k]);
    }
    for (int d = 16; d; d /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
#pragma unroll
    for (uint32_t k = 0; k < kMaxSplits / 32; k++) {
      const float w = exp2_fast(m[k] - top);  // 0 for a split that saw nothing
      weights[row * kMaxSplits + 32 * k + lane] = w;
      sum = fmaf(w, l[k], sum);
    }
    for (int d = 16; d; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
    if (lane == 0) ml[2 * row] = sum > 0 ? top : -INFINITY, ml[2 * row + 1] = sum;
  }
}

// Sums of all splits of a group, in the order of splits, by the block that came last.  weights: [kRowsOf][kMaxSplits] in shared memory.
template <uint32_t kRowsOf>
__device__ __forceinline__ void merge_splits(const Plan &plan, const AttendArguments &a, const Item &item, uint32_t dim, float *o, float *ml, float *weights) {
  constexpr uint32_t kAtOnce = 16;
  const uint32_t splits = item.sequence->splits, size = kRowsOf * (dim + 2), pairs = kRowsOf * dim / 2;
  const float *all = plan.partials + size_t(item.partial - item.split * a.kv_heads) * size;
  const size_t step = size_t(a.kv_heads) * size;
  for (uint32_t first = 0; first < pairs; first += blockDim.x) {
    const uint32_t i = first + threadIdx.x;
    const float *w = weights + 2 * min(i, pairs - 1) / dim * kMaxSplits;
    float2 sum = make_float2(0, 0);
    for (uint32_t begin = 0; begin < splits; begin += kAtOnce) {
      float2 x[kAtOnce];  // on their way while the weights are made
#pragma unroll
      for (uint32_t s = 0; s < kAtOnce; s++)
        x[s] = i < pairs && begin + s < splits ? __ldcg(reinterpret_cast<const float2 *>(all + (begin + s) * step) + i) : make_float2(0, 0);
      if (first == 0 && begin == 0) {
        weigh_splits<kRowsOf>(all + kRowsOf * dim, step, splits, ml, weights);
        __syncthreads();
      }
#pragma unroll
      for (uint32_t s = 0; s < kAtOnce; s++)
        if (begin + s < splits) sum.x = fmaf(w[begin + s], x[s].x, sum.x), sum.y = fmaf(w[begin + s], x[s].y, sum.y);
    }
    if (i < pairs) o[2 * i] = sum.x, o[2 * i + 1] = sum.y;
  }
  __syncthreads();
}

// How many came before.  What this block has written before its last barrier comes before the ticket, and what others wrote before
// theirs is there after the next barrier.
__device__ inline uint32_t take_ticket(uint32_t *tickets) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(tickets) : "memory");
  return before;
}

// Results of a whole block of threads: o [rows][dim_v], ml [rows][2] in shared memory.  With several splits they go to memory, and
// the block that comes last adds all of them.  `final` brings o (complete sums) to channels.  kDim: of values, or 0: any.
template <uint32_t kRowsOf, uint32_t kDim, class Final>
__device__ void finish_item(const Plan &plan, const AttendArguments &a, const Item &item, float *o, float *ml, float *weights, Final &&final) {
  __shared__ uint32_t is_last;
  const uint32_t dim = kDim ? kDim : a.dim_v, splits = item.sequence->splits, size = kRowsOf * (dim + 2);
  __syncthreads();
  if (splits > 1) {
    float *mine = plan.partials + size_t(item.partial) * size;
    for (uint32_t i = threadIdx.x; i < kRowsOf * dim; i += blockDim.x) __stcg(mine + i, o[i]);
    if (threadIdx.x < 2 * kRowsOf) __stcg(mine + kRowsOf * dim + threadIdx.x, ml[threadIdx.x]);
    __syncthreads();
    if (threadIdx.x == 0) {
      is_last = take_ticket(plan.tickets + item.group) == splits - 1;
      if (is_last) plan.tickets[item.group] = 0;
    }
    __syncthreads();
    if (!is_last) return;
    merge_splits<kRowsOf>(plan, a, item, dim, o, ml, weights);
  }
  final();
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < item.rows * dim; i += blockDim.x) {
    const uint32_t row = i / dim, channel = i % dim, head = row_head(item, a, row);
    const uint32_t token = item.sequence->first_query + row_query(item, a, row);
    float m = ml[2 * row], l = ml[2 * row + 1], scale = 1;
    if (a.sinks) {
      const float sink = a.sinks[head] * kLog2E, top = fmaxf(m, sink);
      scale = m == -INFINITY ? 0.0f : exp2f(m - top);
      l = l * scale + exp2f(sink - top);
      m = top;
    }
    store_output(a.out, int64_t(token) * a.out.token_stride + int64_t(head) * a.out.head_stride + channel,
                 l > 0 ? o[i] * scale / l : 0.0f);
    if (a.lse && channel == 0) a.lse[size_t(token) * a.kv_heads * a.ratio + head] = l > 0 ? (m + log2f(l)) * kLn2 : -INFINITY;
  }
  __syncthreads();
}

}  // namespace kvq::cuda
