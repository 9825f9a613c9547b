// The memory of a tile (tile.cuh).
#pragma once
#include "cuda/layout.h"
#include "cuda/rows.h"

namespace kvq::cuda {

constexpr uint32_t kMaxPackThreads = 256;

// Bytes of a tile's arrays.  The strides spread the accesses of a warp over all banks: 8 rows at a time, 16 bytes of each.
struct TileShape {
  uint32_t page_tokens, dim;  // the larger of K and V
  uint32_t work_bytes, threads;
  bool staged;  // are raw rows kept in the tile?  Else their place holds only what placing turns: a byte per code
  KVQ_HD uint32_t raw_stride() const { return (dim + 15) / 16 * 16 + 16; }
  KVQ_HD uint32_t code_stride() const { return (dim + 15) / 16 * 16 + 16; }
  KVQ_HD size_t raw_bytes() const { return size_t(page_tokens) * (staged ? raw_stride() * 2 : (dim + 15) / 16 * 16); }
  KVQ_HD size_t code_bytes() const { return size_t(page_tokens) * code_stride(); }
  KVQ_HD size_t bytes() const { return raw_bytes() + code_bytes() + work_bytes; }
};

}  // namespace kvq::cuda
