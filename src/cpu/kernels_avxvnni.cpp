// The kernels for x86 processors with AVX2, FMA, F16C and AVX-VNNI (cmake/kernels.cmake).
#if defined(__AVXVNNI__)
#define KVQ_KERNELS_NAME "avxvnni"
#include "cpu/kernels_impl.h"

namespace kvq::cpu {
const Kernels *const kernels_avxvnni = &kTable;
}  // namespace kvq::cpu
#else
#include "cpu/kernels.h"

namespace kvq::cpu {
const Kernels *const kernels_avxvnni = nullptr;
}  // namespace kvq::cpu
#endif
