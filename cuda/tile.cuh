// What a block of threads packs: the rows of one page that it adds, of one head and tensor.  Encoders fill `codes` and write
// parameters to the page; placing turns the codes into the page's bytes.  So numerics know nothing of layouts.
#pragma once
#include "cuda/code.cuh"
#include "cuda/enter.cuh"
#include "cuda/tile.h"

namespace kvq::cuda {

// Codings (layout.h) that the codes of an encoder may be placed in, besides streams.
constexpr uint32_t kNibbles = 1u << uint32_t(Coding::nibbles), kPlaneBits = 1u << uint32_t(Coding::planes),
                   kCrumbs = 1u << uint32_t(Coding::crumbs), kFields = 1u << uint32_t(Coding::fields), kRadix = 1u << uint32_t(Coding::radix);
constexpr uint32_t kAllCodings = kNibbles | kPlaneBits | kCrumbs | kFields | kRadix;

// store_param and load_param in the device's own instructions.
KVQ_HD inline uint16_t round_param(float x, ParamType type) {
#ifdef __CUDA_ARCH__
  if (type == ParamType::fp16) return narrow(x);
#endif
  return store_param(x, type);
}
KVQ_HD inline float widen_param(uint16_t bits, ParamType type) {
#ifdef __CUDA_ARCH__
  if (type == ParamType::fp16) return widen(bits);
#endif
  return load_param(bits, type);
}

// Raw rows where they lie: row `start` of a list of pieces and those behind it, of one head and tensor.
struct RowSource {
  RawShape shape;
  const DevicePiece *pieces;
  uint32_t n_pieces, head, tensor, start;
  __device__ const uint16_t *row(uint32_t i) const {
    const DevicePiece &piece = find_piece(pieces, n_pieces, start + i);
    return static_cast<const uint16_t *>(piece.page) + shape.row(head, tensor, piece.first + start + i - piece.start);
  }
};

struct Tile {
  const TensorFormat &f;
  uint8_t *blob;
  uint32_t first, count;  // rows of the page
  uint16_t *raw;          // [count][raw_stride] fp16 in the order of raw_place
  uint8_t *codes;         // [page_tokens][code_stride] by slot
  uint8_t *work;          // of encoders
  uint32_t raw_stride, code_stride;
  RowSource source;       // where encoders that read a row once find it; without pieces: in raw

  __device__ const uint16_t *row(uint32_t i) const { return raw + size_t(i) * raw_stride; }
  __device__ const uint16_t *row_in_place(uint32_t i) const { return source.pieces ? source.row(i) : row(i); }
  __device__ uint8_t *codes_of(uint32_t token) const { return codes + size_t(token) * code_stride; }
  __device__ void store_param(uint32_t at, uint16_t value) const {
    if (f.param_bytes == 1)
      blob[at] = uint8_t(value);
    else
      *reinterpret_cast<uint16_t *>(blob + at) = value;
  }
};

}  // namespace kvq::cuda
