// Recipe texts: presets, what is derived for a geometry, the canonical form, and every refusal that needs nothing else.
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <string>
#include <vector>

#include "recipe/recipe.h"
#include "recipe_kit.hpp"

using namespace kvq;
using Catch::Matchers::ContainsSubstring;
using kvq_test::layer;
using kvq_test::parsed;
using kvq_test::refusal;

namespace {

const std::vector<LayerShape> k128 = {layer(128)};

std::string canonical(std::string_view text, const std::vector<LayerShape> &layers = k128) {
  return std::string(parsed(text, layers).text);
}

}  // namespace

TEST_CASE("every preset parses, and its canonical text parses to itself") {
  const std::vector<std::vector<LayerShape>> geometries = {
      {layer(128)}, {layer(64)}, {layer(80)}, {layer(96, 64)}, {layer(192, 128)}, {layer(2)}, {layer(1024)}, {layer(64), layer(80, 128), layer(576, 512)}};
  for (uint32_t i = 0; preset_name(i); i++)
    for (const auto &layers : geometries) {
      INFO("preset " << preset_name(i) << ", dim_k " << layers[0].dim_k);
      const std::string text = canonical(preset_name(i), layers);
      CHECK(canonical(text, layers) == text);
    }
}

TEST_CASE("the presets are those of section 8") {
  std::vector<std::string> names;
  for (uint32_t i = 0; preset_name(i); i++) names.push_back(preset_name(i));
  CHECK(names == std::vector<std::string>{"fp16", "kivi-2", "kivi-2-g32", "polar-2", "chanmix", "kitty", "pnmix", "pnmix-g64", "tq-2", "tq-3",
                                          "tq-4", "tq-1.585", "tq-2.322", "tq-2.585", "tq-split", "semkv", "semkv-tq", "semkv-tq-2",
                                          "blockgtq-k3v3", "blockgtq-k3v2", "blockgtq-k2v2", "blockgtq-k3v3-fast",
                                          "blockgtq-k2v2-fast", "pmkvq", "kvq-2", "kvq-2.5", "kvq-3", "tq-2c", "tq-3c"});
}

TEST_CASE("a canonical text holds every field, resolved for the geometry") {
  CHECK(canonical("kvq-2") ==
        "k=channel-widths(group=128,midpoint=1);v=lloyd(levels=3,params=e5m3);sinks=32;recent=32;block=128;"
        "policy=pair-widths(avg=2,bmin=1,bmax=4,score=q-var,unit=8)");
  CHECK(canonical("kivi-2", {layer(80)}) ==
        "k=affine-channel(levels=4,group=128);v=affine-token(levels=4,group=80);sinks=0;recent=0;block=128;policy=uniform");
  CHECK(canonical("semkv", {layer(64, 64)}) ==
        "sinks=0;recent=0;block=64;policy=semkv(r=1/4,low=affine-token(levels=5,group=64,rotate=1),"
        "high=affine-token(levels=6,group=64,rotate=1))");
}

TEST_CASE("what layers of different dimensions resolve differently stays symbolic") {
  const std::vector<LayerShape> layers = {layer(128), layer(64, 160)};
  CHECK(canonical("kivi-2", layers) ==
        "k=affine-channel(levels=4,group=128);v=affine-token(levels=4,group=fit128);sinks=0;recent=0;block=128;policy=uniform");
  CHECK(canonical("k=raw;v=affine-token(levels=4,group=D)", layers) ==
        "k=raw;v=affine-token(levels=4,group=D);sinks=0;recent=0;block=64;policy=uniform");
  CHECK_THAT(canonical("kvq-3", layers), ContainsSubstring("unit=fit16"));
  CHECK_THAT(canonical("semkv", layers), ContainsSubstring("group=D"));
}

TEST_CASE("the same recipe has the same text however it is written") {
  CHECK(canonical("policy=uniform;v=raw;k=raw") == canonical("fp16"));
  CHECK(canonical("k=lloyd(levels=4);v=affine-token(levels=4,group=128)") == canonical("k=lloyd(levels=4)"));
  CHECK(canonical("k=pair-mix(low=1,high=3,group=64);policy=pnmix(r=2/4)") ==
        canonical("policy=pnmix(criterion=qk-pair,r=1/2);k=pair-mix(low=1,high=3,group=64)"));
}

