#include "cuda/attend_fast.h"

namespace kvq::cuda {

namespace {

template <class Match>
const FusedKernel *find(Match &&match) {
  for (const auto &part : {fused_books(), fused_columns(), fused_rows(), fused_groups()})
    for (const FusedKernel &kernel : part)
      if (match(kernel)) return &kernel;
  return nullptr;
}

}  // namespace

bool has_fused(uint32_t dim, PagePath path) {
  return find([&](const FusedKernel &kernel) { return kernel.dim == dim && (kernel.first == path || kernel.second == path); }) != nullptr;
}

const FusedKernel *find_fused(uint32_t dim, PagePath first, PagePath second, uint32_t row_blocks) {
  const PagePath none{};
  return find([&](const FusedKernel &kernel) {
    const auto has = [&](PagePath path) { return path == none || path == kernel.first || path == kernel.second; };
    return kernel.dim == dim && kernel.row_blocks == row_blocks && has(first) && has(second);
  });
}

cudaError_t launch_attention(const AttendArguments &arguments, const LayerLaunch &launch, uint32_t processors, cudaStream_t stream) {
  if (launch.kernel) return launch.kernel->launch(arguments, launch, processors, stream);
  return attend_general(arguments, processors, stream);
}

}  // namespace kvq::cuda
