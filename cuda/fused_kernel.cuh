// The kernel around the tiles of fused.cuh: items, raw pages, the ring, and the merge.
#pragma once
#include "cuda/fused.cuh"

namespace kvq::cuda {

constexpr uint32_t kMaxWarps = 16, kStages = 2;

// Shared memory of a block besides the ring.
struct Queries {
  alignas(16) float raw[kRows * kFastDim];   // scaled to base 2, by channel
  alignas(16) float slot[kRows * kFastDim];  // as the keys are stored
  float center[kRows];
  float ml[2 * kRows];
  uint64_t barrier[kMaxWarps * kStages];
};

// A warp a row; the others wait.
__device__ inline void load_queries(const AttendArguments &a, const Item &item, const TensorFormat *key, Queries &s) {
  const uint32_t row = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (row < kRows) {
    float *raw = s.raw + row * kFastDim, *slot = s.slot + row * kFastDim;
    float x[4], sum = 0;
#pragma unroll
    for (int j = 0; j < 4; j++) x[j] = load_query(item, a, row, 4 * lane + j) * (a.scale * kLog2E);
    *reinterpret_cast<float4 *>(raw + 4 * lane) = make_float4(x[0], x[1], x[2], x[3]);
    if (key) {
      if (key->mu)
        for (int j = 0; j < 4; j++) sum += x[j] * half_to_float(key->mu[4 * lane + j]);
      for (int d = 16; d; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
      if (lane == 0) s.center[row] = sum;
      if (key->rotate) {  // rows of one class: slots are channels
        rotate_row(lane, *key, false, x);
        *reinterpret_cast<float4 *>(slot + 4 * lane) = make_float4(x[0], x[1], x[2], x[3]);
      } else {
        __syncwarp();
        for (uint32_t j = lane; j < kFastDim; j += 32) slot[j] = raw[key->channel[j]];
      }
    }
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

// A warp's walk over the packed pages of an item; opened before the queries are there, so that pages are on their way.  Addresses
// are read 32 at a time into the lanes of the warp, the next 32 ahead of time.
struct Walk {
  const PageEntry *list;  // of page 0; the next one is `step` entries on
  uint32_t step, count, offset, bytes, slot_bytes, ring, barrier;  // the last two: shared addresses
  uint32_t phases;        // bit s: of stage s
  uint64_t page, next_page;

  __device__ void read(uint32_t i, uint64_t *at) const {
    if (i < count) *at = reinterpret_cast<uint64_t>(list[i * step].page);
  }
  // Page i, at most 31 ahead of the page that is worked on, `now`.
  __device__ void fetch(uint32_t i, uint32_t now, uint32_t lane) {
    const uint64_t at = __shfl_sync(~0u, i / 32 == now / 32 ? page : next_page, i % 32);
    fetch_page(ring + i % kStages * slot_bytes, reinterpret_cast<const uint8_t *>(at) + offset, bytes, barrier + i % kStages * 8, lane);
  }
  __device__ void advance(uint32_t now, uint32_t lane) {  // page `now` is done
    if (now % 32 != 31) return;
    page = next_page;
    read(now + 33 + lane, &next_page);
  }
};

__device__ inline Walk open_walk(const Plan &plan, const Item &item, const Lane &me, uint32_t warp, uint32_t warps, uint32_t slot_bytes,
                                 const uint8_t *ring, Queries &s, uint32_t phases) {
  const SequenceEntry &sequence = *item.sequence;
  const HeadBlob blob = sequence.blobs[0][item.head];
  const uint32_t begin = uint32_t(uint64_t(sequence.packed) * item.split / sequence.splits);
  const uint32_t end = uint32_t(uint64_t(sequence.packed) * (item.split + 1) / sequence.splits);
  Walk walk;
  walk.list = plan.pages + sequence.page_begin + sequence.raw_front + begin + warp;
  walk.step = warps;
  walk.count = end - begin > warp ? (end - begin - warp + warps - 1) / warps : 0;
  walk.offset = blob.offset, walk.bytes = blob.bytes, walk.slot_bytes = slot_bytes;
  walk.ring = shared_address(ring) + warp * kStages * slot_bytes;
  walk.barrier = shared_address(s.barrier + warp * kStages);
  walk.phases = phases;
  walk.page = walk.next_page = 0;
  walk.read(me.lane, &walk.page);
  walk.read(32 + me.lane, &walk.next_page);
  open_ring();
  for (uint32_t i = 0; i < kStages && i < walk.count; i++) walk.fetch(i, 0, me.lane);
  return walk;
}

template <class Keys, class Values>
__device__ __forceinline__ void run_page(const Lane &me, Keys &keys, const Values &values, const TensorFormat &key, const TensorFormat &value,
                                         const uint8_t *page, bool plain, const PageEntry &entry, float softcap, const Visible &sees,
                                         const float *q, Soft &soft) {
  uint32_t tokens = key.page_tokens, position = 0;
  bool masked = false;
  if (!plain) {
    tokens = entry.count, position = entry.position;
    masked = __any_sync(~0u, tokens < key.page_tokens || position < sees.begin || position + tokens > sees.end);
  }
  const uint8_t *key_codes = page + key.codes, *value_codes = page + value.codes, *params = page + key.params;
#pragma unroll 1
  for (uint32_t done = 0; done < tokens; done += kTile) {
    if (Keys::kColumns && (done & (key.group - 1)) == 0) {  // a group is a power of two of tiles
      keys.begin_page(me, key, q, params);
      params += 2 * kFastDim * key.param_bytes;
    }
    if (!masked) {
      run_tile<false>(me, keys, values, key, key_codes, value_codes, softcap, Mask{}, soft);
    } else {
      const int64_t from = int64_t(position) + done;
      const Mask mask{int(max(int64_t(sees.begin) - from, int64_t(0))),
                      int(min(min(int64_t(sees.end) - from, int64_t(tokens) - done), int64_t(kTile)))};
      run_tile<true>(me, keys, values, key, key_codes, value_codes, softcap, mask, soft);
    }
    key_codes += key.tile_stride, value_codes += key.tile_stride;
  }
}

template <class Keys, class Values>
__device__ void run_packed(const AttendArguments &a, const Item &item, const Lane &me, Walk &walk, const Visible &sees, Queries &s,
                           Soft &soft) {
  const TensorFormat &key = item.sequence->tensors[0][2 * item.head], &value = item.sequence->tensors[0][2 * item.head + 1];
  Keys keys;
  Values values;
  keys.begin_item(me, key, s.slot, s.center);
  values.begin_item(value);
  const bool plain = item.sequence->plain && a.window == 0;
  const uint8_t *ring = static_cast<const uint8_t *>(__cvta_shared_to_generic(walk.ring));
#pragma unroll 1
  for (uint32_t i = 0; i < walk.count; i++) {
    const uint32_t stage = i % kStages;
    await_page(walk.barrier + 8 * stage, walk.phases >> stage & 1);
    walk.phases ^= 1u << stage;
    run_page(me, keys, values, key, value, ring + stage * walk.slot_bytes, plain, walk.list[i * walk.step], a.softcap, sees, s.slot, soft);
    __syncwarp();
    if (i + kStages < walk.count) walk.fetch(i + kStages, i, me.lane);
    walk.advance(i, me.lane);
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
__global__ void __launch_bounds__(kMaxWarps * 32, 1) fused_kernel(const __grid_constant__ AttendArguments a, uint32_t slot_bytes) {
  extern __shared__ __align__(128) uint8_t ring[];
  __shared__ __align__(16) Queries s;
  const Plan plan = *a.plan;
  const uint32_t warp = threadIdx.x / 32, warps = blockDim.x / 32, lane = threadIdx.x % 32;
  const Lane me{lane, lane >> 2, lane & 3, lane >> 3, lane >> 2 & 1};
  if (lane < kStages) open_barrier(shared_address(s.barrier + warp * kStages + lane));
  __syncwarp();
  publish_barriers();
  __syncthreads();
  uint32_t phases = 0;  // of every stage
  for (uint32_t index = blockIdx.x; index < plan.items; index += gridDim.x) {
    const Item item = find_item(plan, a, index);
    const TensorFormat *formats = item.sequence->tensors[0];
    const TensorFormat *key = formats ? formats + 2 * item.head : nullptr, *value = key ? key + 1 : nullptr;
    Walk walk{};
    if (key) walk = open_walk(plan, item, me, warp, warps, slot_bytes, ring, s, phases);
    load_queries(a, item, key, s);
    const Visible sees = visible(item, a, me.t);
    // Rows that do not exist see everything, so that they never ask for masks.
    const Visible packed_sees = me.t < item.rows ? sees : Visible{0, ~0u};
    Soft soft;
    run_raw(plan, a, item, me, warp, warps, sees, s, soft);
    if (value && value->rotate) rotate_outputs(me, *value, soft.o);
    if (key) {
      run_packed<Keys, Values>(a, item, me, walk, packed_sees, s, soft);
      phases = walk.phases;
    }
    merge_warps(me, warp, warps, soft, reinterpret_cast<float *>(ring), s.raw, s.ml);
    finish_item(plan, a, item, s.raw, s.ml, [&] {
      if (!value || !value->rotate || warp >= kRows) return;
      float4 *row = reinterpret_cast<float4 *>(s.raw + warp * kFastDim) + lane;
      float x[4] = {row->x, row->y, row->z, row->w};
      rotate_row(lane, *value, true, x);
      *row = make_float4(x[0], x[1], x[2], x[3]);
    });
  }
}

// Shapes of a block: many warps for long sequences, small blocks for many short ones.
template <class Keys, class Values>
cudaError_t launch_fused(const AttendArguments &a, const LayerLaunch &launch, uint32_t processors, cudaStream_t stream) {
  const auto kernel = fused_kernel<Keys, Values>;
  constexpr uint32_t kMost = 220 * 1024;
  const uint32_t slot = (launch.blob_bytes + 127) / 128 * 128;
  uint32_t warps = launch.items > processors + processors / 2 ? 4 : launch.pages_per_item >= 48 ? 16 : 8;
  while (warps > 4 && warps * kStages * slot > kMost) warps -= 4;
  const uint32_t bytes = max(warps * kStages * slot, warps * kRows * (kFastDim + 2) * uint32_t(sizeof(float)));
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes));
  if (error != cudaSuccess) return error;
  const uint32_t blocks = warps == 4 ? processors * min(4u, kMost / (bytes + 8192)) : processors;
  kernel<<<blocks, warps * 32, bytes, stream>>>(a, slot);
  return cudaGetLastError();
}

}  // namespace kvq::cuda
