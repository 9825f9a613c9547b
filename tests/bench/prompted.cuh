// A cache on the device whose sequences hold prompts of random numbers, different ones in every sequence and layer.
#pragma once
#include "device.cuh"

struct PromptShape {
  uint32_t sequences, context, q_heads, kv_heads, dim;
};

class PromptedCache {
 public:
  PromptedCache(const std::string &recipe, const PromptShape &shape, uint32_t layers) : layers_(layers) {
    kvq_layer layer = sized<kvq_layer>();
    layer.kv_heads = shape.kv_heads, layer.q_heads = shape.q_heads, layer.dim_k = shape.dim;
    kvq_config config = sized<kvq_config>();
    config.backend = KVQ_BACKEND_CUDA;
    config.n_layers = layers, config.n_layer_structs = 1, config.layers = &layer, config.recipe = recipe.c_str();
    check(kvq_create(&config, &cache_));
    check(cudaStreamCreate(&stream_));
    commit(shape, recipe.rfind("semkv", 0) == 0);
  }
  ~PromptedCache() {
    kvq_destroy(cache_);
    cudaStreamDestroy(stream_);
  }
  PromptedCache(const PromptedCache &) = delete;

  double commit_seconds() const { return commit_seconds_; }
  // Of all sequences in one layer.
  double page_bytes() const {
    kvq_stats stats = sized<kvq_stats>();
    check(kvq_stats_get(cache_, &stats));
    return double(stats.page_bytes_raw + stats.page_bytes_packed) / layers_;
  }

 protected:
  uint32_t layers_;
  kvq_cache *cache_ = nullptr;
  cudaStream_t stream_ = nullptr;
  std::vector<kvq_seq> seqs_;

 private:
  void commit(const PromptShape &shape, bool with_scores) {
    const uint32_t chunk_tokens = std::min(shape.context, 16384u);
    DeviceRows k(size_t(chunk_tokens) * shape.kv_heads * shape.dim), v(k.n), q(size_t(chunk_tokens) * shape.q_heads * shape.dim);
    q.fill(7, 1.0f);
    std::vector<float> scores(chunk_tokens);
    for (size_t i = 0; i < scores.size(); i++) scores[i] = float((i * 2654435761u) >> 8 & 0xffff);
    const auto begin = std::chrono::steady_clock::now();
    for (uint32_t b = 0; b < shape.sequences; b++) {
      seqs_.push_back(0);
      check(kvq_seq_create(cache_, &seqs_.back()));
      for (uint32_t l = 0; l < layers_; l++)
        for (uint32_t first = 0; first < shape.context; first += chunk_tokens) {
          const uint64_t seed = (uint64_t(b) * layers_ + l) * 64 + first / chunk_tokens;
          k.fill(1 + seed, 1.0f), v.fill(500000 + seed, 1.0f);
          const kvq_tensor kt = k.tensor(), vt = v.tensor(), qt = q.tensor();
          kvq_prefill chunk = sized<kvq_prefill>();
          chunk.layer = l, chunk.n_tokens = std::min(chunk_tokens, shape.context - first);
          chunk.k = &kt, chunk.v = &vt, chunk.q = &qt;
          if (with_scores && l == 0) chunk.scores = scores.data(), chunk.n_scores = uint32_t(chunk.n_tokens);
          if (first + chunk_tokens >= shape.context) chunk.flags = KVQ_PREFILL_FINAL;
          check(kvq_prefill_commit(cache_, seqs_.back(), &chunk, nullptr));
        }
    }
    check(cudaDeviceSynchronize());
    commit_seconds_ = since(begin) * 1e-6;
  }

  double commit_seconds_ = 0;
};
