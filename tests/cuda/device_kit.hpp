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

// A copy of a tensor, gaps and all.
class DeviceTensor {
 public:
  explicit DeviceTensor(const Tensor &host) : view_(*host.view()) {
    const Bytes &memory = host.memory();
    REQUIRE(cudaMalloc(&view_.data, memory.size()) == cudaSuccess);
    REQUIRE(cudaMemcpy(view_.data, memory.data(), memory.size(), cudaMemcpyHostToDevice) == cudaSuccess);
    view_.memory = KVQ_MEMORY_DEVICE;
  }
  ~DeviceTensor() { cudaFree(view_.data); }
  DeviceTensor(const DeviceTensor &) = delete;
  const kvq_tensor *view() const { return &view_; }

 private:
  kvq_tensor view_;
};

// What f() launches on a stream, as a graph.
template <class F>
cudaGraphExec_t record(cudaStream_t stream, F &&f) {
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  REQUIRE(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
  f();
  REQUIRE(cudaStreamEndCapture(stream, &graph) == cudaSuccess);
  REQUIRE(cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess);
  cudaGraphDestroy(graph);
  return exec;
}

}  // namespace kvq_test
