// The struct_size rules, for every struct of every function: a caller may be older or newer than the library.
#include <catch2/catch_test_macros.hpp>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "guard.hpp"
#include "kvq/kvq.h"
#include "random.hpp"

namespace {

using kvq_test::GuardedBuffer;

constexpr uint32_t kTokens = 8, kHeads = 2, kQueryHeads = 4, kDim = 64;

template <class T>
T sized() {
  T value{};
  value.struct_size = sizeof(T);
  return value;
}

kvq_layer layer() {
  kvq_layer value = sized<kvq_layer>();
  value.kv_heads = kHeads, value.q_heads = kQueryHeads, value.dim_k = kDim;
  return value;
}

// One cache and its data, made anew for every call.
struct Setting {
  kvq_layer layers = layer();
  kvq_config config = sized<kvq_config>();
  kvq_cache *cache = nullptr;
  kvq_seq seq = 0;
  kvq_step step = 0;
  std::vector<float> rows = kvq_test::Random().rows(kTokens, kQueryHeads, kDim);
  std::vector<float> result = std::vector<float>(kTokens * kQueryHeads * kDim);

  explicit Setting(const char *recipe = "tq-3") {
    config.n_layers = config.n_layer_structs = 1;
    config.layers = &layers;
    config.recipe = recipe;
  }
  Setting(const Setting &) = delete;
  Setting &operator=(const Setting &) = delete;
  ~Setting() { kvq_destroy(cache); }

