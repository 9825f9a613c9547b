// For tests of the engine: a backend whose pages hold token numbers, and a cache on it beside a plain model.
//
// Token t of layer l is the number t + 1000000 * l, written as K's first channel.  Whatever the engine does with pages, every
// position must hold its token's number in every layer.
#pragma once
#include <atomic>
#include <catch2/catch_test_macros.hpp>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "engine/cache.h"
#include "random.hpp"

namespace kvq_test {

using kvq::Block;
using kvq::PageFormat;
using kvq::PageRows;
using kvq::Status;

// Pages are arrays of numbers, one per row; packed ones remember nothing else.
class NumberBackend : public kvq::Backend {
 public:
  explicit NumberBackend(kvq::Memory *memory) : memory_(memory) {}
  static std::shared_ptr<kvq::Backend> make(kvq::Memory *memory, uint32_t, const char *) { return kvq::make_shared_in<NumberBackend>(memory, memory); }

  uint32_t raw_page_tokens() const override { return 16; }
  size_t raw_page_bytes(const kvq::LayerShape &) const override { return 16 * sizeof(uint32_t); }
  std::shared_ptr<const PageFormat> make_format(const kvq::LayerShape &, uint32_t page_tokens, std::pmr::vector<kvq::HeadFormat> &&k,
                                                std::pmr::vector<kvq::HeadFormat> &&v) override {
    auto format = kvq::make_shared_in<PageFormat>(memory_, memory_);
    format->k = std::move(k), format->v = std::move(v);
    format->page_tokens = page_tokens;
    format->bytes = page_tokens * sizeof(uint32_t);
    return format;
  }
  void *allocate_page(size_t bytes) override {
    void *page = memory_->allocate(bytes, 64);
    std::memset(page, 0xEE, bytes);
    return page;
  }
  void release_page(void *page, size_t bytes) noexcept override { memory_->deallocate(page, bytes, 64); }

  static uint32_t *row(const void *page, uint32_t r) { return static_cast<uint32_t *>(const_cast<void *>(page)) + r; }
  Status store_rows(const kvq::LayerShape &shape, const kvq_tensor &k, const kvq_tensor &, uint64_t first, PageRows rows,
                    uint64_t *) override {
    const double *x = static_cast<const double *>(k.data);
    for (uint32_t i = 0; i < rows.count; i++) {
      const double value = x[(first + i) * shape.dim_k];
      if (value < 0) return kvq::fail(KVQ_E_NONFINITE, "negative numbers stand for NaN here");
      *row(rows.page, rows.first + i) = uint32_t(value);
    }
    return KVQ_OK;
  }
  Status check_rows(const kvq_tensor &, uint64_t, uint64_t, uint32_t, uint32_t, const char *, uint64_t *) override { return KVQ_OK; }
  void copy_rows(const kvq::LayerShape &, const void *from, uint32_t from_row, void *to, uint32_t to_row, uint32_t count) override {
    std::memcpy(row(to, to_row), row(from, from_row), count * sizeof(uint32_t));
  }
  void load_rows(const kvq::LayerShape &, PageRows, uint32_t, uint32_t, uint16_t *) override { sound = false; }
  void add_statistics(const kvq::LayerShape &, std::span<const PageRows>, const kvq_tensor *, uint64_t, kvq::LayerStatistics *) override {}
  void pack(const kvq::LayerShape &, const PageFormat &format, std::span<const PageRows> from, std::span<const PageRows> to) override {
    const uint32_t group = kvq::group_tokens(format.k[0].codec);
    std::vector<uint32_t> numbers;
    for (const PageRows &rows : from) numbers.insert(numbers.end(), row(rows.page, rows.first), row(rows.page, rows.first + rows.count));
    size_t next = 0;
    for (const PageRows &rows : to) {
      const bool whole = rows.first % group == 0 && rows.count % group == 0 && rows.first + rows.count <= format.page_tokens;
      if (!whole || next + rows.count > numbers.size()) return sound = false, void();
      std::memcpy(row(rows.page, rows.first), numbers.data() + next, rows.count * sizeof(uint32_t));
      next += rows.count;
    }
    if (next != numbers.size()) sound = false;
    encoded += numbers.size();
  }
  void copy_packed(const PageFormat &format, const void *from, void *to) override { std::memcpy(to, from, format.bytes); }
  void narrow_packed(const PageFormat &, const void *, const PageFormat &, void *, uint32_t) override { sound = false; }
  void unpack(const PageFormat &, const void *, uint32_t, uint32_t, uint32_t, uint32_t, Block *) override { sound = false; }
  std::shared_ptr<kvq::Workspace> make_workspace(std::span<const kvq::LayerShape>) override {
    return kvq::make_shared_in<kvq::Workspace>(memory_);
  }
  // Remembers what it was asked to attend to: the numbers by position, in the order of sequences.
  Status attend(const kvq::AttendCall &call, kvq::Workspace *) override {
    seen.clear();
    for (const kvq::AttendSequence &sequence : call.sequences) {
      std::vector<uint32_t> numbers(sequence.length, UINT32_MAX);
      for (size_t i = 0; i < sequence.pages.count; i++) {
        const kvq::PageView view = sequence.pages.get(sequence.pages.self, call.layer, i);
        if (view.count == 0) sound = false;
        for (uint32_t r = 0; r < view.count; r++) {
          const uint64_t position = view.positions ? view.positions[r] : view.position + r;
          if (position >= sequence.length || numbers[position] != UINT32_MAX) return sound = false, KVQ_OK;  // none twice
          numbers[position] = *row(view.page, view.first + r);
        }
      }
      seen.push_back(numbers);
    }
    return KVQ_OK;
  }

