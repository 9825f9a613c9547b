// Steps and prompts side by side: several steps at once, prompt attention chunk by chunk, later prompts in pieces, counters, ranges
// of exports, canonical recipes.  (Cases T3, T15, X3, X8.)
#include <limits>

#include "mirror.hpp"

using namespace kvq_test;

namespace {

Setup small(const std::string &recipe) { return preset_setup(recipe, {layer_of(2, 2, 64), layer_of(2, 2, 64)}); }

// A step that a test drives by itself.
struct Open {
  Mirror &m;
  std::vector<kvq_seq> seqs;
  Ids list;
  kvq_step step = 0;

  Open(Mirror &mirror, const std::vector<kvq_seq> &s, const std::vector<uint32_t> &counts, const Ids &all, uint32_t flags = 0)
      : m(mirror), seqs(s), list(all) {
    ok(kvq_step_begin(m.cache, seqs.data(), counts.data(), uint32_t(seqs.size()), flags, &step));
  }
  int32_t append(uint32_t layer) {
    const Tensor k = m.tensor(layer, Text::K, list), v = m.tensor(layer, Text::V, list), q = m.tensor(layer, Text::Q, list);
    return kvq_append(m.cache, step, layer, k.view(), v.view(), m.preset.needs_queries ? q.view() : nullptr, nullptr);
  }
  Floats attend(uint32_t layer) {
    const Tensor q = m.tensor(layer, Text::Q, list);
    Tensor out(list.size(), 4, 64, KVQ_DTYPE_F32, Lay::packed);
    ok(kvq_attend(m.cache, step, layer, q.view(), out.view(), nullptr, nullptr, nullptr));
    return out.values();
  }
};

}  // namespace

TEST_CASE("steps of different sequences may be open at once and end in any order") {
  Mirror m(small(kK4V4)), apart(small(kK4V4));
  std::vector<kvq_seq> s, t;
  for (uint32_t i = 0; i < 3; ++i) {
    s.push_back(m.create()), t.push_back(apart.create());
    m.commit(s[i], ids(100 * i, 40 + i)), apart.commit(t[i], ids(100 * i, 40 + i));
  }
  Open a(m, {s[0]}, {30}, ids(500, 30)), b(m, {s[2], s[1]}, {1, 25}, ids(600, 26));
  ok(a.append(1)), ok(b.append(0)), ok(a.append(0)), ok(b.append(1));
  const Floats from_b = b.attend(1), from_a = a.attend(0);
  ok(kvq_step_end(m.cache, b.step, nullptr, nullptr));
  m.appended(s[2], ids(600, 1)), m.appended(s[1], ids(601, 25));
  m.check_lengths(s[0]);
  const Floats again = a.attend(0);  // what others do meanwhile does not show
  REQUIRE(same_bits(again, from_a));
  ok(kvq_step_end(m.cache, a.step, nullptr, nullptr));
  m.appended(s[0], ids(500, 30));
  const Seen want_a = apart.step({t[0]}, {ids(500, 30)}), want_b = apart.step({t[2], t[1]}, {ids(600, 1), ids(601, 25)});
  REQUIRE((same_bits(from_a, want_a.out[0]) && same_bits(from_b, want_b.out[1])));
  for (size_t i = 0; i < 3; ++i) {
    m.check(s[i]);
    REQUIRE((m.picture(s[i]) == apart.picture(t[i])));
  }
}

