// Speed of the other calls on a device: prompts committed, and what a step costs the host.  One line of JSON per recipe.
//
// Staging is kvq_prefill_commit of chunks; packing is the FINAL call of a layer, with its policy (pack_host_us: until it returns).  Both
// are timed with the device idle before and after, in prompts after the first, and compared with a copy of the same bytes on the
// device.
#include <cstdio>
#include <cstdlib>

#include "device.cuh"

namespace {

constexpr uint32_t kQueryHeads = 32, kHeads = 8, kDim = 128, kChunk = 16384;

struct Times {
  std::vector<double> stage, pack, pack_host, append, attend, begin, end;
};

class Subject {
 public:
  Subject(const std::string &recipe, uint32_t tokens, uint32_t layers)
      : scored_(recipe.rfind("semkv", 0) == 0), tokens_(tokens), layers_(layers), k_(size_t(tokens) * kHeads * kDim), v_(k_.n),
        q_(size_t(std::min(tokens, kChunk)) * kQueryHeads * kDim), out_(size_t(kSequences) * kQueryHeads * kDim) {
    kvq_layer layer = sized<kvq_layer>();
    layer.kv_heads = kHeads, layer.q_heads = kQueryHeads, layer.dim_k = kDim;
    kvq_config config = sized<kvq_config>();
    config.backend = KVQ_BACKEND_CUDA;
    config.n_layers = layers, config.n_layer_structs = 1, config.layers = &layer, config.recipe = recipe.c_str();
    check(kvq_create(&config, &cache_));
    k_.fill(1, 1), v_.fill(2, 1), q_.fill(3, 1);
    check(cudaDeviceSynchronize());
  }
  ~Subject() { kvq_destroy(cache_); }
  Subject(const Subject &) = delete;

  static constexpr uint32_t kSequences = 8;

  kvq_seq prompt(Times *times) {
    kvq_seq seq;
    check(kvq_seq_create(cache_, &seq));
    for (uint32_t l = 0; l < layers_; l++) {
      double stage = 0;
      for (uint32_t first = 0; first < tokens_; first += kChunk) stage += timed([&] { chunk(seq, l, first); });
      kvq_prefill last = sized<kvq_prefill>();
      last.layer = l, last.flags = KVQ_PREFILL_FINAL;
      double call = 0;
      const double pack = timed([&] { call = host([&] { check(kvq_prefill_commit(cache_, seq, &last, nullptr)); }); });
      // SemKV packs all layers behind the last one.
      times->stage.push_back(stage);
      if (!scored_ || l + 1 == layers_) times->pack.push_back(scored_ ? pack / layers_ : pack), times->pack_host.push_back(scored_ ? call / layers_ : call);
    }
    return seq;
  }

  // One token for each of the sequences in all layers; host time of the calls.
  void step(const std::vector<kvq_seq> &seqs, Times *times) {
    const std::vector<uint32_t> ones(seqs.size(), 1);
    const std::vector<float> scores(seqs.size(), 1.0f);
    const kvq_tensor k = k_.tensor(), v = v_.tensor(), q = q_.tensor();
    kvq_tensor out = out_.tensor();
    kvq_step step = 0;
    times->begin.push_back(host([&] { check(kvq_step_begin(cache_, seqs.data(), ones.data(), uint32_t(seqs.size()), 0, &step)); }));
    double append = 0, attend = 0;
    for (uint32_t l = 0; l < layers_; l++) {
      append += host([&] { check(kvq_append(cache_, step, l, &k, &v, nullptr, nullptr)); });
      attend += host([&] { check(kvq_attend(cache_, step, l, &q, &out, nullptr, nullptr, nullptr)); });
    }
    times->append.push_back(append / layers_), times->attend.push_back(attend / layers_);
    check(cudaDeviceSynchronize());
    times->end.push_back(host([&] { check(kvq_step_end(cache_, step, nullptr, scores.data())); }));
  }

