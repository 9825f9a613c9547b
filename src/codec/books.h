// Codebooks by their number of levels (section 2.3).
#pragma once
#include <cstdint>
#include <span>

namespace kvq {

struct Book {
  float scale = 0.0f;                // a: centroid i is a * level[i]
  std::span<const int16_t> level;    // m, ascending and antisymmetric
  std::span<const float> threshold;  // t: between centroids i and i + 1, for a row of unit variance
};

// The book of `levels` levels: 2..8, 16, 32, 64, 128 or 256; empty for other counts.
const Book &find_book(uint32_t levels);

}  // namespace kvq
