// Attention for any codec and dimension: tiles of 16 tokens are decoded to shared memory.  The road for what the fused kernels do
// not take; it is exact to fp32 and makes no attempt to be fast.
#include <algorithm>

#include "cuda/attend.cuh"
#include "cuda/attend_fast.h"
#include "cuda/decode.cuh"
#include "cuda/results.cuh"

namespace kvq::cuda {
namespace {

constexpr uint32_t kTokens = 16, kThreads = 128, kDomains = 3;  // two classes and raw pages

// Shared memory of a block.
struct Shared {
  float *q;      // [domain][row][dim_k], scaled; classes in slots
  float *o;      // [domain][row][dim_v]
  float *tile;   // [token][dim]
  float *logit;  // [row][token], then probabilities
  float *ml;     // [row][2]
  float *alpha;  // [row]
  float *center; // [domain][row]: q . mu
};

__device__ Shared carve(float *memory, const AttendArguments &a) {
  Shared s;
  s.q = memory;
  s.o = s.q + kDomains * kRows * a.dim_k;
  s.tile = s.o + kDomains * kRows * a.dim_v;
  s.logit = s.tile + kTokens * max(a.dim_k, a.dim_v);
  s.ml = s.logit + kRows * kTokens;
  s.alpha = s.ml + 2 * kRows;
  s.center = s.alpha + kRows;
  return s;
}

__device__ const TensorFormat *format_of(const Item &item, uint32_t kind, uint32_t tensor) {
  const TensorFormat *all = kind == kRawKind ? nullptr : item.sequence->tensors[kind];
  return all ? all + 2 * item.head + tensor : nullptr;
}

__device__ void load_queries(const AttendArguments &a, const Item &item, const Shared &s) {
  const float scale = a.scale;
  float *raw = s.q + kRawKind * kRows * a.dim_k;
  for (uint32_t i = threadIdx.x; i < kRows * a.dim_k; i += blockDim.x) raw[i] = load_query(item, a, i / a.dim_k, i % a.dim_k) * scale;
  for (uint32_t i = threadIdx.x; i < kDomains * kRows; i += blockDim.x) s.center[i] = 0;
  __syncthreads();
  const uint32_t row = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (uint32_t kind = 0; kind < 2; kind++) {
    const TensorFormat *f = format_of(item, kind, 0);
    if (!f) continue;
    float *q = s.q + (kind * kRows + row) * a.dim_k;
    const bool by_channel = f->family == Family::polar;
    for (uint32_t j = lane; j < a.dim_k; j += 32) q[j] = raw[row * a.dim_k + f->channel[j]];
    __syncwarp();
    for (uint32_t r = 0; r < f->regions && f->rotate && !by_channel; r++) rotate_warp(q, *f, f->region[r], false);
    if (!f->mu) continue;
    float sum = 0;
    for (uint32_t c = lane; c < a.dim_k; c += 32) sum += raw[row * a.dim_k + c] * half_to_float(f->mu[c]);
    for (int d = 16; d; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
    if (lane == 0) s.center[kind * kRows + row] = sum;
  }
  __syncthreads();
}

// Rows [row, row + count) of a page as floats.
__device__ void decode_tile(const AttendArguments &a, const Item &item, const PageEntry &page, uint32_t row, uint32_t count,
                            uint32_t tensor, float *tile) {
  decode_rows({page.page, format_of(item, page.kind, tensor), item.head, tensor}, {a.kv_heads, a.dim_k, a.dim_v}, row, count, tile,
              tensor ? a.dim_v : a.dim_k);
}

__device__ void compute_logits(const AttendArguments &a, const Item &item, const Shared &s, uint32_t kind, uint32_t count) {
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const float *q = s.q + kind * kRows * a.dim_k;
  for (uint32_t t = warp; t < count; t += kThreads / 32) {
    float sum[kRows] = {};
    for (uint32_t c = lane; c < a.dim_k; c += 32)
      for (uint32_t r = 0; r < kRows; r++) sum[r] = fmaf(q[r * a.dim_k + c], s.tile[t * a.dim_k + c], sum[r]);
    for (uint32_t r = 0; r < kRows; r++) {
      for (int d = 16; d; d /= 2) sum[r] += __shfl_xor_sync(~0u, sum[r], d);
      float x = sum[r] + s.center[kind * kRows + r];
      if (a.softcap > 0) x = a.softcap * tanhf(x / a.softcap);
      if (lane == 0) s.logit[r * kTokens + t] = x * kLog2E;
    }
  }
}

// Masks, then probabilities against the running maximum.
__device__ void soften(const AttendArguments &a, const Item &item, const Shared &s, const PageEntry &page,
                       uint32_t done, uint32_t count) {
  const uint32_t row = threadIdx.x;
  if (row >= kRows) return;
  const Visible sees = visible(item, a, row);
  float *logit = s.logit + row * kTokens, top = s.ml[2 * row];
  for (uint32_t t = 0; t < count; t++) {
    const uint32_t position = page.positions ? item.sequence->positions[page.positions - 1 + done + t] : page.position + done + t;
    if (position < sees.begin || position >= sees.end) logit[t] = -INFINITY;
    top = fmaxf(top, logit[t]);
  }
  const float alpha = s.ml[2 * row] == -INFINITY ? 0.0f : exp2f(s.ml[2 * row] - top);
  float l = s.ml[2 * row + 1] * alpha;
  for (uint32_t t = 0; t < count; t++) {
    logit[t] = logit[t] == -INFINITY ? 0.0f : exp2f(logit[t] - top);
    l += logit[t];
  }
  s.alpha[row] = alpha;
  s.ml[2 * row] = top, s.ml[2 * row + 1] = l;
}

__device__ void accumulate(const AttendArguments &a, const Shared &s, uint32_t kind, uint32_t count) {
  for (uint32_t i = threadIdx.x; i < kDomains * kRows * a.dim_v; i += blockDim.x) {
    const uint32_t row = i / a.dim_v % kRows, c = i % a.dim_v;
    float sum = s.o[i] * s.alpha[row];
    if (i / a.dim_v / kRows == kind)
      for (uint32_t t = 0; t < count; t++) {
        const float p = s.logit[row * kTokens + t];
        if (p > 0) sum = fmaf(p, s.tile[t * a.dim_v + c], sum);
      }
    s.o[i] = sum;
  }
}

__device__ void run_pages(const Plan &plan, const AttendArguments &a, const Item &item, const Shared &s) {
  const SequenceEntry &sequence = *item.sequence;
  const uint32_t begin = uint32_t(uint64_t(sequence.pages) * item.split / sequence.splits);
  const uint32_t end = uint32_t(uint64_t(sequence.pages) * (item.split + 1) / sequence.splits);
  for (uint32_t p = begin; p < end; p++) {
    const PageEntry page = page_of(plan.pages, sequence, p);
    for (uint32_t done = 0; done < page.count; done += kTokens) {
      const uint32_t count = min(kTokens, page.count - done);
      decode_tile(a, item, page, page.first + done, count, 0, s.tile);
      __syncthreads();
      compute_logits(a, item, s, page.kind, count);
      __syncthreads();
      soften(a, item, s, page, done, count);
      decode_tile(a, item, page, page.first + done, count, 1, s.tile);
      __syncthreads();
      accumulate(a, s, page.kind, count);
      __syncthreads();
    }
  }
}

// Sums of classes back to channels, into the raw domain: unrotated, in the order of channels.
__device__ void join_domains(const AttendArguments &a, const Item &item, const Shared &s) {
  const uint32_t row = threadIdx.x / 32, lane = threadIdx.x % 32;
  float *out = s.o + (kRawKind * kRows + row) * a.dim_v;
  for (uint32_t kind = 0; kind < 2; kind++) {
    const TensorFormat *f = format_of(item, kind, 1);
    if (!f) continue;
    float *o = s.o + (kind * kRows + row) * a.dim_v;
    for (uint32_t r = 0; r < f->regions && f->rotate; r++) rotate_warp(o, *f, f->region[r], true);
    __syncwarp();
    for (uint32_t j = lane; j < a.dim_v; j += 32) out[f->channel[j]] += o[j];
    __syncwarp();
  }
}

__global__ void __launch_bounds__(kThreads) general_kernel(const __grid_constant__ AttendArguments a) {
  extern __shared__ float memory[];
  const Plan plan = *a.plan;
  const Shared s = carve(memory, a);
  for (uint32_t index = blockIdx.x; index < plan.items; index += gridDim.x) {
    const Item item = find_item(plan, a, index);
    for (uint32_t i = threadIdx.x; i < kDomains * kRows * a.dim_v; i += blockDim.x) s.o[i] = 0;
    if (threadIdx.x < kRows) s.ml[2 * threadIdx.x] = -INFINITY, s.ml[2 * threadIdx.x + 1] = 0;
    load_queries(a, item, s);
    run_pages(plan, a, item, s);
    join_domains(a, item, s);
    __syncthreads();
    finish_item<kRows, 1, 0>(plan, a, item, [&](uint32_t row, uint32_t channel, bool have) {
      return RowResult<1>{s.ml[2 * row], s.ml[2 * row + 1], {have ? s.o[(kRawKind * kRows + row) * a.dim_v + channel] : 0.0f}};
    });
  }
}

__global__ void append_kernel(RawShape shape, DeviceTensor k, DeviceTensor v, const Plan *plan) {
  let_next_begin();
  const uint32_t token = blockIdx.x, head = blockIdx.y;
  const RowEntry to = plan->rows[token];
  Findings *findings = plan->findings + to.sequence;
  uint16_t *page = static_cast<uint16_t *>(to.page);
  for (uint32_t i = threadIdx.x; i < shape.dim_k + shape.dim_v; i += blockDim.x) {
    const uint32_t tensor = i >= shape.dim_k, channel = tensor ? i - shape.dim_k : i, dim = tensor ? shape.dim_v : shape.dim_k;
    DeviceTensor x = k;
    if (tensor) x = v;
    const float value = load_element(x, int64_t(token) * x.token_stride + int64_t(head) * x.head_stride + channel);
    page[shape.row(head, tensor, to.row) + raw_place(dim, channel)] = enter(value, bad_key(token, tensor, head, channel), findings);
  }
}

__global__ void sinks_kernel(const __grid_constant__ Sinks sinks, float *to) {
  for (uint32_t i = threadIdx.x; i < sinks.count; i += blockDim.x) to[i] = sinks.value[i];
}

}  // namespace

cudaError_t append_rows(const RawShape &shape, const DeviceTensor &k, const DeviceTensor &v, const Plan *plan, uint32_t tokens,
                        cudaStream_t stream) {
  if (tokens == 0) return cudaSuccess;
  append_kernel<<<dim3(tokens, shape.kv_heads), 128, 0, stream>>>(shape, k, v, plan);
  return cudaGetLastError();
}

size_t general_shared_bytes(uint32_t dim_k, uint32_t dim_v) {
  return sizeof(float) * (kDomains * kRows * (dim_k + dim_v) + kTokens * std::max(dim_k, dim_v) + kRows * kTokens + 3 * kRows + kDomains * kRows);
}

cudaError_t prepare_general(uint32_t shared_bytes) { return allow_shared(reinterpret_cast<const void *>(general_kernel), shared_bytes); }

cudaError_t store_sinks(const Sinks &sinks, float *to, cudaStream_t stream) {
  sinks_kernel<<<1, 128, 0, stream>>>(sinks, to);
  return cudaGetLastError();
}

cudaError_t attend_general(const AttendArguments &arguments, uint32_t processors, cudaStream_t stream) {
  general_kernel<<<processors * 4, kThreads, general_shared_bytes(arguments.dim_k, arguments.dim_v), stream>>>(arguments);
  return cudaGetLastError();
}

}  // namespace kvq::cuda
