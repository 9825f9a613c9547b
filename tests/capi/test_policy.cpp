// Decisions of the policies: exact, alike on every platform and however the tokens came; frozen where they should be; portable
// as a blob.  (Cases S21, T21 to T23, V29 to V35.)
#include <limits>

#include "mirror.hpp"

using namespace kvq_test;

namespace {

struct Decision {
  int32_t status = KVQ_OK;
  Bytes bytes;
};

// kvq_policy_decide, with its size protocol.
Decision decide(const kvq_policy &policy) {
  size_t needed = 0;
  Decision result;
  result.status = kvq_policy_decide(&policy, nullptr, 0, &needed);
  if (result.status != KVQ_E_SIZE) return result;
  result.bytes.resize(needed);
  result.status = kvq_policy_decide(&policy, result.bytes.data(), needed, nullptr);
  return result;
}

Decision tokens(const std::string &text, const Floats &scores) {
  static const float none = 0;
  auto policy = sized<kvq_policy>();
  policy.text = text.c_str();
  policy.token_scores = scores.empty() ? &none : scores.data(), policy.n_scores = scores.size();
  return decide(policy);
}

Decision pairs(const std::string &text, const std::vector<double> &scores) {
  auto policy = sized<kvq_policy>();
  policy.text = text.c_str();
  policy.dim = uint32_t(2 * scores.size()), policy.pair_scores = scores.data(), policy.n_scores = scores.size();
  return decide(policy);
}

// k: [tokens][dim]; q: [tokens][q_heads][dim], may be empty.
Decision from_rows(const std::string &text, const Floats &k, const Floats &q, uint32_t q_heads, uint32_t dim,
                   uint32_t layout = KVQ_ROPE_HALF) {
  const Tensor keys(k, 1, dim), queries(q, q_heads, dim);
  auto policy = sized<kvq_policy>();
  policy.text = text.c_str();
  policy.dim = dim, policy.rope_layout = layout, policy.q_heads = q_heads, policy.n_tokens = k.size() / dim;
  policy.k = keys.view(), policy.q = q.empty() ? nullptr : queries.view();
  return decide(policy);
}

bool bit(const Bytes &mask, size_t i) { return mask[i / 8] >> (i % 8) & 1; }
size_t ones(const Bytes &mask) {
  size_t count = 0;
  for (uint8_t byte : mask) count += size_t(std::popcount(byte));
  return count;
}
Bytes flags_of(const std::vector<bool> &flags) {
  Bytes mask((flags.size() + 7) / 8);
  for (size_t i = 0; i < flags.size(); ++i) mask[i / 8] = uint8_t(mask[i / 8] | flags[i] << (i % 8));
  return mask;
}
// The `count` largest, ties to the lower index.
std::vector<bool> largest(const Floats &scores, size_t count) {
  std::vector<size_t> order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return scores[a] > scores[b]; });
  std::vector<bool> result(scores.size());
  for (size_t i = 0; i < count; ++i) result[order[i]] = true;
  return result;
}

std::string hex(const Bytes &bytes) {
  std::string text;
  for (uint8_t byte : bytes) text += "0123456789abcdef"[byte >> 4], text += "0123456789abcdef"[byte & 15];
  return text;
}

// Energies e^(-i/8) by pair, in both members.
Floats with_energies(Random &random, size_t rows, uint32_t dim, bool rising) {
  Floats result(rows * dim);
  for (size_t i = 0; i < result.size(); ++i) {
    const double pair = double(i % (dim / 2));
    result[i] = float(random.normal() * std::exp(-(rising ? dim / 2.0 - 1 - pair : pair) / 8));
  }
  return result;
}

// Relative error of every channel of keys that went through a cache.
std::vector<double> channel_errors(Mirror &m, kvq_seq s, uint32_t head) {
  const size_t dim = m.setup.layers[0].dim_k;
  const uint64_t begin = m.shadow(s).sinks, end = m.shadow(s).frozen();
  const Floats got = export_values(m.cache, s, 0, head, KVQ_TENSOR_K, m.total(s), uint32_t(dim));
  std::vector<double> error(dim), power(dim);
  for (uint64_t t = begin; t < end; ++t)
    for (size_t c = 0; c < dim; ++c) {
      const double raw = entry(m.text.row(0, Text::K, m.shadow(s).tokens[t])[head * dim + c]), difference = got[t * dim + c] - raw;
      error[c] += difference * difference, power[c] += raw * raw;
    }
  for (size_t c = 0; c < dim; ++c) error[c] = std::sqrt(error[c] / power[c]);
  return error;
}

}  // namespace

