// Width policies: Block-GTQ's scores and greedy allocation of bits to rotary pairs (Block-GTQ section 4; FORMATS section 6).
// blockgtq and pair-widths share everything here; they differ in the codec that takes the widths and in whose decision it is.
#include <algorithm>
#include <cmath>
#include <iterator>
#include <numeric>
#include <vector>

#include "policy/table.h"
#include "policy/text.h"

namespace kvq {

namespace {

constexpr double kUnit = 16777216.0;  // 2^24: sums count in units of 2^-24

// Means of one pair, in fp64 from the exact sums.
struct PairMeans {
  double q = 0, k = 0;             // mean squared norms
  double mean_u = 0, mean_v = 0;   // of K's two channels
  double range_u = 0, range_v = 0;
};

PairMeans pair_means(const HeadStatistics &statistics, const HeadShape &shape, uint32_t p) {
  const PairSums &sums = statistics.pairs[p];
  const auto [u, v] = pair_channels(shape, p);
  const ChannelSums &cu = statistics.k[u], &cv = statistics.k[v];
  const double nk = double(statistics.nk), nq = double(statistics.nq);
  PairMeans means;
  if (statistics.nq) means.q = double(sums.q2) / kUnit / nq;
  if (statistics.nk) {
    means.k = double(sums.k2) / kUnit / nk;
    means.mean_u = double(cu.sum) / kUnit / nk, means.mean_v = double(cv.sum) / kUnit / nk;
    means.range_u = double(cu.max) - double(cu.min), means.range_v = double(cv.max) - double(cv.min);
  }
  return means;
}

double k_var(const PairMeans &m) { return std::max(0.0, (m.k - m.mean_u * m.mean_u) - m.mean_v * m.mean_v); }

constexpr uint32_t kVariance = kPairSquares | kKeySums;

// In the order of Score.
struct ScoreRow {
  const char *name;
  Needs needs;
  double (*score)(const PairMeans &m);
};
constexpr ScoreRow kScores[] = {
    {"qk-avg", {true, true, kPairSquares}, [](const PairMeans &m) { return (m.q + m.k) / 2; }},
    {"qk-max", {true, true, kPairSquares}, [](const PairMeans &m) { return std::max(m.q, m.k); }},
    {"qk-product", {true, true, kPairSquares}, [](const PairMeans &m) { return std::sqrt(m.q * m.k); }},
    {"k-only", {true, false, kPairSquares}, [](const PairMeans &m) { return m.k; }},
    {"q-only", {false, true, kPairSquares}, [](const PairMeans &m) { return m.q; }},
    {"k-var", {true, false, kVariance}, [](const PairMeans &m) { return k_var(m); }},
    {"q-var", {true, true, kVariance}, [](const PairMeans &m) { return m.q * k_var(m); }},
    {"q-geo", {true, true, kVariance}, [](const PairMeans &m) { return std::sqrt(m.q) * k_var(m); }},
    {"q-range", {true, true, kPairSquares | kKeyChannels}, [](const PairMeans &m) { return m.q * ((m.range_u * m.range_u + m.range_v * m.range_v) / 2); }},
};

// Pairs that get their bits together.
struct Run {
  double score;
  uint32_t bits;
};

// The run whose next bit saves most; runs.size() if all are full.  Ties: fewer bits, then the earlier run.
size_t best_run(const std::vector<Run> &runs, uint32_t bmax) {
  size_t best = runs.size();
  double best_gain = 0;
  for (size_t i = 0; i < runs.size(); i++) {
    if (runs[i].bits >= bmax) continue;
    const double gain = std::ldexp(runs[i].score, -2 * int(runs[i].bits));
    if (best == runs.size() || gain > best_gain || (gain == best_gain && runs[i].bits < runs[best].bits)) best = i, best_gain = gain;
  }
  return best;
}

}  // namespace

const char *score_name(uint32_t score) { return score < std::size(kScores) ? kScores[score].name : nullptr; }

Status width_scores(Score score, const HeadStatistics &statistics, const HeadShape &shape, std::span<double> scores) {
  const ScoreRow &row = kScores[size_t(score)];
  if (row.needs.k && statistics.nk == 0) return fail(KVQ_E_STATE, "score=%s needs statistics of K, and there is no token", row.name);
  if (row.needs.q && statistics.nq == 0) return fail(KVQ_E_STATE, "score=%s needs statistics of Q, and there is no query", row.name);
  for (uint32_t p = 0; p < scores.size(); p++) scores[p] = row.score(pair_means(statistics, shape, p));
  return KVQ_OK;
}

Status check_widths(const Policy &policy, uint32_t pairs, uint32_t unit) {
  if (policy.bmin > policy.bmax || policy.bmax > 8)
    return fail(KVQ_E_INVALID, "widths %u..%u are not within 0..8", policy.bmin, policy.bmax);
  if (unit == 0 || pairs % unit != 0) return fail(KVQ_E_INVALID, "unit=%u does not divide the %u pairs", unit, pairs);
  const uint64_t budget = floor_of(policy.avg, pairs);
  if (budget < uint64_t(policy.bmin) * pairs)
    return fail(KVQ_E_INVALID, "avg=%s gives %llu bits to %u pairs, less than bmin=%u each", print_ratio(policy.avg).c_str(),
                (unsigned long long)budget, pairs, policy.bmin);
  return KVQ_OK;
}

Status allocate_widths(std::span<const double> scores, Ratio avg, uint32_t bmin, uint32_t bmax, uint32_t unit,
                       std::span<uint8_t> widths) {
  Policy policy;
  policy.avg = avg, policy.bmin = bmin, policy.bmax = bmax;
  const uint32_t pairs = uint32_t(scores.size());
  KVQ_TRY(check_widths(policy, pairs, unit));
  for (uint32_t p = 0; p < pairs; p++)
    if (!(scores[p] >= 0) || std::isinf(scores[p]))
      return fail(KVQ_E_INVALID, "the score of pair %u is %g, not a finite number >= 0", p, scores[p]);

  std::vector<uint32_t> order(pairs);  // of allocation: by score for runs of several pairs, else ascending
  std::iota(order.begin(), order.end(), 0u);
  if (unit > 1) std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return scores[a] > scores[b]; });
  std::vector<Run> runs(pairs / unit, Run{0.0, bmin});
  for (uint32_t i = 0; i < pairs; i++) runs[i / unit].score += scores[order[i]];

  uint64_t budget = floor_of(avg, pairs) - uint64_t(bmin) * pairs;
  for (; budget >= unit; budget -= unit) {
    const size_t best = best_run(runs, bmax);
    if (best == runs.size()) break;
    runs[best].bits++;
  }
  for (uint32_t i = 0; i < pairs; i++) widths[order[i]] = uint8_t(runs[i / unit].bits);
  return KVQ_OK;
}

