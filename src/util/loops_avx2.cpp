// The loops for x86 processors with AVX2 and F16C (cmake/kernels.cmake).
#if defined(__AVX2__) && defined(__F16C__)
#define KVQ_LOOPS_NAME "avx2"
#include "util/loops_impl.h"

namespace kvq {
const Loops *const loops_avx2 = &kTable;
}  // namespace kvq
#else
#include "util/loops.h"

namespace kvq {
const Loops *const loops_avx2 = nullptr;
}  // namespace kvq
#endif
