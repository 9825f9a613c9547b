// The device's tables of pages follow the lives of sequences: what a step attends to is what the CPU attends to, whatever was
// appended, packed, shared, cut or narrowed since the last one.
#include <array>

#include "device_kit.hpp"

using namespace kvq_test;

namespace {

constexpr uint32_t kHeads = 2, kRatio = 2, kDim = 64, kQueries = kHeads * kRatio;

// The same sequences in a cache of either backend.
class Twins {
 public:
  using Seq = std::array<kvq_seq, 2>;

  explicit Twins(const std::string &recipe, const kvq_recipe_data *data = nullptr) : scored_(recipe.rfind("semkv", 0) == 0) {
    std::vector<kvq_layer> layers(3, layer_of(kHeads, kRatio, kDim));
    layers[2].kv_source = 1;  // reads the pages of layer 0
    for (uint32_t side = 0; side < 2; side++) {
      auto config = sized<kvq_config>();
      config.backend = side;
      config.n_layers = config.n_layer_structs = 3, config.layers = layers.data(), config.recipe = recipe.c_str();
      config.recipe_data = data;
      ok(kvq_create(&config, &caches_[side]));
    }
  }
  ~Twins() {
    for (kvq_cache *cache : caches_) kvq_destroy(cache);
  }
  Twins(const Twins &) = delete;

  template <class Call>
  void both(Call &&call) {
    for (uint32_t side = 0; side < 2; side++) ok(call(caches_[side], side));
  }
  Seq create() {
    Seq seq;
    both([&](kvq_cache *cache, uint32_t side) { return kvq_seq_create(cache, &seq[side]); });
    return seq;
  }
  void prompt(const Seq &seq, uint32_t tokens) {
    for (uint32_t l = 0; l < 2; l++) {
      const Tensor k = rows(tokens, kHeads), v = rows(tokens, kHeads), q = rows(tokens, kQueries);
      const Floats scores = random_.normals(tokens);
      auto chunk = sized<kvq_prefill>();
      chunk.layer = l, chunk.n_tokens = tokens, chunk.flags = KVQ_PREFILL_FINAL;
      chunk.k = k.view(), chunk.v = v.view(), chunk.q = q.view();
      if (scored_ && l == 0) chunk.scores = scores.data(), chunk.n_scores = tokens;
      both([&](kvq_cache *cache, uint32_t side) { return kvq_prefill_commit(cache, seq[side], &chunk, nullptr); });
      look({seq}, {1});  // while only some layers are packed
    }
  }
  // A step that appends; its attention in every layer.
  void step(const std::vector<Seq> &seqs, std::vector<uint32_t> counts) {
    run(seqs, counts, 0);
  }
  // Attention of the newest tokens.
  void look(const std::vector<Seq> &seqs, std::vector<uint32_t> counts) { run(seqs, counts, KVQ_STEP_QUERY_ONLY); }
  uint32_t length(const Seq &seq) { return uint32_t(lengths(caches_[0], seq[0]).total); }
  Random &random() { return random_; }

