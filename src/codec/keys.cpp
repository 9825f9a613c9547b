#include "codec/keys.h"

#include <charconv>
#include <iterator>

#include "codec/bits.h"

namespace kvq::keys {
namespace {

constexpr uint32_t kMaxGroup = 65536;

bool parse_number(std::string_view text, uint64_t *number) {
  const char *end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, *number);
  return !text.empty() && text[0] != '-' && error == std::errc() && stop == end;
}

bool parse_levels(std::string_view text, uint32_t *levels) {
  uint64_t n;
  if (!parse_number(text, &n)) return false;
  for (const Radix &radix : kRadices)
    if (radix.levels == n) return *levels = uint32_t(n), true;
  return false;
}

bool parse_group(std::string_view text, uint32_t multiple, uint32_t *group) {
  uint64_t n;
  if (!parse_number(text, &n) || n < 1 || n > kMaxGroup || n % multiple) return false;
  *group = uint32_t(n);
  return true;
}

bool parse_flag(std::string_view text, bool *flag) {
  uint64_t n;
  if (!parse_number(text, &n) || n > 1) return false;
  *flag = n == 1;
  return true;
}

// The only number that a key may have.
bool parse_only(std::string_view text, uint32_t only, uint32_t *out) {
  uint64_t n;
  if (!parse_number(text, &n) || n != only) return false;
  *out = only;
  return true;
}

// The only word that a key may have.
template <class T>
bool parse_word(std::string_view text, std::string_view word, T meaning, T *out) {
  if (text != word) return false;
  *out = meaning;
  return true;
}

void print_number(uint64_t n, std::string *out) { *out += std::to_string(n); }

void print_flag(bool flag, bool absent, std::string *out) {
  if (flag != absent) *out += flag ? '1' : '0';
}

void print_group(const Codec &codec, std::string *out) { print_number(codec.group, out); }

struct ScaleName {
  std::string_view name;
  ScaleRule rule;
};
constexpr ScaleName kScales[] = {
    {"matched", ScaleRule::matched}, {"plain", ScaleRule::plain}, {"ls", ScaleRule::ls}, {"unbiased", ScaleRule::unbiased}};

bool set_scale(std::string_view value, Codec *codec) {
  for (const ScaleName &scale : kScales)
    if (scale.name == value) return codec->scale = scale.rule, true;
  return false;
}

void print_scale(const Codec &codec, std::string *out) {
  if (codec.scale == ScaleRule::matched) return;
  for (const ScaleName &scale : kScales)
    if (scale.rule == codec.scale) *out += scale.name;
}

bool set_boost(std::string_view value, Codec *codec) {
  const size_t slash = value.find('/');
  Ratio ratio;
  if (!parse_number(value.substr(0, slash), &ratio.p)) return false;
  if (slash != value.npos && !parse_number(value.substr(slash + 1), &ratio.q)) return false;
  if (ratio.q == 0 || ratio.p > ratio.q) return false;
  codec->boost = ratio;
  return true;
}

void print_boost(const Codec &codec, std::string *out) {
  print_number(codec.boost.p, out);
  *out += '/';
  print_number(codec.boost.q, out);
}

// -1: no hex digit.
int hex_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

// The number of units is unknown here: the table gets all bits, and resolve_codec cuts those that no unit has.
bool set_mask(std::string_view value, Codec *codec) {
  if (value.empty() || value.size() % 2 || value.size() / 2 * 8 > kMaxDim + 7) return false;
  codec->table.clear();
  for (size_t i = 0; i < value.size(); i += 2) {
    const int upper = hex_digit(value[i]), lower = hex_digit(value[i + 1]);
    if (upper < 0 || lower < 0) return false;
    for (int bit = 0; bit < 8; bit++) codec->table.push_back((upper << 4 | lower) >> bit & 1);
  }
  return codec->has_table = true;
}

void print_mask(const Codec &codec, std::string *out) {
  if (!codec.has_table) return;
  for (size_t i = 0; i < codec.table.size(); i += 8) {
    uint32_t byte = 0;
    for (size_t j = i; j < codec.table.size() && j < i + 8; j++) byte |= uint32_t(codec.table[j]) << (j - i);
    *out += "0123456789abcdef"[byte >> 4];
    *out += "0123456789abcdef"[byte & 15];
  }
}

// Which digits are allowed depends on the codec: resolve_codec checks it.
bool set_widths(std::string_view value, Codec *codec) {
  if (value.empty() || value.size() > kMaxDim) return false;
  codec->table.clear();
  for (const char c : value) {
    if (c < '0' || c > '8') return false;
    codec->table.push_back(uint8_t(c - '0'));
  }
  return codec->has_table = true;
}

void print_widths(const Codec &codec, std::string *out) {
  if (codec.has_table)
    for (const uint8_t width : codec.table) *out += char('0' + width);
}

bool set_progressive(std::string_view value, Codec *codec) {
  uint64_t n;
  if (!parse_number(value, &n)) return false;
  for (const uint32_t bits : {16u, 8u, 4u, 2u})
    if (n == bits) return codec->levels = bits == 16 ? 0 : 1u << bits, true;
  return false;
}

void print_progressive(const Codec &codec, std::string *out) {
  print_number(codec.levels ? std::bit_width(codec.levels) - 1 : 16, out);
}

constexpr char kLevels[] = "2..8, 16, 32, 64, 128 or 256";
constexpr char kFlag[] = "0 or 1";

}  // namespace

