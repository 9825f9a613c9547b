// Recipes that need more than a text: chanmix profiles, given scores and widths, through the whole life of a cache.
#include "wire.hpp"

using namespace kvq_test;

namespace {

const std::string kChanMix = "k=channel-widths(group=16,params=e4m3,unit=channel);v=lloyd(levels=4);block=32;sinks=3;policy=chanmix";

// Widths 0 to 8 in every head, different in each.
Bytes some_widths(size_t entries) {
  Bytes bits(entries);
  for (size_t i = 0; i < entries; ++i) bits[i] = uint8_t((i * 5 + i / 32) % 9);
  return bits;
}

kvq_recipe_data with_bits(const Bytes &bits) {
  auto data = sized<kvq_recipe_data>();
  data.bits = bits.data(), data.n_bits = bits.size();
  return data;
}

std::string digits(const Bytes &bits, size_t first, size_t count) {
  std::string text;
  for (size_t i = first; i < first + count; ++i) text += char('0' + bits[i]);
  return text;
}

}  // namespace

TEST_CASE("chanmix packs every head by its own list, and attends over it") {
  const std::vector<kvq_layer> layers = {layer_of(2, 2, 32), layer_of(1, 4, 16, 24)};
  const Bytes bits = some_widths(2 * 32 + 16);
  const kvq_recipe_data data = with_bits(bits);
  Mirror m(Setup{.recipe = kChanMix, .layers = layers, .recipe_data = &data});
  m.near_truth = false;  // width 0 keeps little
  const kvq_seq s = m.create();
  m.commit(s, ids(0, 70), 17);
  for (uint32_t i = 0; i < 45; i += 5) m.step({s}, {ids(70 + i, 5)});
  m.check(s);
  const kvq_seq child = m.fork(s, 60);
  m.append(child, ids(500, 40), 7);
  m.check(child);
  m.query({s, child}, {3, 2}, {.window = 50, .softcap = 20});
  REQUIRE(m.shadow(s).packed() == 96);
  const size_t first[] = {0, 32, 64};
  for (uint32_t place = 0; place < 3; ++place) {
    const uint32_t layer = place / 2, head = place % 2, dim = layers[layer].dim_k;
    const auto blocks = export_wire(m.cache, s, layer, head, KVQ_TENSOR_K);
    const std::string text = "channel-widths(bits=" + digits(bits, first[place], dim) + ",group=16,params=e4m3,unit=channel)";
    for (uint32_t b = 0; b < 3; ++b)
      REQUIRE(blocks[b].bytes == encoded(m, layer, head, KVQ_TENSOR_K, text, ids(3 + 32 * b, 32)));
  }
}

TEST_CASE("a chanmix cache is frozen from the beginning, and its profile can be read") {
  const std::vector<kvq_layer> layers = {layer_of(2, 2, 32)};
  const Bytes bits = some_widths(64);
  const kvq_recipe_data data = with_bits(bits);
  const Cache cache(Setup{.recipe = kChanMix, .layers = layers, .recipe_data = &data});
  const Bytes blob = policy_blob(cache, 0);
  REQUIRE(std::search(blob.begin(), blob.end(), bits.begin(), bits.begin() + 32) != blob.end());
  REQUIRE(std::search(blob.begin(), blob.end(), bits.begin() + 32, bits.end()) != blob.end());
  refused(kvq_policy_set(cache, 0, blob.data(), blob.size()), KVQ_E_STATE);
  refused(kvq_calibrate_finish(cache), KVQ_E_STATE);
}

TEST_CASE("what a recipe lacks or does not want is refused when the cache is made") {
  const std::vector<kvq_layer> layers = {layer_of(2, 2, 32)};
  const auto create = [&](const std::string &recipe, const kvq_recipe_data *data) {
    const Setup setup{.recipe = recipe, .layers = layers, .recipe_data = data};
    const kvq_config config = config_of(setup);
    kvq_cache *cache = nullptr;
    refused(kvq_create(&config, &cache), KVQ_E_INVALID);
    REQUIRE(cache == nullptr);
    auto support = sized<kvq_support>();
    ok(kvq_backend_support(&config, &support));
    REQUIRE((support.status == KVQ_E_INVALID && support.path == KVQ_PATH_NONE));
    return std::string(support.reason);
  };
  const Bytes bits(64, 2);
  kvq_recipe_data data = with_bits(bits);
  REQUIRE(create("chanmix", nullptr).find("recipe_data.bits") != std::string::npos);
  REQUIRE(create("pmkvq", nullptr).find("recipe_data.budgets") != std::string::npos);
  REQUIRE(create("tq-2", &data).find("takes no bits") != std::string::npos);
  data.n_bits = 63;
  REQUIRE(create("chanmix", &data).find("n_bits=63") != std::string::npos);
  data.struct_size = 3;
  REQUIRE(create("chanmix", &data).find("recipe_data: struct_size=3") != std::string::npos);
}

TEST_CASE("given scores and given widths decide as the policy step does, without statistics") {
  const std::vector<kvq_layer> layers = {layer_of(2, 1, 16), layer_of(1, 1, 16)};
  Random random;
  std::vector<double> scores(3 * 8);
  for (double &score : scores) score = random.uniform();
  auto by_scores = sized<kvq_recipe_data>();
  by_scores.scores = scores.data(), by_scores.n_scores = scores.size();
  Bytes widths;
  for (size_t head = 0; head < 3; ++head) {
    auto policy = sized<kvq_policy>();
    policy.text = "blockgtq(avg=5/2)", policy.dim = 16, policy.pair_scores = &scores[head * 8], policy.n_scores = 8;
    Bytes decided(8);
    ok(kvq_policy_decide(&policy, decided.data(), decided.size(), nullptr));
    widths.insert(widths.end(), decided.begin(), decided.end());
  }
  const kvq_recipe_data by_widths = with_bits(widths);
  for (const std::string &keys : {std::string("k=width-groups(center=1);policy=blockgtq(avg=5/2)"),
                                  std::string("k=channel-widths(group=8);policy=pair-widths(avg=5/2)")}) {
    const std::string recipe = keys + ";v=lloyd(levels=3);block=8;sinks=1";
    INFO(recipe << ", seed " << seed());
    Mirror a(Setup{.recipe = recipe, .layers = layers, .recipe_data = &by_scores});
    Mirror b(Setup{.recipe = recipe, .layers = layers, .recipe_data = &by_widths});
    const kvq_seq s = a.create(), t = b.create();
    for (const auto &[mirror, seq] : {std::pair{&a, s}, {&b, t}}) {
      mirror->preset.needs_queries = false;
      mirror->commit(seq, ids(0, 30));
      mirror->step({seq}, {ids(30, 3)});
    }
    REQUIRE((a.picture(s) == b.picture(t)));
    const Bytes blob = policy_blob(a.cache, s);
    for (size_t head = 0; head < 3; ++head)
      REQUIRE(std::search(blob.begin(), blob.end(), widths.begin() + long(head) * 8, widths.begin() + long(head + 1) * 8) != blob.end());
  }
  // A budget that the lists do not meet.
  Bytes off = widths;
  off[20] = uint8_t(off[20] + 1);
  const kvq_recipe_data bad = with_bits(off);
  const Setup setup{.recipe = "k=width-groups;policy=blockgtq(avg=5/2)", .layers = layers, .recipe_data = &bad};
  const kvq_config config = config_of(setup);
  kvq_cache *cache = nullptr;
  refused(kvq_create(&config, &cache), KVQ_E_INVALID);
  REQUIRE(detail().find("layer 1, head 0") != std::string::npos);
}
