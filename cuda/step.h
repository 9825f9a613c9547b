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
  Buffer plans, tables, partials, tickets;  // tables: what has no room behind the plans
  Buffer images;                            // of prompts, with their partial results; until the step ends
  Vector<LayerLaunch> launches;  // by layer
  Vector<char> host;             // tables before they are uploaded
  Findings *findings = nullptr;  // on the device, by sequence
  size_t sequences = 0;
  uint32_t tickets_ready = 0;    // tickets that have been zeroed
  uint32_t queries = 0;          // tokens of the step
  uint64_t saturated = 0;        // elements of host tensors beyond +-65504
  bool planned = false, in_use = false;
  const Plan *plan(uint32_t layer) const { return plans.as<const Plan>() + layer; }
};

// Build and upload the tables of all layers.
Status plan_step(const StepSource &source, std::span<const LayerShape> shapes, const Processors &processors, Arena &arena,
                 cudaStream_t stream, StepState *state);

}  // namespace kvq::cuda
