// The CPU backend: pages in host memory, attention by the best kernels that the processor has (kernels.h).
#pragma once
#include <cstdint>
#include <memory>

#include "backend/backend.h"
#include "util/memory.h"

namespace kvq {

// n_threads <= 1: no thread is ever made.  `path` names the kernels: one of cpu_paths(); nullptr: what the environment variable KVQ_CPU
// names, if the processor has it, or else the best.
std::shared_ptr<Backend> make_cpu_backend(Memory *memory, uint32_t n_threads, const char *path = nullptr);

// Name of the kernels that a backend made now without a path would use.
const char *cpu_path_name();
// Names of all kernels that run here, best first, and nullptr behind the last.
inline constexpr uint32_t kMostPaths = 6;
void cpu_paths(const char *(&names)[kMostPaths + 1]);

}  // namespace kvq
