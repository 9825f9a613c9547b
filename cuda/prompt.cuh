// What the two kernels of prompt.h share: images, and the tiles of a sequence.
//
// An image is [panel][64 tokens][64 channels] fp16: rows of 128 bytes whose 16-byte pieces are exchanged by the token's last three bits,
// which is the 128-byte swizzle of the matrix descriptors of sm_90 and spreads ldmatrix over all banks.  Channels and tokens that do
// not exist are 0.  A tile of a head has three: keys = high + low (low only where high is not exact) and values, all times a power of
// two (1, unless values are tiny or beyond fp16).
#pragma once
#include "cuda/attend.cuh"
#include "cuda/prompt.h"

namespace kvq::cuda {

enum class Image : uint32_t {
  keys,
  keys_low,
  values
};

// A tile's scales: what an image's numbers are multiplied with.
struct Images {
  uint8_t *base;
  uint32_t tiles, heads, bytes;  // of a head; at once; of an image
  __device__ __forceinline__ Images(const Plan &plan, uint32_t panels)
      : base(plan.images), tiles(plan.tiles), heads(plan.heads_at_once), bytes(uint32_t(image_bytes(panels))) {}
  // head: counted from the first of its group.
  __device__ __forceinline__ uint8_t *at(uint32_t head, uint32_t tile, Image image) const {
    const size_t index = size_t(head) * tiles + tile;
    return base + (index * 3 + uint32_t(image)) * bytes;
  }
  __device__ __forceinline__ float *scales(uint32_t head, uint32_t tile) const {
    return reinterpret_cast<float *>(base + size_t(heads) * tiles * 3 * bytes) + 2 * (size_t(head) * tiles + tile);
  }
};
// Offset of eight channels of a token in an image.
__device__ __forceinline__ uint32_t image_offset(uint32_t token, uint32_t eight) {
  return eight / 8 * 8192 + token * 128 + ((eight ^ token) & 7) * 16;
}

// The KV heads of a launch.
struct HeadGroup {
  uint32_t first, count;
  __device__ __forceinline__ HeadGroup(const Plan &plan, const AttendArguments &a, uint32_t group) {
    first = group * plan.heads_at_once;
    count = first < a.kv_heads ? min(plan.heads_at_once, a.kv_heads - first) : 0;
  }
};

// Up to 64 rows of a page.
struct TilePart {
  const void *page;
  uint32_t kind, row, count;
  uint32_t position, positions;  // as those of PageEntry, of the first row
  uint32_t low, high;            // the least and the largest position
};
__device__ __forceinline__ uint32_t sequence_tiles(const SequenceEntry &sequence) {
  return sequence.pages + sequence.listed * (sequence.page_tiles - 1);
}
__device__ __forceinline__ TilePart find_part(const Plan &plan, const SequenceEntry &sequence, uint32_t tile) {
  const uint32_t listed = sequence.listed * sequence.page_tiles;
  uint32_t page = tile, part = 0;
  if (tile >= sequence.front && tile < sequence.front + listed)
    page = sequence.front + (tile - sequence.front) / sequence.page_tiles, part = (tile - sequence.front) % sequence.page_tiles;
  else if (tile >= sequence.front)
    page = tile - listed + sequence.listed;
  const PageEntry &entry = page_of(plan.pages, sequence, page);
  const uint32_t done = part * kTile, count = entry.count > done ? min(kTile, entry.count - done) : 0;
  TilePart result{entry.page, entry.kind, entry.first + done, count, entry.position + done, entry.positions ? entry.positions + done : 0, 0, 0};
  if (count == 0) return result;
  const uint32_t *list = sequence.positions + result.positions - 1;
  result.low = result.positions ? list[0] : result.position;
  result.high = result.positions ? list[count - 1] : result.position + count - 1;
  return result;
}

// The format of a part's rows: nullptr if they are raw.
__device__ __forceinline__ const TensorFormat *part_format(const SequenceEntry &sequence, uint32_t kind, uint32_t head, uint32_t tensor) {
  const TensorFormat *all = kind == kRawKind ? nullptr : sequence.tensors[kind];
  return all ? all + 2 * head + tensor : nullptr;
}
// Are keys of this format fp16 numbers?
__device__ __forceinline__ bool is_exact(const TensorFormat *f) { return !f || (f->family == Family::raw && !f->mu); }

}  // namespace kvq::cuda
