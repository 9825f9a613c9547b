#include "capi/devices.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "cpu/cpu_backend.h"
#if KVQ_WITH_CUDA
#include "cuda/cuda_backend.h"
#endif

namespace kvq::capi {

DeviceInfo describe_backend(uint32_t backend) {
  DeviceInfo info;
  if (backend == KVQ_BACKEND_CPU) {
    info.devices = 1;
    info.name = "cpu";
    std::snprintf(info.path, sizeof info.path, "%s", cpu_path_name());
    const char *paths[kMostPaths + 1];
    cpu_paths(paths);
    size_t used = 0;
    for (const char *const *path = paths; *path; path++)
      used += size_t(std::snprintf(info.paths + used, sizeof info.paths - used, used ? " %s" : "%s", *path));
    return info;
  }
  info.name = "cuda";
#if KVQ_WITH_CUDA
  info.devices = cuda_devices(info.path, sizeof info.path, info.reason, sizeof info.reason);
#else
  std::snprintf(info.reason, sizeof info.reason, "this build has no CUDA backend");
#endif
  return info;
}

Status check_device(uint32_t backend, uint32_t device, [[maybe_unused]] std::span<const LayerShape> shapes) {
  if (backend == KVQ_BACKEND_CPU) return device == 0 ? KVQ_OK : fail(KVQ_E_DEVICE, "device=%u: the CPU is device 0", device);
  if (backend != KVQ_BACKEND_CUDA) return fail(KVQ_E_INVALID, "backend=%u is none of KVQ_BACKEND_*", backend);
#if KVQ_WITH_CUDA
  return check_cuda(device, shapes);
#else
  return fail(KVQ_E_UNSUPPORTED, "backend=CUDA: this build has no CUDA backend");
#endif
}

Status check_path(uint32_t backend, const char *path) {
  if (!path) return KVQ_OK;
  if (backend != KVQ_BACKEND_CPU) return fail(KVQ_E_INVALID, "path='%.40s': only the CPU has paths to choose from", path);
  const char *paths[kMostPaths + 1];
  cpu_paths(paths);
  for (const char *const *known = paths; *known; known++)
    if (std::strcmp(*known, path) == 0) return KVQ_OK;
  return fail(KVQ_E_UNSUPPORTED, "path='%.40s' is none of those that run here: %s", path, describe_backend(backend).paths);
}

#if KVQ_WITH_CUDA
// The largest of the widths that K may have in a layer.
static uint32_t widest_of(const Recipe &recipe, size_t layer) {
  if (recipe.given.empty()) return recipe.policy.bmax;
  uint32_t widest = 0;
  for (const auto &head : recipe.given[layer].k)
    for (const uint8_t width : head) widest = std::max<uint32_t>(widest, width);
  return widest;
}
#endif

size_t first_decoded_layer([[maybe_unused]] uint32_t backend, std::span<const LayerShape> shapes, [[maybe_unused]] const Recipe &recipe) {
#if KVQ_WITH_CUDA
  if (backend == KVQ_BACKEND_CUDA) {
    const auto fused = [&](size_t l) {
      const LayerCodecs &codecs = recipe.layers[l];
      for (uint32_t c = 0; c < recipe.classes; c++)
        if (!cuda_reads_fused(shapes[l], codecs.k[c], codecs.v[c], recipe.page_tokens, widest_of(recipe, l))) return false;
      return true;
    };
    size_t layer = 0;
    while (layer < shapes.size() && fused(layer)) layer++;
    return layer;
  }
#endif
  return shapes.size();
}

BackendFactory backend_factory([[maybe_unused]] uint32_t backend) {
#if KVQ_WITH_CUDA
  if (backend == KVQ_BACKEND_CUDA) return make_cuda_backend;
#endif
  return make_cpu_backend;
}

Status find_indicators(uint32_t memory, const Indicators **out) {
  *out = &host_indicators;
#if KVQ_WITH_CUDA
  if (memory == KVQ_MEMORY_DEVICE) *out = &cuda_indicators;
  return KVQ_OK;
#else
  return memory == KVQ_MEMORY_HOST ? KVQ_OK : fail(KVQ_E_UNSUPPORTED, "memory=DEVICE: this build has no CUDA backend");
#endif
}

}  // namespace kvq::capi