TEST_CASE("prompt attention chunk by chunk, beside the prompt") {
  for (const char *recipe : {kK4V4, "kvq-3;sinks=4", "semkv-tq"}) {
    Mirror m(small(recipe));
    const kvq_seq s = m.create();
    uint32_t at = 0;
    for (uint32_t count : {1u, 50u, 7u, 90u}) {
      Open open(m, {s}, {count}, ids(at, count), KVQ_STEP_QUERY_ONLY);
      m.chunk(s, ids(at, count));
      at += count;
      Seen seen;
      for (uint32_t layer = 0; layer < 2; ++layer) seen.out.push_back(open.attend(layer));
      ok(kvq_step_end(m.cache, open.step, nullptr, nullptr));
      const Seen want = m.query(s, count);  // against float64
      for (uint32_t layer = 0; layer < 2; ++layer) REQUIRE(same_bits(seen.out[layer], want.out[layer]));
    }
    m.chunk(s, {}, true);
    m.check(s);
    // An export sees what lies there while a step is open, without the step's tokens.
    Open open(m, {s}, {5}, ids(200, 5));
    ok(open.append(0));
    m.check(s);
    Floats row(64);
    refused(kvq_export_values(m.cache, s, 0, 0, 0, at, 1, row.data()), KVQ_E_INVALID);
    ok(kvq_step_abort(m.cache, open.step));
    m.check(s);
  }
}

TEST_CASE("between the chunks of a later prompt other growth is refused") {
  for (const char *recipe : {kK4V4, "kvq-3", "semkv-tq"}) {
    Mirror m(small(recipe));
    const kvq_seq s = m.create();
    m.commit(s, ids(0, 90));
    m.chunk(s, ids(90, 40));
    const uint32_t one = 1;
    kvq_step step = 0;
    refused(kvq_step_begin(m.cache, &s, &one, 1, 0, &step), KVQ_E_STATE);
    refused(kvq_end_turn(m.cache, s), KVQ_E_STATE);
    m.query(s, 3);  // looking is allowed
    m.chunk(s, ids(130, 70), true);
    m.check(s);
    m.append(s, ids(200, 30));
    m.end_turn(s);
    m.check(s);
  }
}

TEST_CASE("a bad element spoils one call, not the step") {
  Mirror m(small("kvq-3;sinks=4"));
  const kvq_seq s = m.create();
  m.commit(s, ids(0, 100));
  Open open(m, {s}, {3}, ids(100, 3));
  for (float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    Floats k = m.text.rows(1, Text::K, open.list), q = m.text.rows(0, Text::Q, open.list);
    k[2 * 128 + 5] = bad, q[1 * 256 + 7] = bad;
    const Tensor keys(k, 2, 64), v = m.tensor(1, Text::V, open.list), queries(q, 4, 64);
    refused(kvq_append(m.cache, open.step, 1, keys.view(), v.view(), nullptr, nullptr), KVQ_E_NONFINITE);
    if (std::isnan(bad)) ok(open.append(0));
    Tensor out(3, 4, 64, KVQ_DTYPE_F32, Lay::packed);
    const Floats before = out.values();
    Floats lse(12, 5.0f);
    refused(kvq_attend(m.cache, open.step, 0, queries.view(), out.view(), lse.data(), nullptr, nullptr), KVQ_E_NONFINITE);
    REQUIRE((same_bits(out.values(), before) && lse == Floats(12, 5.0f)));
  }
  ok(open.append(1));
  open.attend(0), open.attend(1);
  ok(kvq_step_end(m.cache, open.step, nullptr, nullptr));
  m.appended(s, open.list);
  m.check(s);
}

TEST_CASE("counters agree with what was done") {
  Mirror m(small("kvq-3;sinks=4"));
  Random random(8);
  std::vector<kvq_seq> seqs;
  for (int i = 0; i < 200; ++i) {
    if (seqs.size() < 3 || random.below(4) == 0) seqs.push_back(m.create());
    const kvq_seq s = seqs[random.below(seqs.size())];
    switch (random.below(5)) {
      case 0:
        m.truncate(s, random.below(m.total(s) + 1));
        break;
      case 1:
        seqs.push_back(m.fork(s));
        break;
      case 2:
        m.commit(s, ids(0, 1 + random.below(90)));
        break;
      default:
        m.append(s, ids(100, 1 + random.below(30)));
    }
    uint64_t tokens = 0;
    for (kvq_seq q : seqs) tokens += m.total(q);
    const kvq_stats now = stats(m.cache);
    REQUIRE((now.sequences == seqs.size() && now.tokens == tokens));
    REQUIRE(now.page_bytes_raw + now.page_bytes_packed <= now.bytes_used);
    REQUIRE(now.bytes_used <= now.bytes_peak);
    if (seqs.size() > 6) {
      m.remove(seqs.front());
      seqs.erase(seqs.begin());
    }
  }
}

