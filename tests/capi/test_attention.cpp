// Attention against float64 over the library's own export (section 9): every preset, head ratio, size, layout and option.
// (Cases S1, S8, S9, S11 to S13, S17, S18, S20, T11, T16, V1, V6 to V12, V14, X12, R15.)
#include <set>

#include "mirror.hpp"

using namespace kvq_test;

namespace {

constexpr uint32_t kDims[] = {32, 64, 80, 96, 128, 256, 576};
constexpr uint32_t kRatios[] = {1, 2, 3, 4, 7, 12};
constexpr uint32_t kHeads[] = {1, 2, 3};
constexpr uint32_t kLengths[] = {0, 1, 63, 64, 65, 66, 127, 128, 129, 130, 1000};
constexpr uint32_t kInputs[] = {KVQ_DTYPE_F32, KVQ_DTYPE_F16, KVQ_DTYPE_BF16, KVQ_DTYPE_F64};
constexpr Lay kLays[] = {Lay::packed, Lay::padded, Lay::head_first};
constexpr uint32_t kOutputs[] = {KVQ_DTYPE_F32, KVQ_DTYPE_F32, KVQ_DTYPE_F16, KVQ_DTYPE_BF16};

struct Case {
  std::string recipe;
  kvq_layer layer;
  uint32_t tokens, news, input;
  Lay lay;
  Look look;
};

std::string describe(const Case &c) {
  return c.recipe + ": " + std::to_string(c.layer.kv_heads) + " heads x" + std::to_string(c.layer.q_heads / c.layer.kv_heads) +
         ", dims " + std::to_string(c.layer.dim_k) + "/" + std::to_string(dim_v(c.layer)) + ", layout " +
         std::to_string(c.layer.rope_layout) + ", rotary " + std::to_string(c.layer.rotary_first) + "+" +
         std::to_string(c.layer.rotary_dim) + ", " + std::to_string(c.tokens) + " tokens + " + std::to_string(c.news) + ", input " +
         std::to_string(c.input) + ", lay " + std::to_string(int(c.lay)) + ", window " + std::to_string(c.look.window) +
         ", softcap " + std::to_string(c.look.softcap) + ", sinks " + std::to_string(c.look.sinks) + ", out " +
         std::to_string(c.look.out_dtype) + ", seed " + std::to_string(seed());
}

// Commit, one step with new tokens, contents, and a query of what is then there.
void run(const Case &c, uint64_t stream) {
  INFO(describe(c));
  Mirror m(preset_setup(c.recipe, {c.layer}), stream, c.input);
  m.lay = c.lay;
  const kvq_seq s = m.create();
  if (c.tokens) m.commit(s, ids(0, c.tokens));
  m.step({s}, {ids(c.tokens, c.news)}, c.look);
  m.check(s);
  m.query(s, c.news, c.look);
}

// One case of many: each property by its own hash of the index, so that all combinations of two appear.
Case make(const char *recipe, uint64_t index) {
  Random random(index * 31 + 7);
  Case c{recipe, layer_of(kHeads[random.below(3)], kRatios[random.below(6)], kDims[random.below(7)]), 0, 0, 0, {}, {}};
  if (random.below(3) == 0) c.layer.dim_v = kDims[random.below(7)];
  c.layer.rope_layout = uint32_t(random.below(2));
  if (random.below(3) == 0) {  // part of the channels rotary, somewhere
    c.layer.rotary_dim = 2 + 2 * uint32_t(random.below(c.layer.dim_k / 2));
    c.layer.rotary_first = 2 * uint32_t(random.below((c.layer.dim_k - c.layer.rotary_dim) / 2 + 1));
  }
  c.tokens = kLengths[random.below(std::size(kLengths))];
  c.news = random.below(2) ? 1 : 4;
  c.input = kInputs[random.below(4)];
  c.lay = kLays[random.below(3)];
  if (random.below(3) == 0) c.look.window = 1 + uint32_t(random.below(150));
  if (random.below(4) == 0) c.look.softcap = 5 + 45 * float(random.uniform());
  c.look.sinks = random.below(3) == 0;
  c.look.lse = random.below(4) != 0;
  if (random.below(4) == 0) c.look.scale = 0.05f + 0.1f * float(random.uniform());
  c.look.out_dtype = kOutputs[random.below(4)];
  c.look.lay = kLays[random.below(3)];
  return c;
}

// Heavy cases cost as much as a hundred light ones.
bool heavy(const Case &c) {
  return uint64_t{c.layer.q_heads} * (c.layer.dim_k + dim_v(c.layer)) * (c.tokens + c.news) > 3'000'000 / kSlow;
}

}  // namespace

