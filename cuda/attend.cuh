// What the attention kernels share: an item of the plan, its queries, and rotations; results.cuh has the way to outputs.
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

}  // namespace kvq::cuda
