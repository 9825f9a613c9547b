// The shadow model: what the cache should hold, replayed call by call with nothing but lists of token numbers.
//
// A test never hands arrays to the cache directly: it speaks of tokens by number.  Text makes the K, V, Q and score of a token, a
// pure function of seed, layer and number, so that no way of cutting a sequence can change its data.  Shadow keeps the numbers in
// position order and counts sinks, packed blocks and tail by section 7 of the formats.
#pragma once
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <string>
#include <string_view>
#include <vector>

#include "kit.hpp"

namespace kvq_test {

using Ids = std::vector<uint32_t>;

// count tokens from number `first` on.
inline Ids ids(uint32_t first, size_t count) {
  Ids result(count);
  std::iota(result.begin(), result.end(), first);
  return result;
}
inline Ids part(const Ids &all, size_t begin, size_t end) { return Ids(all.begin() + long(begin), all.begin() + long(end)); }

// ---- data

class Text {
 public:
  enum Kind {
    K,
    V,
    Q
  };

  Text(std::vector<kvq_layer> layers, uint64_t stream, uint32_t dtype = KVQ_DTYPE_F32)
      : layers_(std::move(layers)), stream_(stream), dtype_(dtype) {
    for (auto &kind : rows_) kind.resize(layers_.size());
  }

  size_t heads(uint32_t layer, Kind kind) const { return kind == Q ? layers_[layer].q_heads : layers_[layer].kv_heads; }
  size_t dim(uint32_t layer, Kind kind) const { return kind == V ? dim_v(layers_[layer]) : layers_[layer].dim_k; }

  // One token: [heads][dim].
  const Floats &row(uint32_t layer, Kind kind, uint32_t id) {
    auto &rows = rows_[kind][layer];
    if (rows.size() <= id) rows.resize(id + 1);
    if (rows[id].empty()) rows[id] = make(layer, kind, id);
    return rows[id];
  }
  // Tokens in a list: [tokens][heads][dim].
  Floats rows(uint32_t layer, Kind kind, const Ids &list) {
    Floats result;
    result.reserve(list.size() * heads(layer, kind) * dim(layer, kind));
    for (uint32_t id : list) {
      const Floats &one = row(layer, kind, id);
      result.insert(result.end(), one.begin(), one.end());
    }
    return result;
  }
  Floats scores(const Ids &list) const {
    Floats result;
    for (uint32_t id : list) result.push_back(float(Random(stream_ * 7919 + 104729 * uint64_t{id} + 5).uniform()));
    return result;
  }

 private:
  // Head 0 is N(0, 1), the others 10 N(0, 1) + 3 with queries a tenth as large; odd layers differ in sign and offset.
  Floats make(uint32_t layer, Kind kind, uint32_t id) const {
    Random random(((stream_ * 1021 + layer) * 3 + kind) * 1000003 + id);
    const size_t n_heads = heads(layer, kind), per_kv = n_heads / layers_[layer].kv_heads, width = dim(layer, kind);
    Floats result(n_heads * width);
    for (size_t i = 0; i < result.size(); i += 2) {
      const double radius = std::sqrt(-2 * std::log(1 - random.uniform())), angle = 6.283185307179586 * random.uniform();
      result[i] = float(radius * std::cos(angle));
      if (i + 1 < result.size()) result[i + 1] = float(radius * std::sin(angle));
    }
    const float sign = layer % 2 ? -1 : 1, shift = kind == Q ? 0.0f : 0.25f * float(layer);
    for (size_t i = 0; i < result.size(); ++i) {
      const bool first = i / width / per_kv == 0;
      const float value = first ? result[i] : kind == Q ? result[i] / 10
                                                        : 10 * result[i] + 3;
      result[i] = round_to(sign * (value + shift), dtype_);
    }
    return result;
  }

  std::vector<kvq_layer> layers_;
  uint64_t stream_;
  uint32_t dtype_;
  std::vector<std::vector<Floats>> rows_[3];  // [kind][layer][id]
};

// ---- lengths

struct Rule {
  uint64_t sinks = 0, recent = 0, block = 64;
  bool semkv = false;
};

struct Shadow {
  Rule rule;
  bool committed = false, staging = false;  // staging: between the chunks of a later prompt
  Ids tokens;                               // in position order
  uint64_t sinks = 0, tail = 0;
  std::vector<uint64_t> blocks;  // valid tokens of each packed block

  explicit Shadow(Rule r = {}) : rule(r) {}

  uint64_t total() const { return tokens.size(); }
  uint64_t packed() const { return std::accumulate(blocks.begin(), blocks.end(), uint64_t{0}); }
  uint64_t frozen() const { return sinks + packed(); }  // positions that no later token may change

  void append(const Ids &list) {
    grow(list);
    pack();
  }
  void chunk(const Ids &list) {
    if (committed && !staging) end_turn();
    staging = committed;
    grow(list);
  }
  void final_chunk(const Ids &list) {
    chunk(list);
    committed = true;
    staging = false;
    end_turn();
    pack();
  }
  void end_turn() {
    if (!rule.semkv || tail == 0) return;
    blocks.push_back(tail);
    tail = 0;
  }
  void truncate(uint64_t length) {
    tokens.resize(length);
    if (length >= frozen()) {
      tail = length - frozen();
      return;
    }
    tail = 0;
    sinks = std::min(sinks, length);
    while (!blocks.empty() && frozen() > length) {
      const uint64_t cut = std::min(blocks.back(), frozen() - length);
      blocks.back() -= cut;
      if (blocks.back() == 0) blocks.pop_back();
    }
  }

