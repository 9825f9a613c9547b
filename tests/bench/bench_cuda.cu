// Speed of decode attention on a device: one line of JSON per recipe and shape, for bench_cuda.py.
//
// Every layer of a cache has its own pages, and a graph attends layer after layer, so that the L2 cache serves no shape: with 400 MB
// of pages in all, a page has left it when its layer comes again.  Sequences hold different data.  One sequence is checked against
// float64 attention over its exported values.
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "device.cuh"
#include "oracle.hpp"

namespace {

struct Shape {
  uint32_t batch, context, q_heads, kv_heads, dim, new_tokens, flags;
};

class Subject {
 public:
  Subject(const std::string &recipe, const Shape &shape, uint32_t layers) : shape_(shape), layers_(layers) {
    kvq_layer layer = sized<kvq_layer>();
    layer.kv_heads = shape.kv_heads, layer.q_heads = shape.q_heads, layer.dim_k = shape.dim;
    kvq_config config = sized<kvq_config>();
    config.backend = KVQ_BACKEND_CUDA;
    config.n_layers = layers, config.n_layer_structs = 1, config.layers = &layer, config.recipe = recipe.c_str();
    check(kvq_create(&config, &cache_));
    check(cudaStreamCreate(&stream_));
    commit(recipe.rfind("semkv", 0) == 0);
  }
  ~Subject() {
    kvq_destroy(cache_);
    cudaStreamDestroy(stream_);
  }
  Subject(const Subject &) = delete;

  double commit_seconds = 0, host_attend_us = 0, host_begin_us = 0, host_begin_again_us = 0;

  // Microseconds of one layer's attention, median over replays of a graph of all layers; of an INVARIANT step, over its calls.
  double time() {
    const std::vector<uint32_t> counts(shape_.batch, shape_.new_tokens);
    kvq_step step = 0;
    const auto begin = std::chrono::steady_clock::now();
    check(kvq_step_begin(cache_, seqs_.data(), counts.data(), shape_.batch, KVQ_STEP_QUERY_ONLY | shape_.flags, &step));
    host_begin_us = since(begin);
    check(kvq_step_abort(cache_, step));
    const auto again = std::chrono::steady_clock::now();
    check(kvq_step_begin(cache_, seqs_.data(), counts.data(), shape_.batch, KVQ_STEP_QUERY_ONLY | shape_.flags, &step));
    host_begin_again_us = since(again);
    DeviceRows q(size_t(shape_.batch) * shape_.new_tokens * shape_.q_heads * shape_.dim);
    q.fill(99, 1.0f);
    check(cudaMalloc(&out_, q.n * 4));
    check(cudaDeviceSynchronize());
    kvq_tensor query = q.tensor(), out = sized<kvq_tensor>();
    out.memory = KVQ_MEMORY_DEVICE, out.data = out_;
    check(kvq_attend(cache_, step, 0, &query, &out, nullptr, nullptr, stream_));
    check(cudaStreamSynchronize(stream_));
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    const uint32_t calls = std::max(layers_, 8u);
    const auto attend = [&] {
      for (uint32_t i = 0; i < calls; i++) check(kvq_attend(cache_, step, i % layers_, &query, &out, nullptr, nullptr, stream_));
    };
    if (!shape_.flags) {
      check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
      const auto launch = std::chrono::steady_clock::now();
      attend();
      host_attend_us = since(launch) / calls;
      check(cudaStreamEndCapture(stream_, &graph));
      check(cudaGraphInstantiate(&exec, graph, 0));
    }
    cudaEvent_t from, to;
    check(cudaEventCreate(&from)), check(cudaEventCreate(&to));
    std::vector<double> us;
    for (int i = 0; i < 23; i++) {
      check(cudaEventRecord(from, stream_));
      if (exec)
        check(cudaGraphLaunch(exec, stream_));
      else
        attend();
      check(cudaEventRecord(to, stream_));
      check(cudaEventSynchronize(to));
      float ms = 0;
      check(cudaEventElapsedTime(&ms, from, to));
      if (i >= 2) us.push_back(ms * 1e3 / calls);
    }
    if (exec) cudaGraphExecDestroy(exec), cudaGraphDestroy(graph);
    cudaEventDestroy(from), cudaEventDestroy(to);
    result_.resize(q.n), query_.resize(q.n);
    check(kvq_attend(cache_, step, 0, &query, &out, nullptr, nullptr, stream_));
    check(cudaStreamSynchronize(stream_));
    check(cudaMemcpy(result_.data(), out_, q.n * 4, cudaMemcpyDeviceToHost));
    check(cudaMemcpy(query_.data(), q.data, q.n * 2, cudaMemcpyDeviceToHost));
    check(cudaFree(out_));
    check(kvq_step_abort(cache_, step));
    return median(us);
  }

