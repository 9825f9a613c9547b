// The second kernel of prompt.h: blocks of 128 rows against images, online softmax in base 2, fp32 sums.
//
// Two groups of four warps have 64 rows each; another warp brings images.  Per tile: logits Q * K^T (for packed keys of both parts), probabilities
// in fp16, outputs P * V.  Where masks cut into a tile, probabilities keep their second part too: a row that sees few tokens would
// not average their rounding away.  Products with values run on while the next tile's logits are under way.
#include <algorithm>

#include "cuda/fused.cuh"
#include "cuda/prompt_matrix.cuh"
#include "cuda/prompt_ring.cuh"

namespace kvq::cuda {
namespace {

// Three groups of four warps; with wgmma the registers of the last one, of which one warp works, go to the others.
constexpr uint32_t kThreads = 384;
constexpr uint32_t kSlack = 1024;  // to align images

// Dynamic shared memory: queries (an image for each group of warps), then the ring.
struct SharedShape {
  uint32_t slots, bytes;
};
SharedShape shared_shape(uint32_t dim_k, uint32_t dim_v, const Processors &processors) {
  constexpr uint32_t kFixed = kSlack + 2048;  // and what is static
  const uint32_t panels = prompt_panels(dim_k, dim_v), image = uint32_t(image_bytes(panels)), queries = 2 * image;
  if (panels == 0 || processors.block_bytes < kFixed + queries) return {0, 0};
  const uint32_t slots = std::min((processors.block_bytes - kFixed - queries) / image, kMaxSlots);
  return slots < 3 ? SharedShape{0, 0} : SharedShape{slots, kSlack + queries + slots * image};
}

// ---- the warp that brings images

// Positions that rows of an item see: all of them, and any of them.
struct ItemSight {
  uint32_t all_begin, all_end, any_begin, any_end;
  __device__ ItemSight(const Item &item, const AttendArguments &a) {
    const Visible first = visible(item, a, 0), last = visible(item, a, item.rows - 1);
    all_begin = last.begin, all_end = first.end, any_begin = first.begin, any_end = last.end;
  }
};

struct Bringer {
  const AttendArguments &a;
  const Images &images;
  RingBarriers &barriers;
  TileHead *heads;
  uint32_t ring, slots, lane;
  Cursor at;

