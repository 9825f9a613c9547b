// Section 3: the random rotation, a Walsh-Hadamard transform between random signs.
#pragma once
#include <cstdint>

#include "util/loops.h"

namespace kvq {

// Rotate kRowLanes rows of `width` values at once, in place.
void rotate_lanes(const Loops &loops, RowLanes *y, uint32_t width, uint64_t seed, uint32_t tensor, uint32_t k);
void unrotate_lanes(const Loops &loops, RowLanes *y, uint32_t width, uint64_t seed, uint32_t tensor, uint32_t k);

// c(w): the fp32 nearest to 1/sqrt(w).
float inverse_sqrt(uint32_t w);

}  // namespace kvq
