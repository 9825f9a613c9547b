// Accounting: the figures of section 8 at D = 128 and sinks + 32768 tokens, and byte counts worked out by hand.
#include <catch2/catch_test_macros.hpp>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "recipe/recipe.h"
#include "recipe_kit.hpp"

using namespace kvq;
using kvq_test::layer;
using kvq_test::numbered;
using kvq_test::parsed;

namespace {

kvq_recipe_data data_of(const std::vector<uint8_t> &bits) {
  kvq_recipe_data data{};
  data.bits = bits.data(), data.n_bits = bits.size();
  return data;
}

kvq_account accounted(std::string_view text, const std::vector<LayerShape> &layers, uint64_t tokens, const kvq_recipe_data &data = {}) {
  kvq_account out{};
  Recipe recipe = parsed(text, layers);
  if (apply_data(&data, numbered(layers), &recipe) != KVQ_OK || account(recipe, numbered(layers), tokens, &out) != KVQ_OK)
    FAIL(text << ": " << failure_detail());
  return out;
}

// As printed: rounded to `digits` decimals.
double rounded(double value, int digits) { return std::round(value * std::pow(10, digits)) / std::pow(10, digits); }

struct Figure {
  const char *preset;
  double k, v, both;  // 0: not in the table
  int digits;
};

// Section 8's column "effective bits".  Values of the default affine-token(4) with g = 128 cost 2 + 2 * 16 / 128 = 2.25.
constexpr Figure kFigures[] = {
    {"fp16", 16, 16, 16, 4},
    {"kivi-2", 2.25, 2.25, 2.25, 4},
    {"kivi-2-g32", 3.0, 3.0, 3.0, 4},
    {"polar-2", 2.25, 2.25, 0, 4},
    {"kitty", 2.3883, 0, 0, 4},
    {"pnmix", 2.2634, 0, 0, 4},
    {"pnmix-g64", 2.2946, 0, 0, 4},
    {"tq-2", 2.125, 2.125, 2.125, 3},
    {"tq-3", 3.125, 3.125, 3.125, 3},
    {"tq-4", 4.125, 4.125, 4.125, 3},
    {"tq-1.585", 1.725, 1.725, 1.725, 3},
    {"tq-2.322", 2.458, 2.458, 2.458, 3},
    {"tq-2.585", 2.725, 2.725, 2.725, 3},
    {"tq-split", 2.75, 2.75, 2.75, 4},
    {"semkv", 2.65, 2.65, 2.65, 2},
    {"semkv-tq", 2.525, 2.525, 2.525, 3},
    {"semkv-tq-2", 2.025, 2.025, 2.025, 3},
    {"kvq-2", 2.2635, 1.6765, 0, 4},
    {"kvq-2", 0, 0, 1.970, 3},
    {"kvq-2.5", 2.8879, 2.0762, 0, 4},
    {"kvq-2.5", 0, 0, 2.482, 3},
    {"kvq-3", 3.2625, 2.6756, 0, 4},
    {"kvq-3", 0, 0, 2.969, 3},
    {"tq-2c", 2.1267, 2.1267, 0, 4},
    {"tq-3c", 3.1266, 3.1266, 0, 4},
};

}  // namespace

TEST_CASE("every preset costs what section 8 says") {
  for (const Figure &figure : kFigures) {
    const uint64_t tokens = parsed(figure.preset, {layer(128)}).sinks + 32768;
    const kvq_account a = accounted(figure.preset, {layer(128, 128, 8)}, tokens);
    INFO(figure.preset << " " << a.effective_bits_k << " " << a.effective_bits_v << " " << a.effective_bits);
    if (figure.k) CHECK(std::abs(rounded(a.effective_bits_k, figure.digits) - figure.k) < 1e-9);
    if (figure.v) CHECK(std::abs(rounded(a.effective_bits_v, figure.digits) - figure.v) < 1e-9);
    if (figure.both) CHECK(std::abs(rounded(a.effective_bits, figure.digits) - figure.both) < 1e-9);
  }
}