TEST_CASE("SemKV counts the high tokens of a prompt and of a block by exact arithmetic") {  // V29, V30
  Random random(29);
  const auto scores = [&](size_t n) { return random.normals(n); };
  for (const auto &[r, n, count] : {std::tuple{"35/100", 180, 63}, {"29/100", 100, 29}, {"58/100", 50, 29}, {"1/4", 7, 1}, {"1/3", 3, 1}})
    CHECK(ones(tokens(std::string("semkv-prompt(r=") + r + ")", scores(size_t(n))).bytes) == size_t(count));
  for (const auto &[r, n, count] : {std::tuple{"35/100", 90, 32}, {"35/100", 30, 10}, {"1/4", 6, 2}, {"1/4", 10, 2}, {"1/4", 64, 16}, {"1/4", 7, 2}, {"1/2", 1, 0}, {"1/2", 3, 2}})
    CHECK(ones(tokens(std::string("semkv-block(r=") + r + ")", scores(size_t(n))).bytes) == size_t(count));
  for (size_t n : {1, 8, 9, 200}) {
    const Floats s = scores(n);
    CHECK(tokens("semkv-prompt(r=3/7)", s).bytes == flags_of(largest(s, n * 3 / 7)));
  }
}

TEST_CASE("SemKV's ties, extremes and odd scores") {  // V31
  const float nan = std::numeric_limits<float>::quiet_NaN(), infinity = std::numeric_limits<float>::infinity();
  for (const char *kind : {"semkv-prompt", "semkv-block"}) {
    const auto run = [&](const std::string &r, const Floats &s) { return tokens(std::string(kind) + "(r=" + r + ")", s); };
    CHECK(run("1/4", Floats(40, 2.5f)).bytes == Bytes{0xFF, 3, 0, 0, 0});
    CHECK(run("0/1", Floats(9, 1.0f)).bytes == Bytes{0, 0});
    CHECK(run("1/1", Floats(9, 1.0f)).bytes == Bytes{0xFF, 1});
    CHECK(run("1/2", {}).status == KVQ_OK);
    CHECK(run("1/1", {3}).bytes == Bytes{1});
    CHECK(run("1/2", {-infinity, infinity, 0, -1}).bytes == Bytes{6});
    CHECK(run("1/2", {-0.0f, 0.0f, -0.0f, 0.0f}).bytes == Bytes{3});  // equal as numbers
    CHECK(run("1/2", {1, nan, 0, 2}).status == KVQ_E_INVALID);
    CHECK(run("3/2", {1, 2}).status == KVQ_E_INVALID);
    CHECK(run("1/0", {1, 2}).status == KVQ_E_INVALID);
  }
}

