// What is offered works, and what is not is refused when the cache is made: walks over schemes, sizes and processor levels.
// (Cases S6, S14 to S16, S18, S23, X4.)
#include <set>

#include "mirror.hpp"

using namespace kvq_test;

namespace {

// Every scheme, at its smallest block: K, and a policy where one fills its table.
struct Scheme {
  const char *k, *policy;
};
const Scheme kKeys[] = {
    {"raw", ""},
    {"affine-channel(levels=2,group=32,midpoint=1)", ""},
    {"affine-channel(levels=4,group=32)", ""},
    {"affine-channel(levels=7,group=32)", ""},
    {"affine-channel(levels=256,group=32)", ""},
    {"affine-token(levels=4,group=D)", ""},
    {"affine-token(levels=6,group=D,rotate=1)", ""},
    {"lloyd(levels=2)", ""},
    {"lloyd(levels=5,params=e5m3)", ""},
    {"lloyd(levels=64)", ""},
    {"lloyd(levels=8,center=1)", ""},
    {"polar(radius=4,angle=8,group=32)", ""},
    {"kitty(boost=1/16,group=32)", ""},
    {"pair-mix(low=1,high=3,group=32,midpoint=1)", ";policy=pnmix(r=2/5)"},
    {"width-groups", ";policy=blockgtq(avg=3)"},
    {"channel-widths(group=32,midpoint=1)", ";policy=pair-widths(avg=5/2,bmin=0,bmax=6)"},
    {"channel-split(high=8,low=4)", ";policy=channel-split"},
};
const char *const kValues[] = {"raw", "affine-token(levels=3,group=D)", "affine-token(levels=16,group=32)", "lloyd(levels=3)", "lloyd(levels=16)"};

std::string recipe_of(const Scheme &k, const std::string &v) { return std::string("k=") + k.k + ";v=" + v + k.policy + ";block=32"; }

std::string recipe_text(kvq_cache *cache) {
  size_t needed = 0;
  kvq_cache_recipe(cache, nullptr, 0, &needed);
  std::string text(needed, '\0');
  ok(kvq_cache_recipe(cache, text.data(), needed, nullptr));
  text.pop_back();
  return text;
}

kvq_account account_of(const std::string &recipe, const kvq_layer &layer, uint64_t tokens) {
  auto account = sized<kvq_account>();
  ok(kvq_recipe_account(recipe.c_str(), &layer, 1, tokens, nullptr, &account));
  return account;
}

// The levels of KVQ_CPU that this processor has.
std::vector<std::string> levels() {
  std::vector<std::string> found;
  for (const char *name : {"portable", "avx2", "avxvnni", "avx512", "amx", "neon"}) {
    setenv("KVQ_CPU", name, 1);
    auto info = sized<kvq_backend_info>();
    ok(kvq_backend_query(KVQ_BACKEND_CPU, &info));
    if (std::string(info.path) == name) found.push_back(name);
  }
  unsetenv("KVQ_CPU");
  return found;
}

}  // namespace

TEST_CASE("every cell that the support query offers runs, and every other is refused by create in the same words") {  // S16
  uint64_t index = 0, offered = 0, refusals = 0;
  for (const Scheme &k : kKeys)
    for (const char *v : kValues)
      for (uint32_t dim : {32, 65, 72, 80, 128, 192})
        for (uint32_t ratio : {1, 3, 8}) {
          if (kSlow > 1 && index++ % kSlow != 0) continue;
          const Setup setup{.recipe = recipe_of(k, v), .layers = {layer_of(2, ratio, dim, dim == 192 ? 64 : 0)}};
          INFO(setup.recipe << ", dim " << dim << ", ratio " << ratio);
          const kvq_config config = config_of(setup);
          auto support = sized<kvq_support>();
          ok(kvq_backend_support(&config, &support));
          REQUIRE((support.path == KVQ_PATH_NONE) == (support.status != KVQ_OK));
          if (support.status != KVQ_OK) {
            kvq_cache *none = nullptr;
            refused(kvq_create(&config, &none), support.status);
            REQUIRE(detail() == support.reason);
            ++refusals;
            continue;
          }
          Mirror m(setup, index);
          const kvq_seq s = m.create();
          m.commit(s, ids(0, 40));
          m.query(s, 1), m.query(s, 4);
          ++offered;
        }
  REQUIRE((offered > 900 / kSlow || on_device()));
  REQUIRE(refusals > 200 / kSlow);  // odd sizes, and groups that do not divide
}

