// The fused kernels: pages in fragments, head dimension 128, integer tensor cores.
#pragma once
#include "cuda/plan.h"
#include "cuda/step.h"

namespace kvq::cuda {

// Is there a fused kernel for these pages?
bool has_fused(KeyPath keys, ValuePath values);
// Launch the kernel that a layer's pages ask for.
cudaError_t launch_attention(const AttendArguments &arguments, const LayerLaunch &launch, uint32_t processors, cudaStream_t stream);

}  // namespace kvq::cuda
