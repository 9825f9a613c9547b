// Long contexts on the device: more elements in one sequence than 32 bits count, and many sequences of thousands of tokens.
#include <algorithm>
#include <cmath>
#include <thread>

#include "device_kit.hpp"
#include "oracle.hpp"

using namespace kvq_test;

namespace {

// ---- one sequence of more than 2^31 elements

constexpr uint32_t kHeads = 8, kRatio = 4, kDim = 128, kRow = kHeads * kDim, kChunk = 16384, kChunks = 135;
constexpr uint64_t kBeyond = (uint64_t(1) << 31) / kRow;  // the first token whose elements have no 32-bit number
constexpr uint64_t kTotal = uint64_t(kChunk) * kChunks;
static_assert(kTotal > kBeyond + kChunk);

struct Needle {
  uint64_t position;
  Floats query, value;  // [kDim], the same in every head; the key is four times the query
};

void put(const DeviceFloats &chunk, uint64_t row, const Floats &head) {
  Floats all;
  for (uint32_t h = 0; h < kHeads; h++) all.insert(all.end(), head.begin(), head.end());
  REQUIRE(cudaMemcpy(chunk.data + row * kRow, all.data(), kRow * sizeof(float), cudaMemcpyHostToDevice) == cudaSuccess);
}

class Haystack {
 public:
  explicit Haystack(const char *recipe) : random_(71), setup_{.recipe = recipe, .layers = {layer_of(kHeads, kRatio, kDim)}} {
    kvq_config config = config_of(setup_);
    config.backend = KVQ_BACKEND_CUDA;
    ok(kvq_create(&config, &cache));
    ok(kvq_seq_create(cache, &seq));
    for (uint64_t position : {uint64_t(40), kBeyond - 1, kBeyond + 77, kTotal - kChunk / 2, kTotal - 2}) {
      Floats value = random_.normals(kDim);
      for (float &v : value) v = v < 0 ? -4.0f : 4.0f;
      needles.push_back({position, random_.normals(kDim), value});
    }
    fill();
  }
  ~Haystack() { kvq_destroy(cache); }
  Haystack(const Haystack &) = delete;

  // Attention of the newest token's place with this query.
  void look(const Floats &query, Floats *out, Floats *lse) {
    Floats rows;
    for (uint32_t h = 0; h < kHeads * kRatio; h++) rows.insert(rows.end(), query.begin(), query.end());
    const Tensor q(rows, kHeads * kRatio, kDim);
    Tensor result(1, kHeads * kRatio, kDim, KVQ_DTYPE_F32, Lay::packed);
    lse->resize(kHeads * kRatio);
    const uint32_t one = 1;
    kvq_step step = 0;
    ok(kvq_step_begin(cache, &seq, &one, 1, KVQ_STEP_QUERY_ONLY, &step));
    ok(kvq_attend(cache, step, 0, q.view(), result.view(), lse->data(), nullptr, nullptr));
    ok(kvq_step_end(cache, step, nullptr, nullptr));
    *out = result.values();
  }
  Floats values(uint32_t head, uint32_t tensor, uint64_t first, uint64_t count) {
    Floats x(count * kDim);
    ok(kvq_export_values(cache, seq, 0, head, tensor, first, count, x.data()));
    return x;
  }

  kvq_cache *cache = nullptr;
  kvq_seq seq = 0;
  std::vector<Needle> needles;

 private:
  // The same rows chunk after chunk, but for the needles.
  void fill() {
    const size_t n = size_t(kChunk) * kRow;
    const Floats rows = random_.normals(n), others = random_.normals(n);
    const DeviceFloats keys(n), contents(n), queries(n * kRatio);
    for (size_t i = 0; i < kRatio; i++) REQUIRE(cudaMemcpy(queries.data + i * n, rows.data(), n * 4, cudaMemcpyHostToDevice) == cudaSuccess);
    REQUIRE(cudaMemcpy(keys.data, rows.data(), n * 4, cudaMemcpyHostToDevice) == cudaSuccess);
    REQUIRE(cudaMemcpy(contents.data, others.data(), n * 4, cudaMemcpyHostToDevice) == cudaSuccess);
    const kvq_tensor k = keys.tensor(), v = contents.tensor(), q = queries.tensor();
    for (uint64_t first = 0; first < kTotal; first += kChunk) {
      const auto each = [&](auto &&f) {
        for (const Needle &needle : needles)
          if (needle.position - first < kChunk) f(needle, needle.position - first);
      };
      each([&](const Needle &needle, uint64_t row) {
        Floats key = needle.query;
        for (float &x : key) x *= 4;
        put(keys, row, key), put(contents, row, needle.value);
      });
      auto chunk = sized<kvq_prefill>();
      chunk.n_tokens = kChunk, chunk.flags = KVQ_PREFILL_FINAL, chunk.k = &k, chunk.v = &v;
      if (first == 0) chunk.q = &q;
      ok(kvq_prefill_commit(cache, seq, &chunk, nullptr));
      each([&](const Needle &, uint64_t row) {
        REQUIRE(cudaMemcpy(keys.data + row * kRow, &rows[row * kRow], kRow * 4, cudaMemcpyHostToDevice) == cudaSuccess);
        REQUIRE(cudaMemcpy(contents.data + row * kRow, &others[row * kRow], kRow * 4, cudaMemcpyHostToDevice) == cudaSuccess);
      });
    }
  }