TEST_CASE("any range of an export is that part of the whole") {
  for (const char *recipe : {kK4V4, "kvq-3;sinks=5", "semkv-tq;block=16", "polar-2", "kitty;sinks=3"}) {
    Mirror m(small(recipe));
    const kvq_seq s = m.create();
    m.commit(s, ids(0, 333));
    m.truncate(s, 290);
    m.append(s, ids(400, 77), 20);
    const uint64_t total = m.total(s);
    Random random(4);
    for (uint32_t tensor : {KVQ_TENSOR_K, KVQ_TENSOR_V}) {
      const Floats whole = export_values(m.cache, s, 1, 1, tensor, total, 64);
      for (int i = 0; i < 200; ++i) {
        const uint64_t first = random.below(total + 1), count = random.below(total - first + 1);
        Floats part(count * 64 + 1, -7.0f);
        ok(kvq_export_values(m.cache, s, 1, 1, tensor, first, count, part.data()));
        REQUIRE(std::memcmp(part.data(), whole.data() + first * 64, count * 64 * sizeof(float)) == 0);
        REQUIRE(part.back() == -7.0f);
      }
    }
  }
}

TEST_CASE("a cache prints a recipe that makes the same cache") {
  for (uint32_t i = 0; const char *name = kvq_recipe_preset(i); ++i) {
    Mirror a(small(name));
    char text[1024];
    ok(kvq_cache_recipe(a.cache, text, sizeof text, nullptr));
    Setup full = small(name);
    full.recipe = text;
    Cache b(full);
    char again[1024];
    ok(kvq_cache_recipe(b, again, sizeof again, nullptr));
    REQUIRE(std::string(again) == text);
    const kvq_seq s = a.create();
    a.commit(s, ids(0, 300));
    Mirror c(small(name));  // its shadow needs the preset's rule, its cache is made from the printed text
    char parsed[1024];
    ok(kvq_recipe_parse(text, a.setup.layers.data(), 2, parsed, sizeof parsed, nullptr));
    REQUIRE(std::string(parsed) == text);
    ok(kvq_recipe_parse(name, a.setup.layers.data(), 2, parsed, sizeof parsed, nullptr));
    REQUIRE(std::string(parsed) == text);
    Mirror d(full);
    const kvq_seq t = d.create();
    d.commit(t, ids(0, 300));
    REQUIRE((a.picture(s) == d.picture(t)));
  }
}

TEST_CASE("the support query tells how a configuration runs") {  // X3
  for (uint32_t i = 0; const char *name = kvq_recipe_preset(i); ++i) {
    const Setup setup = small(name);
    const kvq_config config = config_of(setup);
    auto support = sized<kvq_support>();
    ok(kvq_backend_support(&config, &support));
    INFO(name << ": " << support.reason);
    REQUIRE(support.status == KVQ_OK);
    REQUIRE((support.path == KVQ_PATH_FUSED || (support.path == KVQ_PATH_DECODE && support.reason[0] != 0)));
  }
  Setup setup = small(kK4V4);
  kvq_config config = config_of(setup);
  config.backend = KVQ_BACKEND_CUDA;
  auto support = sized<kvq_support>();
  ok(kvq_backend_support(&config, &support));
  kvq_cache *cache = nullptr;
  REQUIRE(kvq_create(&config, &cache) == support.status);
  if (support.status != KVQ_OK) REQUIRE((cache == nullptr && support.path == KVQ_PATH_NONE && support.reason[0] != 0));
  kvq_destroy(cache);
}
