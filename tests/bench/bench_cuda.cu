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

#include "half.hpp"
#include "oracle.hpp"
#include "prompted.cuh"

namespace {

struct Shape {
  uint32_t batch, context, q_heads, kv_heads, dim, new_tokens, flags;
};

class Subject : public PromptedCache {
 public:
  Subject(const std::string &recipe, const Shape &shape, uint32_t layers)
      : PromptedCache(recipe, {shape.batch, shape.context, shape.q_heads, shape.kv_heads, shape.dim}, layers), shape_(shape) {}

  double host_attend_us = 0, host_begin_us = 0, host_begin_again_us = 0;

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
          const size_t at = ((size_t(s) * shape_.new_tokens + i) * shape_.q_heads + head * ratio + h) * dim + c;
          q[(size_t(i) * ratio + h) * dim + c] = float(kvq_test::half_value(query_[at]));
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
  Shape shape_;
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
              page_bytes / us * 1e-6, error, subject.commit_seconds(), tokens * layers * 4 * shape.dim / subject.commit_seconds() * 1e-9,
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
