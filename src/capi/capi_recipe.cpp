// Recipes.
#include "capi/boundary.h"
#include "recipe/recipe.h"

using namespace kvq;
using namespace kvq::capi;

const char *kvq_recipe_preset(uint32_t index) { return preset_name(index); }

namespace {

Status read_recipe(const char *text, const kvq_layer *layers, uint32_t n_layers, Vector<LayerShape> *shapes, Recipe *recipe) {
  KVQ_REQUIRE(text);
  KVQ_TRY(read_layers(layers, n_layers, n_layers, shapes));
  KVQ_TRY(Cache::check_sources(*shapes));
  return parse_recipe(text, *shapes, recipe);
}

}  // namespace

int32_t kvq_recipe_parse(const char *text, const kvq_layer *layers, uint32_t n_layers, char *buf, size_t cap, size_t *needed) {
  return guarded([&]() -> Status {
    Memory scratch;
    Vector<LayerShape> shapes(&scratch);
    Recipe recipe(&scratch);
    KVQ_TRY(read_recipe(text, layers, n_layers, &shapes, &recipe));
    return write_text(recipe.text, buf, cap, needed);
  });
}

int32_t kvq_recipe_account(const char *text, const kvq_layer *layers, uint32_t n_layers, uint64_t tokens,
                           const kvq_recipe_data *data, kvq_account *out) {
  return guarded([&]() -> Status {
    KVQ_TRY(check_struct(out, sizeof *out, "account"));
    Memory scratch;
    Vector<LayerShape> shapes(&scratch);
    Recipe recipe(&scratch);
    kvq_recipe_data copy;
    KVQ_TRY(read_recipe(text, layers, n_layers, &shapes, &recipe));
    KVQ_TRY(read_data(data, &copy, &data));
    KVQ_TRY(apply_data(data, shapes, &recipe));
    kvq_account result{};
    KVQ_TRY(account(recipe, shapes, tokens, &result));
    write_struct(result, out);
    return KVQ_OK;
  });
}
