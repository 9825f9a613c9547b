#include "cuda/attend_fast.h"

#include <algorithm>

#include "cuda/prompt.h"

namespace kvq::cuda {

namespace {

template <class Match>
const FusedKernel *find(Match &&match) {
  for (const auto &part : {fused_books(), fused_columns(), fused_rows(), fused_groups(), fused_fields(), fused_polar()})
    for (const FusedKernel &kernel : part)
      if (match(kernel)) return &kernel;
  return nullptr;
}

}  // namespace

bool has_fused(uint32_t dim, PagePath path) {
  if (path == PagePath{}) return false;
  return find([&](const FusedKernel &kernel) { return kernel.dim == dim && (kernel.first == path || kernel.second == path); }) != nullptr;
}

const FusedKernel *find_fused(uint32_t dim, PagePath first, PagePath second, uint32_t row_blocks) {
  const PagePath none{};
  return find([&](const FusedKernel &kernel) {
    const auto has = [&](PagePath path) { return path == none || path == kernel.first || path == kernel.second; };
    return kernel.dim == dim && kernel.row_blocks == row_blocks && has(first) && has(second);
  });
}

BlockShape block_shape(const Processors &processors, const BlockLimits &limits, uint32_t stage_bytes, uint32_t warps) {
  constexpr uint32_t kReserved = 1024;  // of every block
  const uint32_t warp_bytes = kStages * stage_bytes + limits.per_warp;
  warps = std::min(warps, limits.max_warps);
  while (warps > 1 && warps * warp_bytes > processors.block_bytes - limits.fixed) warps -= warps > 4 ? 4 : 1;  // alike on the four schedulers
  const uint32_t bytes = warps * std::max(warp_bytes, limits.merge_per_warp);
  const uint32_t at_once = std::min(limits.max_warps / warps, processors.bytes / (bytes + limits.fixed + kReserved));
  return {warps, bytes, std::max(1u, at_once)};
}

cudaError_t allow_shared(const void *function, uint32_t block_bytes) {
  cudaFuncAttributes own;
  if (const cudaError_t error = cudaFuncGetAttributes(&own, function); error != cudaSuccess) return error;
  return cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, int(block_bytes - own.sharedSizeBytes));
}

cudaError_t launch_attention(const AttendArguments &arguments, const LayerLaunch &launch, const Processors &processors, cudaStream_t stream) {
  if (launch.prompts.groups) return attend_prompts(arguments, launch.prompts, processors, stream);
  if (launch.kernel) return launch.kernel->launch(arguments, launch, processors, stream);
  return attend_general(arguments, processors.count, stream);
}

}  // namespace kvq::cuda
