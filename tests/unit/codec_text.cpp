// Codec texts and shapes: what parses, how it prints, and every refusal with the name of what is wrong.
#include <catch2/catch_test_macros.hpp>
#include <cstring>

#include "codec_kit.hpp"

using namespace kvq_test;
using kvq::Kind;

namespace {

Codec parsed(const std::string &text, bool allow_group_dim = false) {
  Codec codec;
  INFO(text);
  REQUIRE(kvq::parse_codec(text, allow_group_dim, &codec) == KVQ_OK);
  return codec;
}

// INVALID, and the sentence has every one of the words.
void refused(const std::string &text, std::initializer_list<const char *> words) {
  Codec codec;
  codec.levels = 77;
  INFO(text);
  REQUIRE(kvq::parse_codec(text, false, &codec) == KVQ_E_INVALID);
  REQUIRE(codec.levels == 77);
  INFO(kvq::failure_detail());
  for (const char *word : words) CHECK(std::strstr(kvq::failure_detail(), word));
}

void refused_for(const std::string &text, const HeadShape &shape, std::initializer_list<const char *> words) {
  Codec codec = parsed(text);
  INFO(text);
  REQUIRE(kvq::resolve_codec(&codec, shape) == KVQ_E_INVALID);
  INFO(kvq::failure_detail());
  for (const char *word : words) CHECK(std::strstr(kvq::failure_detail(), word));
}

}  // namespace

TEST_CASE("canonical texts print as they were read") {
  for (const char *text : {
           "raw",
           "affine-channel(levels=4,group=128)",
           "affine-channel(levels=3,group=5,midpoint=1)",
           "affine-token(levels=5,group=64,rotate=1,seed=1,center=1)",
           "lloyd(levels=256)",
           "lloyd(levels=3,scale=unbiased,rotate=0,seed=18446744073709551615,params=e5m3,center=1)",
           "pair-mix(low=1,high=3,group=64)",
           "pair-mix(low=1,high=3,group=64,mask=a50f,midpoint=1,unit=channel)",
           "width-groups(bits=12345678,scale=ls)",
           "channel-split(high=8,low=4,mask=ff00,scale=plain)",
           "kitty(boost=1/32,group=128)",
           "channel-widths(bits=0123456780,group=8,midpoint=1,params=e4m3,unit=channel)",
           "polar(radius=8,angle=16,group=32)",
           "progressive(bits=16)",
           "progressive(bits=8)",
           "progressive(bits=4)",
           "progressive(bits=2)",
       })
    CHECK(kvq::print_codec(parsed(text)) == text);
}

TEST_CASE("other spellings print canonically: order, defaults, case, leading zeros") {
  CHECK(kvq::print_codec(parsed("lloyd(center=0,scale=matched,rotate=1,seed=7743380216126661988,levels=04)")) ==
        "lloyd(levels=4,seed=7743380216126661988)");
  CHECK(kvq::print_codec(parsed("lloyd(levels=4,seed=7743501264082003300)")) == "lloyd(levels=4)");  // 0x6B76715F73656564
  CHECK(kvq::print_codec(parsed("affine-token(rotate=0,group=8,levels=4)")) == "affine-token(levels=4,group=8)");
  CHECK(kvq::print_codec(parsed("pair-mix(group=8,mask=AbC0,high=3,low=1,midpoint=0)")) ==
        "pair-mix(low=1,high=3,group=8,mask=abc0)");
  CHECK(kvq::print_codec(parsed("kitty(group=4,boost=1)")) == "kitty(boost=1/1,group=4)");
  CHECK(kvq::print_codec(parsed("affine-token(levels=4,group=D)", true)) == "affine-token(levels=4,group=D)");
}

TEST_CASE("fields have their meaning") {
  const Codec lloyd = parsed("lloyd(levels=7,scale=ls,params=e5m3,center=1)");
  CHECK(lloyd.kind == Kind::lloyd);
  CHECK(lloyd.levels == 7);
  CHECK(lloyd.rotate);
  CHECK(lloyd.center);
  CHECK(lloyd.scale == kvq::ScaleRule::ls);
  CHECK(lloyd.params == kvq::ParamType::e5m3);
  CHECK(lloyd.seed == 0x6B76715F73656564u);
  CHECK_FALSE(parsed("affine-token(levels=4,group=8)").rotate);
  const Codec mix = parsed("pair-mix(low=1,high=3,group=8,mask=05,unit=channel)");
  CHECK(mix.low == 1);
  CHECK(mix.high == 3);
  CHECK(mix.by_channel);
  CHECK(mix.has_table);
  CHECK(std::vector<uint8_t>(mix.table.begin(), mix.table.end()) == std::vector<uint8_t>{1, 0, 1, 0, 0, 0, 0, 0});
  const Codec polar = parsed("polar(radius=4,angle=8,group=2)");
  CHECK(polar.levels == 4);
  CHECK(polar.high == 8);
  CHECK(parsed("progressive(bits=16)").levels == 0);
  CHECK(parsed("progressive(bits=4)").levels == 16);
  CHECK(parsed("kitty(boost=3/7,group=4)").boost.q == 7);
  CHECK(parsed("affine-token(levels=4,group=D)", true).group == Codec::kGroupIsDim);
  CHECK_FALSE(parsed("pair-mix(low=1,high=3,group=8)").has_table);
}

