// The loops for x86 processors with AVX-512 with BW, DQ and VL (cmake/kernels.cmake).
#if defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define KVQ_LOOPS_NAME "avx512"
#include "util/loops_impl.h"

namespace kvq {
const Loops *const loops_avx512 = &kTable;
}  // namespace kvq
#else
#include "util/loops.h"

namespace kvq {
const Loops *const loops_avx512 = nullptr;
}  // namespace kvq
#endif
