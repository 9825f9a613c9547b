// kvq_backend_support on a device: which recipes have fused kernels, and for which head dimensions.
#include <string_view>

#include "kit.hpp"

using namespace kvq_test;

namespace {

kvq_support support_of(const char *recipe, uint32_t dim_k, uint32_t dim_v) {
  const kvq_layer layer = layer_of(2, 4, dim_k, dim_v);
  const uint64_t budget = 1 << 20;
  auto data = sized<kvq_recipe_data>();
  data.budgets = &budget, data.n_budgets = 1;
  auto config = sized<kvq_config>();
  config.backend = KVQ_BACKEND_CUDA;
  config.n_layers = config.n_layer_structs = 1, config.layers = &layer, config.recipe = recipe;
  if (std::string_view(recipe) == "pmkvq") config.recipe_data = &data;
  auto support = sized<kvq_support>();
  ok(kvq_backend_support(&config, &support));
  ok(support.status);
  return support;
}

struct Case {
  const char *recipe;
  uint32_t dim_k, dim_v, path;
};
constexpr Case kCases[] = {
    {"tq-3", 128, 128, KVQ_PATH_FUSED},
    {"tq-3", 64, 64, KVQ_PATH_FUSED},
    {"tq-3", 256, 256, KVQ_PATH_FUSED},
    {"tq-3", 96, 96, KVQ_PATH_DECODE},
    {"tq-3", 128, 64, KVQ_PATH_DECODE},
    {"fp16", 128, 128, KVQ_PATH_FUSED},
    {"kivi-2", 128, 128, KVQ_PATH_FUSED},
    {"kivi-2", 256, 256, KVQ_PATH_FUSED},
    {"kivi-2-g32", 128, 128, KVQ_PATH_FUSED},
    {"pnmix", 128, 128, KVQ_PATH_FUSED},
    {"kvq-2", 128, 128, KVQ_PATH_FUSED},
    {"kvq-2", 64, 64, KVQ_PATH_FUSED},
    {"kvq-2.5", 64, 64, KVQ_PATH_FUSED},
    {"kvq-3", 128, 128, KVQ_PATH_FUSED},
    {"kvq-3", 64, 64, KVQ_PATH_FUSED},
    {"kvq-3", 256, 256, KVQ_PATH_FUSED},
    {"semkv", 128, 128, KVQ_PATH_FUSED},
    {"semkv", 64, 64, KVQ_PATH_FUSED},
    {"semkv-tq", 64, 64, KVQ_PATH_FUSED},
    {"semkv-tq-2", 128, 128, KVQ_PATH_FUSED},
    {"semkv-tq-2", 64, 64, KVQ_PATH_FUSED},
    {"tq-1.585", 64, 64, KVQ_PATH_FUSED},
    {"tq-2.322", 64, 64, KVQ_PATH_FUSED},
    {"tq-2.585", 64, 64, KVQ_PATH_FUSED},
    {"pnmix", 256, 256, KVQ_PATH_FUSED},
    {"pmkvq", 64, 64, KVQ_PATH_FUSED},
    {"pmkvq", 128, 128, KVQ_PATH_FUSED},
    {"pmkvq", 256, 256, KVQ_PATH_FUSED},
    {"pmkvq", 96, 96, KVQ_PATH_DECODE},
    {"polar-2", 256, 256, KVQ_PATH_FUSED},
    {"blockgtq-k3v3", 128, 128, KVQ_PATH_FUSED},
    {"blockgtq-k3v3-fast", 128, 128, KVQ_PATH_FUSED},
    {"polar-2", 128, 128, KVQ_PATH_FUSED},
    {"kitty", 128, 128, KVQ_PATH_FUSED},
    {"tq-split", 128, 128, KVQ_PATH_FUSED},
};

}  // namespace

TEST_CASE("support tells which pages attention reads fused") {
  auto info = sized<kvq_backend_info>();
  ok(kvq_backend_query(1, &info));
  REQUIRE(info.available == 1);
  for (const Case &each : kCases) {
    INFO(each.recipe << " at " << each.dim_k << "/" << each.dim_v);
    const kvq_support support = support_of(each.recipe, each.dim_k, each.dim_v);
    CHECK(support.path == each.path);
    CHECK((support.reason[0] == 0) == (each.path == KVQ_PATH_FUSED));
  }
}
