// The fused kernels: pages in fragments, integer tensor cores.  The table of those that are built, and the way to one of them.
#pragma once
#include <span>

#include "cuda/plan.h"

namespace kvq::cuda {

// A kernel that is built: for a head dimension, pages of one class or of two, and items of so many blocks of kRows rows.
struct FusedKernel {
  uint32_t dim, row_blocks;
  PagePath first, second;
  cudaError_t (*launch)(const AttendArguments &, const LayerLaunch &, uint32_t processors, cudaStream_t);
};
// By translation unit.
std::span<const FusedKernel> fused_books(), fused_columns(), fused_rows(), fused_groups();

// Is there a kernel that reads such pages, alone or with others?
bool has_fused(uint32_t dim, PagePath path);
// The kernel for these classes (none: raw pages only), or nullptr.
const FusedKernel *find_fused(uint32_t dim, PagePath first, PagePath second, uint32_t row_blocks);
// Launch the kernel that a layer's pages ask for.
cudaError_t launch_attention(const AttendArguments &arguments, const LayerLaunch &launch, uint32_t processors, cudaStream_t stream);

}  // namespace kvq::cuda
