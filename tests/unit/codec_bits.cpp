// Section 4: bit streams and mixed radix words (V23, V24).
#include <catch2/catch_test_macros.hpp>
#include <cmath>
#include <vector>

#include "codec/bits.h"
#include "codec_kit.hpp"

using namespace kvq_test;

namespace {

constexpr uint32_t kLevels[] = {2, 3, 4, 5, 6, 7, 8, 16, 32, 64, 128, 256};

std::vector<uint8_t> written(uint32_t levels, const std::vector<uint8_t> &codes) {
  std::vector<uint8_t> bytes(kvq::stream_bytes(codes.size(), levels) + 1, 0xee);
  kvq::CodeWriter writer(bytes.data(), levels);
  for (const uint8_t code : codes) writer.put(code);
  REQUIRE(writer.finish() == bytes.data() + bytes.size() - 1);
  REQUIRE(bytes.back() == 0xee);
  bytes.pop_back();
  return bytes;
}

// The codes, or nothing where the reader refuses the bytes.
std::vector<uint8_t> taken(uint32_t levels, const std::vector<uint8_t> &bytes, size_t n) {
  kvq::CodeReader reader(bytes.data(), levels, n);
  std::vector<uint8_t> codes;
  for (size_t i = 0; i < n; i++) codes.push_back(reader.get());
  REQUIRE(reader.finish() == bytes.data() + bytes.size());
  return reader.ok() ? codes : std::vector<uint8_t>();
}

// A word of `value` in `bits` bits, alone in a stream.
std::vector<uint8_t> word(uint32_t value, uint32_t bits) {
  std::vector<uint8_t> bytes;
  for (uint32_t i = 0; i < bits; i += 8) bytes.push_back(uint8_t(value >> i));
  return bytes;
}

}  // namespace

TEST_CASE("streams by hand") {
  CHECK(hex(written(2, {1, 0, 1, 1, 0, 0, 0, 0, 1})) == "0d 01");
  CHECK(hex(written(4, {1, 2, 3, 0, 3})) == "39 03");         // 1 + 2*4 + 3*16
  CHECK(hex(written(3, {0, 1, 2, 2, 0})) == "4b");            // 3 + 18 + 54
  CHECK(hex(written(3, {2, 2, 2, 2, 2, 2})) == "f2 02");      // 242, then one digit in 2 bits
  CHECK(hex(written(5, {4, 3, 2, 1})) == "c5 00");            // 4 + 15 + 50 = 69 in 7 bits; 1 in 3 bits: 69 + 128
  CHECK(hex(written(6, {5, 5, 5, 5, 5, 1})) == "5f 3e");      // 7775 in 13 bits; 1 in 3 bits: 7775 + 8192 = 0x3e5f
  CHECK(hex(written(7, {6, 0, 0, 0, 0, 1})) == "ad 41 00");   // 6 + 16807 = 0x41ad in 17 bits
  CHECK(hex(written(8, {1, 2, 3})) == "d1 00");               // 1 + 2*8 + 3*64
  CHECK(hex(written(256, {7, 255})) == "07 ff");
  CHECK(written(4, {}).empty());
}

TEST_CASE("every tuple of digits that a word holds comes back, and words beyond are refused (V23)") {
  for (const auto &[levels, digits, bits] : kvq::kRadices) {
    const uint32_t values = uint32_t(std::lround(std::pow(levels, digits)));
    for (uint32_t value = 0; value < values; value++) {
      std::vector<uint8_t> codes;
      for (uint32_t i = 0, rest = value; i < digits; i++, rest /= levels) codes.push_back(uint8_t(rest % levels));
      if (written(levels, codes) != word(value, bits) || taken(levels, word(value, bits), digits) != codes)
        FAIL(levels << " levels: word " << value);
    }
    for (uint32_t value = values; value < 1u << bits; value++)
      if (!taken(levels, word(value, bits), digits).empty()) FAIL(levels << " levels: word " << value << " was accepted");
  }
}

TEST_CASE("short last words take the fewest bits, and are refused beyond L^t") {
  // t digits: bits of the short word.
  CHECK(kvq::word_bits(kvq::find_radix(3), 1) == 2);
  CHECK(kvq::word_bits(kvq::find_radix(3), 2) == 4);
  CHECK(kvq::word_bits(kvq::find_radix(3), 3) == 5);
  CHECK(kvq::word_bits(kvq::find_radix(3), 4) == 7);
  CHECK(kvq::word_bits(kvq::find_radix(5), 1) == 3);
  CHECK(kvq::word_bits(kvq::find_radix(5), 2) == 5);
  CHECK(kvq::word_bits(kvq::find_radix(6), 4) == 11);
  CHECK(kvq::word_bits(kvq::find_radix(7), 5) == 15);
  CHECK(taken(3, {8}, 2) == std::vector<uint8_t>{2, 2});
  CHECK(taken(3, {9}, 2).empty());
  CHECK(taken(7, {6}, 1) == std::vector<uint8_t>{6});
  CHECK(taken(7, {7}, 1).empty());
}

TEST_CASE("padding that is not 0 is refused") {
  CHECK(taken(2, {0x0d, 0x01}, 9).size() == 9);
  CHECK(taken(2, {0x0d, 0x03}, 9).empty());
  CHECK(taken(2, {0x0d, 0x81}, 9).empty());
  CHECK(taken(5, {0xc5, 0x04}, 4).empty());
}

TEST_CASE("streams of any length come back and have the length of the formula (V24)") {
  Random random;
  for (const uint32_t dim : {64u, 80u, 96u, 112u, 128u}) {
    for (const uint32_t levels : kLevels) {
      for (const uint32_t tokens : {1u, 2u, 3u, 7u}) {
        std::vector<uint8_t> codes(dim * tokens);
        for (uint8_t &code : codes) code = uint8_t(random.below(levels));
        const std::vector<uint8_t> bytes = written(levels, codes);
        const auto [l, digits, bits] = kvq::find_radix(levels);
        const uint32_t full = dim * tokens / digits, rest = dim * tokens % digits;
        const uint32_t short_bits = uint32_t(std::ceil(rest * std::log2(double(levels)) - 1e-9));
        REQUIRE(bytes.size() == (full * bits + short_bits + 7) / 8);
        REQUIRE(taken(levels, bytes, codes.size()) == codes);
      }
    }
  }
}

TEST_CASE("width 0 has no bits") {
  CHECK(kvq::stream_bytes(1000, 1) == 0);
  CHECK(taken(1, {}, 3) == std::vector<uint8_t>{0, 0, 0});
}
