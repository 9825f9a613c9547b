// The CUDA backend against the CPU: random lives of sequences, driven alike.  Codes, parameters, policies and lengths are the same
// bytes; attention agrees with float64 over the exported values (section 9).
//
// KVQ_CUDA_CASES sets the number of cases (400), KVQ_CUDA_FIRST the first of them.
#include <array>
#include <cstdlib>
#include <memory>

#include "kit.hpp"
#include "oracle.hpp"

using namespace kvq_test;

namespace {

uint64_t number(const char *name, uint64_t otherwise) {
  const char *text = std::getenv(name);
  return text ? std::strtoull(text, nullptr, 0) : otherwise;
}

// Presets, and codecs that no preset has.
const char *const kRecipes[] = {
    "fp16",
    "kivi-2",
    "kivi-2-g32",
    "polar-2",
    "kitty",
    "pnmix",
    "pnmix-g64",
    "tq-2",
    "tq-3",
    "tq-4",
    "tq-1.585",
    "tq-2.322",
    "tq-2.585",
    "tq-split",
    "semkv",
    "semkv-tq",
    "semkv-tq-2",
    "blockgtq-k3v3",
    "blockgtq-k3v2",
    "blockgtq-k2v2",
    "blockgtq-k3v3-fast",
    "blockgtq-k2v2-fast",
    "kvq-2",
    "kvq-2.5",
    "kvq-3",
    "tq-2c",
    "tq-3c",
    "k=lloyd(levels=7,scale=ls);v=lloyd(levels=32,scale=unbiased);block=16",
    "k=lloyd(levels=64,scale=plain,params=e5m3);v=lloyd(levels=128,rotate=0);block=1",
    "k=affine-token(levels=5,group=D,rotate=1,center=1);v=affine-token(levels=7,group=8);block=7;recent=3",
    "k=affine-channel(levels=6,group=8,midpoint=1);v=lloyd(levels=256);block=24;sinks=3",
    "k=raw;v=affine-token(levels=3,group=4);block=5",
    "k=affine-channel(levels=16,group=32);v=affine-token(levels=8,group=fit32);block=32",
    "k=affine-channel(levels=8,group=64,midpoint=1);v=affine-token(levels=256,group=D);block=64;recent=5",
    "k=affine-token(levels=256,group=D,rotate=1,center=1);v=affine-token(levels=2,group=fit64,rotate=1);sinks=2",
    "k=kitty(boost=1/10,group=64);v=affine-token(levels=16,group=fit32);block=64",
    "k=lloyd(levels=16,params=e5m3);v=lloyd(levels=4,params=e5m3);sinks=1",
    "k=lloyd(levels=256);v=lloyd(levels=2)",
    "k=channel-split(high=16,low=2);v=channel-split(high=16,low=4,rotate=0);recent=9;policy=channel-split(r=1/4)",
    "k=width-groups(params=e5m3);v=lloyd(levels=16);policy=blockgtq(avg=4)",
    "k=polar(radius=4,angle=4,group=64);block=64;recent=7",
    "k=progressive(bits=8);v=progressive(bits=8)",
    "k=progressive(bits=2);v=progressive(bits=4)",
};

struct Shape {
  uint32_t kv_heads, ratio, dim_k, dim_v;
};
const Shape kShapes[] = {{1, 1, 128, 128}, {2, 4, 128, 128}, {2, 1, 64, 64}, {1, 5, 128, 64}, {2, 8, 128, 128}, {1, 3, 96, 96}, {1, 2, 80, 48}, {1, 16, 128, 128}, {3, 2, 128, 128}, {1, 2, 256, 256}, {1, 8, 64, 64}, {2, 4, 256, 256}};

class Side {
 public:
  Side(uint32_t backend, const std::string &recipe, const kvq_layer *layers, uint32_t n_layers) {
    auto config = sized<kvq_config>();
    config.backend = backend;
    config.n_layers = config.n_layer_structs = n_layers;
    config.layers = layers;
    config.recipe = recipe.c_str();
    ok(kvq_create(&config, &cache));
  }
  ~Side() { kvq_destroy(cache); }
  Side(const Side &) = delete;
  kvq_cache *cache = nullptr;
};

// Both caches, and sequences that live in both.
class Pair {
 public:
  explicit Pair(uint64_t number)
      : random(number), recipe(kRecipes[number % std::size(kRecipes)]), shape(kShapes[random.below(std::size(kShapes))]) {
    layers.assign(1 + random.below(2), layer_of(shape.kv_heads, shape.ratio, shape.dim_k, shape.dim_v));
    for (kvq_layer &layer : layers) layer.rope_layout = uint32_t(random.below(2));
    for (uint32_t side = 0; side < 2; side++) sides[side] = std::make_unique<Side>(side, recipe, layers.data(), uint32_t(layers.size()));
    seqs.emplace_back();
    for (int i = 0; i < 2; i++) ok(kvq_seq_create(sides[i]->cache, &seqs[0][i]));
  }