TEST_CASE("the head size is the configured one at every width") {  // S6
  const kvq_layer layer = layer_of(2, 4, 128);
  for (uint64_t bits : {2, 3, 4}) {
    const std::string codec = "lloyd(levels=" + std::to_string(1 << bits) + ")", recipe = "k=" + codec + ";v=" + codec;
    const kvq_account account = account_of(recipe, layer, 640);
    REQUIRE(account.fp16_bytes == 640 * 2 * 2 * 128 * 2);
    REQUIRE(account.wire_bytes == 640 * 2 * 2 * (128 * bits / 8 + 2));
    Mirror m(Setup{.recipe = recipe, .layers = {layer}});
    const kvq_seq s = m.create();
    m.commit(s, ids(0, 64));
    m.check(s);
    REQUIRE(export_wire(m.cache, s, 0, 0, KVQ_TENSOR_K)[0].bytes.size() == 64 * (128 * bits / 8 + 2));
  }
}

TEST_CASE("channels at 16 bits beside packed ones, and caches without values, are refused when the cache is made") {  // S14, S15
  Setup setup{.recipe = "k=channel-widths(group=32,unit=channel);v=lloyd(levels=16);block=64;policy=chanmix", .layers = {layer_of(1, 16, 576, 512)}};
  Bytes widths(576, 4);
  auto data = sized<kvq_recipe_data>();
  data.bits = widths.data(), data.n_bits = widths.size();
  setup.recipe_data = &data;
  for (uint32_t wide : {16, 8}) {  // of the 64 position channels
    std::fill(widths.begin() + 512, widths.end(), uint8_t(wide));
    INFO(wide << " bits");
    if (wide == 16) {
      const kvq_config config = config_of(setup);
      kvq_cache *none = nullptr;
      refused(kvq_create(&config, &none), KVQ_E_INVALID);
      REQUIRE(detail().find("16") != std::string::npos);
      continue;
    }
    Mirror m(setup);
    const kvq_seq s = m.create();
    m.commit(s, ids(0, 200));
    m.query(s, 2);
    m.check(s);
  }

  const Setup without{.recipe = "k=lloyd(levels=8);v=none", .layers = {layer_of(2, 2, 64)}};
  const kvq_config config = config_of(without);
  kvq_cache *none = nullptr;
  refused(kvq_create(&config, &none), KVQ_E_INVALID);
  REQUIRE(detail().find("none") != std::string::npos);
  // What a layer that reads another's pages does not store is not allocated.
  Setup shared{.recipe = "tq-3", .layers = {layer_of(2, 2, 64), layer_of(2, 2, 64)}};
  uint64_t used[2];
  for (uint32_t source : {0, 1}) {
    shared.layers[1].kv_source = source;
    Mirror m(shared);
    const kvq_seq s = m.create();
    m.commit(s, ids(0, 6400));
    used[source] = stats(m.cache).page_bytes_packed;
  }
  REQUIRE(double(used[1]) / double(used[0]) < 0.51);
}

TEST_CASE("K4V4, K4V2, K8V4 and K3V2 side by side say what they are") {  // S18
  const auto text = [](uint32_t k, uint32_t v) {
    return "k=affine-channel(levels=" + std::to_string(1 << k) + ",group=32);v=affine-token(levels=" + std::to_string(1 << v) + ",group=32);block=32";
  };
  // One recipe serves all layers of a cache, so the types of different layers are caches of their own.
  for (const std::string &recipe : {text(4, 4), text(4, 2), text(8, 4), text(3, 2), std::string("kvq-3")}) {
    Mirror m(Setup{.recipe = recipe, .layers = {layer_of(2, 4, 128), layer_of(2, 4, 128)}});
    const kvq_seq s = m.create();
    m.commit(s, ids(0, 300));
    m.step({s}, {ids(300, 2)});
    m.check(s);
    const std::string resolved = recipe_text(m.cache);
    if (recipe != "kvq-3") REQUIRE(resolved.find(recipe.substr(0, recipe.rfind(';'))) == 0);
    Mirror again(Setup{.recipe = resolved, .layers = m.setup.layers});
    REQUIRE(recipe_text(again.cache) == resolved);
  }
  const kvq_layer layer = layer_of(2, 4, 128);
  auto config = sized<kvq_config>();
  config.n_layers = config.n_layer_structs = 1, config.layers = &layer;
  kvq_cache *by_default = nullptr;
  ok(kvq_create(&config, &by_default));
  REQUIRE(recipe_text(by_default) == recipe_text(Cache(Setup{.recipe = "kvq-3", .layers = {layer}})));
  kvq_destroy(by_default);
}