  kvq_tensor tensor() {
    kvq_tensor value = sized<kvq_tensor>();
    value.data = rows.data();
    return value;
  }
  kvq_tensor output() {
    kvq_tensor value = tensor();
    value.data = result.data();
    return value;
  }
  kvq_cache *create() {
    REQUIRE(kvq_create(&config, &cache) == KVQ_OK);
    REQUIRE(kvq_seq_create(cache, &seq) == KVQ_OK);
    return cache;
  }
  kvq_step begin() {
    const uint32_t n = kTokens;
    REQUIRE(kvq_step_begin(create(), &seq, &n, 1, 0, &step) == KVQ_OK);
    return step;
  }
  kvq_step append() {
    const kvq_tensor k = tensor();
    begin();
    REQUIRE(kvq_append(cache, step, 0, &k, &k, nullptr, nullptr) == KVQ_OK);
    return step;
  }
  kvq_prefill prefill(const kvq_tensor *k) {
    kvq_prefill value = sized<kvq_prefill>();
    value.n_tokens = kTokens;
    value.k = value.v = k;
    return value;
  }
  kvq_codec codec() {
    kvq_codec value = sized<kvq_codec>();
    value.text = "lloyd(levels=8)";
    value.dim = kDim;
    return value;
  }
  kvq_policy policy(const kvq_tensor *k) {
    kvq_policy value = sized<kvq_policy>();
    value.text = "pnmix(r=1/2,criterion=k-pair)";
    value.q_heads = 1;
    value.dim = kDim;
    value.n_tokens = kTokens;
    value.k = k;
    return value;
  }
};

struct Case {
  std::string name;
  size_t shorter;                                      // an older struct that still says enough
  std::vector<char> value;                             // valid bytes of the struct
  std::function<int32_t(Setting &, void *)> call;      // gets the struct in guarded memory
  const char *recipe = "tq-3";
};

template <class T>
Case make(const char *name, size_t shorter, const T &value, std::function<int32_t(Setting &, T *)> call, const char *recipe = "tq-3") {
  std::vector<char> bytes(sizeof(T));
  std::memcpy(bytes.data(), &value, sizeof(T));
  return {name, shorter, bytes, [call](Setting &s, void *p) { return call(s, static_cast<T *>(p)); }, recipe};
}

// Structs that hold pointers into a Setting are completed by the call, from the setting that it gets.
std::vector<Case> cases() {
  std::vector<Case> all;
  all.push_back(make<kvq_backend_info>("kvq_backend_query: info", offsetof(kvq_backend_info, path), {},
                                       [](Setting &, auto *info) { return kvq_backend_query(0, info); }));
  all.push_back(make<kvq_support>("kvq_backend_support: support", offsetof(kvq_support, reason), {},
                                  [](Setting &s, auto *support) { return kvq_backend_support(&s.config, support); }));

  kvq_config config{};
  config.n_layers = config.n_layer_structs = 1;
  all.push_back(make<kvq_config>("kvq_create: config", offsetof(kvq_config, recipe), config, [](Setting &s, auto *p) {
    p->layers = &s.layers;
    return kvq_create(p, &s.cache);
  }));
  all.push_back(make<kvq_config>("kvq_backend_support: config", offsetof(kvq_config, recipe), config, [](Setting &s, auto *p) {
    p->layers = &s.layers;
    kvq_support support = sized<kvq_support>();
    const int32_t status = kvq_backend_support(p, &support);
    return status == KVQ_OK ? support.status : status;
  }));
  all.push_back(make<kvq_layer>("kvq_create: layers", offsetof(kvq_layer, dim_v), layer(), [](Setting &s, auto *p) {
    s.config.layers = p;
    return kvq_create(&s.config, &s.cache);
  }));
  kvq_allocator allocator{};
  allocator.alloc = [](void *, size_t size, size_t align) { return std::aligned_alloc(align, (size + align - 1) / align * align); };
  allocator.release = [](void *, void *ptr, size_t, size_t) { std::free(ptr); };
  all.push_back(make<kvq_allocator>("kvq_create: allocator", 0, allocator, [](Setting &s, auto *p) {
    s.config.allocator = p;
    return kvq_create(&s.config, &s.cache);
  }));

  all.push_back(make<kvq_layer>("kvq_recipe_parse: layers", offsetof(kvq_layer, dim_v), layer(), [](Setting &, auto *p) {
    char text[1024];
    return kvq_recipe_parse("tq-3", p, 1, text, sizeof text, nullptr);
  }));
  all.push_back(make<kvq_layer>("kvq_recipe_account: layers", offsetof(kvq_layer, dim_v), layer(), [](Setting &, auto *p) {
    kvq_account account = sized<kvq_account>();
    return kvq_recipe_account("tq-3", p, 1, 100, nullptr, &account);
  }));
  static const uint64_t budget = 4096;
  kvq_recipe_data data{};
  data.budgets = &budget, data.n_budgets = 1;
  all.push_back(make<kvq_recipe_data>("kvq_recipe_account: data", 0, data, [](Setting &s, auto *p) {
    kvq_account account = sized<kvq_account>();
    return kvq_recipe_account("pmkvq", &s.layers, 1, 100, p, &account);
  }));
  all.push_back(make<kvq_recipe_data>("kvq_create: config.recipe_data", 0, data, [](Setting &s, auto *p) {
    s.config.recipe = "pmkvq";
    s.config.recipe_data = p;
    return kvq_create(&s.config, &s.cache);
  }));
  all.push_back(make<kvq_account>("kvq_recipe_account: account", offsetof(kvq_account, wire_bytes), {}, [](Setting &s, auto *p) {
    return kvq_recipe_account("tq-3", &s.layers, 1, 100, nullptr, p);
  }));
  all.push_back(make<kvq_lengths>("kvq_seq_length: lengths", offsetof(kvq_lengths, packed), {}, [](Setting &s, auto *p) {
    s.create();
    return kvq_seq_length(s.cache, s.seq, p);
  }));
  all.push_back(make<kvq_stats>("kvq_stats_get: stats", offsetof(kvq_stats, pages_raw), {},
                                [](Setting &s, auto *p) { return kvq_stats_get(s.create(), p); }));

  all.push_back(make<kvq_prefill>("kvq_prefill_commit: desc", offsetof(kvq_prefill, q), Setting().prefill(nullptr), [](Setting &s, auto *p) {
    const kvq_tensor k = s.tensor();
    p->k = p->v = &k;
    s.create();
    return kvq_prefill_commit(s.cache, s.seq, p, nullptr);
  }));
  const kvq_tensor tensor = sized<kvq_tensor>();
  const size_t tensor_cut = offsetof(kvq_tensor, token_stride);
  all.push_back(make<kvq_tensor>("kvq_prefill_commit: k", tensor_cut, tensor, [](Setting &s, auto *p) {
    p->data = s.rows.data();
    const kvq_tensor v = s.tensor();
    kvq_prefill desc = s.prefill(p);
    desc.v = &v;
    s.create();
    return kvq_prefill_commit(s.cache, s.seq, &desc, nullptr);
  }));
  all.push_back(make<kvq_tensor>("kvq_append: v", tensor_cut, tensor, [](Setting &s, auto *p) {
    p->data = s.rows.data();
    const kvq_tensor k = s.tensor();
    s.begin();
    return kvq_append(s.cache, s.step, 0, &k, p, nullptr, nullptr);
  }));
  all.push_back(make<kvq_tensor>("kvq_attend: q", tensor_cut, tensor, [](Setting &s, auto *p) {
    p->data = s.rows.data();
    const kvq_tensor out = s.output();
    s.append();
    return kvq_attend(s.cache, s.step, 0, p, &out, nullptr, nullptr, nullptr);
  }));
  all.push_back(make<kvq_tensor>("kvq_attend: out", tensor_cut, tensor, [](Setting &s, auto *p) {
    p->data = s.result.data();
    const kvq_tensor q = s.tensor();
    s.append();
    return kvq_attend(s.cache, s.step, 0, &q, p, nullptr, nullptr, nullptr);
  }));
  all.push_back(make<kvq_attend_options>("kvq_attend: options", offsetof(kvq_attend_options, softcap), {}, [](Setting &s, auto *p) {
    const kvq_tensor q = s.tensor(), out = s.output();
    s.append();
    return kvq_attend(s.cache, s.step, 0, &q, &out, nullptr, p, nullptr);
  }));

  kvq_calibration calibration{};
  calibration.n_tokens = kTokens;
  all.push_back(make<kvq_calibration>(
      "kvq_calibrate: data", offsetof(kvq_calibration, v), calibration,
      [](Setting &s, auto *p) {
        const kvq_tensor k = s.tensor();
        p->k = &k;
        return kvq_calibrate(s.create(), p);
      },
      "blockgtq-k3v3"));
  all.push_back(make<kvq_tensor>("kvq_scores_norms: rows", tensor_cut, tensor, [](Setting &s, auto *p) {
    p->data = s.rows.data();
    return kvq_scores_norms(p, 1, kTokens, kHeads, kDim, s.result.data(), nullptr);
  }));
  all.push_back(make<kvq_codec>("kvq_codec_encode: codec", offsetof(kvq_codec, rope_layout), Setting().codec(), [](Setting &s, auto *p) {
    const kvq_tensor x = s.tensor();
    return kvq_codec_encode(p, &x, kTokens, s.result.data(), s.result.size() * sizeof(float), nullptr);
  }));
  all.push_back(make<kvq_tensor>("kvq_codec_encode: x", tensor_cut, tensor, [](Setting &s, auto *p) {
    const kvq_codec codec = s.codec();
    p->data = s.rows.data();
    return kvq_codec_encode(&codec, p, kTokens, s.result.data(), s.result.size() * sizeof(float), nullptr);
  }));
  all.push_back(make<kvq_codec>("kvq_codec_decode: codec", offsetof(kvq_codec, rope_layout), Setting().codec(), [](Setting &s, auto *p) {
    const kvq_codec codec = s.codec();
    const kvq_tensor x = s.tensor();
    std::vector<char> wire(4096);
    size_t size = 0;
    REQUIRE(kvq_codec_encode(&codec, &x, kTokens, wire.data(), wire.size(), &size) == KVQ_OK);
    return kvq_codec_decode(p, wire.data(), size, kTokens, s.result.data());
  }));
  all.push_back(make<kvq_policy>("kvq_policy_decide: policy", offsetof(kvq_policy, q), Setting().policy(nullptr), [](Setting &s, auto *p) {
    const kvq_tensor k = s.tensor();
    p->k = &k;
    return kvq_policy_decide(p, s.result.data(), s.result.size() * sizeof(float), nullptr);
  }));
  all.push_back(make<kvq_policy>("kvq_policy_stats: policy", offsetof(kvq_policy, q), Setting().policy(nullptr), [](Setting &s, auto *p) {
    const kvq_tensor k = s.tensor();
    p->k = &k;
    kvq_pair_sums pairs[kDim / 2];
    uint64_t counts[2];
    return kvq_policy_stats(p, pairs, nullptr, counts);
  }));
  return all;
}

// The call with a struct of `size` bytes, of which those that this header does not know hold `fill`.
int32_t call_with(const Case &c, size_t size, uint32_t struct_size, char fill) {
  GuardedBuffer memory(size);
  std::memset(memory.data(), fill, size);
  std::memcpy(memory.data(), c.value.data(), std::min(size, c.value.size()));
  std::memcpy(memory.data(), &struct_size, sizeof struct_size);
  Setting setting(c.recipe);
  return c.call(setting, memory.data());
}

}  // namespace