  __device__ __forceinline__ void await_slot() { await(barriers.empty + at.slot, at.round ^ 1); }
  __device__ __forceinline__ void bring(const uint8_t *image) {
    copy_image(ring + at.slot * images.bytes, image, images.bytes, barriers.full + at.slot, lane);
    at.next(slots);
  }
  __device__ __forceinline__ void bring_tile(const TileHead &head, uint32_t kv_head, uint32_t tile) {
    await_slot();
    if (lane == 0) heads[at.slot] = head;
    bring(images.at(kv_head, tile, Image::keys));
    if (head.low) await_slot(), bring(images.at(kv_head, tile, Image::keys_low));
    await_slot();
    bring(images.at(kv_head, tile, Image::values));
  }
  __device__ __forceinline__ void end_item() {
    await_slot();
    if (lane == 0) heads[at.slot].tokens = 0;
    copy_nothing(barriers.full + at.slot, lane);
    at.next(slots);
  }
  // A lane looks at one of 32 tiles; then those that are seen go one after the other.
  __device__ void bring_item(const Plan &plan, const Item &item, uint32_t kv_head) {
    const SequenceEntry &sequence = *item.sequence;
    const ItemSight sight(item, a);
    const uint32_t tiles = sequence_tiles(sequence);
    const uint32_t begin = uint32_t(uint64_t(tiles) * item.split / sequence.splits), end = uint32_t(uint64_t(tiles) * (item.split + 1) / sequence.splits);
    for (uint32_t first = begin; first < end; first += 32) {
      TileHead mine{};
      if (first + lane < end) {
        const TilePart part = find_part(plan, sequence, first + lane);
        const bool seen = part.count > 0 && part.low < sight.any_end && part.high >= sight.any_begin;
        const bool masked = part.count < kTile || part.high >= sight.all_end || part.low < sight.all_begin;
        if (seen) {
          const float2 scales = *reinterpret_cast<const float2 *>(images.scales(kv_head, sequence.first_tile + first + lane));
          mine = {part.count, part.position, part.positions, masked, !is_exact(part_format(sequence, part.kind, item.head, 0)), scales.x, scales.y};
        }
      }
      for (uint32_t left = __ballot_sync(~0u, mine.tokens > 0); left; left &= left - 1) {
        const int from = __ffs(int(left)) - 1;
        const auto of = [&](auto x) { return __shfl_sync(~0u, x, from); };
        const TileHead head{of(mine.tokens), of(mine.position), of(mine.positions), of(mine.masked), of(mine.low), of(mine.key_scale), of(mine.value_scale)};
        bring_tile(head, kv_head, sequence.first_tile + first + uint32_t(from));
      }
    }
    end_item();
  }
};

// ---- the warps that use them

__device__ __forceinline__ void meet(uint32_t group) { asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory"); }

// Rows of a group of warps as an image, entered by rule 1.4 and not scaled.
template <int P>
__device__ void enter_queries(const AttendArguments &a, const Item &item, uint32_t group, uint8_t *image) {
  const bool halves = a.q.dtype == KVQ_DTYPE_F16;
  for (uint32_t i = threadIdx.x % 128; i < 64 * 8 * P; i += 128) {
    const uint32_t row = i / (8 * P), eight = i % (8 * P), mine = 64 * group + row, channel = 8 * eight;
    uint4 x = make_uint4(0, 0, 0, 0);
    if (mine < item.rows && channel < a.dim_k) {
      const int64_t at = int64_t(item.sequence->first_query + row_query(item, a, mine)) * a.q.token_stride + int64_t(row_head(item, a, mine)) * a.q.head_stride + channel;
      const uint16_t *from = static_cast<const uint16_t *>(a.q.data) + at;
      const bool whole = halves && channel + 8 <= a.dim_k && reinterpret_cast<uintptr_t>(from) % 16 == 0;
      if (whole) x = *reinterpret_cast<const uint4 *>(from);
      if (!whole || !is_plain(make_uint2(x.x, x.y)) || !is_plain(make_uint2(x.z, x.w))) {
        uint32_t words[4] = {};
        for (uint32_t j = 0; j < 8 && channel + j < a.dim_k; j++) words[j / 2] |= uint32_t(float_to_half(load_query(item, a, mine, channel + j))) << j % 2 * 16;
        x = make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
    *reinterpret_cast<uint4 *>(image + image_offset(row, eight)) = x;
  }
}

// The queries of a warp as A operands: in registers, or in their image where those would be too many.
template <int P>
struct QueryOperand {
  static constexpr bool kInRegisters = P <= 2;
  uint32_t registers[kInRegisters ? 4 * P : 1][4];
  uint32_t image, warp;
  __device__ __forceinline__ void load(uint32_t at, uint32_t in_group) {
    image = at, warp = in_group;
    if constexpr (kInRegisters)
#pragma unroll
      for (int s = 0; s < 4 * P; s++) load_rows(image, warp, s, registers[s]);
  }
  __device__ __forceinline__ void multiply(float (&s)[32], uint32_t keys, uint32_t add) const {
#pragma unroll
    for (int k = 0; k < 4 * P; k++) {
      if constexpr (kInRegisters)
        multiply_keys(s, registers[k], keys, k, k ? 1 : add);
      else
        multiply_keys(s, image, warp, keys, k, k ? 1 : add);
    }
  }
};

// What a lane has of its two rows.
template <int P>
struct RowSums {
  float m[2] = {kUnseen, kUnseen}, l[2] = {0, 0};
  float unit = 0;  // of o
  float o[P][32];
  __device__ __forceinline__ void scale(float first, float second) {
#pragma unroll
    for (int p = 0; p < P; p++)
#pragma unroll
      for (int i = 0; i < 32; i++) o[p][i] *= i & 2 ? second : first;
  }
};

__device__ __forceinline__ void hide(const TileHead &tile, const uint32_t *positions, uint32_t t, const Visible (&sees)[2], float (&s)[32]) {
  const uint32_t *list = tile.positions ? positions + tile.positions - 1 : nullptr;
#pragma unroll
  for (int j = 0; j < 8; j++)
#pragma unroll
    for (int odd = 0; odd < 2; odd++) {
      const uint32_t token = 8 * j + 2 * t + odd;
      const bool exists = token < tile.tokens;
      const uint32_t position = !exists ? 0 : list ? list[token] : tile.position + token;
#pragma unroll
      for (int row = 0; row < 2; row++)
        if (!exists || position < sees[row].begin || position >= sees[row].end) s[4 * j + 2 * row + odd] = -INFINITY;
    }
}

// Logits to probabilities, which are returned in s, against the rows' references.
template <int P>
__device__ __forceinline__ void soften(const AttendArguments &a, const TileHead &tile, const uint32_t *positions, uint32_t t, const Visible (&sees)[2], float (&s)[32],
                                       RowSums<P> &sums) {
  const float unit = a.scale * kLog2E * tile.key_scale;
#pragma unroll
  for (int i = 0; i < 32; i++) s[i] *= unit;
  if (a.softcap > 0)
#pragma unroll
    for (int i = 0; i < 32; i++) s[i] = cap_logit(s[i], a.softcap);
  if (tile.masked) hide(tile, positions, t, sees, s);
  float alpha[2];
#pragma unroll
  for (int row = 0; row < 2; row++) {
    float top = sums.m[row];
#pragma unroll
    for (int i = 0; i < 16; i++) top = fmaxf(top, s[i / 2 * 4 + 2 * row + i % 2]);
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    alpha[row] = exp2_fast(sums.m[row] - top);
    sums.m[row] = top;
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 16; i++) {
      float &x = s[i / 2 * 4 + 2 * row + i % 2];
      x = exp2_fast(x - top);
      sum += x;
    }
    sums.l[row] = fmaf(sums.l[row], alpha[row], sum);
  }
  if (__any_sync(~0u, alpha[0] != 1 || alpha[1] != 1)) sums.scale(alpha[0], alpha[1]);
  if (tile.value_scale == sums.unit) return;
  if (tile.value_scale > sums.unit) {
    const float less = sums.unit / tile.value_scale;
    sums.scale(less, less);
    sums.unit = tile.value_scale;
    return;
  }
  const float ratio = tile.value_scale / sums.unit;
#pragma unroll
  for (int i = 0; i < 32; i++) s[i] *= ratio;
}

__device__ __forceinline__ uint32_t pack_halves(float x, float y) {
  const __half2 both = __floats2half2_rn(x, y);
  return *reinterpret_cast<const uint32_t *>(&both);
}
// Probabilities as A operands; what they leave stays in s.
__device__ __forceinline__ void pack_weights(float (&s)[32], uint32_t (&p)[4][4]) {
#pragma unroll
  for (int i = 0; i < 16; i++) {
    p[i / 4][i % 4] = pack_halves(s[2 * i], s[2 * i + 1]);
    const float2 near = __half22float2(*reinterpret_cast<const __half2 *>(&p[i / 4][i % 4]));
    s[2 * i] -= near.x, s[2 * i + 1] -= near.y;
  }
}

template <int P>
__device__ __forceinline__ void add_values(const uint32_t (&p)[4][4], uint32_t image, RowSums<P> &sums) {
#pragma unroll
  for (int k = 0; k < 4; k++)
#pragma unroll
    for (int panel = 0; panel < P; panel++) multiply_values(sums.o[panel], p[k], image, panel, k);
}

struct Ring {
  RingBarriers &barriers;
  const TileHead *heads;
  uint32_t base, image_bytes, slots;
  Cursor at;
  __device__ __forceinline__ uint32_t await_image() const {
    await(barriers.full + at.slot, at.round);
    return base + at.slot * image_bytes;
  }
  __device__ __forceinline__ void release(uint32_t slot) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(barriers.empty + slot);
  }
  // The slot that was awaited; the next one is the cursor's.
  __device__ __forceinline__ uint32_t pass() {
    const uint32_t slot = at.slot;
    at.next(slots);
    return slot;
  }
};

template <int P>
__device__ __forceinline__ void settle_outputs(RowSums<P> &sums) {
#pragma unroll
  for (int panel = 0; panel < P; panel++) settle(sums.o[panel]);
}

template <int P>
__device__ __forceinline__ void use_tiles(const AttendArguments &a, const QueryOperand<P> &q, const uint32_t *positions, uint32_t t, const Visible (&sees)[2], Ring &ring,
                                          RowSums<P> &sums) {
  constexpr uint32_t kNone = ~0u;
  uint32_t values = kNone;  // the slot that products with values are under way from
  for (;;) {
    uint32_t image = ring.await_image();
    const TileHead tile = ring.heads[ring.at.slot];
    if (tile.tokens == 0) break;
    float s[32];
    begin_products();
    q.multiply(s, image, 0);
    commit_products();
    const uint32_t keys = ring.pass();
    uint32_t low = kNone;
    if (tile.low) {
      image = ring.await_image();
      begin_products();
      q.multiply(s, image, 1);
      commit_products();
      low = ring.pass();
    }
    await_products();
    settle(s);
    settle_outputs(sums);
    ring.release(keys);
    if (low != kNone) ring.release(low);
    if (values != kNone) ring.release(values);
    soften(a, tile, positions, t, sees, s, sums);
    uint32_t p[4][4];
    pack_weights(s, p);
    image = ring.await_image();
    if (tile.masked) {
      uint32_t rest[4][4];
      pack_weights(s, rest);
      begin_products();
      add_values(rest, image, sums);
      commit_products();
      await_products();
      settle_outputs(sums);
    }
    begin_products();
    add_values(p, image, sums);
    commit_products();
    values = ring.pass();
  }
  await_products();
  settle_outputs(sums);
  if (values != kNone) ring.release(values);
  ring.release(ring.pass());
}

// ---- results

__device__ __forceinline__ void store_pair(const DeviceTensor &x, int64_t at, float first, float second) {
  if (x.dtype == KVQ_DTYPE_F32 && reinterpret_cast<uintptr_t>(static_cast<const float *>(x.data) + at) % 8 == 0) {
    *reinterpret_cast<float2 *>(static_cast<float *>(const_cast<void *>(x.data)) + at) = make_float2(first, second);
  } else if (x.dtype == KVQ_DTYPE_F16 && reinterpret_cast<uintptr_t>(static_cast<const uint16_t *>(x.data) + at) % 4 == 0) {
    *reinterpret_cast<uint32_t *>(static_cast<uint16_t *>(const_cast<void *>(x.data)) + at) =
        pack_halves(fminf(fmaxf(first, -65504.0f), 65504.0f), fminf(fmaxf(second, -65504.0f), 65504.0f));
  } else {
    store_output(x, at, first), store_output(x, at + 1, second);
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
  if (a.has_sinks) {
    const float sink = a.sinks[head] * kLog2E, top = fmaxf(m, sink);
    scale = exp2f(m - top), l = l * scale + exp2f(sink - top), m = top;
  }
  if (a.lse && first_lane) a.lse[size_t(token) * a.kv_heads * a.ratio + head] = l > 0 ? (m + log2f(l)) * kLn2 : -INFINITY;
  return {int64_t(token) * a.out.token_stride + int64_t(head) * a.out.head_stride, l > 0 ? scale / l : 0.0f};
}

// use(channel, x, y): two channels of a row.
template <int P, class Use>
__device__ __forceinline__ void for_outputs(const RowSums<P> &sums, int i, uint32_t t, uint32_t dim_v, Use &&use) {
#pragma unroll
  for (int p = 0; p < P; p++)
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const uint32_t channel = 64 * p + 8 * j + 2 * t;
      if (channel < dim_v) use(channel, sums.o[p][4 * j + 2 * i] * sums.unit, sums.o[p][4 * j + 2 * i + 1] * sums.unit);
    }
}

// The only split of its rows goes to the caller's memory, others as [row][dim_v], then [row]{m, l}.
template <int P>
__device__ __forceinline__ void store_rows(const Plan &plan, const AttendArguments &a, const Item &item, uint32_t first_row, uint32_t t, const RowSums<P> &sums) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const uint32_t row = first_row + 8 * i;
    if (row >= item.rows) continue;
    if (item.sequence->splits == 1) {
      const RowEnd end = end_row(a, item, row, sums.m[i], sums.l[i], t == 0);
      for_outputs(sums, i, t, a.dim_v, [&](uint32_t channel, float x, float y) { store_pair(a.out, end.at + channel, x * end.factor, y * end.factor); });
    } else {
      float *o = plan.partials + size_t(item.index) * kPromptRows * (a.dim_v + 2), *ml = o + kPromptRows * a.dim_v + 2 * row;
      for_outputs(sums, i, t, a.dim_v, [&](uint32_t channel, float x, float y) { *reinterpret_cast<float2 *>(o + row * a.dim_v + channel) = make_float2(x, y); });
      if (t == 0) ml[0] = sums.m[i], ml[1] = sums.l[i];
    }
  }
}

// Splits of a row, in their order, by a warp.
__device__ void merge_row(const Plan &plan, const AttendArguments &a, const Item &item, uint32_t row) {
  const uint32_t lane = threadIdx.x % 32, splits = item.sequence->splits, size = kPromptRows * (a.dim_v + 2);
  const size_t step = size_t(a.kv_heads) * size;
  const float *o = plan.partials + size_t(item.index) * size + row * a.dim_v, *ml = plan.partials + size_t(item.index) * size + kPromptRows * a.dim_v + 2 * row;
  float m = kUnseen, l = 0;
  for (uint32_t s = 0; s < splits; s++) m = fmaxf(m, ml[s * step]);
  for (uint32_t s = 0; s < splits; s++) l = fmaf(exp2_fast(ml[s * step] - m), ml[s * step + 1], l);
  const RowEnd end = end_row(a, item, row, m, l, lane == 0);
  for (uint32_t channel = 2 * lane; channel < a.dim_v; channel += 64) {
    float x = 0, y = 0;
    for (uint32_t s = 0; s < splits; s++) {
      const float weight = exp2_fast(ml[s * step] - m);
      const float2 two = *reinterpret_cast<const float2 *>(o + s * step + channel);
      x = fmaf(weight, two.x, x), y = fmaf(weight, two.y, y);
    }
    store_pair(a.out, end.at + channel, x * end.factor, y * end.factor);
  }
}

constexpr uint32_t kMergeThreads = 256;

__global__ void __launch_bounds__(kMergeThreads) merge_kernel(const __grid_constant__ AttendArguments a, uint32_t group) {
  const Plan plan = *a.plan;
  const HeadGroup of(plan, a, group);
  for (uint32_t i = blockIdx.x; i < plan.items / a.kv_heads * of.count; i += gridDim.x) {
    const Item item = find_item(plan, a, i / of.count * a.kv_heads + of.first + i % of.count);
    if (item.split > 0 || item.sequence->splits == 1) continue;
    for (uint32_t row = threadIdx.x / 32; row < item.rows; row += kMergeThreads / 32) merge_row(plan, a, item, row);
  }
}

// A group of warps on an item.
template <int P>
__device__ __forceinline__ void attend_rows(const Plan &plan, const AttendArguments &a, const Item &item, uint8_t *memory, Ring &ring) {
  const uint32_t group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, t = lane % 4;
  const uint32_t first_row = 64 * group + 16 * warp + lane / 4;
  uint8_t *queries = memory + group * image_bytes(P);
  meet(group);  // the last item's queries have been used
  enter_queries<P>(a, item, group, queries);
  if constexpr (!QueryOperand<P>::kInRegisters && kGroupProducts) open_ring();
  meet(group);
  QueryOperand<P> q;
  q.load(shared_address(queries), warp);
  const Visible sees[2] = {visible(item, a, first_row), visible(item, a, first_row + 8)};
  RowSums<P> sums;
#pragma unroll
  for (int p = 0; p < P; p++)
#pragma unroll
    for (int i = 0; i < 32; i++) sums.o[p][i] = 0;
  use_tiles<P>(a, q, item.sequence->positions, t, sees, ring, sums);
#pragma unroll
  for (int i = 0; i < 2; i++) sums.l[i] += __shfl_xor_sync(~0u, sums.l[i], 1), sums.l[i] += __shfl_xor_sync(~0u, sums.l[i], 2);
  store_rows<P>(plan, a, item, first_row, t, sums);
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
template <uint32_t kCount>
__device__ __forceinline__ void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount)); }
template <uint32_t kCount>
__device__ __forceinline__ void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount)); }
#else
template <uint32_t>
__device__ __forceinline__ void take_registers() {}
template <uint32_t>
__device__ __forceinline__ void give_registers() {}
#endif

