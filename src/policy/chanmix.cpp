// ChanMix: width lists by channel from a profile that somebody made before (FORMATS section 6); its helper is a step of decide.cpp.
#include "policy/table.h"

namespace kvq {

Status chanmix_check(const Policy &, const Codec &codec, const HeadShape &, uint32_t) {
  if (!codec.by_channel) return fail(KVQ_E_INVALID, "policy chanmix goes by channel: channel-widths needs unit=channel");
  return KVQ_OK;
}

}  // namespace kvq
