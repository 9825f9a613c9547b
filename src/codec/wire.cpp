#include "codec/wire.h"

#include "codec/descriptor.h"

namespace kvq {

uint8_t *write_param(uint16_t param, ParamType type, uint8_t *wire) {
  *wire++ = uint8_t(param);
  if (param_bytes(type) == 2) *wire++ = uint8_t(param >> 8);
  return wire;
}

bool read_param(const uint8_t **wire, ParamType type, ParamRole role, uint16_t *param) {
  uint16_t bits = *(*wire)++;
  if (param_bytes(type) == 2) bits |= uint16_t(*(*wire)++ << 8);
  *param = bits;
  if (type == ParamType::e5m3) return true;  // every byte is a finite value without a sign
  const uint16_t sign = type == ParamType::fp16 ? 0x8000 : 0x80;
  const uint16_t magnitude = bits & uint16_t(sign - 1);
  if (type == ParamType::fp16 ? magnitude >= 0x7c00 : magnitude == 0x7f) return false;
  if (role == ParamRole::scale) return !(bits & sign);
  if (!magnitude) *param = 0;
  return true;
}

Status corrupt(const HeadFormat &format, const char *what) {
  return fail(KVQ_E_CORRUPT, "wire block of %s: %s", descriptor(format.codec.kind).name.data(), what);
}

}  // namespace kvq
