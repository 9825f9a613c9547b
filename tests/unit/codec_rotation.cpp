// Section 3: the rotation, against its definition in float64 and as a matrix (S3).
#include <catch2/catch_test_macros.hpp>
#include <cmath>

#include "codec_kit.hpp"

using namespace kvq_test;

namespace {

constexpr uint64_t kSeed = 0x6B76715F73656564u;

// splitmix64 as the format gives it, apart from fp.h.
uint64_t mix(uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

double sign(uint64_t seed, uint64_t t, uint64_t q, uint64_t k, uint64_t i) {
  return mix(seed ^ (t << 48 | q << 40 | k << 16 | i / 64)) >> (i % 64) & 1 ? -1 : 1;
}

// One pass in float64: signs of all channels, then the Hadamard matrix H[i][j] = (-1)^popcount(i & j) / sqrt(p) on p of them.
std::vector<double> pass(const std::vector<double> &x, uint64_t q, uint64_t first, uint64_t p, uint64_t seed, uint64_t t,
                         uint64_t k) {
  std::vector<double> y(x.size());
  for (size_t i = 0; i < x.size(); i++) y[i] = x[i] * sign(seed, t, q, k, i);
  std::vector<double> result = y;
  for (size_t i = 0; i < p; i++) {
    double sum = 0;
    for (size_t j = 0; j < p; j++) sum += (__builtin_popcountll(i & j) % 2 ? -1 : 1) * y[first + j];
    result[first + i] = sum / std::sqrt(double(p));
  }
  return result;
}

std::vector<double> rotation(const std::vector<double> &x, uint64_t seed, uint64_t t, uint64_t k) {
  size_t p = 1;
  while (2 * p <= x.size()) p *= 2;
  std::vector<double> y = pass(x, 0, 0, p, seed, t, k);
  return p == x.size() ? y : pass(y, 1, x.size() - p, p, seed, t, k);
}

}  // namespace

TEST_CASE("the rotation is its definition: signs, Hadamard, and a second pass where w is no power of two") {
  Random random;
  for (const uint32_t w : {1u, 2u, 3u, 6u, 40u, 46u, 64u, 72u, 80u, 90u, 96u, 112u, 128u, 192u, 320u, 576u, 1024u}) {
    for (const uint32_t tensor : {0u, 1u}) {
      const uint32_t k = uint32_t(random.below(8));
      const uint64_t seed = random.below(2) ? kSeed : random.bits();
      std::vector<float> y = random.normals(w);
      const std::vector<double> expected = rotation({y.begin(), y.end()}, seed, tensor, k);
      kvq::rotate(y.data(), w, seed, tensor, k);
      for (uint32_t i = 0; i < w; i++) {
        INFO(w << " " << i);
        REQUIRE(std::fabs(y[i] - expected[i]) < 1e-5);
      }
    }
  }
}

TEST_CASE("two channels by hand, every rounding included") {
  // pass 0 alone: a = s0 * 3, b = s1 * 1; (a + b) * c(2), (a - b) * c(2), c(2) = 0x3f3504f3.
  const float s0 = float(sign(kSeed, 1, 0, 5, 0)), s1 = float(sign(kSeed, 1, 0, 5, 1)), c = 0x1.6a09e6p-1f;
  float y[] = {3, 1};
  kvq::rotate(y, 2, kSeed, 1, 5);
  CHECK(y[0] == (s0 * 3 + s1) * c);
  CHECK(y[1] == (s0 * 3 - s1) * c);
}

TEST_CASE("one channel: signs only") {
  float y[] = {3};
  kvq::rotate(y, 1, 123, 0, 2);
  CHECK(y[0] == float(3 * sign(123, 0, 0, 2, 0)));
  kvq::unrotate(y, 1, 123, 0, 2);
  CHECK(y[0] == 3);
}

TEST_CASE("R R^T = I and the inverse undoes it, within 1e-6 (S3)") {
  for (const uint32_t w : {2u, 6u, 40u, 46u, 72u, 80u, 90u, 96u, 112u, 192u, 320u}) {
    std::vector<std::vector<float>> columns;
    for (uint32_t j = 0; j < w; j++) {
      std::vector<float> y(w, 0.0f);
      y[j] = 1;
      kvq::rotate(y.data(), w, kSeed, 0, 3);
      columns.push_back(y);
      kvq::unrotate(y.data(), w, kSeed, 0, 3);
      for (uint32_t i = 0; i < w; i++) REQUIRE(std::fabs(y[i] - (i == j)) < 1e-6);
    }
    for (uint32_t a = 0; a < w; a++) {
      for (uint32_t b = 0; b < w; b++) {
        double dot = 0;
        for (uint32_t i = 0; i < w; i++) dot += double(columns[a][i]) * columns[b][i];
        if (std::fabs(dot - (a == b)) >= 1e-6) FAIL(w << " channels: columns " << a << " and " << b << " give " << dot);
      }
    }
  }
}

TEST_CASE("rows that are rotated together are rotated like single ones, bit for bit") {
  // A block of 11 tokens fills one tile of lanes and part of another; each token alone must give the same bytes.
  Random random;
  for (const char *text : {"lloyd(levels=8)", "affine-token(levels=5,group=80,rotate=1)"}) {
    const HeadFormat format = format_of(text, keys(80));
    const std::vector<uint16_t> x = halves(random.normals(11 * 80));
    const Block all = encoded(format, x);
    for (size_t t = 0; t < 11; t++) {
      const Block one = encoded(format, std::span(x).subspan(t * 80, 80));
      REQUIRE(std::equal(one.codes.begin(), one.codes.end(), all.codes.begin() + long(t * 80)));
      REQUIRE(std::equal(one.params.begin(), one.params.end(), all.params.begin() + long(t * format.token_params)));
      const std::vector<float> values = decoded(format, one), together = decoded(format, all);
      REQUIRE(std::equal(values.begin(), values.end(), together.begin() + long(t * 80)));
    }
  }
}
