// Geometry of layers: defaults, ranges, and layers that read another's pages.
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#include "recipe/recipe.h"
#include "recipe_kit.hpp"

using namespace kvq;
using Catch::Matchers::ContainsSubstring;

namespace {

kvq_layer plain() {
  kvq_layer layer{};
  layer.struct_size = sizeof layer;
  layer.kv_heads = 2, layer.q_heads = 8, layer.dim_k = 128;
  return layer;
}

std::string refused(kvq_layer layer, uint32_t index = 3) {
  LayerShape shape{};
  CHECK(resolve_layer(layer, index, &shape) == KVQ_E_INVALID);
  return failure_detail();
}

}  // namespace

TEST_CASE("zero fields of a layer take their defaults") {
  LayerShape shape{};
  REQUIRE(resolve_layer(plain(), 5, &shape) == KVQ_OK);
  CHECK(shape.dim_v == 128);
  CHECK(shape.rotary_dim == 128);
  CHECK(shape.rotary_first == 0);
  CHECK(shape.window == 0);
  CHECK(shape.source == 5);
}

TEST_CASE("a layer may read an earlier layer's pages") {
  kvq_layer layer = plain();
  layer.kv_source = 3;
  LayerShape shape{};
  REQUIRE(resolve_layer(layer, 5, &shape) == KVQ_OK);
  CHECK(shape.source == 2);
  layer.kv_source = 6;  // itself
  CHECK_THAT(refused(layer, 5), ContainsSubstring("kv_source=6"));
  layer.kv_source = 1;
  CHECK_THAT(refused(layer, 0), ContainsSubstring("kv_source=1"));
}

TEST_CASE("sources must store their pages and look alike") {
  const auto broken = [](auto change) {
    std::vector<LayerShape> layers = kvq_test::numbered({kvq_test::layer(64), kvq_test::layer(64), kvq_test::layer(64)});
    layers[1].source = 0;
    change(layers);
    Recipe recipe(std::pmr::get_default_resource());
    return parse_recipe("fp16", layers, &recipe);
  };
  CHECK(broken([](auto &) {}) == KVQ_OK);
  CHECK(broken([](auto &layers) { layers[2].source = 1; }) == KVQ_E_INVALID);
  CHECK(broken([](auto &layers) { layers[1].dim_v = 32; }) == KVQ_E_INVALID);
  CHECK(broken([](auto &layers) { layers[1].kv_heads = 2, layers[1].q_heads = 2; }) == KVQ_E_INVALID);
  CHECK(broken([](auto &layers) { layers[1].q_heads = 4; }) == KVQ_OK);
}

TEST_CASE("heads and dimensions out of range are refused by name") {  // S10
  const auto with = [](uint32_t kvq_layer::*field, uint32_t value) {
    kvq_layer layer = plain();
    layer.*field = value;
    return refused(layer);
  };
  CHECK_THAT(with(&kvq_layer::kv_heads, 0), ContainsSubstring("layer 3: kv_heads=0"));
  CHECK_THAT(with(&kvq_layer::kv_heads, 4097), ContainsSubstring("kv_heads=4097"));
  CHECK_THAT(with(&kvq_layer::q_heads, 0), ContainsSubstring("q_heads=0"));
  CHECK_THAT(with(&kvq_layer::q_heads, 9), ContainsSubstring("q_heads=9"));
  CHECK_THAT(with(&kvq_layer::q_heads, 2 * 65), ContainsSubstring("q_heads=130"));
  for (uint32_t dim : {0u, 65u, 1026u, 0xffffffffu}) CHECK_THAT(with(&kvq_layer::dim_k, dim), ContainsSubstring("dim_k=" + std::to_string(dim)));
  for (uint32_t dim : {1u, 65u, 1026u}) CHECK_THAT(with(&kvq_layer::dim_v, dim), ContainsSubstring("dim_v=" + std::to_string(dim)));
  CHECK_THAT(with(&kvq_layer::rope_layout, 2), ContainsSubstring("rope_layout=2"));
  CHECK_THAT(with(&kvq_layer::rotary_dim, 33), ContainsSubstring("rotary_dim=33"));   // S22
  CHECK_THAT(with(&kvq_layer::rotary_dim, 130), ContainsSubstring("rotary_dim=130"));
  CHECK_THAT(with(&kvq_layer::rotary_first, 2), ContainsSubstring("rotary_first=2"));  // with the whole head rotary
}

TEST_CASE("rotary parts smaller than the head are accepted") {  // S22
  kvq_layer layer = plain();
  LayerShape shape{};
  layer.dim_k = 80, layer.rotary_dim = 32;
  CHECK(resolve_layer(layer, 0, &shape) == KVQ_OK);
  layer.dim_k = 128, layer.rotary_dim = 64, layer.rotary_first = 64;
  REQUIRE(resolve_layer(layer, 0, &shape) == KVQ_OK);
  const HeadShape k = shape.head(KVQ_TENSOR_K), v = shape.head(KVQ_TENSOR_V);
  CHECK(k.rotary_first == 64);
  CHECK(k.rotary_dim == 64);
  CHECK(v.rotary_first == 0);
  CHECK(v.rotary_dim == 128);
  layer.rotary_first = 66;
  CHECK_THAT(refused(layer), ContainsSubstring("rotary_first=66"));
}
