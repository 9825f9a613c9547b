// drop-tokens: the tokens of highest score stay in fp16, the others are gone; positions and lengths are as if they were there.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "mirror.hpp"

using namespace kvq_test;

namespace {

// Which of `scores` are the `count` largest, ties to the lower index.
std::vector<bool> largest(const Floats &scores, size_t count) {
  std::vector<size_t> order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return scores[a] > scores[b]; });
  std::vector<bool> kept(scores.size(), false);
  for (size_t i = 0; i < count; ++i) kept[order[i]] = true;
  return kept;
}

size_t half_even(double value) { return size_t(std::nearbyint(value)); }

// A cache of one layer and what it should keep of each token.
struct Pruned {
  Mirror m;
  std::vector<bool> kept;  // by position; the tail counts as kept
  kvq_seq s = 0;
  explicit Pruned(const Setup &setup) : m(setup) {
    m.preset.rule.semkv = true;  // scores, prompts and turns are SemKV's
    s = m.create();
  }
  const kvq_layer &layer() const { return m.setup.layers[0]; }
  void pack(size_t first, size_t count, size_t of) {
    const std::vector<bool> chosen = largest(m.text.scores(part(m.shadow(s).tokens, first, first + of)), count);
    kept.resize(std::max(kept.size(), first + of), true);
    std::copy(chosen.begin(), chosen.end(), kept.begin() + long(first));
  }
  // Values of all positions: rows as they entered, or NaN where they are gone.
  void check_values() const {
    for (uint32_t head = 0; head < layer().kv_heads; ++head)
      for (uint32_t tensor : {KVQ_TENSOR_K, KVQ_TENSOR_V}) {
        const Floats got = export_values(m.cache, s, 0, head, tensor, m.total(s), dim_of(layer(), tensor));
        const size_t dim = dim_of(layer(), tensor);
        for (size_t t = 0; t < m.total(s); ++t) {
          const Floats &truth = const_cast<Mirror &>(m).text.row(0, tensor == KVQ_TENSOR_K ? Text::K : Text::V, m.shadow(s).tokens[t]);
          for (size_t c = 0; c < dim; ++c) {
            const float value = got[t * dim + c];
            const bool good = t >= kept.size() || kept[t] ? value == entry(truth[head * dim + c]) : std::isnan(value);
            if (!good) FAIL("position " << t << " of head " << head << ": " << value);
          }
        }
      }
  }
  // Attention of the newest n tokens against float64 over the kept tokens alone, each at its own position.
  void check_attention(uint32_t n, uint32_t window = 0) {
    const Seen seen = m.query(s, n, {.window = window, .check = false});
    const size_t total = m.total(s), dim = layer().dim_k, value_dim = dim_v(layer()), per_kv = layer().q_heads / layer().kv_heads;
    for (uint32_t i = 0; i < n; ++i)
      for (uint32_t h = 0; h < layer().q_heads; ++h) {
        const size_t newest = total - n + i;
        const Floats &q = m.text.row(0, Text::Q, m.shadow(s).tokens[newest]);
        std::vector<double> weight, out(value_dim, 0.0);
        std::vector<const float *> rows;
        double sum = 0, top = -INFINITY, scale = 0;
        for (size_t t = window && newest + 1 > window ? newest + 1 - window : 0; t <= newest; ++t) {
          if (t < kept.size() && !kept[t]) continue;
          const uint32_t id = m.shadow(s).tokens[t];
          const float *k = &m.text.row(0, Text::K, id)[h / per_kv * dim];
          double logit = 0;
          for (size_t c = 0; c < dim; ++c) logit += double(entry(q[h * dim + c])) * entry(k[c]);
          weight.push_back(logit / std::sqrt(double(dim)));
          rows.push_back(&m.text.row(0, Text::V, id)[h / per_kv * value_dim]);
          top = std::max(top, weight.back());
        }
        for (double &w : weight) sum += w = std::exp(w - top);
        for (size_t t = 0; t < rows.size(); ++t)
          for (size_t c = 0; c < value_dim; ++c) {
            out[c] += weight[t] / sum * entry(rows[t][c]);
            scale = std::max(scale, std::fabs(double(rows[t][c])));
          }
        for (size_t c = 0; c < value_dim; ++c)
          REQUIRE(std::fabs(seen.out[0][(i * layer().q_heads + h) * value_dim + c] - out[c]) <= 1e-3 * scale);
        const float lse = seen.lse[0][i * layer().q_heads + h];
        const bool good = rows.empty() ? lse == -std::numeric_limits<float>::infinity()
                                       : std::fabs(lse - (top + std::log(sum))) <= 1e-3 * std::max(1.0, std::fabs(top) / 16);
        REQUIRE(good);
      }
  }
};

