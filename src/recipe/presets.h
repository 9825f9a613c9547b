// Presets of section 8: names for recipe texts.
#pragma once
#include <string_view>

namespace kvq {

// The recipe text of a preset, nullptr for an unknown name.
const char *preset_text(std::string_view name);

}  // namespace kvq