template <int P>
__global__ void __launch_bounds__(kThreads, 1) prompt_kernel(const __grid_constant__ AttendArguments a, uint32_t group, uint32_t slots) {
  extern __shared__ uint8_t dynamic[];
  __shared__ RingBarriers barriers;
  __shared__ TileHead heads[kMaxSlots];
  uint8_t *memory = dynamic + (0u - shared_address(dynamic)) % kSlack;
  if (threadIdx.x < slots) open_barrier(barriers.full + threadIdx.x, kFullArrivals), open_barrier(barriers.empty + threadIdx.x, kUsers);
  publish_barriers();
  __syncthreads();
  const Plan plan = *a.plan;
  const HeadGroup of(plan, a, group);
  const uint32_t ring_base = shared_address(memory) + 2 * uint32_t(image_bytes(P)), items = plan.items / a.kv_heads * of.count;
  const auto item_of = [&](uint32_t i) { return find_item(plan, a, i / of.count * a.kv_heads + of.first + i % of.count); };
  if (threadIdx.x / 32 >= kUsers) {
    give_registers<40>();
    if (threadIdx.x / 32 > kUsers) return;
    const Images images(plan, P);
    Bringer bringer{a, images, barriers, heads, ring_base, slots, threadIdx.x % 32, {}};
    for (uint32_t i = blockIdx.x; i < items; i += gridDim.x) bringer.bring_item(plan, item_of(i), i % of.count);
  } else {
    take_registers<232>();
    Ring ring{barriers, heads, ring_base, uint32_t(image_bytes(P)), slots, {}};
    for (uint32_t i = blockIdx.x; i < items; i += gridDim.x) attend_rows<P>(plan, a, item_of(i), memory, ring);
  }
}

