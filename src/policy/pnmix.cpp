// PN-Mix: salient rotary pairs (or channels) keep more bits (PN-Mix section 3; FORMATS section 6).
#include <iterator>
#include <vector>

#include "policy/select.h"
#include "policy/table.h"
#include "policy/text.h"

namespace kvq {

namespace {

// Eq. 6 ranks pairs by the product of the mean norms of queries and keys; the counts are common factors.
void rank_pairs_by_product(const HeadStatistics &statistics, uint64_t count, std::span<uint8_t> mask) {
  std::vector<double> scores;
  for (const PairSums &pair : statistics.pairs) scores.push_back(double(pair.q1) * double(pair.k1));
  select_largest<double>(scores, count, mask);
}

void rank_pairs_by_key(const HeadStatistics &statistics, uint64_t count, std::span<uint8_t> mask) {
  std::vector<UInt128> scores;
  for (const PairSums &pair : statistics.pairs) scores.push_back(pair.k1);
  select_largest<UInt128>(scores, count, mask);
}

void rank_channels_by_range(const HeadStatistics &statistics, uint64_t count, std::span<uint8_t> mask) {
  std::vector<double> scores;
  for (const ChannelSums &channel : statistics.k) scores.push_back(double(channel.max) - double(channel.min));
  select_largest<double>(scores, count, mask);
}

void rank_channels_by_magnitude(const HeadStatistics &statistics, uint64_t count, std::span<uint8_t> mask) {
  std::vector<UInt128> scores;
  for (const ChannelSums &channel : statistics.k) scores.push_back(channel.abs);
  select_largest<UInt128>(scores, count, mask);
}

// In the order of Criterion.
struct CriterionRow {
  const char *name;
  bool queries, channels;
  void (*rank)(const HeadStatistics &statistics, uint64_t count, std::span<uint8_t> mask);
};
constexpr CriterionRow kCriteria[] = {
    {"qk-pair", true, false, rank_pairs_by_product},
    {"k-pair", false, false, rank_pairs_by_key},
    {"k-range", false, true, rank_channels_by_range},
    {"k-magnitude", false, true, rank_channels_by_magnitude},
};

const CriterionRow &row_of(const Policy &policy) { return kCriteria[size_t(policy.criterion)]; }

}  // namespace

bool ranks_channels(Criterion criterion) { return kCriteria[size_t(criterion)].channels; }
const char *criterion_name(uint32_t criterion) { return criterion < std::size(kCriteria) ? kCriteria[criterion].name : nullptr; }

Needs pnmix_needs(const Policy &policy) { return {true, row_of(policy).queries, row_of(policy).channels ? kKeyChannels : kPairNorms}; }

Status pnmix_check(const Policy &policy, const Codec &codec, const HeadShape &, uint32_t) {
  if (codec.has_table || ranks_channels(policy.criterion) == codec.by_channel) return KVQ_OK;
  return fail(KVQ_E_INVALID, codec.by_channel ? "pair-mix with unit=channel needs criterion=k-range or k-magnitude"
                                              : "criterion=k-range and k-magnitude rank channels: pair-mix needs unit=channel");
}

Status pnmix_decide(const Policy &policy, const HeadShape &, const HeadStatistics &statistics, uint32_t, std::span<uint8_t> table) {
  row_of(policy).rank(statistics, floor_of(policy.r, table.size()), table);
  return KVQ_OK;
}

void share_example(const Policy &policy, uint32_t, std::span<uint8_t> table) {
  const uint64_t count = floor_of(policy.r, table.size());
  for (size_t i = 0; i < table.size(); i++) table[i] = i < count;
}

}  // namespace kvq
