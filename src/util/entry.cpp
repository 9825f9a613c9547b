#include "util/entry.h"

#include <cstring>

#include "kvq/kvq.h"
#include "util/fp.h"

namespace kvq {
namespace {

constexpr uint32_t kInfinity = 0x7f800000u, kLargestHalf = 0x477fe000u;  // 65504

// float(x) of element i as bits.
using Load = uint32_t(const uint8_t *x, uint32_t i);

uint32_t load_f32(const uint8_t *x, uint32_t i) {
  uint32_t bits;
  std::memcpy(&bits, x + size_t(i) * 4, 4);
  return bits;
}

uint32_t load_f16(const uint8_t *x, uint32_t i) {
  uint16_t h;
  std::memcpy(&h, x + size_t(i) * 2, 2);
  return std::bit_cast<uint32_t>(half_to_float(h));
}

uint32_t load_bf16(const uint8_t *x, uint32_t i) {
  uint16_t h;
  std::memcpy(&h, x + size_t(i) * 2, 2);
  return uint32_t(h) << 16;
}

uint32_t load_f64(const uint8_t *x, uint32_t i) {
  double d;
  std::memcpy(&d, x + size_t(i) * 8, 8);
  return std::bit_cast<uint32_t>(float(d));
}

template <Load load>
uint32_t enter(const uint8_t *x, uint32_t n, uint16_t *out, uint64_t *saturated) {
  uint32_t beyond = 0, largest = 0;
  for (uint32_t i = 0; i < n; i++) {
    const uint32_t bits = load(x, i), a = bits & 0x7fffffffu;
    beyond += a > kLargestHalf;
    largest = a > largest ? a : largest;
    out[i] = float_to_half(std::bit_cast<float>(bits));
  }
  if (largest >= kInfinity)
    for (uint32_t i = 0; i < n; i++)
      if ((load(x, i) & kInfinity) == kInfinity) return i;
  *saturated += beyond;
  return n;
}

struct DType {
  uint32_t dtype, bytes;
  uint32_t (*enter)(const uint8_t *x, uint32_t n, uint16_t *out, uint64_t *saturated);
};
constexpr DType kDTypes[] = {{KVQ_DTYPE_F32, 4, enter<load_f32>},
                             {KVQ_DTYPE_F16, 2, enter<load_f16>},
                             {KVQ_DTYPE_BF16, 2, enter<load_bf16>},
                             {KVQ_DTYPE_F64, 8, enter<load_f64>}};

}  // namespace

uint32_t dtype_bytes(uint32_t dtype) {
  for (const DType &type : kDTypes)
    if (type.dtype == dtype) return type.bytes;
  return 0;
}

uint32_t enter_row(const void *x, uint32_t dtype, uint32_t n, uint16_t *out, uint64_t *saturated) {
  for (const DType &type : kDTypes)
    if (type.dtype == dtype) return type.enter(static_cast<const uint8_t *>(x), n, out, saturated);
  return 0;
}

}  // namespace kvq
