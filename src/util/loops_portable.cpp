// The loops for every processor of the family that the library is built for.
#define KVQ_LOOPS_NAME "portable"
#include "util/loops_impl.h"

namespace kvq {
const Loops loops_portable = kTable;
}  // namespace kvq
