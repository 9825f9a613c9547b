// Codes and parameters between scratch memory and pages.
#include "cuda/code.cuh"
#include "cuda/pack.h"

namespace kvq::cuda {
namespace {

constexpr uint32_t kThreads = 256;

// What one block of threads moves: one head and tensor of the rows of one page.
struct Job {
  const TensorFormat &f;
  uint8_t *blob;
  const uint8_t *codes;    // of the first of these rows
  uint32_t first, count;
  __device__ bool holds(uint32_t token) const { return token >= first && token < first + count; }
  // The code that a place is to have: a new one, or the one that is there.
  __device__ uint32_t code(uint32_t r, uint32_t token, uint32_t slot) const {
    if (holds(token)) return codes[size_t(token - first) * f.dim + slot];
    return page_code(f, blob, r, token, slot);
  }
};

// Eight words of a stream are `bits` bytes.
__device__ void place_stream(const Job &job, uint32_t r) {
  const TensorFormat &f = job.f;
  const Region &region = f.region[r];
  if (region.levels <= 1) return;
  const uint32_t total = f.page_tokens * region.count, per_unit = 8 * region.digits, units = (total + per_unit - 1) / per_unit;
  uint8_t *stream = job.blob + f.codes + region.offset;
  const uint32_t mask = f.positions ? 3 : 0xff;
  for (uint32_t unit = threadIdx.x; unit < units; unit += blockDim.x) {
    bool touched = false;
    for (uint32_t e = unit * per_unit; e < min((unit + 1) * per_unit, total) && !touched; e++)
      touched = job.holds(f.group ? e % f.page_tokens : e / region.count);
    if (!touched) continue;
    uint8_t bytes[17];
    uint32_t pending = 0, filled = 0, at = 0;
    for (uint32_t w = 0; w < 8; w++) {
      uint32_t word = 0, weight = 1;
      for (uint32_t d = 0; d < region.digits; d++) {
        const uint32_t e = unit * per_unit + w * region.digits + d;
        if (e < total) {
          const uint32_t token = f.group ? e % f.page_tokens : e / region.count;
          const uint32_t slot = region.first + (f.group ? e / f.page_tokens : e % region.count);
          word += (job.code(r, token, slot) & mask) * weight;
        }
        weight *= region.levels;
      }
      pending |= word << filled;
      for (filled += region.bits; filled >= 8; filled -= 8, pending >>= 8) bytes[at++] = uint8_t(pending);
    }
    for (uint32_t i = 0; i < region.bits; i++) stream[unit * region.bits + i] = bytes[i];
  }
}

// Kitty: the upper two bits of boosted channels, whole groups.
__device__ void place_upper(const Job &job, const uint8_t *boosted) {
  const TensorFormat &f = job.f;
  for (uint32_t i = threadIdx.x; i < job.count / f.group * f.dim; i += blockDim.x) {
    const uint32_t g = i / f.dim, channel = i % f.dim, group = job.first / f.group + g;
    job.blob[f.positions + group * f.dim + channel] = boosted[i];
    if (boosted[i] == 0xff) continue;
    uint8_t *to = job.blob + f.codes + f.region[1].offset + (group * f.boosted + boosted[i]) * f.group / 4;
    for (uint32_t t = 0; t < f.group; t += 4) {
      uint32_t byte = 0;
      for (uint32_t k = 0; k < 4; k++) byte |= uint32_t(job.codes[size_t(g * f.group + t + k) * f.dim + channel] >> 2) << 2 * k;
      to[t / 4] = uint8_t(byte);
    }
  }
}

__device__ void place_fragments(const Job &job) {
  const TensorFormat &f = job.f;
  const uint32_t tiles = f.page_tokens / kTile, parts = tile_parts(f);
  for (uint32_t i = threadIdx.x; i < tiles * parts * 32; i += blockDim.x) {
    const uint32_t tile = i / (parts * 32), part = i / 32 % parts, lane = i % 32;
    if ((tile + 1) * kTile <= job.first || tile * kTile >= job.first + job.count) continue;
    uint32_t *words = reinterpret_cast<uint32_t *>(job.blob + f.codes + tile_offset(f, tile));
    store_part(f, words, part, lane, [&](uint32_t unit, uint32_t reg, uint32_t byte) {
      const uint32_t token = tile * kTile + (f.tensor ? value_token(reg, lane, byte) : key_token(reg, lane));
      const uint32_t slot = f.tensor ? value_channel(unit, reg, lane) : key_slot(unit, lane, byte);
      return job.code(region_of(f, slot), token, slot);
    });
  }
}

__device__ void store_param_bytes(const TensorFormat &f, uint8_t *blob, uint32_t at, uint16_t value) {
  if (f.param_bytes == 1)
    blob[at] = uint8_t(value);
  else
    *reinterpret_cast<uint16_t *>(blob + at) = value;
}

// f(offset in the blob, number in the Block) for the parameters of rows [first, first + count).
template <class F>
__device__ void for_params(const TensorFormat &format, uint32_t first, uint32_t count, F &&f) {
  const uint32_t n = uint32_t(params_of(format, count)), per_row = format.family == Family::raw ? format.dim : format.row_params;
  const uint32_t before = per_row ? 0 : first / format.group * format.dim * 2;
  for (uint32_t i = threadIdx.x; i < n; i += blockDim.x)
    f(per_row ? row_param(format, first + i / per_row, i % per_row) : column_param(format, before + i), i);
}

__global__ void place_kernel(DeviceFormat format, const DevicePiece *targets, Scratch scratch) {
  const uint32_t head = blockIdx.y / 2, tensor = blockIdx.y % 2;
  const TensorFormat &f = format.tensors[2 * head + tensor];
  const DevicePiece target = targets[blockIdx.x];
  uint8_t *blob = static_cast<uint8_t *>(target.page) + format.blobs[head].offset;
  const Job job{f, blob, scratch.codes_of(head, tensor) + size_t(target.start) * f.dim, target.first, target.count};
  const uint16_t *params = scratch.params_of(head, tensor) + params_of(f, target.start);
  for_params(f, target.first, target.count, [&](uint32_t at, uint32_t i) { store_param_bytes(f, blob, at, params[i]); });
  if (f.family == Family::raw) return;
  if (f.layout == Layout::fragments) return place_fragments(job);
  for (uint32_t r = 0; r < (f.positions ? 1 : f.regions); r++) place_stream(job, r);
  if (f.positions) place_upper(job, scratch.boosted_of(head, tensor) + size_t(target.start / f.group) * f.dim);
}

__global__ void fetch_kernel(DeviceFormat format, uint8_t *page, uint32_t first, uint32_t count, uint32_t head, uint32_t tensor,
                             Scratch scratch) {
  const TensorFormat &f = format.tensors[2 * head + tensor];
  const uint8_t *blob = page + format.blobs[head].offset;
  for_params(f, first, count, [&](uint32_t at, uint32_t i) { scratch.params[i] = load_stored(f, blob, at); });
  if (f.family == Family::raw) return;
  for (uint32_t i = threadIdx.x; i < count * f.dim; i += blockDim.x)
    scratch.codes[i] = uint8_t(page_code(f, blob, region_of(f, i % f.dim), first + i / f.dim, i % f.dim));
  for (uint32_t i = threadIdx.x; f.positions && i < count / f.group * f.dim; i += blockDim.x)
    scratch.boosted[i] = blob[f.positions + (first / f.group) * f.dim + i];
}

}  // namespace

cudaError_t place(const DeviceFormat &format, const DevicePiece *targets, uint32_t n_targets, const Scratch &scratch,
                  cudaStream_t stream) {
  place_kernel<<<dim3(n_targets, 2 * format.kv_heads), kThreads, 0, stream>>>(format, targets, scratch);
  return cudaGetLastError();
}

cudaError_t fetch(const DeviceFormat &format, const void *page, uint32_t first, uint32_t count, uint32_t head, uint32_t tensor,
                  const Scratch &scratch, cudaStream_t stream) {
  fetch_kernel<<<1, 1024, 0, stream>>>(format, static_cast<uint8_t *>(const_cast<void *>(page)), first, count, head, tensor, scratch);
  return cudaGetLastError();
}

}  // namespace kvq::cuda
