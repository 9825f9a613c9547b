// Quality on synthetic data: error tables and orderings that a wrong level count, a wrong formula or a lost correction would break.
// Errors are relative RMS unless said otherwise; KL is that of the softmax against raw keys, the mean over 64 queries N(0, 1) with
// scale 1/sqrt(D), D = 128; "raw" means after the entry rounding.  (Cases V21, V22, T10, Q1 to Q10.)
#include <array>
#include <numeric>

#include "mirror.hpp"

using namespace kvq_test;

namespace {

constexpr size_t D = 128;

Floats entered(Floats x) {
  for (float &value : x) value = entry(value);
  return x;
}

// Encode and decode [tokens][dim] with a codec text.
Floats through(const std::string &text, const Floats &x, uint32_t dim = D) {
  const uint64_t tokens = x.size() / dim;
  const Tensor rows(x, 1, dim);
  auto codec = sized<kvq_codec>();
  codec.text = text.c_str(), codec.dim = dim;
  size_t size = 0;
  INFO(text);
  refused(kvq_codec_encode(&codec, rows.view(), tokens, nullptr, 0, &size), KVQ_E_SIZE);
  Bytes wire(size);
  ok(kvq_codec_encode(&codec, rows.view(), tokens, wire.data(), size, nullptr));
  Floats out(x.size());
  ok(kvq_codec_decode(&codec, wire.data(), size, tokens, out.data()));
  return out;
}

double energy(const Floats &got, const Floats &raw) {
  double error = 0, power = 0;
  for (size_t i = 0; i < raw.size(); ++i) {
    const double r = entry(raw[i]), difference = got[i] - r;
    error += difference * difference, power += r * r;
  }
  return error / power;
}
double relative(const Floats &got, const Floats &raw) { return std::sqrt(energy(got, raw)); }

std::vector<double> logits(const float *q, const Floats &k) {
  std::vector<double> result;
  for (size_t t = 0; t * D < k.size(); ++t) {
    double sum = 0;
    for (size_t c = 0; c < D; ++c) sum += double(entry(q[c])) * k[t * D + c];
    result.push_back(sum / std::sqrt(double(D)));
  }
  return result;
}

// KL(softmax(a) || softmax(b)).
double divergence(const std::vector<double> &a, const std::vector<double> &b) {
  const auto log_sum = [](const std::vector<double> &x) {
    const double top = *std::max_element(x.begin(), x.end());
    double sum = 0;
    for (double v : x) sum += std::exp(v - top);
    return top + std::log(sum);
  };
  const double za = log_sum(a), zb = log_sum(b);
  double kl = 0;
  for (size_t i = 0; i < a.size(); ++i) kl += std::exp(a[i] - za) * ((a[i] - za) - (b[i] - zb));
  return kl;
}

struct Loss {
  double kl = 0, mean_logit_error = 0;
};
Loss loss(const Floats &q, const Floats &raw, const Floats &got) {
  const Floats truth = entered(raw);
  Loss result;
  const size_t queries = q.size() / D;
  for (size_t i = 0; i < queries; ++i) {
    const auto a = logits(&q[i * D], truth), b = logits(&q[i * D], got);
    result.kl += divergence(a, b) / double(queries);
    for (size_t t = 0; t < a.size(); ++t) result.mean_logit_error += std::fabs(a[t] - b[t]) / double(a.size() * queries);
  }
  return result;
}
double kl(const Floats &q, const Floats &raw, const Floats &got) { return loss(q, raw, got).kl; }

std::string hex(const Bytes &bytes, bool inverted = false) {
  std::string text;
  for (uint8_t byte : bytes) {
    const uint8_t b = inverted ? uint8_t(~byte) : byte;
    text += "0123456789abcdef"[b >> 4], text += "0123456789abcdef"[b & 15];
  }
  return text;
}

Bytes decide(const std::string &text, const Floats &k, const Floats &q) {
  const Tensor keys(k, 1, D), queries(q, 1, D);
  auto policy = sized<kvq_policy>();
  policy.text = text.c_str();
  policy.dim = D, policy.q_heads = 1, policy.n_tokens = std::min(k.size(), q.size()) / D;
  policy.k = keys.view(), policy.q = queries.view();
  size_t needed = 0;
  refused(kvq_policy_decide(&policy, nullptr, 0, &needed), KVQ_E_SIZE);
  Bytes result(needed);
  ok(kvq_policy_decide(&policy, result.data(), needed, nullptr));
  return result;
}
std::string list(const Bytes &widths) {
  std::string text;
  for (uint8_t width : widths) text += char('0' + width);
  return text;
}
std::string pair_mix(const Bytes &mask, bool midpoint = true, bool inverted = false) {
  return "pair-mix(low=1,high=3,group=128,mask=" + hex(mask, inverted) + (midpoint ? ",midpoint=1)" : ")");
}
std::string channels(int levels, int group) {
  return "affine-channel(levels=" + std::to_string(levels) + ",group=" + std::to_string(group) + ")";
}
std::string lloyd(int levels) { return "lloyd(levels=" + std::to_string(levels) + ")"; }

// Keys N(0, 1) with three channels far from zero.
Floats biased(Random &random) {
  Floats k = random.normals(512 * D);
  for (size_t t = 0; t < 512; ++t) k[t * D + 5] += 200, k[t * D + 40] -= 350, k[t * D + 99] += 921;
  return k;
}

// Keys and queries whose pairs have energies e^(-i / decay), mean 1, in random pair order: key std their root, query std their
// fourth root.
struct Shaped {
  Floats k, q, prompt_q;
  Shaped(Random &random, double decay) {
    std::vector<double> by_pair(D / 2);
    double mean = 0;
    for (size_t i = 0; i < D / 2; ++i) mean += (by_pair[i] = std::exp(-double(i) / decay)) / (D / 2);
    for (size_t i = D / 2; i > 1; --i) std::swap(by_pair[i - 1], by_pair[random.below(i)]);
    const auto rows = [&](size_t n, double power) {
      Floats result(n * D);
      for (size_t i = 0; i < result.size(); ++i) result[i] = float(random.normal() * std::pow(by_pair[i % (D / 2)] / mean, power));
      return result;
    };
    k = rows(1024, 0.5), q = rows(64, 0.25), prompt_q = rows(1024, 0.25);
  }
};

void within(double got, double figure, double share, const std::string &what) {
  INFO(what << ": " << got << ", the table says " << figure << "; seed " << seed());
  CHECK(std::fabs(got - figure) <= share * figure);
}

}  // namespace