template <int P>
cudaError_t launch(const AttendArguments &a, uint32_t group, bool merge, const Processors &processors, cudaStream_t stream) {
  const SharedShape shape = shared_shape(a.dim_k, a.dim_v, processors);
  const cudaError_t error = cudaFuncSetAttribute(prompt_kernel<P>, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shape.bytes));
  if (error != cudaSuccess) return error;
  prompt_kernel<P><<<processors.count, kThreads, shape.bytes, stream>>>(a, group, shape.slots);
  if (merge) merge_kernel<<<processors.count * 4, kMergeThreads, 0, stream>>>(a, group);
  return cudaGetLastError();
}

}  // namespace

bool has_prompt_kernel(uint32_t dim_k, uint32_t dim_v, const Processors &processors) { return shared_shape(dim_k, dim_v, processors).slots > 0; }

cudaError_t attend_prompts(const AttendArguments &arguments, const PromptLaunch &prompts, const Processors &processors, cudaStream_t stream) {
  const uint32_t panels = prompt_panels(arguments.dim_k, arguments.dim_v);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (const cudaError_t error = cudaStreamIsCapturing(stream, &status); error != cudaSuccess) return error;
  // A graph may be replayed when the plan has more groups than now, or splits.
  const bool capturing = status != cudaStreamCaptureStatusNone;
  const uint32_t groups = capturing ? arguments.kv_heads : prompts.groups;
  AttendArguments a = arguments;
  a.plan += prompts.plan;
  for (uint32_t group = 0; group < groups; group++) {
    if (const cudaError_t error = make_images(a, group, processors.count, stream); error != cudaSuccess) return error;
    const auto start = panels == 1 ? launch<1> : panels == 2 ? launch<2> : launch<4>;
    if (const cudaError_t error = start(a, group, capturing || prompts.splits, processors, stream); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace kvq::cuda