TEST_CASE("malformed texts are refused with what is wrong") {
  refused("", {"unknown", "affine-channel", "progressive"});
  refused("lloid(levels=4)", {"lloid", "lloyd"});
  refused("raw()", {"key=value"});
  refused("raw(levels=4)", {"raw", "levels", "none"});
  refused("lloyd", {"levels", "missing", "256"});
  refused("lloyd()", {"key=value"});
  refused("lloyd(levels=4", {"')'"});
  refused("lloyd(levels=4)x", {"')'"});
  refused("lloyd(levels=4,)", {"key=value"});
  refused("lloyd(levels=4))", {"levels=4)"});
  refused("lloyd(levels)", {"levels", "key=value"});
  refused("lloyd(levels= 4)", {"levels= 4"});
  refused("lloyd( levels=4)", {"' levels'"});
  refused("lloyd(Levels=4)", {"Levels"});
  refused("lloyd(levels=4,levels=4)", {"levels", "twice"});
  refused("lloyd(levels=4,group=8)", {"group", "unknown", "seed"});
  refused("lloyd(scale=ls)", {"levels", "missing"});
}

TEST_CASE("values outside what is allowed are refused with what is") {
  for (const char *bad : {"0", "1", "9", "12", "512", "-4", "+4", "4.0", "0x4", "", "4294967300", "99999999999999999999"})
    refused(std::string("lloyd(levels=") + bad + ")", {"levels", "2..8, 16, 32, 64, 128 or 256"});
  refused("affine-channel(levels=4,group=0)", {"group=0", "1..65536"});
  refused("affine-channel(levels=4,group=D)", {"group=D"});
  refused("affine-token(levels=4,group=D)", {"group=D", "recipes"});
  refused("affine-channel(levels=4,group=8,midpoint=2)", {"midpoint=2", "0 or 1"});
  refused("pair-mix(low=1,high=3,group=12)", {"group=12", "multiple of 8"});
  refused("pair-mix(low=2,high=3,group=8)", {"low=2"});
  refused("pair-mix(low=1,high=4,group=8)", {"high=4"});
  refused("pair-mix(low=1,high=3,group=8,mask=)", {"mask"});
  refused("pair-mix(low=1,high=3,group=8,mask=0)", {"mask=0"});
  refused("pair-mix(low=1,high=3,group=8,mask=0g)", {"mask=0g"});
  refused("pair-mix(low=1,high=3,group=8,unit=pair)", {"unit=pair", "channel"});
  refused("channel-widths(bits=12,group=4)", {"group=4", "multiple of 8"});
  refused("channel-widths(bits=19,group=8)", {"bits=19", "0..8"});
  refused("channel-widths(bits=12,group=8,params=e5m3)", {"params=e5m3", "e4m3"});
  refused("kitty(boost=1/32,group=6)", {"group=6", "multiple of 4"});
  for (const char *bad : {"3/2", "1/0", "1/", "/2", "-1/2", "0.5", "a/b"})
    refused(std::string("kitty(boost=") + bad + ",group=8)", {"boost", "0..1"});
  refused("lloyd(levels=4,scale=rms)", {"scale=rms", "matched, plain, ls or unbiased"});
  refused("lloyd(levels=4,params=e4m3)", {"params=e4m3", "e5m3"});
  refused("lloyd(levels=4,params=fp16)", {"params=fp16"});
  refused("lloyd(levels=4,seed=18446744073709551616)", {"seed", "64 bits"});
  refused("progressive(bits=3)", {"bits=3", "16, 8, 4 or 2"});
  refused("polar(radius=4,angle=9,group=8)", {"angle=9"});
}

TEST_CASE("a long value is cut in the message") {
  refused("width-groups(bits=" + std::string(500, '9') + ")", {"9999...", "bits"});
  CHECK(std::strlen(kvq::failure_detail()) < 200);
}

