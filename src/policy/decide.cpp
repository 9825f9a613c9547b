// Stateless decisions: the names and keys of kvq_policy_decide, and the way from tensors to statistics.
#include "policy/decide.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "policy/policy.h"
#include "policy/select.h"
#include "policy/table.h"
#include "policy/text.h"
#include "recipe/recipe.h"
#include "util/entry.h"

namespace kvq {

namespace {

using Bytes = std::pmr::vector<uint8_t>;

// ---- rows

constexpr uint64_t kRows = 64;  // tokens that are entered at a time

// Enter the rows [n_tokens][heads][dim] of a tensor; use(rows, count) gets them as fp16 [count][dim], heads within tokens.
template <class Use>
Status for_rows(const kvq_tensor &x, const char *name, uint64_t n_tokens, uint32_t heads, uint32_t dim, Use use) {
  std::vector<uint16_t> rows(size_t(kRows) * heads * dim);
  const char *data = static_cast<const char *>(x.data);
  const int64_t size = dtype_bytes(x.dtype);
  for (uint64_t first = 0; first < n_tokens; first += kRows) {
    const uint64_t count = std::min(kRows, n_tokens - first);
    for (uint64_t t = 0; t < count; t++)
      for (uint32_t h = 0; h < heads; h++) {
        const int64_t offset = int64_t(first + t) * x.token_stride + int64_t(h) * x.head_stride;
        uint64_t saturated = 0;
        const uint32_t bad = enter_row(data + offset * size, x.dtype, dim, &rows[(t * heads + h) * dim], &saturated);
        if (bad < dim)
          return fail(KVQ_E_NONFINITE, "%s: token %llu, head %u, channel %u is not finite", name, (unsigned long long)(first + t), h, bad);
      }
    use(rows.data(), size_t(count) * heads);
  }
  return KVQ_OK;
}

void pack_mask(std::span<const uint8_t> flags, Bytes *out) {
  out->assign((flags.size() + 7) / 8, 0);
  for (size_t i = 0; i < flags.size(); i++) (*out)[i / 8] |= uint8_t(flags[i] << (i % 8));
}

// ---- keys

// The arguments of a step that takes exactly the keys of `names`; missing ones are empty.
template <size_t N>
Status take_arguments(const Call &call, const std::string_view (&names)[N], std::string_view (&values)[N]) {
  for (const Argument &argument : call.arguments) {
    const auto name = std::find(names, names + N, argument.key);
    if (name == names + N)
      return fail(KVQ_E_INVALID, "%s does not take the key %s", std::string(call.name).c_str(), std::string(argument.key).c_str());
    values[name - names] = argument.value;
  }
  return KVQ_OK;
}

// A required ratio in 0..1.
Status parse_share(const Call &call, std::string_view key, std::string_view value, Ratio *out) {
  if (value.empty()) return fail(KVQ_E_INVALID, "%s needs the key %s", std::string(call.name).c_str(), std::string(key).c_str());
  KVQ_TRY(parse_ratio(value, key, out));
  if (out->p > out->q) return fail(KVQ_E_INVALID, "%s=%s is above 1", std::string(key).c_str(), std::string(value).c_str());
  return KVQ_OK;
}

// ---- steps.  `text` is the whole text, `call` its parts

struct Step {
  std::string_view text;
  Call call;
};

// pnmix and channel-split: a mask over pairs or channels.
Status decide_mask(const Step &step, const DecisionInput &input, Bytes *out) {
  PolicyText parsed;
  KVQ_TRY(parse_policy(step.text, &parsed));
  KVQ_TRY(check_shape(input.shape));
  HeadStatistics statistics(out->get_allocator().resource());
  KVQ_TRY(collect_statistics(input, &statistics));
  const bool channels = parsed.policy.kind == PolicyKind::channel_split || ranks_channels(parsed.policy.criterion);
  std::vector<uint8_t> flags(channels ? input.shape.dim : input.shape.dim / 2);
  KVQ_TRY(check_counts(parsed.policy, statistics));
  KVQ_TRY(policy_row(parsed.policy.kind).decide(parsed.policy, input.shape, statistics, 1, flags));
  pack_mask(flags, out);
  return KVQ_OK;
}

// blockgtq and pair-widths: a byte per pair.
Status decide_widths(const Step &step, const DecisionInput &input, Bytes *out) {
  PolicyText parsed;
  KVQ_TRY(parse_policy(step.text, &parsed));
  KVQ_TRY(check_shape(input.shape));
  const uint32_t pairs = input.shape.dim / 2;
  if (parsed.policy.kind == PolicyKind::blockgtq && parsed.policy.bmin == 0)
    return fail(KVQ_E_INVALID, "bmin=0 is for pair-widths only: width-groups has widths 1..8");
  const uint32_t unit = resolve_unit(parsed.unit, input.shape.dim);
  std::vector<double> scores(input.pair_scores.begin(), input.pair_scores.end());
  if (!scores.empty() && scores.size() != pairs)
    return fail(KVQ_E_INVALID, "n_scores=%zu is not the number of pairs, %u", scores.size(), pairs);
  KVQ_TRY(check_widths(parsed.policy, pairs, unit));
  if (scores.empty()) {
    HeadStatistics statistics(out->get_allocator().resource());
    KVQ_TRY(collect_statistics(input, &statistics));
    scores.resize(pairs);
    KVQ_TRY(width_scores(parsed.policy.score, statistics, input.shape, scores));
  }
  out->resize(pairs);
  return allocate_widths(scores, parsed.policy.avg, parsed.policy.bmin, parsed.policy.bmax, unit, *out);
}

Status decide_flags(const Step &step, const DecisionInput &input, Rounding rounding, Bytes *out) {
  constexpr std::string_view names[] = {"r"};
  std::string_view values[1];
  Ratio r;
  KVQ_TRY(take_arguments(step.call, names, values));
  KVQ_TRY(parse_share(step.call, "r", values[0], &r));
  std::vector<uint8_t> flags(input.token_scores.size());
  KVQ_TRY(select_tokens(r, rounding, input.token_scores, flags));
  pack_mask(flags, out);
  return KVQ_OK;
}

Status decide_prompt(const Step &step, const DecisionInput &input, Bytes *out) {
  return decide_flags(step, input, Rounding::floor, out);
}
Status decide_block(const Step &step, const DecisionInput &input, Bytes *out) {
  return decide_flags(step, input, Rounding::half_even, out);
}

// Kitty: the channels of one group that get 16 levels.
Status decide_kitty(const Step &step, const DecisionInput &input, Bytes *out) {
  constexpr std::string_view names[] = {"boost"};
  std::string_view values[1];
  Ratio boost;
  KVQ_TRY(take_arguments(step.call, names, values));
  KVQ_TRY(parse_share(step.call, "boost", values[0], &boost));
  KVQ_TRY(check_shape(input.shape));
  const uint64_t count = floor_of(boost, input.shape.dim);
  if (count > 255) return fail(KVQ_E_INVALID, "boost=%s boosts %llu channels, more than 255", std::string(values[0]).c_str(), (unsigned long long)count);
  HeadStatistics statistics(out->get_allocator().resource());
  KVQ_TRY(collect_statistics(input, &statistics));
  if (statistics.nk == 0) return fail(KVQ_E_STATE, "kitty needs the tokens of a group in k");
  std::vector<UInt128> scores;
  for (const ChannelSums &channel : statistics.k) scores.push_back(channel.abs);
  std::vector<uint8_t> flags(scores.size());
  select_largest<UInt128>(scores, count, flags);
  pack_mask(flags, out);
  return KVQ_OK;
}

Status decide_center(const Step &step, const DecisionInput &input, Bytes *out) {
  if (!step.call.arguments.empty()) return fail(KVQ_E_INVALID, "center takes no keys");
  KVQ_TRY(check_shape(input.shape));
  CenterSum sum(input.shape.dim, out->get_allocator().resource());
  if (input.k)
    KVQ_TRY(for_rows(*input.k, "k", input.n_tokens, 1, input.shape.dim, [&](const uint16_t *rows, size_t n) { sum.add(rows, n); }));
  std::vector<uint16_t> mu(input.shape.dim);
  sum.mean(mu);
  out->clear();
  for (const uint16_t m : mu) out->push_back(uint8_t(m)), out->push_back(uint8_t(m >> 8));
  return KVQ_OK;
}

// ChanMix's profile: which heads keep 4 bits, or the widths within one of the others.
Status decide_chanmix(const Step &step, const DecisionInput &input, Bytes *out) {
  constexpr std::string_view names[] = {"r_h", "share"};
  std::string_view values[2];
  Ratio ratio{1, 4};
  KVQ_TRY(take_arguments(step.call, names, values));
  const bool heads = !values[0].empty();
  if (heads && !values[1].empty()) return fail(KVQ_E_INVALID, "chanmix takes r_h or share, not both");
  if (heads || !values[1].empty()) KVQ_TRY(parse_share(step.call, names[heads ? 0 : 1], values[heads ? 0 : 1], &ratio));
  std::vector<double> scores(input.pair_scores.begin(), input.pair_scores.end());
  for (size_t i = 0; i < scores.size(); i++)
    if (std::isnan(scores[i])) return fail(KVQ_E_INVALID, "pair_scores[%zu] is NaN", i);
  const uint64_t count = floor_of(ratio, scores.size());
  std::vector<uint8_t> widest(scores.size());
  select_largest<double>(scores, count, widest);
  if (heads) return pack_mask(widest, out), KVQ_OK;

  if (2 * count > scores.size()) return fail(KVQ_E_INVALID, "share=%s is above 1/2", std::string(values[1]).c_str());
  out->assign(scores.size(), 2);
  std::vector<size_t> rest;  // the narrowest are chosen among those that are not widest: a tie may reach both ends
  std::vector<double> narrowness;
  for (size_t i = 0; i < scores.size(); i++) {
    if (widest[i])
      (*out)[i] = 3;
    else
      rest.push_back(i), narrowness.push_back(-scores[i]);
  }
  std::vector<uint8_t> narrowest(rest.size());
  select_largest<double>(narrowness, count, narrowest);
  for (size_t i = 0; i < rest.size(); i++) (*out)[rest[i]] = uint8_t(2 - narrowest[i]);
  return KVQ_OK;
}

// PM-KVQ: the keys kv_heads, dim_k and dim_v of a layer and one in bytes, and what n_tokens of it take by width.
Status read_chain(const Step &step, const DecisionInput &input, std::string_view limit, uint64_t *given, std::span<uint64_t> bytes) {
  const std::string_view names[] = {limit, "kv_heads", "dim_k", "dim_v"};
  constexpr uint64_t highest[] = {UINT64_MAX, 4096, 1024, 1024};
  std::string_view values[4];
  uint64_t n[4];
  KVQ_TRY(take_arguments(step.call, names, values));
  for (int i = 0; i < 4; i++) {
    if (values[i].empty()) return fail(KVQ_E_INVALID, "%s needs the key %s", std::string(step.call.name).c_str(), names[i].data());
    KVQ_TRY(parse_number(values[i], names[i], i != 0, highest[i], &n[i]));
  }
  if (input.n_tokens > UINT32_MAX) return fail(KVQ_E_INVALID, "n_tokens=%llu is above %u", (unsigned long long)input.n_tokens, UINT32_MAX);
  *given = n[0];
  return chain_bytes(input.n_tokens, uint32_t(n[1]), uint32_t(n[2]), uint32_t(n[3]), bytes);
}

// Section 2.5: the widest of 16, 8, 4, 2 at which the packed tokens of a layer fit its budget, else 2.
Status decide_shrink(const Step &step, const DecisionInput &input, Bytes *out) {
  uint64_t budget, bytes[std::size(kChainLevels)];
  KVQ_TRY(read_chain(step, input, "budget", &budget, bytes));
  out->assign(1, uint8_t(chain_width(widest_within(budget, bytes))));
  return KVQ_OK;
}

// A helper: budgets of layers by their sensitivities, 8 bytes each.
Status decide_budgets(const Step &step, const DecisionInput &input, Bytes *out) {
  uint64_t total, bytes[std::size(kChainLevels)];
  KVQ_TRY(read_chain(step, input, "total", &total, bytes));
  std::vector<uint64_t> budgets(input.pair_scores.size());
  KVQ_TRY(allocate_budgets(input.pair_scores, total, bytes, budgets));
  out->clear();
  for (const uint64_t budget : budgets)
    for (int byte = 0; byte < 8; byte++) out->push_back(uint8_t(budget >> (8 * byte)));
  return KVQ_OK;
}

struct StepRow {
  std::string_view name;
  Status (*decide)(const Step &, const DecisionInput &, Bytes *);
};
constexpr StepRow kSteps[] = {
    {"pnmix", decide_mask},
    {"channel-split", decide_mask},
    {"blockgtq", decide_widths},
    {"pair-widths", decide_widths},
    {"semkv-prompt", decide_prompt},
    {"semkv-block", decide_block},
    {"kitty", decide_kitty},
    {"center", decide_center},
    {"chanmix", decide_chanmix},
    {"pmkvq-shrink", decide_shrink},
    {"pmkvq-budgets", decide_budgets},
};

}  // namespace

Status collect_statistics(const DecisionInput &input, HeadStatistics *statistics) {
  const HeadShape &shape = input.shape;
  statistics->pairs.resize(shape.dim / 2);
  statistics->k.resize(shape.dim);
  if (input.k)
    KVQ_TRY(for_rows(*input.k, "k", input.n_tokens, 1, shape.dim, [&](const uint16_t *rows, size_t n) {
      add_key_statistics(shape, rows, shape.dim, n, statistics, select_loops());
    }));
  if (input.q)
    KVQ_TRY(for_rows(*input.q, "q", input.n_tokens, input.q_heads, shape.dim, [&](const uint16_t *rows, size_t n) {
      add_query_statistics(shape, rows, shape.dim, n, statistics, select_loops());
    }));
  return KVQ_OK;
}

Status decide_policy(std::string_view text, const DecisionInput &input, std::pmr::vector<uint8_t> *out) {
  Step step{text, {}};
  KVQ_TRY(parse_call(text, &step.call));
  for (const StepRow &row : kSteps)
    if (row.name == step.call.name) return row.decide(step, input, out);
  std::string names;
  for (const StepRow &row : kSteps) names += (names.empty() ? "" : ", ") + std::string(row.name);
  return fail(KVQ_E_INVALID, "policy '%s' is none of %s", std::string(step.call.name.substr(0, 100)).c_str(), names.c_str());
}

}  // namespace kvq