TEST_CASE("PN-Mix selects floor(r n) pairs, ties to the lower, heads by themselves") {  // V32
  Random random(32);
  const Floats falling = with_energies(random, 200, 128, false), rising = with_energies(random, 200, 128, true), q = random.normals(200 * 128);
  const Bytes a = from_rows("pnmix(r=40/100)", falling, q, 1, 128).bytes, b = from_rows("pnmix(r=40/100)", rising, q, 1, 128).bytes;
  REQUIRE((a.size() == 8 && ones(a) == 25 && ones(b) == 25));
  for (size_t i = 0; i < 15; ++i) CHECK((bit(a, i) && !bit(b, i) && !bit(a, 63 - i) && bit(b, 63 - i)));
  const Floats same(64 * 16, 1.0f);
  for (const char *criterion : {"qk-pair", "k-pair"})
    CHECK(from_rows(std::string("pnmix(r=1/2,criterion=") + criterion + ")", same, same, 1, 64).bytes == Bytes{0xFF, 0xFF, 0, 0});
  for (const char *criterion : {"k-range", "k-magnitude"})  // these rank channels
    CHECK(from_rows(std::string("pnmix(r=1/2,criterion=") + criterion + ")", same, {}, 1, 64).bytes == Bytes{0xFF, 0xFF, 0xFF, 0xFF, 0, 0, 0, 0});
  CHECK(from_rows("pnmix(r=1/2)", same, {}, 1, 64).status == KVQ_E_STATE);  // queries are needed

  // In a cache: one mask per layer and KV head.
  Mirror m(Setup{.recipe = "k=pair-mix(low=1,high=3,group=32,midpoint=1);v=raw;block=32;policy=pnmix(r=1/2)", .layers = {layer_of(2, 1, 64)}});
  Floats k, queries = random.normals(320 * 2 * 64);
  const Floats one = with_energies(random, 320, 64, false), two = with_energies(random, 320, 64, true);
  for (size_t t = 0; t < 320; ++t) {
    k.insert(k.end(), one.begin() + long(t * 64), one.begin() + long(t * 64 + 64));
    k.insert(k.end(), two.begin() + long(t * 64), two.begin() + long(t * 64 + 64));
  }
  kvq_seq s = 0;
  ok(kvq_seq_create(m.cache, &s));
  const Tensor keys(k, 2, 64), query(queries, 2, 64);
  auto desc = sized<kvq_prefill>();
  desc.flags = KVQ_PREFILL_FINAL, desc.n_tokens = 320, desc.k = keys.view(), desc.v = keys.view(), desc.q = query.view();
  ok(kvq_prefill_commit(m.cache, s, &desc, nullptr));
  for (uint32_t head = 0; head < 2; ++head) {
    const Floats got = export_values(m.cache, s, 0, head, KVQ_TENSOR_K, 320, 64);
    for (size_t c = 0; c < 64; ++c) {
      double error = 0, power = 0;
      for (size_t t = 0; t < 320; ++t) {
        const double raw = entry(k[(2 * t + head) * 64 + c]), difference = got[t * 64 + c] - raw;
        error += difference * difference, power += raw * raw;
      }
      const size_t pair = c % 32;
      const bool salient = head == 0 ? pair < 16 : pair >= 16;
      if (pair > 12 && pair < 19) continue;  // close calls
      CHECK(std::sqrt(error / power) < (salient ? 0.3 : 1.0));
      CHECK(std::sqrt(error / power) > (salient ? 0.05 : 0.45));
    }
  }
}

TEST_CASE("one loud query head selects its pair for its own KV head only, in any order of tokens") {  // V33
  Random random(33);
  constexpr size_t kCount = 100;
  Floats k = random.normals(kCount * 64), q = random.normals(kCount * 4 * 64, 0.01);
  for (size_t t = 0; t < kCount; ++t)
    for (size_t c : {7, 39}) q[(t * 4 + 2) * 64 + c] *= 100 * 100;
  const Bytes mask = from_rows("pnmix(r=1/32)", k, q, 4, 64).bytes;
  REQUIRE((ones(mask) == 1 && bit(mask, 7)));
  const Floats other_q = random.normals(kCount * 4 * 64, 0.01);
  Floats weak = k;
  for (size_t t = 0; t < kCount; ++t) weak[t * 64 + 7] = weak[t * 64 + 39] = 0;
  const Bytes other = from_rows("pnmix(r=1/2)", weak, other_q, 4, 64).bytes;
  REQUIRE((ones(other) == 16 && !bit(other, 7)));

  // Sums are exact: shuffled tokens and heads give the same statistics to the last bit, and these are the ones of the definition.
  std::vector<size_t> order(kCount);
  std::iota(order.begin(), order.end(), 0);
  for (size_t i = kCount; i > 1; --i) std::swap(order[i - 1], order[random.below(i)]);
  Floats k2, q2;
  for (size_t t : order) {
    k2.insert(k2.end(), k.begin() + long(t * 64), k.begin() + long(t * 64 + 64));
    for (size_t head : {3, 1, 0, 2}) q2.insert(q2.end(), q.begin() + long((t * 4 + head) * 64), q.begin() + long((t * 4 + head + 1) * 64));
  }
  const auto statistics = [](const Floats &keys, const Floats &queries, std::vector<kvq_pair_sums> *sums, std::vector<kvq_channel_sums> *channels) {
    const Tensor a(keys, 1, 64), b(queries, 4, 64);
    auto policy = sized<kvq_policy>();
    policy.dim = 64, policy.q_heads = 4, policy.n_tokens = kCount, policy.k = a.view(), policy.q = b.view();
    sums->resize(32), channels->resize(64);
    uint64_t counts[2] = {};
    ok(kvq_policy_stats(&policy, sums->data(), channels->data(), counts));
    REQUIRE((counts[0] == kCount && counts[1] == 4 * kCount));
  };
  std::vector<kvq_pair_sums> first, second;
  std::vector<kvq_channel_sums> channels, channels2;
  statistics(k, q, &first, &channels), statistics(k2, q2, &second, &channels2);
  REQUIRE(std::memcmp(first.data(), second.data(), first.size() * sizeof first[0]) == 0);
  REQUIRE(std::memcmp(channels.data(), channels2.data(), channels.size() * sizeof channels[0]) == 0);
  REQUIRE(from_rows("pnmix(r=1/2)", k, q, 4, 64).bytes == from_rows("pnmix(r=1/2)", k2, q2, 4, 64).bytes);
  for (size_t pair = 0; pair < 32; ++pair) {
    const auto add = [&](const Floats &rows, size_t n, uint64_t sum[2], uint64_t squares[2]) {
      unsigned __int128 one = 0, two = 0;
      for (size_t i = 0; i < n; ++i) {
        const float u = entry(rows[i * 64 + pair]), v = entry(rows[i * 64 + pair + 32]);
        const float uu = u * u, vv = v * v, r2 = uu + vv;
        one += static_cast<unsigned __int128>(std::ldexp(double(std::sqrt(r2)), 24));
        two += static_cast<unsigned __int128>(std::ldexp(double(r2), 24));
      }
      CHECK((sum[0] == uint64_t(one) && sum[1] == uint64_t(one >> 64)));
      CHECK((squares[0] == uint64_t(two) && squares[1] == uint64_t(two >> 64)));
    };
    add(k, kCount, first[pair].k1, first[pair].k2);
    add(q, 4 * kCount, first[pair].q1, first[pair].q2);
  }
  for (size_t c = 0; c < 64; ++c) {
    __int128 sum = 0, size = 0;
    for (size_t t = 0; t < kCount; ++t) {
      const int64_t x = int64_t(std::ldexp(double(entry(k[t * 64 + c])), 24));
      sum += x, size += x < 0 ? -x : x;
    }
    CHECK((channels[c].sum[0] == uint64_t(sum) && channels[c].sum[1] == uint64_t(sum >> 64)));
    CHECK((channels[c].abs[0] == uint64_t(size) && channels[c].abs[1] == uint64_t(size >> 64)));
  }
}

