#include "codec/rotation.h"

#include <bit>
#include <cmath>

#include "codec/descriptor.h"
#include "codec/row_rules.h"
#include "util/fp.h"

namespace kvq {
namespace {

// One pass: the signs of all channels, and the transform of a power of two of them.
struct Pass {
  uint32_t width;
  uint32_t first, count;          // channels of the transform
  float factor;
  uint64_t negative[kMaxDim / 64];  // bit i mod 64 of word i / 64: the sign of channel i
};

Pass make_pass(uint32_t q, uint32_t width, uint64_t seed, uint32_t tensor, uint32_t k) {
  const uint32_t count = std::bit_floor(width);
  Pass pass{width, q ? width - count : 0, count, inverse_sqrt(count), {}};
  for (uint32_t i = 0; i < width; i += 64) pass.negative[i / 64] = splitmix64(sign_seed(seed, tensor, q, k) ^ i / 64);
  return pass;
}

uint32_t passes(uint32_t width) { return std::has_single_bit(width) ? 1 : 2; }

// kRowLanes rows, or a single one.
struct Lanes {
  const Loops &loops;
  RowLanes *y;
  void flip(const Pass &pass) const { loops.flip_lanes(y, pass.width, pass.negative); }
  void transform(const Pass &pass) const { loops.butterfly_lanes(y + pass.first, pass.count, pass.factor); }
};

struct Row {
  float *y;
  void flip(const Pass &pass) const {
    for (uint32_t i = 0; i < pass.width; i++)
      if (pass.negative[i / 64] >> i % 64 & 1u) y[i] = -y[i];
  }
  void transform(const Pass &pass) const {
    float *x = y + pass.first;
    for (uint32_t distance = 1; distance < pass.count; distance *= 2)
      for (uint32_t base = 0; base < pass.count; base += 2 * distance)
        for (uint32_t i = base; i < base + distance; i++) {
          const float a = x[i], b = x[i + distance];
          x[i] = a + b, x[i + distance] = a - b;
        }
    for (uint32_t i = 0; pass.count > 1 && i < pass.count; i++) x[i] *= pass.factor;
  }
};

template <class Rows>
void rotate_all(const Rows &rows, uint32_t width, uint64_t seed, uint32_t tensor, uint32_t k) {
  for (uint32_t q = 0; q < passes(width); q++) {
    const Pass pass = make_pass(q, width, seed, tensor, k);
    rows.flip(pass);
    rows.transform(pass);
  }
}

template <class Rows>
void unrotate_all(const Rows &rows, uint32_t width, uint64_t seed, uint32_t tensor, uint32_t k) {
  for (uint32_t q = passes(width); q-- > 0;) {
    const Pass pass = make_pass(q, width, seed, tensor, k);
    rows.transform(pass);
    rows.flip(pass);
  }
}

}  // namespace

float inverse_sqrt(uint32_t w) { return float(1.0 / std::sqrt(double(w))); }

void rotate_lanes(const Loops &loops, RowLanes *y, uint32_t width, uint64_t seed, uint32_t tensor, uint32_t k) {
  rotate_all(Lanes{loops, y}, width, seed, tensor, k);
}
void unrotate_lanes(const Loops &loops, RowLanes *y, uint32_t width, uint64_t seed, uint32_t tensor, uint32_t k) {
  unrotate_all(Lanes{loops, y}, width, seed, tensor, k);
}

void rotate(float *y, uint32_t width, uint64_t seed, uint32_t tensor, uint32_t k) { rotate_all(Row{y}, width, seed, tensor, k); }
void unrotate(float *y, uint32_t width, uint64_t seed, uint32_t tensor, uint32_t k) { unrotate_all(Row{y}, width, seed, tensor, k); }

}  // namespace kvq
