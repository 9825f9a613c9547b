// Every refusal says which argument, which value and what was allowed, and leaves everything as it was.
// (Cases S4, S5, S10, S22, X6, X8, X11, X17 to X19, T15.)
#include <atomic>
#include <functional>
#include <limits>
#include <thread>

#include "guard.hpp"
#include "mirror.hpp"

using namespace kvq_test;

namespace {

// Does the newest sentence contain every word?
void says(const std::vector<std::string> &words) {
  const std::string text = detail();
  for (const std::string &word : words) {
    INFO("the sentence \"" << text << "\" should contain \"" << word << "\"");
    CHECK(text.find(word) != std::string::npos);
  }
}

// ---- configurations that create refuses

struct BadConfig {
  const char *name;
  std::function<void(Setup &, kvq_config &)> spoil;
  int32_t status;
  std::vector<std::string> words;
};

BadConfig layer_field(const char *name, uint32_t kvq_layer::*field, uint32_t value, std::vector<std::string> words) {
  return {name, [=](Setup &setup, kvq_config &) { setup.layers[1].*field = value; }, KVQ_E_INVALID, std::move(words)};
}
BadConfig recipe(const char *text, std::vector<std::string> words, int32_t status = KVQ_E_INVALID) {
  return {text, [=](Setup &, kvq_config &config) { config.recipe = text; }, status, std::move(words)};
}

const std::vector<BadConfig> &bad_configs() {
  static const std::vector<BadConfig> table = {
      layer_field("no KV heads", &kvq_layer::kv_heads, 0, {"kv_heads", "0", "4096", "1"}),
      layer_field("too many KV heads", &kvq_layer::kv_heads, 4097, {"kv_heads", "4097", "4096"}),
      layer_field("negative KV heads", &kvq_layer::kv_heads, uint32_t(-3), {"kv_heads", "4294967293"}),
      layer_field("query heads no multiple", &kvq_layer::q_heads, 5, {"q_heads", "5", "kv_heads", "2"}),
      layer_field("no query heads", &kvq_layer::q_heads, 0, {"q_heads", "0"}),
      layer_field("too many query heads", &kvq_layer::q_heads, 130, {"q_heads", "130", "kv_heads", "64"}),
      layer_field("no key channels", &kvq_layer::dim_k, 0, {"dim_k", "0", "1024"}),
      layer_field("odd keys", &kvq_layer::dim_k, 65, {"dim_k", "65", "even"}),
      layer_field("long keys", &kvq_layer::dim_k, 1026, {"dim_k", "1026", "1024"}),
      layer_field("odd values", &kvq_layer::dim_v, 63, {"dim_v", "63", "even"}),
      layer_field("long values", &kvq_layer::dim_v, 2048, {"dim_v", "2048", "1024"}),
      layer_field("unknown layout", &kvq_layer::rope_layout, 2, {"rope_layout", "2"}),
      layer_field("odd rotary part", &kvq_layer::rotary_dim, 31, {"rotary_dim", "31", "even"}),
      layer_field("long rotary part", &kvq_layer::rotary_dim, 66, {"rotary_dim", "66", "64"}),
      layer_field("rotary part beyond the end", &kvq_layer::rotary_first, 2, {"rotary_first", "2", "rotary_dim", "0"}),
      layer_field("odd rotary start", &kvq_layer::rotary_first, 1, {"rotary_first", "1", "even"}),
      layer_field("source of itself", &kvq_layer::kv_source, 2, {"kv_source", "2"}),
      layer_field("source behind it", &kvq_layer::kv_source, 9, {"kv_source", "9"}),
      {"no layers", [](Setup &, kvq_config &c) { c.n_layers = 0; }, KVQ_E_INVALID, {"n_layers", "0", "65535"}},
      {"too many layers", [](Setup &, kvq_config &c) { c.n_layers = 65536, c.n_layer_structs = 1; }, KVQ_E_INVALID, {"n_layers", "65536", "65535"}},
      {"some layer structs", [](Setup &, kvq_config &c) { c.n_layers = 3; }, KVQ_E_INVALID, {"n_layer_structs", "2", "3"}},
      {"no layer pointer", [](Setup &, kvq_config &c) { c.layers = nullptr; }, KVQ_E_INVALID, {"layers"}},
      {"layer without size", [](Setup &s, kvq_config &) { s.layers[0].struct_size = 0; }, KVQ_E_INVALID, {"struct_size", "0"}},
      {"config without size", [](Setup &, kvq_config &c) { c.struct_size = 0; }, KVQ_E_INVALID, {"struct_size", "0"}},
      {"unknown backend", [](Setup &, kvq_config &c) { c.backend = 7; }, KVQ_E_INVALID, {"backend", "7"}},
      {"device of the CPU", [](Setup &, kvq_config &c) { c.device = 3; }, KVQ_E_DEVICE, {"device", "3"}},
      recipe("", {"recipe"}),
      recipe("nonsense", {"nonsense"}),
      recipe("kvq-3;sinks=-1", {"sinks", "-1"}),
      recipe("kvq-3;sinks=4;sinks=5", {"sinks"}),
      recipe("kvq-3;block=0", {"block", "0"}),
      recipe("kvq-3;colour=red", {"colour"}),
      recipe("k=lloyd(levels=9);v=raw", {"levels", "9"}),
      recipe("k=lloyd(levels=1);v=raw", {"levels", "1"}),
      recipe("k=lloyd;v=raw", {"levels"}),
      recipe("k=lloyd(levels=4,levels=4);v=raw", {"levels"}),
      recipe("k=lloyd(levels=4,colour=1);v=raw", {"colour"}),
      recipe("k=lloyd(levels=4,scale=best);v=raw", {"scale", "best"}),
      recipe("k=lloyd(levels=4,center=1);v=lloyd(levels=4,center=1)", {"center"}),
      recipe("k=affine-channel(levels=4,group=32);v=affine-token(levels=4,group=48);block=32", {"48", "64"}),
      recipe("k=affine-channel(levels=4,group=32);v=affine-channel(levels=4,group=32);block=48", {"block", "48", "32"}),
      recipe("k=pair-mix(low=1,high=3,group=12,mask=00000000);v=raw", {"group", "12", "8"}),
      recipe("k=pair-mix(low=1,high=3,group=32,mask=00);v=raw;block=32", {"mask"}),
      recipe("k=width-groups(bits=3333);v=raw", {"bits", "4", "32"}),
      recipe("k=width-groups(bits=33333333333333333333333333333339);v=raw", {"bits", "9"}),
      recipe("k=kitty(boost=3/2,group=32);v=raw;block=32", {"boost", "3/2"}),
      recipe("k=kitty(boost=1/0,group=32);v=raw;block=32", {"boost", "1/0"}),
      recipe("semkv;recent=32", {"recent", "32"}),
      recipe("k=width-groups;v=raw;policy=blockgtq(avg=3,bmin=5,bmax=2)", {"bmin", "5", "2"}),
      recipe("k=width-groups;v=raw;policy=blockgtq(avg=1/2)", {"avg", "1/2"}),
      recipe("k=width-groups;v=raw;policy=astrology", {"astrology"}),
      recipe("k=pair-mix(low=1,high=3,group=32);v=raw;block=32;policy=pnmix(r=5/4)", {"r", "5/4"}),
      recipe("k=polar(radius=4,angle=4,group=32);v=polar(radius=0,angle=4,group=32);block=32", {"radius", "0"}),
  };
  return table;
}

// ---- calls that a live cache refuses

struct World {
  Mirror m{Setup{.recipe = "k=affine-channel(levels=16,group=32);v=lloyd(levels=8);block=32;sinks=4",
                 .layers = {layer_of(2, 2, 64), layer_of(2, 2, 64)},
                 .max_sequences = 3}};
  kvq_seq s = m.create(), fresh = m.create(), full = m.create();
  kvq_step open = 0;  // on `fresh`, layer 0 appended
  Tensor k = m.tensor(0, Text::K, ids(0, 3)), v = m.tensor(0, Text::V, ids(0, 3)), q = m.tensor(0, Text::Q, ids(0, 3));
  Tensor out{3, 4, 64, KVQ_DTYPE_F32, Lay::packed};
  Floats row = Floats(64 * 64);