TEST_CASE("kitty's position bytes are 1/16 bit of its cost") {  // section 8: 2.3259 + 0.0624
  const kvq_account a = accounted("kitty", {layer(128)}, 32 + 32768);
  const double positions = 8.0 * 128 * (32768 / 128) / (32800.0 * 128);
  CHECK(rounded(positions, 4) == 0.0624);
  CHECK(rounded(a.effective_bits_k - positions, 4) == 2.3259);
}

TEST_CASE("compression of the semkv presets against fp16") {
  CHECK(rounded(16 / accounted("semkv", {layer(128)}, 32768).effective_bits, 2) == 6.04);
  CHECK(rounded(16 / accounted("semkv-tq-2", {layer(128)}, 32768).effective_bits, 1) == 7.9);
}

TEST_CASE("block-gtq costs its average and a scalar per width that occurs") {
  const auto bits_k = [](const char *preset, std::vector<uint8_t> widths) {
    const uint64_t tokens = parsed(preset, {layer(128)}).sinks + 32768;
    return accounted(preset, {layer(128)}, tokens, data_of(widths));
  };
  std::vector<uint8_t> three(64, 3), mixed(64, 2);
  for (int i = 0; i < 16; i++) mixed[i] = 6;  // 16 * 6 + 48 * 2 = 192 = 3 * 64
  for (const auto &[preset, v] : std::vector<std::pair<const char *, double>>{{"blockgtq-k3v3", 3.125}, {"blockgtq-k3v2", 2.125}}) {
    CHECK(bits_k(preset, three).effective_bits_k == 3 + 1.0 / 8);
    CHECK(bits_k(preset, mixed).effective_bits_k == 3 + 2.0 / 8);
    CHECK(bits_k(preset, mixed).effective_bits_v == v);
  }
  CHECK(bits_k("blockgtq-k2v2", std::vector<uint8_t>(64, 2)).effective_bits_k == 2.125);
  const kvq_account fast = bits_k("blockgtq-k3v3-fast", mixed);
  CHECK(std::abs(fast.effective_bits_k - (64 + 32704 * (3 + 2.0 / 16)) / 32708) < 1e-9);
  CHECK(rounded(fast.effective_bits_v, 4) == 3.0641);
  CHECK(rounded(bits_k("blockgtq-k2v2-fast", std::vector<uint8_t>(64, 2)).effective_bits_v, 4) == 2.0642);
}

TEST_CASE("widths that matter must be given, and must be possible") {
  kvq_account out;
  const std::vector<LayerShape> layers = {layer(128)};
  Recipe recipe = parsed("blockgtq-k3v3", layers);
  CHECK(account(recipe, layers, 1000, &out) == KVQ_E_STATE);
  std::vector<uint8_t> widths(64, 3);
  const kvq_recipe_data data = data_of(widths);
  widths[5] = 9;
  CHECK(apply_data(&data, layers, &recipe) == KVQ_E_INVALID);
  widths[5] = 4;  // 193 bits where the budget is 192
  CHECK(apply_data(&data, layers, &recipe) == KVQ_E_INVALID);
  widths[6] = 2;
  CHECK(apply_data(&data, layers, &recipe) == KVQ_OK);
  CHECK(account(recipe, layers, 1000, &out) == KVQ_OK);
}

TEST_CASE("pair widths cost the same however the budget is spread") {
  std::vector<uint8_t> widths(64, 3);
  const uint64_t bytes = accounted("kvq-3", {layer(128)}, 5000).wire_bytes;
  CHECK(accounted("kvq-3", {layer(128)}, 5000, data_of(widths)).wire_bytes == bytes);
  for (int i = 0; i < 32; i++) widths[i] = 0, widths[32 + i] = 6;
  CHECK(accounted("kvq-3", {layer(128)}, 5000, data_of(widths)).wire_bytes == bytes);
}

