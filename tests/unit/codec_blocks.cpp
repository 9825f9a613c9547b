// Wire blocks worked out by hand, one or more for each codec of section 5, and their values.
//
// fp16 bits used below: 1 = 3c00, 2 = 4000, 4 = 4400, 5 = 4500, 0.25 = 3400, 0.5 = 3800, -1 = bc00, -3 = c200.
#include <catch2/catch_test_macros.hpp>
#include <cmath>
#include <cstring>

#include "codec/minifloat.h"
#include "codec_kit.hpp"

using namespace kvq_test;

namespace {

std::vector<float> values_of(const HeadFormat &format, std::initializer_list<float> x) {
  return decoded(format, encoded(format, std::span<const float>(x.begin(), x.size())));
}

}  // namespace

TEST_CASE("raw: fp16 as it is") {
  const HeadFormat format = format_of("raw", keys(2));
  CHECK(wire_hex(format, {1, -3, 0.25f, 65504}) == "00 3c 00 c2 00 34 ff 7b");
  CHECK(values_of(format, {1, -3, 0.25f, 65504}) == std::vector<float>{1, -3, 0.25f, 65504});
}

TEST_CASE("affine-token: codes of the block in one stream, then s and z of every group") {
  // {0, 1, 2, 3}: s = 1, z = 0, codes 0 1 2 3 = 0 + 4 + 32 + 192.
  CHECK(wire_hex(format_of("affine-token(levels=4,group=4)", values(4)), {0, 1, 2, 3}) == "e4 00 3c 00 00");
  // Groups of 2: {-3, 3} s = 2, z = -3, codes 0 3; {5, 5} s = 0, z = 5, codes 0 0: 0 + 3*4.
  const HeadFormat pairs = format_of("affine-token(levels=4,group=2)", values(4));
  CHECK(wire_hex(pairs, {-3, 3, 5, 5}) == "0c 00 40 00 c2 00 00 00 45");
  CHECK(values_of(pairs, {-3, 3, 5, 5}) == std::vector<float>{-3, 3, 5, 5});
  // Two tokens of 2 channels, 5 levels, s = 1: codes 0 4 | 4 0. Three digits 0 + 4*5 + 4*25 = 120 in 7 bits, then 0 in 3 bits.
  CHECK(wire_hex(format_of("affine-token(levels=5,group=2)", values(2)), {-3, 1, 5, 1}) == "78 00 00 3c 00 c2 00 3c 00 3c");
}

TEST_CASE("affine-token: the centre is taken away first and added last") {
  const std::vector<uint16_t> mu = {0x3c00, 0x4000};  // 1, 2
  const HeadFormat format = format_of("affine-token(levels=2,group=2,center=1)", keys(2), mu);
  // {1, 3} - {1, 2} = {0, 1}: s = 1, z = 0, codes 0 1.
  CHECK(wire_hex(format, {1, 3}) == "02 00 3c 00 00");
  CHECK(values_of(format, {1, 3}) == std::vector<float>{1, 3});
}

TEST_CASE("affine-channel: a stream for each channel, padded to a byte, then s and z of each") {
  // Channel 0: {-1, 0, 1, 1, -1}, 3 levels: s = 1, z = -1, codes 0 1 2 2 0 = 0 + 3 + 18 + 54 = 75 = 4b.
  // Channel 1: constant 2: s = 0, codes 0.
  const HeadFormat format = format_of("affine-channel(levels=3,group=5)", keys(2));
  CHECK(wire_hex(format, {-1, 2, 0, 2, 1, 2, 1, 2, -1, 2}) == "4b 00 00 3c 00 bc 00 00 00 40");
  // Two groups of one token: every range is empty.  Codes of both groups come before the parameters of both.
  CHECK(wire_hex(format_of("affine-channel(levels=4,group=1)", keys(2)), {1, 2, 4, 5}) ==
        "00 00 00 00 00 00 00 3c 00 00 00 40 00 00 00 44 00 00 00 45");
}

