// The kernel around the tiles of fused.cuh: items, raw pages, the ring, and the merge.
#pragma once
#include <type_traits>

#include "cuda/attend_fast.h"
#include "cuda/fused.cuh"
#include "cuda/raw_pages.cuh"
#include "cuda/results.cuh"

namespace kvq::cuda {

// Warps of the largest block: a warp's registers grow with the head dimension and the rows, and some codes take more.
template <int U, int N, class First>
constexpr uint32_t max_warps() {
  constexpr uint32_t kAll = N > 2 || U > 8 ? 8 : N > 1 ? 12 : 16;
  return First::kWarps < kAll ? First::kWarps : kAll;
}

// Shared memory of a block besides the ring.
template <int U, int N>
struct Queries {
  static constexpr uint32_t kItemRows = kRows * N, kDim = 16 * U;
  alignas(16) float raw[kItemRows * kDim];   // scaled to base 2, by channel, then for raw pages (split_query); in the end, scratch of results
  alignas(16) float slot[kItemRows * query_stride(U)];  // as the keys are stored
  float center[kItemRows], unit[kItemRows];  // q . mu; of split_query
  uint64_t signs[U / 4];  // of the values' rotation, by channel
  // What the end of an item needs: not in registers, which the loop over tiles has.
  Plan plan;
  Item item;
  const TensorFormat *value;  // or nullptr: no packed page
  alignas(16) uint64_t barrier[16 * kStages];
};

// A row of queries as the keys are stored: raw, by channel, to slot; by one warp, whose lanes have the channels x from C * lane on.
// Returns q . mu.
template <int C>
__device__ float store_query(uint32_t lane, const TensorFormat &key, uint32_t signs, const float (&mu)[C], const float (&x)[C], const float *raw, float *slot) {
  float sum = 0;
#pragma unroll
  for (int j = 0; j < C; j++) sum += x[j] * mu[j];
  for (int d = 16; d; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
  if (key.rotate && Kind(key.kind) != Kind::width_groups && Kind(key.kind) != Kind::channel_split) {  // slots are channels
    float y[C];
#pragma unroll
    for (int j = 0; j < C; j++) y[j] = x[j];
    rotate_row(lane, signs, false, y);
#pragma unroll
    for (int j = 0; j < C; j++) slot[C * lane + j] = y[j];
    return sum;
  }
  __syncwarp();
  for (uint32_t j = lane; j < 32 * C; j += 32) slot[j] = raw[key.channel[j]];
  __syncwarp();
  for (uint32_t r = 0; key.rotate && r < key.regions; r++) rotate_warp(slot, key, key.region[r], false);
  return sum;
}

// A warp a row; all threads meet at the end.  Queries are another kernel's: what can be done without them is done before.
template <int U, int N>
__device__ void load_queries(const AttendArguments &a, const Item &item, const TensorFormat *key, Queries<U, N> &s) {
  constexpr int kDim = 16 * U, C = U / 2;  // channels of a lane
  const uint32_t lane = threadIdx.x % 32;
  if (key) prefetch(key->channel + C * lane);
  float mu[C] = {};
  if (key && key->mu)
#pragma unroll
    for (int j = 0; j < C; j++) mu[j] = half_to_float(key->mu[C * lane + j]);
  const uint32_t signs = key && key->rotate ? row_signs<C>(lane, *key) : 0;
  await_earlier(), let_next_begin();
  for (uint32_t row = threadIdx.x / 32; row < kRows * N; row += blockDim.x / 32) {
    float *raw = s.raw + row * kDim, x[C];
    load_query(item, a, row, C * lane, x);
#pragma unroll
    for (int j = 0; j < C; j++) raw[C * lane + j] = x[j] *= a.scale * kLog2E;
    const float center = key ? store_query(lane, *key, signs, mu, x, raw, s.slot + row * query_stride(U)) : 0, unit = split_query(lane, x, raw);
    if (lane == 0) s.center[row] = center, s.unit[row] = unit;
  }
  __syncthreads();
}

// Outputs of raw pages to the order in which values are stored: section 3, with y and r in registers and lanes.
template <int U>
__device__ void rotate_outputs(const Lane &me, const uint64_t (&words)[U / 4], float (&o)[2 * U]) {
#pragma unroll
  for (int w = 0; w < U / 4; w++) {
    const uint64_t signs = words[w] >> me.r;
#pragma unroll
    for (int y = 0; y < 8; y++)
      if (signs >> 8 * y & 1u) o[8 * w + y] = -o[8 * w + y];
  }
#pragma unroll
  for (int d = 4; d < 32; d *= 2)
#pragma unroll
    for (int y = 0; y < 2 * U; y++) {
      const float other = __shfl_xor_sync(~0u, o[y], d);
      o[y] = me.lane & d ? other - o[y] : o[y] + other;
    }
#pragma unroll
  for (int d = 1; d < 2 * U; d *= 2)
#pragma unroll
    for (int y = 0; y < 2 * U; y++)
      if (!(y & d)) {
        const float s = o[y], t = o[y + d];
        o[y] = s + t, o[y + d] = s - t;
      }
  const float scale = rsqrtf(16.0f * U);
#pragma unroll
  for (int y = 0; y < 2 * U; y++) o[y] *= scale;
}

// The same where slots are other channels and rotate in groups.  scratch: of the warp, [kRows * N][dim].
template <int U, int N>
__device__ void scatter_outputs(const Lane &me, const TensorFormat &f, float *scratch, Soft<U> (&soft)[N]) {
  constexpr int kDim = 16 * U;
  bool seen = false;
  for (int n = 0; n < N; n++) seen |= soft[n].m > kUnseen;
  if (!__any_sync(~0u, seen)) return;  // no raw page was this warp's
#pragma unroll
  for (int n = 0; n < N; n++)
#pragma unroll
    for (int y = 0; y < 2 * U; y++) scratch[(4 * n + me.t) * kDim + 8 * y + me.r] = soft[n].o[y];
  __syncwarp();
  for (uint32_t row = 0; row < kRows * N; row++) {
    float *at = scratch + row * kDim, x[U / 2];
#pragma unroll
    for (int j = 0; j < U / 2; j++) x[j] = at[f.channel[32 * j + me.lane]];
    __syncwarp();
#pragma unroll
    for (int j = 0; j < U / 2; j++) at[32 * j + me.lane] = x[j];
    for (uint32_t r = 0; r < f.regions && f.rotate; r++) rotate_warp(at, f, f.region[r], false);
    __syncwarp();
  }
#pragma unroll
  for (int n = 0; n < N; n++)
#pragma unroll
    for (int y = 0; y < 2 * U; y++) soft[n].o[y] = scratch[(4 * n + me.t) * kDim + 8 * y + me.r];
  __syncwarp();
}
// And back, a row of results by one warp.
template <int C>
__device__ void gather_row(uint32_t lane, const TensorFormat &f, float *row) {
  for (uint32_t r = 0; r < f.regions && f.rotate; r++) rotate_warp(row, f, f.region[r], true);
  __syncwarp();
  float x[C];
#pragma unroll
  for (int j = 0; j < C; j++) x[j] = row[32 * j + lane];
  __syncwarp();
#pragma unroll
  for (int j = 0; j < C; j++) row[f.channel[32 * j + lane]] = x[j];
}

// ---- packed pages

// What a walk needs to know of a class of pages: where the tiles of a head lie.
struct TileShape {
  uint32_t offset, bytes;      // of the head in a page; of a tile
  uint32_t params;             // bytes of the columns' parameters before the first tile of a group
  uint32_t tiles, group_mask;  // of a page; the tiles of a group are 2^n
  __device__ __forceinline__ void load(const TensorFormat &key) {
    offset = key.blob, bytes = key.tile_stride, params = key.group_stride - (key.tile_stride << key.group_shift), tiles = key.page_tokens / kTile;
    group_mask = (1u << key.group_shift) - 1;
  }
};

// A warp's walk over the tiles of its packed pages; opened before the queries are there, so that tiles are on their way.  The entry of
// a page is read one page ahead of its first tile.  Two slots take turns: the next tile comes to the slot of the one that is done.
template <bool kTwo, bool kColumns>
struct Walk {
  static_assert(kStages == 2);
  const PageEntry *entry;  // of page `ahead`; the next one is `step` entries on
  uint32_t step, count;
  uint32_t slot, both;     // shared address of the slot of the tile that is worked on; its sum with the other's
  uint32_t barrier;        // likewise: 8 bytes from the other's, in a place of 16
  uint32_t used;           // tiles so far, also of earlier items
  TileShape shape, other;  // of the page that is fetched from; of its class's other
  uint32_t shape_kind;
  uint32_t now, ahead;     // the page that is worked on; the one after that which is fetched from
  uint32_t tags;           // of the pages from `now` to `ahead`, two bits each: class, and (2) full and seen by every query, but for the window
  const uint8_t *next;     // the tile to fetch next
  uint32_t left;           // tiles of its page, with this one
  uint4 head;              // of the entry
  uint32_t seen, flip;     // what the oldest query sees; of SequenceEntry

  __device__ __forceinline__ void read() {
    if (ahead < count) head = __ldg(reinterpret_cast<const uint4 *>(entry));
  }
  __device__ __forceinline__ void open_page() {
    const uint32_t kind = kTwo ? head.z ^ flip : 0;
    if (kTwo && kind != shape_kind) {
      const TileShape swap = shape;
      shape = other, other = swap, shape_kind = kind;
    }
    next = reinterpret_cast<const uint8_t *>(uint64_t(head.y) << 32 | head.x) + shape.offset;
    left = shape.tiles;
    tags |= (kind + 2 * (head.w < seen)) << 2 * (ahead - now);
    ahead++, entry += step;
    read();
  }
  __device__ __forceinline__ void fetch(uint32_t lane) {
    if (left == 0) {
      if (ahead >= count) return;
      open_page();
    }
    uint32_t bytes = shape.bytes, to = slot;
    if constexpr (kColumns) {  // the first tile of a group comes with its parameters
      const bool leads = (left & shape.group_mask) == 0;
      bytes += leads ? shape.params : 0, to += leads ? 0 : shape.params;
    }
    fetch_page(to, next, bytes, barrier, lane);
    next += bytes, left--;
  }
  __device__ __forceinline__ void turn() { slot = both - slot, barrier ^= 8; }
  // The tile that is worked on, when its bytes are there.
  __device__ __forceinline__ const uint8_t *await() const {
    await_page(barrier, used / kStages & 1);
    return static_cast<const uint8_t *>(__cvta_shared_to_generic(slot));
  }
  __device__ __forceinline__ void next_tile(uint32_t lane) {
    used++;
    fetch(lane);
    turn();
  }
  __device__ __forceinline__ const PageEntry *current() const { return entry - (ahead - now) * step; }
  __device__ __forceinline__ void next_page() { tags >>= 2, now++; }
};

template <bool kTwo, bool kColumns>
__device__ __forceinline__ Walk<kTwo, kColumns> open_walk(const ShareEntry &share, uint32_t head, const Lane &me, uint32_t warp, uint32_t warps,
                                                          uint32_t slot_bytes, const uint8_t *ring, uint64_t *barriers, uint32_t used) {
  const uint32_t pages = share.packed;
  Walk<kTwo, kColumns> walk;
  walk.entry = share.sequence.table + share.first_page + warp;
  walk.seen = share.sequence.length - min(share.sequence.length, share.sequence.n_queries) + 1, walk.flip = share.sequence.flip;
  walk.step = warps;
  walk.count = pages > warp ? (pages - warp + warps - 1) / warps : 0;
  walk.used = used;
  walk.now = walk.ahead = walk.left = walk.tags = 0;
  walk.read();
  const TensorFormat *const *tensors = share.sequence.tensors;
  for (int kind = 0; kind < (kTwo ? 2 : 1); kind++)
    for (uint32_t line = 1; tensors[kind] && line < 4; line++)  // the first is read now; a tensor has its own in the first two
      prefetch(reinterpret_cast<const uint8_t *>(tensors[kind] + 2 * head + line / 2) + line % 2 * 128);
  if (tensors[0]) walk.shape.load(tensors[0][2 * head]);
  if (kTwo && tensors[1]) walk.other.load(tensors[1][2 * head]);
  walk.shape_kind = 0;
  const uint32_t first = shared_address(ring) + warp * kStages * slot_bytes, odd = used & 1;
  walk.slot = first + odd * slot_bytes, walk.both = 2 * first + slot_bytes;
  walk.barrier = shared_address(barriers + warp * kStages) + 8 * odd;
  open_ring();
  for (uint32_t i = 0; i < kStages; i++) walk.fetch(me.lane), walk.turn();
  return walk;
}

// One class of pages: how its codes are read, and where its parts lie in a slot of the ring.
template <class KeyCode, class ValueCode>
struct Pages {
  using Key = KeyCode;
  using Value = ValueCode;
  static constexpr uint32_t kWarps = KeyCode::kWarps < ValueCode::kWarps ? KeyCode::kWarps : ValueCode::kWarps;
  typename KeyCode::Rows key;
  typename ValueCode::Rows value;
  uint32_t key_codes, value_codes, tiles, group_tiles, param_bytes;  // param_bytes: of the keys

  __device__ __forceinline__ void load(const TensorFormat *formats) {  // of the head's keys and values
    const TensorFormat &k = formats[0], &v = formats[1];
    key.load(k), value.load(v);
    key_codes = k.codes - k.params, value_codes = v.codes - k.params;
    if (!k.group) key_codes = 0, value_codes = v.codes - k.codes;
    tiles = uniform(k.page_tokens / kTile), group_tiles = uniform(k.group_tiles), param_bytes = uniform(k.param_bytes);
  }
};
struct NoPages {
  using Key = void;
  __device__ void load(const TensorFormat *) {}
};

template <class First, int U, int N>
using KeysOf = typename KeysFor<typename First::Key, U, N>::Type;
template <class First, class Second>
using WalkOf = Walk<!std::is_same_v<Second, NoPages>, KeysOf<First, 8, 1>::kColumns>;
// Shared memory of a warp besides its stages: for columns of B, and before that for its outputs by channel.
template <class First, int U, int N>
constexpr uint32_t scratch_bytes() {
  constexpr uint32_t kOutputs = First::Value::kScattered ? uint32_t(sizeof(float)) * kRows * N * 16 * U : 0;
  return std::max(ScratchOf<KeysOf<First, U, N>>::kBytes, kOutputs);
}

// masked: some of the page must be hidden, or there is a soft cap.
template <class Class, class Keys, class Walk, class State, int U, int N>
__device__ __forceinline__ void run_page(const Lane &me, Keys &keys, const Class &pages, Walk &walk, bool masked, const SequenceEntry &sequence,
                                         float softcap, const Visible (&sees)[N], const float *q, State &state, Soft<U> (&soft)[N]) {
#pragma unroll 1
  for (uint32_t tile = 0; tile < pages.tiles; tile++) {
    const uint8_t *at = walk.await();
    if constexpr (Keys::kColumns)
      if ((tile & (pages.group_tiles - 1)) == 0) keys.begin_group(me, q, at, pages.param_bytes);  // a power of two
    Mask mask{};
    if (masked) {
      const PageEntry *entry = walk.current();
      const uint32_t done = tile * kTile;
      mask = {entry->positions ? sequence.positions + entry->positions - 1 + done : nullptr, entry->position + done,
              entry->count > done ? entry->count - done : 0};
    }
    run_tile<typename Class::Key, typename Class::Value>(me, keys, pages.key, pages.value, at + pages.key_codes, at + pages.value_codes, softcap,
                                                         masked, mask, sees, state, soft);
    __syncwarp();
    walk.next_tile(me.lane);
  }
}

// What a block needs of its classes; loaded before the queries are there.
template <class First, class Second>
struct Classes {
  First first;
  Second second;
  const TensorFormat *formats = nullptr;  // of the head in one of the classes, or nullptr: no packed page
  __device__ __forceinline__ explicit Classes(const Item &item) {
    const TensorFormat *const *all = item.sequence->tensors;
    if (all[0]) formats = all[0] + 2 * item.head, first.load(formats);
    if (all[1]) formats = all[1] + 2 * item.head, second.load(formats);
  }
};

template <class First, class Second, int U, int N>
__device__ __forceinline__ void run_packed(const SequenceEntry &sequence, const AttendArguments &a, const Lane &me, const Classes<First, Second> &classes,
                                           WalkOf<First, Second> &walk, uint32_t *columns, const Visible (&sees)[N], Queries<U, N> &s, Soft<U> (&soft)[N]) {
  using Keys = KeysOf<First, U, N>;
  constexpr bool kTwo = !std::is_same_v<Second, NoPages>;
  Keys keys;
  typename StateFor<typename First::Value, U, N>::Type state;
  keys.begin_item(me, *classes.formats, s.slot, s.center, columns);
#pragma unroll
  for (int n = 0; n < N; n++) begin_packed(soft[n]);
#pragma unroll 1
  while (walk.now < walk.count) {
    const uint32_t tag = uniform(walk.tags & 3);
    const bool masked = tag < 2 || a.window || a.softcap > 0;
    if (!kTwo || !(tag & 1))
      run_page(me, keys, classes.first, walk, masked, sequence, a.softcap, sees, s.slot, state, soft);
    else if constexpr (kTwo)
      run_page(me, keys, classes.second, walk, masked, sequence, a.softcap, sees, s.slot, state, soft);
    walk.next_page();
  }
  state.finish(classes.first.value, soft);
#pragma unroll
  for (int n = 0; n < N; n++) end_packed(soft[n]);
}

// ---- the block

// What the warps of a block have of its rows, in shared memory: [warp][row][kStride], then m and l of each.
template <int U, int N>
struct WarpResults {
  static constexpr uint32_t kItemRows = kRows * N, kStride = 16 * U + 8;  // the eight: a warp writes four rows at once, to all banks
  static constexpr uint32_t kBytes = sizeof(float) * kItemRows * (kStride + 2);  // of a warp
  float *memory, *states;
  __device__ WarpResults(uint8_t *at, uint32_t warps) : memory(reinterpret_cast<float *>(at)), states(memory + warps * kItemRows * kStride) {}

  // By all warps, which meet before and after.
  __device__ __forceinline__ void write(const Lane &me, uint32_t warp, Soft<U> (&soft)[N]) {
    __syncthreads();
#pragma unroll
    for (int n = 0; n < N; n++) {
      const uint32_t row = warp * kItemRows + 4 * n + me.t;
      soft[n].l = lanes_sum(soft[n].l);
      soft[n].zero = lanes_sum(soft[n].zero);
#pragma unroll
      for (int y = 0; y < 2 * U; y++) memory[row * kStride + 8 * y + me.r] = soft[n].o[y] + soft[n].zero;
      if (me.r == 0) states[2 * row] = soft[n].m, states[2 * row + 1] = soft[n].l;
    }
    __syncthreads();
  }
  // Their sum, by one warp.
  __device__ __forceinline__ RowResult<U / 2> add(uint32_t lane, uint32_t warps, uint32_t row) const {
    return add_parts<U / 2, 16>(
        lane, warps, [&](uint32_t w) { return *reinterpret_cast<const float2 *>(states + 2 * (w * kItemRows + row)); },
        [&](uint32_t w, float(&x)[U / 2]) { read_shared(memory + (w * kItemRows + row) * kStride + U / 2 * lane, x); });
  }
};

// A row of results from slots to channels; scratch: [dim] of this warp.
template <class First, int C>
__device__ __forceinline__ void restore_row(uint32_t lane, const TensorFormat &value, const uint64_t *signs, float *scratch, float (&x)[C]) {
  if (First::Value::kScattered && Kind(value.kind) == Kind::channel_split) {
#pragma unroll
    for (int j = 0; j < C; j++) scratch[C * lane + j] = x[j];
    __syncwarp();
    gather_row<C>(lane, value, scratch);
    __syncwarp();
#pragma unroll
    for (int j = 0; j < C; j++) x[j] = scratch[C * lane + j];
    return;
  }
  if (value.rotate) rotate_row(lane, uint32_t(signs[C * lane / 64] >> (C * lane % 64)), true, x);
}

template <int U, int N, class First, class Second>
__global__ void __launch_bounds__(max_warps<U, N, First>() * 32, 1) fused_kernel(const __grid_constant__ AttendArguments a, uint32_t slot_bytes) {
  extern __shared__ __align__(128) uint8_t ring[];
  __shared__ __align__(16) Queries<U, N> s;
  constexpr int kDim = 16 * U, C = U / 2;
  const Plan plan = *a.plan;
  const uint32_t warp = threadIdx.x / 32, warps = blockDim.x / 32, lane = threadIdx.x % 32;
  const Lane me{lane, lane >> 2, lane & 3, lane >> 3, lane >> 2 & 1};
  if (lane < kStages) open_barrier(shared_address(s.barrier + warp * kStages + lane));
  __syncwarp();
  publish_barriers();
  __syncthreads();
  uint32_t used = 0;  // tiles, that is slots, so far
  for (uint32_t index = blockIdx.x - plan.idle; index < plan.items; index += gridDim.x) {  // those before are beyond all items
    const ShareEntry &share = plan.shares[index / a.kv_heads];
    const Item item = find_item(plan, a, index);
    prefetch_queries(item, a);
    auto walk = open_walk<!std::is_same_v<Second, NoPages>, KeysOf<First, U, N>::kColumns>(share, item.head, me, warp, warps, slot_bytes, ring, s.barrier, used);
    const Classes<First, Second> classes(item);
    const TensorFormat *key = classes.formats, *value = key ? key + 1 : nullptr;
    if (threadIdx.x == 0) s.plan = plan, s.item = item, s.value = value;
    if (value && value->rotate && warp == warps - 1 && lane < U / 4)  // as row_signs() has them
      s.signs[lane] = splitmix64(sign_seed(value->seed, value->tensor, 0, value->region[0].rotation) ^ lane);
    load_queries<U, N>(a, item, key, s);
    Visible sees[N], packed_sees[N];
    Soft<U> soft[N];
#pragma unroll
    for (int n = 0; n < N; n++) {
      sees[n] = visible(item, a, 4 * n + me.t);
      packed_sees[n] = 4 * n + me.t < item.rows ? sees[n] : Visible{0, ~0u};
    }
    run_raw<U, N>(plan, a, item, me, warp, warps, sees, s.raw, s.unit, soft);
    if (key) {
      uint8_t *scratch = ring + warps * kStages * slot_bytes + warp * scratch_bytes<First, U, N>();
      if (item.sequence->pages > item.sequence->packed) {
        if (First::Value::kScattered && Kind(value->kind) == Kind::channel_split)
          scatter_outputs(me, *value, reinterpret_cast<float *>(scratch), soft);
        else if (value->rotate)
#pragma unroll
          for (int n = 0; n < N; n++) rotate_outputs<U>(me, s.signs, soft[n].o);
      }
      run_packed<First, Second, U, N>(*item.sequence, a, me, classes, walk, reinterpret_cast<uint32_t *>(scratch), packed_sees, s, soft);
      used = walk.used;
    }
    WarpResults<U, N> results(ring, warps);
    results.write(me, warp, soft);
    finish_item<kRows * N, C, kDim>(s.plan, a, s.item, [&](uint32_t row, uint32_t, bool) {
      RowResult<C> result = results.add(lane, warps, row);
      if (s.value) restore_row<First>(lane, *s.value, s.signs, s.raw + row * kDim, result.o);
      return result;
    });
  }
  await_earlier();  // without an item, too: who comes next counts on all that came before
  if (lane < kStages) close_barrier(shared_address(s.barrier + warp * kStages + lane));
}

template <int U, int N, class First, class Second>
cudaError_t launch_fused(const AttendArguments &a, const LayerLaunch &launch, const Processors &processors, cudaStream_t stream) {
  return launch_early(fused_kernel<U, N, First, Second>, launch.blocks, launch.shape.warps * 32, launch.shape.dynamic_bytes, processors, stream, a, launch.stage_bytes);
}

// The table's entry.
template <int U, int N, class First, class Second>
constexpr FusedKernel fused(PagePath first, PagePath second) {
  return {16 * U, N, first, second,
          {max_warps<U, N, First>(), sizeof(Queries<U, N>) + 256, scratch_bytes<First, U, N>(), WarpResults<U, N>::kBytes},
          launch_fused<U, N, First, Second>, [] { return reinterpret_cast<const void *>(fused_kernel<U, N, First, Second>); }};
}

}  // namespace kvq::cuda
