// The backends of this build: the only place that knows which there are.
#pragma once
#include <cstdint>
#include <span>

#include "engine/cache.h"
#include "policy/indicators.h"

namespace kvq::capi {

// What kvq_backend_query tells.
struct DeviceInfo {
  uint32_t devices = 0;
  const char *name = "";
  char path[64] = "", reason[192] = "", paths[64] = "";  // reason: why there is no device; else empty
};
DeviceInfo describe_backend(uint32_t backend);

// Can caches with these layers be made there?
Status check_device(uint32_t backend, uint32_t device, std::span<const LayerShape> shapes);
// Is it one of the paths that run here?  nullptr: none was asked for.
Status check_path(uint32_t backend, const char *path);
// The first layer whose packed pages attention decodes to memory before it reads them; the number of layers if there is none.
size_t first_decoded_layer(uint32_t backend, std::span<const LayerShape> shapes, const Recipe &recipe);
// Of a backend that check_device has accepted.
BackendFactory backend_factory(uint32_t backend);

// The indicators on memory of a kind, KVQ_MEMORY_*.
Status find_indicators(uint32_t memory, const Indicators **out);

}  // namespace kvq::capi
