// The blob of kvq_policy_get and kvq_policy_set: what a policy froze, with the recipe and the geometry that it belongs to.
//
//   "kvqp"  version u32 = 1
//   recipe: bytes u32, canonical text
//   layers u32; per layer the nine numbers of kGeometry, u32 each
//   per layer that stores its own pages, per KV head: table of K, table of V (entries u32, a byte each), mu (entries u32, fp16 each)
//   FNV-1a hash u64 of everything before
//
// All numbers are little-endian.
#include <algorithm>
#include <cstring>
#include <string>

#include "policy/table.h"
#include "recipe/recipe.h"

namespace kvq {

namespace {

constexpr char kMagic[4] = {'k', 'v', 'q', 'p'};
constexpr uint32_t kVersion = 1;

struct GeometryField {
  const char *name;
  uint32_t LayerShape::*member;
};
constexpr GeometryField kGeometry[] = {
    {"kv_heads", &LayerShape::kv_heads},
    {"q_heads", &LayerShape::q_heads},
    {"dim_k", &LayerShape::dim_k},
    {"dim_v", &LayerShape::dim_v},
    {"rope_layout", &LayerShape::rope_layout},
    {"rotary_dim", &LayerShape::rotary_dim},
    {"rotary_first", &LayerShape::rotary_first},
    {"window", &LayerShape::window},
    {"kv_source", &LayerShape::source},
};

uint64_t fnv1a(const uint8_t *bytes, size_t n) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (size_t i = 0; i < n; i++) hash = (hash ^ bytes[i]) * 0x100000001b3u;
  return hash;
}

// ---- writing

class Writer {
 public:
  explicit Writer(std::pmr::vector<uint8_t> *out) : out_(out) {}
  void number(uint64_t value, int bytes) {
    for (int i = 0; i < bytes; i++) out_->push_back(uint8_t(value >> (8 * i)));
  }
  void raw(const void *data, size_t n) {
    const uint8_t *bytes = static_cast<const uint8_t *>(data);
    out_->insert(out_->end(), bytes, bytes + n);
  }
  // A list of the heads' lists, absent where the outer list is empty.
  template <class T>
  void list(const std::pmr::vector<std::pmr::vector<T>> &heads, uint32_t head) {
    if (heads.empty()) return number(0, 4);
    number(heads[head].size(), 4);
    for (const T entry : heads[head]) number(entry, sizeof(T));
  }

 private:
  std::pmr::vector<uint8_t> *out_;
};

// ---- reading

class Reader {
 public:
  Reader(const uint8_t *bytes, size_t size) : next_(bytes), end_(bytes + size) {}
  bool number(int bytes, uint64_t *value) {
    if (left() < size_t(bytes)) return false;
    *value = 0;
    for (int i = 0; i < bytes; i++) *value |= uint64_t(*next_++) << (8 * i);
    return true;
  }
  bool text(std::string_view *value) {
    uint64_t n;
    if (!number(4, &n) || left() < n) return false;
    *value = {reinterpret_cast<const char *>(next_), size_t(n)};
    next_ += n;
    return true;
  }
  template <class T>
  bool list(std::pmr::vector<T> *entries) {
    uint64_t n, entry = 0;
    if (!number(4, &n) || left() / sizeof(T) < n) return false;
    entries->resize(size_t(n));
    for (T &e : *entries) number(sizeof(T), &entry), e = T(entry);
    return true;
  }
  size_t left() const { return size_t(end_ - next_); }

