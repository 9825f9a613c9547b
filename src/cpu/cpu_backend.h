// The CPU backend: pages in host memory, attention by the best kernels that the processor has (kernels.h).
#pragma once
#include <cstdint>
#include <memory>

#include "backend/backend.h"
#include "util/memory.h"

namespace kvq {

// n_threads <= 1: no thread is ever made.  The environment variable KVQ_CPU (portable, avx2, avxvnni, avx512) chooses the kernels, if
// the processor has them.
std::shared_ptr<Backend> make_cpu_backend(Memory *memory, uint32_t n_threads);

// Name of the kernels that a backend made now would use.
const char *cpu_path_name();

}  // namespace kvq
