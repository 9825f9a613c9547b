// What the quantizers promise beyond single blocks: error bounds in float64, scaling, torture values, and error energies.
#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <cmath>

#include "codec_kit.hpp"

using namespace kvq_test;

namespace {

std::string text(const char *pattern, uint32_t a, uint32_t b = 0) {
  char buffer[200];
  std::snprintf(buffer, sizeof buffer, pattern, a, b);
  return buffer;
}

// Every kind at dimension 64, groups of 16 tokens.
const std::vector<std::string> &kinds() {
  static const std::vector<std::string> texts = {
      "raw",
      "affine-channel(levels=3,group=16)",
      "affine-channel(levels=4,group=16,midpoint=1)",
      "affine-token(levels=6,group=16)",
      "affine-token(levels=5,group=64,rotate=1)",
      "lloyd(levels=4)",
      "lloyd(levels=7,scale=ls,rotate=0)",
      "lloyd(levels=3,params=e5m3,scale=unbiased)",
      "pair-mix(low=1,high=3,group=16,mask=0f33a500,midpoint=1)",
      "width-groups(bits=12345678123456781111111122222222)",
      "channel-split(high=8,low=4,mask=ff00ff00ff00ff00,scale=plain)",
      "kitty(boost=1/8,group=16)",
      "channel-widths(bits=01234567801234567800112233445566,group=16,midpoint=1)",
      "channel-widths(bits=01234567801234567800112233445566,group=16,params=e4m3)",
      "polar(radius=4,angle=8,group=16)",
      "progressive(bits=8)",
      "progressive(bits=2)",
  };
  return texts;
}

struct AffineCase {
  uint32_t levels;
  bool midpoint;
};
constexpr AffineCase kAffine[] = {{2, false}, {3, false}, {4, false}, {16, false}, {256, false}, {2, true}, {3, true}, {8, true}};

HeadFormat column_format(const AffineCase &c, uint32_t group, uint32_t dim) {
  return format_of(text("affine-channel(levels=%u,group=%u", c.levels, group) + (c.midpoint ? ",midpoint=1)" : ")"), keys(dim));
}

// Data of many sizes: columns from 1e-3 to 1e3, or as `stream` says something nastier.
std::vector<uint16_t> wild(Random &random, uint32_t tokens, uint32_t dim) {
  std::vector<uint16_t> x(size_t(tokens) * dim);
  for (uint32_t c = 0; c < dim; c++) {
    const double scale = std::pow(10, random.uniform() * 6 - 3), shift = random.below(3) ? 0 : scale * 10 * random.normal();
    for (uint32_t t = 0; t < tokens; t++) {
      const uint16_t bits = half_bits(shift + scale * random.normal());
      x[t * dim + c] = bits == 0x8000 ? 0 : bits;
    }
  }
  return x;
}

}  // namespace

TEST_CASE("affine columns: stored scales and zeros, codes against them, and the error bound of section 2.1 (V17)") {
  Random random;
  constexpr uint32_t dim = 64, group = 32;
  for (const AffineCase &c : kAffine) {
    const HeadFormat format = column_format(c, group, dim);
    const std::vector<uint16_t> x = wild(random, group, dim);
    const Block block = encoded(format, x);
    const std::vector<float> out = decoded(format, block);
    const double levels = c.levels;
    for (uint32_t j = 0; j < dim; j++) {
      double mn = 1e9, mx = -1e9;
      for (uint32_t t = 0; t < group; t++) {
        mn = std::min(mn, half_value(x[t * dim + j]));
        mx = std::max(mx, half_value(x[t * dim + j]));
      }
      const double s = half_value(block.params[2 * j]), z = half_value(block.params[2 * j + 1]);
      const double s32 = float((float(mx) - float(mn)) / float(c.midpoint ? levels : levels - 1));
      const double z32 = c.midpoint ? float((float(2 * levels - 1) * float(mn) + float(mx)) / float(2 * levels)) : mn;
      REQUIRE(block.params[2 * j] == half_bits(s32));
      REQUIRE(half_value(half_bits(z32)) == z);
      const double bound = s / 2 + (c.midpoint ? levels - 0.5 : levels - 1) * std::max(0.0, s32 - s) + std::fabs(z - z32);
      for (uint32_t t = 0; t < group; t++) {
        const double value = half_value(x[t * dim + j]);
        const float quotient = s == 0 ? 0 : (float(value) - float(z)) / float(s);
        const double code = std::clamp(std::nearbyint(double(quotient)), 0.0, s == 0 ? 0 : levels - 1);
        REQUIRE(block.codes[t * dim + j] == code);
        REQUIRE(out[t * dim + j] == float(z + code * s));
        REQUIRE(std::fabs(value - out[t * dim + j]) <= bound + 1e-6 * (std::fabs(value) + std::fabs(z)));
      }
    }
  }
}