TEST_CASE("affine-channel: half to even, and no floor(t + 0.5) (V15)") {
  // Channel 0 from 0 to 15, s = 1: 0.5 -> 0, 1.5 -> 2, 2.5 -> 2; 4 bits each: 0 f | 0 2 | 2 5.
  // Channel 1 from 2^-24 to 30: s = hp(2) = 2, z = 2^-24; (1 - 2^-24) / 2 = 0.49999997 -> 0; 30 -> 15; 3 - 2^-24 is 3 in
  // fp32, 1.5 -> 2.
  const HeadFormat format = format_of("affine-channel(levels=16,group=6)", keys(2));
  CHECK(wire_hex(format, {0, 0x1p-24f, 15, 30, 0.5f, 1, 1.5f, 3, 2.5f, 0x1p-24f, 5, 30}) ==
        "f0 20 52 f0 20 f0 00 3c 00 00 00 40 01 00");
}

TEST_CASE("affine-channel: midpoint levels of one bit (V16)") {
  const HeadFormat format = format_of("affine-channel(levels=2,group=3,midpoint=1)", keys(2));
  // {-3, 5, 5}: s = 8/2 = 4, z = (3*-3 + 5)/4 = -1; codes 0 1 1.  {0, 1, 0.5}: s = 0.5, z = 0.25; (0.5 - 0.25)/0.5 = 0.5 -> 0.
  CHECK(wire_hex(format, {-3, 0, 5, 1, 5, 0.5f}) == "06 02 00 44 00 bc 00 38 00 34");
  CHECK(values_of(format, {-3, 0, 5, 1, 5, 0.5f}) == std::vector<float>{-1, 0.25f, 3, 0.75f, 3, 0.25f});
}

TEST_CASE("lloyd: one scalar for each token, by each scale rule") {
  // x = {3, -1, 1, 1}, 2 levels +-a, a = 0.79788458, no rotation: n = sqrt(12) = 3.4641016, sigma = n/2 = 1.7320508,
  // codes 1 0 1 1 = 0d, S = 4, P = 6.
  const auto wire = [](const char *options) {
    return wire_hex(format_of(std::string("lloyd(levels=2,rotate=0") + options + ")", values(4)), {3, -1, 1, 1});
  };
  CHECK(wire("") == "0d 57 40");                  // n/(2a) = 2.1708038; steps of 1/512: 1111.45 -> 1111 = 4057
  CHECK(wire(",scale=plain") == "0d ee 3e");      // 1.7320508: 1773.6/1024 -> 1774 = 3eee
  CHECK(wire(",scale=ls") == "0d 85 3f");         // 6/(4a) = 1.8799712: 1925.1/1024 -> 1925 = 3f85
  CHECK(wire(",scale=unbiased") == "0d 03 41");   // 12/(6a) = 2.5066283: 1283.4/512 -> 1283 = 4103
  // e5m3 of 2.1708038 = (1 + m/8) * 2^(e - 20): e = 21, m = 0.68 -> 1; 21*8 + 1 = a9, which is 2.25.
  CHECK(wire(",params=e5m3") == "0d a9");

  const std::vector<float> decoded = values_of(format_of("lloyd(levels=2,rotate=0)", values(4)), {3, -1, 1, 1});
  const float level = float(half_value(0x4057)) * 0x1.988454p-1f;
  CHECK(decoded == std::vector<float>{level, -level, level, level});
}

