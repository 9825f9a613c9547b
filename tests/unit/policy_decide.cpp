// Stateless decisions: names, keys, tensors of every type and stride, and the steps that exist only here.
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <limits>
#include <string>
#include <vector>

#include "half.hpp"
#include "policy/decide.h"
#include "policy/policy.h"
#include "random.hpp"

using namespace kvq;
using Catch::Matchers::ContainsSubstring;

namespace {

using Bytes = std::vector<uint8_t>;

// Keys and queries in fp32, packed.
struct Input {
  std::vector<float> k, q;
  kvq_tensor k_tensor{}, q_tensor{};
  DecisionInput input;

  Input(uint32_t dim, std::vector<float> keys, std::vector<float> queries = {}, uint32_t q_heads = 1) : k(std::move(keys)), q(std::move(queries)) {
    input.shape = {dim, KVQ_TENSOR_K, KVQ_ROPE_HALF, dim, 0};
    input.q_heads = q_heads;
    input.n_tokens = k.size() / dim;
    k_tensor.data = k.data(), k_tensor.token_stride = k_tensor.head_stride = dim;
    q_tensor.data = q.data(), q_tensor.token_stride = int64_t(q_heads) * dim, q_tensor.head_stride = dim;
    input.k = &k_tensor;
    if (!q.empty()) input.q = &q_tensor;
  }
  Input(const Input &) = delete;
};

Bytes decided(std::string_view text, const DecisionInput &input) {
  std::pmr::vector<uint8_t> out;
  if (decide_policy(text, input, &out) != KVQ_OK) FAIL(text << ": " << failure_detail());
  return Bytes(out.begin(), out.end());
}

std::string refused(std::string_view text, const DecisionInput &input, Status status = KVQ_E_INVALID) {
  std::pmr::vector<uint8_t> out;
  CHECK(decide_policy(text, input, &out) == status);
  return failure_detail();
}

}  // namespace

TEST_CASE("pn-mix from keys and queries of several heads") {  // V33
  // D = 8, pairs (p, p + 4).  Keys are alike; the second of two query heads is strong in pair 2.
  std::vector<float> keys(3 * 8, 1.0f), queries(3 * 2 * 8, 1.0f);
  for (int t = 0; t < 3; t++) queries[(t * 2 + 1) * 8 + 6] = 100;
  const Input input(8, keys, queries, 2);
  CHECK(decided("pnmix(r=1/4)", input.input) == Bytes{0b0100});
  CHECK(decided("pnmix(r=3/4)", input.input) == Bytes{0b0111});
  CHECK(decided("pnmix(r=3/4,criterion=k-pair)", input.input) == Bytes{0b0111});
  CHECK(decided("pnmix(r=1/8,criterion=k-magnitude)", input.input) == Bytes{1});
}

TEST_CASE("masks pad their last byte with zeros") {
  const Input input(20, std::vector<float>(20, 1.0f));
  CHECK(decided("channel-split(r=1)", input.input) == Bytes{0xff, 0xff, 0x0f});
  CHECK(decided("channel-split", input.input) == Bytes{0xff, 0x03, 0});
  CHECK(decided("pnmix(r=1,criterion=k-pair)", input.input) == Bytes{0xff, 0x03});
}