  std::vector<std::vector<uint32_t>> seen;
  std::atomic<uint64_t> encoded{0};  // tokens x layers packed so far
  std::atomic<bool> sound{true};     // was every call as backend.h promises?  (Catch2's macros are for one thread.)

 private:
  kvq::Memory *memory_;
};

// A cache of two layers with one head of two channels.
class NumberCache {
 public:
  static constexpr uint32_t kLayers = 2, kLayerStep = 1000000;

  explicit NumberCache(const std::string &recipe, uint64_t max_tokens = 0, std::vector<kvq::LayerShape> shapes = {},
                       const kvq_allocator *allocator = nullptr, kvq::BackendFactory make = NumberBackend::make)
      : shapes_(std::move(shapes)) {
    kvq::CacheConfig config{};
    for (uint32_t l = uint32_t(shapes_.size()); l < kLayers; l++) shapes_.push_back({1, 1, 2, 2, KVQ_ROPE_HALF, 2, 0, 0, l});
    config.shapes = shapes_;
    config.recipe = recipe.c_str();
    config.max_tokens = max_tokens;
    config.allocator = allocator;
    config.make_backend = make;
    if (kvq::Cache::create(config, &cache_) != KVQ_OK) FAIL(recipe << ": " << kvq::failure_detail());
  }
  ~NumberCache() { kvq::Cache::destroy(cache_); }
  NumberCache(const NumberCache &) = delete;
  kvq::Cache *operator->() const { return cache_; }
  kvq::Cache &operator*() const { return *cache_; }
  NumberBackend &backend() const { return static_cast<NumberBackend &>(*cache_->backend); }

  kvq::Cache::SequenceUse use(uint64_t id) const {
    kvq::Cache::SequenceUse use;
    if (cache_->sequences.use(id, &use) != KVQ_OK) FAIL(kvq::failure_detail());
    return use;
  }
  uint64_t create() const {
    uint64_t id;
    REQUIRE(cache_->create_sequence(&id) == KVQ_OK);
    return id;
  }