  World() {
    m.commit(s, ids(0, 100));
    const uint32_t count = 3;
    ok(kvq_step_begin(m.cache, &fresh, &count, 1, 0, &open));
    ok(kvq_append(m.cache, open, 0, k.view(), v.view(), nullptr, nullptr));
  }
  int32_t prefill(const std::function<void(kvq_prefill &)> &spoil) {
    auto desc = sized<kvq_prefill>();
    desc.n_tokens = 3, desc.k = k.view(), desc.v = v.view();
    spoil(desc);
    return kvq_prefill_commit(m.cache, s, &desc, nullptr);
  }
  int32_t spoiled(Tensor &tensor, const std::function<void(kvq_tensor &)> &spoil, uint32_t layer = 1) {
    const kvq_tensor kept = tensor.desc();
    spoil(tensor.desc());
    const int32_t status = layer == 0 ? kvq_attend(m.cache, open, 0, q.view(), out.view(), nullptr, nullptr, nullptr)
                                      : kvq_append(m.cache, open, layer, k.view(), v.view(), nullptr, nullptr);
    tensor.desc() = kept;
    return status;
  }
  int32_t options(const std::function<void(kvq_attend_options &)> &spoil) {
    auto options = sized<kvq_attend_options>();
    spoil(options);
    return kvq_attend(m.cache, open, 0, q.view(), out.view(), nullptr, &options, nullptr);
  }
  int32_t begin(std::vector<kvq_seq> seqs, std::vector<uint32_t> counts, uint32_t flags = 0) {
    kvq_step step = 0;
    const int32_t status = kvq_step_begin(m.cache, seqs.data(), counts.data(), uint32_t(seqs.size()), flags, &step);
    REQUIRE(step == 0);
    return status;
  }
  int32_t too_many_queries() {  // refused where it shows: a layer may get tokens until it attends
    const uint32_t count = 101;
    kvq_step step = 0;
    const int32_t begun = kvq_step_begin(m.cache, &s, &count, 1, KVQ_STEP_QUERY_ONLY, &step);
    if (begun != KVQ_OK) return begun;
    const Tensor many = m.tensor(0, Text::Q, ids(0, 101));
    Tensor result(101, 4, 64, KVQ_DTYPE_F32, Lay::packed);
    const int32_t status = kvq_attend(m.cache, step, 0, many.view(), result.view(), nullptr, nullptr, nullptr);
    const std::string sentence = detail();
    ok(kvq_step_abort(m.cache, step));
    REQUIRE(detail() == sentence);
    return status;
  }
  int32_t values(uint32_t layer, uint32_t head, uint32_t tensor, uint64_t first, uint64_t count) {
    return kvq_export_values(m.cache, s, layer, head, tensor, first, count, row.data());
  }
  int32_t wire(uint32_t layer, uint32_t head, uint32_t tensor, uint64_t block) {
    size_t needed = 0;
    return kvq_export_wire(m.cache, s, layer, head, tensor, block, nullptr, 0, &needed, nullptr);
  }
};

struct BadCall {
  const char *name;
  std::function<int32_t(World &)> call;
  int32_t status;
  std::vector<std::string> words;
};

const std::vector<BadCall> &bad_calls() {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  static const float inf_sinks[4] = {0, 0, std::numeric_limits<float>::infinity(), 0};
  static const std::vector<BadCall> table = {
      {"prefill: layer", [](World &w) { return w.prefill([](auto &d) { d.layer = 2; }); }, KVQ_E_INVALID, {"layer", "2"}},
      {"prefill: flags", [](World &w) { return w.prefill([](auto &d) { d.flags = 6; }); }, KVQ_E_INVALID, {"flags", "6"}},
      {"prefill: no k", [](World &w) { return w.prefill([](auto &d) { d.k = nullptr; }); }, KVQ_E_INVALID, {"k", "NULL"}},
      {"prefill: no v", [](World &w) { return w.prefill([](auto &d) { d.v = nullptr; }); }, KVQ_E_INVALID, {"v", "NULL"}},
      {"prefill: scores without a number", [](World &w) { return w.prefill([&](auto &d) { d.n_scores = 2, d.scores = w.row.data(); }); }, KVQ_E_INVALID, {"n_scores", "2", "3"}},
      {"prefill: scores are NULL", [](World &w) { return w.prefill([](auto &d) { d.n_scores = 3; }); }, KVQ_E_INVALID, {"scores"}},
      {"prefill: all layers with tokens", [](World &w) { return w.prefill([](auto &d) { d.layer = KVQ_ALL_LAYERS; }); }, KVQ_E_INVALID, {"n_tokens", "3"}},
      {"prefill: huge", [](World &w) { return w.prefill([](auto &d) { d.n_tokens = UINT64_MAX / 2; }); }, 0, {"n_tokens"}},
      {"prefill: struct size", [](World &w) { return w.prefill([](auto &d) { d.struct_size = 0; }); }, KVQ_E_INVALID, {"struct_size", "0"}},
      {"prefill: no desc", [](World &w) { return kvq_prefill_commit(w.m.cache, w.s, nullptr, nullptr); }, KVQ_E_INVALID, {"desc", "NULL"}},
      {"tensor: dtype", [](World &w) { return w.spoiled(w.k, [](auto &t) { t.dtype = 4; }); }, KVQ_E_INVALID, {"dtype", "4"}},
      {"tensor: memory", [](World &w) { return w.spoiled(w.v, [](auto &t) { t.memory = 2; }); }, KVQ_E_INVALID, {"memory", "2"}},
      {"tensor: device memory", [](World &w) { return w.spoiled(w.v, [](auto &t) { t.memory = 1; }); }, 0, {"memory"}},
      {"tensor: no data", [](World &w) { return w.spoiled(w.k, [](auto &t) { t.data = nullptr; }); }, KVQ_E_INVALID, {"data", "NULL"}},
      {"tensor: struct size", [](World &w) { return w.spoiled(w.k, [](auto &t) { t.struct_size = 4; }); }, KVQ_E_INVALID, {"data"}},
      {"append: layer", [](World &w) { return w.spoiled(w.k, [](auto &) {}, 2); }, KVQ_E_INVALID, {"layer", "2"}},
      {"append: twice", [](World &w) { return kvq_append(w.m.cache, w.open, 0, w.k.view(), w.v.view(), nullptr, nullptr); }, KVQ_E_STATE, {"layer", "0"}},
      {"append: no k", [](World &w) { return kvq_append(w.m.cache, w.open, 1, nullptr, w.v.view(), nullptr, nullptr); }, KVQ_E_INVALID, {"k", "NULL"}},
      {"append: no step", [](World &w) { return kvq_append(w.m.cache, 0, 1, w.k.view(), w.v.view(), nullptr, nullptr); }, KVQ_E_STALE, {"step"}},
      {"attend: no append yet", [](World &w) { return kvq_attend(w.m.cache, w.open, 1, w.q.view(), w.out.view(), nullptr, nullptr, nullptr); }, KVQ_E_STATE, {"layer", "1"}},
      {"attend: no q", [](World &w) { return kvq_attend(w.m.cache, w.open, 0, nullptr, w.out.view(), nullptr, nullptr, nullptr); }, KVQ_E_INVALID, {"q", "NULL"}},
      {"attend: no out", [](World &w) { return kvq_attend(w.m.cache, w.open, 0, w.q.view(), nullptr, nullptr, nullptr, nullptr); }, KVQ_E_INVALID, {"out", "NULL"}},
      {"attend: out of doubles", [](World &w) { return w.spoiled(w.out, [](auto &t) { t.dtype = KVQ_DTYPE_F64; }, 0); }, KVQ_E_INVALID, {"out", "dtype", "F64"}},
      {"attend: scale", [nan](World &w) { return w.options([nan](auto &o) { o.scale = nan; }); }, KVQ_E_INVALID, {"scale", "finite"}},
      {"attend: softcap", [](World &w) { return w.options([](auto &o) { o.softcap = -2; }); }, KVQ_E_INVALID, {"softcap", "-2"}},
      {"attend: sinks", [](World &w) { return w.options([](auto &o) { o.sinks = inf_sinks; }); }, KVQ_E_INVALID, {"sinks", "2"}},
      {"attend: options size", [](World &w) { return w.options([](auto &o) { o.struct_size = 0; }); }, KVQ_E_INVALID, {"struct_size", "0"}},
      {"begin: no list of sequences", [](World &w) { const uint32_t one = 1; kvq_step x = 0; return kvq_step_begin(w.m.cache, nullptr, &one, 1, 0, &x); }, KVQ_E_INVALID, {"seqs", "NULL"}},
      {"begin: no list of counts", [](World &w) { kvq_step x = 0; return kvq_step_begin(w.m.cache, &w.s, nullptr, 1, 0, &x); }, KVQ_E_INVALID, {"new_tokens", "NULL"}},
      {"begin: flags", [](World &w) { return w.begin({w.s}, {1}, 8); }, KVQ_E_INVALID, {"flags", "8"}},
      {"begin: twice the same", [](World &w) { return w.begin({w.full, w.s, w.s}, {1, 1, 1}); }, KVQ_E_INVALID, {"seqs"}},
      {"begin: in a step", [](World &w) { return w.begin({w.s, w.fresh}, {1, 1}); }, KVQ_E_STATE, {"step"}},
      {"attend: more queries than tokens", [](World &w) { return w.too_many_queries(); }, KVQ_E_INVALID, {"101", "100"}},
      {"begin: no step pointer", [](World &w) { const uint32_t one = 1; return kvq_step_begin(w.m.cache, &w.s, &one, 1, 0, nullptr); }, KVQ_E_INVALID, {"step", "NULL"}},
      {"end: keep too many", [](World &w) { const uint32_t keep = 4; return kvq_step_end(w.m.cache, w.open, &keep, nullptr); }, KVQ_E_INVALID, {"keep", "4", "3"}},
      {"end: a layer is missing", [](World &w) { return kvq_step_end(w.m.cache, w.open, nullptr, nullptr); }, KVQ_E_STATE, {"layer", "1"}},
      {"export: layer", [](World &w) { return w.values(2, 0, 0, 0, 1); }, KVQ_E_INVALID, {"layer", "2"}},
      {"export: head", [](World &w) { return w.values(0, 2, 0, 0, 1); }, KVQ_E_INVALID, {"head", "2"}},
      {"export: tensor", [](World &w) { return w.values(0, 0, 2, 0, 1); }, KVQ_E_INVALID, {"tensor", "2"}},
      {"export: range", [](World &w) { return w.values(0, 0, 0, 90, 11); }, KVQ_E_INVALID, {"100"}},
      {"export: range that wraps", [](World &w) { return w.values(0, 0, 0, UINT64_MAX, 2); }, KVQ_E_INVALID, {"100"}},
      {"export: no out", [](World &w) { return kvq_export_values(w.m.cache, w.s, 0, 0, 0, 0, 1, nullptr); }, KVQ_E_INVALID, {"out", "NULL"}},
      {"wire: block", [](World &w) { return w.wire(0, 0, 0, 3); }, KVQ_E_INVALID, {"block", "3"}},
      {"wire: head", [](World &w) { return w.wire(0, 7, 0, 0); }, KVQ_E_INVALID, {"head", "7"}},
      {"truncate: beyond the end", [](World &w) { return kvq_seq_truncate(w.m.cache, w.s, 101); }, KVQ_E_INVALID, {"length", "101", "100"}},
      {"fork: beyond the end", [](World &w) { kvq_seq c = 0; return kvq_seq_fork(w.m.cache, w.s, 101, &c); }, KVQ_E_INVALID, {"keep", "101", "100"}},
      {"fork: no room", [](World &w) { kvq_seq c = 0; return kvq_seq_fork(w.m.cache, w.s, 10, &c); }, KVQ_E_FULL, {"max_sequences", "3"}},
      {"fork: no child pointer", [](World &w) { return kvq_seq_fork(w.m.cache, w.s, 10, nullptr); }, KVQ_E_INVALID, {"child", "NULL"}},
      {"create: no room", [](World &w) { kvq_seq c = 0; return kvq_seq_create(w.m.cache, &c); }, KVQ_E_FULL, {"max_sequences", "3"}},
      {"end of turn before the commit", [](World &w) { return kvq_end_turn(w.m.cache, w.full); }, KVQ_E_STATE, {}},
      {"remove: in a step", [](World &w) { return kvq_seq_remove(w.m.cache, w.fresh); }, KVQ_E_STATE, {"step"}},
      {"length: no pointer", [](World &w) { return kvq_seq_length(w.m.cache, w.s, nullptr); }, KVQ_E_INVALID, {"lengths", "NULL"}},
      {"stats: no pointer", [](World &w) { return kvq_stats_get(w.m.cache, nullptr); }, KVQ_E_INVALID, {"stats", "NULL"}},
      {"calibrate without a policy", [](World &w) { auto d = sized<kvq_calibration>(); d.n_tokens = 3, d.k = w.k.view(); return kvq_calibrate(w.m.cache, &d); }, KVQ_E_UNSUPPORTED, {"policy"}},
      {"policy of nothing", [](World &w) { return kvq_policy_set(w.m.cache, w.full, nullptr, 0); }, KVQ_E_INVALID, {"blob", "NULL"}},
      {"policy of noise", [](World &w) { return kvq_policy_set(w.m.cache, w.full, w.row.data(), 77); }, KVQ_E_CORRUPT, {}},
  };
  return table;
}

struct State {
  Mirror::Picture picture;
  Seen seen;
  uint64_t used;
  uint32_t sequences;
};
State state_of(World &w) {
  State state{w.m.picture(w.s), w.m.query(w.s, 2, {.check = false}), 0, 0};
  w.m.check_lengths(w.fresh), w.m.check_lengths(w.full);
  state.used = stats(w.m.cache).bytes_used;
  state.sequences = stats(w.m.cache).sequences;
  return state;
}

}  // namespace