TEST_CASE("the bits of several layers and heads lie one behind the other") {
  // 2 heads of 4 pairs, then 1 head of 2 pairs; 8 tokens: per width present 2 bytes of scalars a token.
  const std::vector<LayerShape> layers = {layer(8, 8, 2), layer(4, 8)};
  const std::vector<uint8_t> bits = {2, 2, 2, 2, 1, 3, 1, 3, 1, 3};
  const kvq_account a = accounted("k=width-groups;v=raw;block=8;policy=blockgtq(avg=2)", layers, 8, data_of(bits));
  const uint64_t k = (8 * 8 * 2 / 8 + 8 * 2) + (8 * 4 / 8 + 8 * 4 * 3 / 8 + 8 * 4) + (8 * 2 / 8 + 8 * 2 * 3 / 8 + 8 * 4);
  CHECK(a.wire_bytes == k + 8 * 3 * 8 * 2);
}

TEST_CASE("tokens divide into sinks, whole blocks and tail") {
  const Recipe recipe = parsed("k=raw;sinks=4;recent=10;block=32", {layer(8)});
  const auto split = [&](uint64_t tokens, uint64_t sinks, uint64_t packed, uint64_t tail) {
    const Split s = split_tokens(recipe, tokens);
    CHECK((s.sinks == sinks && s.packed == packed && s.tail == tail));
  };
  split(0, 0, 0, 0);
  split(3, 3, 0, 0);
  split(13, 4, 0, 9);
  split(45, 4, 0, 41);
  split(46, 4, 32, 10);  // 46 - 4 - 10 = 32
  split(77, 4, 32, 41);
  split(78, 4, 64, 10);
  const Split all = split_tokens(parsed("semkv;sinks=4", {layer(8)}), 77);
  CHECK((all.sinks == 4 && all.packed == 73 && all.tail == 0));
}

TEST_CASE("bytes of small sequences are those of the formats, digit by digit") {
  // 6 sinks raw, 32 packed, 5 raw; D = 16.  K: 16 channels of 32 * 2 bits and 4 bytes; V: one stream of 32 * 16 digits of base 3
  // (102 whole words of 5 in 8 bits, 2 digits in 4 bits: 103 bytes) and 2 bytes a token.
  const kvq_account a = accounted("k=affine-channel(levels=4,group=32);v=lloyd(levels=3);sinks=6", {layer(16)}, 43);
  CHECK(a.sink_tokens == 6);
  CHECK(a.packed_tokens == 32);
  CHECK(a.tail_tokens == 5);
  const uint64_t k = 6 * 16 * 2 + 16 * (8 + 4), v = 6 * 16 * 2 + 103 + 64;
  CHECK(a.wire_bytes == k + v);
  CHECK(a.tail_bytes == 5 * 32 * 2);
  CHECK(a.fp16_bytes == 43 * 32 * 2);
  CHECK(a.effective_bits_k == 8.0 * double(k) / (38 * 16));
  CHECK(a.effective_bits_v == 8.0 * double(v) / (38 * 16));
  CHECK(a.effective_bits == 8.0 * double(k + v) / (38 * 32));
  CHECK(a.metadata_bytes == 0);
  CHECK(a.page_tokens == 64);
}

TEST_CASE("semkv counts floor(r*T) tokens as high and one bit of metadata a token") {
  // T = 11, r = 1/4: 2 high, 9 low.  D = 8, lloyd: low 9 * 8 codes of 2 bits and 18 bytes, high 2 * 8 codes of 4 bits and 4 bytes.
  const kvq_account a = accounted("policy=semkv(r=1/4,low=lloyd(levels=4),high=lloyd(levels=16))", {layer(8, 8, 3), layer(8, 8, 3)}, 11);
  CHECK(a.wire_bytes == 2 * 3 * 2 * (18 + 18 + 8 + 4));
  CHECK(a.metadata_bytes == 2);
}

