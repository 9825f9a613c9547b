// The kernels for x86 processors with AVX-512 with BW, VL, DQ, VBMI and VNNI (cmake/kernels.cmake).
#if defined(__AVX512VBMI__)
#define KVQ_KERNELS_NAME "avx512"
#include "cpu/kernels_impl.h"

namespace kvq::cpu {
const Kernels *const kernels_avx512 = &kTable;
}  // namespace kvq::cpu
#else
#include "cpu/kernels.h"

namespace kvq::cpu {
const Kernels *const kernels_avx512 = nullptr;
}  // namespace kvq::cpu
#endif
