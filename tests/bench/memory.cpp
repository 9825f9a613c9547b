// Bytes that every preset is predicted to cost (kvq_recipe_account, section 8) and bytes that a cache allocates, on every backend that
// is here, as a table for docs/memory.md: ./dev memory.  Fails where they differ by more than section 5 allows.
#include <cstdio>
#include <cstdlib>

#include "calls.hpp"
#include "random.hpp"

namespace {

constexpr uint32_t kHeads = 8, kDim = 128, kPacked = 32768;

struct Subject {
  std::string preset;
  std::vector<uint8_t> bits;
  std::vector<uint64_t> budgets;
  kvq_layer layer = sized<kvq_layer>();
  kvq_recipe_data data = sized<kvq_recipe_data>();
  kvq_account account = sized<kvq_account>();
  uint64_t tokens = 0;

  explicit Subject(const char *name) : preset(name) {
    layer.kv_heads = layer.q_heads = kHeads, layer.dim_k = kDim;
    if (preset == "chanmix") {  // of 8 heads none has 4 bits throughout: a quarter of the channels 3 bits, as many 1, the rest 2
      for (uint32_t i = 0; i < kHeads * kDim; i++) bits.push_back(uint8_t(i % 4 == 0 ? 3 : i % 4 == 1 ? 1
                                                                                                      : 2));
      data.bits = bits.data(), data.n_bits = bits.size();
    }
    if (preset == "pmkvq") {  // room for 4 bits
      budgets.push_back(uint64_t(kPacked) * kHeads * 2 * (kDim / 2 + 4));
      data.budgets = budgets.data(), data.n_budgets = 1;
    }
  }
  // Sinks, kPacked packed tokens and what stays in front of the tail.
  void predict() {
    for (uint64_t recent : {0, 32, 96})
      for (uint64_t sinks : {0, 4, 32}) {
        tokens = sinks + kPacked + recent;
        const int32_t status = kvq_recipe_account(preset.c_str(), &layer, 1, tokens, &data, &account);
        if (status == KVQ_E_STATE) return;  // the bytes depend on what the policy decides: see measure
        check(status);
        if (account.packed_tokens == kPacked && account.sink_tokens == sinks && account.tail_tokens == recent) return;
      }
    throw std::runtime_error(preset + ": no length has its tokens where this table wants them");
  }
};

struct Measured {
  uint64_t pages = 0, rest = 0;  // bytes: of pages, of everything else that the sequence has added
};

// Memory that is handed out now.
struct Counter {
  uint64_t bytes = 0;
  kvq_allocator callbacks() {
    auto allocator = sized<kvq_allocator>();
    allocator.user = this;
    allocator.alloc = [](void *self, size_t size, size_t align) {
      static_cast<Counter *>(self)->bytes += size;
      return std::aligned_alloc(align, (size + align - 1) / align * align);
    };
    allocator.release = [](void *self, void *memory, size_t size, size_t) {
      static_cast<Counter *>(self)->bytes -= size;
      std::free(memory);
    };
    return allocator;
  }
};

kvq_tensor tensor_of(const std::vector<float> &rows) {
  auto tensor = sized<kvq_tensor>();
  tensor.data = const_cast<float *>(rows.data());
  return tensor;
}

Measured measure(Subject &subject, uint32_t backend, const std::vector<float> &rows, const std::vector<float> &scores) {
  Counter counter;
  const kvq_allocator allocator = counter.callbacks();
  auto config = sized<kvq_config>();
  config.backend = backend, config.n_layers = config.n_layer_structs = 1, config.layers = &subject.layer;
  config.recipe = subject.preset.c_str(), config.recipe_data = &subject.data, config.allocator = &allocator;
  kvq_cache *cache = nullptr;
  check(kvq_create(&config, &cache));
  auto before = sized<kvq_stats>(), after = sized<kvq_stats>();
  check(kvq_stats_get(cache, &before));
  kvq_seq seq;
  check(kvq_seq_create(cache, &seq));
  const kvq_tensor x = tensor_of(rows);
  auto prompt = sized<kvq_prefill>();
  prompt.flags = KVQ_PREFILL_FINAL, prompt.n_tokens = subject.tokens, prompt.k = prompt.v = prompt.q = &x;
  if (subject.preset.starts_with("semkv")) prompt.scores = scores.data(), prompt.n_scores = uint32_t(subject.tokens);
  check(kvq_prefill_commit(cache, seq, &prompt, nullptr));
  check(kvq_stats_get(cache, &after));
  if (backend == KVQ_BACKEND_CPU && after.bytes_used != counter.bytes)
    throw std::runtime_error(subject.preset + ": bytes_used is " + std::to_string(after.bytes_used) + ", but " + std::to_string(counter.bytes) + " are handed out");
  if (subject.account.wire_bytes == 0) {  // Block-GTQ: the widths that were chosen
    uint64_t all = 0;
    for (uint32_t head = 0; head < kHeads; head++)
      for (uint32_t tensor : {KVQ_TENSOR_K, KVQ_TENSOR_V})
        for (uint64_t block = 0;; block++) {
          size_t needed = 0;
          if (kvq_export_wire(cache, seq, 0, head, tensor, block, nullptr, 0, &needed, nullptr) == KVQ_E_INVALID) break;
          all += needed;
        }
    auto lengths = sized<kvq_lengths>();
    check(kvq_seq_length(cache, seq, &lengths));
    const uint64_t raw = uint64_t(kHeads) * kDim * 2 * 2;
    subject.account.wire_bytes = all + lengths.sinks * raw, subject.account.tail_bytes = lengths.tail * raw;
  }
  const uint64_t pages = after.page_bytes_raw + after.page_bytes_packed;
  kvq_destroy(cache);
  if (counter.bytes != 0) throw std::runtime_error(subject.preset + ": destroy has left memory behind");
  return {pages, after.bytes_used - before.bytes_used - pages};
}

bool available(uint32_t backend) {
  auto info = sized<kvq_backend_info>();
  check(kvq_backend_query(backend, &info));
  return info.available;
}

// Of a page, section 5; a raw page of 64 tokens may be mostly empty at either end of the sequence.  Less than predicted are Kitty's
// positions, which a page holds in fewer bits than the wire.
bool within(const Subject &subject, const Measured &m) {
  const double predicted = double(subject.account.wire_bytes + subject.account.tail_bytes), raw_page = 64.0 * kHeads * kDim * 4;
  const double most = subject.preset.starts_with("blockgtq") ? 1.12 : 1.06;
  return double(m.pages) >= 0.98 * predicted && double(m.pages) <= predicted * most + 2 * raw_page;
}

}  // namespace

