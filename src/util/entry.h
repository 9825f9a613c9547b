// Rule 1.4: how elements of K, V and Q enter: x = hp(float(x)) + 0, saturating at +-65504; NaN and infinities are refused.
#pragma once
#include <cstdint>

#include "util/loops.h"
#include "util/status.h"

namespace kvq {

uint32_t dtype_bytes(uint32_t dtype);  // 0 for an unknown dtype

// Enter `n` contiguous elements.  Returns the index of the first non-finite one, or n.  *saturated is increased.
uint32_t enter_row(const void *x, uint32_t dtype, uint32_t n, uint16_t *out, uint64_t *saturated, const Loops &loops = loops_portable);

}  // namespace kvq
