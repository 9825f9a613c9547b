// What the benchmarks of the CUDA backend share: calls that throw, and rows of numbers on the device.
#pragma once
#include <cuda_runtime.h>

#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "calls.hpp"

inline void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

// Normal numbers by a hash of their index (Box-Muller).
__global__ void fill_normal(uint16_t *out, size_t n, uint64_t seed, float scale) {
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x) {
    uint64_t z = (seed << 40) + i + 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    z ^= z >> 31;
    const float u = float((z >> 40) + 1) * 0x1p-24f, v = float(z & 0xffffff) * 0x1p-24f;
    const float x = scale * sqrtf(-2 * logf(u)) * cospif(2 * v);
    asm("{ .reg .b16 h; cvt.rn.f16.f32 h, %1; mov.b16 %0, h; }" : "=h"(out[i]) : "f"(x));
  }
}

struct DeviceRows {
  explicit DeviceRows(size_t n) : n(n) { check(cudaMalloc(&data, n * 2)); }
  ~DeviceRows() { cudaFree(data); }
  void fill(uint64_t seed, float scale) { fill_normal<<<1024, 256>>>(data, n, seed, scale); }
  kvq_tensor tensor() const {
    kvq_tensor t = sized<kvq_tensor>();
    t.dtype = KVQ_DTYPE_F16, t.memory = KVQ_MEMORY_DEVICE, t.data = data;
    return t;
  }
  size_t n;
  uint16_t *data = nullptr;
};

inline double since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count();
}