using View = std::string_view;
using Text = std::string;

constexpr TextKey levels = {"levels", kLevels, true, [](View v, Codec *c) { return parse_levels(v, &c->levels); },
                            [](const Codec &c, Text *out) { print_number(c.levels, out); }};
constexpr TextKey radius = {"radius", kLevels, true, levels.set, levels.print};
constexpr TextKey angle = {"angle", kLevels, true, [](View v, Codec *c) { return parse_levels(v, &c->high); },
                           [](const Codec &c, Text *out) { print_number(c.high, out); }};
constexpr TextKey high = {"high", kLevels, true, angle.set, angle.print};
constexpr TextKey low = {"low", kLevels, true, [](View v, Codec *c) { return parse_levels(v, &c->low); },
                         [](const Codec &c, Text *out) { print_number(c.low, out); }};
constexpr TextKey low_bits = {"low", "1", true, [](View v, Codec *c) { return parse_only(v, 1, &c->low); }, low.print};
constexpr TextKey high_bits = {"high", "3", true, [](View v, Codec *c) { return parse_only(v, 3, &c->high); },
                               high.print};

constexpr TextKey group_tokens = {"group", "1..65536", true, [](View v, Codec *c) { return parse_group(v, 1, &c->group); },
                                  print_group};
constexpr TextKey group_tokens_4 = {"group", "a multiple of 4 up to 65536", true,
                                    [](View v, Codec *c) { return parse_group(v, 4, &c->group); }, print_group};
constexpr TextKey group_tokens_8 = {"group", "a multiple of 8 up to 65536", true,
                                    [](View v, Codec *c) { return parse_group(v, 8, &c->group); }, print_group};
constexpr TextKey group_channels = {
    "group", "a divisor of the head dimension", true,
    [](View v, Codec *c) { return parse_word(v, "D", Codec::kGroupIsDim, &c->group) || parse_group(v, 1, &c->group); },
    [](const Codec &c, Text *out) { c.group == Codec::kGroupIsDim ? void(*out += 'D') : print_group(c, out); }};

constexpr TextKey progressive_bits = {"bits", "16, 8, 4 or 2", true, set_progressive, print_progressive};
constexpr TextKey midpoint = {"midpoint", kFlag, false, [](View v, Codec *c) { return parse_flag(v, &c->midpoint); },
                              [](const Codec &c, Text *out) { print_flag(c.midpoint, false, out); }};
constexpr TextKey center = {"center", kFlag, false, [](View v, Codec *c) { return parse_flag(v, &c->center); },
                            [](const Codec &c, Text *out) { print_flag(c.center, false, out); }};
constexpr TextKey rotate_off = {"rotate", kFlag, false, [](View v, Codec *c) { return parse_flag(v, &c->rotate); },
                                [](const Codec &c, Text *out) { print_flag(c.rotate, false, out); }};
constexpr TextKey rotate_on = {"rotate", kFlag, false, rotate_off.set,
                               [](const Codec &c, Text *out) { print_flag(c.rotate, true, out); }};
constexpr TextKey seed = {"seed", "a decimal number of 64 bits", false,
                          [](View v, Codec *c) { return parse_number(v, &c->seed); },
                          [](const Codec &c, Text *out) {
                            if (c.seed != Codec::kDefaultSeed) print_number(c.seed, out);
                          }};
constexpr TextKey scale = {"scale", "matched, plain, ls or unbiased", false, set_scale, print_scale};
constexpr TextKey params_e4m3 = {"params", "e4m3", false,
                                 [](View v, Codec *c) { return parse_word(v, "e4m3", ParamType::e4m3, &c->params); },
                                 [](const Codec &c, Text *out) { *out += c.params == ParamType::e4m3 ? "e4m3" : ""; }};
constexpr TextKey params_e5m3 = {"params", "e5m3", false,
                                 [](View v, Codec *c) { return parse_word(v, "e5m3", ParamType::e5m3, &c->params); },
                                 [](const Codec &c, Text *out) { *out += c.params == ParamType::e5m3 ? "e5m3" : ""; }};
constexpr TextKey unit_channel = {"unit", "channel", false,
                                  [](View v, Codec *c) { return parse_word(v, "channel", true, &c->by_channel); },
                                  [](const Codec &c, Text *out) { *out += c.by_channel ? "channel" : ""; }};
constexpr TextKey boost = {"boost", "a ratio p/q in 0..1", true, set_boost, print_boost};
constexpr TextKey mask = {"mask", "hex bytes, bit i of byte j for entry 8j + i", false, set_mask, print_mask};
constexpr TextKey widths = {"bits", "one digit 0..8 per entry", false, set_widths, print_widths};

}  // namespace kvq::keys
