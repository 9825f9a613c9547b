// CUDA errors as statuses.
#pragma once
#include <cuda_runtime.h>

#include <cstddef>

#include "util/status.h"

namespace kvq::cuda {

inline Status failed(cudaError_t error, const char *what) {
  return fail(KVQ_E_DEVICE, "CUDA: %s: %s", what, cudaGetErrorString(error));
}

}  // namespace kvq::cuda

#define KVQ_CUDA(call)                                                                                       \
  do {                                                                                                       \
    if (const cudaError_t error_ = (call); error_ != cudaSuccess) return ::kvq::cuda::failed(error_, #call); \
  } while (0)