 private:
  Tensor rows(uint32_t tokens, uint32_t heads) { return Tensor(random_.rows(tokens, heads, kDim), heads, kDim); }
  void run(const std::vector<Seq> &seqs, const std::vector<uint32_t> &counts, uint32_t flags) {
    uint32_t total = 0;
    for (const uint32_t n : counts) total += n;
    kvq_step steps[2];
    both([&](kvq_cache *cache, uint32_t side) {
      std::vector<kvq_seq> ids;
      for (const Seq &seq : seqs) ids.push_back(seq[side]);
      return kvq_step_begin(cache, ids.data(), counts.data(), uint32_t(ids.size()), flags, &steps[side]);
    });
    for (uint32_t l = 0; l < 3; l++) {
      const Tensor k = rows(total, kHeads), v = rows(total, kHeads), q(random_.normals(size_t(total) * kQueries * kDim, 0.3), kQueries, kDim);
      if (!flags && l < 2)
        both([&](kvq_cache *cache, uint32_t side) { return kvq_append(cache, steps[side], l, k.view(), v.view(), q.view(), nullptr); });
      Floats results[2];
      both([&](kvq_cache *cache, uint32_t side) {
        Tensor out(total, kQueries, kDim, KVQ_DTYPE_F32, Lay::packed);
        const int32_t status = kvq_attend(cache, steps[side], l, q.view(), out.view(), nullptr, nullptr, nullptr);
        results[side] = out.values();
        return status;
      });
      compare(results, l);
    }
    const Floats scores = random_.normals(total);
    both([&](kvq_cache *cache, uint32_t side) { return kvq_step_end(cache, steps[side], nullptr, flags ? nullptr : scores.data()); });
  }
  static void compare(const Floats (&results)[2], uint32_t layer) {
    for (size_t row = 0; row * kDim < results[0].size(); row++) {
      double error = 0, power = 0;
      for (size_t i = row * kDim; i < (row + 1) * kDim; i++) error += std::pow(results[0][i] - results[1][i], 2), power += std::pow(results[0][i], 2);
      INFO("layer " << layer << ", row " << row << ": error " << error << " of " << power);
      REQUIRE(error <= 1.2e-5 * power + 1e-12);
    }
  }

  bool scored_;
  kvq_cache *caches_[2] = {nullptr, nullptr};
  Random random_{23};
};

const char *const kRecipes[] = {"tq-3", "semkv", "semkv-tq", "kvq-2.5", "kivi-2", "blockgtq-k3v3-fast", "polar-2", "fp16"};

}  // namespace

TEST_CASE("queries among packed tokens see their own past, with token classes too") {
  for (const char *recipe : kRecipes) {
    INFO(recipe);
    Twins twins(recipe);
    const Twins::Seq seq = twins.create();
    twins.prompt(seq, 700);
    for (const uint32_t queries : {1u, 3u, 64u, 129u, 333u, 700u}) twins.look({seq}, {queries});
  }
}

TEST_CASE("steps see what sequences have become since the last one") {
  for (const char *recipe : kRecipes) {
    INFO(recipe);
    Twins twins(recipe);
    Random &random = twins.random();
    std::vector<Twins::Seq> seqs = {twins.create(), twins.create()};
    twins.prompt(seqs[0], 300), twins.prompt(seqs[1], 90);
    for (int round = 0; round < 25; round++) {
      twins.step(seqs, std::vector<uint32_t>(seqs.size(), 1 + uint32_t(random.below(100))));
      const Twins::Seq one = seqs[random.below(seqs.size())];
      const uint32_t length = twins.length(one);
      switch (random.below(5)) {
        case 0: {
          const uint64_t keep = random.below(length + 1);
          twins.both([&](kvq_cache *cache, uint32_t side) { return kvq_seq_truncate(cache, one[side], keep); });
          break;
        }
        case 1: {
          if (seqs.size() > 4) break;
          Twins::Seq child;
          const uint64_t keep = random.below(length + 1);
          twins.both([&](kvq_cache *cache, uint32_t side) { return kvq_seq_fork(cache, one[side], keep, &child[side]); });
          seqs.push_back(child);
          break;
        }
        case 2:
          twins.prompt(one, 1 + uint32_t(random.below(200)));
          break;
        case 3:
          if (length > 0) twins.look({one}, {1 + uint32_t(random.below(length))});
          break;
        default:
          twins.both([&](kvq_cache *cache, uint32_t side) { return kvq_end_turn(cache, one[side]); });
      }
    }
  }
}

TEST_CASE("pages that are narrowed stay in the tables") {
  const uint64_t budgets[3] = {60000, 90000, 0};
  auto data = sized<kvq_recipe_data>();
  data.budgets = budgets, data.n_budgets = 3;
  Twins twins("pmkvq", &data);
  const std::vector<Twins::Seq> seqs = {twins.create()};
  twins.prompt(seqs[0], 100);
  for (int round = 0; round < 12; round++) twins.step(seqs, {90});
}
