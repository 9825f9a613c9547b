// The table of policies, for recipe/ and policy/ themselves.  A new policy is one file with its decide function and one row.
#pragma once
#include <span>
#include <string>
#include <string_view>

#include "codec/codec.h"
#include "policy/policy.h"
#include "util/status.h"

namespace kvq {

struct Needs {  // statistics without which a policy cannot decide
  bool k, q;
  uint32_t sums = kAllSums;  // those that it reads, of Wanted
};

struct PolicyRow {
  PolicyKind kind;
  const char *name;
  Owner owner;
  Kind fills;   // the codec whose table it fills; Kind::raw: none
  bool values;  // of values too, not only of keys
  Needs (*needs)(const Policy &);
  // Everything that policy, codec and geometry decide alone.  INVALID with the reason.
  Status (*check)(const Policy &, const Codec &, const HeadShape &, uint32_t unit);
  // The table from the statistics of one head; `table` has table_entries() entries.  nullptr: tables are always given.
  Status (*decide)(const Policy &, const HeadShape &, const HeadStatistics &, uint32_t unit, std::span<uint8_t> table);
  // Some table that it could decide: every other one has the same sum, and so (except for width-groups) the same bytes.  nullptr:
  // any table will do.
  void (*example)(const Policy &, uint32_t unit, std::span<uint8_t> table);
};

const PolicyRow &policy_row(PolicyKind kind);
const PolicyRow *find_policy(std::string_view name);  // nullptr if unknown
std::string policy_names();                           // for messages

// Does `policy` fill the table of this codec?  False also where the text gives the table.
bool fills_table(const Policy &policy, const Codec &codec, const HeadShape &shape);

// Could `policy` have decided this table?  INVALID if not (tables from blobs are checked with it).
Status check_table(const Policy &policy, const Codec &codec, const HeadShape &shape, uint32_t unit,
                   std::span<const uint8_t> table);

// STATE where statistics that `policy` needs have the count 0.
Status check_counts(const Policy &policy, const HeadStatistics &statistics);

// ---- the rows' functions
bool ranks_channels(Criterion criterion);       // else pairs
const char *criterion_name(uint32_t criterion);  // nullptr beyond the last
const char *score_name(uint32_t score);          // nullptr beyond the last
Needs pnmix_needs(const Policy &);
Status pnmix_check(const Policy &, const Codec &, const HeadShape &, uint32_t unit);
Status pnmix_decide(const Policy &, const HeadShape &, const HeadStatistics &, uint32_t unit, std::span<uint8_t> table);

Needs widths_needs(const Policy &);
Status widths_check(const Policy &, const Codec &, const HeadShape &, uint32_t unit);
Status widths_decide(const Policy &, const HeadShape &, const HeadStatistics &, uint32_t unit, std::span<uint8_t> table);
void widths_example(const Policy &, uint32_t unit, std::span<uint8_t> table);
// The budget rules of section 6 for `pairs` pairs.
Status check_widths(const Policy &policy, uint32_t pairs, uint32_t unit);
// Pairs of unit= for a head dimension; "fit16": the largest divisor of D/2 not above D/16, at least 1 (section 8).
uint32_t resolve_unit(std::string_view text, uint32_t dim);

Status chanmix_check(const Policy &, const Codec &, const HeadShape &, uint32_t unit);

Needs channel_split_needs(const Policy &);
Status channel_split_check(const Policy &, const Codec &, const HeadShape &, uint32_t unit);
Status channel_split_decide(const Policy &, const HeadShape &, const HeadStatistics &, uint32_t unit, std::span<uint8_t> table);

void share_example(const Policy &, uint32_t unit, std::span<uint8_t> table);  // the first floor(r * n) units

}  // namespace kvq
