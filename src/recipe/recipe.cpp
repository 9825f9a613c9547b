// Parsing of recipe texts (kvq.h, kvq_recipe_parse), their resolution for a geometry, and the checks that need nothing else.
#include "recipe/recipe.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "policy/table.h"
#include "policy/text.h"
#include "recipe/presets.h"

namespace kvq {

namespace {

int length(std::string_view text) { return int(text.size() < 200 ? text.size() : 200); }  // for "%.*s"

// Failures of parts are reported with the field or layer in front.
Status fail_in(Status status, const std::string &where) {
  const std::string detail = failure_detail();  // a copy: fail() writes where it reads
  return fail(status, "%s: %s", where.c_str(), detail.c_str());
}

// ---- fields

enum Field {
  kK,
  kV,
  kSinks,
  kRecent,
  kBlock,
  kPolicy,
  kFields
};
constexpr const char *kFieldNames[kFields] = {"k", "v", "sinks", "recent", "block", "policy"};

struct Fields {
  std::string text[kFields];  // empty: not given
};

Status set_field(std::string_view item, Fields *fields) {
  const size_t equals = item.find('=');
  if (equals == std::string_view::npos || equals + 1 == item.size())
    return fail(KVQ_E_INVALID, "recipe: '%.*s' is neither a preset nor of the form field=value", length(item), item.data());
  const std::string_view name = item.substr(0, equals);
  for (int f = 0; f < kFields; f++) {
    if (name != kFieldNames[f]) continue;
    if (!fields->text[f].empty()) return fail(KVQ_E_INVALID, "recipe: the field %s is given twice", kFieldNames[f]);
    fields->text[f] = item.substr(equals + 1);
    return KVQ_OK;
  }
  return fail(KVQ_E_INVALID, "recipe: '%.*s' is none of the fields k, v, sinks, recent, block, policy", length(name), name.data());
}

Status read_fields(std::string_view text, Fields *fields) {
  for (bool more = true; more;) {
    const size_t end = text.find(';');
    KVQ_TRY(set_field(text.substr(0, end), fields));
    more = end != std::string_view::npos;
    if (more) text.remove_prefix(end + 1);
  }
  return KVQ_OK;
}

// A preset's fields, replaced by those that follow its name.
Status read_recipe(std::string_view text, Fields *fields) {
  const std::string_view first = text.substr(0, text.find(';'));
  if (first.find('=') != std::string_view::npos) return read_fields(text, fields);
  const char *preset = preset_text(first);
  if (!preset) return fail(KVQ_E_INVALID, "recipe: '%.*s' is neither a preset nor of the form field=value", length(first), first.data());
  KVQ_TRY(read_fields(preset, fields));
  if (first.size() == text.size()) return KVQ_OK;
  Fields own;
  KVQ_TRY(read_fields(text.substr(first.size() + 1), &own));
  for (int f = 0; f < kFields; f++)
    if (!own.text[f].empty()) fields->text[f] = own.text[f];
  return KVQ_OK;
}

// ---- codecs

constexpr std::string_view kFit = "group=fit";

// "group=fitN" of affine-token: the largest divisor of `dim` not above N.  Other texts stay as they are.
Status resolve_fit(std::string_view text, uint32_t dim, std::string *out) {
  *out = text;
  const size_t at = text.find(kFit);
  if (at == std::string_view::npos || text.substr(0, text.find('(')) != "affine-token") return KVQ_OK;
  const size_t first = at + kFit.size(), end = std::min(text.find_first_of(",)", first), text.size());
  uint64_t limit;
  KVQ_TRY(parse_number(text.substr(first, end - first), "group=fit", 1, 1024, &limit));
  uint32_t group = uint32_t(std::min<uint64_t>(limit, dim));
  while (dim % group) group--;
  out->replace(at, end - at, "group=" + std::to_string(group));
  return KVQ_OK;
}

Status parse_layer_codec(const std::string &text, const HeadShape &shape, Codec *codec) {
  std::string resolved;
  KVQ_TRY(resolve_fit(text, shape.dim, &resolved));
  KVQ_TRY(parse_codec(resolved, true, codec));
  KVQ_TRY(resolve_codec(codec, shape));
  if (codec->center && shape.tensor == KVQ_TENSOR_V) return fail(KVQ_E_INVALID, "center=1 is for keys, not for values");
  return KVQ_OK;
}

// The text that stands for `codecs` of all layers: resolved where that is the same everywhere, else as it was given.
Status canonical_codec(const std::string &text, const std::vector<const Codec *> &codecs, std::string *out) {
  *out = print_codec(*codecs[0]);
  const auto same = [&](const Codec *codec) { return print_codec(*codec) == *out; };
  if (std::all_of(codecs.begin(), codecs.end(), same)) return KVQ_OK;
  const size_t at = text.find(kFit);
  std::string with_dim = text, given = "group=D";
  if (at != std::string::npos) {  // fit<N> is no number to a codec: print it as group=D and put it back
    given = text.substr(at, text.find_first_of(",)", at) - at);
    with_dim.replace(at, given.size(), "group=D");
  }
  Codec symbolic;
  KVQ_TRY(parse_codec(with_dim, true, &symbolic));
  *out = print_codec(symbolic);
  if (const size_t printed = out->find("group=D"); printed != std::string::npos) out->replace(printed, 7, given);
  return KVQ_OK;
}

// ---- the parts of a recipe

struct Parts {
  PolicyText policy;
  std::string codec[2][2];  // text by [class][tensor]
};

Status read_parts(const Fields &fields, Recipe *recipe, Parts *parts) {
  KVQ_TRY(parse_policy(fields.text[kPolicy].empty() ? "uniform" : fields.text[kPolicy], &parts->policy));
  if (parts->policy.policy.kind == PolicyKind::semkv) {
    if (!fields.text[kK].empty() || !fields.text[kV].empty())
      return fail(KVQ_E_INVALID, "policy semkv takes its codecs from low= and high=: k= and v= must not be given");
    recipe->classes = 2;
    for (int tensor = 0; tensor < 2; tensor++)
      parts->codec[0][tensor] = parts->policy.low, parts->codec[1][tensor] = parts->policy.high;
    return KVQ_OK;
  }
  if (parts->policy.policy.kind == PolicyKind::drop_tokens) {
    if (!fields.text[kK].empty() || !fields.text[kV].empty())
      return fail(KVQ_E_INVALID, "policy drop-tokens keeps tokens in fp16: k= and v= must not be given");
    recipe->classes = 2;
    for (auto &codecs : parts->codec) codecs[0] = codecs[1] = "raw";
    return KVQ_OK;
  }
  if (fields.text[kK].empty()) return fail(KVQ_E_INVALID, "recipe: the field k is missing");
  recipe->classes = 1;
  parts->codec[0][0] = fields.text[kK];
  parts->codec[0][1] = fields.text[kV].empty() ? "affine-token(levels=4,group=D)" : fields.text[kV];
  if (parts->policy.policy.kind == PolicyKind::pmkvq)
    for (std::string &codec : parts->codec[0])
      if (codec == "progressive") codec = "progressive(bits=16)";  // where the chain begins
  return KVQ_OK;
}

std::string field_name(const Recipe &recipe, uint32_t cls, uint32_t tensor) {
  if (recipe.classes == 2) return cls ? "high" : "low";
  return tensor == KVQ_TENSOR_K ? "k" : "v";
}

Status resolve_layers(const Parts &parts, std::span<const LayerShape> shapes, Recipe *recipe) {
  std::pmr::memory_resource *memory = recipe->layers.get_allocator().resource();
  recipe->layers.clear();
  recipe->layers.reserve(shapes.size());
  for (uint32_t l = 0; l < shapes.size(); l++) {
    const auto codec = [memory] { return Codec{.table = std::pmr::vector<uint8_t>(memory)}; };
    LayerCodecs &layer = recipe->layers.emplace_back(LayerCodecs{{codec(), codec()}, {codec(), codec()}, 1});
    for (uint32_t cls = 0; cls < recipe->classes; cls++)
      for (uint32_t tensor : {KVQ_TENSOR_K, KVQ_TENSOR_V}) {
        Codec &target = tensor == KVQ_TENSOR_K ? layer.k[cls] : layer.v[cls];
        const Status status = parse_layer_codec(parts.codec[cls][tensor], shapes[l].head(tensor), &target);
        if (status != KVQ_OK) return fail_in(status, "layer " + std::to_string(l) + ", " + field_name(*recipe, cls, tensor));
      }
    layer.unit = resolve_unit(parts.policy.unit, shapes[l].dim_k);
  }
  return KVQ_OK;
}

// Layers that read another's pages must look like it.
Status check_sources(std::span<const LayerShape> shapes) {
  for (uint32_t l = 0; l < shapes.size(); l++) {
    const LayerShape &own = shapes[l], &source = shapes[own.source];
    if (source.source != own.source)
      return fail(KVQ_E_INVALID, "layer %u: kv_source names layer %u, which itself reads layer %u: name that one", l, own.source,
                  source.source);
    if (own.kv_heads != source.kv_heads || own.dim_k != source.dim_k || own.dim_v != source.dim_v)
      return fail(KVQ_E_INVALID, "layer %u reads layer %u but has other kv_heads, dim_k or dim_v", l, own.source);
  }
  return KVQ_OK;
}

// ---- what policy and codecs must agree on

// A class takes any number of tokens at any position, and a recipe has one policy.
Status check_class_codec(const Codec &codec) {
  if (codec.kind == Kind::affine_token || codec.kind == Kind::lloyd) return KVQ_OK;
  const std::string text = print_codec(codec);
  if (!is_row(codec.kind))
    return fail(KVQ_E_UNSUPPORTED,
                "a token class of semkv takes tokens one by one, but %s packs %u neighbours together: use affine-token or lloyd",
                text.c_str(), group_tokens(codec));
  if (codec.kind == Kind::width_groups || codec.kind == Kind::channel_split)
    return fail(KVQ_E_UNSUPPORTED,
                "%s needs a policy that chooses its channels, and the recipe's only policy is semkv: use affine-token or lloyd",
                text.c_str());
  return fail(KVQ_E_UNSUPPORTED, "a token class of semkv is affine-token or lloyd, not %s", text.c_str());
}

Status check_chain_codec(const Codec &codec) {
  if (codec.kind == Kind::progressive && codec.levels == kChainLevels[0]) return KVQ_OK;
  return fail(KVQ_E_INVALID, "policy pmkvq narrows progressive(bits=16), and takes no %s", print_codec(codec).c_str());
}

// One codec of a layer: does its policy fit, and is its table filled?  A given table settles only the second.
Status check_codec(const Policy &policy, const Codec &codec, const HeadShape &shape, uint32_t unit, bool *filled) {
  if (policy.kind == PolicyKind::semkv) return check_class_codec(codec);
  if (policy.kind == PolicyKind::pmkvq) return check_chain_codec(codec);
  if (table_entries(codec, shape) == 0) return KVQ_OK;
  const PolicyRow &row = policy_row(policy.kind);
  const bool belongs = codec.kind == row.fills && (shape.tensor == KVQ_TENSOR_K || row.values);
  if (belongs) KVQ_TRY(row.check(policy, codec, shape, unit));
  if (codec.has_table) return KVQ_OK;
  if (!belongs)
    return fail(KVQ_E_INVALID,
                "%s needs a mask or width list, which policy %s does not fill here: give it in the text, or name a "
                "policy that does",
                print_codec(codec).c_str(), row.name);
  *filled = true;
  return KVQ_OK;
}

Status check_layers(std::span<const LayerShape> shapes, const Recipe &recipe, bool *filled) {
  *filled = false;
  for (uint32_t l = 0; l < shapes.size(); l++)
    for (uint32_t cls = 0; cls < recipe.classes; cls++)
      for (uint32_t tensor : {KVQ_TENSOR_K, KVQ_TENSOR_V}) {
        const LayerCodecs &layer = recipe.layers[l];
        const Codec &codec = tensor == KVQ_TENSOR_K ? layer.k[cls] : layer.v[cls];
        const Status status = check_codec(recipe.policy, codec, shapes[l].head(tensor), layer.unit, filled);
        if (status != KVQ_OK) return fail_in(status, "layer " + std::to_string(l) + ", " + field_name(recipe, cls, tensor));
      }
  return KVQ_OK;
}

// A policy whose masks or lists are all given has nothing left to decide: the recipe is uniform.
Status settle_policy(bool filled, Recipe *recipe, PolicyText *text) {
  const PolicyRow &row = policy_row(recipe->policy.kind);
  if (row.fills == Kind::raw || filled) return KVQ_OK;
  const LayerCodecs &layer = recipe->layers[0];
  const bool given = layer.k[0].kind == row.fills || (row.values && layer.v[0].kind == row.fills);
  if (!given) return fail(KVQ_E_INVALID, "policy %s decides nothing for k=%s", row.name, print_codec(layer.k[0]).c_str());
  *text = {};
  recipe->policy = {};
  return KVQ_OK;
}

// ---- packing

constexpr uint64_t kMaxGroup = 65536;  // tokens that are packed together; also keeps a page's arithmetic small

// Tokens that all codecs can pack together: the least common multiple of their groups.
Status common_group(const Recipe &recipe, uint64_t *group) {
  *group = 1;
  for (const LayerCodecs &layer : recipe.layers)
    for (uint32_t cls = 0; cls < recipe.classes; cls++)
      for (const Codec *codec : {&layer.k[cls], &layer.v[cls]}) {
        *group = std::lcm(*group, uint64_t(group_tokens(*codec)));
        if (*group > kMaxGroup)
          return fail(KVQ_E_INVALID, "recipe: the groups of k and v have the common multiple %llu, more than %llu tokens",
                      (unsigned long long)*group, (unsigned long long)kMaxGroup);
      }
  return KVQ_OK;
}

// Packed pages hold the smallest multiple of every group that is at least 64: 64 tokens, 128 where a group is 128.
uint32_t choose_page_tokens(uint64_t group) { return uint32_t((63 / group + 1) * group); }

Status parse_count(const std::string &text, Field field, uint64_t lowest, uint64_t *out) {
  return text.empty() ? KVQ_OK : parse_number(text, kFieldNames[field], lowest, UINT32_MAX, out);
}

Status read_packing(const Fields &fields, Recipe *recipe) {
  uint64_t group;
  KVQ_TRY(common_group(*recipe, &group));
  recipe->sinks = recipe->recent = 0;
  recipe->block = group == 1 ? 64 : group;
  recipe->page_tokens = choose_page_tokens(group);
  KVQ_TRY(parse_count(fields.text[kSinks], kSinks, 0, &recipe->sinks));
  KVQ_TRY(parse_count(fields.text[kRecent], kRecent, 0, &recipe->recent));
  KVQ_TRY(parse_count(fields.text[kBlock], kBlock, 1, &recipe->block));
  if (recipe->block % group)
    return fail(KVQ_E_INVALID, "block=%llu is not a multiple of the %llu tokens that the codecs pack together",
                (unsigned long long)recipe->block, (unsigned long long)group);
  if (recipe->classes == 2 && recipe->recent > 0)
    return fail(KVQ_E_INVALID, "recent=%llu: policy %s has no recent window", (unsigned long long)recipe->recent,
                policy_row(recipe->policy.kind).name);
  return KVQ_OK;
}

// ---- canonical text

Status canonical_codec_of(const Parts &parts, const Recipe &recipe, uint32_t cls, std::initializer_list<uint32_t> tensors,
                          std::string *out) {
  std::vector<const Codec *> codecs;
  for (const LayerCodecs &layer : recipe.layers)
    for (uint32_t tensor : tensors) codecs.push_back(tensor == KVQ_TENSOR_K ? &layer.k[cls] : &layer.v[cls]);
  return canonical_codec(parts.codec[cls][*tensors.begin()], codecs, out);
}

Status print_recipe(const Parts &parts, Recipe *recipe) {
  PolicyText policy = parts.policy;
  std::string text, k, v;
  if (recipe->classes == 2) {
    KVQ_TRY(canonical_codec_of(parts, *recipe, 0, {KVQ_TENSOR_K, KVQ_TENSOR_V}, &policy.low));
    KVQ_TRY(canonical_codec_of(parts, *recipe, 1, {KVQ_TENSOR_K, KVQ_TENSOR_V}, &policy.high));
  } else {
    KVQ_TRY(canonical_codec_of(parts, *recipe, 0, {KVQ_TENSOR_K}, &k));
    KVQ_TRY(canonical_codec_of(parts, *recipe, 0, {KVQ_TENSOR_V}, &v));
    text = "k=" + k + ";v=" + v + ";";
  }
  const auto other_unit = [&](const LayerCodecs &layer) { return layer.unit != recipe->layers[0].unit; };
  if (std::none_of(recipe->layers.begin(), recipe->layers.end(), other_unit)) policy.unit = std::to_string(recipe->layers[0].unit);
  text += "sinks=" + std::to_string(recipe->sinks) + ";recent=" + std::to_string(recipe->recent) +
          ";block=" + std::to_string(recipe->block) + ";policy=" + print_policy(policy);
  recipe->text = text;
  return KVQ_OK;
}

}  // namespace

Status parse_recipe(std::string_view text, std::span<const LayerShape> layers, Recipe *recipe) {
  if (layers.empty()) return fail(KVQ_E_INVALID, "n_layers=0: a recipe is resolved for at least one layer");
  Fields fields;
  Parts parts;
  KVQ_TRY(check_sources(layers));
  KVQ_TRY(read_recipe(text, &fields));
  KVQ_TRY(read_parts(fields, recipe, &parts));
  KVQ_TRY(resolve_layers(parts, layers, recipe));
  recipe->policy = parts.policy.policy;
  bool filled;
  KVQ_TRY(check_layers(layers, *recipe, &filled));
  KVQ_TRY(settle_policy(filled, recipe, &parts.policy));
  KVQ_TRY(read_packing(fields, recipe));
  return print_recipe(parts, recipe);
}

}  // namespace kvq
