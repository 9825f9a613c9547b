// The kernels for x86 processors with AMX for bytes, and all that kernels_avx512.cpp asks for (cmake/kernels.cmake).
#if defined(__AMX_INT8__)
#define KVQ_KERNELS_NAME "amx"
#include "cpu/kernels_impl.h"

namespace kvq::cpu {
const Kernels *const kernels_amx = &kTable;
}  // namespace kvq::cpu
#else
#include "cpu/kernels.h"

namespace kvq::cpu {
const Kernels *const kernels_amx = nullptr;
}  // namespace kvq::cpu
#endif
