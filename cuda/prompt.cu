// The second kernel of prompt.h: blocks of 128 rows against images, online softmax in base 2, fp32 sums.
//
// Two groups of four warps have 64 rows each; another warp brings images.  Per tile: logits Q * K^T (for packed keys of both parts),
// weights P = probability * scale of the token's values, outputs P * V.  A row's reference is its largest weight, not its largest
// probability, so that a token that outshines all others has weight 1, which fp16 holds.  Weights are two fp16 numbers, and values
// where they are no fp16 numbers: all products but that of the small parts.  (One fp16 number each would leave an error of 0.4 of the
// tolerance on average, and of more than all of it in one of 20000 rows: tokens that count are few, so that roundings do not average.)
// While a tile's weights are computed, products with the last tile's values are under way.
#include <algorithm>

#include "cuda/prompt_matrix.cuh"
#include "cuda/prompt_results.cuh"
#include "cuda/prompt_ring.cuh"

namespace kvq::cuda {
namespace {

// Three groups of four warps; with wgmma the registers of the last one, of which one warp works, go to the others.
constexpr uint32_t kThreads = 384;
constexpr uint32_t kSlack = 1024;  // to align images
constexpr uint32_t kLeastSlots = 4;  // values of the last tile, both parts of keys, values of this one; to keep low values one more
constexpr uint32_t slot_bytes(uint32_t panels) { return uint32_t(image_bytes(panels) + kLineBytes); }

// Dynamic shared memory: queries (an image for each group of warps), then the ring.
struct SharedShape {
  uint32_t slots, bytes;
};
SharedShape shared_shape(uint32_t dim_k, uint32_t dim_v, const Processors &processors) {
  constexpr uint32_t kFixed = kSlack + 2048;  // and what is static
  const uint32_t panels = prompt_panels(dim_k, dim_v), image = uint32_t(image_bytes(panels)), queries = 2 * image, slot = slot_bytes(panels);
  if (panels == 0 || processors.block_bytes < kFixed + queries) return {0, 0};
  const uint32_t slots = std::min((processors.block_bytes - kFixed - queries) / slot, kMaxSlots);
  return slots < kLeastSlots + keeps_low_values(image) ? SharedShape{0, 0} : SharedShape{slots, kSlack + queries + slots * slot};
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
  __device__ __forceinline__ void bring(const uint8_t *image, uint32_t bytes) {
    copy_image(ring + at.slot * (images.bytes + uint32_t(kLineBytes)), image, bytes, barriers.full + at.slot, lane);
    at.next(slots);
  }
  __device__ __forceinline__ void bring_tile(const TileHead &head, uint32_t kv_head, uint32_t tile) {
    await_slot();
    if (lane == 0) heads[at.slot] = head;
    bring(images.at(kv_head, tile, Image::keys), images.bytes);
    if (head.has(TileHead::kKeysLow)) await_slot(), bring(images.at(kv_head, tile, Image::keys_low), images.bytes);
    await_slot();
    bring(images.at(kv_head, tile, Image::values), images.bytes + uint32_t(kLineBytes));
    if (head.has(TileHead::kValuesLow)) await_slot(), bring(images.at(kv_head, tile, Image::values_low), images.bytes);
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
          const TileNote note = *images.note(kv_head, sequence.first_tile + first + lane);
          const uint32_t flags = masked * TileHead::kMasked | note.keys_low * TileHead::kKeysLow | note.values_low * TileHead::kValuesLow | note.zeros * TileHead::kZeros;
          mine = {part.count, part.position, part.positions, flags, note.key_scale};
        }
      }
      for (uint32_t left = __ballot_sync(~0u, mine.tokens > 0); left; left &= left - 1) {
        const int from = __ffs(int(left)) - 1;
        const auto of = [&](auto x) { return __shfl_sync(~0u, x, from); };
        const TileHead head{of(mine.tokens), of(mine.position), of(mine.positions), of(mine.flags), of(mine.key_scale)};
        bring_tile(head, kv_head, sequence.first_tile + first + uint32_t(from));
      }
    }
    end_item();
  }
};

// ---- the warps that use them

