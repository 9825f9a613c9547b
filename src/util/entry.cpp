#include "util/entry.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "kvq/kvq.h"
#include "util/fp.h"

namespace kvq {
namespace {

constexpr uint32_t kInfinity = 0x7f800000u;

template <class T>
T element(const void *x, uint32_t i) {  // input may be aligned less than its type
  T value;
  std::memcpy(&value, static_cast<const char *>(x) + size_t(i) * sizeof(T), sizeof(T));
  return value;
}

// float(x) of element i as bits.
uint32_t bits_f32(const void *x, uint32_t i) { return element<uint32_t>(x, i); }
uint32_t bits_f16(const void *x, uint32_t i) { return std::bit_cast<uint32_t>(half_to_float(element<uint16_t>(x, i))); }
uint32_t bits_bf16(const void *x, uint32_t i) { return uint32_t(element<uint16_t>(x, i)) << 16; }
uint32_t bits_f64(const void *x, uint32_t i) { return std::bit_cast<uint32_t>(float(element<double>(x, i))); }

Entered enter_f32(const Loops &loops, const void *x, uint32_t n, uint16_t *out) { return loops.enter_f32(x, n, out); }
Entered enter_f16(const Loops &loops, const void *x, uint32_t n, uint16_t *out) { return loops.enter_f16(x, n, out); }
Entered enter_bf16(const Loops &loops, const void *x, uint32_t n, uint16_t *out) { return loops.enter_bf16(x, n, out); }
Entered enter_f64(const Loops &loops, const void *x, uint32_t n, uint16_t *out) {
  constexpr uint32_t kPiece = 256;
  float piece[kPiece];
  Entered entered{true, 0};
  for (uint32_t first = 0; first < n; first += kPiece) {
    const uint32_t count = std::min(kPiece, n - first);
    for (uint32_t i = 0; i < count; i++) piece[i] = float(element<double>(x, first + i));
    const Entered part = loops.enter_f32(piece, count, out + first);
    entered.finite &= part.finite;
    entered.saturated += part.saturated;
  }
  return entered;
}

struct DType {
  uint32_t dtype, bytes;
  Entered (*enter)(const Loops &loops, const void *x, uint32_t n, uint16_t *out);
  uint32_t (*bits)(const void *x, uint32_t i);
};
constexpr DType kDTypes[] = {{KVQ_DTYPE_F32, 4, enter_f32, bits_f32},
                             {KVQ_DTYPE_F16, 2, enter_f16, bits_f16},
                             {KVQ_DTYPE_BF16, 2, enter_bf16, bits_bf16},
                             {KVQ_DTYPE_F64, 8, enter_f64, bits_f64}};

const DType *find(uint32_t dtype) {
  for (const DType &type : kDTypes)
    if (type.dtype == dtype) return &type;
  return nullptr;
}

}  // namespace

uint32_t dtype_bytes(uint32_t dtype) {
  const DType *type = find(dtype);
  return type ? type->bytes : 0;
}

uint32_t enter_row(const void *x, uint32_t dtype, uint32_t n, uint16_t *out, uint64_t *saturated, const Loops &loops) {
  const DType *type = find(dtype);
  if (!type) return 0;
  const Entered entered = type->enter(loops, x, n, out);
  for (uint32_t i = 0; !entered.finite && i < n; i++)
    if ((type->bits(x, i) & kInfinity) == kInfinity) return i;
  *saturated += entered.saturated;
  return n;
}

}  // namespace kvq
