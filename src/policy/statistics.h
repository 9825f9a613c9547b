// Exact statistics of a layer (section 6): 128-bit integer sums, so that order, chunking and devices do not matter.
#pragma once
#include <cstdint>
#include <limits>
#include <memory_resource>
#include <vector>

namespace kvq {

using Int128 = __int128;
using UInt128 = unsigned __int128;

struct PairSums {       // of one pair of K's channels
  UInt128 k1 = 0, k2 = 0;  // sqrt(u*u + v*v), u*u + v*v over the tokens of K
  UInt128 q1 = 0, q2 = 0;  // the same over all query heads of the KV head
};

struct ChannelSums {
  Int128 sum = 0;       // x * 2^24
  UInt128 abs = 0;      // |x| * 2^24
  float min = std::numeric_limits<float>::infinity(), max = -std::numeric_limits<float>::infinity();
};

struct HeadStatistics {  // of one KV head
  explicit HeadStatistics(std::pmr::memory_resource *memory) : pairs(memory), k(memory), v(memory) {}
  std::pmr::vector<PairSums> pairs;   // [dim_k / 2]
  std::pmr::vector<ChannelSums> k, v;  // [dim_k], [dim_v]
  uint64_t nk = 0, nq = 0;            // tokens of K; tokens x query heads of Q
};

// Which of them somebody will read; a backend need not add up the others.  Counts are always kept.
enum Wanted : uint32_t {
  kPairNorms = 1,      // k1, q1
  kPairSquares = 2,    // k2, q2
  kKeySums = 4,        // sum, of K
  kKeyChannels = 8,    // all of ChannelSums, of K
  kValueChannels = 16,  // and of V
  kAllSums = 31
};

struct LayerStatistics {
  uint32_t wanted = kAllSums;
  explicit LayerStatistics(std::pmr::memory_resource *memory) : heads(memory) {}
  std::pmr::vector<HeadStatistics> heads;  // [kv_heads]
};

}  // namespace kvq