TEST_CASE("lloyd: tokens follow each other in one stream of codes, then their scalars") {
  // 3 levels, 2 channels, no rotation; T = +-0.612 sigma.  {1, 1}: sigma 1, codes 2 2; {1, 0}: sigma 0.707, codes 2 1;
  // {-1, 1}: codes 0 2.  Digits 2 2 2 1 0 = 2 + 6 + 18 + 27 = 53 in 8 bits, then 2 in 2 bits.
  // h = n/(a sqrt(S)), a = 1.2240064: sqrt(2)/(a sqrt(2)) = 1/a = 0.8169892 -> 1673.2/2048 -> 1673 = 3a89; so for all three rows.
  CHECK(wire_hex(format_of("lloyd(levels=3,rotate=0)", keys(2)), {1, 1, 1, 0, -1, 1}) == "35 02 89 3a 89 3a 89 3a");
}

TEST_CASE("pair-mix: a plane of low bits, a plane of upper bits, then s and z of every channel") {
  // Pairs (0, 2) and (1, 3), of which the second is salient.
  // Channel 0, one bit at bin middles: -3 or 5 (tokens 1, 3, 4, 5): s = 4, z = -1; bits 0011 1010 = 3a.  Channel 2: 0.
  // Channel 1: 0..7, s = 1, z = 0: low bits 1010 1010 = aa; code >> 1 = 0 0 1 1 | 2 2 3 3 = 50 fa.
  // Channel 3: 7..0: low bits 55; code >> 1 = 3 3 2 2 | 1 1 0 0 = af 05.
  const HeadFormat format = format_of("pair-mix(low=1,high=3,group=8,mask=02,midpoint=1)", keys(4));
  const std::initializer_list<float> x = {-3, 0, 0, 7, 5, 1, 0, 6, -3, 2, 0, 5, 5, 3, 0, 4,
                                          5, 4, 0, 3, 5, 5, 0, 2, -3, 6, 0, 1, -3, 7, 0, 0};
  CHECK(wire_hex(format, x) ==
        "3a aa 00 55 50 fa af 05 "
        "00 44 00 bc 00 3c 00 00 00 00 00 00 00 3c 00 00");
  CHECK(values_of(format, x) ==
        std::vector<float>{-1, 0, 0, 7, 3, 1, 0, 6, -1, 2, 0, 5, 3, 3, 0, 4, 3, 4, 0, 3, 3, 5, 0, 2, -1, 6, 0, 1, -1, 7, 0, 0});
}

TEST_CASE("pair-mix: flipping one stored bit changes one token of one channel (V25)") {
  Random random;
  const HeadFormat format = format_of("pair-mix(low=1,high=3,group=16,mask=a5,midpoint=1)", keys(16));
  const std::vector<uint16_t> x = halves(random.normals(16 * 16));
  std::vector<uint8_t> wire = wire_of(format, encoded(format, x));
  Block block(std::pmr::get_default_resource());
  REQUIRE(read_back(format, wire, 16, &block) == KVQ_OK);
  const std::vector<float> before = decoded(format, block);
  const size_t planes = 16 * 2 + 8 * 4;  // 16 channels of 16 bits, 8 salient ones of 32
  for (size_t bit = 0; bit < planes * 8; bit++) {
    wire[bit / 8] ^= uint8_t(1u << bit % 8);
    REQUIRE(read_back(format, wire, 16, &block) == KVQ_OK);
    const std::vector<float> after = decoded(format, block);
    size_t changed = 0, where = 0;
    for (size_t i = 0; i < before.size(); i++)
      if (before[i] != after[i]) changed++, where = i;
    REQUIRE(changed == 1);
    if (bit < 256) REQUIRE(where == bit % 16 * 16 + bit / 16);  // low plane: channel bit / 16, token bit mod 16
    wire[bit / 8] ^= uint8_t(1u << bit % 8);
  }
}