TEST_CASE("errors of every scheme on normal data are those of the table", "[quality]") {  // V21, V22
  Random random(21);
  const Floats x = random.normals(4096 * D);
  const int levels[] = {3, 4, 5, 6, 7, 8, 16};
  const double group_32[] = {.587, .393, .294, .235, .196, .168, .078}, group_128[] = {.728, .500, .374, .299, .249, .214, .100};
  const double rotated[] = {.444, .344, .282, .239, .208, .184, .096};
  for (size_t i = 0; i < 7; ++i) {
    const std::string n = std::to_string(levels[i]);
    within(relative(through(channels(levels[i], 32), x), x), group_32[i], 0.03, "channels, 32, " + n);
    within(relative(through(channels(levels[i], 128), x), x), group_128[i], 0.03, "channels, 128, " + n);
    within(relative(through("affine-token(levels=" + n + ",group=32)", x), x), group_32[i], 0.03, "tokens, 32, " + n);
    within(relative(through("affine-token(levels=" + n + ",group=128,rotate=1)", x), x), group_128[i], 0.03, "tokens, rotated, " + n);
    within(relative(through(lloyd(levels[i]), x), x), rotated[i], 0.03, "rotated rows " + n);
    // One byte a row: a relative rounding of at most 1/16, 1/16/sqrt(3) on average, on top.
    const double one_byte = relative(through("lloyd(levels=" + n + ",params=e5m3)", x), x);
    CHECK(one_byte >= 0.97 * rotated[i]);
    CHECK(one_byte <= 1.03 * std::hypot(rotated[i], 1 / 16.0 / std::sqrt(3.0)));
  }
  within(relative(through(lloyd(2), x), x), .633, 0.03, "rotated rows 2");
  const double middle_32 = relative(through("affine-channel(levels=2,group=32,midpoint=1)", x), x);
  const double middle_128 = relative(through("affine-channel(levels=2,group=128,midpoint=1)", x), x);
  within(middle_32, .641, 0.03, "midpoint 32"), within(middle_128, .784, 0.03, "midpoint 128");
  within(energy(through(channels(2, 32), x), x), 1.963, 0.05, "end points 32");
  within(energy(through(channels(2, 128), x), x), 3.562, 0.05, "end points 128");
  CHECK(energy(through(channels(2, 32), x), x) >= 4 * middle_32 * middle_32);
  CHECK(energy(through(channels(2, 128), x), x) >= 4 * middle_128 * middle_128);
  // The widths of channel-widths and the planes of pair-mix are the same quantizers.
  for (const auto &[width, n, figure] : {std::tuple{'1', 2, .641}, {'2', 4, 0.0}, {'3', 8, 0.0}, {'4', 16, 0.0}}) {
    const Floats a = through("channel-widths(bits=" + std::string(64, width) + ",group=32,midpoint=1)", x);
    const Floats b = through("affine-channel(levels=" + std::to_string(n) + ",group=32,midpoint=1)", x);
    REQUIRE(same_bits(a, b));
    if (figure > 0) within(relative(a, x), figure, 0.03, "widths");
  }
  REQUIRE(same_bits(through(pair_mix(Bytes(8, 0)), x), through("affine-channel(levels=2,group=128,midpoint=1)", x)));
  REQUIRE(same_bits(through(pair_mix(Bytes(8, 255)), x), through(channels(8, 128), x)));
}