TEST_CASE("affine rows keep the bound of section 2.1, rotated ones in norm") {
  Random random;
  constexpr uint32_t dim = 96;
  const std::vector<uint16_t> x = wild(random, 20, dim);
  for (const uint32_t levels : {2u, 5u, 16u, 256u}) {
    for (const uint32_t group : {1u, 12u, 96u}) {
      const HeadFormat format = format_of(text("affine-token(levels=%u,group=%u)", levels, group), values(dim));
      const Block block = encoded(format, x);
      const std::vector<float> out = decoded(format, block);
      for (size_t i = 0; i < x.size(); i++) {
        const uint16_t *params = block.params.data() + i / group * 2;
        const double s = half_value(params[0]), z = half_value(params[1]);
        const double mn =
            half_value(*std::min_element(x.begin() + long(i / group * group), x.begin() + long(i / group * group + group),
                                         [](uint16_t a, uint16_t b) { return half_value(a) < half_value(b); }));
        REQUIRE(z == mn);
        REQUIRE(std::fabs(half_value(x[i]) - out[i]) <= s / 2 * (1 + levels * 0x1p-10) + 1e-6 * std::fabs(mn) + levels * 0x1p-24);
      }
    }
    const HeadFormat rotated = format_of(text("affine-token(levels=%u,group=96,rotate=1)", levels), values(dim));
    const Block block = encoded(rotated, x);
    const std::vector<float> out = decoded(rotated, block);
    for (uint32_t t = 0; t < 20; t++) {
      double error = 0, power = 0;
      for (uint32_t c = 0; c < dim; c++) {
        const double value = half_value(x[t * dim + c]);
        error += std::pow(value - out[t * dim + c], 2), power += value * value;
      }
      const double s = half_value(block.params[2 * t]), half_step = s / 2 + levels * s * 0x1p-11 + levels * 0x1p-24;
      // Each rotated value is off by half a step, and z by what hp takes from it.
      REQUIRE(std::sqrt(error) <=
              std::sqrt(double(dim)) * (half_step + std::fabs(half_value(block.params[2 * t + 1])) * 0x1p-11) +
                  1e-6 * std::sqrt(power));
    }
  }
}

TEST_CASE("multiples of 2^-8 times 2^-k have the same codes for every k, and scales exactly as much smaller (V5)") {
  Random random;
  std::vector<float> x(32 * 8);
  for (float &value : x) value = float(int(random.below(2049)) - 1024) / 256;
  for (const uint32_t levels : {4u, 8u, 16u}) {
    const HeadFormat format = format_of(text("affine-channel(levels=%u,group=32)", levels), keys(8));
    const Block base = encoded(format, x);
    for (int k = 0; k <= 12; k++) {
      std::vector<float> scaled = x;
      for (float &value : scaled) value = std::ldexp(value, -k);
      const Block block = encoded(format, scaled);
      REQUIRE(block.codes == base.codes);
      for (size_t i = 0; i < block.params.size(); i++)
        REQUIRE(half_value(block.params[i]) == std::ldexp(half_value(base.params[i]), -k));
    }
  }
}

TEST_CASE("keys times 1024 decode to exactly 1024 times as much (V14)") {
  Random random;
  std::vector<float> x(32 * 64);
  for (float &value : x) value = float(half_value(half_bits(std::clamp(random.normal(), -4.0, 4.0) * 8)));
  for (float &value : x)
    if (std::fabs(value) < 0.01f) value = 0;  // no subnormal parameters
  std::vector<float> large = x;
  for (float &value : large) value *= 1024;
  for (const std::string &kind : kinds()) {
    if (kind.find("e4m3") != kind.npos || kind.find("e5m3") != kind.npos) continue;  // 448 and 3840 saturate
    if (kind.starts_with("polar")) continue;                                         // angles do not scale
    const HeadFormat format = format_of(kind, keys(64));
    const std::vector<float> a = decoded(format, encoded(format, x)), b = decoded(format, encoded(format, large));
    INFO(kind);
    for (size_t i = 0; i < a.size(); i++) REQUIRE(b[i] == a[i] * 1024);
  }
}