TEST_CASE("a struct of this version is accepted") {
  for (const Case &c : cases()) {
    INFO(c.name);
    CHECK(call_with(c, c.value.size(), static_cast<uint32_t>(c.value.size()), 0) == KVQ_OK);
  }
}

TEST_CASE("struct_size 0 is INVALID") {
  for (const Case &c : cases()) {
    INFO(c.name);
    CHECK(call_with(c, c.value.size(), 0, 0) == KVQ_E_INVALID);
  }
}

TEST_CASE("a shorter struct is read as if the missing fields were zero, and nothing beyond it is touched") {
  for (const Case &c : cases()) {
    if (c.shorter == 0) continue;  // every field is needed
    INFO(c.name);
    CHECK(call_with(c, c.shorter, static_cast<uint32_t>(c.shorter), 0) == KVQ_OK);
  }
}

TEST_CASE("a longer struct is accepted if its unknown tail is zero") {
  for (const Case &c : cases()) {
    INFO(c.name);
    const size_t size = c.value.size() + 16;
    CHECK(call_with(c, size, static_cast<uint32_t>(size), 0) == KVQ_OK);
  }
}

TEST_CASE("a longer struct whose unknown tail is not zero is INVALID") {
  for (const Case &c : cases()) {
    INFO(c.name);
    const size_t size = c.value.size() + 16;
    CHECK(call_with(c, size, static_cast<uint32_t>(size), 1) == KVQ_E_INVALID);
  }
}

TEST_CASE("layers are spaced by the struct_size of the first") {
  struct NewerLayer {
    kvq_layer known;
    uint64_t unknown[2];
  } layers[2] = {{layer(), {}}, {layer(), {}}};
  for (NewerLayer &l : layers) l.known.struct_size = sizeof(NewerLayer);
  layers[1].known.kv_heads = 1;
  Setting setting;
  setting.config.n_layers = setting.config.n_layer_structs = 2;
  setting.config.layers = &layers[0].known;
  setting.create();
  kvq_prefill desc = sized<kvq_prefill>();
  const kvq_tensor k = setting.tensor();
  desc.k = desc.v = &k;
  desc.n_tokens = kTokens;
  desc.layer = 1;
  REQUIRE(kvq_prefill_commit(setting.cache, setting.seq, &desc, nullptr) == KVQ_OK);
  std::vector<float> head(kTokens * kDim);
  CHECK(kvq_export_values(setting.cache, setting.seq, 1, 1, KVQ_TENSOR_K, 0, kTokens, head.data()) == KVQ_E_INVALID);
}