TEST_CASE("create refuses what it cannot do, says why, and gives no cache") {
  for (const BadConfig &bad : bad_configs()) {
    INFO(bad.name);
    Setup setup{.recipe = kK4V4, .layers = {layer_of(2, 2, 64), layer_of(2, 2, 64)}};
    kvq_config config = config_of(setup);
    bad.spoil(setup, config);
    kvq_cache *cache = nullptr;
    const int32_t status = kvq_create(&config, &cache);
    INFO("status " << kvq_status_string(status) << ", detail: " << detail());
    CHECK(status == bad.status);
    CHECK(cache == nullptr);
    says(bad.words);
    auto support = sized<kvq_support>();
    const int32_t asked = kvq_backend_support(&config, &support);
    if (asked == KVQ_OK) {
      CHECK(support.status == bad.status);
      CHECK(support.path == KVQ_PATH_NONE);
      CHECK(support.reason[0] != 0);
    } else {
      CHECK(asked == KVQ_E_INVALID);  // broken arguments of that call itself
    }
    kvq_destroy(cache);
  }
}

TEST_CASE("a refused call names argument, value and bound, and changes nothing") {
  World w;
  const State before = state_of(w);
  for (const BadCall &bad : bad_calls()) {
    INFO(bad.name);
    const int32_t status = bad.call(w);
    INFO("status " << kvq_status_string(status) << ", detail: " << detail());
    if (bad.status) CHECK(status == bad.status);
    CHECK(status < 0);
    CHECK(status != KVQ_E_INTERNAL);
    says(bad.words);
    const State after = state_of(w);
    REQUIRE((after.picture == before.picture));
    REQUIRE(same_bits(after.seen, before.seen));
    CHECK((after.used == before.used || on_device()));  // which keeps the tables of its widest step
    CHECK(after.sequences == before.sequences);
  }
  // The open step still works to its end.
  ok(kvq_append(w.m.cache, w.open, 1, w.k.view(), w.v.view(), nullptr, nullptr));
  ok(kvq_attend(w.m.cache, w.open, 1, w.q.view(), w.out.view(), nullptr, nullptr, nullptr));
  ok(kvq_step_end(w.m.cache, w.open, nullptr, nullptr));
  REQUIRE(lengths(w.m.cache, w.fresh).total == 3);
  refused(kvq_step_abort(w.m.cache, w.open), KVQ_E_STALE);
}

