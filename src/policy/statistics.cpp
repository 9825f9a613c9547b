// Exact statistics (FORMATS section 6).  Values are summed in units of 2^-24: in 64 bits over a few tokens (util/loops.h), then in 128.
#include "policy/statistics.h"

#include <algorithm>

#include "policy/policy.h"
#include "recipe/recipe.h"

namespace kvq {

namespace {

constexpr size_t kMaxPairs = 512, kMaxDim = 1024;

struct PairIndex {
  uint32_t pairs;
  uint32_t u[kMaxPairs], v[kMaxPairs];
  explicit PairIndex(const HeadShape &shape) : pairs(shape.dim / 2) {
    for (uint32_t p = 0; p < pairs; p++) {
      const Pair pair = pair_channels(shape, p);
      u[p] = pair.u, v[p] = pair.v;
    }
  }
};

void add_channels(const Loops &loops, const uint16_t *rows, size_t stride, uint32_t count, std::pmr::vector<ChannelSums> *channels) {
  ChannelUnits units[kMaxDim];
  loops.sum_channels(rows, stride, count, uint32_t(channels->size()), units);
  for (size_t c = 0; c < channels->size(); c++) {
    ChannelSums &channel = (*channels)[c];
    channel.sum += units[c].sum, channel.abs += UInt128(units[c].abs);
    channel.min = std::min(channel.min, units[c].min), channel.max = std::max(channel.max, units[c].max);
  }
}

void add_values(const Loops &loops, const uint16_t *rows, size_t stride, uint32_t count, std::pmr::vector<ChannelSums> *channels) {
  int64_t units[kMaxDim];
  loops.sum_values(rows, stride, count, uint32_t(channels->size()), units);
  for (size_t c = 0; c < channels->size(); c++) (*channels)[c].sum += units[c];
}

void add_pairs(const PairIndex &index, decltype(Loops::sum_norms) loop, const uint16_t *rows, size_t stride, uint32_t count, UInt128 PairSums::*sum,
               HeadStatistics *statistics) {
  uint64_t units[kMaxPairs];
  loop(rows, stride, count, index.u, index.v, index.pairs, units);
  for (uint32_t p = 0; p < index.pairs; p++) statistics->pairs[p].*sum += units[p];
}

// f(first row, rows) for pieces whose sums fit 64 bits.
template <class F>
void for_pieces(const uint16_t *rows, size_t stride, size_t count, F &&f) {
  for (size_t t = 0; t < count; t += kSumTokens) f(rows + t * stride, uint32_t(std::min<size_t>(kSumTokens, count - t)));
}

}  // namespace

void add_key_statistics(const HeadShape &shape, const uint16_t *k, size_t stride, size_t count, HeadStatistics *statistics,
                        const Loops &loops, uint32_t wanted) {
  const PairIndex index(shape);
  for_pieces(k, stride, count, [&](const uint16_t *rows, uint32_t n) {
    if (wanted & kPairNorms) add_pairs(index, loops.sum_norms, rows, stride, n, &PairSums::k1, statistics);
    if (wanted & kPairSquares) add_pairs(index, loops.sum_squares, rows, stride, n, &PairSums::k2, statistics);
    if (wanted & kKeyChannels)
      add_channels(loops, rows, stride, n, &statistics->k);
    else if (wanted & kKeySums)
      add_values(loops, rows, stride, n, &statistics->k);
  });
  statistics->nk += count;
}

void add_value_statistics(const uint16_t *v, size_t stride, size_t count, HeadStatistics *statistics, const Loops &loops) {
  for_pieces(v, stride, count, [&](const uint16_t *rows, uint32_t n) { add_channels(loops, rows, stride, n, &statistics->v); });
}

void add_query_statistics(const HeadShape &shape, const uint16_t *q, size_t stride, size_t count, HeadStatistics *statistics,
                          const Loops &loops, uint32_t wanted) {
  const PairIndex index(shape);
  for_pieces(q, stride, count, [&](const uint16_t *rows, uint32_t n) {
    if (wanted & kPairNorms) add_pairs(index, loops.sum_norms, rows, stride, n, &PairSums::q1, statistics);
    if (wanted & kPairSquares) add_pairs(index, loops.sum_squares, rows, stride, n, &PairSums::q2, statistics);
  });
  statistics->nq += count;
}

void reset_statistics(const LayerShape &shape, LayerStatistics *statistics) {
  std::pmr::memory_resource *memory = statistics->heads.get_allocator().resource();
  statistics->heads.clear();
  statistics->heads.reserve(shape.kv_heads);
  for (uint32_t h = 0; h < shape.kv_heads; h++) {
    HeadStatistics &head = statistics->heads.emplace_back(memory);
    head.pairs.resize(shape.dim_k / 2);
    head.k.resize(shape.dim_k);
    head.v.resize(shape.dim_v);
  }
}

}  // namespace kvq