TEST_CASE("a width list with all widths, one of them of a single pair, keeps pairs in ascending order") {  // S23
  // 64 pairs: width 5 once, the other seven widths nine times each.
  Bytes widths;
  for (uint32_t pair = 0; pair < 64; ++pair) widths.push_back(pair == 37 ? 5 : uint8_t("\1\7\3\2\x8\6\4"[(pair * 5 + (pair > 37 ? 6 : 0)) % 7]));
  std::string digits;
  for (uint8_t width : widths) digits += char('0' + width);
  REQUIRE(std::set<uint8_t>(widths.begin(), widths.end()).size() == 8);
  REQUIRE(std::count(widths.begin(), widths.end(), 5) == 1);

  const Setup setup{.recipe = "k=width-groups(bits=" + digits + ");v=lloyd(levels=8)", .layers = {layer_of(2, 2, 128)}};
  Mirror m(setup);
  const kvq_seq s = m.create();
  m.commit(s, ids(0, 300));
  m.step({s}, {ids(300, 4)});
  m.check(s);

  // A row that is zero but for one channel shows where that channel lies: in its group zeros have code L/2 - 1 without a rotation,
  // and the positive number a higher one; groups of zeros alone have code 0.  Streams by ascending width; in each the pairs ascend, u
  // before v (half layout: i and i + 64).
  const std::string text = "width-groups(bits=" + digits + ",rotate=0)";
  auto codec = sized<kvq_codec>();
  codec.text = text.c_str(), codec.dim = 128;
  for (uint32_t channel = 0; channel < 128; ++channel) {
    Floats row(128, 0.0f);
    row[channel] = 3;
    const Tensor x(row, 1, 128);
    Bytes wire(1024);
    size_t size = 0;
    ok(kvq_codec_encode(&codec, x.view(), 1, wire.data(), wire.size(), &size));
    size_t at = 0;  // of the stream
    for (uint32_t width = 1; width <= 8; ++width) {
      const size_t pairs = size_t(std::count(widths.begin(), widths.end(), uint8_t(width)));
      size_t bit = 0;
      bool own = false;  // does the group hold the channel?
      for (uint32_t pair = 0; pair < 64; ++pair) own |= widths[pair] == width && channel % 64 == pair;
      for (uint32_t pair = 0; pair < 64; ++pair)
        for (uint32_t half = 0; half < 2 && widths[pair] == width; ++half) {
          uint32_t code = 0;
          for (uint32_t b = 0; b < width; ++b, ++bit) code |= uint32_t(wire[at + bit / 8] >> bit % 8 & 1) << b;
          const uint32_t levels = 1u << width;
          if (channel == pair + 64 * half)
            REQUIRE(code >= levels / 2);
          else
            REQUIRE(code == (own ? levels / 2 - 1 : 0));
        }
      at += (2 * pairs * width + 7) / 8;
    }
    REQUIRE(size == at + 2 * 8);
  }
}

TEST_CASE("every processor level writes the same bytes, and its attention is right") {  // X4
  std::vector<std::string> paths = levels();
  REQUIRE(paths.front() == "portable");
  if (on_device()) paths.resize(1);  // levels are the CPU's
  std::vector<uint32_t> lengths = {1025, 2049};
  for (uint32_t t = 1; t <= 65; ++t) lengths.push_back(t);
  uint64_t index = 0;
  for (const Scheme &k : kKeys)
    for (const uint32_t tokens : lengths) {
      if (kSlow > 1 && index % (2 * kSlow) != 0 && ++index) continue;
      const Setup setup{.recipe = recipe_of(k, kValues[index++ % std::size(kValues)]), .layers = {layer_of(2, 2, 32)}};
      INFO(setup.recipe << ", " << tokens << " tokens");
      std::optional<Mirror::Picture> first;
      for (const std::string &path : paths) {
        setenv("KVQ_CPU", path.c_str(), 1);
        INFO(path);
        Mirror m(setup);
        const kvq_seq s = m.create();
        m.commit(s, ids(0, tokens));
        m.query(s, 1);
        const Mirror::Picture seen = m.picture(s);
        REQUIRE((!first || seen == *first));
        first = seen;
      }
    }
  unsetenv("KVQ_CPU");
}