TEST_CASE("more bits, less error", "[quality]") {  // T10
  double last = 0, by_levels[17] = {};
  for (int levels : {3, 4, 5, 6, 7, 8, 16, 256}) {
    Random random(10);
    const Floats x = random.normals(1024 * D);
    const double error = relative(through(channels(levels, 32), x), x);
    if (levels <= 16) by_levels[levels] = error;
    if (levels > 3 && levels <= 8) CHECK(last >= 1.10 * error);
    if (levels == 256) CHECK(by_levels[16] >= 10 * error);
    last = error;
  }
  CHECK(by_levels[4] >= 1.7 * by_levels[8]);
  CHECK(by_levels[8] >= 1.7 * by_levels[16]);
}

TEST_CASE("biased keys: per channel is good, per token and rotated rows are not, widths are", "[quality]") {  // Q1 to Q3
  Random random(41);
  const Floats k = biased(random), q = random.normals(64 * D);
  const double two = kl(q, k, through(channels(4, 32), k)), three = kl(q, k, through(channels(8, 32), k)),
               four = kl(q, k, through(channels(16, 32), k));
  CAPTURE(two, three, four, seed());
  CHECK(two <= .15);
  CHECK(three <= .028);
  CHECK(four <= .006);
  CHECK(kl(q, k, through("affine-token(levels=16,group=32)", k)) >= 50 * four);
  const Floats rows3 = through(lloyd(8), k), rows4 = through(lloyd(16), k);
  const double rot3 = kl(q, k, rows3);
  CHECK(rot3 > 1);
  CHECK(kl(q, k, rows4) > 1);
  within(energy(through(lloyd(4), k), k), .057, 0.5, "energy hides it, 2 bits");
  CHECK(energy(rows3, k) < .04);
  CHECK(energy(rows4, k) < .02);
  const Bytes widths = decide("blockgtq(avg=3)", k, random.normals(512 * D));
  const double grouped = kl(q, k, through("width-groups(bits=" + list(widths) + ")", k));
  CAPTURE(grouped, rot3);
  CHECK(grouped <= .1);
  CHECK(50 * grouped <= rot3);
}

TEST_CASE("PN-Mix's mask and its midpoint correction", "[quality]") {  // Q4, Q5
  Random random(44);
  const Shaped data(random, 8);
  const Bytes mask = decide("pnmix(r=1/2)", data.k, data.prompt_q);
  const double uniform = kl(data.q, data.k, through(channels(4, 128), data.k));
  const double mixed = kl(data.q, data.k, through(pair_mix(mask), data.k));
  const double wrong = kl(data.q, data.k, through(pair_mix(mask, true, true), data.k));
  CAPTURE(uniform, mixed, wrong, seed());
  CHECK(mixed <= .4 * uniform);
  CHECK(wrong >= 2 * uniform);
  const Shaped flat(random, 14);
  const Bytes flat_mask = decide("pnmix(r=1/2)", flat.k, flat.prompt_q);
  const double corrected = kl(flat.q, flat.k, through(pair_mix(flat_mask), flat.k));
  const double ends = kl(flat.q, flat.k, through(pair_mix(flat_mask, false), flat.k));
  CAPTURE(corrected, ends);
  CHECK(ends >= 1.8 * corrected);
}