  // One chunk of a prompt in one layer.
  Status chunk(uint64_t id, uint32_t layer, const std::vector<uint32_t> &tokens, bool final) const {
    const std::vector<double> numbers = rows(layer, tokens);
    const kvq_tensor x = tensor(numbers);
    const std::vector<float> scores = scores_of(tokens);
    return cache_->prefill(*use(id), {layer, final, tokens.size(), &x, &x, nullptr, scores});
  }
  Status commit(uint64_t id, const std::vector<uint32_t> &tokens) const {
    for (uint32_t l = 0; l < kLayers; l++)
      if (const Status status = chunk(id, l, tokens, true); status != KVQ_OK) return status;
    return KVQ_OK;
  }
  // A whole step of one sequence; `keep` of its tokens stay.
  Status append(uint64_t id, const std::vector<uint32_t> &tokens, uint32_t keep) const {
    const uint32_t count = uint32_t(tokens.size());
    uint64_t step;
    if (const Status status = cache_->begin_step({&id, 1}, &count, false, &step); status != KVQ_OK) return status;
    kvq::Cache::StepUse use;
    if (const Status status = cache_->steps.use(step, &use); status != KVQ_OK) return status;
    for (uint32_t l = 0; l < kLayers; l++) {
      const std::vector<double> numbers = rows(l, tokens);
      const kvq_tensor x = tensor(numbers);
      if (const Status status = cache_->append(*use, l, x, x, nullptr); status != KVQ_OK) return status;
    }
    const std::vector<float> scores = scores_of(tokens);
    return cache_->end_step(use, &keep, scores.data());
  }

  // The numbers that attention in a layer sees, by position.
  std::vector<uint32_t> numbers(uint64_t id, uint32_t layer) const {
    const uint32_t one = 1;
    uint64_t step;
    REQUIRE(cache_->begin_step({&id, 1}, &one, true, &step) == KVQ_OK);
    kvq::Cache::StepUse use;
    REQUIRE(cache_->steps.use(step, &use) == KVQ_OK);
    const kvq_tensor none{};
    REQUIRE(cache_->attend(*use, {layer, &none, &none, nullptr, 0, 1, 0, nullptr}) == KVQ_OK);
    REQUIRE(cache_->end_step(use, nullptr, nullptr) == KVQ_OK);
    REQUIRE(backend().sound);
    return backend().seen.at(0);
  }

  kvq_lengths lengths(uint64_t id) const {
    kvq_lengths out{};
    cache_->lengths(*use(id), &out);
    return out;
  }
  kvq_stats stats() const {
    kvq_stats out{};
    cache_->stats(&out);
    return out;
  }

  // Scores that are all different: by a hash of the token.
  static float score(uint32_t token) { return float(kvq::splitmix64(token) >> 40); }
  static std::vector<float> scores_of(const std::vector<uint32_t> &tokens) {
    std::vector<float> scores;
    for (const uint32_t token : tokens) scores.push_back(score(token));
    return scores;
  }

 private:
  static std::vector<double> rows(uint32_t layer, const std::vector<uint32_t> &tokens) {
    std::vector<double> numbers;
    for (const uint32_t token : tokens) numbers.push_back(token + double(kLayerStep) * layer), numbers.push_back(0);
    return numbers;
  }
  static kvq_tensor tensor(const std::vector<double> &numbers) {
    kvq_tensor x{};
    x.dtype = KVQ_DTYPE_F64;
    x.data = const_cast<double *>(numbers.data());
    x.token_stride = x.head_stride = 2;
    return x;
  }

  std::vector<kvq::LayerShape> shapes_;
  kvq::Cache *cache_ = nullptr;
};

// Token numbers first, first + 1, ...
inline std::vector<uint32_t> tokens_from(uint32_t first, size_t count) {
  std::vector<uint32_t> tokens(count);
  for (size_t i = 0; i < count; i++) tokens[i] = first + uint32_t(i);
  return tokens;
}

}  // namespace kvq_test
