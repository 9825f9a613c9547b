// What every test of the C ABI needs: calls that fail loudly, tensors of every type and stride, a cache that closes itself.
#pragma once
#include <bit>
#include <catch2/catch_test_macros.hpp>
#include <cstddef>
#include <cstring>
#include <memory>
#include <source_location>
#include <string>
#include <utility>
#include <vector>

#include "half.hpp"
#include "kvq/kvq.h"
#include "random.hpp"

namespace kvq_test {

// Sanitizers slow a test down by 3 to 15 times: long loops divide their counts by this.
#if defined(__SANITIZE_THREAD__)
constexpr int kSlow = 10;
#elif defined(__SANITIZE_ADDRESS__)
constexpr int kSlow = 4;
#else
constexpr int kSlow = 1;
#endif

using Bytes = std::vector<uint8_t>;
using Floats = std::vector<float>;

inline std::string detail() {
  size_t needed = 0;
  kvq_error_detail(nullptr, 0, &needed);
  std::string text(needed, '\0');
  if (needed == 0 || kvq_error_detail(text.data(), text.size(), nullptr) != KVQ_OK) return "(no detail)";
  text.pop_back();
  return text;
}

// The call must have worked.
inline void ok(int32_t status, std::source_location where = std::source_location::current()) {
  if (status == KVQ_OK) return;
  FAIL(where.file_name() << ":" << where.line() << ": " << kvq_status_string(status) << ": " << detail());
}

// The call must have been refused, in just this way.
inline void refused(int32_t status, int32_t expected, std::source_location where = std::source_location::current()) {
  if (status == expected) return;
  FAIL(where.file_name() << ":" << where.line() << ": " << kvq_status_string(status) << " instead of "
                         << kvq_status_string(expected) << "; detail: " << detail());
}

template <class Struct>
Struct sized() {
  Struct value{};
  value.struct_size = sizeof value;
  return value;
}

inline kvq_layer layer_of(uint32_t kv_heads, uint32_t q_per_kv, uint32_t dim_k, uint32_t dim_v = 0) {
  auto layer = sized<kvq_layer>();
  layer.kv_heads = kv_heads;
  layer.q_heads = kv_heads * q_per_kv;
  layer.dim_k = dim_k;
  layer.dim_v = dim_v;
  return layer;
}
inline uint32_t dim_v(const kvq_layer &layer) { return layer.dim_v ? layer.dim_v : layer.dim_k; }
inline uint32_t dim_of(const kvq_layer &layer, uint32_t tensor) { return tensor == KVQ_TENSOR_K ? layer.dim_k : dim_v(layer); }

// The default setting of the cases: 4 bits for keys per channel and values per token, nothing kept raw but the tail.
inline const char *const kK4V4 = "k=affine-channel(levels=16,group=32);v=affine-token(levels=16,group=32);block=32";

// ---- tensors

// How elements lie in memory.
enum class Lay {
  packed,
  padded,
  head_first
};

inline size_t element_size(uint32_t dtype) { return dtype == KVQ_DTYPE_F64 ? 8 : dtype == KVQ_DTYPE_F32 ? 4
                                                                                                        : 2; }

inline uint16_t bf16_bits(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
inline float bf16_value(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

// The nearest number that a type holds, as float.
inline float round_to(float value, uint32_t dtype) {
  if (dtype == KVQ_DTYPE_F16) return static_cast<float>(half_value(half_bits(value)));
  return dtype == KVQ_DTYPE_BF16 ? bf16_value(bf16_bits(value)) : value;
}

// A tensor [tokens][heads][dim] with its own memory, in any type and stride.  Between the rows lies NaN.
class Tensor {
 public:
  Tensor(const float *values, size_t tokens, size_t heads, size_t dim, uint32_t dtype = KVQ_DTYPE_F32, Lay lay = Lay::packed)
      : Tensor(tokens, heads, dim, dtype, lay) {
    for (size_t t = 0; t < tokens; ++t)
      for (size_t h = 0; h < heads; ++h)
        for (size_t c = 0; c < dim; ++c) set(index(t, h) + c, values[(t * heads + h) * dim + c]);
  }
  Tensor(const Floats &values, size_t heads, size_t dim, uint32_t dtype = KVQ_DTYPE_F32, Lay lay = Lay::packed)
      : Tensor(values.data(), values.size() / (heads * dim), heads, dim, dtype, lay) {}
  // All NaN: an output.
  Tensor(size_t tokens, size_t heads, size_t dim, uint32_t dtype, Lay lay) : tokens_(tokens), heads_(heads), dim_(dim) {
    view_ = sized<kvq_tensor>();
    view_.dtype = dtype;
    if (lay == Lay::padded) view_.head_stride = int64_t(dim) + 3, view_.token_stride = view_.head_stride * int64_t(heads) + 5;
    if (lay == Lay::head_first) view_.token_stride = int64_t(dim), view_.head_stride = int64_t(dim * std::max<size_t>(tokens, 1));
    const size_t elements = tokens * heads == 0 ? 1 : index(tokens - 1, heads - 1) + dim;
    memory_.assign(elements * element_size(dtype), 0xFF);
    view_.data = memory_.data();
  }
  Tensor(Tensor &&other) noexcept = default;  // the vector's memory moves along, so view_.data stays right
  Tensor &operator=(Tensor &&) noexcept = default;

  const kvq_tensor *view() const { return &view_; }
  kvq_tensor &desc() { return view_; }
  const Bytes &memory() const { return memory_; }

  // Packed float32 copy.
  Floats values() const {
    Floats result;
    result.reserve(tokens_ * heads_ * dim_);
    for (size_t t = 0; t < tokens_; ++t)
      for (size_t h = 0; h < heads_; ++h)
        for (size_t c = 0; c < dim_; ++c) result.push_back(get(index(t, h) + c));
    return result;
  }
  // Is everything between the rows as it was?
  bool gaps_untouched() const {
    std::vector<bool> inside(memory_.size(), false);
    const size_t size = element_size(view_.dtype);
    for (size_t t = 0; t < tokens_; ++t)
      for (size_t h = 0; h < heads_; ++h)
        for (size_t b = 0; b < dim_ * size; ++b) inside[index(t, h) * size + b] = true;
    for (size_t b = 0; b < memory_.size(); ++b)
      if (!inside[b] && memory_[b] != 0xFF) return false;
    return true;
  }

 private:
  size_t index(size_t token, size_t head) const {
    const size_t head_stride = view_.head_stride ? size_t(view_.head_stride) : dim_;
    return token * (view_.token_stride ? size_t(view_.token_stride) : heads_ * dim_) + head * head_stride;
  }
  void set(size_t i, float value) {
    uint8_t *at = memory_.data() + i * element_size(view_.dtype);
    if (view_.dtype == KVQ_DTYPE_F64) {
      const double wide = value;
      std::memcpy(at, &wide, 8);
    } else if (view_.dtype == KVQ_DTYPE_F32) {
      std::memcpy(at, &value, 4);
    } else {
      const uint16_t bits = view_.dtype == KVQ_DTYPE_F16 ? half_bits(value) : bf16_bits(value);
      std::memcpy(at, &bits, 2);
    }
  }
  float get(size_t i) const {
    const uint8_t *at = memory_.data() + i * element_size(view_.dtype);
    if (view_.dtype == KVQ_DTYPE_F32) {
      float value;
      std::memcpy(&value, at, 4);
      return value;
    }
    uint16_t bits;
    std::memcpy(&bits, at, 2);
    return view_.dtype == KVQ_DTYPE_F16 ? static_cast<float>(half_value(bits)) : bf16_value(bits);
  }

  kvq_tensor view_{};
  size_t tokens_, heads_, dim_;
  Bytes memory_;
};

// ---- caches

struct Setup {
  std::string recipe = kK4V4;
  std::vector<kvq_layer> layers = {layer_of(2, 4, 128), layer_of(2, 4, 128)};
  uint32_t n_threads = 1;
  uint64_t max_bytes = 0, max_tokens = 0;
  uint32_t max_sequences = 0;
  const kvq_allocator *allocator = nullptr;
  void *log_user = nullptr;
  void (*log)(void *, int32_t, const char *) = nullptr;
  const kvq_recipe_data *recipe_data = nullptr;
  const char *path = nullptr;
  std::shared_ptr<const void> owned = nullptr;  // keeps what recipe_data points to
};

// KVQ_TEST_BACKEND=cuda: the same tests on a device.
inline bool on_device() {
  const char *backend = std::getenv("KVQ_TEST_BACKEND");
  return backend && std::string(backend) == "cuda";
}

// Has a call left `before` bytes of the allocator's memory?  On a device a cache keeps lists of free blocks and of its steps.
inline bool unchanged_bytes(uint64_t now, uint64_t before) { return now == before || (on_device() && now <= before + 65536); }

inline kvq_config config_of(const Setup &setup) {
  auto config = sized<kvq_config>();
  config.backend = on_device() ? KVQ_BACKEND_CUDA : KVQ_BACKEND_CPU;
  config.n_layers = config.n_layer_structs = static_cast<uint32_t>(setup.layers.size());
  config.layers = setup.layers.data();
  config.n_threads = setup.n_threads;
  config.recipe = setup.recipe.c_str();
  config.max_bytes = setup.max_bytes;
  config.max_tokens = setup.max_tokens;
  config.max_sequences = setup.max_sequences;
  config.allocator = setup.allocator;
  config.log_user = setup.log_user;
  config.log = setup.log;
  config.recipe_data = setup.recipe_data;
  config.path = on_device() ? nullptr : setup.path;
  return config;
}

class Cache {
 public:
  explicit Cache(const Setup &setup) {
    const kvq_config config = config_of(setup);
    INFO("recipe " << setup.recipe);
    ok(kvq_create(&config, &cache_));
  }
  ~Cache() { kvq_destroy(cache_); }
  Cache(const Cache &) = delete;
  Cache &operator=(const Cache &) = delete;
  operator kvq_cache *() const { return cache_; }

 private:
  kvq_cache *cache_ = nullptr;
};

inline kvq_lengths lengths(kvq_cache *cache, kvq_seq seq) {
  auto result = sized<kvq_lengths>();
  ok(kvq_seq_length(cache, seq, &result));
  return result;
}

inline kvq_stats stats(kvq_cache *cache) {
  auto result = sized<kvq_stats>();
  ok(kvq_stats_get(cache, &result));
  return result;
}

inline Floats export_values(kvq_cache *cache, kvq_seq seq, uint32_t layer, uint32_t head, uint32_t tensor, uint64_t count,
                            uint32_t dim) {
  Floats values(count * dim + 1);  // never a null pointer
  ok(kvq_export_values(cache, seq, layer, head, tensor, 0, count, values.data()));
  values.pop_back();
  return values;
}

struct WireBlock {
  Bytes bytes;
  uint64_t tokens = 0;
  bool operator==(const WireBlock &) const = default;
};

// All packed blocks of one layer, head and tensor.
inline std::vector<WireBlock> export_wire(kvq_cache *cache, kvq_seq seq, uint32_t layer, uint32_t head, uint32_t tensor) {
  std::vector<WireBlock> blocks;
  for (uint64_t number = 0;; ++number) {
    size_t needed = 0;
    const int32_t status = kvq_export_wire(cache, seq, layer, head, tensor, number, nullptr, 0, &needed, nullptr);
    if (status == KVQ_E_INVALID) return blocks;
    if (status != KVQ_OK) refused(status, KVQ_E_SIZE);
    WireBlock block;
    block.bytes.resize(needed);
    ok(kvq_export_wire(cache, seq, layer, head, tensor, number, block.bytes.data(), needed, &needed, &block.tokens));
    blocks.push_back(std::move(block));
  }
}

// The frozen policy, empty where there is none.
inline Bytes policy_blob(kvq_cache *cache, kvq_seq seq) {
  size_t needed = 0;
  if (kvq_policy_get(cache, seq, nullptr, 0, &needed) != KVQ_E_SIZE) return {};
  Bytes blob(needed);
  ok(kvq_policy_get(cache, seq, blob.data(), blob.size(), nullptr));
  return blob;
}

}  // namespace kvq_test
