// kvq_backend_support on a device: which recipes have fused kernels, and for which head dimensions.
#include "shadow.hpp"

using namespace kvq_test;

namespace {

kvq_support support_of(const char *recipe, uint32_t dim_k, uint32_t dim_v) {
  const std::vector<kvq_layer> layers{layer_of(2, 4, dim_k, dim_v)};
  const Setup setup = preset_setup(recipe, layers);
  auto config = sized<kvq_config>();
  config.backend = KVQ_BACKEND_CUDA;
  config.n_layers = config.n_layer_structs = 1, config.layers = layers.data();
  config.recipe = recipe, config.recipe_data = setup.recipe_data;
  auto support = sized<kvq_support>();
  ok(kvq_backend_support(&config, &support));
  ok(support.status);
  return support;
}

struct Case {
  const char *recipe;
  uint32_t dim_k, dim_v;
};
constexpr Case kDecoded[] = {
    {"tq-3", 96, 96},
    {"tq-3", 128, 64},
    {"pmkvq", 96, 96},
    {"k=progressive(bits=4);v=affine-token(levels=4,group=32)", 64, 64},
};

}  // namespace

TEST_CASE("support tells which pages attention reads fused") {
  auto info = sized<kvq_backend_info>();
  ok(kvq_backend_query(1, &info));
  REQUIRE(info.available == 1);
  for (const Preset &preset : presets())
    for (const uint32_t dim : {64u, 128u, 256u}) {
      INFO(preset.name << " at " << dim);
      const kvq_support support = support_of(preset.name, dim, dim);
      CHECK(support.path == KVQ_PATH_FUSED);
      CHECK(support.reason[0] == 0);
    }
  for (const Case &each : kDecoded) {
    INFO(each.recipe << " at " << each.dim_k << "/" << each.dim_v);
    const kvq_support support = support_of(each.recipe, each.dim_k, each.dim_v);
    CHECK(support.path == KVQ_PATH_DECODE);
    CHECK(support.reason[0] != 0);
  }
}
