// The kernels for x86 processors with AVX2, FMA and F16C (cmake/kernels.cmake).
#if defined(__AVX2__)
#define KVQ_KERNELS_NAME "avx2"
#include "cpu/kernels_impl.h"

namespace kvq::cpu {
const Kernels *const kernels_avx2 = &kTable;
}  // namespace kvq::cpu
#else
#include "cpu/kernels.h"

namespace kvq::cpu {
const Kernels *const kernels_avx2 = nullptr;
}  // namespace kvq::cpu
#endif