TEST_CASE("widths from statistics or from given scores") {
  std::vector<float> keys(2 * 8, 0.0f), queries(2 * 8, 1.0f);
  keys[3] = 64;
  const Input input(8, keys, queries);
  CHECK(decided("blockgtq(avg=3,score=k-only)", input.input) == Bytes{2, 1, 1, 8});  // the rest ties: to the lower pair
  const double scores[] = {16, 1, 4, 1};
  DecisionInput given;
  given.shape = input.input.shape;
  given.pair_scores = scores;
  CHECK(decided("blockgtq(avg=2)", given) == Bytes{3, 2, 2, 1});  // the last bit ties: fewest bits, then the lower pair
  CHECK(decided("pair-widths(avg=1,bmin=0)", given) == Bytes{2, 1, 1, 0});
  CHECK(decided("pair-widths(avg=2,unit=2)", given) == Bytes{3, 1, 3, 1});
  CHECK(decided("pair-widths(avg=2,unit=fit16)", given) == Bytes{3, 2, 2, 1});
  CHECK_THAT(refused("blockgtq(avg=2,bmin=0)", given), ContainsSubstring("bmin=0"));
  CHECK_THAT(refused("blockgtq(avg=2,unit=3)", given), ContainsSubstring("unit=3"));
  given.shape.dim = 6, given.shape.rotary_dim = 6;
  CHECK_THAT(refused("blockgtq(avg=2)", given), ContainsSubstring("n_scores=4"));
  CHECK_THAT(refused("pair-widths(avg=2)", Input(8, keys).input, KVQ_E_STATE), ContainsSubstring("Q"));
  const double bad[] = {1, std::numeric_limits<double>::quiet_NaN(), 1};
  given.pair_scores = bad;
  CHECK_THAT(refused("blockgtq(avg=2)", given), ContainsSubstring("pair 1"));
}

TEST_CASE("token flags from scores") {
  const float scores[] = {1, 9, 3, 9, 2, 0, 0, 0, 0, 8};
  DecisionInput input;
  input.token_scores = scores;
  CHECK(decided("semkv-prompt(r=1/4)", input) == Bytes{0b1010, 0});
  CHECK(decided("semkv-block(r=1/4)", input) == Bytes{0b1010, 0});  // 2.5 to even
  CHECK(decided("semkv-block(r=35/100)", input) == Bytes{0b1110, 0b10});  // 3.5 to even: 4
}

TEST_CASE("kitty boosts the loudest channels of a group") {  // V38
  const auto mask = [](uint32_t dim, const char *boost, std::vector<uint32_t> loud) {
    std::vector<float> keys(4 * dim, 0.5f);
    for (const uint32_t c : loud) keys[c] = -2;
    return decided("kitty(boost=" + std::string(boost) + ")", Input(dim, keys).input);
  };
  Bytes expected(16, 0);
  expected[0] = 0b111, expected[15] = 0x80;  // 4 of 128: channel 127, and of the equal ones the lower
  CHECK(mask(128, "1/32", {127}) == expected);
  CHECK(mask(80, "1/32", {11, 70}) == Bytes{0, 8, 0, 0, 0, 0, 0, 0, 64, 0});  // 2 of 80
  CHECK(mask(8, "1/32", {3}) == Bytes{0});
  CHECK_THAT(refused("kitty(boost=1)", Input(512, std::vector<float>(512, 1.0f)).input), ContainsSubstring("255"));
  CHECK_THAT(refused("kitty", Input(8, std::vector<float>(8, 1.0f)).input), ContainsSubstring("boost"));
  CHECK_THAT(refused("kitty(boost=1/4)", Input(8, {}).input, KVQ_E_STATE), ContainsSubstring("k"));
}

TEST_CASE("the centre comes as fp16") {
  CHECK(decided("center", Input(2, {1, -2, 2, -4}).input) == Bytes{0x00, 0x3e, 0x00, 0xc2});  // 1.5, -3
  CHECK(decided("center", Input(2, {}).input) == Bytes{0, 0, 0, 0});
  CHECK_THAT(refused("center(r=1)", Input(2, {}).input), ContainsSubstring("no keys"));
}