 private:
  void grow(const Ids &list) {
    for (uint32_t id : list) {
      ++(tokens.size() < rule.sinks ? sinks : tail);
      tokens.push_back(id);
    }
  }
  void pack() {
    while (committed && !staging && tail >= rule.recent + rule.block) {
      blocks.push_back(rule.block);
      tail -= rule.block;
    }
  }
};

// ---- the presets, from the table of section 8 and the rules before it

struct Preset {
  const char *name;
  Rule rule;
  bool needs_queries;  // its policy ranks by queries
  bool from_prompt;    // something is decided at the first commit: the bytes depend on where the prompt ends
  bool shrinks = false;  // packed tokens may be packed again, narrower
};

inline const std::vector<Preset> &presets() {
  static const std::vector<Preset> table = {
      {"fp16", {0, 0, 64}, false, false},
      {"kivi-2", {0, 0, 128}, false, false},
      {"kivi-2-g32", {0, 96, 32}, false, false},
      {"polar-2", {0, 0, 128}, false, false},
      {"chanmix", {0, 0, 128}, false, false},
      {"kitty", {32, 0, 128}, false, false},
      {"pnmix", {32, 0, 128}, true, true},
      {"pnmix-g64", {32, 0, 128}, true, true},
      {"tq-2", {0, 0, 64}, false, false},
      {"tq-3", {0, 0, 64}, false, false},
      {"tq-4", {0, 0, 64}, false, false},
      {"tq-1.585", {0, 0, 64}, false, false},
      {"tq-2.322", {0, 0, 64}, false, false},
      {"tq-2.585", {0, 0, 64}, false, false},
      {"tq-split", {0, 0, 64}, false, true},
      {"semkv", {0, 0, 64, true}, false, true},
      {"semkv-tq", {0, 0, 64, true}, false, true},
      {"semkv-tq-2", {0, 0, 64, true}, false, true},
      {"blockgtq-k3v3", {0, 0, 64}, true, true},
      {"blockgtq-k3v2", {0, 0, 64}, true, true},
      {"blockgtq-k2v2", {0, 0, 64}, true, true},
      {"blockgtq-k3v3-fast", {4, 32, 64}, true, true},
      {"blockgtq-k2v2-fast", {4, 32, 64}, true, true},
      {"pmkvq", {0, 0, 64}, false, false, true},
      {"kvq-2", {32, 32, 128}, true, true},
      {"kvq-2.5", {32, 32, 128}, true, true},
      {"kvq-3", {32, 32, 128}, true, true},
      {"tq-2c", {4, 32, 64}, false, true},
      {"tq-3c", {4, 32, 64}, false, true},
  };
  return table;
}

inline const Preset *find_preset(std::string_view name) {
  for (const Preset &preset : presets())
    if (name == preset.name) return &preset;
  return nullptr;
}

// Presets whose profile or budgets no text can hold.
inline bool needs_data(std::string_view name) { return name == "chanmix" || name == "pmkvq"; }

// A preset with the data that it needs, if any: for chanmix every tenth head at 4 bits and the channels of the others at 3, 2, 2
// and 1; for pmkvq budgets that hold about 200 tokens at 8 bits in layer 0, half of that in layer 1, a third in layer 2...
inline Setup preset_setup(const std::string &name, const std::vector<kvq_layer> &layers) {
  struct Data {
    Bytes bits;
    std::vector<uint64_t> budgets;
    kvq_recipe_data table = sized<kvq_recipe_data>();
  };
  Setup setup{.recipe = name, .layers = layers};
  if (!needs_data(name)) return setup;
  const auto data = std::make_shared<Data>();
  uint32_t head = 0;
  for (const kvq_layer &layer : layers) {
    data->budgets.push_back(200 * layer.kv_heads * (layer.dim_k + dim_v(layer) + 8) / (data->budgets.size() + 1));
    for (uint32_t h = 0; h < layer.kv_heads; ++h, ++head)
      for (uint32_t c = 0; c < layer.dim_k; ++c) data->bits.push_back(head % 10 == 0 ? 4 : "\3\2\1\2"[(c + head) % 4]);
  }
  if (name == "chanmix")
    data->table.bits = data->bits.data(), data->table.n_bits = data->bits.size();
  else
    data->table.budgets = data->budgets.data(), data->table.n_budgets = data->budgets.size();
  setup.recipe_data = &data->table;
  setup.owned = data;
  return setup;
}

// What a recipe text promises: those of its preset, if it begins with one, and its own fields.
inline Preset promises(const std::string &recipe) {
  Preset result{"", {}, recipe.find("pnmix") != recipe.npos || recipe.find("blockgtq") != recipe.npos || recipe.find("pair-widths") != recipe.npos, recipe.find("policy=") != recipe.npos || recipe.find("center=1") != recipe.npos};
  result.rule.semkv = recipe.find("semkv") != recipe.npos;
  for (size_t begin = 0; begin <= recipe.size();) {
    const size_t end = std::min(recipe.find(';', begin), recipe.size());
    const std::string field = recipe.substr(begin, end - begin);
    if (const Preset *preset = find_preset(field)) result = *preset;
    const auto number = [&](std::string_view key, uint64_t *to) {
      if (field.starts_with(key)) *to = std::stoull(field.substr(key.size()));
    };
    number("sinks=", &result.rule.sinks);
    number("recent=", &result.rule.recent);
    number("block=", &result.rule.block);
    begin = end + 1;
  }
  return result;
}

}  // namespace kvq_test