TEST_CASE("fields after a preset replace its own") {
  CHECK(canonical("kvq-2;sinks=4") == canonical("k=channel-widths(group=128,midpoint=1);v=lloyd(levels=3,params=e5m3);sinks=4;"
                                                "recent=32;block=128;policy=pair-widths(avg=2,bmax=4,unit=8)"));
  CHECK(canonical("tq-2;k=raw;recent=7;block=5") == "k=raw;v=lloyd(levels=4);sinks=0;recent=7;block=5;policy=uniform");
}

TEST_CASE("groups that do not divide the dimension become the largest divisor below them") {
  const auto group = [](std::string_view text, uint32_t dim) { return parsed(text, {layer(dim)}).layers[0].v[0].group; };
  CHECK(group("kivi-2", 128) == 128);
  CHECK(group("kivi-2", 256) == 128);
  CHECK(group("kivi-2", 192) == 96);
  CHECK(group("kivi-2", 320) == 80);
  CHECK(group("kivi-2", 576) == 96);
  CHECK(group("kivi-2", 80) == 80);
  CHECK(group("kivi-2-g32", 80) == 20);
  CHECK(group("kivi-2-g32", 128) == 32);
}

TEST_CASE("the unit of the width presets is the largest divisor of D/2 up to D/16") {
  const auto unit = [](uint32_t dim) { return parsed("kvq-3", {layer(dim)}).layers[0].unit; };
  CHECK(unit(128) == 8);
  CHECK(unit(64) == 4);
  CHECK(unit(80) == 5);
  CHECK(unit(72) == 4);    // 36 pairs, 4.5 allowed
  CHECK(unit(112) == 7);
  CHECK(unit(92) == 2);    // 46 pairs: divisors 1, 2, 23
  CHECK(unit(8) == 1);
}

TEST_CASE("pages hold 64 tokens, or the next multiple of the groups") {
  const auto page = [](std::string_view text) { return parsed(text, k128).page_tokens; };
  CHECK(page("tq-2") == 64);
  CHECK(page("kivi-2-g32") == 64);
  CHECK(page("pnmix-g64") == 64);
  CHECK(page("kvq-3") == 128);
  CHECK(page("k=affine-channel(levels=4,group=96);block=96") == 96);
  CHECK(page("k=affine-channel(levels=4,group=24);block=24") == 72);
  CHECK(page("k=affine-channel(levels=4,group=256);block=256") == 256);
}

TEST_CASE("the block is 64 for row codecs and the common group for the others unless given") {
  CHECK(parsed("k=raw", k128).block == 64);
  CHECK(parsed("k=affine-channel(levels=4,group=32)", k128).block == 32);
  CHECK(parsed("k=affine-channel(levels=4,group=32);v=affine-channel(levels=4,group=48)", k128).block == 96);
}

TEST_CASE("a mask or list in the text leaves the policy nothing to decide") {
  const std::string text = "k=pair-mix(low=1,high=3,group=64,mask=0f);v=raw;policy=pnmix(r=1/2)";
  const Recipe recipe = parsed(text, {layer(16)});
  CHECK(recipe.policy.kind == PolicyKind::uniform);
  CHECK(policy_owner(recipe.policy) == Owner::nobody);
  CHECK(recipe.layers[0].k[0].table == std::pmr::vector<uint8_t>{1, 1, 1, 1, 0, 0, 0, 0});
  CHECK(recipe.text == "k=pair-mix(low=1,high=3,group=64,mask=0f);v=raw;sinks=0;recent=0;block=64;policy=uniform");
  CHECK(parsed("k=pair-mix(low=1,high=3,group=64,unit=channel,mask=0f0f);v=raw;policy=pnmix(r=1/2)", {layer(16)}).classes == 1);
  CHECK_THAT(refusal("k=channel-widths(group=64,bits=12341234);policy=pair-widths(avg=2,unit=3)", {layer(16)}), ContainsSubstring("unit=3"));
  CHECK_THAT(refusal("k=width-groups(bits=12341234);policy=blockgtq(avg=2,bmin=0)", {layer(16)}), ContainsSubstring("bmin=0"));
  CHECK(parsed("k=channel-split(high=8,low=4,mask=ffff);v=channel-split(high=8,low=4);policy=channel-split", {layer(16)}).policy.kind ==
        PolicyKind::channel_split);
}

TEST_CASE("semkv has two page classes, one codec each for K and V") {
  const Recipe recipe = parsed("semkv", {layer(192, 128)});
  CHECK(recipe.classes == 2);
  CHECK(recipe.block == 64);
  const LayerCodecs &codecs = recipe.layers[0];
  CHECK(codecs.k[0].levels == 5);
  CHECK(codecs.k[1].levels == 6);
  CHECK(codecs.k[1].group == 192);
  CHECK(codecs.v[1].group == 128);
  CHECK(codecs.v[0].rotate);
}