TEST_CASE("drop-tokens costs fp16 for the kept tokens, spread over all of them") {
  // T = 11, r = 1/4: 2 tokens of 2 * 8 channels in each of 3 heads.
  const kvq_account a = accounted("policy=drop-tokens(r=1/4)", {layer(8, 8, 3)}, 11);
  CHECK(a.wire_bytes == 3 * 2 * 16 * 2);
  CHECK(a.metadata_bytes == 2);
  CHECK(a.packed_tokens == 11);
  CHECK(a.effective_bits == 16.0 * 2 / 11);
}

TEST_CASE("chanmix at 32 layers and 8 heads") {
  // floor(256 / 10) = 25 heads of 4 bits; in the others 32 channels of 3 bits, 32 of 1, 64 of 2; e4m3 scales and zeros.
  std::vector<uint8_t> bits;
  for (int head = 0; head < 256; head++)
    for (int c = 0; c < 128; c++) bits.push_back(head % 10 == 7 && head < 250 ? 4 : "\3\1\2\2"[c % 4]);
  const kvq_account a = accounted("chanmix", std::vector<LayerShape>(32, layer(128, 128, 8)), 32768, data_of(bits));
  CHECK(a.effective_bits_k == (25 * 4 + 231 * 2) / 256.0 + 16.0 / 128);
  CHECK(rounded(a.effective_bits_k, 4) == 2.3203);
  CHECK(a.effective_bits_v == 2.25);
  CHECK(a.metadata_bytes == 256 * 128);
}

TEST_CASE("pmkvq costs what the widest width within each layer's budget costs") {
  // A token of 8 and 8 channels: 32 bytes raw; 16, 8, 4 bytes of codes and 8 of scales and zeros at 8, 4, 2 bits.
  const uint64_t budgets[] = {64 * 32, 64 * 32 - 1, 64 * 24, 64 * 24 - 1, 64 * 16, 64 * 16 - 1, 0};
  kvq_recipe_data data{};
  data.budgets = budgets, data.n_budgets = 7;
  const kvq_account a = accounted("pmkvq", std::vector<LayerShape>(7, layer(8)), 64 + 63, data);
  CHECK(a.packed_tokens == 64);
  CHECK(a.wire_bytes == 64 * (32 + 24 + 24 + 16 + 16 + 12 + 12));
  CHECK(a.metadata_bytes == 0);
}

TEST_CASE("data that does not fit the recipe is refused by name") {
  const auto refusal = [](const char *text, const kvq_recipe_data &data) {
    const std::vector<LayerShape> layers = numbered({layer(8, 8, 2), layer(4, 4, 1)});
    Recipe recipe = parsed(text, layers);
    CHECK(apply_data(&data, layers, &recipe) == KVQ_E_INVALID);
    return std::string(failure_detail());
  };
  const auto holds = [](const std::string &text, std::string_view word) { return text.find(word) != text.npos; };
  const std::vector<uint8_t> bits(20, 2);
  const std::vector<double> scores(10, 1.0), bad = {1, 1, 1, 1, 1, 1, 1, 1, -1, 1};
  const uint64_t budgets[] = {1, 2};
  const auto with_scores = [](const std::vector<double> &list) {
    kvq_recipe_data data{};
    data.scores = list.data(), data.n_scores = list.size();
    return data;
  };
  kvq_recipe_data with_budgets{}, both = with_scores(scores), lost{};
  with_budgets.budgets = budgets, with_budgets.n_budgets = 2;
  both.bits = bits.data(), both.n_bits = 10;
  lost.n_bits = 20;
  CHECK(holds(refusal("chanmix", {}), "recipe_data.bits"));
  CHECK(holds(refusal("chanmix", data_of({2, 2})), "n_bits=2, but these layers have 20"));
  CHECK(holds(refusal("chanmix", data_of(std::vector<uint8_t>(20, 9))), "layer 0, head 0"));
  CHECK(holds(refusal("chanmix", with_scores(scores)), "takes no scores"));
  CHECK(holds(refusal("chanmix", lost), "bits is NULL"));
  CHECK(holds(refusal("pmkvq", {}), "recipe_data.budgets"));
  CHECK(holds(refusal("pmkvq", data_of(bits)), "takes no bits"));
  CHECK(holds(refusal("tq-2", with_budgets), "takes no budgets"));
  CHECK(holds(refusal("blockgtq-k3v3", both), "both given"));
  CHECK(holds(refusal("blockgtq-k3v3", with_scores(bad)), "layer 1, head 0"));
}