TEST_CASE("pair-mix: only the pairs of the mask have the error of 3 bits (S21)") {
  Random random;
  const std::vector<uint16_t> x = halves(random.normals(128 * 128));
  std::vector<uint8_t> mask(64, 0);
  mask[5] = 1;
  for (const uint32_t layout : {KVQ_ROPE_HALF, KVQ_ROPE_ADJACENT}) {
    Codec codec;
    HeadFormat format(std::pmr::get_default_resource());
    REQUIRE(kvq::parse_codec("pair-mix(low=1,high=3,group=128,midpoint=1)", false, &codec) == KVQ_OK);
    REQUIRE(kvq::make_format(codec, keys(128, layout), mask, {}, &format) == KVQ_OK);
    const std::vector<float> out = decoded(format, encoded(format, x));
    for (uint32_t c = 0; c < 128; c++) {
      double error = 0;
      for (uint32_t t = 0; t < 128; t++) error += std::pow(half_value(x[t * 128 + c]) - out[t * 128 + c], 2) / 128;
      const bool salient = layout == KVQ_ROPE_HALF ? c == 5 || c == 69 : c == 10 || c == 11;
      INFO(layout << " " << c);
      CHECK((salient ? error < 0.12 : error > 0.3));
    }
  }
}

TEST_CASE("width-groups: a stream for each width, ascending, then its scalars token by token") {
  // Neighbours pair up: channels 0, 1 have 2 bits, channels 2, 3 have 1 bit; no rotation.
  // Width 1, {1, -1} and {-2, 2}: codes 1 0 | 0 1 = 09.  h = 1/a = 1.2533141 = 3d03, then 2/a = 4103.
  // Width 2, {3, 0.5}: n = 3.0413813, T = .98172 n/sqrt(2) = 2.11128: codes 3 2; {-3, -0.5}: 0 1: 3 + 8 + 0 + 64 = 4b.
  // h = n/(a sqrt(90^2 + 27^2)) = 3.0413813/1.5768528 = 1.9287668 -> 1975/1024 = 3fb7.
  const HeadFormat format = format_of("width-groups(bits=21,rotate=0)", keys(4, KVQ_ROPE_ADJACENT));
  CHECK(wire_hex(format, {3, 0.5f, 1, -1, -3, -0.5f, -2, 2}) == "09 4b 03 3d b7 3f 03 41 b7 3f");
}

TEST_CASE("channel-split: low class, then high class; an absent class has nothing") {
  // Channels 1, 3 low (2 levels): {1, -1}: codes 1 0 = 01, h = 1/a = 3d03.
  // Channels 0, 2 high (3 levels): {5, 0.1}: n = 5.001, T = .612 n/sqrt(2) = 2.164: codes 2 1 = 2 + 3 in 4 bits = 05;
  // S = 1: h = 5.001/1.2240064 = 4.0857 -> 1046/256 = 4416.
  CHECK(wire_hex(format_of("channel-split(high=3,low=2,mask=05,rotate=0)", keys(4)), {5, 1, 0.1f, -1}) == "01 05 03 3d 16 44");
  CHECK(wire_hex(format_of("channel-split(high=3,low=2,mask=00,rotate=0)", keys(4)), {1, 1, -1, -1}) == "03 03 3d");
}

TEST_CASE("kitty: two planes, position bytes, then s and z") {
  // 1 of 4 channels is boosted: channel 2, {0, 15, 5, 10}, s = 1: codes 0 f 5 a, low bits 0 3 1 2 = 9c, high bits the same.
  // Channel 0 {0, 3, 1, 2}: s = 1: 9c.  Channel 1 constant 1: 00.  Channel 3 {-3, 0, -1, -2}: s = 1, z = -3: codes 0 3 2 1 = 6c.
  const HeadFormat format = format_of("kitty(boost=1/4,group=4)", keys(4));
  CHECK(wire_hex(format, {0, 1, 0, -3, 3, 1, 15, 0, 1, 1, 5, -1, 2, 1, 10, -2}) ==
        "9c 00 9c 6c 9c ff ff 00 ff "
        "00 3c 00 00 00 00 00 3c 00 3c 00 00 00 3c 00 c2");
}