__device__ __forceinline__ void meet(uint32_t group) { asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory"); }
// All of them and the one that brings images.
__device__ __forceinline__ void meet_all() { asm volatile("bar.sync 3, %0;" ::"n"(32 * (kUsers + 1)) : "memory"); }

// Eight channels of a query, entered one by one.
__device__ __forceinline__ uint4 enter_eight(const AttendArguments &a, const Item &item, uint32_t row, uint32_t channel) {
  uint32_t words[4] = {};
  for (uint32_t j = 0; j < 8 && channel + j < a.dim_k; j++) words[j / 2] |= uint32_t(float_to_half(load_query(item, a, row, channel + j))) << j % 2 * 16;
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// Rows of a group of warps as an image, entered by rule 1.4 and not scaled.
template <int P>
__device__ void enter_queries(const AttendArguments &a, const Item &item, uint32_t group, uint8_t *image) {
  constexpr uint32_t kPieces = 4 * P;  // of a thread
  const bool wide = a.q.dtype == KVQ_DTYPE_F16 && (reinterpret_cast<uintptr_t>(a.q.data) | a.q.token_stride * 2 | a.q.head_stride * 2) % 16 == 0;
  const uint32_t eight = threadIdx.x % (8 * P), channel = 8 * eight;
  const auto row_of = [&](uint32_t i) { return (threadIdx.x % 128 + 128 * i) / (8 * P); };
  uint4 x[kPieces];
  uint32_t slow = 0;  // pieces that are not read at once
#pragma unroll
  for (uint32_t i = 0; i < kPieces; i++) {  // all of them under way together
    const uint32_t row = 64 * group + row_of(i);
    x[i] = make_uint4(0, 0, 0, 0);
    if (row >= item.rows || channel >= a.dim_k) continue;
    if (!wide || channel + 8 > a.dim_k) {
      slow |= 1u << i;
      continue;
    }
    const int64_t at = int64_t(item.sequence->first_query + row_query(item, a, row)) * a.q.token_stride + int64_t(row_head(item, a, row)) * a.q.head_stride + channel;
    x[i] = *reinterpret_cast<const uint4 *>(static_cast<const uint16_t *>(a.q.data) + at);
  }
#pragma unroll
  for (uint32_t i = 0; i < kPieces; i++) {
    if (!is_plain(make_uint2(x[i].x, x[i].y)) || !is_plain(make_uint2(x[i].z, x[i].w))) slow |= 1u << i;
    *reinterpret_cast<uint4 *>(image + image_offset(row_of(i), eight)) = x[i];
  }
  for (; slow; slow &= slow - 1) {
    const uint32_t row = row_of(uint32_t(__ffs(int(slow)) - 1));
    *reinterpret_cast<uint4 *>(image + image_offset(row, eight)) = enter_eight(a, item, 64 * group + row, channel);
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

// Logits to weights, which are returned in s, against the rows' references; alpha: what older sums are multiplied with.
template <int P>
__device__ __forceinline__ void soften(const AttendArguments &a, const TileHead &tile, const TokenLine &line, const uint32_t *positions, uint32_t t,
                                       const Visible (&sees)[2], float (&s)[32], RowSums<P> &sums, float (&alpha)[2]) {
  const float unit = a.scale * kLog2E * tile.key_scale;
  if (a.softcap > 0)
#pragma unroll
    for (int i = 0; i < 32; i++) s[i] = cap_logit(s[i] * unit, a.softcap);
  const float factor = a.softcap > 0 ? 1.0f : unit;
#pragma unroll
  for (int j = 0; j < 8; j++) {
    const float2 scale = *reinterpret_cast<const float2 *>(line.log_scale + 8 * j + 2 * t);
#pragma unroll
    for (int i = 0; i < 4; i++) s[4 * j + i] = fmaf(s[4 * j + i], factor, i % 2 ? scale.y : scale.x);
  }
  if (tile.has(TileHead::kMasked)) hide(tile, positions, t, sees, s);
#pragma unroll
  for (int row = 0; row < 2; row++) {
    float tops[2] = {sums.m[row], sums.m[row]};  // two chains
#pragma unroll
    for (int i = 0; i < 16; i++) tops[i % 2] = fmaxf(tops[i % 2], s[i / 2 * 4 + 2 * row + i % 2]);
    float top = fmaxf(tops[0], tops[1]);
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    alpha[row] = exp2_fast(sums.m[row] - top);
    sums.m[row] = top, sums.l[row] *= alpha[row], sums.zero[row] *= alpha[row];
  }
  float l[4] = {};
#pragma unroll
  for (int j = 0; j < 8; j++) {
    const float2 inverse = *reinterpret_cast<const float2 *>(line.inverse + 8 * j + 2 * t);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float &x = s[4 * j + i];
      x = exp2_fast(x - sums.m[i / 2]);
      l[i] = fmaf(x, i % 2 ? inverse.y : inverse.x, l[i]);
    }
  }
  sums.l[0] += l[0] + l[1], sums.l[1] += l[2] + l[3];
  if (!tile.has(TileHead::kZeros)) return;
#pragma unroll
  for (int j = 0; j < 8; j++) {
    const float2 zero = *reinterpret_cast<const float2 *>(line.zero + 8 * j + 2 * t);
#pragma unroll
    for (int i = 0; i < 4; i++) sums.zero[i / 2] = fmaf(s[4 * j + i], i % 2 ? zero.y : zero.x, sums.zero[i / 2]);
  }
}

// Weights as A operands: the nearest fp16 numbers, and what they leave.
struct Weights {
  uint32_t high[4][4], low[4][4];
  __device__ __forceinline__ void pack(const float (&s)[32]) {
#pragma unroll
    for (int i = 0; i < 16; i++) {
      high[i / 4][i % 4] = pack_halves(s[2 * i], s[2 * i + 1]);
      const float2 near = __half22float2(*reinterpret_cast<const __half2 *>(&high[i / 4][i % 4]));
      low[i / 4][i % 4] = pack_halves(s[2 * i] - near.x, s[2 * i + 1] - near.y);
    }
  }
};

struct Ring {
  RingBarriers &barriers;
  const TileHead *heads;
  const uint8_t *memory;
  uint32_t base, slot_bytes, slots;  // base: shared address of `memory`
  Cursor at;
  // The shared address of an image that has come.
  __device__ __forceinline__ uint32_t await_image(const Cursor &place) const {
    await(barriers.full + place.slot, place.round);
    return base + place.slot * slot_bytes;
  }
  __device__ __forceinline__ Cursor take() {
    const Cursor place = at;
    at.next(slots);
    return place;
  }
  // Every lane says that it has read: racecheck does not follow one that speaks for a warp.
  __device__ __forceinline__ void release(const Cursor &place) const {
    arrive(barriers.empty + place.slot);
  }
};

template <int P>
__device__ __forceinline__ void settle_outputs(RowSums<P> &sums) {
#pragma unroll
  for (int panel = 0; panel < P; panel++) settle(sums.o[panel]);
}

// A tile and its places in the ring.
struct Taken {
  TileHead head;
  Cursor keys, keys_low, values, values_low;
};

// The next tile; without one the item is over.
__device__ __forceinline__ bool take_tile(Ring &ring, Taken &tile) {
  tile.keys = ring.take();
  ring.await_image(tile.keys);
  tile.head = ring.heads[tile.keys.slot];
  tile.head.flags = uniform(tile.head.flags);
  if (tile.head.tokens == 0) {
    ring.release(tile.keys);
    return false;
  }
  if (tile.head.has(TileHead::kKeysLow)) tile.keys_low = ring.take();
  tile.values = ring.take();
  if (tile.head.has(TileHead::kValuesLow)) tile.values_low = ring.take();
  return true;
}

template <int P>
__device__ __forceinline__ void begin_logits(const QueryOperand<P> &q, const Ring &ring, const Taken &tile, float (&s)[32]) {
  begin_products();
  q.multiply(s, ring.await_image(tile.keys), 0);
  if (tile.head.has(TileHead::kKeysLow)) q.multiply(s, ring.await_image(tile.keys_low), 1);
  commit_products();
}

template <int P>
__device__ __forceinline__ void multiply_tile(uint32_t image, const uint32_t (&p)[4][4], RowSums<P> &sums) {
#pragma unroll
  for (int k = 0; k < 4; k++) {
    if constexpr (P == 1)
      multiply_values(sums.o[0], p[k], image, 0, k);
    else
#pragma unroll
      for (int panel = 0; panel < P; panel += 2) multiply_values(sums.o[panel], sums.o[panel + 1], p[k], image, panel, k);
  }
}

// Both parts of weights and of values, but for the product of the small ones.
template <int P>
__device__ __forceinline__ void begin_values(const Ring &ring, const Taken &tile, const Weights &weights, RowSums<P> &sums) {
  const uint32_t image = ring.await_image(tile.values);
  begin_products();
  multiply_tile<P>(image, weights.high, sums);
  multiply_tile<P>(image, weights.low, sums);
  if (tile.head.has(TileHead::kValuesLow)) multiply_tile<P>(ring.await_image(tile.values_low), weights.high, sums);
  commit_products();
}
template <int P>
__device__ __forceinline__ void end_values(RowSums<P> &sums) {
  await_products<0>();
  settle_outputs(sums);
}
__device__ __forceinline__ void release_values(const Ring &ring, const Taken &tile) {
  ring.release(tile.values);
  if (tile.head.has(TileHead::kValuesLow)) ring.release(tile.values_low);
}
template <int P>
__device__ __forceinline__ void use_values(const Ring &ring, const Taken &tile, const Weights &weights, RowSums<P> &sums) {
  begin_values(ring, tile, weights, sums);
  end_values(sums);
  release_values(ring, tile);
}

// The tiles of an item.  Products with a tile's values are under way while the next tile's weights are computed, where the ring has room.
template <int P>
__device__ __forceinline__ void use_tiles(const AttendArguments &a, const QueryOperand<P> &q, const uint32_t *positions, uint32_t t, const Visible (&sees)[2], Ring &ring,
                                          RowSums<P> &sums) {
  Taken tile, last;
  float s[32];
  Weights weights;
  bool first = true;  // no values are waiting
  while (take_tile(ring, tile)) {
    begin_logits(q, ring, tile, s);
    if (!first) begin_values(ring, last, weights, sums);
    if (first)
      await_products<0>();
    else
      await_products<1>();
    settle(s);
    ring.release(tile.keys);
    if (tile.head.has(TileHead::kKeysLow)) ring.release(tile.keys_low);
    ring.await_image(tile.values);
    const TokenLine &line = *reinterpret_cast<const TokenLine *>(ring.memory + tile.values.slot * ring.slot_bytes + image_bytes(P));
    float alpha[2];
    soften(a, tile.head, line, positions, t, sees, s, sums, alpha);
    end_values(sums);
    if (!first) release_values(ring, last);
    if (__any_sync(~0u, alpha[0] != 1 || alpha[1] != 1)) sums.scale_outputs(alpha);
    weights.pack(s);
    last = tile, first = false;
    if (!keeps_low_values(image_bytes(P)) && tile.head.has(TileHead::kValuesLow)) use_values(ring, last, weights, sums), first = true;
  }
  if (!first) use_values(ring, last, weights, sums);
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
  for (int i = 0; i < 2; i++) {
    sums.l[i] += __shfl_xor_sync(~0u, sums.l[i], 1), sums.l[i] += __shfl_xor_sync(~0u, sums.l[i], 2);
    sums.zero[i] += __shfl_xor_sync(~0u, sums.zero[i], 1), sums.zero[i] += __shfl_xor_sync(~0u, sums.zero[i], 2);
  }
#pragma unroll
  for (int p = 0; p < P; p++)
#pragma unroll
    for (int i = 0; i < 32; i++) sums.o[p][i] += sums.zero[i / 2 % 2];
  if (const TensorFormat *space = value_space(*item.sequence, item.head)) unrotate<P>(*space, t, sums.o);
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
  if (threadIdx.x < slots) open_barrier(barriers.full + threadIdx.x, kFullArrivals), open_barrier(barriers.empty + threadIdx.x, 32 * kUsers);
  publish_barriers();
  __syncthreads();
  const Plan plan = *a.plan;
  const HeadGroup of(plan, a, group);
  const uint8_t *ring_memory = memory + 2 * image_bytes(P);
  const uint32_t ring_base = shared_address(ring_memory), items = plan.items / a.kv_heads * of.count;
  const auto item_of = [&](uint32_t i) { return find_item(plan, a, i / of.count * a.kv_heads + of.first + i % of.count); };
  if (threadIdx.x / 32 >= kUsers) {
    give_registers<40>();
    if (threadIdx.x / 32 > kUsers) return;
    const Images images(plan, P);
    await_earlier();  // the images
    Bringer bringer{a, images, barriers, heads, ring_base, slots, threadIdx.x % 32, {}};
    for (uint32_t i = blockIdx.x; i < items; i += gridDim.x) bringer.bring_item(plan, item_of(i), i % of.count);
  } else {
    take_registers<232>();
    Ring ring{barriers, heads, ring_memory, ring_base, slot_bytes(P), slots, {}};
    for (uint32_t i = blockIdx.x; i < items; i += gridDim.x) attend_rows<P>(plan, a, item_of(i), memory, ring);
  }
  meet_all();
  if (threadIdx.x < slots) close_barrier(shared_address(barriers.full + threadIdx.x)), close_barrier(shared_address(barriers.empty + threadIdx.x));
}

template <int P>
cudaError_t launch(const AttendArguments &a, uint32_t group, bool merge, const Processors &processors, cudaStream_t stream) {
  const SharedShape shape = shared_shape(a.dim_k, a.dim_v, processors);
  const cudaError_t error = cudaFuncSetAttribute(prompt_kernel<P>, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shape.bytes));
  if (error != cudaSuccess) return error;
  if (const cudaError_t started = launch_early(prompt_kernel<P>, processors.count, kThreads, shape.bytes, processors, stream, a, group, shape.slots); started != cudaSuccess)
    return started;
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
  for (uint32_t group = 0; group < groups; group++) {
    if (const cudaError_t error = make_images(arguments, group, processors, stream); error != cudaSuccess) return error;
    const auto start = panels == 1 ? launch<1> : panels == 2 ? launch<2> : launch<4>;
    if (const cudaError_t error = start(arguments, group, capturing || prompts.splits, processors, stream); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace kvq::cuda