TEST_CASE("Block-GTQ's widths beat uniform rows", "[quality]") {  // Q6
  Random random(46);
  const Shaped data(random, 8);
  const Bytes widths = decide("blockgtq(avg=3)", data.k, data.prompt_q);
  const Loss grouped = loss(data.q, data.k, through("width-groups(bits=" + list(widths) + ")", data.k));
  const Loss uniform = loss(data.q, data.k, through(lloyd(8), data.k));
  CAPTURE(grouped.kl, uniform.kl, grouped.mean_logit_error, uniform.mean_logit_error, seed());
  CHECK(grouped.kl <= .4 * uniform.kl);
  CHECK(grouped.mean_logit_error <= .65 * uniform.mean_logit_error);
}

TEST_CASE("queries decide which pairs matter", "[quality]") {  // Q7
  Random random(47);
  const auto rows = [&](size_t n, bool query) {
    Floats result(n * D);
    for (size_t i = 0; i < result.size(); ++i) {
      const double pair = double(i % (D / 2));
      result[i] = float(random.normal() * std::sqrt(query ? std::exp(-pair / 8) : std::exp(pair / 60)));
    }
    return result;
  };
  const Floats k = rows(1024, false), q = rows(64, true), prompt_q = rows(1024, true);
  const double both = kl(q, k, through(pair_mix(decide("pnmix(r=1/2)", k, prompt_q)), k));
  const double keys = kl(q, k, through(pair_mix(decide("pnmix(r=1/2,criterion=k-pair)", k, prompt_q)), k));
  CAPTURE(both, keys, seed());
  CHECK(keys >= 5 * both);
}

TEST_CASE("SemKV: more high tokens, less error, between the two uniform ends", "[quality]") {  // Q8
  const auto error_of = [](const std::string &recipe) {
    Mirror m(Setup{.recipe = recipe, .layers = {layer_of(1, 1, 128)}}, 48);
    const kvq_seq s = m.create();
    const uint32_t count = 1000;
    m.commit(s, ids(0, count));
    const Floats got = export_values(m.cache, s, 0, 0, KVQ_TENSOR_V, count / 64 * 64, D);
    return relative(got, m.text.rows(0, Text::V, ids(0, count / 64 * 64)));
  };
  double last = 10;
  for (const char *r : {"0/1", "1/4", "1/2", "3/4", "1/1"}) {
    const std::string policy = std::string(";policy=semkv(r=") + r + ",low=lloyd(levels=5),high=lloyd(levels=6))";
    const double error = error_of("semkv-tq" + policy);
    CAPTURE(r, error, last);
    CHECK(error < last);
    last = error;
    if (r[0] == '0') CHECK(std::fabs(error - error_of("tq-2.322")) < 1e-12);
    if (r[0] == '1' && r[2] == '1') CHECK(std::fabs(error - error_of("tq-2.585")) < 1e-12);
  }
}

TEST_CASE("raw sinks keep four special tokens out of the first group", "[quality]") {  // Q9
  Random random(49);
  constexpr size_t kTokens = 516, kQueries = 64;
  Floats k = random.normals(kTokens * D), q = random.normals(kQueries * D);
  for (size_t t = 0; t < 4; ++t)
    for (size_t c = 0; c < D; ++c) k[t * D + c] = float(0.1 * random.normal() + (c == 7 ? 40 : 0));
  for (size_t i = 0; i < kQueries; ++i) q[i * D + 7] = float(0.3 * std::fabs(random.normal()) + 1.2);
  for (int levels : {4, 8, 16}) {
    const auto split = [&](size_t first, size_t count) { return Floats(k.begin() + long(first * D), k.begin() + long((first + count) * D)); };
    Floats sinks = entered(split(0, 4));
    const Floats behind = through(channels(levels, 32), split(4, 512));
    sinks.insert(sinks.end(), behind.begin(), behind.end());
    Floats inside = through(channels(levels, 32), split(0, 512));
    const Floats tail = entered(split(512, 4));
    inside.insert(inside.end(), tail.begin(), tail.end());
    const double with = kl(q, k, sinks), without = kl(q, k, inside);
    CAPTURE(levels, with, without, seed());
    CHECK(with <= .75 * without);
  }
}

TEST_CASE("width groups of two and four channels have the error of the normal books", "[quality]") {  // Q10
  Random random(50);
  for (const auto &[dim, figures] : {std::pair{2u, std::array{.0556, .0111, .0033}}, {4u, std::array{.0607, .0196, .0053}}})
    for (size_t i = 0; i < 3; ++i) {
      const Floats x = random.normals(40000 * dim);
      const std::string text = "width-groups(bits=" + std::string(dim / 2, char('2' + i)) + ",scale=matched)";
      within(energy(through(text, x, dim), x), figures[i], 0.05, text);
    }
}