TEST_CASE("broken texts are refused, and the message names the fault") {
  CHECK_THAT(refusal("", k128), ContainsSubstring("neither a preset"));
  CHECK_THAT(refusal("kvq-9", k128), ContainsSubstring("kvq-9"));
  CHECK_THAT(refusal("kvq-2;", k128), ContainsSubstring("field=value"));
  CHECK_THAT(refusal("sinks=4;kvq-2", k128), ContainsSubstring("kvq-2"));
  CHECK_THAT(refusal("v=raw", k128), ContainsSubstring("k is missing"));
  CHECK_THAT(refusal("k=raw;k=raw", k128), ContainsSubstring("twice"));
  CHECK_THAT(refusal("kvq-2;sinks=4;sinks=4", k128), ContainsSubstring("sinks is given twice"));
  CHECK_THAT(refusal("k=raw;w=raw", k128), ContainsSubstring("'w'"));
  CHECK_THAT(refusal("k=", k128), ContainsSubstring("field=value"));
  CHECK_THAT(refusal("k=raw;sinks=-1", k128), ContainsSubstring("sinks=-1"));
  CHECK_THAT(refusal("k=raw;recent=4294967296", k128), ContainsSubstring("recent=4294967296"));
  CHECK_THAT(refusal("k=raw;block=0", k128), ContainsSubstring("block=0"));
  CHECK_THAT(refusal("k=raw;block=1/2", k128), ContainsSubstring("block=1/2"));
  CHECK_THAT(refusal("k=raw;policy=magic", k128), ContainsSubstring("magic"));
  CHECK_THAT(refusal("k=raw;policy=uniform(r=1/2)", k128), ContainsSubstring("does not take the key r"));
  CHECK_THAT(refusal("k=lloyd(levels=9)", k128), ContainsSubstring("layer 0, k"));
  CHECK_THAT(refusal("k=affine-channel(levels=4,group=fit128)", k128), ContainsSubstring("group"));
  CHECK_THAT(refusal("k=raw;v=affine-token(levels=4,group=fit)", k128), ContainsSubstring("group=fit"));
  CHECK_THAT(refusal("k=raw", {}), ContainsSubstring("n_layers"));
}

TEST_CASE("policy keys are checked") {
  const auto pnmix = [](std::string_view keys) {
    return refusal("k=pair-mix(low=1,high=3,group=64);policy=pnmix" + std::string(keys), k128);
  };
  CHECK_THAT(pnmix(""), ContainsSubstring("needs the key r"));
  CHECK_THAT(pnmix("()"), ContainsSubstring("key=value"));
  CHECK_THAT(pnmix("("), ContainsSubstring("parenthesis"));
  CHECK_THAT(pnmix("(r=1/2"), ContainsSubstring("parenthesis"));
  CHECK_THAT(pnmix("(r=1/2)x"), ContainsSubstring("parenthesis"));
  CHECK_THAT(pnmix("(r=3/2)"), ContainsSubstring("above 1"));
  CHECK_THAT(pnmix("(r=1/0)"), ContainsSubstring("r=0"));
  CHECK_THAT(pnmix("(r=0.5)"), ContainsSubstring("r=0.5"));
  CHECK_THAT(pnmix("(r=1/2,r=1/2)"), ContainsSubstring("twice"));
  CHECK_THAT(pnmix("(r=1/2,criterion=best)"), ContainsSubstring("qk-pair, k-pair, k-range, k-magnitude"));
  CHECK_THAT(pnmix("(r=1/2,avg=2)"), ContainsSubstring("avg"));
}

