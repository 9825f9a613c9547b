// The scratch of one thread in one block of memory.
#include <algorithm>

#include "cpu/attend.h"

namespace kvq::cpu {
namespace {

// Hands out pieces of a block, 64-byte aligned, with room for vectors that pass their end.
struct Arena {
  char *base;
  size_t used;
  template <class T>
  void take(size_t n, T **piece) {
    *piece = reinterpret_cast<T *>(base + used);
    used += (n * sizeof(T) + 64 + 63) / 64 * 64;
  }
};

}  // namespace

size_t arrange_slice(const Dims &dims, char *base, Slice *slice) {
  Arena arena{base, 0};
  const size_t lanes = std::max(dims.most(), kTileTokens) + 16;
  arena.take(size_t(kRows) * dims.query(), &slice->query);
  arena.take(size_t(kRows) * kLogitStride, &slice->logit);
  arena.take(size_t(kRows) * kLogitStride, &slice->doubtful);
  arena.take(size_t(kRows) * dims.output(), &slice->out);
  arena.take(lanes, &slice->scale);
  arena.take(lanes, &slice->zero);
  arena.take(lanes, &slice->middle);
  arena.take(dims.weights(), &slice->line);
  arena.take(size_t(2) * dims.most(), &slice->signs);
  arena.take(dims.most(), &slice->map);
  arena.take(size_t(kRows) * (256 + 16), &slice->part);
  arena.take(size_t(kRows) * dims.weights(), &slice->w);
  arena.take(size_t(4) * dims.weights(), &slice->fine);
  arena.take(kRegions, &slice->weights);
  arena.take(code_bytes(dims.most()), &slice->codes);
  arena.take(size_t(kTileTokens) * dims.most(), &slice->values);
  for (Domain &domain : slice->domain) {
    arena.take(size_t(kRows) * dims.query(), &domain.query);
    arena.take(size_t(kRows) * dims.weights(), &domain.lined);
    arena.take(size_t(kRows) * dims.weights(), &domain.w);
    arena.take(size_t(4) * dims.weights(), &domain.fine);
    arena.take(dims.segments(), &domain.segment);
    arena.take(size_t(kRows) * dims.output(), &domain.out);
    arena.take(dims.segments(), &domain.keys);
    arena.take(dims.segments(), &domain.values);
  }
  slice->domains = slice->oldest = 0;
  return arena.used;
}

}  // namespace kvq::cpu