TEST_CASE("a NULL cache is refused by every function") {  // X8
  auto length = sized<kvq_lengths>();
  auto stat = sized<kvq_stats>();
  auto desc = sized<kvq_prefill>();
  auto data = sized<kvq_calibration>();
  kvq_seq seq = 1;
  kvq_step step = 0;
  const uint32_t one = 1;
  float value = 0;
  size_t needed = 0;
  char text[8];
  const int32_t results[] = {
      kvq_cache_recipe(nullptr, text, 8, &needed),
      kvq_seq_create(nullptr, &seq),
      kvq_seq_fork(nullptr, 1, 0, &seq),
      kvq_seq_truncate(nullptr, 1, 0),
      kvq_seq_remove(nullptr, 1),
      kvq_seq_length(nullptr, 1, &length),
      kvq_prefill_commit(nullptr, 1, &desc, nullptr),
      kvq_step_begin(nullptr, &seq, &one, 1, 0, &step),
      kvq_append(nullptr, 1, 0, nullptr, nullptr, nullptr, nullptr),
      kvq_attend(nullptr, 1, 0, nullptr, nullptr, nullptr, nullptr, nullptr),
      kvq_step_end(nullptr, 1, nullptr, nullptr),
      kvq_step_abort(nullptr, 1),
      kvq_end_turn(nullptr, 1),
      kvq_calibrate(nullptr, &data),
      kvq_calibrate_finish(nullptr),
      kvq_policy_get(nullptr, 1, nullptr, 0, &needed),
      kvq_policy_set(nullptr, 1, text, 8),
      kvq_export_values(nullptr, 1, 0, 0, 0, 0, 1, &value),
      kvq_export_wire(nullptr, 1, 0, 0, 0, 0, nullptr, 0, &needed, nullptr),
      kvq_stats_get(nullptr, &stat),
      kvq_create(nullptr, nullptr),
  };
  for (size_t i = 0; i < std::size(results); ++i) {
    INFO("call number " << i);
    CHECK(results[i] == KVQ_E_INVALID);
  }
  const kvq_config config = config_of(Setup{});
  CHECK(kvq_create(&config, nullptr) == KVQ_E_INVALID);
  says({"cache", "NULL"});
  CHECK(kvq_backend_query(0, nullptr) == KVQ_E_INVALID);
  CHECK(kvq_backend_support(nullptr, nullptr) == KVQ_E_INVALID);
  CHECK(kvq_recipe_parse(nullptr, nullptr, 0, nullptr, 0, nullptr) == KVQ_E_INVALID);
  CHECK(kvq_codec_encode(nullptr, nullptr, 0, nullptr, 0, nullptr) == KVQ_E_INVALID);
  CHECK(kvq_codec_decode(nullptr, nullptr, 0, 0, nullptr) == KVQ_E_INVALID);
  CHECK(kvq_policy_decide(nullptr, nullptr, 0, nullptr) == KVQ_E_INVALID);
}

