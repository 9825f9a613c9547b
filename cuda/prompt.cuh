// What the two kernels of prompt.h share: images, and the tiles of a sequence.
//
// An image is [panel][64 tokens][64 channels] fp16: rows of 128 bytes whose 16-byte pieces are exchanged by the token's last three bits,
// which is the 128-byte swizzle of the matrix descriptors of sm_90 and spreads ldmatrix over all banks.  Channels and tokens that do
// not exist are 0.  A tile of a head has up to four images.
//
// Keys = (high + low) * key_scale, by channel, as they are exported; low only where high is not exact.
// Values = scale * (number + zero), scale and zero of the token: numbers are small integers, exact in fp16, where the page has a scale
// for each token; else they are values times a power of two, high + low.  Where all pages of a head have values in the same rotation, numbers stay
// in it, and raw values are brought there; outputs leave it at the end.
#pragma once
#include "cuda/attend.cuh"
#include "cuda/prompt.h"

namespace kvq::cuda {

enum class Image : uint32_t {
  keys,
  keys_low,
  values,
  values_low
};

// Of the tokens of a tile, behind the image of its values.
struct TokenLine {
  float log_scale[kTile], inverse[kTile];  // log2(scale), 1 / scale
  float zero[kTile];
};
static_assert(sizeof(TokenLine) <= kLineBytes);

struct TileNote {
  float key_scale;
  uint32_t keys_low, values_low;  // there is a second image
  uint32_t zeros;                 // tokens have zeros
};
static_assert(sizeof(TileNote) == kNoteBytes);

// Has the ring room for the second image of the last tile's values beside all of the next tile's?
KVQ_HD constexpr bool keeps_low_values(size_t image) { return image <= image_bytes(2); }

struct Images {
  uint8_t *base;
  uint32_t tiles, heads, bytes;  // of a head; at once; of an image
  __device__ __forceinline__ Images(const Plan &plan, uint32_t panels)
      : base(plan.images), tiles(plan.tiles), heads(plan.heads_at_once), bytes(uint32_t(image_bytes(panels))) {}
  // head: counted from the first of its group.
  __device__ __forceinline__ uint8_t *at(uint32_t head, uint32_t tile, Image image) const {
    const uint32_t offset = uint32_t(image) * bytes + (image == Image::values_low ? uint32_t(kLineBytes) : 0);
    return base + (size_t(head) * tiles + tile) * (4 * bytes + kLineBytes) + offset;
  }
  __device__ __forceinline__ TokenLine *line(uint32_t head, uint32_t tile) const {
    return reinterpret_cast<TokenLine *>(at(head, tile, Image::values) + bytes);
  }
  __device__ __forceinline__ TileNote *note(uint32_t head, uint32_t tile) const {
    return reinterpret_cast<TileNote *>(base + size_t(heads) * tiles * (4 * bytes + kLineBytes)) + size_t(head) * tiles + tile;
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

// Values that have a scale for each token and integers up to 127.
__device__ __forceinline__ bool has_numbers(const TensorFormat &f) {
  return f.layout == Layout::fragments && f.coding != Coding::fields && Kind(f.kind) != Kind::channel_split && (f.family == Family::rows_book || f.family == Family::rows_affine);
}
// The format whose rotation the values of a head are in: nullptr, none.
__device__ __forceinline__ const TensorFormat *value_space(const SequenceEntry &sequence, uint32_t head) {
  const TensorFormat *space = nullptr;
  for (const TensorFormat *all : sequence.tensors) {
    const TensorFormat *f = all ? all + 2 * head + 1 : nullptr;
    if (!f) continue;
    if (!has_numbers(*f) || !f->rotate) return nullptr;
    if (space && (space->seed != f->seed || space->region[0].rotation != f->region[0].rotation)) return nullptr;
    space = f;
  }
  return space;
}

}  // namespace kvq::cuda