TEST_CASE("constant groups decode to themselves with code 0 (V2, V4)") {
  for (const float c : {0.0f, 1e-8f, 0.01f, 1.0f, -3.25f, 100.0f, -100.0f, 6e4f}) {
    const std::vector<float> x(16 * 64, c);
    const float entered = float(half_value(half_bits(c)));
    for (const std::string &kind : kinds()) {
      if (!kind.starts_with("affine-channel") && kind != "affine-token(levels=6,group=16)" && !kind.starts_with("pair-mix"))
        continue;
      const HeadFormat format = format_of(kind, keys(64));
      const Block block = encoded(format, x);
      INFO(kind << " " << c);
      REQUIRE(std::ranges::all_of(block.codes, [](uint8_t code) { return code == 0; }));
      const bool midpoint = format.codec.midpoint;  // (7c + c)/8 may round
      for (const float value : decoded(format, block))
        REQUIRE(std::fabs(value - entered) <= (midpoint ? 0x1p-10 * std::fabs(entered) : 0));
    }
  }
}

TEST_CASE("a range beyond fp16 saturates the scale and stays finite (V7)") {
  std::vector<float> x(32 * 2);
  for (size_t i = 0; i < x.size(); i++) x[i] = i / 2 % 2 ? 6e4f : -6e4f;
  const std::vector<uint16_t> entered = halves(x);
  for (const uint32_t levels : {2u, 4u, 8u, 16u}) {
    const HeadFormat format =
        format_of(text("affine-channel(levels=%u,group=32", levels) + (levels == 2 ? ",midpoint=1)" : ")"), keys(2));
    const std::vector<float> out = decoded(format, encoded(format, x));
    const double step = levels == 2 ? 60000 : 120000.0 / (levels - 1);
    for (size_t i = 0; i < x.size(); i++) CHECK(std::fabs(half_value(entered[i]) - out[i]) <= 0.51 * step);
  }
}

TEST_CASE("subnormal halves keep different codes: nothing is flushed to 0 (V26)") {
  std::vector<float> x;
  for (int k = -20; k <= 20; k++) x.push_back(float(k) * 0x1p-24f), x.push_back(float(-k) * 0x1p-24f);
  const HeadFormat format = format_of("affine-channel(levels=16,group=41)", keys(2));
  const Block block = encoded(format, x);
  // s = hp(40/15 * 2^-24) = 3 * 2^-24, z = -20 * 2^-24: code = rne((k + 20)/3), at most 13.
  CHECK(block.params[0] == 3);
  CHECK(block.params[1] == (0x8000 | 20));
  for (int k = -20; k <= 20; k++) CHECK(block.codes[size_t(k + 20) * 2] == std::nearbyint((k + 20) / 3.0));
}

TEST_CASE("a value on a threshold takes the lower code (V18)") {
  // Two levels, no rotation: the threshold is 0.  {0, 1, -1, 0}: the zeros go down.
  const HeadFormat two = format_of("lloyd(levels=2,rotate=0)", keys(4));
  const Block block = encoded(two, std::vector<float>{0, 1, -1, 0});
  CHECK(std::vector<uint8_t>(block.codes.begin(), block.codes.end()) == std::vector<uint8_t>{0, 1, 0, 0});
  CHECK(encoded(two, std::vector<uint16_t>{0x0000, 0x3c00, 0xbc00, 0x0000}).codes == block.codes);
  // Three levels: T = fp32(0.6120032 * sigma).  Search rows whose first channel lies on T exactly (one in 2^13).
  Random random;
  const HeadFormat three = format_of("lloyd(levels=3,rotate=0)", keys(4));
  uint32_t met = 0;
  for (int trial = 0; trial < 200000 && met < 10; trial++) {
    std::vector<float> x = {0, 1, float(half_value(half_bits(1 + random.uniform()))),
                            float(half_value(half_bits(random.uniform())))};
    float threshold = 0;
    for (int i = 0; i < 8; i++) {  // converges: T depends little on the channel itself
      x[0] = float(half_value(half_bits(threshold)));
      const float n = std::sqrt((x[0] * x[0] + x[1] * x[1]) + (x[2] * x[2] + x[3] * x[3]));
      threshold = 0x1.39587cp-1f * (n * 0.5f);
    }
    if (x[0] != threshold) continue;
    met++;
    CHECK(encoded(three, x).codes[0] == 1);
  }
  CHECK(met > 0);
}

