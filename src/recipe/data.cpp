// kvq_recipe_data: what a recipe takes and a text cannot hold.
#include <algorithm>

#include "policy/table.h"
#include "recipe/recipe.h"

namespace kvq {

namespace {

using Widths = std::pmr::vector<uint8_t>;

// Does the policy fill K's width lists in some layer?  (Not where the text gives them.)
bool fills_widths(const Recipe &recipe, std::span<const LayerShape> shapes) {
  const PolicyKind kind = recipe.policy.kind;
  if (kind != PolicyKind::chanmix && kind != PolicyKind::blockgtq && kind != PolicyKind::pair_widths) return false;
  for (size_t l = 0; l < shapes.size(); l++)
    if (fills_table(recipe.policy, recipe.layers[l].k[0], shapes[l].head(KVQ_TENSOR_K))) return true;
  return false;
}

// Entries of an array over all layers and heads, `per_head` of them in a head.
template <class PerHead>
uint64_t entries(std::span<const LayerShape> shapes, PerHead per_head) {
  uint64_t n = 0;
  for (size_t l = 0; l < shapes.size(); l++) n += uint64_t(shapes[l].kv_heads) * per_head(l);
  return n;
}

Status check_array(const char *name, const void *array, uint64_t n, bool wanted, uint64_t expected, const Recipe &recipe) {
  if (!array && n > 0) return fail(KVQ_E_INVALID, "recipe_data: %s is NULL, but n_%s=%llu", name, name, (unsigned long long)n);
  if (!array) return KVQ_OK;
  if (!wanted) return fail(KVQ_E_INVALID, "recipe_data: the recipe '%s' takes no %s", recipe.text.c_str(), name);
  if (n != expected)
    return fail(KVQ_E_INVALID, "recipe_data: n_%s=%llu, but these layers have %llu", name, (unsigned long long)n, (unsigned long long)expected);
  return KVQ_OK;
}

Status check_presence(const kvq_recipe_data &data, const Recipe &recipe, uint64_t n_bits, uint64_t n_budgets) {
  if (data.reserved != 0) return fail(KVQ_E_INVALID, "recipe_data: reserved=%u is not 0", data.reserved);
  if (data.bits && data.scores) return fail(KVQ_E_INVALID, "recipe_data: bits and scores are both given");
  if (recipe.policy.kind == PolicyKind::chanmix && !data.bits)
    return fail(KVQ_E_INVALID, "policy chanmix needs recipe_data.bits, the widths [layer][kv_head][dim_k]: %llu entries", (unsigned long long)n_bits);
  if (recipe.policy.kind == PolicyKind::pmkvq && !data.budgets)
    return fail(KVQ_E_INVALID, "policy pmkvq needs recipe_data.budgets, bytes by layer: %llu entries", (unsigned long long)n_budgets);
  return KVQ_OK;
}

// The list of one head: given, or by the policy from given scores.
Status make_widths(const kvq_recipe_data &data, const Recipe &recipe, uint32_t layer, const HeadShape &shape, uint64_t first,
                   uint64_t first_pair, Widths *widths) {
  const LayerCodecs &codecs = recipe.layers[layer];
  if (data.bits) {
    std::copy_n(data.bits + first, widths->size(), widths->begin());
    return check_table(recipe.policy, codecs.k[0], shape, codecs.unit, *widths);
  }
  const Policy &policy = recipe.policy;
  return allocate_widths({data.scores + first_pair, widths->size()}, policy.avg, policy.bmin, policy.bmax, codecs.unit, *widths);
}

Status make_tables(const kvq_recipe_data &data, std::span<const LayerShape> shapes, Recipe *recipe) {
  std::pmr::memory_resource *memory = recipe->given.get_allocator().resource();
  uint64_t first = 0, first_pair = 0;
  recipe->given.reserve(shapes.size());
  for (uint32_t l = 0; l < shapes.size(); l++) {
    const HeadShape shape = shapes[l].head(KVQ_TENSOR_K);
    LayerTables &tables = recipe->given.emplace_back(memory);
    tables.k.resize(shapes[l].kv_heads);
    for (uint32_t head = 0; head < shapes[l].kv_heads; head++) {
      Widths &widths = tables.k[head];
      widths.resize(table_entries(recipe->layers[l].k[0], shape));
      const bool used = shapes[l].source == l;
      const Status status = used ? make_widths(data, *recipe, l, shape, first, first_pair, &widths) : Status(KVQ_OK);
      if (status != KVQ_OK) {
        const std::string detail = failure_detail();
        return fail(status, "recipe_data: layer %u, head %u: %s", l, head, detail.c_str());
      }
      first += widths.size(), first_pair += shape.dim / 2;
    }
  }
  return KVQ_OK;
}

}  // namespace

Status apply_data(const kvq_recipe_data *given, std::span<const LayerShape> shapes, Recipe *recipe) {
  const kvq_recipe_data data = given ? *given : kvq_recipe_data{};
  const bool widths = fills_widths(*recipe, shapes), by_channel = recipe->policy.kind == PolicyKind::chanmix;
  const auto table = [&](size_t l) { return table_entries(recipe->layers[l].k[0], shapes[l].head(KVQ_TENSOR_K)); };
  const uint64_t n_bits = widths ? entries(shapes, table) : 0;
  const uint64_t n_pairs = entries(shapes, [&](size_t l) { return shapes[l].dim_k / 2; });
  KVQ_TRY(check_array("bits", data.bits, data.n_bits, widths, n_bits, *recipe));
  KVQ_TRY(check_array("scores", data.scores, data.n_scores, widths && !by_channel, n_pairs, *recipe));
  KVQ_TRY(check_array("budgets", data.budgets, data.n_budgets, recipe->policy.kind == PolicyKind::pmkvq, shapes.size(), *recipe));
  KVQ_TRY(check_presence(data, *recipe, n_bits, shapes.size()));
  recipe->given.clear();
  recipe->budgets.clear();
  if (data.budgets) recipe->budgets.assign(data.budgets, data.budgets + data.n_budgets);
  return data.bits || data.scores ? make_tables(data, shapes, recipe) : Status(KVQ_OK);
}

}  // namespace kvq