int main() try {
  kvq_test::Random random(81);
  const std::vector<float> rows = random.rows(kPacked + 256, kHeads, kDim), scores = random.normals(kPacked + 256);
  std::vector<uint32_t> backends;
  for (uint32_t backend : {KVQ_BACKEND_CPU, KVQ_BACKEND_CUDA})
    if (available(backend)) backends.push_back(backend);
  bool good = true;
  std::printf("| preset | bits per element | predicted |");
  for (uint32_t backend : backends) std::printf(" %s pages | over | tables |", backend == KVQ_BACKEND_CPU ? "CPU" : "CUDA");
  std::printf(" of FP16 |\n|---|---|---|");
  for (size_t i = 0; i < backends.size(); i++) std::printf("---|---|---|");
  std::printf("---|\n");
  for (uint32_t i = 0; const char *name = kvq_recipe_preset(i); i++) {
    Subject subject(name);
    subject.predict();
    std::vector<Measured> results;
    for (uint32_t backend : backends) results.push_back(measure(subject, backend, rows, scores));
    const double predicted = double(subject.account.wire_bytes + subject.account.tail_bytes), each = double(subject.tokens) * kHeads;
    std::printf("| `%s` | %.3f | %.2f |", name, 8 * double(predicted) / (each * 2 * kDim), predicted / each);
    for (const Measured &m : results) {
      good &= within(subject, m);
      std::printf(" %.2f | %.1f %%%s | %.3f |", double(m.pages) / each, 100 * (double(m.pages) / predicted - 1), within(subject, m) ? "" : " (wrong)", double(m.rest) / each);
    }
    std::printf(" %.1f %% |\n", 100 * predicted / (each * 4 * kDim));
  }
  return good ? 0 : 1;
} catch (const std::exception &failure) {
  std::fprintf(stderr, "%s\n", failure.what());
  return 2;
}