TEST_CASE("codebook rows: zero rows, the smallest and the largest single value (V19)") {
  for (const char *kind : {"lloyd(levels=4)", "lloyd(levels=3)", "lloyd(levels=8,rotate=0)", "lloyd(levels=2,scale=ls)",
                           "lloyd(levels=16,scale=unbiased)", "lloyd(levels=5,scale=plain)", "lloyd(levels=4,params=e5m3)"}) {
    INFO(kind);
    const HeadFormat format = format_of(kind, values(64));
    std::vector<float> x(64, 0.0f);
    Block block = encoded(format, x);
    CHECK(block.params[0] == 0);
    for (const float value : decoded(format, block)) {
      CHECK(value == 0);
      CHECK_FALSE(std::signbit(value));
    }
    for (const float size : {6e-8f, 3e4f, -3e4f}) {
      x[17] = size;
      block = encoded(format, x);
      double power = 0;
      for (const float value : decoded(format, block)) {
        REQUIRE(std::isfinite(value));
        power += double(value) * value;
      }
      // matched keeps the norm, as far as the scalar's type holds it.
      if (format.codec.scale == kvq::ScaleRule::matched && format.codec.params == kvq::ParamType::fp16 && size > 1)
        CHECK(std::fabs(std::sqrt(power) / size - 1) < 1e-3);
    }
  }
}

TEST_CASE("the scale rules do what they say, in float64") {
  Random random;
  const std::vector<uint16_t> x = halves(random.normals(50 * 128, 3));
  for (const char *rule : {"matched", "ls", "unbiased"}) {
    const HeadFormat format = format_of(std::string("lloyd(levels=4,scale=") + rule + ")", values(128));
    const std::vector<float> out = decoded(format, encoded(format, x));
    for (size_t t = 0; t < 50; t++) {
      double xx = 0, yy = 0, xy = 0;
      for (size_t c = t * 128; c < t * 128 + 128; c++) {
        xx += half_value(x[c]) * half_value(x[c]), yy += double(out[c]) * out[c], xy += half_value(x[c]) * out[c];
      }
      INFO(rule);
      if (rule[0] == 'm') REQUIRE(std::fabs(yy / xx - 1) < 2e-3);  // norm
      if (rule[0] == 'l') REQUIRE(std::fabs(xy / yy - 1) < 2e-3);  // the error is orthogonal to the decoded row
      if (rule[0] == 'u') REQUIRE(std::fabs(xy / xx - 1) < 2e-3);  // inner product with the row itself
    }
  }
}

TEST_CASE("error energies on N(0, 1) are those of the error table (V21)") {
  Random random;
  const std::vector<uint16_t> x = halves(random.normals(4096 * 128));
  struct Row {
    const char *pattern;
    double error[8];  // levels 2..8, 16; 0: not listed
  };
  constexpr uint32_t levels[] = {2, 3, 4, 5, 6, 7, 8, 16};
  const Row rows[] = {{"affine-channel(levels=%u,group=32)", {0, .587, .393, .294, .235, .196, .168, .078}},
                      {"affine-channel(levels=%u,group=128)", {0, .728, .500, .374, .299, .249, .214, .100}},
                      {"affine-channel(levels=%u,group=32,midpoint=1)", {.641}},
                      {"affine-channel(levels=%u,group=128,midpoint=1)", {.784}},
                      {"affine-token(levels=%u,group=32)", {0, .587, .393, .294, .235, .196, .168, .078}},
                      {"lloyd(levels=%u)", {.633, .444, .344, .282, .239, .208, .184, .096}}};
  for (const Row &row : rows) {
    for (size_t i = 0; i < 8; i++) {
      if (row.error[i] == 0) continue;
      const HeadFormat format = format_of(text(row.pattern, levels[i]), keys(128));
      const double error = std::sqrt(relative_energy(x, decoded(format, encoded(format, x))));
      INFO(row.pattern << " " << levels[i] << ": " << error);
      CHECK(std::fabs(error / row.error[i] - 1) < 0.03);
    }
  }
}

