// What a sequence holds never depends on how its tokens were cut into calls: the same wire bytes, values, policy and attention,
// bit for bit, for every preset.  (Cases T1 to T5, T12 to T14, T20, T24, T25.)
#include "mirror.hpp"

using namespace kvq_test;

namespace {

Setup small(const std::string &recipe) { return preset_setup(recipe, {layer_of(2, 2, 64), layer_of(2, 2, 64)}); }

std::vector<std::string> all_presets() {
  std::vector<std::string> names;
  for (uint32_t i = 0; const char *name = kvq_recipe_preset(i); ++i) {
    INFO("a preset that the tests do not know: " << name);
    REQUIRE(find_preset(name));
    names.push_back(name);
  }
  REQUIRE(names.size() == presets().size());
  return names;
}

// Sizes 1 to 65 that add up to `total`.
std::vector<size_t> random_cuts(size_t total, Random &random) {
  std::vector<size_t> cuts;
  while (total > 0) {
    const size_t size = std::min<size_t>(total, 1 + random.below(random.below(4) == 0 ? 65 : 9));
    cuts.push_back(size);
    total -= size;
  }
  return cuts;
}

struct Result {
  Mirror::Picture picture;
  Seen seen;
};
Result result_of(Mirror &mirror, kvq_seq seq) { return {mirror.picture(seq), mirror.query(seq, 3, {.check = false})}; }

void require_same(const Result &a, const Result &b, const std::string &what) {
  INFO(what << ", seed " << seed());
  REQUIRE(a.picture.wire.size() == b.picture.wire.size());
  for (size_t i = 0; i < a.picture.wire.size(); ++i) {
    INFO("layer, tensor and head number " << i);
    REQUIRE(a.picture.wire[i].size() == b.picture.wire[i].size());
    REQUIRE((a.picture.wire[i] == b.picture.wire[i]));
  }
  REQUIRE(a.picture.policy == b.picture.policy);
  REQUIRE((a.picture == b.picture));
  REQUIRE(same_bits(a.seen, b.seen));
}

constexpr size_t kTokens = 421;  // two pages of 128 and some, behind 32 sinks and 32 recent tokens

// Ways to commit kTokens tokens.
using Way = void (*)(Mirror &, kvq_seq, Random &);
const std::pair<const char *, Way> kPromptWays[] = {
    {"one token at a time", [](Mirror &m, kvq_seq s, Random &) { m.commit(s, ids(0, kTokens), 1); }},
    {"seven at a time", [](Mirror &m, kvq_seq s, Random &) { m.commit(s, ids(0, kTokens), 7); }},
    {"random chunks, layers backwards",
     [](Mirror &m, kvq_seq s, Random &random) {
       m.layers_reversed = true;
       uint32_t at = 0;
       for (size_t size : random_cuts(kTokens, random)) {
         m.chunk(s, ids(at, size));
         at += uint32_t(size);
       }
       m.chunk(s, {}, true);
     }},
    {"steps before the commit",
     [](Mirror &m, kvq_seq s, Random &random) {
       uint32_t at = 0;
       for (size_t size : random_cuts(kTokens, random)) {
         if (random.below(2))
           m.append(s, ids(at, size));
         else
           m.chunk(s, ids(at, size));
         at += uint32_t(size);
       }
       m.chunk(s, {}, true);
     }},
};

const std::pair<const char *, size_t> kAppendWays[] = {{"one at a time", 1}, {"seven at a time", 7}, {"random", 0}};

void append_randomly(Mirror &m, kvq_seq s, uint32_t from, size_t count, Random &random) {
  for (size_t size : random_cuts(count, random)) {
    m.append(s, ids(from, size));
    from += uint32_t(size);
  }
}

}  // namespace

TEST_CASE("the bytes of a prompt do not depend on its chunks, for every preset") {
  Random random(11);
  for (const std::string &name : all_presets()) {
    Mirror whole(small(name));
    const kvq_seq seq = whole.create();
    whole.commit(seq, ids(0, kTokens));
    whole.check(seq);
    const Result want = result_of(whole, seq);
    for (const auto &[what, way] : kPromptWays) {
      Mirror cut(small(name));
      const kvq_seq other = cut.create();
      way(cut, other, random);
      require_same(result_of(cut, other), want, name + ", " + what);
    }
  }
}