  double page_bytes() const {
    kvq_stats stats = sized<kvq_stats>();
    check(kvq_stats_get(cache_, &stats));
    return double(stats.page_bytes_raw + stats.page_bytes_packed) / layers_;
  }

  // ||out - exact|| / ||exact|| of the last sequence's last KV head.
  double error() const {
    const uint32_t head = shape_.kv_heads - 1, ratio = shape_.q_heads / shape_.kv_heads, s = shape_.batch - 1, dim = shape_.dim;
    std::vector<float> k(size_t(shape_.context) * dim), v(k.size()), q(size_t(shape_.new_tokens) * ratio * dim);
    check(kvq_export_values(cache_, seqs_[s], 0, head, KVQ_TENSOR_K, 0, shape_.context, k.data()));
    check(kvq_export_values(cache_, seqs_[s], 0, head, KVQ_TENSOR_V, 0, shape_.context, v.data()));
    double error = 0, power = 0;
    for (uint32_t i = 0; i < shape_.new_tokens; i++)
      for (uint32_t h = 0; h < ratio; h++)
        for (uint32_t c = 0; c < dim; c++) {
          const uint16_t bits = query_[((size_t(s) * shape_.new_tokens + i) * shape_.q_heads + head * ratio + h) * dim + c];
          const uint32_t e = bits >> 10 & 31u;
          const float magnitude = e ? std::ldexp(float((bits & 1023u) | 1024u), int(e) - 25) : std::ldexp(float(bits & 1023u), -24);
          q[(size_t(i) * ratio + h) * dim + c] = bits & 0x8000u ? -magnitude : magnitude;
        }
    kvq_test::Attention a{};
    a.tokens = shape_.context, a.n_queries = shape_.new_tokens, a.q_heads = ratio, a.kv_heads = 1, a.dim_k = a.dim_v = dim;
    a.q = q.data(), a.k = k.data(), a.v = v.data();
    const std::vector<double> exact = kvq_test::attend(a).out;
    for (uint32_t i = 0; i < shape_.new_tokens; i++)
      for (size_t j = 0; j < size_t(ratio) * dim; j++) {
        const float got = result_[((size_t(s) * shape_.new_tokens + i) * shape_.q_heads + head * ratio) * dim + j];
        const double want = exact[size_t(i) * ratio * dim + j];
        error += (got - want) * (got - want), power += want * want;
      }
    return std::sqrt(error / power);
  }

 private:
  void commit(bool with_scores) {
    const uint32_t chunk_tokens = std::min(shape_.context, 16384u);
    DeviceRows k(size_t(chunk_tokens) * shape_.kv_heads * shape_.dim), v(k.n), q(size_t(chunk_tokens) * shape_.q_heads * shape_.dim);
    q.fill(7, 1.0f);
    std::vector<float> scores(chunk_tokens);
    const auto begin = std::chrono::steady_clock::now();
    for (uint32_t b = 0; b < shape_.batch; b++) {
      seqs_.push_back(0);
      check(kvq_seq_create(cache_, &seqs_.back()));
      for (uint32_t l = 0; l < layers_; l++)
        for (uint32_t first = 0; first < shape_.context; first += chunk_tokens) {
          k.fill(1 + (uint64_t(b) * layers_ + l) * 64 + first / chunk_tokens, 1.0f);
          v.fill(500000 + (uint64_t(b) * layers_ + l) * 64 + first / chunk_tokens, 1.0f);
          const kvq_tensor kt = k.tensor(), vt = v.tensor(), qt = q.tensor();
          kvq_prefill chunk = sized<kvq_prefill>();
          chunk.layer = l;
          chunk.n_tokens = std::min(chunk_tokens, shape_.context - first);
          chunk.k = &kt, chunk.v = &vt, chunk.q = &qt;
          if (with_scores && l == 0) {
            for (size_t i = 0; i < scores.size(); i++) scores[i] = float((i * 2654435761u) >> 8 & 0xffff);
            chunk.scores = scores.data(), chunk.n_scores = uint32_t(chunk.n_tokens);
          }
          if (first + chunk_tokens >= shape_.context) chunk.flags = KVQ_PREFILL_FINAL;
          check(kvq_prefill_commit(cache_, seqs_.back(), &chunk, nullptr));
        }
    }
    check(cudaDeviceSynchronize());
    commit_seconds = since(begin) * 1e-6;
  }

