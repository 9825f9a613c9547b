// The kernel around the tiles of fused.cuh: items, raw pages, the ring, and the merge.
#pragma once
#include "cuda/fused.cuh"

namespace kvq::cuda {

constexpr uint32_t kMaxWarps = 16, kMaxStages = 4;

// Shared memory of a block besides the ring.
struct Queries {
  float raw[kRows * kFastDim];   // scaled to base 2, by channel
  float slot[kRows * kFastDim];  // as the keys are stored
  float center[kRows];
  float ml[2 * kRows];
  uint64_t barrier[kMaxWarps * kMaxStages];
};

__device__ inline void load_queries(const AttendArguments &a, const Item &item, const TensorFormat *key, Queries &s) {
  for (uint32_t i = threadIdx.x; i < kRows * kFastDim; i += blockDim.x)
    s.raw[i] = load_query(item, a, i / kFastDim, i % kFastDim) * (a.scale * kLog2E);
  __syncthreads();
  const uint32_t row = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (key && row < kRows) {
    float *q = s.slot + row * kFastDim;
    for (uint32_t j = lane; j < kFastDim; j += 32) q[j] = s.raw[row * kFastDim + key->channel[j]];
    if (key->rotate) rotate_warp(q, *key, key->region[0], false);
    float sum = 0;
    if (key->mu)
      for (uint32_t c = lane; c < kFastDim; c += 32) sum += s.raw[row * kFastDim + c] * half_to_float(key->mu[c]);
    for (int d = 16; d; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
    if (lane == 0) s.center[row] = sum;
  }
  __syncthreads();
}

// Four tokens of a raw page at once.  A lane's channels 8 * y + r are neighbours (raw_place).
__device__ inline void raw_tokens(const AttendArguments &a, const Item &item, const Lane &me, const PageEntry &page, uint32_t begin,
                                  const Visible &sees, const Queries &s, Soft &soft) {
  constexpr int kAtOnce = 4;
  const RawShape shape{a.kv_heads, kFastDim, kFastDim};
  const uint16_t *base = static_cast<const uint16_t *>(page.page);
  uint4 k[kAtOnce][2], v[kAtOnce][2];
#pragma unroll
  for (int i = 0; i < kAtOnce; i++) {
    const uint32_t row = page.first + min(begin + i, page.count - 1);
    const uint4 *key = reinterpret_cast<const uint4 *>(base + shape.row(item.head, 0, row) + me.r * 16);
    const uint4 *value = reinterpret_cast<const uint4 *>(base + shape.row(item.head, 1, row) + me.r * 16);
    k[i][0] = key[0], k[i][1] = key[1], v[i][0] = value[0], v[i][1] = value[1];
  }
  float logit[kAtOnce], top = soft.m;
#pragma unroll
  for (int i = 0; i < kAtOnce; i++) {
    const uint32_t w[8] = {k[i][0].x, k[i][0].y, k[i][0].z, k[i][0].w, k[i][1].x, k[i][1].y, k[i][1].z, k[i][1].w};
    float sum = 0;
#pragma unroll
    for (int y = 0; y < 8; y++) {
      const float2 x = __half22float2(*reinterpret_cast<const __half2 *>(&w[y]));
      const float *q = s.raw + me.t * kFastDim + 16 * y + me.r;
      sum = fmaf(x.x, q[0], fmaf(x.y, q[8], sum));
    }
    sum = lanes_sum(sum);
    if (a.softcap > 0) sum = a.softcap * kLog2E * tanhf(sum / (a.softcap * kLog2E));
    const uint32_t position = page.position + begin + i;
    logit[i] = begin + i < page.count && position >= sees.begin && position < sees.end ? sum : -INFINITY;
    top = fmaxf(top, logit[i]);
  }
  if (top > soft.m) move_reference(soft, top);
#pragma unroll
  for (int i = 0; i < kAtOnce; i++) {
    const float p = exp2_fast(logit[i] - soft.m);
    const uint32_t w[8] = {v[i][0].x, v[i][0].y, v[i][0].z, v[i][0].w, v[i][1].x, v[i][1].y, v[i][1].z, v[i][1].w};
    if (me.r == 0) soft.l += p;
#pragma unroll
    for (int y = 0; y < 8; y++) {
      const float2 x = __half22float2(*reinterpret_cast<const __half2 *>(&w[y]));
      soft.o[2 * y] = fmaf(p, x.x, soft.o[2 * y]);
      soft.o[2 * y + 1] = fmaf(p, x.y, soft.o[2 * y + 1]);
    }
  }
}

// Raw pages lie before and behind the packed ones; groups of four tokens go round all warps of all splits.
__device__ inline void run_raw(const Plan &plan, const AttendArguments &a, const Item &item, const Lane &me, uint32_t warp, uint32_t warps,
                               const Visible &sees, const Queries &s, Soft &soft) {
  const SequenceEntry &sequence = *item.sequence;
  const uint32_t mine = item.split * warps + warp, all = sequence.splits * warps;
  uint32_t next = mine;  // groups until this warp's
  for (uint32_t p = 0; p < sequence.pages; p++) {
    if (p == sequence.raw_front) p += sequence.packed;
    if (p >= sequence.pages) break;
    const PageEntry page = plan.pages[sequence.page_begin + p];
    const uint32_t groups = (page.count + 3) / 4;
    for (; next < groups; next += all) raw_tokens(a, item, me, page, 4 * next, sees, s, soft);
    next -= groups;
  }
}

// Outputs of raw pages to the order in which values are stored: section 3, with y and r in registers and lanes.
__device__ inline void rotate_outputs(const Lane &me, const TensorFormat &f, float (&o)[16]) {
  const uint64_t seed = sign_seed(f.seed, f.tensor, 0, f.region[0].rotation);
  const uint64_t signs[2] = {splitmix64(seed) >> me.r, splitmix64(seed ^ 1) >> me.r};
#pragma unroll
  for (int y = 0; y < 16; y++)
    if (signs[y / 8] >> (8 * (y % 8)) & 1u) o[y] = -o[y];
#pragma unroll
  for (int d = 4; d < 32; d *= 2)
#pragma unroll
    for (int y = 0; y < 16; y++) {
      const float other = __shfl_xor_sync(~0u, o[y], d);
      o[y] = me.lane & d ? other - o[y] : o[y] + other;
    }
#pragma unroll
  for (int d = 1; d < 16; d *= 2)
#pragma unroll
    for (int y = 0; y < 16; y++)
      if (!(y & d)) {
        const float s = o[y], t = o[y + d];
        o[y] = s + t, o[y + d] = s - t;
      }
#pragma unroll
  for (int y = 0; y < 16; y++) o[y] *= 0.0883883476f;  // 1 / sqrt(128)
}

// Descriptions of a warp's pages, 32 at a time in registers, the next 32 on their way.
struct PageStream {
  const PageEntry *list;
  uint32_t first, step, count, lane;
  uint64_t page, next_page;
  uint32_t tokens, next_tokens, position, next_position;
  __device__ void read(uint32_t i, uint64_t *at, uint32_t *n, uint32_t *where) const {
    if (i >= count) return;
    const PageEntry &entry = list[first + i * step];
    *at = reinterpret_cast<uint64_t>(entry.page), *n = entry.count, *where = entry.position;
  }
  __device__ void open() {
    read(lane, &page, &tokens, &position);
    read(32 + lane, &next_page, &next_tokens, &next_position);
  }
  // Page i, at most 31 ahead of the page that is worked on, `now`.
  __device__ const uint8_t *address(uint32_t i, uint32_t now) const {
    return reinterpret_cast<const uint8_t *>(__shfl_sync(~0u, i / 32 == now / 32 ? page : next_page, i % 32));
  }
  __device__ void advance(uint32_t now) {  // page `now` is done
    if (now % 32 != 31) return;
    page = next_page, tokens = next_tokens, position = next_position;
    read(now + 33 + lane, &next_page, &next_tokens, &next_position);
  }
};

template <class Keys, class Values>
__device__ void run_packed(const Plan &plan, const AttendArguments &a, const Item &item, const Lane &me, uint32_t warp, uint32_t warps,
                           uint32_t stages, uint32_t slot_bytes, uint8_t *ring, const Visible &sees, Queries &s, uint32_t *uses, Soft &soft) {
  const SequenceEntry &sequence = *item.sequence;
  const TensorFormat &key = sequence.tensors[0][2 * item.head], &value = sequence.tensors[0][2 * item.head + 1];
  const HeadBlob blob = sequence.blobs[0][item.head];
  const uint32_t begin = uint32_t(uint64_t(sequence.packed) * item.split / sequence.splits);
  const uint32_t end = uint32_t(uint64_t(sequence.packed) * (item.split + 1) / sequence.splits);
  const uint32_t count = end - begin > warp ? (end - begin - warp + warps - 1) / warps : 0;
  PageStream pages{plan.pages + sequence.page_begin + sequence.raw_front + begin, warp, warps, count, me.lane, 0, 0, 0, 0, 0, 0};
  pages.open();
  ring += warp * stages * slot_bytes;
  uint64_t *barrier = s.barrier + warp * kMaxStages;
  const auto fetch = [&](uint32_t i, uint32_t now) {
    const uint8_t *from = pages.address(i, now) + blob.offset;
    const uint32_t stage = i % stages;
    fetch_page(ring + stage * slot_bytes, from, blob.bytes, shared_address(barrier + stage), me.lane);
  };
  open_ring();
  for (uint32_t i = 0; i < stages && i < count; i++) fetch(i, 0);
  Keys keys;
  Values values;
  keys.begin_item(me, key, s.slot, s.center);
  values.begin_item(value);
  const uint32_t tiles = key.page_tokens / kTile, key_at = key.codes, value_at = value.codes, stride = key.tile_stride;
  const uint32_t tiles_per_group = Keys::kColumns ? key.group / kTile : 1, group_bytes = 2 * kFastDim * key.param_bytes;
#pragma unroll 1
  for (uint32_t i = 0; i < count; i++) {
    const uint32_t stage = i % stages;
    const uint32_t tokens = __shfl_sync(~0u, pages.tokens, i % 32), position = __shfl_sync(~0u, pages.position, i % 32);
    await_page(shared_address(barrier + stage), *uses >> stage & 1);
    *uses ^= 1u << stage;
    const uint8_t *page = ring + stage * slot_bytes;
    const bool partial = tokens < key.page_tokens || position < sees.begin || position + tokens > sees.end;
    const bool masked = __any_sync(~0u, partial);
#pragma unroll 1
    for (uint32_t tile = 0; tile < tiles; tile++) {
      const int64_t from = int64_t(position) + tile * kTile;
      Mask mask;
      if (masked) {
        if (tile * kTile >= tokens) break;
        mask.any = true;
        mask.begin = int(max(int64_t(sees.begin) - from, int64_t(0)));
        mask.end = int(min(min(int64_t(sees.end) - from, int64_t(tokens) - tile * kTile), int64_t(kTile)));
      }
      if (Keys::kColumns && tile % tiles_per_group == 0)
        keys.begin_page(me, key, s.slot, page + key.params + tile / tiles_per_group * group_bytes);
      run_tile(me, keys, values, key, page + key_at + tile * stride, page + value_at + tile * stride, a.softcap, mask, soft);
    }
    __syncwarp();
    if (i + stages < count) fetch(i + stages, i);
    pages.advance(i);
  }
}

// A block's warps to one result in shared memory: o [kRows][kFastDim], ml.
__device__ inline void merge_warps(const Lane &me, uint32_t warp, uint32_t warps, Soft &soft, float *memory, float *o, float *ml) {
  soft.l = lanes_sum(soft.l);
  soft.zero = lanes_sum(soft.zero);
  float *states = memory + warps * kRows * kFastDim;
  __syncthreads();  // the ring is free
  float *mine = memory + (warp * kRows + me.t) * kFastDim;
#pragma unroll
  for (int y = 0; y < 16; y++) mine[8 * y + me.r] = soft.o[y] + soft.zero;
  if (me.r == 0) states[(warp * kRows + me.t) * 2] = soft.m, states[(warp * kRows + me.t) * 2 + 1] = soft.l;
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < kRows * kFastDim; i += blockDim.x) {
    const uint32_t row = i / kFastDim;
    float m = kUnseen, l = 0, sum = 0;
    for (uint32_t w = 0; w < warps; w++) m = fmaxf(m, states[(w * kRows + row) * 2]);
    for (uint32_t w = 0; w < warps; w++) {
      const float scale = exp2_fast(states[(w * kRows + row) * 2] - m);
      l = fmaf(scale, states[(w * kRows + row) * 2 + 1], l);
      sum = fmaf(scale, memory[w * kRows * kFastDim + i], sum);
    }
    o[i] = sum;
    if (i % kFastDim == 0) ml[2 * row] = l > 0 ? m : -INFINITY, ml[2 * row + 1] = l;
  }
}

template <class Keys, class Values>
__global__ void __launch_bounds__(kMaxWarps * 32, 1) fused_kernel(const __grid_constant__ AttendArguments a, uint32_t stages, uint32_t slot_bytes) {
  extern __shared__ __align__(128) uint8_t ring[];
  __shared__ __align__(16) Queries s;
  const Plan plan = *a.plan;
  const uint32_t warp = threadIdx.x / 32, warps = blockDim.x / 32, lane = threadIdx.x % 32;
  const Lane me{lane, lane >> 2, lane & 3, lane >> 3, lane >> 2 & 1};
  if (lane < stages) open_barrier(shared_address(s.barrier + warp * kMaxStages + lane));
  __syncwarp();
  publish_barriers();
  __syncthreads();
  uint32_t uses = 0;  // phase of every stage
  for (uint32_t index = blockIdx.x; index < plan.items; index += gridDim.x) {
    const Item item = find_item(plan, a, index);
    const TensorFormat *formats = item.sequence->tensors[0];
    const TensorFormat *key = formats ? formats + 2 * item.head : nullptr, *value = key ? key + 1 : nullptr;
    load_queries(a, item, key, s);
    const Visible sees = visible(item, a, me.t);
    // Rows that do not exist see everything, so that they never ask for masks.
    const Visible packed_sees = me.t < item.rows ? sees : Visible{0, ~0u};
    Soft soft;
    run_raw(plan, a, item, me, warp, warps, sees, s, soft);
    if (value && value->rotate) rotate_outputs(me, *value, soft.o);
    if (key) run_packed<Keys, Values>(plan, a, item, me, warp, warps, stages, slot_bytes, ring, packed_sees, s, &uses, soft);
    merge_warps(me, warp, warps, soft, reinterpret_cast<float *>(ring), s.raw, s.ml);
    finish_item(plan, a, item, s.raw, s.ml, [&] {
      if (value && value->rotate && warp < kRows) rotate_warp(s.raw + warp * kFastDim, *value, value->region[0], true);
    });
  }
}

// Shapes of a block: many warps for long sequences, small blocks for many short ones.
template <class Keys, class Values>
cudaError_t launch_fused(const AttendArguments &a, const LayerLaunch &launch, uint32_t processors, cudaStream_t stream) {
  const auto kernel = fused_kernel<Keys, Values>;
  constexpr uint32_t kMost = 220 * 1024;
  const uint32_t slot = (launch.blob_bytes + 127) / 128 * 128, per_warp = 2 * slot;
  uint32_t warps = launch.items > processors + processors / 2 ? 4 : launch.pages_per_item >= 48 ? 16 : 8, stages = 2;
  while (warps > 4 && warps * per_warp > kMost) warps -= 4;
  if (warps == 8 && 3 * warps * slot <= kMost && launch.pages_per_item >= 24) stages = 3;
  const uint32_t merge = warps * kRows * (kFastDim + 2) * uint32_t(sizeof(float));
  const uint32_t bytes = max(warps * stages * slot, merge);
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes));
  if (error != cudaSuccess) return error;
  const uint32_t blocks = warps == 4 ? processors * min(4u, kMost / (bytes + 8192)) : processors;
  kernel<<<blocks, warps * 32, bytes, stream>>>(a, stages, slot);
  return cudaGetLastError();
}

}  // namespace kvq::cuda