TEST_CASE("destroying nothing, and a cache with live sequences and an open step") {  // X17
  kvq_destroy(nullptr);
  World w;
  ok(kvq_seq_remove(w.m.cache, w.full));
  refused(kvq_seq_remove(w.m.cache, w.full), KVQ_E_STALE);
}

TEST_CASE("a struct may be shorter or longer than the library's, but never lie") {  // X6
  struct Longer {
    kvq_config config;
    uint64_t more[2];
  };
  const Setup setup{.recipe = kK4V4, .layers = {layer_of(2, 2, 64)}};
  const auto create = [](const kvq_config *config) {
    kvq_cache *cache = nullptr;
    const int32_t status = kvq_create(config, &cache);
    CHECK((status == KVQ_OK) == (cache != nullptr));
    kvq_destroy(cache);
    return status;
  };
  Longer longer{config_of(setup), {0, 0}};
  longer.config.struct_size = sizeof longer;
  ok(create(&longer.config));
  longer.more[1] = 5;
  refused(create(&longer.config), KVQ_E_INVALID);
  says({"struct_size"});

  // Up to `recipe` only: the rest takes its defaults, whatever lies behind.
  kvq_config shorter = config_of(setup);
  shorter.struct_size = offsetof(kvq_config, max_bytes);
  shorter.max_bytes = 1, shorter.max_sequences = 1;
  ok(create(&shorter));
  for (uint32_t size : {0u, 3u}) {
    kvq_config broken = config_of(setup);
    broken.struct_size = size;
    refused(create(&broken), KVQ_E_INVALID);
  }

  // Layers are spaced by their own size.
  struct LongLayer {
    kvq_layer layer;
    uint32_t more[3];
  };
  LongLayer layers[2] = {{layer_of(2, 2, 64), {}}, {layer_of(1, 3, 96), {}}};
  for (LongLayer &layer : layers) layer.layer.struct_size = sizeof layer;
  kvq_config config = config_of(setup);
  config.layers = &layers[0].layer, config.n_layers = config.n_layer_structs = 2;
  ok(create(&config));
  layers[1].more[2] = 1;
  refused(create(&config), KVQ_E_INVALID);
  layers[1].more[2] = 0, layers[1].layer.struct_size = sizeof(kvq_layer);
  refused(create(&config), KVQ_E_INVALID);

  // An output struct of an older caller is filled as far as it goes.
  Mirror m(setup);
  const kvq_seq s = m.create();
  m.commit(s, ids(0, 70));
  kvq_lengths old{};
  old.struct_size = offsetof(kvq_lengths, packed);
  old.packed = old.tail = 12345;
  ok(kvq_seq_length(m.cache, s, &old));
  CHECK((old.total == 70 && old.packed == 12345 && old.tail == 12345));
}

