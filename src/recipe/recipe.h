// A recipe: codecs, policy and packing rule of a cache (FORMATS / conformance/SPEC.md sections 5 to 8).
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "backend/backend.h"
#include "codec/codec.h"
#include "policy/policy.h"
#include "util/status.h"

namespace kvq {

// Codecs of one layer, resolved for its dimensions.  Index 0: the only page class, or SemKV's low; 1: SemKV's high.
struct LayerCodecs {
  Codec k[2], v[2];
  uint32_t unit = 1;  // of the width policies, in pairs
};

struct Recipe {
  explicit Recipe(std::pmr::memory_resource *memory) : layers(memory), text(memory), given(memory), budgets(memory) {}
  Policy policy;
  uint32_t classes = 1;       // page classes of packed tokens: 2 where tokens are chosen by score
  uint64_t sinks = 0, recent = 0, block = 64;
  uint32_t page_tokens = 64;  // of packed pages, or a multiple of it (Backend::page_tokens): a multiple of every group, see choose_page_tokens in recipe.cpp
  std::pmr::vector<LayerCodecs> layers;
  std::pmr::string text;      // canonical
  std::pmr::vector<LayerTables> given;  // by layer: K's width lists, from kvq_recipe_data; empty: none
  std::pmr::vector<uint64_t> budgets;   // pmkvq: by layer

  bool drops() const { return policy.kind == PolicyKind::drop_tokens; }  // tokens of class 0 are not kept at all
};

// Parse, apply presets, resolve for every layer and check everything that recipe and geometry alone decide.
// Syntax beyond kvq.h: group=fit128 is the largest divisor of the head dimension not above 128, unit=fit16 the largest divisor of
// D/2 not above D/16 (section 8's rules for presets).
Status parse_recipe(std::string_view text, std::span<const LayerShape> layers, Recipe *recipe);

// Take over what kvq_recipe_data holds (nullptr: nothing).  INVALID where the recipe needs something else.
Status apply_data(const kvq_recipe_data *data, std::span<const LayerShape> shapes, Recipe *recipe);

// Name of preset `index`, nullptr beyond the last.
const char *preset_name(uint32_t index);

// Resolve a kvq_layer (defaults, ranges); `index` is its number, for messages and for kv_source.
Status resolve_layer(const kvq_layer &layer, uint32_t index, LayerShape *shape);

// Section 7's division of `tokens` committed at once.  SemKV: everything behind the sinks is packed.
struct Split {
  uint64_t sinks, packed, tail;
};
Split split_tokens(const Recipe &recipe, uint64_t tokens);

// kvq_recipe_account.  shapes as given to parse_recipe; layers that read another's pages cost nothing.
Status account(const Recipe &recipe, std::span<const LayerShape> shapes, uint64_t tokens, kvq_account *out);

// The widths of PM-KVQ's chain, widest first, as levels of progressive (0: 16 bits).
inline constexpr uint32_t kChainLevels[] = {0, 256, 16, 4};

}  // namespace kvq
