// Wire blocks: round trips, exact sizes, and everything that decoding refuses (section 5, "Decoding refuses").
#include <catch2/catch_test_macros.hpp>
#include <cmath>
#include <cstring>

#include "codec_kit.hpp"

using namespace kvq_test;

namespace {

struct Sized {
  const char *text;
  double bits;  // per value at dimension 128 and 128 tokens, from the text of section 5
};

// All kinds at dimension 128; bits worked out by hand.
const std::vector<Sized> &sized() {
  static const std::vector<Sized> table = {
      {"raw", 16},
      {"affine-channel(levels=4,group=128)", 2.25},                  // 2 + 32/128
      {"affine-channel(levels=3,group=32)", 2.75},                   // 7 bytes for 32 digits (6 words, 2 digits in 4 bits) + 1
      {"affine-token(levels=4,group=128)", 2.25},
      {"affine-token(levels=8,group=32,rotate=1)", 4},
      {"lloyd(levels=8)", 3.125},
      {"lloyd(levels=4,params=e5m3)", 2.0625},
      {"lloyd(levels=256)", 8.125},
      {"pair-mix(low=1,high=3,group=128,mask=00000000ffffffff)", 2.25},  // half 1, half 3 bits, 32/128
      {"kitty(boost=1/32,group=128)", 2.375},                        // 2 + 2 * 4/128 + 8/128 + 32/128
      {"channel-widths(bits=0000000000000000222222222222222244444444444444448888888888888888,group=128)", 3.75},
      {"channel-widths(bits=0000000000000000222222222222222244444444444444448888888888888888,group=128,params=e4m3)", 3.625},
      {"width-groups(bits=1111111111111111111111111111111133333333333333333333333333333333)", 2.25},  // 2 + 2 * 16/128
      {"channel-split(high=8,low=4,mask=ffffffffffffffff0000000000000000)", 2.75},
      {"polar(radius=4,angle=4,group=128)", 2.25},
      {"progressive(bits=16)", 16},
      {"progressive(bits=8)", 8.25},
      {"progressive(bits=4)", 4.25},
      {"progressive(bits=2)", 2.25},
  };
  return table;
}

// CORRUPT, and nothing else.
void refuse(const HeadFormat &format, std::vector<uint8_t> wire, uint32_t tokens, const char *word) {
  Block block(std::pmr::get_default_resource());
  REQUIRE(read_back(format, wire, tokens, &block) == KVQ_E_CORRUPT);
  INFO(kvq::failure_detail());
  CHECK(std::strstr(kvq::failure_detail(), word));
}

void put_half(std::vector<uint8_t> &wire, size_t at, uint16_t bits) {
  wire[at] = uint8_t(bits);
  wire[at + 1] = uint8_t(bits >> 8);
}

// Parameters begin at byte `at` with a scale, which is followed by a zero where `zeros` is set.
void check_params(const char *text, size_t at, bool zeros, uint32_t tokens) {
  INFO(text);
  const HeadFormat format = format_of(text, keys(16));
  Random random;
  const std::vector<uint8_t> wire = wire_of(format, encoded(format, random.normals(tokens * 16)));
  const auto with = [&](size_t where, uint16_t bits) {
    std::vector<uint8_t> changed = wire;
    put_half(changed, where, bits);
    return changed;
  };
  for (const uint16_t bits : {0x7c00, 0x7e00, 0xfc00, 0xffff, 0x8000, 0xbc00, 0x8001})
    refuse(format, with(at, bits), tokens, "-0");
  Block block(std::pmr::get_default_resource());
  CHECK(read_back(format, with(at, 0x0001), tokens, &block) == KVQ_OK);
  CHECK(read_back(format, with(at, 0x0000), tokens, &block) == KVQ_OK);
  if (!zeros) return;
  for (const uint16_t bits : {0x7c00, 0xfc00, 0x7c01}) refuse(format, with(at + 2, bits), tokens, "zero");
  CHECK(read_back(format, with(at + 2, 0xbc00), tokens, &block) == KVQ_OK);
  // A zero of -0 is +0.
  REQUIRE(read_back(format, with(at + 2, 0x8000), tokens, &block) == KVQ_OK);
  for (const uint16_t param : block.params) CHECK(param != 0x8000);
  for (const float value : decoded(format, block)) CHECK_FALSE((value == 0 && std::signbit(value)));
}

}  // namespace