TEST_CASE("inputs lie in read-only memory that ends at a guard page") {  // X11, S2
  for (const char *recipe : {kK4V4, "kvq-3", "tq-3", "semkv"}) {
    const kvq_layer layer = layer_of(2, 2, 80);
    Mirror m(Setup{.recipe = std::string(recipe) == kK4V4 ? "k=lloyd(levels=5);v=affine-token(levels=16,group=16)" : recipe,
                   .layers = {layer}});
    const kvq_seq s = m.create();
    const Ids tokens = ids(0, 200);
    const auto guarded = [&](Text::Kind kind, const Ids &list) {
      const Floats rows = m.text.rows(0, kind, list);
      auto buffer = std::make_unique<GuardedBuffer>(rows.data(), rows.size() * 4);
      buffer->freeze();
      return buffer;
    };
    const auto k = guarded(Text::K, tokens), v = guarded(Text::V, tokens), q = guarded(Text::Q, tokens);
    const Floats scores = m.text.scores(tokens);
    GuardedBuffer score(scores.data(), scores.size() * 4), out(4 * 80 * 4 * 2), lse(4 * 4 * 2);
    const auto tensor = [](void *data) {
      auto t = sized<kvq_tensor>();
      t.data = data;
      return t;
    };
    const kvq_tensor tk = tensor(k->data()), tv = tensor(v->data()), tq = tensor(q->data()), to = tensor(out.data());
    auto desc = sized<kvq_prefill>();
    desc.flags = KVQ_PREFILL_FINAL, desc.n_tokens = 200, desc.k = &tk, desc.v = &tv, desc.q = &tq;
    desc.scores = static_cast<const float *>(score.data()), desc.n_scores = 200;
    ok(kvq_prefill_commit(m.cache, s, &desc, nullptr));
    const auto k2 = guarded(Text::K, ids(0, 2)), v2 = guarded(Text::V, ids(0, 2)), q2 = guarded(Text::Q, ids(0, 2));
    const kvq_tensor nk = tensor(k2->data()), nv = tensor(v2->data()), nq = tensor(q2->data());
    const uint32_t two = 2;
    kvq_step step = 0;
    ok(kvq_step_begin(m.cache, &s, &two, 1, 0, &step));
    ok(kvq_append(m.cache, step, 0, &nk, &nv, nullptr, nullptr));
    ok(kvq_attend(m.cache, step, 0, &nq, &to, static_cast<float *>(lse.data()), nullptr, nullptr));
    ok(kvq_step_end(m.cache, step, nullptr, scores.data()));
    GuardedBuffer values(202 * 80 * 4);
    for (uint32_t which : {0, 1}) ok(kvq_export_values(m.cache, s, 0, 1, which, 0, 202, static_cast<float *>(values.data())));
    for (uint64_t block = 0;; ++block) {
      size_t needed = 0;
      if (kvq_export_wire(m.cache, s, 0, 1, 0, block, nullptr, 0, &needed, nullptr) == KVQ_E_INVALID) break;
      GuardedBuffer bytes(needed);
      ok(kvq_export_wire(m.cache, s, 0, 1, 0, block, bytes.data(), needed, nullptr, nullptr));
    }
  }
}