TEST_CASE("one bit at bin middles has at most a quarter of the error energy of end points (V22)") {
  Random random;
  const std::vector<uint16_t> x = halves(random.normals(4096 * 32));
  const double expected[2][2] = {{.411, 1.963}, {.614, 3.562}};
  for (const uint32_t i : {0u, 1u}) {
    const AffineCase middle = {2, true}, ends = {2, false};
    const HeadFormat a = column_format(middle, i ? 128 : 32, 32), b = column_format(ends, i ? 128 : 32, 32);
    const double energy_a = relative_energy(x, decoded(a, encoded(a, x))),
                 energy_b = relative_energy(x, decoded(b, encoded(b, x)));
    CHECK(std::fabs(energy_a / expected[i][0] - 1) < 0.03);
    CHECK(std::fabs(energy_b / expected[i][1] - 1) < 0.03);
    CHECK(energy_b > 4 * energy_a);
  }
}

TEST_CASE("width groups of 2 and 4 channels lose what is known (Q10)") {
  Random random;
  const double expected[2][3] = {{.0556, .0111, .0033}, {.0607, .0196, .0053}};
  for (const uint32_t pairs : {1u, 2u}) {
    const uint32_t dim = 2 * pairs;
    const std::vector<uint16_t> x = halves(random.normals(400000));
    for (const uint32_t bits : {2u, 3u, 4u}) {
      const HeadFormat format = format_of("width-groups(bits=" + std::string(pairs, char('0' + bits)) + ")", keys(dim));
      const double energy = relative_energy(x, decoded(format, encoded(format, x)));
      INFO(dim << " channels, " << bits << " bits: " << energy);
      CHECK(std::fabs(energy / expected[pairs - 1][bits - 2] - 1) < 0.05);
    }
  }
}

TEST_CASE("all widths at once, one of them with a single pair, come back in order (S23)") {
  // 64 pairs: widths 1..8, width 5 once.
  Random random;
  std::string bits;
  for (int i = 0; i < 64; i++) bits += i == 20 ? '5' : "12346678"[i % 8];
  const HeadFormat format = format_of("width-groups(bits=" + bits + ")", keys(128));
  REQUIRE(format.classes.size() == 8);
  CHECK(format.classes[4].count == 2);
  CHECK(format.channel[format.classes[4].first] == 20);
  CHECK(format.channel[format.classes[4].first + 1] == 84);
  const std::vector<uint16_t> x = halves(random.normals(64 * 128));
  const std::vector<float> out = decoded(format, encoded(format, x));
  std::vector<double> error(9, 0), count(9, 0);
  for (uint32_t c = 0; c < 128; c++)
    for (uint32_t t = 0; t < 64; t++)
      error[bits[c % 64] - '0'] += std::pow(half_value(x[t * 128 + c]) - out[t * 128 + c], 2), count[bits[c % 64] - '0']++;
  // Each width beats the narrower ones (width 5 has two channels only: another error law).
  const int ascending[] = {1, 2, 3, 4, 6, 7, 8};
  for (int i = 1; i < 7; i++)
    CHECK(error[ascending[i]] / count[ascending[i]] < error[ascending[i - 1]] / count[ascending[i - 1]]);
}