TEST_CASE("wire sizes are those of the text, and blocks come back from their bytes") {
  Random random;
  for (const Sized &row : sized()) {
    const HeadFormat format = format_of(row.text, keys(128));
    const Block block = encoded(format, random.normals(128 * 128));
    const std::vector<uint8_t> wire = wire_of(format, block);
    INFO(row.text);
    CHECK(wire.size() * 8 == row.bits * 128 * 128);
    Block back(std::pmr::get_default_resource());
    REQUIRE(read_back(format, wire, 128, &back) == KVQ_OK);
    CHECK(back.tokens == 128);
    CHECK(back.codes == block.codes);
    CHECK(back.params == block.params);
    CHECK(back.boosted == block.boosted);
    CHECK(wire_of(format, back) == wire);
  }
}

TEST_CASE("row blocks of few tokens: short words and one padding at the end (V24)") {
  Random random;
  for (const uint32_t dim : {64u, 80u, 96u, 112u, 128u}) {
    for (const uint32_t levels : {3u, 5u, 6u, 7u}) {
      const HeadFormat format = format_of("lloyd(levels=" + std::to_string(levels) + ")", values(dim));
      for (const uint32_t tokens : {1u, 2u, 3u, 7u}) {
        const Block block = encoded(format, random.normals(dim * tokens));
        const std::vector<uint8_t> wire = wire_of(format, block);
        const uint32_t digits = levels == 3   ? 5
                                : levels == 5 ? 3
                                : levels == 6 ? 5
                                              : 6,
                       bits = levels == 3   ? 8
                              : levels == 5 ? 7
                              : levels == 6 ? 13
                                            : 17;
        const uint32_t n = dim * tokens, rest = uint32_t(std::ceil(std::log2(double(levels)) * (n % digits) - 1e-9));
        REQUIRE(wire.size() == (n / digits * bits + rest + 7) / 8 + 2 * tokens);
        Block back(std::pmr::get_default_resource());
        REQUIRE(read_back(format, wire, tokens, &back) == KVQ_OK);
        REQUIRE(back.codes == block.codes);
      }
    }
  }
}

TEST_CASE("no tokens are an empty block") {
  for (const Sized &row : sized()) {
    const HeadFormat format = format_of(row.text, keys(128));
    Block block(std::pmr::get_default_resource());
    INFO(row.text);
    CHECK(kvq::wire_size(format, 0) == 0);
    kvq::encode(format, {nullptr, 128}, 0, &block);
    CHECK(block.codes.empty());
    CHECK(read_back(format, {}, 0, &block) == KVQ_OK);
    kvq::decode(format, block, nullptr);
  }
}

TEST_CASE("wrong sizes are CORRUPT, token counts that are no whole group INVALID") {
  Block block(std::pmr::get_default_resource());
  for (const Sized &row : sized()) {
    const HeadFormat format = format_of(row.text, keys(128));
    std::vector<uint8_t> wire(kvq::wire_size(format, 128), 0);
    INFO(row.text);
    wire.push_back(0);
    CHECK(read_back(format, wire, 128, &block) == KVQ_E_CORRUPT);
    wire.pop_back(), wire.pop_back();
    CHECK(read_back(format, wire, 128, &block) == KVQ_E_CORRUPT);
    CHECK(read_back(format, {}, 128, &block) == KVQ_E_CORRUPT);
    if (!kvq::is_row(format.codec.kind)) CHECK(read_back(format, wire, 100, &block) == KVQ_E_INVALID);
  }
}