TEST_CASE("kitty: the count, ties to lower channels, and a choice of its own in every group (V38)") {
  // Equal sums everywhere: the lower channels.
  std::vector<uint16_t> equal(8 * 80, 0x3c00);
  const HeadFormat format = format_of("kitty(boost=1/32,group=4)", keys(80));
  Block block = encoded(format, equal);
  for (uint32_t g = 0; g < 2; g++)
    for (uint32_t c = 0; c < 80; c++) CHECK(block.boosted[g * 80 + c] == (c < 2 ? c : 0xff));  // floor(80/32) = 2
  // Group 0 is loud in channels 40 and 7, group 1 in 79 and 8; sign does not matter.
  equal[0 * 80 + 40] = 0xc400, equal[3 * 80 + 7] = 0x4200;
  equal[4 * 80 + 79] = 0x4400, equal[7 * 80 + 8] = 0xc200;
  block = encoded(format, equal);
  for (uint32_t c = 0; c < 80; c++) {
    CHECK(block.boosted[c] == (c == 7 ? 0 : c == 40 ? 1
                                                    : 0xff));
    CHECK(block.boosted[80 + c] == (c == 8 ? 0 : c == 79 ? 1
                                                         : 0xff));
  }
  const HeadFormat four = format_of("kitty(boost=1/32,group=4)", keys(128));
  Random random;
  uint32_t boosted = 0;
  for (const uint8_t position : encoded(four, halves(random.normals(4 * 128))).boosted) boosted += position != 0xff;
  CHECK(boosted == 4);
}

TEST_CASE("channel-widths: runs of each channel's width; width 0 has a zero only") {
  // 8 tokens, midpoint, unit=channel, widths 0 1 3 2.
  // Channel 0: 1..8: s = 0, z = hp(9/2) = 4480.
  // Channel 1: 0 1 0 1...: s = 1/2, z = 1/4: (0 - .25)/.5 = -.5 -> 0, 1.5 -> clamped to 1: aa.
  // Channel 2: 0 8 1 2 3 4 5 6: s = 8/8, z = (15*0 + 8)/16 = .5: -.5 7.5 .5 1.5 2.5 3.5 4.5 5.5 -> 0 7 0 2 2 4 4 6:
  //   7*8 + 2*512 + 2*4096 + 4*32768 + 4*262144 + 6*2097152 = d22438.
  // Channel 3: 0 4 1 2 3 0 4 0: s = 4/4, z = .5: -.5 3.5 .5 1.5 2.5 -.5 3.5 -.5 -> 0 3 0 2 | 2 0 3 0 = 8c 32.
  const HeadFormat format = format_of("channel-widths(bits=0132,group=8,midpoint=1,unit=channel)", keys(4));
  CHECK(wire_hex(format, {1, 0, 0, 0, 2, 1, 8, 4, 3, 0, 1, 1, 4, 1, 2, 2, 5, 0, 3, 3, 6, 1, 4, 0, 7, 0, 5, 4, 8, 1, 6, 0}) ==
        "aa 38 24 d2 8c 32 "
        "00 00 80 44 00 38 00 34 00 3c 00 38 00 3c 00 38");
}

TEST_CASE("channel-widths: e4m3 parameters, straight from fp32, and codes against them (V39)") {
  // One pair of 1-bit channels without midpoint, 8 tokens.
  // Channel 0: 918 and 924: s = e4m3(6) = 2^2 * 1.5 = 4c; z = e4m3(918) saturates at 448 = 7e.  Codes: (918 - 448)/6 -> 1, all 1.
  // Channel 1: -5000 and 5000: s = e4m3(10000) = 448 = 7e, z = -448 = fe: (-5000 + 448)/448 -> 0; (5000 + 448)/448 -> 1.
  const HeadFormat format = format_of("channel-widths(bits=1,group=8,params=e4m3)", keys(2));
  const std::initializer_list<float> x = {918, -5000, 924, 5000, 918, -5000, 924, 5000,
                                          918, 5000, 924, 5000, 918, 5000, 924, -5000};
  CHECK(wire_hex(format, x) == "ff 7a 4c 7e 7e fe");
  const std::vector<float> out = values_of(format, x);
  CHECK(out[0] == 454);
  CHECK(out[1] == -448);
  CHECK(out[3] == 0);
}