TEST_CASE("Block-GTQ spends its whole budget, evenly where scores are equal") {  // V34
  CHECK(pairs("blockgtq(avg=3)", std::vector<double>(64, 1.0)).bytes == Bytes(64, 3));
  Bytes half(64, 2);
  std::fill(half.begin(), half.begin() + 32, uint8_t(3));
  CHECK(pairs("blockgtq(avg=5/2)", std::vector<double>(64, 7.0)).bytes == half);
  CHECK(pairs("blockgtq(avg=5/2)", std::vector<double>(64, 0.0)).bytes == half);
  Random random(34);
  for (int round = 0; round < 50; ++round) {
    std::vector<double> scores(64);
    for (double &s : scores) s = std::exp(6 * random.normal());
    const Bytes widths = pairs("blockgtq(avg=3,bmin=2,bmax=5)", scores).bytes;
    REQUIRE(std::accumulate(widths.begin(), widths.end(), 0) == 192);
    REQUIRE((*std::min_element(widths.begin(), widths.end()) >= 2 && *std::max_element(widths.begin(), widths.end()) <= 5));
  }
  CHECK(pairs("blockgtq(avg=8,bmax=6)", std::vector<double>(8, 1.0)).bytes == Bytes(8, 6));  // the limit ends it first
  CHECK(pairs("blockgtq(avg=1,bmin=2)", std::vector<double>(8, 1.0)).status == KVQ_E_INVALID);
  CHECK(pairs("pair-widths(avg=1/2,bmin=0)", std::vector<double>(4, 1.0)).bytes == Bytes{1, 1, 0, 0});
}

TEST_CASE("no other widths cost less") {  // V34
  Random random(35);
  for (int round = 0; round < 40; ++round) {
    std::vector<double> scores(4);
    for (double &s : scores) s = std::exp(3 * random.normal());
    for (int budget = 4; budget <= 16; ++budget) {
      const Bytes got = pairs("blockgtq(avg=" + std::to_string(budget) + "/4,bmin=1,bmax=4)", scores).bytes;
      REQUIRE(got.size() == 4);
      const auto cost = [&](const int(&bits)[4]) {
        double sum = 0;
        for (int i = 0; i < 4; ++i) sum += scores[size_t(i)] * std::pow(4.0, -bits[i]);
        return sum;
      };
      double best = std::numeric_limits<double>::infinity();
      for (int code = 0; code < 256; ++code) {
        const int bits[4] = {code % 4 + 1, code / 4 % 4 + 1, code / 16 % 4 + 1, code / 64 + 1};
        if (bits[0] + bits[1] + bits[2] + bits[3] <= budget) best = std::min(best, cost(bits));
      }
      const int chosen[4] = {got[0], got[1], got[2], got[3]};
      REQUIRE(cost(chosen) <= best * (1 + 1e-12));
    }
  }
}

