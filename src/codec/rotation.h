// Section 3: the random rotation, a Walsh-Hadamard transform between random signs.
#pragma once
#include <cstdint>

namespace kvq {

// Rotate `lanes` rows of `width` values at once, in place: y[channel * lanes + row].
void rotate_lanes(float *y, uint32_t width, uint32_t lanes, uint64_t seed, uint32_t tensor, uint32_t k);
void unrotate_lanes(float *y, uint32_t width, uint32_t lanes, uint64_t seed, uint32_t tensor, uint32_t k);

// c(w): the fp32 nearest to 1/sqrt(w).
float inverse_sqrt(uint32_t w);

}  // namespace kvq
