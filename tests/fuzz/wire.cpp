// Any bytes as the wire form of any codec: decoded or refused, never a crash.  Input: codec text, a zero byte, wire bytes.
#include <algorithm>
#include <string>
#include <vector>

#include "kvq/kvq.h"

extern const char *const kvq_fuzz_seeds[];
const char *const kvq_fuzz_seeds[] = {"raw",
                                      "lloyd(levels=8)",
                                      "lloyd(levels=6,params=e5m3)",
                                      "affine-token(levels=4,group=64)",
                                      "affine-channel(levels=4,group=32)",
                                      "polar(radius=4,angle=4,group=32)",
                                      "channel-split(high=8,low=4)",
                                      nullptr};

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  constexpr uint32_t kDim = 64, kTokens = 32;
  const uint8_t *zero = std::find(data, data + size, 0);
  const std::string text(data, zero);
  std::vector<uint8_t> wire(zero == data + size ? zero : zero + 1, data + size);
  kvq_codec codec{};
  codec.struct_size = sizeof codec;
  codec.text = text.c_str();
  codec.dim = kDim;
  std::vector<float> x(kTokens * kDim, 1), out(kTokens * kDim);
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i % 37) - 18;

  kvq_tensor rows{};
  rows.struct_size = sizeof rows;
  rows.data = x.data();
  size_t needed = 0;
  std::vector<uint8_t> encoded(1 << 16);
  if (kvq_codec_encode(&codec, &rows, kTokens, encoded.data(), encoded.size(), &needed) != KVQ_OK) return 0;
  // The right size with the input's bytes as damage, and the input as it is.
  encoded.resize(needed);
  for (size_t i = 0; i < std::min(wire.size(), encoded.size()); ++i) encoded[i] ^= wire[i];
  kvq_codec_decode(&codec, encoded.data(), encoded.size(), kTokens, out.data());
  kvq_codec_decode(&codec, wire.data(), wire.size(), kTokens, out.data());
  return 0;
}