TEST_CASE("width scores over sixty decades, and none that are no numbers") {  // V35
  std::vector<double> scores(64);
  for (size_t i = 0; i < 64; ++i) scores[i] = std::pow(10.0, 30 - 60.0 * double(i) / 63);
  const Bytes widths = pairs("blockgtq(avg=3)", scores).bytes;
  REQUIRE(widths.size() == 64);
  REQUIRE(std::accumulate(widths.begin(), widths.end(), 0) == 192);
  REQUIRE(std::is_sorted(widths.rbegin(), widths.rend()));
  // Bits go where s * 4^-bits is largest: 8 each for the first, 10^(60/63) = 4^1.58 apart.
  REQUIRE((widths[0] == 8 && widths[63] == 1));
  for (double bad : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity(), -1.0}) {
    scores[40] = bad;
    CHECK(pairs("blockgtq(avg=3)", scores).status == KVQ_E_INVALID);
    CHECK(pairs("pair-widths(avg=3)", scores).status == KVQ_E_INVALID);
  }
}

TEST_CASE("the pairs of a mask are channels by the rotary layout") {  // S21, S22
  const std::string mask = "2000000000000000";  // pair 5 of 64
  struct Part {
    uint32_t layout, rotary_dim, rotary_first;
    size_t u, v;
  };
  for (const Part &part : {Part{KVQ_ROPE_ADJACENT, 0, 0, 10, 11}, Part{KVQ_ROPE_HALF, 0, 0, 5, 69}, Part{KVQ_ROPE_HALF, 64, 0, 5, 37},
                           Part{KVQ_ROPE_HALF, 64, 32, 37, 69}, Part{KVQ_ROPE_HALF, 8, 0, 10, 11}, Part{KVQ_ROPE_HALF, 4, 12, 6, 7}}) {
    kvq_layer layer = layer_of(2, 1, 128);
    layer.rope_layout = part.layout, layer.rotary_dim = part.rotary_dim, layer.rotary_first = part.rotary_first;
    Mirror m(Setup{.recipe = "k=pair-mix(low=1,high=3,group=32,midpoint=1,mask=" + mask + ");v=raw;block=32", .layers = {layer}});
    const kvq_seq s = m.create();
    m.commit(s, ids(0, 256));
    for (uint32_t head = 0; head < 2; ++head) {
      const std::vector<double> errors = channel_errors(m, s, head);
      for (size_t c = 0; c < 128; ++c) {
        INFO("layout " << part.layout << " rotary " << part.rotary_first << "+" << part.rotary_dim << " channel " << c << ": " << errors[c]);
        if (c == part.u || c == part.v)
          CHECK(errors[c] < 0.25);
        else
          CHECK(errors[c] > 0.4);
      }
    }
  }
}

TEST_CASE("SemKV chooses a quarter of every block, and rounds the rest of a turn") {  // T21, T22
  Mirror m(Setup{.recipe = "semkv-tq", .layers = {layer_of(2, 1, 64)}});
  const kvq_seq s = m.create();
  m.commit(s, ids(0, 10));
  m.append(s, ids(100, 63), 5);
  const Floats tail = export_values(m.cache, s, 0, 1, KVQ_TENSOR_K, 73, 64);
  for (size_t t = 10; t < 73; ++t)
    for (size_t c = 0; c < 64; ++c) REQUIRE(tail[t * 64 + c] == entry(m.text.row(0, Text::K, m.shadow(s).tokens[t])[64 + c]));
  m.append(s, ids(163, 1));
  m.append(s, ids(200, 7), 2);
  m.end_turn(s);
  m.append(s, ids(300, 64), 9);
  m.end_turn(s);  // nothing pending
  const auto blocks = export_wire(m.cache, s, 0, 1, KVQ_TENSOR_V);
  const std::pair<Ids, size_t> want[] = {{ids(0, 10), 2}, {ids(100, 64), 16}, {ids(200, 7), 2}, {ids(300, 64), 16}};
  REQUIRE(blocks.size() == 4);
  for (size_t i = 0; i < 4; ++i) {
    const Bytes flags = flags_of(largest(m.text.scores(want[i].first), want[i].second));
    REQUIRE(blocks[i].tokens == want[i].first.size());
    REQUIRE(std::equal(flags.begin(), flags.end(), blocks[i].bytes.begin()));
  }
  m.check(s);
}

