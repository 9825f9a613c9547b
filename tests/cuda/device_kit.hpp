// What tests with tensors in device memory share.
#pragma once
#include <cuda_runtime_api.h>

#include "kit.hpp"

namespace kvq_test {

struct DeviceFloats {
  explicit DeviceFloats(size_t n) : n(n) { REQUIRE(cudaMalloc(reinterpret_cast<void **>(&data), n * sizeof(float)) == cudaSuccess); }
  ~DeviceFloats() { cudaFree(data); }
  DeviceFloats(const DeviceFloats &) = delete;
  kvq_tensor tensor() const {
    auto t = sized<kvq_tensor>();
    t.memory = KVQ_MEMORY_DEVICE, t.data = data;
    return t;
  }
  void set(const Floats &values) { REQUIRE(cudaMemcpy(data, values.data(), n * sizeof(float), cudaMemcpyHostToDevice) == cudaSuccess); }
  Floats get() const {
    Floats values(n);
    REQUIRE(cudaMemcpy(values.data(), data, n * sizeof(float), cudaMemcpyDeviceToHost) == cudaSuccess);
    return values;
  }
  size_t n;
  float *data = nullptr;
};

}  // namespace kvq_test