TEST_CASE("shrinking moves a value by half of the coarser step at most, and the ends stay ends (V36)") {
  // One row with all 256 codes of the 8-bit form.
  std::vector<float> x(256);
  for (int i = 0; i < 256; i++) x[i] = float(i) / 16 - 8;
  const HeadFormat f8 = format_of("progressive(bits=8)", values(256)), f4 = format_of("progressive(bits=4)", values(256)),
                   f2 = format_of("progressive(bits=2)", values(256));
  const Block b8 = encoded(f8, x), b4 = encoded(f4, x), b2 = encoded(f2, x);
  const std::vector<float> v8 = decoded(f8, b8), v4 = decoded(f4, b4), v2 = decoded(f2, b2);
  for (int i = 0; i < 256; i++) {
    REQUIRE(b8.codes[i] == i);
    CHECK(b4.codes[i] == (2 * i + 17) / 34);
    CHECK(b2.codes[i] == (2 * b4.codes[i] + 5) / 10);
    const double s4 = half_value(b4.params[0]), s2 = half_value(b2.params[0]);
    CHECK(std::fabs(v4[i] - v8[i]) <= s4 / 2 + 15 * s4 * 0x1p-11);
    CHECK(std::fabs(v2[i] - v4[i]) <= s2 / 2 + 3 * s2 * 0x1p-11);
  }
  // Narrowing a packed block gives the block of the narrower width.
  const HeadFormat f16 = format_of("progressive(bits=16)", values(256));
  const Block b16 = encoded(f16, x);
  const auto same_narrowed = [](const HeadFormat &from, const Block &block, const HeadFormat &to, const Block &want) {
    Block got(std::pmr::get_default_resource());
    kvq::narrow(from, block, to, &got);
    return got.tokens == want.tokens && got.codes == want.codes && got.params == want.params;
  };
  CHECK(same_narrowed(f16, b16, f8, b8));
  CHECK(same_narrowed(f16, b16, f4, b4));
  CHECK(same_narrowed(f16, b16, f2, b2));
  CHECK(same_narrowed(f8, b8, f4, b4));
  CHECK(same_narrowed(f8, b8, f2, b2));
  CHECK(same_narrowed(f4, b4, f2, b2));
  CHECK(b2.codes[0] == 0);
  CHECK(b2.codes[255] == 3);
  CHECK(b4.params[1] == b8.params[1]);
}

TEST_CASE("polar: the zero pair, the wrap at 2 pi, and large radii (V37)") {
  const HeadFormat format = format_of("polar(radius=16,angle=64,group=4)", keys(2));
  const auto run = [&](std::vector<float> x) { return decoded(format, encoded(format, x)); };
  for (const float value : run(std::vector<float>(8, 0.0f))) CHECK(value == 0);
  // Angles just above 0 and just below 2 pi: the range is nearly the whole circle, the values stay within half a step of 2 pi/63.
  const std::vector<float> near = {1, 0.01f, 1, -0.01f, 1, 0.01f, 1, -0.01f}, out = run(near);
  for (size_t i = 0; i < near.size(); i++) CHECK(std::fabs(near[i] - out[i]) < 0.06);
  const std::vector<float> large = {6e4f, 6e4f, -6e4f, 6e4f, 6e4f, -6e4f, -6e4f, -6e4f};  // the radius 84853 saturates
  for (const float value : run(large)) {
    CHECK(std::isfinite(value));
    CHECK(std::fabs(std::fabs(value) - 65504 / std::sqrt(2)) < 4000);
  }
}

TEST_CASE("polar: angles and radii against float64 all around") {
  Random random;
  const HeadFormat format = format_of("polar(radius=256,angle=256,group=1)", keys(2));
  for (int i = 0; i < 20000; i++) {
    const std::vector<uint16_t> x =
        halves(std::vector<float>{float(random.normal()), float(random.normal() * std::pow(10, random.uniform() * 8 - 4))});
    const double u = half_value(x[0]), v = half_value(x[1]);
    double theta = std::atan2(v, u);
    if (theta < 0) theta += 2 * M_PI;
    const Block block = encoded(format, x);  // one token: the zeros are the values
    REQUIRE(std::fabs(half_value(block.params[1]) - std::hypot(u, v)) <= 0x1p-11 * std::hypot(u, v) + 0x1p-25);
    const double stored = half_value(block.params[3]);
    REQUIRE(std::min(std::fabs(stored - theta), 2 * M_PI - std::fabs(stored - theta)) <= 0x1p-11 * 4 + 1e-6);
    const std::vector<float> out = decoded(format, block);
    REQUIRE(std::fabs(out[0] - half_value(block.params[1]) * std::cos(stored)) <= 3e-7 * half_value(block.params[1]));
    REQUIRE(std::fabs(out[1] - half_value(block.params[1]) * std::sin(stored)) <= 3e-7 * half_value(block.params[1]));
  }
}

