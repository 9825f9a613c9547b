// Encoders: rules 2.1 to 2.5 and the rotation, bit for bit as in src/codec.  Compiled without contraction.
#include <cmath>

#include "codec/affine.h"
#include "codec/polar_rules.h"
#include "codec/row_rules.h"
#include "cuda/pack.h"

namespace kvq::cuda {
namespace {

constexpr uint32_t kMaxDim = 1024, kWarps = 4;

__device__ const uint16_t *source_row(const RawShape &shape, const DevicePiece *pieces, uint32_t n, uint32_t row, uint32_t head,
                                      uint32_t tensor) {
  uint32_t low = 0, high = n;
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    (pieces[middle].start <= row ? low : high) = middle;
  }
  return static_cast<const uint16_t *>(pieces[low].page) + shape.row(head, tensor, pieces[low].first + row - pieces[low].start);
}

// ---- a warp's row in shared memory

struct Row {
  float *y, *v;  // [kMaxDim] each: the row, and scratch of sums
  uint32_t lane;
};

// tree() of section 1.3 over v[0..n), which is overwritten: neighbours first.
__device__ float tree(const Row &row, uint32_t n) {
  for (uint32_t d = 1; d < n; d *= 2) {
    __syncwarp();
    for (uint32_t i = row.lane * 2 * d; i < n; i += 64 * d) row.v[i] = row.v[i] + (i + d < n ? row.v[i + d] : 0.0f);
  }
  __syncwarp();
  const float sum = row.v[0];
  __syncwarp();
  return sum;
}

__device__ void rotate(const Row &row, const TensorFormat &f, const Region &region) {
  const uint32_t width = region.count, power = 1u << (31 - __clz(width));
  for (uint32_t q = 0; q < (power == width ? 1u : 2u); q++) {
    const uint64_t seed = sign_seed(f.seed, f.tensor, q, region.rotation);
    __syncwarp();
    for (uint32_t i = row.lane; i < width; i += 32)
      row.y[i] *= splitmix64(seed ^ i / 64) >> i % 64 & 1u ? -1.0f : 1.0f;
    float *y = row.y + (q ? width - power : 0);
    for (uint32_t d = 1; d < power; d *= 2) {
      __syncwarp();
      for (uint32_t i = row.lane; i < power / 2; i += 32) {
        float *at = y + i / d * 2 * d + i % d;
        const float a = at[0], b = at[d];
        at[0] = a + b, at[d] = a - b;
      }
    }
    __syncwarp();
    const float c = float(1.0 / sqrt(double(power)));
    for (uint32_t i = row.lane; i < power && power > 1; i += 32) y[i] *= c;
  }
  __syncwarp();
}

__device__ void load(const Row &row, const TensorFormat &f, const Region &region, const uint16_t *x) {
  __syncwarp();
  for (uint32_t j = row.lane; j < region.count; j += 32) {
    const uint32_t channel = f.channel[region.first + j];
    const float value = half_to_float(x[raw_place(f.dim, channel)]);
    row.y[j] = f.mu ? value - half_to_float(f.mu[channel]) : value;
  }
  __syncwarp();
}

__device__ uint64_t warp_sum(uint64_t n) {
  for (int d = 16; d; d /= 2) n += __shfl_xor_sync(~0u, n, d);
  return n;
}

// Number of thresholds t_j * sigma below y: they ascend, so a search finds it.
__device__ uint32_t book_code(const DeviceBook &book, float sigma, float y) {
  uint32_t low = 0, high = book.levels - 1;
  while (low < high) {
    const uint32_t middle = (low + high) / 2;
    if (y > book.threshold[middle] * sigma)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

__device__ void encode_book(const Row &row, const TensorFormat &f, uint32_t r, const uint16_t *x, uint8_t *codes, uint16_t *params) {
  const Region &region = f.region[r];
  const DeviceBook &book = *region.book;
  load(row, f, region, x);
  for (uint32_t j = row.lane; j < region.count; j += 32) row.v[j] = row.y[j] * row.y[j];
  const float n = sqrtf(tree(row, region.count)), sigma = n * float(1.0 / sqrt(double(region.count)));
  if (f.rotate) rotate(row, f, region);
  uint64_t s = 0;
  for (uint32_t j = row.lane; j < region.count; j += 32) {
    const uint32_t code = book_code(book, sigma, row.y[j]);
    const int32_t m = book.level[code];
    s += uint64_t(int64_t(m) * m);
    row.v[j] = row.y[j] * float(m);
    codes[region.first + j] = uint8_t(code);
  }
  s = warp_sum(s);
  const float p = tree(row, region.count);
  if (row.lane == 0) params[r] = store_param(row_scale(ScaleRule(f.scale_rule), book.scale, n, sigma, s, p), ParamType(f.param_type));
}

// Rule 2.1 over groups of channels; progressive codes shrink afterwards.
__device__ void encode_affine(const Row &row, const TensorFormat &f, const uint16_t *x, uint8_t *codes, uint16_t *params) {
  const Region &region = f.region[0];
  const uint32_t levels = f.progressive ? 256 : region.levels;
  load(row, f, region, x);
  if (f.rotate) rotate(row, f, region);
  for (uint32_t first = 0; first < f.dim; first += f.channel_group, params += 2) {
    float mn = row.y[first], mx = mn;
    for (uint32_t j = row.lane; j < f.channel_group; j += 32) mn = fminf(mn, row.y[first + j]), mx = fmaxf(mx, row.y[first + j]);
    for (int d = 16; d; d /= 2) mn = fminf(mn, __shfl_xor_sync(~0u, mn, d)), mx = fmaxf(mx, __shfl_xor_sync(~0u, mx, d));
    AffineParams stored = affine_params(mn, mx, levels, false, ParamType::fp16);
    const AffineCoder coder = affine_coder(stored, levels, ParamType::fp16);
    for (uint32_t j = row.lane; j < f.channel_group; j += 32) {
      uint8_t code = affine_code(row.y[first + j], coder.zero, coder.step, coder.top);
      if (f.progressive && f.progressive <= 16) code = shrink_code(code, 17);
      if (f.progressive && f.progressive <= 4) code = shrink_code(code, 5);
      codes[first + j] = code;
    }
    if (f.progressive && f.progressive <= 16) stored.s = shrink_scale(stored.s, 17);
    if (f.progressive && f.progressive <= 4) stored.s = shrink_scale(stored.s, 5);
    if (row.lane == 0) params[0] = stored.s, params[1] = stored.z;
  }
}

__global__ void row_kernel(RawShape shape, DeviceFormat format, const DevicePiece *pieces, uint32_t n_pieces, Scratch scratch) {
  extern __shared__ float memory[];
  const uint32_t warp = threadIdx.x / 32, token = blockIdx.x * kWarps + warp, head = blockIdx.y / 2, tensor = blockIdx.y % 2;
  const TensorFormat &f = format.tensors[2 * head + tensor];
  if (token >= scratch.tokens || f.group) return;
  const uint32_t width = max(shape.dim_k, shape.dim_v);
  const Row row{memory + size_t(2 * warp) * width, memory + size_t(2 * warp + 1) * width, threadIdx.x % 32};
  const uint16_t *x = source_row(shape, pieces, n_pieces, token, head, tensor);
  uint8_t *codes = scratch.codes_of(head, tensor) + size_t(token) * f.dim;
  uint16_t *params = scratch.params_of(head, tensor) + params_of(f, token);
  if (f.family == Family::raw) {
    for (uint32_t c = row.lane; c < f.dim; c += 32) params[c] = x[raw_place(f.dim, c)];
  } else if (f.family == Family::rows_affine) {
    encode_affine(row, f, x, codes, params);
  } else {
    for (uint32_t r = 0; r < f.regions; r++) encode_book(row, f, r, x, codes, params);
  }
}

// ---- columns: a thread per slot of a group

struct ColumnSource {
  const RawShape &shape;
  const DevicePiece *pieces;
  uint32_t n_pieces, head, tensor;
  const TensorFormat &f;

  __device__ uint16_t value(uint32_t row, uint32_t slot) const {
    const uint16_t *x = source_row(shape, pieces, n_pieces, row, head, tensor);
    if (f.family != Family::polar) return x[raw_place(f.dim, f.channel[slot])];
    const uint32_t pair = slot % (f.dim / 2);
    const float u = half_to_float(x[raw_place(f.dim, f.channel[2 * pair])]), v = half_to_float(x[raw_place(f.dim, f.channel[2 * pair + 1])]);
    return slot < f.dim / 2 ? float_to_half(sqrtf(u * u + v * v)) : float_to_half(polar_angle(u, v));
  }
};

// Kitty: is the channel among the largest sums, ties to the lower?
__device__ bool is_boosted(const unsigned long long *sums, uint32_t dim, uint32_t channel, uint32_t count) {
  uint32_t before = 0;
  for (uint32_t c = 0; c < dim; c++) before += sums[c] > sums[channel] || (sums[c] == sums[channel] && c < channel);
  return before < count;
}

__global__ void column_kernel(RawShape shape, DeviceFormat format, const DevicePiece *pieces, uint32_t n_pieces, Scratch scratch) {
  __shared__ unsigned long long sums[kMaxDim];
  const uint32_t head = blockIdx.y / 2, tensor = blockIdx.y % 2, group = blockIdx.x;
  const TensorFormat &f = format.tensors[2 * head + tensor];
  if (f.group == 0 || group * f.group >= scratch.tokens) return;
  const ColumnSource source{shape, pieces, n_pieces, head, tensor, f};
  const uint32_t first = group * f.group;
  uint8_t *codes = scratch.codes_of(head, tensor) + size_t(first) * f.dim;
  uint16_t *params = scratch.params_of(head, tensor) + size_t(group) * f.dim * 2;
  uint8_t *boosted = scratch.boosted_of(head, tensor) + size_t(group) * f.dim;
  if (f.boosted || f.positions) {
    for (uint32_t c = threadIdx.x; c < f.dim; c += blockDim.x) {
      unsigned long long sum = 0;
      for (uint32_t t = 0; t < f.group; t++) sum += magnitude(source.value(first + t, c));
      sums[c] = sum;
    }
    __syncthreads();
    for (uint32_t c = threadIdx.x; c < f.dim; c += blockDim.x) boosted[c] = is_boosted(sums, f.dim, c, f.boosted);
    __syncthreads();
  }
  uint32_t r = 0;
  for (uint32_t slot = threadIdx.x; slot < f.dim; slot += blockDim.x) {
    while (slot >= f.region[r].first + f.region[r].count) r++;
    uint32_t levels = f.region[r].levels;
    if (f.positions) levels = boosted[slot] ? 16 : 4;
    const bool midpoint = f.midpoint && !(f.high_plain && levels == 8);
    float mn = half_to_float(source.value(first, slot)), mx = mn;
    for (uint32_t t = 1; t < f.group; t++) {
      const float x = half_to_float(source.value(first + t, slot));
      mn = fminf(mn, x), mx = fmaxf(mx, x);
    }
    const ParamType type = ParamType(f.param_type);
    const AffineParams stored = affine_params(mn, mx, levels, midpoint, type);
    const AffineCoder coder = affine_coder(stored, levels, type);
    params[2 * slot] = stored.s, params[2 * slot + 1] = stored.z;
    for (uint32_t t = 0; t < f.group; t++)
      codes[size_t(t) * f.dim + slot] = affine_code(half_to_float(source.value(first + t, slot)), coder.zero, coder.step, coder.top);
  }
  if (!f.positions) return;
  __syncthreads();
  // Position bytes: the number of boosted channels before this one, or 0xFF.
  for (uint32_t c = threadIdx.x; c < f.dim; c += blockDim.x) {
    uint32_t position = 0;
    for (uint32_t lower = 0; lower < c; lower++) position += boosted[lower];
    sums[c] = boosted[c] ? position : 0xff;
  }
  __syncthreads();
  for (uint32_t c = threadIdx.x; c < f.dim; c += blockDim.x) boosted[c] = uint8_t(sums[c]);
}

}  // namespace

cudaError_t encode(const PackShape &shape, const DeviceFormat &format, const DevicePiece *pieces, uint32_t n_pieces,
                   const Scratch &scratch, cudaStream_t stream) {
  const uint32_t width = scratch.dim_k > scratch.dim_v ? scratch.dim_k : scratch.dim_v;
  if (shape.rows[0] || shape.rows[1])
    row_kernel<<<dim3((scratch.tokens + kWarps - 1) / kWarps, 2 * format.kv_heads), 32 * kWarps, kWarps * 2 * width * sizeof(float),
                 stream>>>(shape.raw, format, pieces, n_pieces, scratch);
  uint32_t group = ~0u;
  for (uint32_t tensor = 0; tensor < 2; tensor++)
    if (shape.columns[tensor] && shape.group[tensor] < group) group = shape.group[tensor];
  if (group != ~0u)
    column_kernel<<<dim3((scratch.tokens + group - 1) / group, 2 * format.kv_heads), 128, 0, stream>>>(shape.raw, format, pieces,
                                                                                                      n_pieces, scratch);
  return cudaGetLastError();
}

}  // namespace kvq::cuda