TEST_CASE("what is too small stays untouched, and the size that is needed is told") {  // X19
  Mirror m(Setup{.recipe = kK4V4, .layers = {layer_of(2, 2, 64)}});
  const kvq_seq s = m.create();
  m.commit(s, ids(0, 70));
  size_t needed = 0;
  refused(kvq_export_wire(m.cache, s, 0, 0, 0, 0, nullptr, 0, &needed, nullptr), KVQ_E_SIZE);
  REQUIRE(needed == 64 * (16 + 4));
  Bytes bytes(needed, 0xAB);
  size_t again = 0;
  refused(kvq_export_wire(m.cache, s, 0, 0, 0, 0, bytes.data(), needed - 1, &again, nullptr), KVQ_E_SIZE);
  REQUIRE((again == needed && bytes == Bytes(needed, 0xAB)));
  char text[600] = "untouched";
  refused(kvq_cache_recipe(m.cache, text, 9, &needed), KVQ_E_SIZE);
  REQUIRE(std::string(text) == "untouched");
  ok(kvq_cache_recipe(m.cache, text, sizeof text, &again));
  REQUIRE((again == needed && std::strlen(text) + 1 == needed));
  refused(kvq_seq_truncate(m.cache, s, 71), KVQ_E_INVALID);
  const std::string sentence = detail();
  refused(kvq_error_detail(text, 3, &needed), KVQ_E_SIZE);
  REQUIRE((detail() == sentence && needed == sentence.size() + 1));
  ok(kvq_seq_truncate(m.cache, s, 70));
  REQUIRE(detail() == sentence);  // success does not erase it
}

