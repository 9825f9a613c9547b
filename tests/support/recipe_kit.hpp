// For tests of recipes and policies: layers and parsed recipes in one line.
#pragma once
#include <catch2/catch_test_macros.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "recipe/recipe.h"

namespace kvq_test {

// A layer that stores its own pages.
inline kvq::LayerShape layer(uint32_t dim_k, uint32_t dim_v = 0, uint32_t kv_heads = 1, uint32_t index = 0) {
  kvq::LayerShape shape{};
  shape.kv_heads = kv_heads;
  shape.q_heads = kv_heads;
  shape.dim_k = dim_k;
  shape.dim_v = dim_v ? dim_v : dim_k;
  shape.rope_layout = KVQ_ROPE_HALF;
  shape.rotary_dim = dim_k;
  shape.source = index;
  return shape;
}

// Layers number themselves: each stores its own pages.
inline std::vector<kvq::LayerShape> numbered(std::vector<kvq::LayerShape> layers) {
  for (uint32_t l = 0; l < layers.size(); l++) layers[l].source = l;
  return layers;
}

inline kvq::Recipe parsed(std::string_view text, const std::vector<kvq::LayerShape> &layers) {
  kvq::Recipe recipe(std::pmr::get_default_resource());
  const kvq::Status status = kvq::parse_recipe(text, numbered(layers), &recipe);
  if (status != KVQ_OK) FAIL(text << ": " << kvq::failure_detail());
  return recipe;
}

// The sentence with which a text is refused as INVALID.
inline std::string refusal(std::string_view text, const std::vector<kvq::LayerShape> &layers) {
  kvq::Recipe recipe(std::pmr::get_default_resource());
  CHECK(kvq::parse_recipe(text, numbered(layers), &recipe) == KVQ_E_INVALID);
  return kvq::failure_detail();
}

}  // namespace kvq_test
