// Encoding rows and placing them in pages: two passes with the codes of a Block (codec/codec.h) in scratch memory between them, so
// that numerics know nothing of layouts.
#pragma once
#include <cuda_runtime.h>

#include "cuda/layout.h"
#include "cuda/rows.h"

namespace kvq::cuda {

// Blocks of all heads and both tensors, for `tokens` tokens.
struct Scratch {
  uint8_t *codes;     // [head][K: tokens][dim_k], [V: tokens][dim_v]
  uint16_t *params;   // [head][tensor][params_stride]
  uint8_t *boosted;   // [head][tensor][boosted_stride]
  size_t params_stride, boosted_stride;
  uint32_t tokens, dim_k, dim_v;
  KVQ_HD uint8_t *codes_of(uint32_t head, uint32_t tensor) const {
    return codes + size_t(tokens) * (size_t(head) * (dim_k + dim_v) + (tensor ? dim_k : 0));
  }
  KVQ_HD uint16_t *params_of(uint32_t head, uint32_t tensor) const { return params + (2 * head + tensor) * params_stride; }
  KVQ_HD uint8_t *boosted_of(uint32_t head, uint32_t tensor) const { return boosted + (2 * head + tensor) * boosted_stride; }
};

// Parameters of n tokens in a Block.
KVQ_HD inline size_t params_of(const TensorFormat &f, uint32_t tokens) {
  if (f.family == Family::raw) return size_t(tokens) * f.dim;
  if (f.row_params) return size_t(tokens) * f.row_params;
  return size_t((tokens + f.group - 1) / f.group) * f.dim * 2;
}

struct PackShape {
  RawShape raw;
  bool rows[2], columns[2];  // by tensor: does any head have a row codec, a column codec?
  uint32_t group[2];         // tokens of the columns' groups
};

// Encode the tokens of `pieces` into `scratch`.
cudaError_t encode(const PackShape &shape, const DeviceFormat &format, const DevicePiece *pieces, uint32_t n_pieces,
                   const Scratch &scratch, cudaStream_t stream);
// Put the scratch's tokens into rows of packed pages, or read rows of pages into the scratch.
cudaError_t place(const DeviceFormat &format, const DevicePiece *targets, uint32_t n_targets, const Scratch &scratch, cudaStream_t stream);
cudaError_t fetch(const DeviceFormat &format, const void *page, uint32_t first, uint32_t count, uint32_t head, uint32_t tensor,
                  const Scratch &scratch, cudaStream_t stream);

}  // namespace kvq::cuda
