// A cache: configuration, policies, pages, sequences and steps.
//
// The C boundary (capi/) resolves ids and translates arguments; tensors arrive here with strides resolved and checked.  Sequences
// and steps are passed as uses of their tables: whoever holds one is alone with the object.
#pragma once
#include <atomic>
#include <optional>
#include <span>

#include "engine/pages.h"
#include "engine/policies.h"
#include "engine/sequence.h"
#include "engine/step.h"
#include "engine/table.h"
#include "recipe/recipe.h"

namespace kvq {

// What the number means is the backend's: threads (CPU), ordinal of the device (CUDA); path: kvq_config.path.
using BackendFactory = std::shared_ptr<Backend> (*)(Memory *memory, uint32_t number, const char *path);

// kvq_config, translated.
struct CacheConfig {
  BackendFactory make_backend;  // of the backend that was chosen
  std::span<const LayerShape> shapes;
  const char *recipe;
  const kvq_recipe_data *data;  // or nullptr
  uint32_t backend_number, callers = 1, max_sequences;
  uint64_t max_bytes, max_tokens;
  const kvq_allocator *allocator;
  void *log_user;
  void (*log)(void *user, int32_t level, const char *message);
  const char *path;  // or nullptr
};

// A chunk of a prompt.  layer == KVQ_ALL_LAYERS: no tokens, only `final`.
struct PromptChunk {
  uint32_t layer = 0;
  bool final = false;
  uint64_t n_tokens = 0;
  const kvq_tensor *k = nullptr, *v = nullptr, *q = nullptr;
  std::span<const float> scores;
  bool device_scores = false;  // they lie in device memory
};

// Which tensor of which head, for exports.
struct HeadChoice {
  uint32_t layer, head, tensor;
};

// Owns an object until its id is made.
template <class T>
class Pending {
 public:
  template <class... Args>
  explicit Pending(std::pmr::memory_resource *memory, Args &&...args)
      : allocator_(memory), object_(allocator_.template new_object<T>(std::forward<Args>(args)...)) {}
  ~Pending() {
    if (object_) allocator_.delete_object(object_);
  }
  Pending(const Pending &) = delete;
  T *operator->() const { return object_; }
  T &operator*() const { return *object_; }
  T *release() { return std::exchange(object_, nullptr); }

 private:
  std::pmr::polymorphic_allocator<T> allocator_;
  T *object_;
};

class Cache {
 public:
  using SequenceUse = Table<Sequence>::Use;
  using StepUse = Table<Step>::Use;
  using StepShare = Table<Step>::Share;

  static Status create(const CacheConfig &config, Cache **out);
  static void destroy(Cache *cache) noexcept;
  // Checks of create that need no memory of the cache.
  static Status check(const CacheConfig &config);
  static Status check_sources(std::span<const LayerShape> shapes);

  // sequences: cache.cpp
  Status create_sequence(uint64_t *id);
  Status fork(const Sequence &parent, uint64_t keep, uint64_t *id);
  Status truncate(Sequence &sequence, uint64_t length);
  Status remove(SequenceUse &use);
  void lengths(const Sequence &sequence, kvq_lengths *out) const;
  void stats(kvq_stats *out) const;

  // prompts: prefill.cpp
  Status prefill(Sequence &sequence, const PromptChunk &chunk);
  Status end_turn(Sequence &sequence);

  // steps: step.cpp, step_end.cpp
  Status begin_step(std::span<const uint64_t> ids, const uint32_t *new_tokens, uint32_t flags, uint64_t *id);  // KVQ_STEP_*
  Status append(Step &step, uint32_t layer, const kvq_tensor &k, const kvq_tensor &v, const kvq_tensor *q);
  Status attend(Step &step, const AttendInput &input);
  // The same for some heads; several of these may run at once, unless the step is QUERY_ONLY.
  Status attend_heads(Step &step, const AttendInput &input);
  Status end_step(StepUse &use, const uint32_t *keep, const float *scores);
  Status abort_step(StepUse &use);

  // exports: export.cpp
  Status export_values(const Sequence &sequence, HeadChoice choice, uint64_t first, uint64_t count, float *out);
  Status export_wire(const Sequence &sequence, HeadChoice choice, uint64_t block, Vector<uint8_t> *wire, uint64_t *tokens);

  // policies: cache.cpp
  Status set_policy(Sequence &sequence, const void *blob, size_t size);
  Status get_policy(const Sequence &sequence, Vector<uint8_t> *blob);

  // What all of the above use.
  bool stores(uint32_t layer) const { return shapes[layer].source == layer; }
  bool chooses_tokens() const { return recipe.classes == 2; }  // SemKV
  Status check_layer(uint32_t layer) const;
  Status check_room(uint64_t length, uint64_t more) const;  // max_tokens
  static Status check_scores(std::span<const float> scores);
  // Scores in host memory: those that are given, or a copy of them in `room`.
  Status fetch_scores(bool on_device, Vector<float> *room, std::span<const float> *scores) const;
  // Enter tokens [first, ...) of k and v into the rows that were reserved for them.
  Status store_rows(uint32_t layer, const SequenceLayer &rows, const LayerGrowth &growth, const kvq_tensor &k, const kvq_tensor &v,
                    uint64_t first, uint64_t *saturated);
  void count_saturated(uint64_t elements);
  void recount(Sequence &sequence) noexcept;  // after its length has changed
  void release_window(Sequence &sequence) noexcept;
  [[gnu::format(printf, 3, 4)]] void log(int32_t level, const char *format, ...) const noexcept;

  Memory memory;  // first: everything below lives in it
  Vector<LayerShape> shapes;
  Recipe recipe;
  std::shared_ptr<Backend> backend;
  std::optional<PageStore> store;
  std::optional<Policies> policies;
  std::optional<Workspaces> workspaces;
  Table<Sequence> sequences;
  Table<Step> steps;

 private:
  Cache(const Memory &counted, const CacheConfig &config);
  ~Cache();
  Status prepare(const CacheConfig &config);
  Status plan_step(Step &step);
  Status check_cut(const Sequence &sequence, uint64_t length) const;
  Status look_up(Step &step, const AttendInput &input, uint32_t window, uint32_t caller, std::span<const AttendSequence> *out);
  Status attend_as(Step &step, const AttendInput &input, uint32_t caller);

  uint64_t max_tokens_;
  uint32_t window_ = 0;  // largest window, if every layer has one
  uint32_t callers_ = 1;
  std::atomic<uint64_t> saturated_{0}, tokens_{0};
  void *log_user_;
  void (*log_)(void *user, int32_t level, const char *message);
};

}  // namespace kvq
