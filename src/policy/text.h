// Text of recipes and policies: "name(key=value,...)", numbers and ratios.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "codec/codec.h"
#include "policy/policy.h"
#include "util/status.h"

namespace kvq {

struct Argument {
  std::string_view key, value;
};

// "name" or "name(key=value,...)"; values may hold parentheses of their own.  Views into the text.
struct Call {
  std::string_view name;
  std::vector<Argument> arguments;
};

// INVALID: unbalanced parentheses, an empty name, key or value, a repeated key.
Status parse_call(std::string_view text, Call *call);

// A decimal number in [lowest, highest]; `key` is for the message.
Status parse_number(std::string_view value, std::string_view key, uint64_t lowest, uint64_t highest, uint64_t *out);

// "p/q" or "p", both below 2^63, q > 0; stored in lowest terms.
Status parse_ratio(std::string_view value, std::string_view key, Ratio *out);
std::string print_ratio(Ratio ratio);

// floor(r * n), exact.
uint64_t floor_of(Ratio r, uint64_t n);

// The canonical text of a policy field: every key, in a fixed order.
std::string print_policy(const PolicyText &policy);

}  // namespace kvq