TEST_CASE("a policy is frozen by the first prompt, sinks included, whatever comes later") {  // T23
  for (const char *recipe : {"pnmix", "kvq-2", "tq-3c", "tq-split", "blockgtq-k3v3-fast"}) {
    INFO(recipe);
    Mirror m(Setup{.recipe = recipe, .layers = {layer_of(2, 2, 64)}});
    const kvq_seq s = m.create();
    m.commit(s, ids(0, 100));
    const Bytes frozen = policy_blob(m.cache, s);
    REQUIRE(!frozen.empty());
    m.append(s, ids(200, 500), 125);
    m.commit(s, ids(800, 100));
    REQUIRE(policy_blob(m.cache, s) == frozen);
    m.check(s);
    // Three tokens, all of them sinks, still decide.
    Mirror tiny(Setup{.recipe = recipe, .layers = {layer_of(2, 2, 64)}});
    const kvq_seq t = tiny.create();
    tiny.commit(t, ids(0, 3));
    REQUIRE(!policy_blob(tiny.cache, t).empty());
    tiny.append(t, ids(3, 300), 50);
    tiny.check(t);
    tiny.query(t, 2);
  }
}

TEST_CASE("a mask of the cache is that of the stateless decision") {
  Mirror m(Setup{.recipe = "k=pair-mix(low=1,high=3,group=32,midpoint=1);v=raw;block=32;policy=pnmix(r=1/2)", .layers = {layer_of(2, 2, 64)}});
  const kvq_seq s = m.create();
  m.commit(s, ids(0, 64));
  const Floats k = m.text.rows(0, Text::K, ids(0, 64)), q = m.text.rows(0, Text::Q, ids(0, 64));
  for (size_t head = 0; head < 2; ++head) {
    Floats own_k, own_q;
    for (size_t t = 0; t < 64; ++t) {
      own_k.insert(own_k.end(), k.begin() + long((2 * t + head) * 64), k.begin() + long((2 * t + head + 1) * 64));
      own_q.insert(own_q.end(), q.begin() + long((2 * t + head) * 128), q.begin() + long((2 * t + head + 1) * 128));
    }
    const Bytes mask = from_rows("pnmix(r=1/2)", own_k, own_q, 2, 64).bytes;
    const std::string text = "pair-mix(low=1,high=3,group=32,midpoint=1,mask=" + hex(mask) + ")";
    auto codec = sized<kvq_codec>();
    codec.text = text.c_str(), codec.dim = 64;
    const auto blocks = export_wire(m.cache, s, 0, uint32_t(head), KVQ_TENSOR_K);
    for (size_t block = 0; block < 2; ++block) {
      const Tensor rows(own_k.data() + block * 32 * 64, 32, 1, 64);
      Bytes wire(blocks[block].bytes.size());
      ok(kvq_codec_encode(&codec, rows.view(), 32, wire.data(), wire.size(), nullptr));
      REQUIRE(wire == blocks[block].bytes);
    }
  }
}

TEST_CASE("a policy travels as a blob to another sequence and another cache") {
  for (const char *recipe : {"pnmix", "kvq-3", "tq-2c", "tq-split"}) {
    INFO(recipe);
    const Setup setup{.recipe = recipe, .layers = {layer_of(2, 2, 64), layer_of(2, 2, 64)}};
    Mirror a(setup), b(setup);
    const kvq_seq s = a.create(), t = b.create();
    a.commit(s, ids(0, 500));
    const Bytes blob = policy_blob(a.cache, s);
    ok(kvq_policy_set(b.cache, t, blob.data(), blob.size()));
    b.commit(t, ids(0, 3));
    REQUIRE(policy_blob(b.cache, t) == blob);
    b.append(t, ids(3, 497), 71);
    REQUIRE((a.picture(s) == b.picture(t)));
    refused(kvq_policy_set(b.cache, t, blob.data(), blob.size()), KVQ_E_STATE);  // it has tokens

    // Another recipe or geometry: the field is named.
    Mirror other(Setup{.recipe = recipe + std::string(";sinks=7"), .layers = setup.layers});
    Mirror wide(Setup{.recipe = recipe, .layers = {layer_of(2, 2, 64), layer_of(3, 2, 64)}});
    kvq_seq x = other.create(), y = wide.create();
    refused(kvq_policy_set(other.cache, x, blob.data(), blob.size()), KVQ_E_CONFIG);
    refused(kvq_policy_set(wide.cache, y, blob.data(), blob.size()), KVQ_E_CONFIG);
    REQUIRE(detail().find("kv_heads") != std::string::npos);
    wide.commit(y, ids(0, 200));  // neither is harmed
    wide.check(y);
  }
}