  std::vector<float> rows(size_t tokens, uint32_t heads, uint32_t dim) {
    std::vector<float> x = random.rows(tokens, heads, dim);
    if (random.below(8) == 0)
      for (float &v : x) v = std::round(v);  // ties and equal values
    return x;
  }
  bool semkv() const { return recipe.rfind("semkv", 0) == 0; }

  void prompt(size_t s) {
    const uint32_t tokens = uint32_t(random.below(400)) + (lengths_of(s, 0).committed ? 0 : 1);
    if (tokens == 0) return;
    std::vector<float> scores(tokens);
    for (float &x : scores) x = float(random.uniform());
    for (uint32_t l = 0; l < layers.size(); l++) {
      const Tensor k(rows(tokens, shape.kv_heads, shape.dim_k), shape.kv_heads, shape.dim_k, uint32_t(random.below(4)), Lay(random.below(3)));
      const Tensor v(rows(tokens, shape.kv_heads, shape.dim_v), shape.kv_heads, shape.dim_v, uint32_t(random.below(4)), Lay(random.below(3)));
      const Tensor q(rows(tokens, shape.kv_heads * shape.ratio, shape.dim_k), shape.kv_heads * shape.ratio, shape.dim_k);
      for (int i = 0; i < 2; i++) {
        auto chunk = sized<kvq_prefill>();
        chunk.layer = l, chunk.n_tokens = tokens;
        chunk.k = k.view(), chunk.v = v.view(), chunk.q = q.view();
        if (semkv() && l == 0) chunk.scores = scores.data(), chunk.n_scores = tokens;
        ok(kvq_prefill_commit(sides[i]->cache, seqs[s][i], &chunk, nullptr));
      }
    }
    for (int i = 0; i < 2; i++) {
      auto last = sized<kvq_prefill>();
      last.layer = KVQ_ALL_LAYERS, last.flags = KVQ_PREFILL_FINAL;
      ok(kvq_prefill_commit(sides[i]->cache, seqs[s][i], &last, nullptr));
    }
  }

  void step(bool check) {
    const uint32_t n = uint32_t(seqs.size());
    std::vector<uint32_t> counts(n), keep(n);
    uint32_t total = 0, kept = 0;
    for (uint32_t s = 0; s < n; s++) {
      counts[s] = uint32_t(random.below(4) + (random.below(6) == 0 ? 40 : 0));
      keep[s] = random.below(3) ? counts[s] : uint32_t(random.below(counts[s] + 1));
      total += counts[s], kept += keep[s];
    }
    std::vector<float> scores(kept);
    for (float &x : scores) x = float(random.uniform());
    kvq_step steps[2];
    for (int i = 0; i < 2; i++) {
      std::vector<kvq_seq> ids;
      for (const auto &seq : seqs) ids.push_back(seq[i]);
      ok(kvq_step_begin(sides[i]->cache, ids.data(), counts.data(), n, 0, &steps[i]));
    }
    for (uint32_t l = 0; l < layers.size(); l++) {
      const uint32_t q_heads = shape.kv_heads * shape.ratio;
      const Tensor k(rows(total, shape.kv_heads, shape.dim_k), shape.kv_heads, shape.dim_k);
      const Tensor v(rows(total, shape.kv_heads, shape.dim_v), shape.kv_heads, shape.dim_v);
      const Tensor q(random.normals(size_t(total) * q_heads * shape.dim_k, 0.3), q_heads, shape.dim_k);
      auto options = sized<kvq_attend_options>();
      std::vector<float> sinks = random.normals(q_heads);
      if (random.below(3) == 0) options.window = 1 + uint32_t(random.below(200));
      if (random.below(3) == 0) options.softcap = 20;
      if (random.below(3) == 0) options.sinks = sinks.data();
      std::vector<float> out[2], lse[2];
      for (int i = 0; i < 2; i++) {
        ok(kvq_append(sides[i]->cache, steps[i], l, k.view(), v.view(), q.view(), nullptr));
        Tensor result(total, q_heads, shape.dim_v, KVQ_DTYPE_F32, Lay::packed);
        lse[i].resize(total * q_heads + 1);
        ok(kvq_attend(sides[i]->cache, steps[i], l, q.view(), result.view(), lse[i].data(), &options, nullptr));
        out[i] = result.values();
      }
      if (check) compare(out, lse, counts, l, q_heads);
    }
    for (int i = 0; i < 2; i++) ok(kvq_step_end(sides[i]->cache, steps[i], keep.data(), semkv() ? scores.data() : nullptr));
  }

  // CPU attention is checked against float64 elsewhere; both may differ from it by the tolerance.
  void compare(const std::vector<float> (&out)[2], const std::vector<float> (&lse)[2], const std::vector<uint32_t> &, uint32_t layer, uint32_t q_heads) {
    const size_t dim = shape.dim_v, n = out[0].size() / dim;
    for (size_t row = 0; row < n; row++) {
      double error = 0, power = 0, worst = 0, largest = 0;
      for (size_t c = 0; c < dim; c++) {
        const double a = out[0][row * dim + c], b = out[1][row * dim + c];
        error += (a - b) * (a - b), power += a * a, worst = std::max(worst, std::fabs(a - b)), largest = std::max(largest, std::fabs(a));
      }
      INFO("layer " << layer << " row " << row << " of " << n << " (" << q_heads << " heads): error " << error << " of " << power);
      REQUIRE(error <= 1.2e-5 * power + 1e-12);  // logits vary by up to 100 here
      REQUIRE((std::fabs(lse[0][row] - lse[1][row]) <= 2e-2 || lse[0][row] == lse[1][row]));
      worst_nmse = std::max(worst_nmse, power > 0 ? error / power : 0);
    }
  }