 private:
  const uint8_t *next_, *end_;
};

Status corrupt(const char *what) { return fail(KVQ_E_CORRUPT, "policy blob: %s", what); }

// Name the first field in which two canonical recipe texts differ.
Status differing_recipe(std::string_view blob, std::string_view cache) {
  while (!blob.empty() && !cache.empty()) {
    const std::string_view a = blob.substr(0, blob.find(';')), b = cache.substr(0, cache.find(';'));
    if (a != b)
      return fail(KVQ_E_CONFIG, "policy blob: the recipe differs in '%s': the blob has %s, the cache %s",
                  std::string(b.substr(0, b.find('='))).c_str(), std::string(a).c_str(), std::string(b).c_str());
    blob.remove_prefix(std::min(a.size() + 1, blob.size()));
    cache.remove_prefix(std::min(b.size() + 1, cache.size()));
  }
  return fail(KVQ_E_CONFIG, "policy blob: its recipe has other fields than the cache's");
}

Status read_geometry(Reader *in, std::span<const LayerShape> shapes) {
  uint64_t layers, value;
  if (!in->number(4, &layers)) return corrupt("it ends within the geometry");
  if (layers != shapes.size())
    return fail(KVQ_E_CONFIG, "policy blob: n_layers is %llu in the blob, %zu in the cache", (unsigned long long)layers, shapes.size());
  for (size_t l = 0; l < shapes.size(); l++)
    for (const GeometryField &field : kGeometry) {
      if (!in->number(4, &value)) return corrupt("it ends within the geometry");
      if (value != shapes[l].*field.member)
        return fail(KVQ_E_CONFIG, "policy blob: layer %zu: %s is %llu in the blob, %u in the cache", l, field.name,
                    (unsigned long long)value, shapes[l].*field.member);
    }
  return KVQ_OK;
}

bool valid_mu(std::span<const uint16_t> mu) {
  return std::all_of(mu.begin(), mu.end(), [](uint16_t m) { return (m & 0x7c00u) != 0x7c00u && m != 0x8000u; });
}

// A part of a blob (tables, mu) is there for all heads that have one, or for none.
struct Presence {
  bool seen = false, present = false;
  bool add(bool here) {
    const bool consistent = !seen || present == here;
    seen = true, present = here;
    return consistent;
  }
};

Status check_table_part(const Recipe &recipe, const Codec &codec, const HeadShape &shape, uint32_t unit,
                        std::span<const uint8_t> table, Presence *presence) {
  if (fills_table(recipe.policy, codec, shape) && !presence->add(!table.empty())) return corrupt("some heads lack their table");
  if (table.empty()) return KVQ_OK;
  if (check_table(recipe.policy, codec, shape, unit, table) == KVQ_OK) return KVQ_OK;
  const std::string detail = failure_detail();
  return corrupt(detail.c_str());
}

struct Parts {
  Presence tables, centers;
};

Status read_head(Reader *in, const Recipe &recipe, const LayerShape &shape, uint32_t layer, uint32_t head, Parts *parts,
                 LayerTables *out) {
  const LayerCodecs &codecs = recipe.layers[layer];
  std::pmr::vector<uint16_t> &mu = out->mu[head];
  if (!in->list(&out->k[head]) || !in->list(&out->v[head]) || !in->list(&mu)) return corrupt("it ends within the tables");
  KVQ_TRY(check_table_part(recipe, codecs.k[0], shape.head(KVQ_TENSOR_K), codecs.unit, out->k[head], &parts->tables));
  KVQ_TRY(check_table_part(recipe, codecs.v[0], shape.head(KVQ_TENSOR_V), codecs.unit, out->v[head], &parts->tables));
  if (codecs.k[0].center && !parts->centers.add(!mu.empty())) return corrupt("some heads lack their centre");
  if (!mu.empty() && (!codecs.k[0].center || mu.size() != shape.dim_k || !valid_mu(mu))) return corrupt("a centre is not valid");
  return KVQ_OK;
}

}  // namespace

Status write_policy_blob(std::string_view recipe, std::span<const LayerShape> shapes, std::span<const LayerTables> tables,
                         std::pmr::vector<uint8_t> *blob) {
  blob->clear();
  Writer out(blob);
  out.raw(kMagic, sizeof kMagic);
  out.number(kVersion, 4);
  out.number(recipe.size(), 4);
  out.raw(recipe.data(), recipe.size());
  out.number(shapes.size(), 4);
  for (const LayerShape &shape : shapes)
    for (const GeometryField &field : kGeometry) out.number(shape.*field.member, 4);
  for (size_t l = 0; l < shapes.size(); l++) {
    if (shapes[l].source != l) continue;
    for (uint32_t head = 0; head < shapes[l].kv_heads; head++) {
      out.list(tables[l].k, head);
      out.list(tables[l].v, head);
      out.list(tables[l].mu, head);
    }
  }
  out.number(fnv1a(blob->data(), blob->size()), 8);
  return KVQ_OK;
}

Status read_policy_blob(const void *blob, size_t size, std::string_view recipe, std::span<const LayerShape> shapes,
                        std::pmr::vector<LayerTables> *tables) {
  const uint8_t *bytes = static_cast<const uint8_t *>(blob);
  constexpr size_t kHash = 8;
  if (size < sizeof kMagic + 4 + kHash || std::memcmp(bytes, kMagic, sizeof kMagic) != 0) return corrupt("it does not begin with kvqp");
  uint64_t hash, version;
  Reader(bytes + size - kHash, kHash).number(8, &hash);
  if (hash != fnv1a(bytes, size - kHash)) return corrupt("its hash does not fit its bytes");
  Reader in(bytes + sizeof kMagic, size - sizeof kMagic - kHash);
  in.number(4, &version);
  if (version != kVersion) return fail(KVQ_E_CONFIG, "policy blob: version is %u, this library reads %u", uint32_t(version), kVersion);

  std::string_view text;
  if (!in.text(&text)) return corrupt("it ends within the recipe");
  if (text != recipe) return differing_recipe(text, recipe);
  KVQ_TRY(read_geometry(&in, shapes));

  std::pmr::memory_resource *memory = tables->get_allocator().resource();
  Recipe parsed(memory);
  KVQ_TRY(parse_recipe(recipe, shapes, &parsed));
  std::pmr::vector<LayerTables> read(memory);
  Parts parts;
  read.reserve(shapes.size());
  for (uint32_t l = 0; l < shapes.size(); l++) {
    LayerTables &layer = read.emplace_back(memory);
    layer.k.resize(shapes[l].kv_heads);
    layer.v.resize(shapes[l].kv_heads);
    layer.mu.resize(shapes[l].kv_heads);
    if (shapes[l].source != l) continue;
    for (uint32_t head = 0; head < shapes[l].kv_heads; head++)
      KVQ_TRY(read_head(&in, parsed, shapes[l], l, head, &parts, &layer));
  }
  if (in.left()) return corrupt("bytes follow its end");
  *tables = std::move(read);
  return KVQ_OK;
}

}  // namespace kvq