  Shape shape_;
  uint32_t layers_;
  kvq_cache *cache_ = nullptr;
  cudaStream_t stream_ = nullptr;
  std::vector<kvq_seq> seqs_;
  void *out_ = nullptr;
  std::vector<float> result_;
  std::vector<uint16_t> query_;
};

void measure(const std::string &recipe, const Shape &shape) {
  // Layers so that about 400 MB of pages lie between two visits; a page of a token and head is at least 60 bytes.
  const double bytes = double(shape.batch) * shape.context * shape.kv_heads * shape.dim / 128 * 70;
  const uint32_t layers = uint32_t(std::clamp(400e6 / bytes, 1.0, 64.0));
  Subject subject(recipe, shape, layers);
  const double us = subject.time(), page_bytes = subject.page_bytes();
  const double error = shape.context <= 32768 ? subject.error() : -1;
  const double tokens = double(shape.batch) * shape.context * shape.kv_heads;
  std::printf("{\"recipe\": \"%s\", \"batch\": %u, \"context\": %u, \"q_heads\": %u, \"kv_heads\": %u, \"dim\": %u, \"new_tokens\": %u, \"invariant\": %s, "
              "\"microseconds\": %.2f, \"bytes_per_token_head\": %.2f, \"terabytes_per_second\": %.3f, \"error\": %.2e, "
              "\"commit_seconds\": %.3f, \"commit_gigabytes_per_second\": %.1f, \"host_attend_us\": %.2f, \"host_begin_us\": %.1f, \"host_begin_again_us\": %.1f}\n",
              recipe.c_str(), shape.batch, shape.context, shape.q_heads, shape.kv_heads, shape.dim, shape.new_tokens,
              shape.flags ? "true" : "false", us, page_bytes / tokens,
              page_bytes / us * 1e-6, error, subject.commit_seconds, tokens * layers * 4 * shape.dim / subject.commit_seconds * 1e-9,
              subject.host_attend_us, subject.host_begin_us, subject.host_begin_again_us);
  std::fflush(stdout);
}

}  // namespace

// kvq-bench-cuda RECIPE BATCH CONTEXT [Q_HEADS KV_HEADS DIM NEW_TOKENS [invariant]]
int main(int argc, char **argv) {
  if (argc < 4) return std::fprintf(stderr, "kvq-bench-cuda RECIPE BATCH CONTEXT [Q_HEADS KV_HEADS DIM NEW_TOKENS [invariant]]\n"), 2;
  const auto number = [&](int i, uint32_t otherwise) { return i < argc ? uint32_t(std::strtoul(argv[i], nullptr, 10)) : otherwise; };
  try {
    measure(argv[1], {number(2, 1), number(3, 8192), number(4, 32), number(5, 8), number(6, 128), number(7, 1), argc > 8 ? KVQ_STEP_INVARIANT : 0u});
  } catch (const std::exception &e) {
    std::printf("{\"recipe\": \"%s\", \"batch\": %u, \"context\": %u, \"failure\": \"%s\"}\n", argv[1], number(2, 1), number(3, 8192), e.what());
    return 1;
  }
  return 0;
}
