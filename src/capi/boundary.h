// The C boundary: no exception leaves, structs of other sizes are understood, every pointer and tensor is checked by name.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <new>
#include <span>
#include <stdexcept>
#include <string_view>

#include "engine/cache.h"
#include "util/memory.h"
#include "util/status.h"

namespace kvq::capi {

// Tokens of one call: more is cut into several.
constexpr uint64_t kMaxTokens = 1u << 24;

// Run the body of an entry point.
template <class F>
int32_t guarded(F &&body) noexcept {
  try {
    return body();
  } catch (const LimitReached &e) {
    return fail(KVQ_E_FULL, "max_bytes=%llu has no room for %llu bytes more", (unsigned long long)e.limit, (unsigned long long)e.asked);
  } catch (const std::bad_alloc &) {
    return fail(KVQ_E_NOMEM, "the allocator returned NULL");
  } catch (const std::length_error &) {
    return fail(KVQ_E_NOMEM, "a size is beyond what can be addressed");
  } catch (const DeviceFailure &e) {
    return fail(KVQ_E_DEVICE, "CUDA: %s", e.what());
  } catch (const std::exception &e) {
    return fail(KVQ_E_INTERNAL, "unexpected exception: %s", e.what());
  } catch (...) {
    return fail(KVQ_E_INTERNAL, "unexpected exception");
  }
}

#define KVQ_REQUIRE(pointer) \
  if (!(pointer)) return ::kvq::fail(KVQ_E_INVALID, #pointer " is NULL")

inline Cache *from(kvq_cache *cache) { return reinterpret_cast<Cache *>(cache); }
inline kvq_cache *to(Cache *cache) { return reinterpret_cast<kvq_cache *>(cache); }

// First field of a caller's struct, which an older, smaller version may have aligned less than this one.
inline uint32_t struct_size_of(const void *in) {
  uint32_t size;
  std::memcpy(&size, in, sizeof size);
  return size;
}

// Check `struct_size` of a struct of `known` bytes: not 0, and nothing but zeros behind what is known.
Status check_struct(const void *in, size_t known, const char *name);

// A struct as this version knows it.  Shorter: the rest is zero.
template <class T>
Status read_struct(const T *in, T *out, const char *name) {
  KVQ_TRY(check_struct(in, sizeof(T), name));
  *out = T{};
  std::memcpy(static_cast<void *>(out), in, std::min<size_t>(struct_size_of(in), sizeof(T)));
  return KVQ_OK;
}

// Fill a caller's struct as far as it reaches; its struct_size stays.  To be checked with check_struct before.
template <class T>
void write_struct(T value, T *out) {
  value.struct_size = struct_size_of(out);
  std::memcpy(static_cast<void *>(out), &value, std::min<size_t>(value.struct_size, sizeof(T)));
}

// Text and bytes out by (buf, cap, needed).
Status write_bytes(const void *data, size_t size, void *buf, size_t cap, size_t *needed);
inline Status write_text(std::string_view text, char *buf, size_t cap, size_t *needed) {
  KVQ_TRY(write_bytes(text.data(), text.size() + 1, buf, cap, needed));  // the callers' texts are zero-terminated
  return KVQ_OK;
}

// A tensor [tokens][heads][dim] in host memory with its strides resolved.  Strides must not be negative, and rows must not overlap.
enum class Use {
  input,
  output
};
enum class Place {
  host,
  any
};  // any: device memory too, where the backend takes it
Status read_tensor(const kvq_tensor *in, const char *name, uint64_t tokens, uint32_t heads, uint32_t dim, Use use, kvq_tensor *out,
                   Place place = Place::host);

// An optional tensor: *present is nullptr if there is none.
Status read_optional(const kvq_tensor *in, const char *name, uint64_t tokens, uint32_t heads, uint32_t dim, kvq_tensor *out,
                     const kvq_tensor **present, Place place = Place::host);
// Where the tensors of a cache may lie.
inline Place place_of(const Cache &cache) { return cache.backend->plans_steps() ? Place::any : Place::host; }

inline Status check_score_place(const Cache &cache, bool device) {
  if (!device || place_of(cache) == Place::any) return KVQ_OK;
  return fail(KVQ_E_UNSUPPORTED, "flags: scores in device memory, but the CPU backend takes host memory only");
}

// Layers [n_structs], spaced by the first one's struct_size, for n_layers layers (n_structs of them, or 1: all alike).
Status read_layers(const kvq_layer *layers, uint32_t n_structs, uint32_t n_layers, Vector<LayerShape> *shapes);

// kvq_recipe_data; `in` may be NULL, *present then is nullptr too.
Status read_data(const kvq_recipe_data *in, kvq_recipe_data *out, const kvq_recipe_data **present);

// Everything of kvq_config, and what `config` refers to.
struct ConfigParts {
  explicit ConfigParts(std::pmr::memory_resource *memory) : shapes(memory) {}
  Vector<LayerShape> shapes;
  kvq_allocator allocator;
  kvq_recipe_data data;
  CacheConfig config;
};
Status read_config(const kvq_config *in, ConfigParts *out);

Status check_tokens(const char *name, uint64_t tokens);

// A refusal of rows names the layer that they were for.
inline Status in_layer(uint32_t layer, Status status) {
  return status == KVQ_E_NONFINITE ? fail(status, "layer %u, %s", layer, failure_detail()) : status;
}

}  // namespace kvq::capi