TEST_CASE("attention of every preset over head ratios, sizes, layouts, input types and options") {
  uint64_t index = 0;
  for (uint32_t i = 0; const char *name = kvq_recipe_preset(i); ++i) {
    std::set<uint32_t> dims;
    std::set<std::pair<uint32_t, uint32_t>> ratios;
    for (int done = 0; done < 30 / kSlow; ++index) {
      const Case c = make(name, index);
      if (heavy(c) && done % 5 != 0) continue;
      run(c, index);
      dims.insert(c.layer.dim_k);
      ratios.insert({c.layer.kv_heads, c.layer.q_heads / c.layer.kv_heads});
      ++done;
    }
    if (kSlow > 1) continue;
    CHECK(dims.size() >= 6);
    CHECK(ratios.size() >= 10);
  }
}

TEST_CASE("every head size with every codec") {  // S1, S7, S19
  const char *codecs[] = {"affine-channel(levels=4,group=32)", "affine-channel(levels=16,group=32,midpoint=1)", "lloyd(levels=2)",
                          "lloyd(levels=8)", "lloyd(levels=5,params=e5m3)", "affine-token(levels=4,group=D)",
                          "affine-token(levels=7,group=D,rotate=1)", "polar(radius=4,angle=4,group=32)",
                          "kitty(boost=1/16,group=32)", "lloyd(levels=64)", "affine-channel(levels=256,group=32)", "raw"};
  const char *values[] = {"affine-token(levels=4,group=D)", "lloyd(levels=3,params=e5m3)", "lloyd(levels=8,scale=unbiased)",
                          "affine-token(levels=16,group=8)", "lloyd(levels=6)", "raw"};
  uint64_t n = 0;
  for (uint32_t dim : {64, 72, 80, 96, 112, 120, 128, 160, 192, 256, 320, 512, 576})
    for (const char *codec : codecs) {
      if (kSlow > 1 && (n++ % kSlow)) continue;
      const std::string recipe = std::string("k=") + codec + ";v=" + values[n++ % std::size(values)] + ";block=32";
      run({recipe, layer_of(2, 2, dim), 65, 2, KVQ_DTYPE_F32, Lay::packed, {}}, dim);
    }
}

TEST_CASE("query heads read their own KV head") {  // S8, S9
  for (uint32_t ratio : {1, 2, 3, 4, 5, 7, 8})
    for (uint32_t heads : {1, 2})
      for (uint32_t tokens : {1, 31, 33, 255, 257})
        run({kK4V4, layer_of(heads, ratio, 128), tokens, 1, KVQ_DTYPE_F32, Lay::packed, {}}, ratio);
  run({kK4V4, layer_of(4, 4, 256), 100, 1, KVQ_DTYPE_F32, Lay::packed, {}}, 1);
  run({kK4V4, layer_of(1, 8, 256), 100, 1, KVQ_DTYPE_F32, Lay::packed, {}}, 2);
  run({kK4V4, layer_of(32, 1, 128), 100, 1, KVQ_DTYPE_F32, Lay::packed, {}}, 3);
  run({kK4V4, layer_of(2, 64, 64), 100, 1, KVQ_DTYPE_F32, Lay::packed, {}}, 4);
}

