// Codec texts: name(key=value,...), by the keys of each codec's descriptor.
#include <algorithm>

#include "codec/descriptor.h"

namespace kvq {
namespace {

// For messages: a value cut to a readable length.
std::string shown(std::string_view text) {
  constexpr size_t kLongest = 40;
  return text.size() <= kLongest ? std::string(text) : std::string(text.substr(0, kLongest)) + "...";
}

std::string key_names(const Descriptor &record) {
  std::string names;
  for (const TextKey *key : record.keys) names.append(names.empty() ? "" : ", ").append(key->name);
  return names.empty() ? "none" : names;
}

std::string codec_names() {
  std::string names;
  for (uint32_t i = 0; i < kKinds; i++) names.append(i ? ", " : "").append(descriptor(Kind(i)).name);
  return names;
}

// One "key=value".  `seen` has a bit per key of the record.
Status parse_item(const Descriptor &record, std::string_view item, uint32_t *seen, Codec *codec) {
  const char *name = record.name.data();
  const size_t equals = item.find('=');
  if (equals == item.npos) return fail(KVQ_E_INVALID, "codec %s: '%s' is not key=value", name, shown(item).c_str());
  const std::string_view key_name = item.substr(0, equals), value = item.substr(equals + 1);
  const auto found = std::ranges::find(record.keys, key_name, &TextKey::name);
  if (found == record.keys.end())
    return fail(KVQ_E_INVALID, "codec %s: unknown key '%s'; its keys are: %s", name, shown(key_name).c_str(),
                key_names(record).c_str());
  const TextKey &key = **found;
  const uint32_t bit = 1u << (found - record.keys.begin());
  if (*seen & bit) return fail(KVQ_E_INVALID, "codec %s: key '%s' is given twice", name, key.name.data());
  *seen |= bit;
  if (!key.set(value, codec))
    return fail(KVQ_E_INVALID, "codec %s: %s=%s is not allowed; %s must be %s", name, key.name.data(), shown(value).c_str(),
                key.name.data(), key.allowed.data());
  return KVQ_OK;
}

Status parse_items(const Descriptor &record, std::string_view items, uint32_t *seen, Codec *codec) {
  for (bool more = true; more;) {
    const size_t comma = items.find(',');
    more = comma != items.npos;
    KVQ_TRY(parse_item(record, items.substr(0, comma), seen, codec));
    if (more) items.remove_prefix(comma + 1);
  }
  return KVQ_OK;
}

Status check_required(const Descriptor &record, uint32_t seen) {
  for (size_t i = 0; i < record.keys.size(); i++)
    if (record.keys[i]->required && !(seen >> i & 1u))
      return fail(KVQ_E_INVALID, "codec %s: key '%s' is missing; it must be %s", record.name.data(), record.keys[i]->name.data(),
                  record.keys[i]->allowed.data());
  return KVQ_OK;
}

}  // namespace

Status parse_codec(std::string_view text, bool allow_group_dim, Codec *codec) {
  const size_t open = text.find('(');
  const std::string_view name = text.substr(0, open);
  const Kind kind = find_kind(name);
  if (uint32_t(kind) == kKinds)
    return fail(KVQ_E_INVALID, "codec '%s' is unknown; codecs are: %s", shown(name).c_str(), codec_names().c_str());
  const Descriptor &record = descriptor(kind);

  Codec parsed;
  parsed.kind = kind;
  parsed.rotate = record.rotates;
  uint32_t seen = 0;
  if (open != text.npos) {
    if (text.back() != ')')
      return fail(KVQ_E_INVALID, "codec %s: '%s' does not end with ')'", record.name.data(), shown(text).c_str());
    KVQ_TRY(parse_items(record, text.substr(open + 1, text.size() - open - 2), &seen, &parsed));
  }
  KVQ_TRY(check_required(record, seen));
  if (parsed.group == Codec::kGroupIsDim && !allow_group_dim)
    return fail(KVQ_E_INVALID, "codec %s: group=D is allowed in recipes only; here group must be a number", record.name.data());
  *codec = std::move(parsed);
  return KVQ_OK;
}

std::string print_codec(const Codec &codec) {
  const Descriptor &record = descriptor(codec.kind);
  std::string text(record.name);
  char before = '(';
  for (const TextKey *key : record.keys) {
    std::string value;
    key->print(codec, &value);
    if (value.empty()) continue;
    text.append(1, before).append(key->name).append(1, '=').append(value);
    before = ',';
  }
  if (before == ',') text += ')';
  return text;
}

}  // namespace kvq
