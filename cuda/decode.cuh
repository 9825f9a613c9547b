// Rows of a page as floats, one element at a time: any codec, any layout.
#pragma once
#include "cuda/code.cuh"

namespace kvq::cuda {

// Where rows lie: of a packed page (format of the head and tensor), or of a raw one (format nullptr).
struct RowSource {
  const void *page;
  const TensorFormat *format;
  uint32_t head, tensor;
};

// Rows [row, row + count) by a block of threads, to tile [count][stride].  Packed rows come in the order (and the rotation) of their
// slots and without mu; slots 2 p and 2 p + 1 of polar are u and v.
__device__ inline void decode_rows(const RowSource &from, const RawShape &shape, uint32_t row, uint32_t count, float *tile, uint32_t stride) {
  const uint32_t dim = from.tensor ? shape.dim_v : shape.dim_k;
  const TensorFormat *f = from.format;
  if (!f) {
    const uint16_t *x = static_cast<const uint16_t *>(from.page) + shape.row(from.head, from.tensor, row);
    for (uint32_t i = threadIdx.x; i < count * dim; i += blockDim.x)
      tile[i / dim * stride + i % dim] = half_to_float(x[i / dim * dim + raw_place(dim, i % dim)]);
    return;
  }
  const uint8_t *blob = static_cast<const uint8_t *>(from.page) + f->blob;
  if (f->family == Family::polar) {
    for (uint32_t i = threadIdx.x; i < count * dim / 2; i += blockDim.x) {
      const uint32_t token = i / (dim / 2), pair = i % (dim / 2);
      const float radius = page_value(*f, blob, 0, row + token, pair);
      const SinCos unit = polar_sin_cos(page_value(*f, blob, 1, row + token, pair + dim / 2));
      tile[token * stride + 2 * pair] = radius * unit.cos;
      tile[token * stride + 2 * pair + 1] = radius * unit.sin;
    }
    return;
  }
  for (uint32_t i = threadIdx.x; i < count * dim; i += blockDim.x)
    tile[i / dim * stride + i % dim] = page_value(*f, blob, f->family == Family::raw ? 0 : region_of(*f, i % dim), row + i / dim, i % dim);
}

}  // namespace kvq::cuda
