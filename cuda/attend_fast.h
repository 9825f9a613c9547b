// The fused kernels: pages in fragments, integer tensor cores.  The table of those that are built, and the way to one of them.
#pragma once
#include <span>

#include "cuda/plan.h"

namespace kvq::cuda {

// What a block needs of shared memory, in bytes, and how many warps it may have.
struct BlockLimits {
  uint32_t max_warps;  // of a block, and of all blocks that run on a processor together
  uint32_t fixed, per_warp, merge_per_warp;  // besides the ring; of a warp besides its stages; the least of a warp, for merging
};

// A kernel that is built: for a head dimension, pages of one class or of two, and items of so many blocks of kRows rows.
struct FusedKernel {
  uint32_t dim, row_blocks;
  PagePath first, second;
  BlockLimits limits;
  cudaError_t (*launch)(const AttendArguments &, const LayerLaunch &, const Processors &, cudaStream_t);
  const void *(*function)();
};

constexpr uint32_t kStages = 2;  // tiles of a warp that are in flight or worked on

// A block of at most `warps` warps, for tiles of `stage_bytes`.
BlockShape block_shape(const Processors &processors, const BlockLimits &limits, uint32_t stage_bytes, uint32_t warps);

// Let a kernel take what a block may have of shared memory besides its own, once before its first launch.
cudaError_t allow_shared(const void *function, uint32_t block_bytes);

// By translation unit.
std::span<const FusedKernel> fused_books(), fused_columns(), fused_rows(), fused_groups(), fused_fields(), fused_polar();

// Is there a kernel that reads such pages, alone or with others?
bool has_fused(uint32_t dim, PagePath path);
// The kernel for these classes (none: raw pages only), or nullptr.
const FusedKernel *find_fused(uint32_t dim, PagePath first, PagePath second, uint32_t row_blocks);
// Launch the kernels that a layer's sequences ask for.
cudaError_t launch_attention(const AttendArguments &arguments, const LayerLaunch &launch, const Processors &processors, cudaStream_t stream);

}  // namespace kvq::cuda