TEST_CASE("two threads do not mix their sentences") {  // X19
  Mirror m(Setup{.recipe = kK4V4, .layers = {layer_of(2, 2, 64)}});
  const kvq_seq a = m.create(), b = m.create();
  m.commit(a, ids(0, 41)), m.commit(b, ids(0, 77));
  std::atomic<int> wrong{0};
  const auto nag = [&](kvq_seq seq, const char *bound) {
    for (uint64_t i = 1000; i < 1500; ++i) {
      if (kvq_seq_truncate(m.cache, seq, i) != KVQ_E_INVALID) ++wrong;
      const std::string text = detail();
      if (text.find(bound) == text.npos || text.find(std::to_string(i)) == text.npos) ++wrong;
    }
  };
  std::thread other(nag, a, "41");
  nag(b, "77");
  other.join();
  REQUIRE(wrong == 0);
}

TEST_CASE("static texts exist for every status, preset and version") {  // X13
  for (int64_t status = INT32_MIN; status <= INT32_MAX; status += 7919 * 503) REQUIRE(kvq_status_string(int32_t(status)) != nullptr);
  for (int32_t status = -120; status <= 20; ++status) REQUIRE(kvq_status_string(status) != nullptr);
  REQUIRE(std::string(kvq_status_string(KVQ_OK)) == "OK");
  REQUIRE(std::string(kvq_status_string(KVQ_E_INVALID)) == "INVALID");
  REQUIRE(std::string(kvq_status_string(12345)) == "UNKNOWN");
  REQUIRE(kvq_recipe_preset(UINT32_MAX) == nullptr);
  auto info = sized<kvq_backend_info>();
  ok(kvq_backend_query(0, &info));
  REQUIRE((std::string(info.name) == "cpu" && info.available == 1 && info.path[0] != 0));
  refused(kvq_backend_query(1000, &info), KVQ_E_INVALID);
}
