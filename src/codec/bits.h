// Section 4: streams of codes, LSB first, digits of base L packed by mixed radix into words.
#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>

namespace kvq {

// `digits` codes of `levels` values make a word of `bits` bits.
struct Radix {
  uint32_t levels, digits, bits;
};

inline constexpr Radix kRadices[] = {
    {2, 1, 1},
    {3, 5, 8},
    {4, 1, 2},
    {5, 3, 7},
    {6, 5, 13},
    {7, 6, 17},
    {8, 1, 3},
    {16, 1, 4},
    {32, 1, 5},
    {64, 1, 6},
    {128, 1, 7},
    {256, 1, 8},
};

// levels == 1 (width 0) has words of no bits.
constexpr Radix find_radix(uint32_t levels) {
  for (const Radix &radix : kRadices)
    if (radix.levels == levels) return radix;
  return {1, 1, 0};
}

// Bits of a word of t digits: a short word takes the fewest that hold levels^t values.
constexpr uint32_t word_bits(const Radix &radix, uint32_t t) {
  if (t == radix.digits) return radix.bits;
  uint32_t values = 1;
  for (uint32_t i = 0; i < t; i++) values *= radix.levels;
  return uint32_t(std::bit_width(values - 1));
}

// Bytes of a stream of n codes.
constexpr size_t stream_bytes(uint64_t n, uint32_t levels) {
  const Radix radix = find_radix(levels);
  return size_t((n / radix.digits * radix.bits + word_bits(radix, uint32_t(n % radix.digits)) + 7) / 8);
}

class CodeWriter {
 public:
  CodeWriter(uint8_t *out, uint32_t levels) : radix_(find_radix(levels)), out_(out) {}

  void put(uint8_t code) {
    word_ += code * weight_;
    weight_ *= radix_.levels;
    if (++digits_ == radix_.digits) flush();
  }

  // Pad to a byte; the place behind the stream.
  uint8_t *finish() {
    if (digits_) flush();
    if (filled_) *out_++ = uint8_t(pending_);
    pending_ = filled_ = 0;
    return out_;
  }

 private:
  void flush() {
    pending_ |= word_ << filled_;
    filled_ += word_bits(radix_, digits_);
    for (; filled_ >= 8; filled_ -= 8, pending_ >>= 8) *out_++ = uint8_t(pending_);
    word_ = digits_ = 0;
    weight_ = 1;
  }

  const Radix radix_;
  uint8_t *out_;
  uint32_t word_ = 0, weight_ = 1, digits_ = 0;  // of the word that is being filled
  uint32_t pending_ = 0, filled_ = 0;            // bits that are not written yet; at most 7 + 17
};

// Reads back `n` codes.  What no writer writes (a word beyond levels^digits, padding that is not 0) makes ok() false.
class CodeReader {
 public:
  CodeReader(const uint8_t *in, uint32_t levels, uint64_t n) : radix_(find_radix(levels)), in_(in), left_(n) {}

  uint8_t get() {
    if (!digits_) fetch();
    const uint32_t code = word_ % radix_.levels;
    word_ /= radix_.levels;
    digits_--;
    return uint8_t(code);
  }

  // The place behind the stream, after its last code.
  const uint8_t *finish() {
    if (pending_) ok_ = false;
    pending_ = filled_ = 0;
    return in_;
  }

  bool ok() const { return ok_; }

 private:
  void fetch() {
    digits_ = left_ < radix_.digits ? uint32_t(left_) : radix_.digits;
    left_ -= digits_;
    const uint32_t bits = word_bits(radix_, digits_);
    for (; filled_ < bits; filled_ += 8) pending_ |= uint32_t(*in_++) << filled_;
    word_ = pending_ & ((1u << bits) - 1);
    pending_ >>= bits;
    filled_ -= bits;
    uint32_t values = 1;
    for (uint32_t i = 0; i < digits_; i++) values *= radix_.levels;
    if (word_ >= values) ok_ = false;
  }

  const Radix radix_;
  const uint8_t *in_;
  uint64_t left_;
  uint32_t word_ = 0, digits_ = 0;
  uint32_t pending_ = 0, filled_ = 0;  // bits that are fetched and not used; at most 7 + 17
  bool ok_ = true;
};

}  // namespace kvq
