#include "cuda/attend_fast.h"

namespace kvq::cuda {

cudaError_t launch_attention(const AttendArguments &arguments, const LayerLaunch &, uint32_t processors, cudaStream_t stream) {
  return attend_general(arguments, processors, stream);
}

}  // namespace kvq::cuda
