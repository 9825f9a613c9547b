// Version, statuses, failure sentences, backends.
#include <cstdio>

#include "capi/boundary.h"
#include "capi/devices.h"
#include "engine/cache.h"

using namespace kvq;
using namespace kvq::capi;

#define KVQ_TEXT(x) #x
#define KVQ_VERSION_TEXT(major, minor, patch) KVQ_TEXT(major) "." KVQ_TEXT(minor) "." KVQ_TEXT(patch)

uint32_t kvq_version(void) { return KVQ_VERSION_MAJOR * 10000 + KVQ_VERSION_MINOR * 100 + KVQ_VERSION_PATCH; }

const char *kvq_version_string(void) { return KVQ_VERSION_TEXT(KVQ_VERSION_MAJOR, KVQ_VERSION_MINOR, KVQ_VERSION_PATCH); }

const char *kvq_status_string(int32_t status) {
  static constexpr struct {
    int32_t status;
    const char *name;
  } kNames[] = {{KVQ_OK, "OK"},
                {KVQ_E_INVALID, "INVALID"},
                {KVQ_E_SIZE, "SIZE"},
                {KVQ_E_NONFINITE, "NONFINITE"},
                {KVQ_E_STATE, "STATE"},
                {KVQ_E_STALE, "STALE"},
                {KVQ_E_BUSY, "BUSY"},
                {KVQ_E_NOMEM, "NOMEM"},
                {KVQ_E_FULL, "FULL"},
                {KVQ_E_CORRUPT, "CORRUPT"},
                {KVQ_E_CONFIG, "CONFIG"},
                {KVQ_E_DEVICE, "DEVICE"},
                {KVQ_E_UNSUPPORTED, "UNSUPPORTED"},
                {KVQ_E_INTERNAL, "INTERNAL"}};
  for (const auto &entry : kNames)
    if (entry.status == status) return entry.name;
  return "UNKNOWN";
}

// Its own failures leave the sentence as it is.
int32_t kvq_error_detail(char *buf, size_t cap, size_t *needed) {
  const char *detail = failure_detail();
  const size_t size = std::strlen(detail) + 1;
  if (!buf && cap > 0) return KVQ_E_INVALID;
  if (needed) *needed = size;
  if (size > cap) return KVQ_E_SIZE;
  std::memcpy(buf, detail, size);
  return KVQ_OK;
}

int32_t kvq_backend_query(uint32_t index, kvq_backend_info *info) {
  return guarded([&]() -> Status {
    KVQ_TRY(check_struct(info, sizeof *info, "info"));
    if (index > KVQ_BACKEND_CUDA) return fail(KVQ_E_INVALID, "index=%u: there are 2 backends", index);
    kvq_backend_info out{};
    out.backend = index;
    const DeviceInfo device = describe_backend(index);
    out.n_devices = device.devices;
    out.available = device.devices > 0;
    std::snprintf(out.name, sizeof out.name, "%s", device.name);
    std::snprintf(out.path, sizeof out.path, "%s", device.path);
    std::snprintf(out.reason, sizeof out.reason, "%s", device.reason);
    std::snprintf(out.paths, sizeof out.paths, "%s", device.paths);
    write_struct(out, info);
    return KVQ_OK;
  });
}

// How attention of a configuration that Cache::check has accepted reads its pages.
static Status describe_path(const CacheConfig &config, uint32_t backend, kvq_support *out) {
  Memory scratch;
  Recipe recipe(&scratch);
  KVQ_TRY(parse_recipe(config.recipe, config.shapes, &recipe));
  KVQ_TRY(apply_data(config.data, config.shapes, &recipe));
  const size_t layer = first_decoded_layer(backend, config.shapes, recipe);
  out->path = layer == config.shapes.size() ? KVQ_PATH_FUSED : KVQ_PATH_DECODE;
  if (out->path == KVQ_PATH_FUSED) return KVQ_OK;
  std::snprintf(out->reason, sizeof out->reason, "layer %zu: attention decodes packed pages of these codecs and dimensions to memory, a piece at a time", layer);
  return KVQ_OK;
}

int32_t kvq_backend_support(const kvq_config *config, kvq_support *support) {
  return guarded([&]() -> Status {
    KVQ_TRY(check_struct(config, sizeof *config, "config"));
    KVQ_TRY(check_struct(support, sizeof *support, "support"));
    Memory scratch;
    ConfigParts read(&scratch);
    kvq_support out{};
    out.status = read_config(config, &read);
    if (out.status == KVQ_OK) out.status = Cache::check(read.config);
    if (out.status == KVQ_OK) {
      KVQ_TRY(describe_path(read.config, config->backend, &out));
    } else {
      out.path = KVQ_PATH_NONE;
      std::snprintf(out.reason, sizeof out.reason, "%s", failure_detail());
    }
    write_struct(out, support);
    return KVQ_OK;
  });
}