uint32_t resolve_unit(std::string_view text, uint32_t dim) {
  if (text.empty()) return 1;
  if (text != "fit16") return uint32_t(std::stoul(std::string(text)));
  uint32_t unit = std::max(dim / 16, 1u);
  while (dim / 2 % unit) unit--;
  return unit;
}

Needs widths_needs(const Policy &policy) { return kScores[size_t(policy.score)].needs; }

Status widths_check(const Policy &policy, const Codec &codec, const HeadShape &shape, uint32_t unit) {
  if (codec.by_channel) return fail(KVQ_E_INVALID, "the width policies go by pair: channel-widths must not have unit=channel");
  if (codec.kind == Kind::width_groups && policy.bmin == 0)
    return fail(KVQ_E_INVALID, "bmin=0, but width-groups has widths 1..8 (0 is for channel-widths only)");
  return check_widths(policy, shape.dim / 2, unit);
}

Status widths_decide(const Policy &policy, const HeadShape &shape, const HeadStatistics &statistics, uint32_t unit,
                     std::span<uint8_t> table) {
  std::vector<double> scores(table.size());
  KVQ_TRY(width_scores(policy.score, statistics, shape, scores));
  return allocate_widths(scores, policy.avg, policy.bmin, policy.bmax, unit, table);
}

void widths_example(const Policy &policy, uint32_t unit, std::span<uint8_t> table) {
  const std::vector<double> equal(table.size(), 1.0);
  allocate_widths(equal, policy.avg, policy.bmin, policy.bmax, unit, table);  // checked before: cannot fail
}

}  // namespace kvq