TEST_CASE("the chanmix profile of heads and of channels") {
  const double scores[] = {0.5, 0.9, 0.9, 0.1, 0.9, 0.2, 0.3, 0.4, 0.6, 0.7};
  DecisionInput input;
  input.pair_scores = scores;
  CHECK(decided("chanmix(r_h=1/10)", input) == Bytes{0b10, 0});
  CHECK(decided("chanmix(r_h=1/4)", input) == Bytes{0b110, 0});
  CHECK(decided("chanmix(share=1/5)", input) == Bytes{2, 3, 3, 1, 2, 1, 2, 2, 2, 2});
  CHECK(decided("chanmix", input) == Bytes{2, 3, 3, 1, 2, 1, 2, 2, 2, 2});  // floor(10 / 4)
  const std::vector<double> equal(8, 1.0);
  input.pair_scores = equal;
  CHECK(decided("chanmix(share=1/4)", input) == Bytes{3, 3, 1, 1, 2, 2, 2, 2});  // no channel is both
  CHECK(decided("chanmix(share=1/2)", input) == Bytes{3, 3, 3, 3, 1, 1, 1, 1});
  CHECK_THAT(refused("chanmix(share=3/4)", input), ContainsSubstring("above 1/2"));
  CHECK_THAT(refused("chanmix(share=1/4,r_h=1/2)", input), ContainsSubstring("both"));
  const double infinite[] = {std::numeric_limits<double>::infinity(), 1, std::numeric_limits<double>::infinity(), 2};
  input.pair_scores = infinite;
  CHECK(decided("chanmix(share=1/4)", input) == Bytes{3, 1, 2, 2});
}

TEST_CASE("pm-kvq takes the widest of 16, 8, 4 and 2 bits that fits") {
  // 10 tokens of one head, D = 8 for K and V: raw 2 * 160 bytes; 8 bits 2 * (80 + 40); 4 bits 2 * (40 + 40); 2 bits 2 * (20 + 40).
  DecisionInput input;
  input.n_tokens = 10;
  const auto width = [&](int budget) {
    return decided("pmkvq-shrink(budget=" + std::to_string(budget) + ",kv_heads=1,dim_k=8,dim_v=8)", input)[0];
  };
  CHECK(width(320) == 16);
  CHECK(width(319) == 8);
  CHECK(width(240) == 8);
  CHECK(width(239) == 4);
  CHECK(width(159) == 2);
  CHECK(width(0) == 2);
}

TEST_CASE("pm-kvq's budgets go to the layers that lose most") {
  // 64 tokens of one head, D = 8 for K and V: 2048, 1536, 1024 and 768 bytes at 16, 8, 4 and 2 bits.
  DecisionInput input;
  input.n_tokens = 64;
  const auto budgets = [&](int total, std::vector<double> scores) {
    input.pair_scores = scores;
    const Bytes bytes = decided("pmkvq-budgets(total=" + std::to_string(total) + ",kv_heads=1,dim_k=8,dim_v=8)", input);
    std::vector<uint64_t> result(bytes.size() / 8, 0);
    for (size_t i = 0; i < bytes.size(); i++) result[i / 8] |= uint64_t(bytes[i]) << (8 * (i % 8));
    return result;
  };
  using Budgets = std::vector<uint64_t>;
  CHECK(budgets(1536, {1, 2}) == Budgets{768, 768});
  CHECK(budgets(1536 + 256, {1, 2}) == Budgets{768, 1024});
  CHECK(budgets(1536 + 256, {2, 2}) == Budgets{1024, 768});  // a tie: the lower layer
  CHECK(budgets(1536 + 512, {2, 2}) == Budgets{1024, 1024});  // 2 * 4^-4 < 2 * 4^-2
  CHECK(budgets(1536 + 768 + 255, {1, 100}) == Budgets{768, 1536});   // 100 * 4^-4 > 1 * 4^-2
  CHECK(budgets(1536 + 768 + 256, {1, 100}) == Budgets{1024, 1536});  // 100 * 4^-8 is less
  CHECK(budgets(1 << 20, {0, 0, 0}) == Budgets{2048, 2048, 2048});
  CHECK_THAT(refused("pmkvq-budgets(total=2303,kv_heads=1,dim_k=8,dim_v=8)", input), ContainsSubstring("768"));
  const std::vector<double> bad = {1, -1};
  input.pair_scores = bad;
  CHECK_THAT(refused("pmkvq-budgets(total=5000,kv_heads=1,dim_k=8,dim_v=8)", input), ContainsSubstring("layer 1"));
  CHECK_THAT(refused("pmkvq-budgets(kv_heads=1,dim_k=8,dim_v=8)", input), ContainsSubstring("total"));
}

