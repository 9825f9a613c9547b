// Long sequences are cut into parts, so that threads share them however few heads there are.  How many depends on the sequence alone, and
// they are put together in their order: the result is the same, bit for bit, whatever thread has computed which.
#pragma once
#include <cstdint>

#include "cpu/attend.h"

namespace kvq::cpu {

inline constexpr uint32_t kPartTokens = 8192;  // at least, of a part, which costs 3.6 us besides its tokens: queries are made ready anew, the first page was not fetched ahead
inline constexpr uint32_t kPartItems = 32;     // pieces of work that a sequence is cut into at least, if it is long
// Most parts of all heads and blocks of a sequence that has more than one.
inline constexpr uint32_t kMostParts = 2 * kPartItems;

// Parts of a sequence of which a query sees `tokens` tokens in `pages` pages, with `items` blocks of rows in all heads.
uint32_t part_count(uint64_t tokens, size_t pages, uint32_t items);

// What rows have collected over some pages: the slice's own, or kept for later.
struct Collected {
  float *out;  // [kRows][dims.output()]
  float *reference, *denominator;  // [kRows]
  Doubts *doubt;
};

// Lay a part out at `base` (which may be null, to learn its size).
size_t arrange_part(const Dims &dims, char *base, Collected *part);
Collected collected(Slice &slice);

void copy_rows(const Dims &dims, uint32_t rows, const Collected &from, const Collected &to);
// Bring a row to a higher reference.
void raise_row(const Dims &dims, const Collected &part, uint32_t row, float reference);
// Add what comes behind it to a part.
void add_rows(const Dims &dims, uint32_t rows, const Collected &behind, const Collected &part);

}  // namespace kvq::cpu