TEST_CASE("width budgets that cannot be met are refused") {
  const auto widths = [](std::string_view codec, std::string_view policy, uint32_t dim = 128) {
    return refusal("k=" + std::string(codec) + ";policy=" + std::string(policy), {layer(dim)});
  };
  const std::string columns = "channel-widths(group=128)";
  CHECK_THAT(widths(columns, "pair-widths"), ContainsSubstring("needs the key avg"));
  CHECK_THAT(widths(columns, "pair-widths(avg=2,bmin=3)"), ContainsSubstring("bmin=3"));
  CHECK_THAT(widths(columns, "pair-widths(avg=127/64,bmin=2)"), ContainsSubstring("127 bits to 64 pairs"));
  CHECK_THAT(widths(columns, "pair-widths(avg=2,bmin=5,bmax=4)"), ContainsSubstring("above bmax=4"));
  CHECK_THAT(widths(columns, "pair-widths(avg=2,bmax=9)"), ContainsSubstring("bmax=9"));
  CHECK_THAT(widths(columns, "pair-widths(avg=2,unit=3)"), ContainsSubstring("unit=3 does not divide the 64 pairs"));
  CHECK_THAT(widths(columns, "pair-widths(avg=2,unit=0)"), ContainsSubstring("unit=0"));
  CHECK_THAT(widths(columns, "pair-widths(avg=2,score=x)"), ContainsSubstring("score=x"));
  CHECK_THAT(widths("width-groups", "blockgtq(avg=2,bmin=0)"), ContainsSubstring("bmin=0"));
  // Exactly the least budget is enough, 128 bits for 64 pairs; of 63/64 pairs the floor counts.
  CHECK(parsed("k=" + columns + ";policy=pair-widths(avg=2,bmin=2)", k128).policy.bmin == 2);
  CHECK(parsed("k=" + columns + ";policy=pair-widths(avg=0,bmin=0)", k128).policy.bmin == 0);
}

TEST_CASE("codecs and policies that do not belong together are refused") {
  // A codec with a table that nobody fills.
  CHECK_THAT(refusal("k=pair-mix(low=1,high=3,group=64)", k128), ContainsSubstring("policy uniform does not fill"));
  CHECK_THAT(refusal("k=width-groups;policy=uniform", k128), ContainsSubstring("uniform"));
  CHECK_THAT(refusal("k=channel-widths(group=64);policy=blockgtq(avg=2)", k128), ContainsSubstring("blockgtq does not fill"));
  CHECK_THAT(refusal("k=width-groups;policy=pair-widths(avg=2)", k128), ContainsSubstring("pair-widths does not fill"));
  CHECK_THAT(refusal("k=pair-mix(low=1,high=3,group=64);v=pair-mix(low=1,high=3,group=64);policy=pnmix(r=1/2)", k128),
             ContainsSubstring("layer 0, v"));
  CHECK_THAT(refusal("k=raw;v=width-groups;policy=blockgtq(avg=2)", k128), ContainsSubstring("layer 0, v"));
  // A policy without a table to fill.
  CHECK_THAT(refusal("k=raw;policy=pnmix(r=1/2)", k128), ContainsSubstring("decides nothing"));
  CHECK_THAT(refusal("k=lloyd(levels=4);policy=blockgtq(avg=2)", k128), ContainsSubstring("decides nothing"));
  CHECK_THAT(refusal("k=lloyd(levels=4);policy=channel-split", k128), ContainsSubstring("decides nothing"));
  // Units of codec and policy.
  CHECK_THAT(refusal("k=channel-widths(group=64,unit=channel);policy=pair-widths(avg=2)", k128), ContainsSubstring("unit=channel"));
  CHECK_THAT(refusal("k=pair-mix(low=1,high=3,group=64,unit=channel);policy=pnmix(r=1/2)", k128), ContainsSubstring("criterion"));
  CHECK_THAT(refusal("k=pair-mix(low=1,high=3,group=64);policy=pnmix(r=1/2,criterion=k-range)", k128), ContainsSubstring("unit=channel"));
  CHECK(parsed("k=pair-mix(low=1,high=3,group=64,unit=channel);policy=pnmix(r=1/2,criterion=k-range)", k128).classes == 1);
  // Centres are for keys.
  CHECK_THAT(refusal("k=raw;v=lloyd(levels=4,center=1)", k128), ContainsSubstring("layer 0, v"));
}

TEST_CASE("semkv is refused with a recent window, other codecs, or codecs of its own") {
  CHECK_THAT(refusal("semkv;recent=1", k128), ContainsSubstring("recent=1"));
  CHECK_THAT(refusal("semkv;k=raw", k128), ContainsSubstring("low= and high="));
  CHECK_THAT(refusal("policy=semkv(r=1/4,low=lloyd(levels=4))", k128), ContainsSubstring("needs the key high"));
  CHECK_THAT(refusal("policy=semkv(r=1/4,low=lloyd(levels=4,center=1),high=lloyd(levels=8))", k128), ContainsSubstring("center"));
  CHECK_THAT(refusal("policy=semkv(r=1/4,low=affine-token(levels=4,group=48),high=lloyd(levels=8))", k128), ContainsSubstring("48"));
}

