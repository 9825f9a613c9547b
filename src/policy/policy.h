// Policies: from statistics or scores to masks, width lists and token flags (FORMATS / conformance/SPEC.md section 6).
// One file per policy; this is the table that the rest of the library sees.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "codec/codec.h"
#include "policy/statistics.h"
#include "util/memory.h"
#include "util/status.h"

namespace kvq {

enum class PolicyKind : uint8_t {
  uniform,
  pnmix,
  blockgtq,
  pair_widths,
  semkv,
  channel_split,
  chanmix,
  pmkvq,
  drop_tokens
};
enum class Criterion : uint8_t {
  qk_pair,
  k_pair,
  k_range,
  k_magnitude
};
enum class Score : uint8_t {
  qk_avg,
  qk_max,
  qk_product,
  k_only,
  q_only,
  k_var,
  q_var,
  q_geo,
  q_range
};
enum class Owner : uint8_t {
  nobody,
  sequence,
  cache
};  // whose decision it is: frozen at the sequence's first commit, or for the cache

struct Policy {
  PolicyKind kind = PolicyKind::uniform;
  Ratio r;                        // pnmix, semkv, channel-split, drop-tokens
  Criterion criterion = Criterion::qk_pair;
  Ratio avg{0, 1};                // blockgtq, pair-widths
  uint32_t bmin = 1, bmax = 8;
  Score score = Score::qk_avg;
};

Owner policy_owner(const Policy &policy);
bool policy_needs_statistics(const Policy &policy);  // of K (all that decide) at least
bool policy_needs_queries(const Policy &policy);     // of Q: a commit without any is refused (STATE)
uint32_t policy_wants(const Policy &policy);         // the sums that it reads, of Wanted

// Decisions of a policy for one layer: one byte per unit, as Codec::table; empty where a codec needs none.
struct LayerTables {
  explicit LayerTables(std::pmr::memory_resource *memory) : k(memory), v(memory), mu(memory) {}
  std::pmr::vector<std::pmr::vector<uint8_t>> k, v;  // [kv_heads]
  std::pmr::vector<std::pmr::vector<uint16_t>> mu;   // [kv_heads] fp16 [dim_k], empty unless K's codec is centred
};

struct LayerCodecs;
struct LayerShape;

// Fill out->k and out->v (not mu).  STATE where statistics of a side are missing, INVALID for a budget that cannot be met.
Status decide_tables(const Policy &policy, const LayerCodecs &codecs, const LayerShape &shape, const LayerStatistics &statistics,
                     LayerTables *out);

// Parse "name(key=value,...)" of a recipe's policy field, and print it.  SemKV's low= and high= codec texts are returned apart,
// and unit= as text ("fit16" or a number; empty if absent).
struct PolicyText {
  Policy policy;
  std::string low, high, unit;
};
Status parse_policy(std::string_view text, PolicyText *out);

// ---- pieces, also reached by kvq_policy_decide

// Scores of pairs for the width policies (fp64, left to right).  `statistics` of one KV head; dim_k / 2 results.
Status width_scores(Score score, const HeadStatistics &statistics, const HeadShape &shape, std::span<double> scores);
// Greedy widths: one byte per pair.
Status allocate_widths(std::span<const double> scores, Ratio avg, uint32_t bmin, uint32_t bmax, uint32_t unit,
                       std::span<uint8_t> widths);
// The floor(r * n) largest (prompt) or round-half-even(r * n) (block) get 1; ties to the lower index.  NaN is INVALID.
enum class Rounding : uint8_t {
  floor,
  half_even
};
Status select_tokens(Ratio r, Rounding rounding, std::span<const float> scores, std::span<uint8_t> flags);
// PM-KVQ: wire bytes of `tokens` packed tokens of a layer at 16, 8, 4 and 2 bits, and those widths.
Status chain_bytes(uint64_t tokens, uint32_t kv_heads, uint32_t dim_k, uint32_t dim_v, std::span<uint64_t> bytes);
uint32_t chain_width(size_t i);
// The first of them that fits the budget, or the last.
size_t widest_within(uint64_t budget, std::span<const uint64_t> bytes);
// Budgets of layers whose bytes by width are `bytes`, `total` in all: from 2 bits everywhere, the layer with the largest
// score * 4^-bits that still fits goes to its next width; ties to the narrower one, then the lower layer.
Status allocate_budgets(std::span<const double> scores, uint64_t total, std::span<const uint64_t> bytes, std::span<uint64_t> budgets);
// Mean per channel of fp16 rows as section 2.2 says: hp(float(double(sum * 2^24) / 2^24 / count)).
class CenterSum {
 public:
  CenterSum(uint32_t dim, std::pmr::memory_resource *memory) : sum_(dim, 0, memory) {}
  void add(const uint16_t *rows, size_t count);         // [count][dim]
  void add(const ChannelSums *sums, uint64_t count);    // [dim], of so many rows
  void mean(std::span<uint16_t> mu) const;              // 0 without tokens
  std::pmr::memory_resource *resource() const { return sum_.get_allocator().resource(); }

 private:
  std::pmr::vector<Int128> sum_;
  uint64_t count_ = 0;
};

// Add entered fp16 rows [count][stride] of one KV head to its statistics; q rows likewise (all query heads in turn).  wanted: of Wanted.
void add_key_statistics(const HeadShape &shape, const uint16_t *k, size_t stride, size_t count, HeadStatistics *statistics,
                        const Loops &loops = loops_portable, uint32_t wanted = kAllSums);
void add_value_statistics(const uint16_t *v, size_t stride, size_t count, HeadStatistics *statistics,
                          const Loops &loops = loops_portable);
void add_query_statistics(const HeadShape &shape, const uint16_t *q, size_t stride, size_t count, HeadStatistics *statistics,
                          const Loops &loops = loops_portable, uint32_t wanted = kAllSums);
void reset_statistics(const LayerShape &shape, LayerStatistics *statistics);

// ---- the blob of kvq_policy_get / kvq_policy_set: everything frozen, with the recipe text and the geometry it belongs to
Status write_policy_blob(std::string_view recipe, std::span<const LayerShape> shapes, std::span<const LayerTables> tables,
                         std::pmr::vector<uint8_t> *blob);
// CORRUPT, or CONFIG naming the field that differs.  Tables and centres are valid for the recipe; each of the two parts is there
// for all heads that have one, or empty everywhere.
Status read_policy_blob(const void *blob, size_t size, std::string_view recipe, std::span<const LayerShape> shapes,
                        std::pmr::vector<LayerTables> *tables);

}  // namespace kvq