TEST_CASE("a damaged blob is refused and harms nothing") {
  Mirror m(Setup{.recipe = "kvq-3", .layers = {layer_of(2, 2, 64)}});
  const kvq_seq s = m.create();
  m.commit(s, ids(0, 200));
  const Bytes blob = policy_blob(m.cache, s);
  const kvq_seq t = m.create();
  Random random(77);
  for (size_t size = 0; size < blob.size(); size += 1 + size / 7) {
    const int32_t status = kvq_policy_set(m.cache, t, blob.data(), size);
    INFO(size << " of " << blob.size() << " bytes: " << kvq_status_string(status));
    CHECK((status == KVQ_E_CORRUPT || status == KVQ_E_CONFIG || (size == 0 && status == KVQ_E_INVALID)));
  }
  Bytes longer = blob;
  longer.push_back(0);
  CHECK(kvq_policy_set(m.cache, t, longer.data(), longer.size()) == KVQ_E_CORRUPT);
  for (int i = 0; i < 300; ++i) {
    Bytes broken = blob;
    broken[random.below(blob.size())] ^= uint8_t(1 << random.below(8));
    kvq_seq fresh = m.create();
    const int32_t status = kvq_policy_set(m.cache, fresh, broken.data(), broken.size());
    CHECK((status == KVQ_OK || status == KVQ_E_CORRUPT || status == KVQ_E_CONFIG));
    if (status == KVQ_OK) m.commit(fresh, ids(0, 170));  // another policy, but one that works
    m.remove(fresh);
  }
  m.commit(t, ids(0, 200));
  REQUIRE((m.picture(t) == m.picture(s)));
}

TEST_CASE("calibration freezes the cache's policy, in any order and cut") {
  const Setup setup{.recipe = "blockgtq-k3v3", .layers = {layer_of(2, 2, 64), layer_of(2, 2, 64)}};
  const auto add = [](Mirror &m, uint32_t layer, const Ids &list) {
    const Tensor k = m.tensor(layer, Text::K, list), v = m.tensor(layer, Text::V, list), q = m.tensor(layer, Text::Q, list);
    auto data = sized<kvq_calibration>();
    data.layer = layer, data.n_tokens = list.size(), data.k = k.view(), data.v = v.view(), data.q = q.view();
    return kvq_calibrate(m.cache, &data);
  };
  Mirror a(setup), b(setup), prompt(setup);
  ok(add(a, 0, ids(0, 90)));
  refused(kvq_calibrate_finish(a.cache), KVQ_E_STATE);  // layer 1 has nothing
  REQUIRE(detail().find("layer 1") != std::string::npos);
  ok(add(a, 1, ids(0, 90)));
  ok(kvq_calibrate_finish(a.cache));
  for (const Ids &cut : {ids(60, 30), ids(0, 1), ids(1, 59)})
    for (uint32_t layer : {1, 0}) ok(add(b, layer, cut));
  ok(kvq_calibrate_finish(b.cache));
  const Bytes blob = policy_blob(a.cache, 0);
  REQUIRE((!blob.empty() && policy_blob(b.cache, 0) == blob));
  refused(add(a, 0, ids(0, 5)), KVQ_E_STATE);
  refused(kvq_calibrate_finish(a.cache), KVQ_E_STATE);
  // The first committed prompt decides as calibration with the same tokens does.
  const kvq_seq p = prompt.create(), s = a.create();
  prompt.commit(p, ids(0, 90));
  REQUIRE(policy_blob(prompt.cache, 0) == blob);
  a.commit(s, ids(0, 90));
  REQUIRE((a.picture(s) == prompt.picture(p)));
  // And a later sequence with other tokens does not change it.
  const kvq_seq later = prompt.create();
  prompt.commit(later, ids(500, 200));
  REQUIRE(policy_blob(prompt.cache, 0) == blob);
  prompt.check(later);
  // From a blob.
  Mirror c(setup);
  ok(kvq_policy_set(c.cache, 0, blob.data(), blob.size()));
  refused(kvq_policy_set(c.cache, 0, blob.data(), blob.size()), KVQ_E_STATE);
  const kvq_seq t = c.create();
  c.commit(t, ids(0, 90));
  REQUIRE((c.picture(t) == prompt.picture(p)));
  Mirror own(Setup{.recipe = "kvq-3", .layers = setup.layers});
  refused(add(own, 0, ids(0, 5)), KVQ_E_UNSUPPORTED);
  refused(kvq_calibrate_finish(own.cache), KVQ_E_UNSUPPORTED);
}