TEST_CASE("keys and values of different sizes") {  // S11, S12, S13
  run({"k=lloyd(levels=8);v=lloyd(levels=8)", layer_of(8, 5, 192, 128), 200, 1, KVQ_DTYPE_F32, Lay::packed, {}}, 5);
  run({"k=lloyd(levels=8,rotate=0);v=lloyd(levels=8)", layer_of(2, 5, 192, 128), 200, 4, KVQ_DTYPE_F32, Lay::packed, {}}, 6);
  run({"k=lloyd(levels=8);v=lloyd(levels=8,rotate=0)", layer_of(2, 5, 192, 128), 200, 4, KVQ_DTYPE_F32, Lay::packed, {}}, 7);
  run({"k=lloyd(levels=16);v=lloyd(levels=16)", layer_of(1, 16, 576, 512), 300, 2, KVQ_DTYPE_F32, Lay::packed, {}}, 8);
  run({"k=lloyd(levels=16);v=lloyd(levels=16)", layer_of(1, 20, 1024, 2), 100, 2, KVQ_DTYPE_F32, Lay::packed, {}}, 9);
}

TEST_CASE("layers of different geometry, windows and sequences in one cache") {  // S17
  Setup setup{.recipe = "k=lloyd(levels=8);v=lloyd(levels=8)", .layers = {layer_of(2, 2, 256), layer_of(1, 4, 512)}};
  setup.layers[0].window = 64;
  Mirror m(setup);
  std::vector<kvq_seq> seqs;
  std::vector<Ids> news;
  for (uint32_t i = 0; i < 4; ++i) {
    seqs.push_back(m.create());
    m.commit(seqs[i], ids(1000 * i, 150 + 17 * i));
    news.push_back(ids(1000 * i + 500, i + 1));
  }
  m.step(seqs, news);
  for (kvq_seq s : seqs) m.check(s);
  m.query(seqs, {3, 1, 2, 1}, {.window = UINT32_MAX});
}

TEST_CASE("a layer that reads another's cache attends to its owner's tokens") {  // R15
  Setup setup{.recipe = "kvq-3;sinks=4", .layers = {layer_of(2, 2, 64), layer_of(2, 2, 64), layer_of(2, 4, 64)}};
  setup.layers[2].kv_source = 1;
  const kvq_config config = config_of(setup);
  auto support = sized<kvq_support>();
  ok(kvq_backend_support(&config, &support));
  if (support.status == KVQ_E_UNSUPPORTED) {
    REQUIRE(support.reason[0] != 0);
    return;
  }
  Mirror m(setup);
  const kvq_seq s = m.create();
  m.commit(s, ids(0, 300));
  m.step({s}, {ids(300, 5)});
  m.query(s, 2);
  m.check(s);
}

TEST_CASE("strides and types of the input do not change a byte") {  // S20, V28
  for (const char *recipe : {kK4V4, "kvq-3", "semkv-tq"}) {
    const Setup setup{.recipe = recipe, .layers = {layer_of(3, 2, 80, 64)}};
    Mirror want(setup, 9, KVQ_DTYPE_BF16);  // numbers that bf16 holds; fp32 and fp64 hold them too
    const kvq_seq s = want.create();
    want.commit(s, ids(0, 300));
    want.step({s}, {ids(300, 3)});
    const auto picture = want.picture(s);
    const Seen seen = want.query(s, 2);
    for (uint32_t type : {KVQ_DTYPE_F32, KVQ_DTYPE_BF16, KVQ_DTYPE_F64})
      for (Lay lay : kLays) {
        Mirror m(setup, 9, KVQ_DTYPE_BF16);
        m.dtype = type;
        m.lay = lay;
        const kvq_seq t = m.create();
        m.commit(t, ids(0, 300), 70);
        m.step({t}, {ids(300, 3)});
        REQUIRE((m.picture(t) == picture));
        REQUIRE(same_bits(m.query(t, 2), seen));
      }
  }
}

