// The table of policies and what the rest of the library asks of it.
#include <algorithm>

#include "policy/table.h"
#include "policy/text.h"
#include "recipe/recipe.h"

namespace kvq {

namespace {

Needs needs_nothing(const Policy &) { return {false, false}; }

// Rows in the order of PolicyKind.
constexpr PolicyRow kPolicies[] = {
    {PolicyKind::uniform, "uniform", Owner::nobody, Kind::raw, false, needs_nothing, nullptr, nullptr, nullptr},
    {PolicyKind::pnmix, "pnmix", Owner::sequence, Kind::pair_mix, false, pnmix_needs, pnmix_check, pnmix_decide, share_example},
    {PolicyKind::blockgtq, "blockgtq", Owner::cache, Kind::width_groups, false, widths_needs, widths_check, widths_decide,
     widths_example},
    {PolicyKind::pair_widths, "pair-widths", Owner::sequence, Kind::channel_widths, false, widths_needs, widths_check,
     widths_decide, widths_example},
    {PolicyKind::semkv, "semkv", Owner::nobody, Kind::raw, false, needs_nothing, nullptr, nullptr, nullptr},
    {PolicyKind::channel_split, "channel-split", Owner::sequence, Kind::channel_split, true, channel_split_needs,
     channel_split_check, channel_split_decide, share_example},
    {PolicyKind::chanmix, "chanmix", Owner::cache, Kind::channel_widths, false, needs_nothing, chanmix_check, nullptr, nullptr},
    {PolicyKind::pmkvq, "pmkvq", Owner::nobody, Kind::raw, false, needs_nothing, nullptr, nullptr, nullptr},
    {PolicyKind::drop_tokens, "drop-tokens", Owner::nobody, Kind::raw, false, needs_nothing, nullptr, nullptr, nullptr},
};

// One tensor of one head: its table, or nothing where the policy fills none.
Status decide_table(const Policy &policy, const Codec &codec, const HeadShape &shape, const HeadStatistics &statistics,
                    uint32_t unit, std::pmr::vector<uint8_t> *table) {
  table->clear();
  if (!fills_table(policy, codec, shape)) return KVQ_OK;
  KVQ_TRY(check_counts(policy, statistics));
  table->resize(table_entries(codec, shape));
  return policy_row(policy.kind).decide(policy, shape, statistics, unit, *table);
}

}  // namespace

const PolicyRow &policy_row(PolicyKind kind) { return kPolicies[size_t(kind)]; }

const PolicyRow *find_policy(std::string_view name) {
  for (const PolicyRow &row : kPolicies)
    if (name == row.name) return &row;
  return nullptr;
}

std::string policy_names() {
  std::string names;
  for (const PolicyRow &row : kPolicies) names += (names.empty() ? "" : ", ") + std::string(row.name);
  return names;
}

Owner policy_owner(const Policy &policy) { return policy_row(policy.kind).owner; }
bool policy_needs_statistics(const Policy &policy) {
  const Needs needs = policy_row(policy.kind).needs(policy);
  return needs.k || needs.q;
}
bool policy_needs_queries(const Policy &policy) { return policy_row(policy.kind).needs(policy).q; }
uint32_t policy_wants(const Policy &policy) { return policy_row(policy.kind).needs(policy).sums; }

Status check_counts(const Policy &policy, const HeadStatistics &statistics) {
  const PolicyRow &row = policy_row(policy.kind);
  const Needs needs = row.needs(policy);
  if (needs.k && statistics.nk == 0)
    return fail(KVQ_E_STATE, "policy %s needs statistics of K, and there is no token", row.name);
  if (needs.q && statistics.nq == 0)
    return fail(KVQ_E_STATE, "policy %s needs statistics of Q: pass q with the prompt", row.name);
  return KVQ_OK;
}

bool fills_table(const Policy &policy, const Codec &codec, const HeadShape &shape) {
  const PolicyRow &row = policy_row(policy.kind);
  return codec.kind == row.fills && !codec.has_table && table_entries(codec, shape) > 0 &&
         (shape.tensor == KVQ_TENSOR_K || row.values);
}

Status decide_tables(const Policy &policy, const LayerCodecs &codecs, const LayerShape &shape, const LayerStatistics &statistics,
                     LayerTables *out) {
  const HeadShape k = shape.head(KVQ_TENSOR_K), v = shape.head(KVQ_TENSOR_V);
  out->k.resize(shape.kv_heads);
  out->v.resize(shape.kv_heads);
  for (uint32_t head = 0; head < shape.kv_heads; head++) {
    KVQ_TRY(decide_table(policy, codecs.k[0], k, statistics.heads[head], codecs.unit, &out->k[head]));
    KVQ_TRY(decide_table(policy, codecs.v[0], v, statistics.heads[head], codecs.unit, &out->v[head]));
  }
  return KVQ_OK;
}

Status check_table(const Policy &policy, const Codec &codec, const HeadShape &shape, uint32_t unit,
                   std::span<const uint8_t> table) {
  const PolicyRow &row = policy_row(policy.kind);
  if (!fills_table(policy, codec, shape))
    return table.empty() ? Status(KVQ_OK) : fail(KVQ_E_INVALID, "a table of %zu entries where policy %s has none", table.size(), row.name);
  std::vector<uint8_t> example(table_entries(codec, shape));
  if (table.size() != example.size())
    return fail(KVQ_E_INVALID, "a table of %zu entries, not %zu", table.size(), example.size());
  if (row.example) row.example(policy, unit, example);
  const bool mask = row.example == share_example;
  const uint32_t lowest = mask ? 0 : policy.bmin, highest = mask ? 1 : policy.bmax;
  uint64_t sum = 0, expected = 0;
  for (size_t i = 0; i < table.size(); i++) {
    if (table[i] < lowest || table[i] > highest)
      return fail(KVQ_E_INVALID, "entry %zu of a table is %u, not in %u..%u", i, table[i], lowest, highest);
    sum += table[i], expected += example[i];
  }
  if (row.example && sum != expected)
    return fail(KVQ_E_INVALID, "the entries of a table add up to %llu, not %llu", (unsigned long long)sum, (unsigned long long)expected);
  return KVQ_OK;
}

}  // namespace kvq