TEST_CASE("masks, width lists and centres are metadata of every layer and head, before any token") {
  const auto metadata = [](const char *text, uint32_t dim) { return accounted(text, {layer(dim, dim, 3), layer(dim, dim, 3)}, 0).metadata_bytes; };
  CHECK(metadata("pnmix", 128) == 6 * 8);        // 64 pairs
  CHECK(metadata("pnmix", 72) == 6 * 5);         // 36 pairs
  CHECK(metadata("kvq-3", 128) == 6 * 64);
  CHECK(metadata("tq-split", 128) == 6 * 2 * 16);  // channels of K and of V
  CHECK(metadata("tq-2c", 128) == 6 * 256);
  CHECK(metadata("fp16", 128) == 0);
  CHECK(metadata("kitty", 128) == 0);
  CHECK(metadata("k=pair-mix(low=1,high=3,group=64,mask=0f);v=raw", 16) == 6);
  CHECK(accounted("k=width-groups(center=1,bits=1234);v=raw", {layer(8)}, 0).metadata_bytes == 4 + 16);
}

TEST_CASE("no token costs nothing and has no bits per element") {
  const kvq_account a = accounted("kvq-3", {layer(128)}, 0);
  CHECK(a.wire_bytes == 0);
  CHECK(a.effective_bits == 0);
  CHECK(accounted("kvq-3", {layer(128)}, 100).packed_tokens == 0);
}

TEST_CASE("a layer that reads another's pages costs nothing") {
  std::vector<LayerShape> layers = numbered({layer(128, 128, 2), layer(128, 128, 2), layer(128, 128, 2)});
  const uint64_t two = accounted("kvq-2", {layers[0], layers[1]}, 1000).wire_bytes;
  layers[2].source = 0;
  Recipe recipe(std::pmr::get_default_resource());
  kvq_account a;
  REQUIRE(parse_recipe("kvq-2", layers, &recipe) == KVQ_OK);
  REQUIRE(account(recipe, layers, 1000, &a) == KVQ_OK);
  CHECK(a.wire_bytes == two);
  CHECK(a.metadata_bytes == 2 * 2 * 64);
  CHECK(a.fp16_bytes == 2 * 1000 * 2 * 256 * 2);
}

TEST_CASE("keys and values of a page of 3 bits take 100 bytes a token") {  // A9
  const kvq_account a = accounted("tq-3", {layer(128)}, 64);
  CHECK(a.wire_bytes == 64 * 100);
}

TEST_CASE("a full 16-bit scale and zero per 32 keys cost one bit") {  // A6
  CHECK(accounted("k=affine-channel(levels=16,group=32);v=affine-token(levels=16,group=32);block=32", {layer(128)}, 32768).effective_bits == 5.0);
}

TEST_CASE("more tokens than a position can number are refused") {
  kvq_account a;
  const std::vector<LayerShape> layers = {layer(128)};
  CHECK(account(parsed("tq-2", layers), layers, uint64_t(1) << 32, &a) == KVQ_E_INVALID);
  CHECK(account(parsed("tq-2", layers), layers, (uint64_t(1) << 32) - 1, &a) == KVQ_OK);
}
