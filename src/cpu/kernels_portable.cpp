// The kernels for every processor of the family that the library is built for.
#define KVQ_KERNELS_NAME "portable"
#include "cpu/kernels_impl.h"

namespace kvq::cpu {
extern const Kernels kernels_portable;
const Kernels kernels_portable = kTable;
}  // namespace kvq::cpu