TEST_CASE("polar: radii, then angles, each an affine column") {
  // (3, 4) and (-3, 4): rho = 5 twice: s = 0, z = 5.  theta = .9272952 -> 1899/2048 = 3b6b, 2.2142974 -> 1134/512 = 2.21484375;
  // s = hp(1.28759765625): 1318.5/1024, a tie -> 1318 = 3d26; codes 0 1 = 02.
  const HeadFormat format = format_of("polar(radius=2,angle=2,group=2)", keys(2));
  CHECK(wire_hex(format, {3, 4, -3, 4}) == "00 02 00 00 00 45 26 3d 6b 3b");
  const std::vector<float> out = values_of(format, {3, 4, -3, 4});
  CHECK(std::fabs(out[0] - 3) < 0.01);
  CHECK(std::fabs(out[1] - 4) < 0.01);
  CHECK(std::fabs(out[2] + 3) < 0.01);
  CHECK(std::fabs(out[3] - 4) < 0.01);
}

TEST_CASE("progressive: the chain 8 -> 4 -> 2 bits") {
  // {0, 255}: s = 1.  4 bits: (2*255 + 17) div 34 = 15, s = 17 = 4c40.  2 bits: (2*15 + 5) div 10 = 3, s = 85 = 5550.
  CHECK(wire_hex(format_of("progressive(bits=16)", values(2)), {0, 255}) == "00 00 f8 5b");
  CHECK(wire_hex(format_of("progressive(bits=8)", values(2)), {0, 255}) == "00 ff 00 3c 00 00");
  CHECK(wire_hex(format_of("progressive(bits=4)", values(2)), {0, 255}) == "f0 40 4c 00 00");
  CHECK(wire_hex(format_of("progressive(bits=2)", values(2)), {0, 255}) == "0c 50 55 00 00");
}

TEST_CASE("e4m3 and e5m3 round to the nearest of their values, ties to even, and saturate") {
  struct Type {
    uint32_t codes;  // 0..codes - 1 are finite and not negative
    int bias;
    uint8_t (*store)(float);
    float (*load)(uint8_t);
  };
  for (const Type &type :
       {Type{0x7f, 7, kvq::float_to_e4m3, kvq::e4m3_to_float}, Type{0x100, 20, kvq::float_to_e5m3, kvq::e5m3_to_float}}) {
    const auto value = [&](uint32_t code) {
      const int e = int(code / 8), m = int(code % 8);
      return e ? std::ldexp(8 + m, e - type.bias - 3) : std::ldexp(m, 1 - type.bias - 3);
    };
    for (uint32_t code = 0; code < type.codes; code++) {
      REQUIRE(type.load(uint8_t(code)) == value(code));
      REQUIRE(type.store(float(value(code))) == code);
      if (code + 1 == type.codes) continue;
      const float middle = float((value(code) + value(code + 1)) / 2);
      REQUIRE(type.store(middle) == code + code % 2);
      REQUIRE(type.store(std::nextafter(middle, 0.0f)) == code);
      REQUIRE(type.store(std::nextafter(middle, 1e9f)) == code + 1);
    }
    REQUIRE(type.store(1e6f) == type.codes - 1);
  }
  CHECK(kvq::e4m3_to_float(0x7e) == 448);
  CHECK(kvq::e5m3_to_float(0xff) == 3840);
  CHECK(kvq::float_to_e4m3(-448) == 0xfe);
  CHECK(kvq::e4m3_to_float(0xfe) == -448);
  CHECK(kvq::float_to_e4m3(-1e-9f) == 0);  // never -0
}