TEST_CASE("a sequence's result does not depend on its batch") {  // T11, T16, V12
  const Look invariant{.flags = KVQ_STEP_INVARIANT};
  Mirror m(Setup{.recipe = "kvq-3", .layers = {layer_of(2, 2, 64)}});
  std::vector<kvq_seq> same;
  for (int i = 0; i < 8; ++i) {
    same.push_back(m.create());
    m.commit(same.back(), ids(0, 300));
  }
  const Seen alone = m.query(same[3], 1, invariant), batch = m.query(same, std::vector<uint32_t>(8, 1), invariant);
  for (size_t i = 0; i < 8; ++i)
    REQUIRE(std::memcmp(&batch.out[0][i * alone.out[0].size()], alone.out[0].data(), alone.out[0].size() * 4) == 0);

  std::vector<kvq_seq> mixed;
  std::vector<uint32_t> lengths_of = {5, 900, 64, 364}, counts = {1, 1, 7, 64};
  for (size_t i = 0; i < 4; ++i) {
    mixed.push_back(m.create());
    m.commit(mixed[i], ids(uint32_t(1000 * i), lengths_of[i]));
  }
  const Seen all = m.query(mixed, counts, invariant);
  size_t row = 0;
  for (size_t i = 0; i < 4; ++i) {
    const Seen single = m.query(mixed[i], counts[i], invariant);
    REQUIRE(std::memcmp(&all.out[0][row], single.out[0].data(), single.out[0].size() * 4) == 0);
    row += single.out[0].size();
  }

  const kvq_seq none = m.create(), one = m.create(), many = m.create();
  m.commit(one, ids(7, 1)), m.commit(many, ids(0, 5000));
  m.query({none, one, many}, {3, 1, 8});                  // outputs begin as NaN; the empty one gives 0 and -inf
  m.query({many, none, one}, {1, 1, 1}, {.sinks = true});  // and with a learned sink 0 and the sink
}

TEST_CASE("windows, soft caps, scales and learned sinks are applied, alone and together") {  // X12
  for (const char *recipe : {kK4V4, "kvq-2", "tq-3c", "semkv"})
    for (uint32_t options = 0; options < 16; ++options) {
      Mirror m(Setup{.recipe = recipe, .layers = {layer_of(2, 3, 64)}}, options);
      const kvq_seq s = m.create();
      m.commit(s, ids(0, 333));
      const Look plain, look{.window = options & 1 ? 70u : 0u,
                             .scale = options & 4 ? 0.3f : 0.0f,
                             .softcap = options & 2 ? 2.0f : 0.0f,
                             .sinks = (options & 8) != 0};
      const Seen with = m.query(s, 5, look), without = m.query(s, 5, plain);
      REQUIRE(same_bits(with, without) == (options == 0));  // no option is accepted and ignored
    }
  Setup setup{.recipe = kK4V4, .layers = {layer_of(2, 2, 64)}};
  setup.layers[0].window = 1;  // a token sees itself alone
  Mirror m(setup);
  const kvq_seq s = m.create();
  m.commit(s, ids(0, 100));
  m.step({s}, {ids(100, 6)});
  m.step({s}, {ids(106, 6)}, {.window = 3});
  m.step({s}, {ids(112, 6)}, {.window = UINT32_MAX});
}

TEST_CASE("four bits for one sequence of 20000 single steps: every output finite, no drift") {  // V11, Q11
  Mirror m(Setup{.recipe = "k=affine-channel(levels=16,group=32);v=affine-token(levels=16,group=32);block=32;sinks=4;recent=32",
                 .layers = {layer_of(2, 1, 32)}});
  const kvq_seq s = m.create();
  m.commit(s, ids(0, 32));
  const uint32_t steps = 20000 / kSlow;
  Random random(3);
  for (uint32_t i = 0; i < steps; ++i) {
    const uint32_t id = uint32_t(random.below(2000));
    if (i % 1000 == 999)
      m.step({s}, {{id}});
    else if (i % 40 == 0) {
      const Seen seen = m.step({s}, {{id}}, {.check = false});
      for (float x : seen.out[0]) REQUIRE(std::isfinite(x));
    } else
      m.append(s, {id});
  }
  REQUIRE(lengths(m.cache, s).total == 32 + steps);
}