  kvq_lengths lengths_of(size_t s, int i) { return lengths(sides[i]->cache, seqs[s][i]); }

  void same_contents() {
    for (size_t s = 0; s < seqs.size(); s++) {
      const kvq_lengths a = lengths_of(s, 0), b = lengths_of(s, 1);
      REQUIRE((a.total == b.total && a.packed == b.packed && a.sinks == b.sinks && a.committed == b.committed));
      REQUIRE(policy_blob(sides[0]->cache, seqs[s][0]) == policy_blob(sides[1]->cache, seqs[s][1]));
      for (uint32_t l = 0; l < layers.size(); l++)
        for (uint32_t head = 0; head < shape.kv_heads; head++)
          for (uint32_t tensor : {KVQ_TENSOR_K, KVQ_TENSOR_V}) {
            INFO("layer " << l << " head " << head << " tensor " << tensor);
            REQUIRE((export_wire(sides[0]->cache, seqs[s][0], l, head, tensor) == export_wire(sides[1]->cache, seqs[s][1], l, head, tensor)));
            const uint32_t dim = tensor == KVQ_TENSOR_K ? shape.dim_k : shape.dim_v;
            const Floats x = export_values(sides[0]->cache, seqs[s][0], l, head, tensor, a.total, dim);
            const Floats y = export_values(sides[1]->cache, seqs[s][1], l, head, tensor, a.total, dim);
            REQUIRE((x.empty() || std::memcmp(x.data(), y.data(), x.size() * sizeof(float)) == 0));
          }
    }
  }

  void fork() {
    if (seqs.size() > 3) return;
    const size_t s = random.below(seqs.size());
    const uint64_t keep = random.below(lengths_of(s, 0).total + 1);
    std::array<kvq_seq, 2> child;
    for (int i = 0; i < 2; i++) ok(kvq_seq_fork(sides[i]->cache, seqs[s][i], keep, &child[i]));
    seqs.push_back(child);
  }
  void truncate() {
    const size_t s = random.below(seqs.size());
    const uint64_t keep = random.below(lengths_of(s, 0).total + 1);
    for (int i = 0; i < 2; i++) ok(kvq_seq_truncate(sides[i]->cache, seqs[s][i], keep));
  }
  void end_turn() {
    for (const auto &seq : seqs)
      for (int i = 0; i < 2; i++) ok(kvq_end_turn(sides[i]->cache, seq[i]));
  }

  Random random;
  const std::string recipe;
  const Shape shape;
  std::vector<kvq_layer> layers;
  std::unique_ptr<Side> sides[2];
  std::vector<std::array<kvq_seq, 2>> seqs;
  double worst_nmse = 0;
};

// A part of the cases: tests of their own, which run side by side.
constexpr uint64_t kParts = 8;

void check_lives(uint64_t part) {
  const uint64_t cases = number("KVQ_CUDA_CASES", 400), first = number("KVQ_CUDA_FIRST", 0);
  double worst = 0;
  for (uint64_t c = first + part; c < first + cases; c += kParts) {
    Pair pair(c);
    INFO("case " << c << ", seed " << seed() << ", recipe " << pair.recipe << ", dim " << pair.shape.dim_k << "/" << pair.shape.dim_v << ", heads "
                 << pair.shape.kv_heads << "x" << pair.shape.ratio);
    pair.prompt(0);
    for (uint32_t turn = 0; turn < 4; turn++) {
      pair.step(true);
      if (pair.random.below(3) == 0) pair.fork();
      if (pair.random.below(3) == 0) pair.truncate();
      if (pair.random.below(4) == 0) pair.end_turn();
      if (pair.random.below(4) == 0) pair.prompt(pair.random.below(pair.seqs.size()));
    }
    pair.step(true);
    pair.same_contents();
    worst = std::max(worst, pair.worst_nmse);
  }
  WARN("every eighth case of " << first + part << ".." << first + cases - 1 << ", seed " << seed() << ": largest NMSE against the CPU " << worst);
}

}  // namespace

TEST_CASE("random lives have the same bytes on the device, part 1") { check_lives(0); }
TEST_CASE("random lives have the same bytes on the device, part 2") { check_lives(1); }
TEST_CASE("random lives have the same bytes on the device, part 3") { check_lives(2); }
TEST_CASE("random lives have the same bytes on the device, part 4") { check_lives(3); }
TEST_CASE("random lives have the same bytes on the device, part 5") { check_lives(4); }
TEST_CASE("random lives have the same bytes on the device, part 6") { check_lives(5); }
TEST_CASE("random lives have the same bytes on the device, part 7") { check_lives(6); }
TEST_CASE("random lives have the same bytes on the device, part 8") { check_lives(7); }