TEST_CASE("long calibration texts are summed as short ones are, and name the token that is not finite") {
  constexpr uint32_t kTokens = 40000, kDim = 16;
  const Setup setup{.recipe = "blockgtq-k3v3", .layers = {layer_of(1, 1, kDim)}};
  Random random(58);
  Floats rows = random.rows(kTokens, 1, kDim);
  const auto add = [&](const Mirror &m, uint32_t first, uint32_t n) {
    const Tensor x(rows.data() + size_t(first) * kDim, n, 1, kDim);
    auto data = sized<kvq_calibration>();
    data.n_tokens = n, data.k = data.q = x.view();
    return kvq_calibrate(m.cache, &data);
  };
  Mirror whole(setup), cut(setup), bad(setup);
  ok(add(whole, 0, kTokens));
  for (uint32_t first = 0; first < kTokens; first += 2500) ok(add(cut, first, 2500));
  rows[size_t(kTokens - 3) * kDim + 5] = std::numeric_limits<float>::quiet_NaN();
  refused(add(bad, 0, kTokens), KVQ_E_NONFINITE);
  REQUIRE(detail().find("token 39997") != std::string::npos);
  for (const Mirror *m : {&whole, &cut}) ok(kvq_calibrate_finish(m->cache));
  REQUIRE((!policy_blob(whole.cache, 0).empty() && policy_blob(whole.cache, 0) == policy_blob(cut.cache, 0)));
}

TEST_CASE("a commit without the statistics that its policy needs is refused and can be made good") {
  for (const char *recipe : {"pnmix", "kvq-3", "blockgtq-k3v3"}) {
    Mirror m(Setup{.recipe = recipe, .layers = {layer_of(2, 2, 64)}});
    const kvq_seq s = m.create();
    refused(m.finish(s), KVQ_E_STATE);
    const Tensor k = m.tensor(0, Text::K, ids(0, 50)), v = m.tensor(0, Text::V, ids(0, 50));
    auto desc = sized<kvq_prefill>();
    desc.n_tokens = 50, desc.k = k.view(), desc.v = v.view();
    ok(kvq_prefill_commit(m.cache, s, &desc, nullptr));
    refused(m.finish(s), KVQ_E_STATE);
    REQUIRE(lengths(m.cache, s).total == 50);
    REQUIRE(lengths(m.cache, s).committed == 0);
    ok(m.prefill(s, 0, ids(50, 30), KVQ_PREFILL_FINAL, true));
    REQUIRE(lengths(m.cache, s).committed == 1);
  }
  Mirror m(Setup{.recipe = "semkv", .layers = {layer_of(2, 2, 64)}});
  const kvq_seq s = m.create();
  const Tensor k = m.tensor(0, Text::K, ids(0, 50)), v = m.tensor(0, Text::V, ids(0, 50));
  auto desc = sized<kvq_prefill>();
  desc.n_tokens = 50, desc.k = k.view(), desc.v = v.view(), desc.flags = KVQ_PREFILL_FINAL;
  REQUIRE(kvq_prefill_commit(m.cache, s, &desc, nullptr) < 0);  // no scores
  m.check_lengths(s);
  m.commit(s, ids(0, 50));
  m.check(s);
}

TEST_CASE("ChanMix's profile: heads with most retrieval, channels of widest and narrowest range") {
  CHECK(pairs("chanmix(r_h=1/10)", std::vector<double>(256, 1.0)).bytes.size() == 32);
  CHECK(ones(pairs("chanmix(r_h=1/10)", std::vector<double>(256, 1.0)).bytes) == 25);
  std::vector<double> range(16, 5.0);
  range[3] = 9, range[8] = 7, range[1] = 1;
  Bytes want(16, 2);
  for (size_t c : {3, 8, 0, 2}) want[c] = 3;  // two that are wider, then the lowest of the equal ones
  for (size_t c : {1, 4, 5, 6}) want[c] = 1;
  CHECK(pairs("chanmix(share=1/4)", range).bytes == want);
}
