// Translation of structs and tensors.
#include "capi/boundary.h"

#include <algorithm>

#include "capi/devices.h"
#include "util/entry.h"

namespace kvq::capi {

namespace {

// No struct of this library will ever be larger: a struct_size beyond is not one.
constexpr uint32_t kMaxStruct = 4096;
// Addresses of host memory; a tensor that spans more cannot exist.
constexpr __int128 kMaxExtent = __int128(1) << 47;

using Wide = __int128;

Status check_dtype(const kvq_tensor &x, const char *name, Use use, Place place) {
  const uint32_t size = dtype_bytes(x.dtype);
  if (size == 0) return fail(KVQ_E_INVALID, "%s: dtype=%u is none of KVQ_DTYPE_*", name, x.dtype);
  if (use == Use::output && x.dtype == KVQ_DTYPE_F64) return fail(KVQ_E_INVALID, "%s: dtype F64 is for inputs only", name);
  if (x.memory == KVQ_MEMORY_DEVICE && place == Place::host)
    return fail(KVQ_E_UNSUPPORTED, "%s: memory=DEVICE, but the CPU backend takes host memory only", name);
  if (x.memory > KVQ_MEMORY_DEVICE) return fail(KVQ_E_INVALID, "%s: memory=%u is none of KVQ_MEMORY_*", name, x.memory);
  if (x.reserved != 0) return fail(KVQ_E_INVALID, "%s: reserved=%u is not 0", name, x.reserved);
  if (reinterpret_cast<uintptr_t>(x.data) % size)
    return fail(KVQ_E_INVALID, "%s: data is not aligned to its elements of %u bytes", name, size);
  return KVQ_OK;
}

// Rows of `dim` elements at t * token_stride + h * head_stride.
Status check_strides(const kvq_tensor &x, const char *name, uint64_t tokens, uint32_t heads, uint32_t dim) {
  if (x.token_stride < 0 || x.head_stride < 0)
    return fail(KVQ_E_INVALID, "%s: strides (%lld, %lld) are negative", name, (long long)x.token_stride, (long long)x.head_stride);
  const Wide of_tokens = Wide(tokens ? tokens - 1 : 0) * x.token_stride, of_heads = Wide(heads - 1) * x.head_stride;
  const bool heads_apart = heads == 1 || x.head_stride >= dim, tokens_apart = tokens <= 1 || x.token_stride >= dim;
  const bool nested = heads == 1 || tokens <= 1 || x.token_stride >= of_heads + dim || x.head_stride >= of_tokens + dim;
  if (!heads_apart || !tokens_apart || !nested)
    return fail(KVQ_E_INVALID, "%s: with token_stride=%lld and head_stride=%lld rows of %u channels overlap", name,
                (long long)x.token_stride, (long long)x.head_stride, dim);
  if ((of_tokens + of_heads + dim) * dtype_bytes(x.dtype) > kMaxExtent)
    return fail(KVQ_E_INVALID, "%s: its strides span more than can be addressed", name);
  return KVQ_OK;
}

Status check_allocator(const kvq_allocator *in, kvq_allocator *out) {
  KVQ_TRY(read_struct(in, out, "allocator"));
  if (!out->alloc || !out->release) return fail(KVQ_E_INVALID, "allocator: alloc and release must both be given");
  return KVQ_OK;
}

}  // namespace

Status check_struct(const void *in, size_t known, const char *name) {
  if (!in) return fail(KVQ_E_INVALID, "%s is NULL", name);
  const uint32_t size = struct_size_of(in);
  if (size < sizeof size || size > kMaxStruct)
    return fail(KVQ_E_INVALID, "%s: struct_size=%u is not that of any version (%zu here)", name, size, known);
  const char *bytes = static_cast<const char *>(in);
  for (size_t i = known; i < size; i++)
    if (bytes[i] != 0) return fail(KVQ_E_INVALID, "%s: struct_size=%u: this version knows %zu bytes, and byte %zu is not 0", name, size, known, i);
  return KVQ_OK;
}

Status write_bytes(const void *data, size_t size, void *buf, size_t cap, size_t *needed) {
  if (!buf && cap > 0) return fail(KVQ_E_INVALID, "buf is NULL, but cap is %zu", cap);
  if (needed) *needed = size;
  if (size > cap) return fail(KVQ_E_SIZE, "cap=%zu: %zu bytes are needed", cap, size);
  if (size > 0) std::memcpy(buf, data, size);
  return KVQ_OK;
}

Status read_tensor(const kvq_tensor *in, const char *name, uint64_t tokens, uint32_t heads, uint32_t dim, Use use, kvq_tensor *out,
                   Place place) {
  KVQ_TRY(read_struct(in, out, name));
  KVQ_TRY(check_dtype(*out, name, use, place));
  if (out->head_stride == 0) out->head_stride = dim;
  if (out->token_stride == 0) out->token_stride = int64_t(heads) * dim;
  KVQ_TRY(check_strides(*out, name, tokens, heads, dim));
  if (tokens > 0 && !out->data) return fail(KVQ_E_INVALID, "%s: data is NULL", name);
  return KVQ_OK;
}

Status read_optional(const kvq_tensor *in, const char *name, uint64_t tokens, uint32_t heads, uint32_t dim, kvq_tensor *out,
                     const kvq_tensor **present, Place place) {
  *present = nullptr;
  if (!in) return KVQ_OK;
  KVQ_TRY(read_tensor(in, name, tokens, heads, dim, Use::input, out, place));
  *present = out;
  return KVQ_OK;
}

Status read_layers(const kvq_layer *layers, uint32_t n_structs, uint32_t n_layers, Vector<LayerShape> *shapes) {
  if (n_layers < 1 || n_layers > 65535) return fail(KVQ_E_INVALID, "n_layers=%u is not in 1..65535", n_layers);
  if (n_structs != 1 && n_structs != n_layers)
    return fail(KVQ_E_INVALID, "n_layer_structs=%u is neither 1 nor n_layers=%u", n_structs, n_layers);
  KVQ_TRY(check_struct(layers, sizeof(kvq_layer), "layers"));
  shapes->resize(n_layers);
  for (uint32_t l = 0; l < n_layers; l++) {
    const char *at = reinterpret_cast<const char *>(layers) + size_t(n_structs == 1 ? 0 : l) * layers->struct_size;
    kvq_layer layer;
    KVQ_TRY(read_struct(reinterpret_cast<const kvq_layer *>(at), &layer, "layers"));
    if (layer.struct_size != layers->struct_size)
      return fail(KVQ_E_INVALID, "layers[%u]: struct_size=%u is not that of layers[0], %u", l, layer.struct_size, layers->struct_size);
    KVQ_TRY(resolve_layer(layer, l, &(*shapes)[l]));
  }
  return KVQ_OK;
}

Status read_data(const kvq_recipe_data *in, kvq_recipe_data *out, const kvq_recipe_data **present) {
  *present = nullptr;
  if (!in) return KVQ_OK;
  KVQ_TRY(read_struct(in, out, "recipe_data"));
  *present = out;
  return KVQ_OK;
}

Status read_config(const kvq_config *in, ConfigParts *out) {
  constexpr uint32_t kMaxThreads = 1024;
  kvq_config read;
  KVQ_TRY(read_struct(in, &read, "config"));
  KVQ_TRY(check_device(read.backend, read.device, {}));
  KVQ_TRY(read_layers(read.layers, read.n_layer_structs, read.n_layers, &out->shapes));
  KVQ_TRY(check_device(read.backend, read.device, out->shapes));
  KVQ_TRY(check_path(read.backend, read.path));
  if (read.n_threads > kMaxThreads) return fail(KVQ_E_INVALID, "n_threads=%u is above %u", read.n_threads, kMaxThreads);
  if (read.n_callers > kMostCallers) return fail(KVQ_E_INVALID, "n_callers=%u is above %u", read.n_callers, kMostCallers);
  if (read.allocator) KVQ_TRY(check_allocator(read.allocator, &out->allocator));
  const kvq_recipe_data *data;
  KVQ_TRY(read_data(read.recipe_data, &out->data, &data));
  const bool cpu = read.backend == KVQ_BACKEND_CPU;
  out->config = {backend_factory(read.backend), out->shapes, read.recipe ? read.recipe : "kvq-3",
                 data, cpu ? read.n_threads : read.device,
                 read.n_callers ? read.n_callers : 1, read.max_sequences, read.max_bytes,
                 read.max_tokens, read.allocator ? &out->allocator : nullptr,
                 read.log_user, read.log, read.path};
  return KVQ_OK;
}

Status check_tokens(const char *name, uint64_t tokens) {
  if (tokens <= kMaxTokens) return KVQ_OK;
  return fail(KVQ_E_INVALID, "%s=%llu is above %llu, the most for one call", name, (unsigned long long)tokens, (unsigned long long)kMaxTokens);
}

}  // namespace kvq::capi