TEST_CASE("the bytes behind a prompt do not depend on the steps, for every preset") {
  Random random(12);
  for (const std::string &name : all_presets()) {
    constexpr size_t kPrompt = 150;
    Mirror whole(small(name));
    const kvq_seq seq = whole.create();
    whole.commit(seq, ids(0, kPrompt));
    whole.append(seq, ids(kPrompt, kTokens - kPrompt));
    whole.check(seq);
    const Result want = result_of(whole, seq);
    for (const auto &[what, cut] : kAppendWays) {
      Mirror other(small(name));
      const kvq_seq s = other.create();
      other.commit(s, ids(0, kPrompt), 40);
      if (cut)
        other.append(s, ids(kPrompt, kTokens - kPrompt), cut);
      else
        append_randomly(other, s, kPrompt, kTokens - kPrompt, random);
      require_same(result_of(other, s), want, name + ", steps " + what);
    }
  }
}

TEST_CASE("without a policy the bytes do not depend on where the prompt ends") {
  Random random(13);
  for (const std::string &name : all_presets()) {
    if (find_preset(name)->from_prompt) continue;
    Mirror whole(small(name));
    const kvq_seq seq = whole.create();
    whole.commit(seq, ids(0, kTokens));
    const Result want = result_of(whole, seq);
    for (size_t prompt : {1, 33, 200}) {
      Mirror other(small(name));
      const kvq_seq s = other.create();
      other.commit(s, ids(0, prompt));
      append_randomly(other, s, uint32_t(prompt), kTokens - prompt, random);
      require_same(result_of(other, s), want, name + ", prompt of " + std::to_string(prompt));
    }
  }
}

TEST_CASE("a later prompt is a plain append, or with SemKV a prompt of its own however it is cut") {
  for (const std::string &name : all_presets()) {
    const auto turns = [&](size_t cut, size_t steps) {
      Mirror m(small(name));
      const kvq_seq s = m.create();
      m.commit(s, ids(0, 90), cut);
      m.append(s, ids(90, 100), steps);
      m.end_turn(s);
      m.end_turn(s);  // nothing pending: a no-op
      m.append(s, ids(190, 10), steps);
      m.commit(s, ids(200, 151), cut);
      m.append(s, ids(351, 70), steps);
      m.check(s);
      return result_of(m, s);
    };
    const Result want = turns(0, 1000);
    require_same(turns(7, 1), want, name + ", chunks of 7, steps of 1");
    require_same(turns(50, 13), want, name + ", chunks of 50, steps of 13");
  }
}

TEST_CASE("every cut of 999 tokens behind one gives the same bytes") {  // T1, T2
  const Setup setup{.recipe = kK4V4, .layers = {layer_of(2, 2, 64)}};
  Mirror whole(setup);
  const kvq_seq seq = whole.create();
  whole.commit(seq, ids(0, 1));
  whole.append(seq, ids(1, 999));
  const Result want = result_of(whole, seq);
  const size_t sizes[] = {1, 2, 3, 5, 7, 31, 33, 64, 127, 129};
  for (uint64_t round = 0; round < 5; ++round) {
    Random random(100 + round);
    Mirror other(setup);
    const kvq_seq s = other.create();
    other.commit(s, ids(0, 1));
    for (uint32_t at = 1; at < 1000;) {
      const size_t size = std::min<size_t>(sizes[random.below(10)], 1000 - at);
      other.append(s, ids(at, size));
      at += uint32_t(size);
    }
    require_same(result_of(other, s), want, "round " + std::to_string(round));
  }
  for (const std::vector<size_t> &cuts : {std::vector<size_t>{40}, {17, 23}, std::vector<size_t>(40, 1)}) {
    Mirror m(setup), one(setup);
    const kvq_seq s = m.create(), t = one.create();
    m.commit(s, ids(0, 1)), one.commit(t, ids(0, 41));
    uint32_t at = 1;
    for (size_t size : cuts) {
      m.append(s, ids(at, size));
      at += uint32_t(size);
    }
    require_same(result_of(m, s), result_of(one, t), std::to_string(cuts.size()) + " pieces of 40");
  }
}

