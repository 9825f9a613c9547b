// Packed pages: encoding raw rows into them, narrowing them (PM-KVQ), and reading them back.
#pragma once
#include <cuda_runtime.h>

#include <span>

#include "cuda/tile.h"

namespace kvq::cuda {

// How the rows of a tensor are encoded; any: as its format says.
enum class Encoder : uint8_t {
  any,
  general,
  raw,
  columns,
  groups,
  affine,
  book4,
  book8,
  book16
};
// How pages of a format are packed.  Blocks of threads keep their tile in shared memory, or, where that is too small, in `bytes` of
// device memory each.
struct PackPlan {
  PackPlan(const RawShape &raw, uint32_t page_tokens, std::span<const TensorFormat> tensors, size_t shared_limit, uint32_t processors,
           bool narrows);
  RawShape shape;
  TileShape tile;
  uint32_t kernel = 0;
  size_t bytes;
  bool shared;
  uint32_t blocks;  // at most, where not shared
};
// Once per device: allow kernels this much shared memory.
cudaError_t prepare_packing(size_t shared_limit);

// Encode the rows of `sources`, in order, into the rows of `targets`.  scratch: plan.bytes for each block, or nullptr.
cudaError_t pack(const PackPlan &plan, const DeviceFormat &format, const DevicePiece *sources, uint32_t n_sources,
                 const DevicePiece *targets, uint32_t n_targets, void *scratch, cudaStream_t stream);
// Rows [0, count) of a page of progressive codecs in a page of narrower ones.
cudaError_t narrow(const PackPlan &plan, const DeviceFormat &from, const void *page, const DeviceFormat &to, void *narrower,
                   uint32_t count, void *scratch, cudaStream_t stream);

// Rows of one head and tensor as a Block (codec/codec.h).
struct BlockRows {
  uint8_t *codes;    // [tokens][dim]
  uint16_t *params;
  uint8_t *boosted;
};
cudaError_t unpack(const DeviceFormat &format, const void *page, uint32_t first, uint32_t count, uint32_t head, uint32_t tensor,
                   const BlockRows &block, cudaStream_t stream);

// Parameters of n tokens in a Block.
KVQ_HD inline size_t params_of(const TensorFormat &f, uint32_t tokens) {
  if (f.family == Family::raw) return size_t(tokens) * f.dim;
  if (f.row_params) return size_t(tokens) * f.row_params;
  return size_t((tokens + f.group - 1) / f.group) * f.dim * 2;
}

}  // namespace kvq::cuda