  Random random_;
  Setup setup_;
};

// ---- many sequences

constexpr uint32_t kManyHeads = 2, kMost = 32768, kSequences = 64;

struct Lives {
  Lives(uint32_t backend, const char *recipe) : setup{.recipe = recipe, .layers = {layer_of(kManyHeads, kRatio, kDim)}, .n_threads = 8} {
    kvq_config config = config_of(setup);
    config.backend = backend;
    ok(kvq_create(&config, &cache));
  }
  ~Lives() { kvq_destroy(cache); }
  Lives(const Lives &) = delete;
  Setup setup;
  kvq_cache *cache = nullptr;
  std::vector<kvq_seq> seqs;
  Floats out, lse;
};

// Rows that sequences take their tokens from, at an offset of their own.
struct Pool {
  explicit Pool(Random &random)
      : k(random.rows(2 * kMost, kManyHeads, kDim)), v(random.rows(2 * kMost, kManyHeads, kDim)), q(random.normals(size_t(kMost) * kManyHeads * kRatio * kDim, 0.3)) {}
  kvq_tensor tensor(const Floats &rows, uint64_t first, uint32_t heads) const {
    auto t = sized<kvq_tensor>();
    t.data = const_cast<float *>(rows.data()) + first * heads * kDim;
    return t;
  }
  Floats k, v, q;
};

void commit(Lives &lives, const Pool &pool, const std::vector<uint64_t> &offsets, const std::vector<uint32_t> &lengths, const Floats &scores) {
  for (size_t s = 0; s < lengths.size(); s++) {
    lives.seqs.emplace_back();
    ok(kvq_seq_create(lives.cache, &lives.seqs.back()));
    const kvq_tensor k = pool.tensor(pool.k, offsets[s], kManyHeads), v = pool.tensor(pool.v, offsets[s], kManyHeads), q = pool.tensor(pool.q, 0, kManyHeads * kRatio);
    auto prompt = sized<kvq_prefill>();
    prompt.n_tokens = lengths[s], prompt.flags = KVQ_PREFILL_FINAL, prompt.k = &k, prompt.v = &v, prompt.q = &q;
    if (lives.setup.recipe.starts_with("semkv")) prompt.scores = scores.data(), prompt.n_scores = lengths[s];
    ok(kvq_prefill_commit(lives.cache, lives.seqs.back(), &prompt, nullptr));
  }
}

void attend(Lives &lives, const Tensor &q) {
  const std::vector<uint32_t> ones(lives.seqs.size(), 1);
  Tensor result(lives.seqs.size(), kManyHeads * kRatio, kDim, KVQ_DTYPE_F32, Lay::packed);
  lives.lse.resize(lives.seqs.size() * kManyHeads * kRatio);
  kvq_step step = 0;
  ok(kvq_step_begin(lives.cache, lives.seqs.data(), ones.data(), uint32_t(ones.size()), KVQ_STEP_QUERY_ONLY, &step));
  ok(kvq_attend(lives.cache, step, 0, q.view(), result.view(), lives.lse.data(), nullptr, nullptr));
  ok(kvq_step_end(lives.cache, step, nullptr, nullptr));
  lives.out = result.values();
}

struct Worst {
  double out[2] = {0, 0}, lse[2] = {0, 0};  // of both backends against float64, in units of the tolerance
  bool failed = false;
};

// Both results of a sequence against float64 over what the CPU exports.
Worst check(const Lives (&lives)[2], size_t s, uint32_t length, const float *q) {
  Worst worst;
  Floats k(size_t(kManyHeads) * length * kDim), v(k.size());
  for (uint32_t h = 0; h < kManyHeads; h++)
    for (uint32_t tensor : {KVQ_TENSOR_K, KVQ_TENSOR_V})
      worst.failed |= kvq_export_values(lives[0].cache, lives[0].seqs[s], 0, h, tensor, 0, length, (tensor ? v : k).data() + size_t(h) * length * kDim) != KVQ_OK;
  const Attended expected = kvq_test::attend(Attention{.tokens = length, .n_queries = 1, .q_heads = kManyHeads * kRatio, .kv_heads = kManyHeads, .dim_k = kDim, .dim_v = kDim, .q = q, .k = k.data(), .v = v.data()});
  double largest = 0;
  for (float x : v) largest = std::max(largest, std::fabs(double(x)));
  for (int side = 0; side < 2; side++)
    for (uint32_t h = 0; h < kManyHeads * kRatio; h++) {
      const size_t row = s * kManyHeads * kRatio + h;
      worst.out[side] = std::max(worst.out[side], attention_error(&lives[side].out[row * kDim], &expected.out[h * kDim], kDim, expected.variance[h], largest));
      worst.lse[side] = std::max(worst.lse[side], std::fabs(lives[side].lse[row] - expected.lse[h]) / (1e-3 * std::max(1.0, expected.largest[h] / 16)));
    }
  return worst;
}

}  // namespace