Setup setup_of(const std::string &recipe) { return {.recipe = recipe, .layers = {layer_of(2, 2, 16, 8)}}; }

}  // namespace

TEST_CASE("a prompt keeps its floor(r * T) best tokens, generation and turns round half to even") {
  Pruned p(setup_of("policy=drop-tokens(r=1/4);sinks=3;block=10"));
  Mirror &m = p.m;
  m.commit(p.s, ids(0, 58), 13);
  p.pack(3, 55 / 4, 55);
  p.kept[0] = p.kept[1] = p.kept[2] = true;
  p.check_values();
  m.append(p.s, ids(58, 25), 3);  // two blocks of 10
  p.pack(58, half_even(2.5), 10);
  p.pack(68, half_even(2.5), 10);
  p.check_values();
  p.check_attention(4);
  p.check_attention(2, 30);
  m.end_turn(p.s);
  p.pack(78, half_even(5 / 4.0), 5);
  p.check_values();
  m.chunk(p.s, ids(83, 9), true);  // a later prompt of its own
  p.pack(83, 9 / 4, 9);
  p.check_values();
  p.check_attention(1);
  REQUIRE(lengths(m.cache, p.s).packed == 55 + 20 + 5 + 9);
}

TEST_CASE("the wire of a block is its flags and the kept rows in fp16") {
  Pruned p(setup_of("policy=drop-tokens(r=1/2)"));
  p.m.commit(p.s, ids(0, 9));
  p.pack(0, 4, 9);
  const auto blocks = export_wire(p.m.cache, p.s, 0, 1, KVQ_TENSOR_V);
  REQUIRE(blocks.size() == 1);
  Bytes want(2, 0);
  for (uint32_t t = 0; t < 9; ++t) {
    if (!p.kept[t]) continue;
    want[t / 8] |= uint8_t(1 << t % 8);
    for (size_t c = 0; c < 8; ++c) {
      const uint16_t bits = half_bits(p.m.text.row(0, Text::V, t)[8 + c]);
      want.push_back(uint8_t(bits)), want.push_back(uint8_t(bits >> 8));
    }
  }
  REQUIRE(blocks[0].bytes == want);
}

TEST_CASE("dropped tokens take no memory") {
  const auto bytes = [](const char *recipe) {
    Pruned p(setup_of(recipe));
    p.m.commit(p.s, ids(0, 1280));
    return stats(p.m.cache).page_bytes_packed;
  };
  REQUIRE(bytes("policy=drop-tokens(r=1/10)") * 10 == bytes("policy=drop-tokens(r=1)"));
  REQUIRE(bytes("policy=drop-tokens(r=0)") == 0);
}

TEST_CASE("where every token is dropped there is nothing to attend to, until the next one comes") {
  Pruned p(setup_of("policy=drop-tokens(r=0)"));
  p.m.commit(p.s, ids(0, 20));
  p.kept.assign(20, false);
  p.check_values();
  p.check_attention(3);
  p.m.append(p.s, ids(20, 2));
  p.check_attention(2);
}

TEST_CASE("forks and truncation treat dropped tokens as the positions that they were") {
  Pruned p(setup_of("policy=drop-tokens(r=1/3);block=8"));
  Mirror &m = p.m;
  m.commit(p.s, ids(0, 50));
  p.pack(0, 16, 50);
  const kvq_seq parent = p.s, child = m.fork(parent, 31);
  const std::vector<bool> whole = p.kept;
  p.s = child;
  p.kept.resize(31);
  p.check_values();
  p.check_attention(1);
  m.append(child, ids(100, 9), 4);
  p.pack(31, half_even(8 / 3.0), 8);
  p.check_values();
  p.check_attention(3);
  m.truncate(child, 12);
  p.kept.resize(12);
  p.check_values();
  p.s = parent, p.kept = whole;
  p.check_values();
  p.check_attention(5);
}

TEST_CASE("a step without scores is refused, and ends with them") {
  Pruned p(setup_of("policy=drop-tokens(r=1/2)"));
  p.m.commit(p.s, ids(0, 5));
  const uint32_t one = 1;
  kvq_step step = 0;
  ok(kvq_step_begin(p.m.cache, &p.s, &one, 1, 0, &step));
  const Tensor k = p.m.tensor(0, Text::K, ids(5, 1)), v = p.m.tensor(0, Text::V, ids(5, 1));
  ok(kvq_append(p.m.cache, step, 0, k.view(), v.view(), nullptr, nullptr));
  refused(kvq_step_end(p.m.cache, step, nullptr, nullptr), KVQ_E_INVALID);
  const float score = 1;
  ok(kvq_step_end(p.m.cache, step, nullptr, &score));
}
