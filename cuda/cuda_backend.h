// The CUDA backend (DESIGN: pages in device memory, one order for all work of a cache, steps planned when they begin).
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "backend/backend.h"
#include "policy/indicators.h"

namespace kvq {

// Devices that can be used, what runs there, and why there is none.
uint32_t cuda_devices(char *path, size_t path_size, char *reason, size_t reason_size);
Status check_cuda(uint32_t device, std::span<const LayerShape> shapes);
// Is attention on pages of these codecs fused?  bmax: of the policy that gives K its widths.
bool cuda_reads_fused(const LayerShape &shape, const Codec &k, const Codec &v, uint32_t page_tokens, uint32_t bmax);
std::shared_ptr<Backend> make_cuda_backend(Memory *memory, uint32_t device, const char *path);  // throws DeviceFailure; there is one path

// Token scores in device memory.  Nothing waits: the score of a token with an element that is not finite, or with a target beyond the
// vocabulary, is NaN.
extern const Indicators cuda_indicators;

}  // namespace kvq
