// The CUDA backend (DESIGN: pages in device memory, one order for all work of a cache, steps planned when they begin).
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "backend/backend.h"

namespace kvq {

// Devices that can be used, what runs there, and why there is none.
uint32_t cuda_devices(char *path, size_t path_size, char *reason, size_t reason_size);
Status check_cuda(uint32_t device, std::span<const LayerShape> shapes);
std::shared_ptr<Backend> make_cuda_backend(Memory *memory, uint32_t device);  // throws DeviceFailure

}  // namespace kvq
