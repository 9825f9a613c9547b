// Speed of prompt attention on a device: one line of JSON per recipe, for bench_prompt.py.
//
// The newest QUERIES tokens of a committed sequence look at it, causally; the time is that of kvq_attend on a stream, layer after
// layer, so that no layer finds its pages in the L2 cache.  Some rows are checked against float64 over the exported values.
#include <cstdio>
#include <cstdlib>

#include "half.hpp"
#include "oracle.hpp"
#include "prompted.cuh"

namespace {

struct Shape {
  uint32_t queries, context, q_heads, kv_heads, dim;
};

class Subject : public PromptedCache {
 public:
  Subject(const std::string &recipe, const Shape &shape, uint32_t layers)
      : PromptedCache(recipe, {1, shape.context, shape.q_heads, shape.kv_heads, shape.dim}, layers), shape_(shape),
        q_(size_t(shape.queries) * shape.q_heads * shape.dim), out_(q_.n) {
    q_.fill(99, 1.0f);
    check(cudaDeviceSynchronize());
  }

  // Median microseconds of one call.
  double time(uint32_t rounds) {
    kvq_step step = 0;
    check(kvq_step_begin(cache_, seqs_.data(), &shape_.queries, 1, KVQ_STEP_QUERY_ONLY, &step));
    cudaEvent_t from, to;
    check(cudaEventCreate(&from)), check(cudaEventCreate(&to));
    std::vector<double> us;
    for (uint32_t i = 0; i < rounds + 2; i++) {
      check(cudaEventRecord(from, stream_));
      for (uint32_t l = 0; l < layers_; l++) attend(step, l);
      check(cudaEventRecord(to, stream_));
      check(cudaEventSynchronize(to));
      float ms = 0;
      check(cudaEventElapsedTime(&ms, from, to));
      if (i >= 2) us.push_back(ms * 1e3 / layers_);
    }
    attend(step, 0);
    check(cudaStreamSynchronize(stream_));
    check(kvq_step_abort(cache_, step));
    cudaEventDestroy(from), cudaEventDestroy(to);
    return median(us);
  }

  // The largest error of some rows in units of the tolerance of section 9.
  double error() const {
    const uint32_t dim = shape_.dim, ratio = shape_.q_heads / shape_.kv_heads, head = shape_.kv_heads - 1;
    std::vector<float> k(size_t(shape_.context) * dim), v(k.size());
    check(kvq_export_values(cache_, seqs_[0], 0, head, KVQ_TENSOR_K, 0, shape_.context, k.data()));
    check(kvq_export_values(cache_, seqs_[0], 0, head, KVQ_TENSOR_V, 0, shape_.context, v.data()));
    std::vector<uint16_t> q(q_.n), out(out_.n);
    check(cudaMemcpy(q.data(), q_.data, q.size() * 2, cudaMemcpyDeviceToHost));
    check(cudaMemcpy(out.data(), out_.data, out.size() * 2, cudaMemcpyDeviceToHost));
    double worst = 0;
    for (uint32_t i = 0; i < 20; i++) {
      const uint32_t query = uint32_t(uint64_t(shape_.queries - 1) * i / 19);
      const size_t row = (size_t(query) * shape_.q_heads + head * ratio + i % ratio) * dim;
      std::vector<float> mine(dim);
      for (uint32_t c = 0; c < dim; c++) mine[c] = float(kvq_test::half_value(q[row + c]));
      kvq_test::Attention a{};
      a.tokens = shape_.context - shape_.queries + query + 1, a.n_queries = a.q_heads = a.kv_heads = 1, a.dim_k = a.dim_v = dim;
      a.q = mine.data(), a.k = k.data(), a.v = v.data();
      const kvq_test::Attended exact = kvq_test::attend(a);
      std::vector<double> rounded(exact.out.begin(), exact.out.end());
      double off = 0, power = 0;  // the output is fp16: its own rounding is no error of attention
      for (uint32_t c = 0; c < dim; c++) {
        const double difference = std::fabs(kvq_test::half_value(out[row + c]) - rounded[c]), half_ulp = std::ldexp(std::fabs(rounded[c]), -11) + 0x1p-25;
        off += std::pow(std::max(0.0, difference - half_ulp), 2), power += rounded[c] * rounded[c];
      }
      worst = std::max(worst, off / power / (1e-7 * std::max(1.0, exact.variance[0])));
    }
    return worst;
  }

 private:
  void attend(kvq_step step, uint32_t layer) {
    kvq_tensor q = q_.tensor(), out = out_.tensor();
    check(kvq_attend(cache_, step, layer, &q, &out, nullptr, nullptr, stream_));
  }
  Shape shape_;
  DeviceRows q_, out_;
};

void measure(const std::string &recipe, const Shape &shape, uint32_t rounds) {
  Subject subject(recipe, shape, shape.context > 16384 ? 3 : 8);
  const double us = subject.time(rounds);
  const double base = shape.context - shape.queries, pairs = double(shape.queries) * (base + (shape.queries + 1) / 2.0);  // query, visible token
  std::printf("{\"recipe\": \"%s\", \"queries\": %u, \"context\": %u, \"q_heads\": %u, \"kv_heads\": %u, \"dim\": %u, \"microseconds\": %.1f, "
              "\"teraflops\": %.1f, \"bytes_per_token_head\": %.2f, \"error_of_tolerance\": %.3f}\n",
              recipe.c_str(), shape.queries, shape.context, shape.q_heads, shape.kv_heads, shape.dim, us,
              pairs * shape.q_heads * shape.dim * 4 / us * 1e-6, subject.page_bytes() / (double(shape.context) * shape.kv_heads), subject.error());
  std::fflush(stdout);
}

}  // namespace

// kvq-bench-prompt QUERIES CONTEXT RECIPE,... [Q_HEADS KV_HEADS DIM ROUNDS]; the context ends with the queries' own tokens.
int main(int argc, char **argv) {
  if (argc < 4) return std::fprintf(stderr, "kvq-bench-prompt QUERIES CONTEXT RECIPE,... [Q_HEADS KV_HEADS DIM ROUNDS]\n"), 2;
  const auto number = [&](int i, uint32_t otherwise) { return i < argc ? uint32_t(std::strtoul(argv[i], nullptr, 10)) : otherwise; };
  const Shape shape{number(1, 512), number(2, 512), number(4, 32), number(5, 8), number(6, 128)};
  int failures = 0;
  for (std::string rest = argv[3]; !rest.empty();) {
    const std::string recipe = rest.substr(0, rest.find(','));
    rest = recipe.size() < rest.size() ? rest.substr(recipe.size() + 1) : "";
    try {
      measure(recipe, shape, number(7, 20));
    } catch (const std::exception &e) {
      std::printf("{\"recipe\": \"%s\", \"queries\": %u, \"context\": %u, \"failure\": \"%s\"}\n", recipe.c_str(), shape.queries, shape.context, e.what());
      failures++;
    }
  }
  return failures != 0;
}
