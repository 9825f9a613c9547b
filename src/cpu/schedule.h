// An attention call as work for threads: blocks of rows of every KV head, long sequences in parts (parts.h).
#pragma once
#include "cpu/parts.h"
#include "cpu/pool.h"

namespace kvq::cpu {

// A slice per thread or caller, and room for the parts of one sequence, in one block.
class CpuWorkspace final : public Workspace {
 public:
  CpuWorkspace(std::pmr::memory_resource *memory, const Dims &dims, uint32_t threads, uint32_t callers);
  ~CpuWorkspace() override { memory_->deallocate(block_, bytes, kAlign); }
  Slice &slice(uint32_t thread) { return slices_[thread]; }
  // A lone thread or caller adds every part at once and needs one.
  uint32_t parts() const { return uint32_t(parts_.size()); }
  const Collected &part(uint32_t i) const { return parts_[i]; }
  const Dims dims;

 private:
  static constexpr size_t kAlign = 64;
  std::pmr::memory_resource *memory_;
  Vector<Slice> slices_;
  Vector<Collected> parts_;
  char *block_ = nullptr;
};

void attend_all(const Kernels &kernels, const Tables &tables, const AttendCall &call, CpuWorkspace &workspace, Pool &pool);

}  // namespace kvq::cpu