TEST_CASE("words beyond L^m, short ones beyond L^t, and padding are refused") {
  // lloyd, 3 levels, 6 channels: a word of 5 digits (243 values), one digit in 2 bits, 6 bits of padding, h.
  const HeadFormat lloyd = format_of("lloyd(levels=3)", keys(6));
  Block block(std::pmr::get_default_resource());
  CHECK(read_back(lloyd, std::vector<uint8_t>{242, 2, 0, 0}, 1, &block) == KVQ_OK);
  CHECK(std::vector<uint8_t>(block.codes.begin(), block.codes.end()) == std::vector<uint8_t>(6, 2));
  refuse(lloyd, {243, 2, 0, 0}, 1, "word");
  refuse(lloyd, {255, 0, 0, 0}, 1, "word");
  refuse(lloyd, {0, 3, 0, 0}, 1, "word");
  refuse(lloyd, {0, 4, 0, 0}, 1, "padding");
  refuse(lloyd, {0, 0x80, 0, 0}, 1, "padding");
  // affine-channel pads every channel: 3 codes of 2 bits.
  const HeadFormat columns = format_of("affine-channel(levels=4,group=3)", keys(2));
  CHECK(read_back(columns, std::vector<uint8_t>{0x3f, 0x3f, 0, 0, 0, 0, 0, 0, 0, 0}, 3, &block) == KVQ_OK);
  refuse(columns, {0x40, 0, 0, 0, 0, 0, 0, 0, 0, 0}, 3, "padding");
  refuse(columns, {0, 0x80, 0, 0, 0, 0, 0, 0, 0, 0}, 3, "padding");
  // Each width of width-groups pads its own stream: 2 codes of 1 bit, then 2 of 2 bits.
  const HeadFormat groups = format_of("width-groups(bits=12)", keys(4));
  CHECK(read_back(groups, std::vector<uint8_t>{0x03, 0x0f, 0, 0, 0, 0}, 1, &block) == KVQ_OK);
  refuse(groups, {0x04, 0, 0, 0, 0, 0}, 1, "padding");
  refuse(groups, {0, 0x10, 0, 0, 0, 0}, 1, "padding");
}

TEST_CASE("scales and zeros that are not finite, scales that are negative or -0") {
  check_params("affine-token(levels=4,group=16)", 4, true, 1);
  check_params("lloyd(levels=4)", 4, false, 1);
  check_params("width-groups(bits=11111111)", 2, false, 1);
  check_params("channel-split(high=4,low=4,mask=ffff)", 4, false, 1);
  check_params("progressive(bits=4)", 8, true, 1);
  check_params("affine-channel(levels=4,group=8)", 32, true, 8);
  check_params("pair-mix(low=1,high=3,group=8,mask=00)", 16, true, 8);
  check_params("kitty(boost=0/1,group=4)", 32, true, 4);
  check_params("channel-widths(bits=22222222,group=8)", 32, true, 8);
  check_params("polar(radius=4,angle=4,group=8)", 32, true, 8);
}

TEST_CASE("raw values that are not finite are refused, and -0 becomes +0") {
  for (const char *text : {"raw", "progressive(bits=16)"}) {
    const HeadFormat format = format_of(text, keys(2));
    refuse(format, {0x00, 0x7c, 0, 0}, 1, "finite");
    refuse(format, {0, 0, 0x01, 0xfe}, 1, "finite");
    Block block(std::pmr::get_default_resource());
    REQUIRE(read_back(format, std::vector<uint8_t>{0x00, 0x80, 0xff, 0xfb}, 1, &block) == KVQ_OK);
    const std::vector<float> out = decoded(format, block);
    CHECK(out[1] == -65504);
    CHECK_FALSE(std::signbit(out[0]));
    CHECK(hex(wire_of(format, block)) == "00 00 ff fb");
  }
}