TEST_CASE("what depends on the shape is refused by resolve") {
  refused_for("affine-token(levels=4,group=32)", keys(80), {"32", "80"});    // S4
  refused_for("affine-token(levels=4,group=64)", keys(96), {"64", "96"});    // S5
  refused_for("lloyd(levels=4,center=1)", values(64), {"center", "keys"});
  refused_for("affine-token(levels=4,group=64,center=1)", values(64), {"center"});
  refused_for("width-groups(bits=1234)", keys(10), {"4 entries", "10", "5"});
  refused_for("width-groups(bits=12340)", keys(10), {"entry 4", "1..8"});    // 0 is for channel-widths only
  refused_for("channel-widths(bits=1234,group=8,unit=channel)", keys(8), {"4 entries", "8"});
  refused_for("pair-mix(low=1,high=3,group=8,mask=ff)", keys(32), {"mask", "16"});        // two bytes needed
  refused_for("pair-mix(low=1,high=3,group=8,mask=ffffff)", keys(32), {"mask", "16"});
  refused_for("pair-mix(low=1,high=3,group=8,mask=20)", keys(10), {"mask", "bit 5"});     // 5 pairs: bits 5..7 unused
  refused_for("kitty(boost=1/2,group=4)", keys(512), {"256", "255"});
  Codec codec = parsed("affine-token(levels=4,group=D)", true);
  REQUIRE(kvq::resolve_codec(&codec, keys(80)) == KVQ_OK);
  CHECK(codec.group == 80);
  codec = parsed("pair-mix(low=1,high=3,group=8,mask=1f)");
  REQUIRE(kvq::resolve_codec(&codec, keys(10)) == KVQ_OK);
  CHECK(codec.table.size() == 5);
  CHECK(kvq::print_codec(codec) == "pair-mix(low=1,high=3,group=8,mask=1f)");
}

TEST_CASE("shapes that no head has are refused") {
  const auto refuse = [](HeadShape shape, const char *word) {
    REQUIRE(kvq::check_shape(shape) == KVQ_E_INVALID);
    CHECK(std::strstr(kvq::failure_detail(), word));
  };
  for (const uint32_t dim : {0u, 1u, 65u, 1026u}) refuse({dim, KVQ_TENSOR_K, KVQ_ROPE_HALF, 64, 0}, "dimension");
  refuse({64, 2, KVQ_ROPE_HALF, 64, 0}, "tensor");
  refuse({64, KVQ_TENSOR_K, 2, 64, 0}, "rope_layout");
  for (const uint32_t rotary : {0u, 3u, 66u}) refuse({64, KVQ_TENSOR_K, KVQ_ROPE_HALF, rotary, 0}, "rotary_dim");
  refuse({64, KVQ_TENSOR_K, KVQ_ROPE_HALF, 32, 31}, "rotary_first");
  refuse({64, KVQ_TENSOR_K, KVQ_ROPE_HALF, 32, 34}, "rotary_first");
  CHECK(kvq::check_shape({64, KVQ_TENSOR_K, KVQ_ROPE_HALF, 32, 32}) == KVQ_OK);
  CHECK(kvq::check_shape({64, KVQ_TENSOR_V, KVQ_ROPE_HALF, 0, 0}) == KVQ_OK);  // values have no rotary part
}

TEST_CASE("pairs number the rotary part first, then neighbours (S22)") {
  const auto pair = [](const HeadShape &shape, uint32_t p) {
    const kvq::Pair found = kvq::pair_channels(shape, p);
    return std::pair(found.u, found.v);
  };
  CHECK(pair(keys(128), 5) == std::pair(5u, 69u));
  CHECK(pair(keys(128, KVQ_ROPE_ADJACENT), 5) == std::pair(10u, 11u));
  const HeadShape part = {80, KVQ_TENSOR_K, KVQ_ROPE_HALF, 32, 0};
  CHECK(pair(part, 15) == std::pair(15u, 31u));
  CHECK(pair(part, 16) == std::pair(32u, 33u));
  CHECK(pair(part, 39) == std::pair(78u, 79u));
  const HeadShape middle = {12, KVQ_TENSOR_K, KVQ_ROPE_HALF, 4, 4};  // rotary 4..7, then 0, 1 | 2, 3 | 8, 9 | 10, 11
  CHECK(pair(middle, 0) == std::pair(4u, 6u));
  CHECK(pair(middle, 1) == std::pair(5u, 7u));
  CHECK(pair(middle, 2) == std::pair(0u, 1u));
  CHECK(pair(middle, 3) == std::pair(2u, 3u));
  CHECK(pair(middle, 4) == std::pair(8u, 9u));
  CHECK(pair(middle, 5) == std::pair(10u, 11u));
  // Values: R = D, whatever the rotary part of the keys is.
  CHECK(pair({12, KVQ_TENSOR_V, KVQ_ROPE_HALF, 4, 4}, 1) == std::pair(1u, 7u));
}