TEST_CASE("blocks hold whole groups") {
  CHECK_THAT(refusal("k=affine-channel(levels=4,group=32);block=48", k128), ContainsSubstring("block=48"));
  CHECK_THAT(refusal("kvq-2;block=64", k128), ContainsSubstring("multiple of the 128"));
  CHECK_THAT(refusal("k=affine-channel(levels=4,group=65536);v=affine-channel(levels=4,group=65535)", k128),
             ContainsSubstring("common multiple"));
}

TEST_CASE("codecs that do not fit a dimension are refused for the layer that has it") {
  CHECK_THAT(refusal("k=raw;v=affine-token(levels=4,group=32)", {layer(80)}), ContainsSubstring("80"));  // S4
  CHECK_THAT(refusal("k=raw;v=affine-token(levels=4,group=64)", {layer(128), layer(96)}), ContainsSubstring("layer 1, v"));  // S5
  CHECK(parsed("k=raw;v=affine-token(levels=4,group=16)", {layer(80)}).layers[0].v[0].group == 16);
}

TEST_CASE("token classes over codecs that they do not allow are unsupported, and why") {
  const auto unsupported = [](const std::string &high) {
    Recipe recipe(std::pmr::get_default_resource());
    const std::string text = "policy=semkv(r=1/4,low=lloyd(levels=4),high=" + high + ")";
    CHECK(parse_recipe(text, k128, &recipe) == KVQ_E_UNSUPPORTED);
    return std::string(failure_detail());
  };
  CHECK_THAT(unsupported("pair-mix(low=1,high=3,group=64)"), ContainsSubstring("packs 64 neighbours together"));
  CHECK_THAT(unsupported("affine-channel(levels=4,group=32)"), ContainsSubstring("packs 32 neighbours together"));
  CHECK_THAT(unsupported("width-groups"), ContainsSubstring("only policy is semkv"));
  CHECK_THAT(unsupported("raw"), ContainsSubstring("affine-token or lloyd"));
}

TEST_CASE("chanmix, pmkvq and drop-tokens as texts") {
  CHECK(canonical("chanmix") ==
        "k=channel-widths(group=128,params=e4m3,unit=channel);v=affine-token(levels=4,group=128);sinks=0;recent=0;block=128;policy=chanmix");
  CHECK(canonical("pmkvq") == "k=progressive(bits=16);v=progressive(bits=16);sinks=0;recent=0;block=64;policy=pmkvq");
  CHECK(canonical("k=progressive;v=progressive;policy=pmkvq") == canonical("pmkvq"));
  CHECK(canonical("policy=drop-tokens(r=2/8);sinks=4") == "sinks=4;recent=0;block=64;policy=drop-tokens(r=1/4)");
  CHECK_THAT(refusal("k=channel-widths(group=128);policy=chanmix", k128), ContainsSubstring("unit=channel"));
  CHECK_THAT(refusal("k=raw;policy=chanmix", k128), ContainsSubstring("decides nothing"));
  CHECK_THAT(refusal("k=progressive(bits=8);v=progressive(bits=16);policy=pmkvq", k128), ContainsSubstring("progressive(bits=16)"));
  CHECK_THAT(refusal("k=progressive(bits=16);policy=pmkvq", k128), ContainsSubstring("layer 0, v"));
  CHECK_THAT(refusal("k=progressive;v=raw", k128), ContainsSubstring("bits"));
  CHECK_THAT(refusal("policy=drop-tokens", k128), ContainsSubstring("needs the key r"));
  CHECK_THAT(refusal("k=raw;policy=drop-tokens(r=1/2)", k128), ContainsSubstring("k= and v="));
  CHECK_THAT(refusal("policy=drop-tokens(r=1/2);recent=8", k128), ContainsSubstring("recent=8"));
}

TEST_CASE("tables of a recipe live in the memory that it was given") {
  struct Counting : std::pmr::memory_resource {
    size_t live = 0;
    void *do_allocate(size_t bytes, size_t align) override { return live += bytes, std::pmr::new_delete_resource()->allocate(bytes, align); }
    void do_deallocate(void *p, size_t bytes, size_t align) override { live -= bytes, std::pmr::new_delete_resource()->deallocate(p, bytes, align); }
    bool do_is_equal(const memory_resource &other) const noexcept override { return this == &other; }
  } counting;
  {
    Recipe recipe(&counting);
    REQUIRE(parse_recipe("k=pair-mix(low=1,high=3,group=64,mask=" + std::string(64, 'f') + ");v=raw", {{layer(512)}}, &recipe) == KVQ_OK);
    CHECK(recipe.layers[0].k[0].table.size() == 256);
    CHECK(recipe.layers[0].k[0].table.get_allocator().resource() == &counting);
  }
  CHECK(counting.live == 0);
}