TEST_CASE("e4m3: NaN bytes and negative scales; e5m3: every byte is a scale") {
  // One pair of width 1, 8 tokens: two bytes of codes, then s z s z.
  const HeadFormat format = format_of("channel-widths(bits=1,group=8,params=e4m3)", keys(2));
  Block block(std::pmr::get_default_resource());
  CHECK(read_back(format, std::vector<uint8_t>{1, 2, 0x7e, 0xfe, 0, 0x7e}, 8, &block) == KVQ_OK);
  refuse(format, {1, 2, 0x7f, 0, 0, 0}, 8, "scale");
  refuse(format, {1, 2, 0xff, 0, 0, 0}, 8, "scale");
  refuse(format, {1, 2, 0x80, 0, 0, 0}, 8, "scale");
  refuse(format, {1, 2, 0, 0, 0x81, 0}, 8, "scale");
  refuse(format, {1, 2, 0, 0x7f, 0, 0}, 8, "zero");
  refuse(format, {1, 2, 0, 0, 0, 0xff}, 8, "zero");
  REQUIRE(read_back(format, std::vector<uint8_t>{0, 0, 0, 0x80, 0, 0}, 8, &block) == KVQ_OK);
  CHECK_FALSE(std::signbit(decoded(format, block)[0]));
  const HeadFormat lloyd = format_of("lloyd(levels=16,params=e5m3,rotate=0)", keys(2));
  for (uint32_t byte = 0; byte < 256; byte++)
    REQUIRE(read_back(lloyd, std::vector<uint8_t>{0xf0, uint8_t(byte)}, 1, &block) == KVQ_OK);
}

TEST_CASE("a channel of width 0 has the scale 0") {
  // Pair 0 width 0, pair 1 width 1 (channels 1 and 3), 8 tokens.
  const HeadFormat format = format_of("channel-widths(bits=01,group=8)", keys(4));
  std::vector<uint8_t> wire(2 + 16, 0);
  Block block(std::pmr::get_default_resource());
  CHECK(read_back(format, wire, 8, &block) == KVQ_OK);
  put_half(wire, 2 + 4, 0x3c00);  // s of channel 1
  CHECK(read_back(format, wire, 8, &block) == KVQ_OK);
  put_half(wire, 2, 0x3c00);      // s of channel 0
  refuse(format, wire, 8, "width 0");
  put_half(wire, 2, 0x0001);
  refuse(format, wire, 8, "width 0");
}

TEST_CASE("kitty positions must be those of the boosted channels, ascending") {
  // 8 channels, 2 boosted, 4 tokens: 8 + 2 bytes of planes, 8 position bytes, parameters.
  const HeadFormat format = format_of("kitty(boost=1/4,group=4)", keys(8));
  const auto wire = [&](std::vector<uint8_t> positions) {
    std::vector<uint8_t> bytes(10, 0xe4);
    bytes.insert(bytes.end(), positions.begin(), positions.end());
    bytes.resize(10 + 8 + 32, 0);
    return bytes;
  };
  constexpr uint8_t no = 0xff;
  Block block(std::pmr::get_default_resource());
  REQUIRE(read_back(format, wire({no, 0, no, no, no, no, 1, no}), 4, &block) == KVQ_OK);
  CHECK(block.codes[1] == 0);           // token 0: e4 = 0 1 2 3 in both planes
  CHECK(block.codes[3 * 8 + 6] == 15);
  CHECK(block.codes[3 * 8 + 7] == 3);
  refuse(format, wire({no, 1, no, no, no, no, 0, no}), 4, "ascend");
  refuse(format, wire({no, 0, no, no, no, no, 2, no}), 4, "ascend");
  refuse(format, wire({no, 0, no, no, no, no, 0, no}), 4, "ascend");
  refuse(format, wire({no, 0, no, no, no, no, no, no}), 4, "number");
  refuse(format, wire({0, 1, 2, no, no, no, no, no}), 4, "number");
  refuse(format, wire({0, 1, 0xfe, no, no, no, no, no}), 4, "ascend");
}

TEST_CASE("random bytes are either refused or decode to finite values") {
  Random random;
  for (const Sized &row : sized()) {
    const HeadFormat format = format_of(row.text, keys(128));
    std::vector<uint8_t> wire(kvq::wire_size(format, 128));
    Block block(std::pmr::get_default_resource());
    INFO(row.text);
    for (int trial = 0; trial < 20; trial++) {
      // Scales and zeros are made legal on average, so that some blocks get through.
      for (uint8_t &byte : wire) byte = trial % 4 == 0 ? uint8_t(random.bits()) : uint8_t(random.below(4) ? 0 : random.below(64));
      if (read_back(format, wire, 128, &block) != KVQ_OK) continue;
      for (const float value : decoded(format, block)) REQUIRE(std::isfinite(value));
      REQUIRE(wire_of(format, block).size() == wire.size());
    }
  }
}
