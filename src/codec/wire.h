// Pieces of the wire form (section 5) that several codecs share.
#pragma once
#include <cstdint>

#include "codec/codec.h"

namespace kvq {

constexpr size_t param_bytes(ParamType type) { return type == ParamType::fp16 ? 2 : 1; }

// Write one stored parameter; the place behind it.
uint8_t *write_param(uint16_t param, ParamType type, uint8_t *wire);

// Read one stored parameter and move on.  False where decoding must refuse it: not finite, or a scale (s, h) that is negative or
// -0.  A zero or raw value of -0 becomes +0.
enum class ParamRole : uint8_t {
  scale,
  zero
};
bool read_param(const uint8_t **wire, ParamType type, ParamRole role, uint16_t *param);

// KVQ_E_CORRUPT with the codec's name and what is wrong with its bytes.
Status corrupt(const HeadFormat &format, const char *what);

}  // namespace kvq