TEST_CASE("packing follows the formula at every block boundary") {  // T4
  for (const char *fields : {";sinks=0;recent=0", ";sinks=4;recent=0", ";sinks=4;recent=17", ";sinks=40;recent=32"})
    for (size_t tokens : {1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129}) {
      Mirror m(Setup{.recipe = std::string("k=affine-channel(levels=16,group=32);v=lloyd(levels=8);block=32") + fields,
                     .layers = {layer_of(2, 2, 64)}});
      const kvq_seq s = m.create();
      m.commit(s, ids(0, tokens));
      m.step({s}, {ids(uint32_t(tokens), 1)});
      m.check(s);
    }
}

TEST_CASE("at two bits every key that is due is packed, and nothing else") {  // T5
  const std::string recipe = "k=affine-channel(levels=4,group=32);v=affine-token(levels=4,group=32);block=32";
  const Setup setup{.recipe = recipe, .layers = {layer_of(2, 4, 128)}};
  Mirror single(setup), whole(setup);
  const kvq_seq s = single.create(), w = whole.create();
  single.commit(s, ids(0, 32));
  single.append(s, ids(32, 168), 1);
  whole.commit(w, ids(0, 32));
  whole.append(w, ids(32, 168));
  REQUIRE(lengths(single.cache, s).packed == 192);
  require_same(result_of(single, s), result_of(whole, w), "single steps");
  for (uint32_t head = 0; head < 2; ++head) {
    const Floats keys = export_values(single.cache, s, 0, head, KVQ_TENSOR_K, 200, 128);
    for (uint32_t t = 0; t < 200; ++t) {
      size_t equal = 0;
      for (size_t c = 0; c < 128; ++c) equal += keys[t * 128 + c] == entry(single.text.row(0, Text::K, t)[head * 128 + c]);
      if (t < 192)
        REQUIRE(equal < 32);  // minima alone are exact: 1 of 32 on average
      else
        REQUIRE(equal == 128);
    }
  }
}

TEST_CASE("four queries at once see what four single steps see") {  // T12, T13
  std::vector<std::string> recipes = all_presets();
  recipes.push_back(kK4V4);
  for (size_t r = 0; r < recipes.size(); r += kSlow) {
    const std::string &recipe = recipes[r];
    Setup setup = small(recipe);
    setup.layers[1].window = 100;
    Mirror together(setup), apart(setup);
    const kvq_seq a = together.create(), b = apart.create();
    together.commit(a, ids(0, 1001)), apart.commit(b, ids(0, 1001));  // behind 1001 no block becomes due within 4 tokens
    const Seen four = together.step({a}, {ids(1001, 4)});
    for (uint32_t i = 0; i < 4; ++i) {
      const Seen one = apart.step({b}, {ids(1001 + i, 1)});
      for (uint32_t layer = 0; layer < 2; ++layer) {
        const size_t row = one.out[layer].size();
        const Floats same(four.out[layer].begin() + long(i * row), four.out[layer].begin() + long((i + 1) * row));
        INFO(recipe << " query " << i << " layer " << layer);
        REQUIRE((same_bits(same, one.out[layer]) || on_device()));  // a device promises the tolerance only
      }
    }
  }
}

TEST_CASE("a program that only appends, an aborted step and an empty sequence leave nothing behind") {  // T14
  Mirror m(small(kK4V4));
  const kvq_seq only = m.create(), aborted = m.create(), empty = m.create();
  m.append(only, ids(0, 200), 9);
  m.commit(aborted, ids(0, 40));
  const auto before = m.picture(aborted);
  const uint64_t bytes = stats(m.cache).bytes_used;
  const uint32_t count = 30;
  kvq_step step = 0;
  ok(kvq_step_begin(m.cache, &aborted, &count, 1, 0, &step));
  const Tensor k = m.tensor(0, Text::K, ids(40, 30)), v = m.tensor(0, Text::V, ids(40, 30));
  ok(kvq_append(m.cache, step, 0, k.view(), v.view(), nullptr, nullptr));
  ok(kvq_step_abort(m.cache, step));
  refused(kvq_step_abort(m.cache, step), KVQ_E_STALE);
  m.check_lengths(aborted);
  REQUIRE((m.picture(aborted) == before));
  REQUIRE(stats(m.cache).bytes_used <= bytes + 65536);  // at most what the step object keeps for the next one
  m.query(aborted, 2);
  m.query(empty, 3);
  m.query(empty, 1, {.sinks = true});
  m.step({aborted}, {ids(70, 3)});
  m.check(aborted);
}

