// Parsing and printing of "name(key=value,...)" and of the policy field of a recipe.
#include "policy/text.h"

#include <charconv>
#include <numeric>

#include "policy/table.h"

namespace kvq {

namespace {

int length(std::string_view text) { return int(text.size() < 200 ? text.size() : 200); }  // for "%.*s"

// Position of the first `mark` outside parentheses, or npos.
size_t find_outside(std::string_view text, char mark) {
  int depth = 0;
  for (size_t i = 0; i < text.size(); i++) {
    if (text[i] == mark && depth == 0) return i;
    depth += text[i] == '(' ? 1 : text[i] == ')' ? -1
                                                 : 0;
    if (depth < 0) break;
  }
  return std::string_view::npos;
}

Status add_argument(std::string_view text, Call *call) {
  const size_t equals = text.find('=');
  if (equals == std::string_view::npos || equals == 0 || equals + 1 == text.size())
    return fail(KVQ_E_INVALID, "'%.*s' in %.*s is not of the form key=value", length(text), text.data(), length(call->name),
                call->name.data());
  const Argument argument{text.substr(0, equals), text.substr(equals + 1)};
  for (const Argument &earlier : call->arguments)
    if (earlier.key == argument.key)
      return fail(KVQ_E_INVALID, "%.*s has the key %.*s twice", length(call->name), call->name.data(), length(argument.key),
                  argument.key.data());
  call->arguments.push_back(argument);
  return KVQ_OK;
}

}  // namespace

Status parse_call(std::string_view text, Call *call) {
  const size_t open = text.find('(');
  call->name = text.substr(0, open);
  call->arguments.clear();
  if (call->name.empty()) return fail(KVQ_E_INVALID, "'%.*s' has no name", length(text), text.data());
  if (open == std::string_view::npos) return KVQ_OK;
  std::string_view inside = text.substr(open + 1);
  if (inside.empty() || find_outside(inside, ')') != inside.size() - 1)
    return fail(KVQ_E_INVALID, "'%.*s' does not end with the parenthesis that closes its list of keys", length(text), text.data());
  inside.remove_suffix(1);
  for (bool more = true; more;) {
    const size_t comma = find_outside(inside, ',');
    KVQ_TRY(add_argument(inside.substr(0, comma), call));
    more = comma != std::string_view::npos;
    if (more) inside.remove_prefix(comma + 1);
  }
  return KVQ_OK;
}

Status parse_number(std::string_view value, std::string_view key, uint64_t lowest, uint64_t highest, uint64_t *out) {
  uint64_t number = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
  if (error != std::errc() || end != value.data() + value.size() || number < lowest || number > highest)
    return fail(KVQ_E_INVALID, "%.*s=%.*s is not a number in %llu..%llu", length(key), key.data(), length(value), value.data(),
                (unsigned long long)lowest, (unsigned long long)highest);
  *out = number;
  return KVQ_OK;
}

Status parse_ratio(std::string_view value, std::string_view key, Ratio *out) {
  const size_t slash = value.find('/');
  Ratio ratio;
  KVQ_TRY(parse_number(value.substr(0, slash), key, 0, INT64_MAX, &ratio.p));
  if (slash != std::string_view::npos) KVQ_TRY(parse_number(value.substr(slash + 1), key, 1, INT64_MAX, &ratio.q));
  const uint64_t divisor = std::gcd(ratio.p, ratio.q);
  *out = {ratio.p / divisor, ratio.q / divisor};
  return KVQ_OK;
}

std::string print_ratio(Ratio ratio) {
  return ratio.q == 1 ? std::to_string(ratio.p) : std::to_string(ratio.p) + "/" + std::to_string(ratio.q);
}

uint64_t floor_of(Ratio r, uint64_t n) { return uint64_t(UInt128(r.p) * n / r.q); }

// ---- the policy field

namespace {

// The value of an enumeration by its name: name(i) is that of value i, nullptr beyond the last.
Status parse_name(std::string_view value, const char *key, const char *(*name)(uint32_t), uint8_t *out) {
  std::string allowed;
  for (uint32_t i = 0; name(i); i++) {
    if (value == name(i)) return *out = uint8_t(i), KVQ_OK;
    allowed += (i ? ", " : "") + std::string(name(i));
  }
  return fail(KVQ_E_INVALID, "%s=%.*s is none of %s", key, length(value), value.data(), allowed.c_str());
}

Status set_r(std::string_view value, PolicyText *out) {
  KVQ_TRY(parse_ratio(value, "r", &out->policy.r));
  if (out->policy.r.p > out->policy.r.q)
    return fail(KVQ_E_INVALID, "r=%.*s is above 1", length(value), value.data());
  return KVQ_OK;
}

Status set_criterion(std::string_view value, PolicyText *out) {
  uint8_t index = 0;
  KVQ_TRY(parse_name(value, "criterion", criterion_name, &index));
  out->policy.criterion = Criterion(index);
  return KVQ_OK;
}

Status set_score(std::string_view value, PolicyText *out) {
  uint8_t index = 0;
  KVQ_TRY(parse_name(value, "score", score_name, &index));
  out->policy.score = Score(index);
  return KVQ_OK;
}

Status set_width(std::string_view value, const char *key, uint32_t *out) {
  uint64_t number;
  KVQ_TRY(parse_number(value, key, 0, 8, &number));
  *out = uint32_t(number);
  return KVQ_OK;
}

Status set_unit(std::string_view value, PolicyText *out) {
  uint64_t number;
  if (value != "fit16") KVQ_TRY(parse_number(value, "unit", 1, 512, &number));
  out->unit = value == "fit16" ? std::string(value) : std::to_string(number);
  return KVQ_OK;
}

constexpr uint32_t bit(PolicyKind kind) { return 1u << uint32_t(kind); }
constexpr uint32_t kWidthPolicies = bit(PolicyKind::blockgtq) | bit(PolicyKind::pair_widths);

// Keys in the order in which they are printed.
struct Key {
  const char *name;
  uint32_t taken_by, required_by;  // bits of PolicyKind
  Status (*set)(std::string_view value, PolicyText *out);
  std::string (*print)(const PolicyText &policy);
};

constexpr Key kKeys[] = {
    {"r", bit(PolicyKind::pnmix) | bit(PolicyKind::semkv) | bit(PolicyKind::channel_split) | bit(PolicyKind::drop_tokens),
     bit(PolicyKind::pnmix) | bit(PolicyKind::semkv) | bit(PolicyKind::drop_tokens), set_r, [](const PolicyText &p) { return print_ratio(p.policy.r); }},
    {"criterion", bit(PolicyKind::pnmix), 0, set_criterion,
     [](const PolicyText &p) { return std::string(criterion_name(uint32_t(p.policy.criterion))); }},
    {"avg", kWidthPolicies, kWidthPolicies,
     [](std::string_view value, PolicyText *out) { return parse_ratio(value, "avg", &out->policy.avg); },
     [](const PolicyText &p) { return print_ratio(p.policy.avg); }},
    {"bmin", kWidthPolicies, 0,
     [](std::string_view value, PolicyText *out) { return set_width(value, "bmin", &out->policy.bmin); },
     [](const PolicyText &p) { return std::to_string(p.policy.bmin); }},
    {"bmax", kWidthPolicies, 0,
     [](std::string_view value, PolicyText *out) { return set_width(value, "bmax", &out->policy.bmax); },
     [](const PolicyText &p) { return std::to_string(p.policy.bmax); }},
    {"score", kWidthPolicies, 0, set_score, [](const PolicyText &p) { return std::string(score_name(uint32_t(p.policy.score))); }},
    {"unit", kWidthPolicies, 0, set_unit, [](const PolicyText &p) { return p.unit.empty() ? std::string("1") : p.unit; }},
    {"low", bit(PolicyKind::semkv), bit(PolicyKind::semkv),
     [](std::string_view value, PolicyText *out) { return out->low = value, Status(KVQ_OK); },
     [](const PolicyText &p) { return p.low; }},
    {"high", bit(PolicyKind::semkv), bit(PolicyKind::semkv),
     [](std::string_view value, PolicyText *out) { return out->high = value, Status(KVQ_OK); },
     [](const PolicyText &p) { return p.high; }},
};

const Key *find_key(std::string_view name, PolicyKind kind) {
  for (const Key &key : kKeys)
    if (name == key.name && key.taken_by & bit(kind)) return &key;
  return nullptr;
}

std::string allowed_keys(PolicyKind kind) {
  std::string list;
  for (const Key &key : kKeys)
    if (key.taken_by & bit(kind)) list += (list.empty() ? "" : ", ") + std::string(key.name);
  return list.empty() ? "none" : list;
}

void set_defaults(PolicyKind kind, PolicyText *out) {
  *out = {};
  out->policy.kind = kind;
  if (kind == PolicyKind::channel_split) out->policy.r = {1, 2};
  if (kind == PolicyKind::chanmix) out->policy.bmin = 0;  // any width
  if (kind == PolicyKind::pair_widths) out->policy.score = Score::q_var;
}

}  // namespace

Status parse_policy(std::string_view text, PolicyText *out) {
  Call call;
  KVQ_TRY(parse_call(text, &call));
  const PolicyRow *row = find_policy(call.name);
  if (!row)
    return fail(KVQ_E_INVALID, "policy=%.*s is none of %s", length(call.name), call.name.data(), policy_names().c_str());
  set_defaults(row->kind, out);
  for (const Argument &argument : call.arguments) {
    const Key *key = find_key(argument.key, row->kind);
    if (!key)
      return fail(KVQ_E_INVALID, "policy %s does not take the key %.*s; its keys: %s", row->name, length(argument.key),
                  argument.key.data(), allowed_keys(row->kind).c_str());
    KVQ_TRY(key->set(argument.value, out));
  }
  for (const Key &key : kKeys) {
    bool given = false;
    for (const Argument &argument : call.arguments) given |= argument.key == key.name;
    if (key.required_by & bit(row->kind) && !given)
      return fail(KVQ_E_INVALID, "policy %s needs the key %s", row->name, key.name);
  }
  if (out->policy.bmin > out->policy.bmax)
    return fail(KVQ_E_INVALID, "bmin=%u is above bmax=%u", out->policy.bmin, out->policy.bmax);
  return KVQ_OK;
}

std::string print_policy(const PolicyText &policy) {
  std::string text = policy_row(policy.policy.kind).name, separator = "(";
  for (const Key &key : kKeys) {
    if (!(key.taken_by & bit(policy.policy.kind))) continue;
    text += separator + key.name + "=" + key.print(policy);
    separator = ",";
  }
  return separator == "(" ? text : text + ")";
}

}  // namespace kvq
