// A step: everything that its per-layer calls need, reserved when it begins.
#pragma once
#include <atomic>
#include <bit>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>

#include "engine/sequence.h"
#include "engine/table.h"

namespace kvq {

// One sequence of a step.
struct StepEntry {
  explicit StepEntry(std::pmr::memory_resource *memory) : growth(memory) {}
  uint64_t id = 0;
  Sequence *sequence = nullptr;  // QUERY_ONLY: only during a call that has looked it up
  uint32_t first = 0, tokens = 0;  // rows of the step's tensors
  Vector<LayerGrowth> growth;      // by layer; empty for QUERY_ONLY
  Table<Sequence>::Use use;        // QUERY_ONLY: during a call
  SequenceView view;               // while a step is planned
  uint64_t version = 0;            // of the sequence when it was planned
};

inline constexpr uint32_t kMostCallers = 64;

// What attention calls of one step that run at once have each for themselves: room for all entries, and a number.
struct AttendRoom {
  AttendRoom(std::pmr::memory_resource *memory, uint32_t callers, size_t entries)
      : views(callers * entries, memory), sequences(callers * entries, memory), callers(callers), entries(entries) {}
  // A number until it is given back; kMostCallers: all are in use.
  uint32_t take() noexcept {
    for (uint64_t now = taken.load(std::memory_order_relaxed);;) {
      const uint32_t number = uint32_t(std::countr_one(now));
      if (number >= callers) return kMostCallers;
      if (taken.compare_exchange_weak(now, now | uint64_t(1) << number, std::memory_order_acquire)) return number;
    }
  }
  void give_back(uint32_t number) noexcept { taken.fetch_and(~(uint64_t(1) << number), std::memory_order_release); }

  Vector<SequenceView> views;        // [callers][entries]
  Vector<AttendSequence> sequences;  // likewise
  const uint32_t callers;
  const size_t entries;
  std::atomic<uint64_t> taken{0};
};

// Workspaces of steps.  One stays for the next step, so that a single step at a time allocates none; a backend that plans steps
// gets new ones.
class Workspaces {
 public:
  Workspaces(Backend &backend, std::span<const LayerShape> shapes) : backend_(backend), shapes_(shapes) {
    std::shared_ptr<Workspace> first = backend.make_workspace(shapes);
    bytes_ = first->bytes;
    give_back(std::move(first));
  }
  std::shared_ptr<Workspace> take() {
    {
      const std::lock_guard lock(mutex_);
      if (spare_) return std::move(spare_);
    }
    return backend_.make_workspace(shapes_);
  }
  void give_back(std::shared_ptr<Workspace> workspace) noexcept {
    if (backend_.plans_steps()) return;
    const std::lock_guard lock(mutex_);
    if (!spare_) spare_ = std::move(workspace);
  }
  size_t bytes() const { return bytes_; }  // of one

 private:
  Backend &backend_;
  std::span<const LayerShape> shapes_;
  size_t bytes_ = 0;
  std::mutex mutex_;
  std::shared_ptr<Workspace> spare_;
};

struct Step {
  Step(std::pmr::memory_resource *memory, size_t n_layers, Workspaces &from, uint32_t callers, size_t n_entries)
      : entries(memory), appended(n_layers, 0, memory), queries(n_layers, memory), with_queries(n_layers, 0, memory), room(memory, callers, n_entries), workspaces(from), workspace(from.take()) {}
  ~Step() { workspaces.give_back(std::move(workspace)); }
  bool query_only = false, device_scores = false, invariant = false;  // KVQ_STEP_*
  uint32_t tokens = 0;  // of all sequences
  Vector<StepEntry> entries;
  Vector<uint8_t> appended;           // by layer
  // Entered queries of the layers whose statistics need them, fp16 [tokens][q_heads][dim_k]: only kept tokens count.
  Vector<Vector<uint16_t>> queries;
  Vector<uint8_t> with_queries;       // layers whose append came with q
  AttendRoom room;
  Workspaces &workspaces;
  std::shared_ptr<Workspace> workspace;

  // Has the layer its new rows, by a call or by the replay of a graph that has captured one?
  bool has_append(const Backend &backend, uint32_t layer) const { return appended[layer] || backend.replays(layer); }
};

// Arguments of attend; tensors with strides resolved.
struct AttendInput {
  uint32_t layer;
  const kvq_tensor *q, *out;
  float *lse;
  uint32_t window;  // as in kvq_attend_options
  float scale, softcap;
  const float *sinks;
  uint32_t head_first = 0, head_count = 0;  // KV heads; 0: all
};

}  // namespace kvq