TEST_CASE("make_format wants tables and centres that fit") {
  HeadFormat format(std::pmr::get_default_resource());
  const std::vector<uint8_t> mask = {1, 0, 1, 0}, wrong = {1, 0, 2, 0};
  const std::vector<uint16_t> mu(8, 0x3c00), infinite(8, 0x7c00);
  const auto make = [&](const char *text, std::span<const uint8_t> table, std::span<const uint16_t> centre) {
    return kvq::make_format(parsed(text), keys(8), table, centre, &format);
  };
  const char *mix = "pair-mix(low=1,high=3,group=8)";
  CHECK(make(mix, {}, {}) == KVQ_E_INVALID);
  CHECK(std::strstr(kvq::failure_detail(), "mask"));
  CHECK(make("width-groups(scale=ls)", {}, {}) == KVQ_E_INVALID);
  CHECK(make(mix, wrong, {}) == KVQ_E_INVALID);
  CHECK(make(mix, std::span(mask).first(3), {}) == KVQ_E_INVALID);
  CHECK(make(mix, mask, mu) == KVQ_E_INVALID);
  CHECK(make("lloyd(levels=4)", mask, {}) == KVQ_E_INVALID);
  CHECK(make("lloyd(levels=4,center=1)", {}, {}) == KVQ_E_INVALID);
  CHECK(make("lloyd(levels=4,center=1)", {}, std::span(mu).first(7)) == KVQ_E_INVALID);
  CHECK(make("lloyd(levels=4,center=1)", {}, infinite) == KVQ_E_INVALID);
  CHECK(make("affine-token(levels=4,group=8)", {}, {}) == KVQ_OK);
  REQUIRE(make(mix, mask, {}) == KVQ_OK);
  CHECK(std::vector<uint8_t>(format.table.begin(), format.table.end()) == mask);
  CHECK(format.codec.table.empty());
}

TEST_CASE("slots and classes: which channel lies where") {
  const HeadFormat mix = format_of("pair-mix(low=1,high=3,group=8,mask=05)", keys(8));  // pairs 0 (0, 4) and 2 (2, 6) salient
  REQUIRE(mix.classes.size() == 2);
  CHECK(mix.classes[0].levels == 2);
  CHECK(mix.classes[0].count == 4);
  CHECK(mix.classes[1].levels == 8);
  CHECK(mix.classes[1].first == 4);
  CHECK(std::vector<uint32_t>(mix.channel.begin(), mix.channel.end()) == std::vector<uint32_t>{1, 5, 3, 7, 0, 4, 2, 6});

  // S23's order: widths ascending, pairs ascending, u before v; the group index is the position among the widths present.
  const HeadFormat groups = format_of("width-groups(bits=8232)", keys(8, KVQ_ROPE_ADJACENT));
  REQUIRE(groups.classes.size() == 3);
  CHECK(groups.token_params == 3);
  CHECK(std::vector<uint32_t>(groups.channel.begin(), groups.channel.end()) == std::vector<uint32_t>{2, 3, 6, 7, 4, 5, 0, 1});
  CHECK(groups.classes[0].levels == 4);
  CHECK(groups.classes[1].levels == 8);
  CHECK(groups.classes[2].levels == 256);
  CHECK(groups.classes[2].rotation == 2);

  // An empty class is absent and takes no group index.
  const HeadFormat split = format_of("channel-split(high=8,low=4,mask=ff)", keys(8));
  REQUIRE(split.classes.size() == 1);
  CHECK(split.classes[0].levels == 8);
  CHECK(split.classes[0].rotation == 0);
  CHECK(split.token_params == 1);
  CHECK(format_of("affine-token(levels=4,group=2)", keys(8)).token_params == 8);
  CHECK(format_of("progressive(bits=4)", keys(8)).token_params == 2);
  CHECK(format_of("raw", keys(8)).token_params == 0);
}

TEST_CASE("table entries and group tokens follow the codec") {
  CHECK(kvq::table_entries(parsed("pair-mix(low=1,high=3,group=8)"), keys(80)) == 40);
  CHECK(kvq::table_entries(parsed("pair-mix(low=1,high=3,group=8,unit=channel)"), keys(80)) == 80);
  CHECK(kvq::table_entries(parsed("channel-split(high=8,low=4)"), keys(80)) == 80);
  CHECK(kvq::table_entries(parsed("lloyd(levels=4)"), keys(80)) == 0);
  CHECK(kvq::group_tokens(parsed("polar(radius=4,angle=4,group=24)")) == 24);
  CHECK(kvq::group_tokens(parsed("lloyd(levels=4)")) == 1);
  CHECK(kvq::is_row(Kind::progressive));
  CHECK_FALSE(kvq::is_row(Kind::kitty));
}