TEST_CASE("entered rows decide, whatever type and stride they come in") {
  kvq_test::Random random(8);
  const uint32_t dim = 12, tokens = 130;
  std::vector<float> keys = random.normals(dim * tokens, 2);
  for (float &k : keys) k = kvq_test::entry(k);
  Input packed(dim, keys);
  const Bytes expected = decided("channel-split(r=1/3)", packed.input);

  std::vector<double> wide(tokens * 20, std::numeric_limits<double>::quiet_NaN());
  std::vector<uint16_t> half(tokens * 20, 0x7e00);
  for (uint32_t t = 0; t < tokens; t++)
    for (uint32_t c = 0; c < dim; c++) wide[t * 20 + c] = keys[t * dim + c], half[t * 20 + c] = kvq_test::half_bits(keys[t * dim + c]);
  packed.k_tensor.token_stride = 20;
  packed.k_tensor.data = wide.data(), packed.k_tensor.dtype = KVQ_DTYPE_F64;
  CHECK(decided("channel-split(r=1/3)", packed.input) == expected);
  packed.k_tensor.data = half.data(), packed.k_tensor.dtype = KVQ_DTYPE_F16;
  CHECK(decided("channel-split(r=1/3)", packed.input) == expected);
}

TEST_CASE("elements that are not finite are refused with their place") {
  std::vector<float> keys(100 * 8, 1.0f), queries(100 * 2 * 8, 1.0f);
  queries[(77 * 2 + 1) * 8 + 5] = std::numeric_limits<float>::infinity();
  CHECK(refused("pnmix(r=1/2)", Input(8, keys, queries, 2).input, KVQ_E_NONFINITE) == "q: token 77, head 1, channel 5 is not finite");
  keys[70 * 8 + 2] = std::numeric_limits<float>::quiet_NaN();
  CHECK(refused("center", Input(8, keys).input, KVQ_E_NONFINITE) == "k: token 70, head 0, channel 2 is not finite");
}

TEST_CASE("statistics of keys and queries come as section 6 defines them") {
  const Input input(2, {3, 4, 6, -8}, {1, 0, 0, 2, 2, 0, 0, 1}, 2);
  HeadStatistics statistics(std::pmr::get_default_resource());
  REQUIRE(collect_statistics(input.input, &statistics) == KVQ_OK);
  CHECK(statistics.nk == 2);
  CHECK(statistics.nq == 4);
  CHECK(statistics.pairs[0].k1 == UInt128(15) << 24);
  CHECK(statistics.pairs[0].k2 == UInt128(125) << 24);
  CHECK(statistics.pairs[0].q1 == UInt128(6) << 24);
  CHECK(statistics.pairs[0].q2 == UInt128(10) << 24);
  CHECK(statistics.k[1].sum == -(Int128(4) << 24));
}

TEST_CASE("unknown names, keys and shapes are refused") {
  const Input input(8, std::vector<float>(8, 1.0f));
  CHECK_THAT(refused("magic", input.input), ContainsSubstring("semkv-prompt"));
  CHECK_THAT(refused("semkv-prompt", input.input), ContainsSubstring("needs the key r"));
  CHECK_THAT(refused("semkv-prompt(r=5/4)", input.input), ContainsSubstring("above 1"));
  CHECK_THAT(refused("semkv-prompt(x=5/4)", input.input), ContainsSubstring("key x"));
  CHECK_THAT(refused("pnmix(r=1/2,unit=channel)", input.input), ContainsSubstring("unit"));
  CHECK_THAT(refused("pnmix(r=1/2)", input.input, KVQ_E_STATE), ContainsSubstring("Q"));
  DecisionInput odd = input.input;
  odd.shape.dim = 7;
  CHECK_THAT(refused("channel-split", odd), ContainsSubstring("7"));
}
