// SemKV's indicators of one token (section 3.3; delta-norm is Eq. 3), written once for host and device so that both give the same bits.
//
// Sums are fp64 in 32 lanes: lane i adds terms i, i + 32, ... in this order, then neighbours are added in pairs until one is left, as a
// warp does it by shuffles.  exp and ln are made of IEEE operations, for the mathematical libraries differ in their last bits.
// `lanes` adds: Lanes below on the host, a warp on the device.  A row is a function from the index to the element.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>

#include "util/hd.h"

namespace kvq {

constexpr uint32_t kScoreLanes = 32;

// Neighbours in pairs, until one is left; overwrites the lanes.
inline double add_lanes(double *lane) {
  for (uint32_t n = kScoreLanes; n > 1; n /= 2)
    for (uint32_t i = 0; i < n / 2; i++) lane[i] = lane[2 * i] + lane[2 * i + 1];
  return lane[0];
}

struct Lanes {
  template <class F>
  double sum(uint32_t n, F &&term) const {
    double lane[kScoreLanes] = {};
    const uint32_t whole = n / kScoreLanes * kScoreLanes;
    for (uint32_t i = 0; i < whole; i += kScoreLanes)
      for (uint32_t l = 0; l < kScoreLanes; l++) lane[l] += term(i + l);
    for (uint32_t i = whole; i < n; i++) lane[i - whole] += term(i);
    return add_lanes(lane);
  }
  template <class F>
  float max(uint32_t n, F &&term) const {
    float most = term(0);
    for (uint32_t i = 1; i < n; i++) most = term(i) > most ? term(i) : most;
    return most;
  }
};

// e^x, x <= 0, to 5e-16 relative; 0 below -700, far beneath what a float holds.
KVQ_HD inline double score_exp(double x) {
  if (x < -700) return 0;
  constexpr double kLn2High = 0x1.62e42feep-1, kLn2Low = 0x1.a39ef35793c76p-33;  // the high part has room for 10 bits of k
  const double k = (x * 0x1.71547652b82fep0 + 0x1.8p52) - 0x1.8p52;              // nearest integer of x / ln 2
  const double r = (x - k * kLn2High) - k * kLn2Low;
  double power = 1;  // of r, |r| <= ln(2) / 2: Taylor's terms up to r^14 / 14!
  for (int n = 14; n > 0; n--) power = 1 + power * r / n;
  return power * std::bit_cast<double>(uint64_t(int64_t(k) + 1023) << 52);
}

// ln(1 + x), x >= 0, to 5e-16 relative.
KVQ_HD inline double score_log1p(double x) {
  const double u = 1 + x, lost = (x - (u - 1)) / u;  // what rounding u has cost
  const uint64_t bits = std::bit_cast<uint64_t>(u);
  int exponent = int(bits >> 52) - 1023;
  double m = std::bit_cast<double>((bits & 0xfffffffffffffu) | uint64_t(1023) << 52);
  if (m > 1.4142135623730951) m /= 2, exponent++;
  const double s = (m - 1) / (m + 1), t = s * s;  // ln m = 2 atanh s, |s| < 0.172: terms up to s^25 / 25
  double series = 0;
  for (int n = 25; n > 0; n -= 2) series = 1.0 / n + t * series;
  return exponent * 0x1.62e42fefa39efp-1 + (2 * s * series + lost);
}

template <class L, class A>
KVQ_HD double row_norm(const L &lanes, const A &a, uint32_t dim) {
  return std::sqrt(lanes.sum(dim, [&](uint32_t i) { return double(a(i)) * double(a(i)); }));
}

template <class L, class A>
KVQ_HD double row_variance(const L &lanes, const A &a, uint32_t dim) {
  const double mean = lanes.sum(dim, [&](uint32_t i) { return double(a(i)); }) / dim;
  return lanes.sum(dim, [&](uint32_t i) { return (double(a(i)) - mean) * (double(a(i)) - mean); }) / dim;
}

template <class L, class A>
KVQ_HD double row_distance(const L &lanes, const A &a, const A &b, uint32_t dim) {
  return std::sqrt(lanes.sum(dim, [&](uint32_t i) {
    const double d = double(a(i)) - double(b(i));
    return d * d;
  }));
}

// 1 - cos as half the squared distance of the unit vectors: no cancellation where the directions are close.
template <class L, class A>
KVQ_HD double row_cosine_distance(const L &lanes, const A &a, const A &b, uint32_t dim) {
  const double norm_a = row_norm(lanes, a, dim), norm_b = row_norm(lanes, b, dim);
  if (norm_a == 0 || norm_b == 0) return 0;
  return lanes.sum(dim, [&](uint32_t i) {
    const double d = double(a(i)) / norm_a - double(b(i)) / norm_b;
    return d * d;
  }) / 2;
}

// -ln softmax(logits)[target] without cancellation: the likeliest token by log1p, the others as a sum of two terms >= 0.
template <class L, class A>
KVQ_HD double row_self_information(const L &lanes, const A &logits, uint32_t target, uint32_t vocab) {
  const double top = double(lanes.max(vocab, logits)), own = double(logits(target));
  const double others = lanes.sum(vocab, [&](uint32_t i) { return i == target ? 0.0 : score_exp(double(logits(i)) - top); });
  return own == top ? score_log1p(others) : (top - own) + score_log1p(others + score_exp(own - top) - 1);
}

}  // namespace kvq
