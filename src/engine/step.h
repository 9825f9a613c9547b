// A step: everything that its per-layer calls need, reserved when it begins.
#pragma once
#include <cstdint>
#include <memory>

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
  SequenceView view;               // during attend
};

struct Step {
  Step(std::pmr::memory_resource *memory, size_t n_layers)
      : entries(memory), appended(n_layers, 0, memory), queries(memory), with_queries(n_layers, 0, memory), attention(memory) {
    queries.resize(n_layers);
  }
  bool query_only = false;
  uint32_t tokens = 0;  // of all sequences
  Vector<StepEntry> entries;
  Vector<uint8_t> appended;           // by layer
  // Entered queries of the layers whose statistics need them, fp16 [tokens][q_heads][dim_k]: only kept tokens count.
  Vector<Vector<uint16_t>> queries;
  Vector<uint8_t> with_queries;       // layers whose append came with q
  Vector<AttendSequence> attention;   // room for all entries
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
};

}  // namespace kvq