TEST_CASE("exact sinks fill first and stay exact") {  // T20
  Mirror m(Setup{.recipe = "k=affine-channel(levels=16,group=32);v=lloyd(levels=16);block=32;sinks=4", .layers = {layer_of(2, 2, 64)}});
  const kvq_seq s = m.create();
  m.commit(s, ids(0, 3));
  for (uint32_t i = 3; i < 80; ++i) {
    m.step({s}, {ids(i, 1)});
    m.check(s);
  }
  REQUIRE(lengths(m.cache, s).sinks == 4);
  REQUIRE(lengths(m.cache, s).packed == 64);
  // The first block holds tokens 4 to 35: its bytes are those of a sequence without sinks that begins with token 4.
  Mirror bare(Setup{.recipe = "k=affine-channel(levels=16,group=32);v=lloyd(levels=16);block=32", .layers = {layer_of(2, 2, 64)}});
  const kvq_seq t = bare.create();
  bare.commit(t, ids(4, 76));
  REQUIRE((m.picture(s).wire == bare.picture(t).wire));
}

TEST_CASE("calls with zero tokens change nothing") {  // T24
  for (const char *recipe : {kK4V4, "kvq-3", "semkv-tq"}) {
    Mirror m(small(recipe));
    const kvq_seq s = m.create();
    m.chunk(s, {});
    auto desc = sized<kvq_prefill>();
    ok(kvq_prefill_commit(m.cache, s, &desc, nullptr));
    m.commit(s, ids(0, 100));
    const Result before = result_of(m, s);
    ok(kvq_prefill_commit(m.cache, s, &desc, nullptr));
    m.chunk(s, {}, true);
    if (!m.preset.rule.semkv) m.append(s, {});
    const uint32_t none = 0;
    kvq_step step = 0;
    ok(kvq_step_begin(m.cache, &s, &none, 1, 0, &step));
    const Tensor k = m.tensor(0, Text::K, {}), v = m.tensor(0, Text::V, {}), q = m.tensor(0, Text::Q, {});
    Tensor out(1, 4, 64, KVQ_DTYPE_F32, Lay::packed);
    const Tensor untouched(1, 4, 64, KVQ_DTYPE_F32, Lay::packed);
    for (uint32_t layer = 0; layer < 2; ++layer) {
      ok(kvq_append(m.cache, step, layer, k.view(), v.view(), nullptr, nullptr));
      ok(kvq_attend(m.cache, step, layer, q.view(), out.view(), nullptr, nullptr, nullptr));
    }
    REQUIRE(same_bits(out.values(), untouched.values()));
    ok(kvq_step_end(m.cache, step, nullptr, nullptr));
    ok(kvq_step_begin(m.cache, nullptr, nullptr, 0, 0, &step));  // a batch of nothing
    ok(kvq_step_end(m.cache, step, nullptr, nullptr));
    m.check(s);
    require_same(result_of(m, s), before, recipe);
  }
}

TEST_CASE("attention after every append, from the first token through the first packed blocks") {  // T25
  const std::string row = "k=lloyd(levels=16);v=lloyd(levels=5);block=8", column = kK4V4;
  for (const std::string &recipe : {row, row + ";sinks=3;recent=5", column, column + ";sinks=4;recent=8", std::string("fp16"),
                                    std::string("semkv-tq;block=8"), std::string("tq-3c")}) {
    Mirror m(small(recipe));
    const kvq_seq s = m.create();
    m.commit(s, ids(0, 1));
    m.query(s);
    for (uint32_t i = 1; i < 70; ++i) m.step({s}, {ids(i, 1)});
    m.check(s);
  }
}
