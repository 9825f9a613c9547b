// Exact statistics (FORMATS section 6).  Values are summed in units of 2^-24: in 64 bits over a few tokens, then in 128.
#include "policy/statistics.h"

#include <algorithm>
#include <cmath>

#include "policy/policy.h"
#include "recipe/recipe.h"
#include "util/fp.h"

namespace kvq {

namespace {

// Tokens whose sums fit 64 bits: u*u + v*v < 2^33, so a token adds less than 2^57.
constexpr size_t kTokens = 64;
constexpr size_t kMaxPairs = 512, kMaxDim = 1024;

// floor(v * 2^24) of 0 <= v < 2^38: the product only moves the exponent, so it is exact.
uint64_t units(float v) { return uint64_t(int64_t(v * 0x1p24f)); }

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

// Sums of norms and squared norms per pair over at most kTokens rows.
struct ShortPairSums {
  uint64_t norm[kMaxPairs], square[kMaxPairs];
};

void sum_pairs(const PairIndex &index, const uint16_t *rows, size_t stride, size_t count, ShortPairSums *sums) {
  std::fill_n(sums->norm, index.pairs, uint64_t(0));
  std::fill_n(sums->square, index.pairs, uint64_t(0));
  float x[kMaxDim];
  for (size_t t = 0; t < count; t++) {
    for (uint32_t c = 0; c < 2 * index.pairs; c++) x[c] = half_to_float(rows[t * stride + c]);
    for (uint32_t p = 0; p < index.pairs; p++) {
      const float u = x[index.u[p]], v = x[index.v[p]];
      const float uu = u * u, vv = v * v, square = uu + vv;
      sums->square[p] += units(square);
      sums->norm[p] += units(std::sqrt(square));
    }
  }
}

void add_channels(const uint16_t *rows, size_t stride, size_t count, std::pmr::vector<ChannelSums> *channels) {
  const size_t dim = channels->size();
  int64_t sum[kMaxDim] = {}, abs[kMaxDim] = {};
  for (size_t t = 0; t < count; t++) {
    for (size_t c = 0; c < dim; c++) {
      const float x = half_to_float(rows[t * stride + c]);
      const int64_t n = int64_t(x * 0x1p24f);  // exact: an integer below 2^40
      sum[c] += n;
      abs[c] += n < 0 ? -n : n;
      ChannelSums &channel = (*channels)[c];
      channel.min = std::min(channel.min, x);
      channel.max = std::max(channel.max, x);
    }
  }
  for (size_t c = 0; c < dim; c++) (*channels)[c].sum += sum[c], (*channels)[c].abs += UInt128(abs[c]);
}

}  // namespace

void add_key_statistics(const HeadShape &shape, const uint16_t *k, size_t stride, size_t count, HeadStatistics *statistics) {
  const PairIndex index(shape);
  ShortPairSums sums;
  for (size_t t = 0; t < count; t += kTokens) {
    const size_t n = std::min(kTokens, count - t);
    sum_pairs(index, k + t * stride, stride, n, &sums);
    for (uint32_t p = 0; p < index.pairs; p++)
      statistics->pairs[p].k1 += sums.norm[p], statistics->pairs[p].k2 += sums.square[p];
    add_channels(k + t * stride, stride, n, &statistics->k);
  }
  statistics->nk += count;
}

void add_value_statistics(const uint16_t *v, size_t stride, size_t count, HeadStatistics *statistics) {
  for (size_t t = 0; t < count; t += kTokens)
    add_channels(v + t * stride, stride, std::min(kTokens, count - t), &statistics->v);
}

void add_query_statistics(const HeadShape &shape, const uint16_t *q, size_t stride, size_t count, HeadStatistics *statistics) {
  const PairIndex index(shape);
  ShortPairSums sums;
  for (size_t t = 0; t < count; t += kTokens) {
    sum_pairs(index, q + t * stride, stride, std::min(kTokens, count - t), &sums);
    for (uint32_t p = 0; p < index.pairs; p++)
      statistics->pairs[p].q1 += sums.norm[p], statistics->pairs[p].q2 += sums.square[p];
  }
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