  kvq_cache *cache() const { return cache_; }
  // The same bytes copied: microseconds.
  double copy() const {
    DeviceRows to(k_.n);
    std::vector<double> us;
    for (int i = 0; i < 12; i++)
      us.push_back(timed([&] {
        check(cudaMemcpyAsync(to.data, k_.data, k_.n * 2, cudaMemcpyDeviceToDevice));
        check(cudaMemcpyAsync(to.data, v_.data, v_.n * 2, cudaMemcpyDeviceToDevice));
      }));
    return median(us);
  }

 private:
  template <class F>
  static double host(F &&f) {
    const auto begin = std::chrono::steady_clock::now();
    f();
    return since(begin);
  }
  template <class F>
  static double timed(F &&f) {
    check(cudaDeviceSynchronize());
    return host([&] { f(), check(cudaDeviceSynchronize()); });
  }
  void chunk(kvq_seq seq, uint32_t layer, uint32_t first) {
    kvq_prefill chunk = sized<kvq_prefill>();
    chunk.layer = layer, chunk.n_tokens = std::min(kChunk, tokens_ - first);
    kvq_tensor k = k_.tensor(), v = v_.tensor(), q = q_.tensor();
    k.data = k_.data + size_t(first) * kHeads * kDim, v.data = v_.data + size_t(first) * kHeads * kDim;
    chunk.k = &k, chunk.v = &v, chunk.q = &q;
    if (scored_ && layer == 0) chunk.scores = scores_.data(), chunk.n_scores = uint32_t(chunk.n_tokens);
    check(kvq_prefill_commit(cache_, seq, &chunk, nullptr));
  }

  bool scored_;
  uint32_t tokens_, layers_;
  DeviceRows k_, v_, q_, out_;
  const std::vector<float> scores_ = std::vector<float>(kChunk, 1.0f);
  kvq_cache *cache_ = nullptr;
};

void measure(const std::string &recipe, uint32_t tokens) {
  constexpr uint32_t kLayers = 4;
  Subject subject(recipe, tokens, kLayers);
  Times times, ignored;
  for (int i = 0; i < 4; i++) check(kvq_seq_remove(subject.cache(), subject.prompt(i ? &times : &ignored)));
  const double copy = subject.copy(), bytes = double(tokens) * kHeads * kDim * 4;
  const double stage = median(times.stage), pack = median(times.pack);
  std::vector<kvq_seq> seqs;
  for (uint32_t s = 0; s < Subject::kSequences && size_t(s) * tokens < 600000; s++) seqs.push_back(subject.prompt(&ignored));
  for (int i = 0; i < 30; i++) subject.step(seqs, i < 5 ? &ignored : &times);
  std::printf("{\"recipe\": \"%s\", \"tokens\": %u, \"stage_us\": %.1f, \"pack_us\": %.1f, \"pack_host_us\": %.1f, \"copy_us\": %.1f, "
              "\"stage_gigabytes_per_second\": %.0f, \"pack_gigabytes_per_second\": %.0f, \"pack_of_copy\": %.3f, "
              "\"host_begin_us\": %.1f, \"host_append_us\": %.2f, \"host_attend_us\": %.2f, \"host_end_us\": %.1f}\n",
              recipe.c_str(), tokens, stage, pack, median(times.pack_host), copy, bytes / stage * 1e-3, bytes / pack * 1e-3, copy / pack, median(times.begin),
              median(times.append), median(times.attend), median(times.end));
  std::fflush(stdout);
}

}  // namespace

// kvq-bench-calls TOKENS RECIPE...
int main(int argc, char **argv) {
  if (argc < 3) return std::fprintf(stderr, "kvq-bench-calls TOKENS RECIPE...\n"), 2;
  int failures = 0;
  for (int i = 2; i < argc; i++) {
    try {
      measure(argv[i], uint32_t(std::strtoul(argv[1], nullptr, 10)));
    } catch (const std::exception &e) {
      std::printf("{\"recipe\": \"%s\", \"tokens\": %s, \"failure\": \"%s\"}\n", argv[i], argv[1], e.what());
      failures++;
    }
  }
  return failures != 0;
}