TEST_CASE("a needle among 2.2 million tokens is found, also where elements have no 32-bit number") {
  for (const char *recipe : {"tq-2", "kvq-2", "kivi-2"}) {
    Haystack hay(recipe);
    REQUIRE(lengths(hay.cache, hay.seq).total == kTotal);
    for (const Needle &needle : hay.needles) {
      INFO(recipe << ", needle at " << needle.position << ", seed " << seed());
      Floats out, lse;
      hay.look(needle.query, &out, &lse);
      for (uint32_t h = 0; h < kHeads; h++) {
        const Floats value = hay.values(h, KVQ_TENSOR_V, needle.position, 1), key = hay.values(h, KVQ_TENSOR_K, needle.position, 1);
        double logit = 0, worst = 0, largest = 0;
        for (uint32_t c = 0; c < kDim; c++) logit += double(needle.query[c]) * key[c], largest = std::max(largest, std::fabs(double(value[c])));
        logit /= std::sqrt(double(kDim));
        for (uint32_t r = 0; r < kRatio; r++) {
          const size_t row = h * kRatio + r;
          for (uint32_t c = 0; c < kDim; c++) worst = std::max(worst, std::fabs(double(out[row * kDim + c]) - value[c]));
          REQUIRE(worst <= 1e-3 * largest);
          REQUIRE(std::fabs(lse[row] - logit) <= 1e-3 * std::max(1.0, logit / 16) + 1e-3);  // the rounding of the query to fp16
        }
      }
    }
    if (std::string(recipe) == "tq-2")  // rows that entered more than once have the same bytes wherever they lie
      for (uint32_t tensor : {KVQ_TENSOR_K, KVQ_TENSOR_V})
        REQUIRE(hay.values(7, tensor, kBeyond + 100, 300) == hay.values(7, tensor, (kBeyond + 100) % kChunk + kChunk, 300));
  }
}

TEST_CASE("64 sequences of up to 32768 tokens agree with float64 as on the CPU") {
  Random random(72);
  const Pool pool(random);
  const Floats scores = random.normals(kMost);
  std::vector<uint64_t> offsets;
  std::vector<uint32_t> lengths;
  for (uint32_t s = 0; s < kSequences; s++) offsets.push_back(random.below(kMost)), lengths.push_back(1 + uint32_t(random.below(s % 4 ? kMost : 2000)));
  const Floats queries = random.normals(size_t(kSequences) * kManyHeads * kRatio * kDim, 0.3);
  const Tensor q(queries, kManyHeads * kRatio, kDim, KVQ_DTYPE_F16);
  const Floats entered = q.values();
  for (const char *recipe : {"tq-3", "kvq-2.5", "pnmix", "semkv", "blockgtq-k3v3-fast"}) {
    Lives lives[2] = {{KVQ_BACKEND_CPU, recipe}, {KVQ_BACKEND_CUDA, recipe}};
    for (Lives &side : lives) commit(side, pool, offsets, lengths, scores), attend(side, q);
    std::vector<Worst> worst(kSequences);
    std::vector<std::thread> threads;
    for (uint32_t first = 0; first < 8; first++)
      threads.emplace_back([&, first] {
        for (size_t s = first; s < kSequences; s += 8) worst[s] = check(lives, s, lengths[s], &entered[s * kManyHeads * kRatio * kDim]);
      });
    for (std::thread &thread : threads) thread.join();
    for (size_t s = 0; s < kSequences; s++) {
      INFO(recipe << ", sequence " << s << " of " << lengths[s] << " tokens, seed " << seed());
      REQUIRE(!worst[s].failed);
      for (int side = 0; side < 2; side++) {
        CHECK(worst[s].out[side] <= 1);
        CHECK(worst[s].lse[side] <= 1);
      }
    }
  }
}
