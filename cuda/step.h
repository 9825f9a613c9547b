// The device side of a step: tables for every layer, uploaded when it begins, and scratch of attention.
#pragma once
#include <atomic>
#include <mutex>

#include "backend/backend.h"
#include "cuda/order.h"
#include "cuda/page_format.h"
#include "cuda/plan.h"

namespace kvq::cuda {

// Device memory of a step.  Kept when the step ends (but for images) and given to the next one, so that a captured graph finds its
// tables.
struct StepState {
  StepState(std::pmr::memory_resource *memory, Arena &arena);
  // Take what a step of layers needs, all but the tables of large batches.
  void reserve(std::span<const LayerShape> shapes, const Processors &processors);
  size_t bytes() const { return plans.bytes() + partials.bytes() + tickets.bytes() + sinks.bytes(); }

  Buffer plans, tables, partials, tickets;  // tables: what has no room behind the plans
  Buffer sinks;                             // learned ones, of the call that runs
  Buffer images;                            // of prompts, with their partial results; until the step ends
  Vector<const FusedKernel *> ready;        // kernels that have been launched before, or will be
  Vector<LayerLaunch> launches;  // each with a plan
  Vector<uint32_t> first_launch;  // by layer, and the end
  Vector<char> host;             // tables before they are uploaded
  Findings *findings = nullptr;  // on the device, by sequence
  size_t sequences = 0;
  bool tickets_ready = false;    // zeroed
  uint32_t queries = 0;          // tokens of the step
  uint64_t saturated = 0;        // elements of host tensors beyond +-65504
  bool planned = false, in_use = false, invariant = false;
  const Plan *plan(uint32_t launch) const { return plans.as<const Plan>() + launch; }
};

// Build and upload the tables of all layers.
Status plan_step(const StepSource &source, std::span<const LayerShape> shapes, const Processors &processors, Arena &arena,
                 cudaStream_t stream, StepState *state);

}  // namespace kvq::cuda
