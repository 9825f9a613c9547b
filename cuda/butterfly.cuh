// The part of section 3's rotation that a lane does alone: sums and differences at distances 1, 2, ... of the elements that it holds.
#pragma once
#include <cstdint>

namespace kvq::cuda {

template <uint32_t kCount>
__device__ __forceinline__ void butterfly(float (&x)[kCount]) {
#pragma unroll
  for (uint32_t d = 1; d < kCount; d *= 2)
#pragma unroll
    for (uint32_t i = 0; i < kCount; i++)
      if (!(i & d)) {
        const float a = x[i], b = x[i + d];
        x[i] = a + b, x[i + d] = a - b;
      }
}

}  // namespace kvq::cuda
