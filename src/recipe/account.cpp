// Exact bytes of a recipe (FORMATS section 8): wire bytes of sinks and packed tokens, metadata apart.
#include <algorithm>
#include <iterator>
#include <vector>

#include "policy/table.h"
#include "policy/text.h"
#include "recipe/recipe.h"

namespace kvq {

Split split_tokens(const Recipe &recipe, uint64_t tokens) {
  Split split{std::min(tokens, recipe.sinks), 0, 0};
  const uint64_t behind = tokens - split.sinks;
  if (recipe.classes == 2)
    split.packed = behind;
  else if (behind >= recipe.recent)
    split.packed = (behind - recipe.recent) / recipe.block * recipe.block;
  split.tail = behind - split.packed;
  return split;
}

namespace {

// Sums over layers, heads and tensors.
struct Totals {
  uint64_t wire[2] = {0, 0};      // bytes of K and V
  uint64_t channels[2] = {0, 0};  // over all heads and layers
  uint64_t metadata = 0;
};

// Which head the bytes are asked of.
struct Place {
  uint32_t layer, head;
};

// The table of one head: given in the text, given by the caller, or one that costs what every decision of the policy costs.
Status sample_table(const Recipe &recipe, const Codec &codec, const HeadShape &shape, Place place, std::pmr::vector<uint8_t> *table) {
  const uint32_t unit = recipe.layers[place.layer].unit;
  table->clear();
  if (!fills_table(recipe.policy, codec, shape)) return KVQ_OK;
  if (!recipe.given.empty() && shape.tensor == KVQ_TENSOR_K) return *table = recipe.given[place.layer].k[place.head], KVQ_OK;
  if (codec.kind == Kind::width_groups)
    return fail(KVQ_E_STATE, "the bytes of width-groups depend on the widths that occur: pass recipe_data with bits or scores");
  table->resize(table_entries(codec, shape));
  policy_row(recipe.policy.kind).example(recipe.policy, unit, *table);
  return KVQ_OK;
}

uint64_t table_bytes(const Codec &codec, const HeadShape &shape) {
  const uint64_t entries = table_entries(codec, shape);
  return codec.kind == Kind::pair_mix || codec.kind == Kind::channel_split ? (entries + 7) / 8 : entries;
}

// Wire bytes of `tokens` packed tokens of one head as one block.
Status packed_bytes(const Codec &codec, const HeadShape &shape, std::span<const uint8_t> table, uint64_t tokens, uint64_t *bytes) {
  std::pmr::memory_resource *memory = std::pmr::get_default_resource();
  HeadFormat format(memory);
  const std::pmr::vector<uint16_t> mu(codec.center ? shape.dim : 0, 0);
  KVQ_TRY(make_format(codec, shape, table, mu, &format));
  *bytes = wire_size(format, uint32_t(tokens));
  return KVQ_OK;
}

// Tokens of a page class: all packed ones, or those of low and high score.
uint64_t class_tokens(const Recipe &recipe, uint32_t cls, uint64_t packed) {
  if (recipe.classes == 1) return packed;
  const uint64_t high = floor_of(recipe.policy.r, packed);
  if (cls) return high;
  return recipe.drops() ? 0 : packed - high;
}

// PM-KVQ: the codecs of a layer at the widest width whose bytes fit the budget.
Status narrow_codecs(const Recipe &recipe, uint32_t layer, const LayerShape &shape, uint64_t packed, LayerCodecs *codecs) {
  uint64_t bytes[std::size(kChainLevels)];
  KVQ_TRY(chain_bytes(packed, shape.kv_heads, shape.dim_k, shape.dim_v, bytes));
  codecs->k[0].levels = codecs->v[0].levels = kChainLevels[widest_within(recipe.budgets[layer], bytes)];
  return KVQ_OK;
}

// One tensor of one head.
Status add_head(const Recipe &recipe, const LayerCodecs &codecs, Place place, const HeadShape &shape, const Split &split, Totals *totals) {
  totals->wire[shape.tensor] += split.sinks * shape.dim * 2;
  totals->channels[shape.tensor] += shape.dim;
  for (uint32_t cls = 0; cls < recipe.classes; cls++) {
    const Codec &codec = shape.tensor == KVQ_TENSOR_K ? codecs.k[cls] : codecs.v[cls];
    std::pmr::vector<uint8_t> table;
    uint64_t bytes = 0;
    KVQ_TRY(sample_table(recipe, codec, shape, place, &table));
    KVQ_TRY(packed_bytes(codec, shape, table, class_tokens(recipe, cls, split.packed), &bytes));
    totals->wire[shape.tensor] += bytes;
    totals->metadata += table_bytes(codec, shape) + (codec.center ? 2 * uint64_t(shape.dim) : 0);
  }
  return KVQ_OK;
}

Status add_layers(const Recipe &recipe, std::span<const LayerShape> shapes, const Split &split, Totals *totals) {
  for (uint32_t l = 0; l < shapes.size(); l++) {
    if (shapes[l].source != l) continue;
    LayerCodecs codecs = recipe.layers[l];
    if (!recipe.budgets.empty()) KVQ_TRY(narrow_codecs(recipe, l, shapes[l], split.packed, &codecs));
    for (uint32_t head = 0; head < shapes[l].kv_heads; head++)
      for (const uint32_t tensor : {KVQ_TENSOR_K, KVQ_TENSOR_V})
        KVQ_TRY(add_head(recipe, codecs, {l, head}, shapes[l].head(tensor), split, totals));
  }
  return KVQ_OK;
}

double bits_per_element(uint64_t bytes, uint64_t elements) { return elements ? double(bytes) * 8 / double(elements) : 0; }

}  // namespace

Status account(const Recipe &recipe, std::span<const LayerShape> shapes, uint64_t tokens, kvq_account *out) {
  if (tokens > UINT32_MAX) return fail(KVQ_E_INVALID, "tokens=%llu is above %u", (unsigned long long)tokens, UINT32_MAX);
  const Split split = split_tokens(recipe, tokens);
  Totals totals;
  KVQ_TRY(add_layers(recipe, shapes, split, &totals));
  const uint64_t stored = split.sinks + split.packed, channels = totals.channels[0] + totals.channels[1];
  out->page_tokens = recipe.page_tokens;
  out->packed_tokens = split.packed;
  out->sink_tokens = split.sinks;
  out->tail_tokens = split.tail;
  out->wire_bytes = totals.wire[0] + totals.wire[1];
  out->metadata_bytes = totals.metadata + (recipe.classes == 2 ? (split.packed + 7) / 8 : 0);
  out->tail_bytes = split.tail * channels * 2;
  out->fp16_bytes = tokens * channels * 2;
  out->effective_bits_k = bits_per_element(totals.wire[0], stored * totals.channels[0]);
  out->effective_bits_v = bits_per_element(totals.wire[1], stored * totals.channels[1]);
  out->effective_bits = bits_per_element(out->wire_bytes, stored * channels);
  return KVQ_OK;
}

}  // namespace kvq