TEST_CASE("no kind ever stores or decodes -0 or anything that is not finite") {
  Random random;
  for (const std::string &kind : kinds()) {
    const HeadFormat format = format_of(kind, keys(64));
    for (int trial = 0; trial < 6; trial++) {
      std::vector<uint16_t> x(32 * 64);
      for (uint16_t &bits : x) {
        do
          bits = trial < 2   ? uint16_t(random.bits())
                 : trial < 4 ? half_bits(std::nearbyint(random.normal()))
                             : uint16_t(random.below(3) | random.below(2) << 15);
        while ((bits & 0x7c00) == 0x7c00);
        if (bits == 0x8000) bits = 0;
      }
      const Block block = encoded(format, x);
      INFO(kind);
      const uint16_t minus_zero = format.codec.params == kvq::ParamType::fp16   ? 0x8000
                                  : format.codec.params == kvq::ParamType::e4m3 ? 0x80
                                                                                : 0xffff;
      REQUIRE(std::ranges::none_of(block.params, [&](uint16_t bits) { return bits == minus_zero; }));
      for (const float value : decoded(format, block)) {
        REQUIRE(std::isfinite(value));
        REQUIRE_FALSE((value == 0 && std::signbit(value)));
      }
    }
  }
}

TEST_CASE("rows by channel, strided rows and partial last groups give the same as packed and whole ones") {
  Random random;
  for (const std::string &kind : kinds()) {
    const HeadFormat format = format_of(kind, keys(64));
    const std::vector<uint16_t> x = halves(random.normals(48 * 64));
    std::vector<uint16_t> wide(48 * 100, 0x7bff);
    for (size_t t = 0; t < 48; t++) std::copy_n(x.begin() + long(t * 64), 64, wide.begin() + long(t * 100));
    Block packed = encoded(format, x), strided(std::pmr::get_default_resource());
    kvq::encode(format, {wide.data(), 100}, 48, &strided);
    INFO(kind);
    REQUIRE(strided.codes == packed.codes);
    REQUIRE(strided.params == packed.params);
    REQUIRE(strided.boosted == packed.boosted);
    std::vector<uint16_t> by_channel(64 * 50, 0x7bff);
    for (size_t t = 0; t < 48; t++)
      for (size_t c = 0; c < 64; c++) by_channel[c * 50 + t] = x[t * 64 + c];
    kvq::encode(format, {by_channel.data(), 1, 50}, 48, &strided);
    REQUIRE(strided.codes == packed.codes);
    REQUIRE(strided.params == packed.params);
    REQUIRE(strided.boosted == packed.boosted);
    const std::vector<float> whole = decoded(format, packed);
    packed.tokens = 37;  // ragged: rows end where they end, columns keep the group
    packed.codes.resize(packed.codes.empty() ? 0 : 37 * 64);
    packed.params.resize(kvq::block_params(format, 37));
    const std::vector<float> part = decoded(format, packed);
    REQUIRE(std::equal(part.begin(), part.end(), whole.begin()));
  }
}

TEST_CASE("seeds and tensors choose different rotations, and the centre shifts keys") {
  Random random;
  const std::vector<uint16_t> x = halves(random.normals(8 * 64));
  const auto codes = [&](const char *kind, const HeadShape &shape) { return encoded(format_of(kind, shape), x).codes; };
  CHECK(codes("lloyd(levels=16)", keys(64)) != codes("lloyd(levels=16)", values(64)));
  CHECK(codes("lloyd(levels=16)", keys(64)) != codes("lloyd(levels=16,seed=1)", keys(64)));
  CHECK(codes("lloyd(levels=16,rotate=0)", keys(64)) == codes("lloyd(levels=16,rotate=0,seed=1)", values(64)));

  // Keys at 100 +- 1 lose little when the centre is 100, and nearly everything without.
  std::vector<uint16_t> far;
  for (const uint16_t bits : x) far.push_back(half_bits(half_value(bits) + 100));
  const std::vector<uint16_t> mu(64, half_bits(100));
  const HeadFormat centred = format_of("lloyd(levels=4,center=1)", keys(64), mu), plain = format_of("lloyd(levels=4)", keys(64));
  double a = 0, b = 0;
  const std::vector<float> va = decoded(centred, encoded(centred, far)), vb = decoded(plain, encoded(plain, far));
  for (size_t i = 0; i < far.size(); i++)
    a += std::pow(half_value(far[i]) - va[i], 2) / double(far.size()),
        b += std::pow(half_value(far[i]) - vb[i], 2) / double(far.size());
  CHECK(a < 0.2);
  CHECK(b > 10 * a);
}
