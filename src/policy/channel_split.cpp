// Channel split (TurboQuant's outlier channels): the channels with the largest sum of abs keep more levels (FORMATS section 6).
#include <vector>

#include "policy/select.h"
#include "policy/table.h"
#include "policy/text.h"

namespace kvq {

Needs channel_split_needs(const Policy &) { return {true, false, kKeyChannels | kValueChannels}; }

Status channel_split_check(const Policy &, const Codec &, const HeadShape &, uint32_t) { return KVQ_OK; }

Status channel_split_decide(const Policy &policy, const HeadShape &shape, const HeadStatistics &statistics, uint32_t,
                            std::span<uint8_t> table) {
  std::vector<UInt128> scores;
  for (const ChannelSums &channel : shape.tensor == KVQ_TENSOR_K ? statistics.k : statistics.v) scores.push_back(channel.abs);
  select_largest<UInt128>(scores, floor_of(policy.r, table.size()), table);
  return KVQ_OK;
}

}  // namespace kvq
