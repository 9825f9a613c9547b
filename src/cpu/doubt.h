// What 16 bits may have done to a row of attention, and whether the tolerance of FORMATS section 9 holds all the same.
//
// A weight that is rounded to a multiple of `step` is off by step / sqrt(12) on average, independently of the others.  So
//   - the logit of token t, a product of codes c_i with query weights, is off by d_t, d_t^2 = step^2 / 12 * sum c_i^2,
//   - the sum of p_t v_t is off by e, e^2 = sum_t (step^2 / 12 * |c_t|^2 + d_t^2 p_t^2 |v_t|^2): what rounding does to probabilities,
//     and what the errors of logits do,
// and both are known up to the spread of codes, for which the mean square of their levels stands.  Usually e is 1e-4 of the result
// or less; it is more where values cancel each other, or large terms of the logits do.  Then the row is computed again, with 31 bits.
//
// Errors of probabilities are not independent of each other where the same code comes in all tokens of a channel, or the same
// probability again and again.  In such a tile the sum of all errors, which is known, multiplies the code.  The first tiles of a row, and
// those whose largest weight passes all others by far, may show that: what rounding left of their weights is then added.
//
// Where weights multiply codes less a bias, the products of scales that come to zeros for it are rounded to 24 bits.
#pragma once
#include <cstdint>

#include "cpu/kernels.h"

namespace kvq::cpu {

// Of all rows of a block.
struct Doubts {
  double sum[kRows];      // e^2 so far, in the units of the collected output
  double count[kRows], first[kRows], second[kRows];  // visible tokens, sums of their logits (before the soft cap) and of the squares
  float power[kRows];     // square of the output's norm when it was last needed
  float tile[kRows];      // largest square that errors of a tile may have if they are alike
  float worst[kRows];     // largest d^2; logits in natural units
  float largest[kRows];   // of the tiles' largest logits, by magnitude
};

// Squares: of what may stay of a tile, as its share in the output, and of a few roundings of zeros to 24 bits.
inline constexpr float kTileShare = 7e-9f, kZeroShare = 0x1p-44f;

// Codes at the ends of their levels: how many times the usual square they may have.
inline constexpr float kCodes = 3.0f;

// Whether a row of `dim` channels whose output has the sum of squares `power` is within the tolerance.
bool is_certain(const Doubts &doubt, uint32_t row, uint32_t dim, double power);

}  // namespace kvq::cpu
