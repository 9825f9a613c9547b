// Attention of the CPU backend against float64 over the decoded values, for everything that a page can hold.
#include <cstdlib>

#include "cpu_kit.hpp"

using namespace kvq_test;

namespace {

std::vector<float> key_rows(const Cache &cache, Random &random, uint32_t tokens) {
  return random.rows(tokens, cache.shape.kv_heads, cache.shape.dim_k, 0.3);
}
std::vector<float> value_rows(const Cache &cache, Random &random, uint32_t tokens) {
  return random.rows(tokens, cache.shape.kv_heads, cache.shape.dim_v, -1);
}
std::vector<float> queries(const Cache &cache, Random &random, uint32_t n) {
  return random.normals(size_t(n) * cache.shape.q_heads * cache.shape.dim_k);
}

// A sequence with sinks and a tail in raw pages around `packed` tokens.
void fill(Cache &cache, Random &random, const kvq::PageFormat *format, uint32_t sinks, uint32_t packed, uint32_t tail) {
  if (sinks) cache.append(key_rows(cache, random, sinks), value_rows(cache, random, sinks));
  if (packed) cache.append(key_rows(cache, random, packed), value_rows(cache, random, packed), format);
  if (tail) cache.append(key_rows(cache, random, tail), value_rows(cache, random, tail));
}

uint32_t page_tokens_of(uint32_t group) { return (63 / group + 1) * group; }

// The kernels that this processor has, one after the other.
template <class F>
void on_every_path(F &&f) {
  for (const char *path : {"portable", "avx2", "avxvnni", "avx512", "amx"}) {
    setenv("KVQ_CPU", path, 1);
    if (std::string(kvq::cpu_path_name()) == path) {
      INFO("path " << path);
      f();
    }
  }
  unsetenv("KVQ_CPU");
}

}  // namespace

TEST_CASE("every codec, as keys and as values, agrees with float64 in every head dimension") {
  Random random(100);
  double worst = 0;
  const std::vector<uint32_t> dims = {32, 64, 72, 80, 96, 128, 192, 256, 576};
  for (size_t d = 0; d < dims.size(); d++) {
    const uint32_t dim = dims[d];
    const std::vector<CodecCase> cases = codec_cases(dim);
    for (size_t i = 0; i < cases.size(); i++) {
      if (dim != 64 && dim != 128 && (i + d) % 3) continue;
      const CodecCase &k = cases[i], &v = cases[(i * 5 + dim) % cases.size()];
      const uint32_t group = std::max(k.group, v.group);
      INFO("dim " << dim << " K " << k.text << " V " << v.text);
      Cache cache(layer_of(1, 3, dim, dim));
      const auto format = cache.format(k.text, v.text, page_tokens_of(group));
      fill(cache, random, format.get(), 3, group == 1 ? 100 : 2 * page_tokens_of(group), 5);
      Options two;
      two.queries = 2;
      cache.check(queries(cache, random, 2), two);
      worst = std::max(worst, cache.worst_nmse);
    }
  }
  CAPTURE(worst);
  CHECK(worst <= 1e-7);
}

TEST_CASE("all kernels of this processor agree with float64 for every codec") {
  on_every_path([] {
    Random random(101);
    // 7 rows are blocks of 4, 2 and 1; 64 and 128 channels have planes that attention reads in place, 80 have not.
    for (const auto &[dim, ratio] : {std::pair{80u, 5u}, {64u, 7u}, {128u, 4u}, {256u, 7u}})
      for (const CodecCase &item : codec_cases(dim)) {
        INFO(item.text << " dim " << dim);
        Cache cache(layer_of(1, ratio, dim, dim));
        const auto format = cache.format(item.text, item.text, page_tokens_of(item.group));
        fill(cache, random, format.get(), 3, page_tokens_of(item.group) + (item.group == 1 ? 37 : 0), 5);
        cache.check(queries(cache, random, 1));
        Options window;
        window.window = 70;
        cache.check(queries(cache, random, 1), window);
      }
  });
}

TEST_CASE("any ratio of query heads, any length around the ends of pages, one query or several") {
  Random random(102);
  for (const uint32_t ratio : {1u, 2u, 3u, 4u, 7u, 12u, 64u}) {
    for (const uint32_t tokens : {1u, 31u, 32u, 33u, 63u, 64u, 65u, 127u, 128u, 129u}) {
      INFO("ratio " << ratio << " tokens " << tokens);
      Cache cache(layer_of(2, ratio, 64, 96));
      const auto format = cache.format("lloyd(levels=8)", "affine-token(levels=4,group=48)", 64);
      fill(cache, random, format.get(), tokens % 2 ? 0 : 1, tokens - 1, tokens % 2);
      for (const uint32_t n : {1u, 4u}) {
        if (n > tokens || (ratio == 64 && tokens > 65)) continue;
        Options options;
        options.queries = n;
        cache.check(queries(cache, random, n), options);
      }
    }
  }
}

TEST_CASE("window, soft cap and learned sinks, alone and together") {
  Random random(103);
  Cache cache(layer_of(2, 3, 96, 64));
  const auto format = cache.format("affine-channel(levels=4,group=32)", "lloyd(levels=6)", 64);
  fill(cache, random, format.get(), 4, 192, 40);
  const std::vector<float> sinks = random.normals(6, 2, 1);
  for (const uint32_t window : {0u, 1u, 7u, 40u, 41u, 100u, 236u, 1000u})
    for (const float softcap : {0.0f, 2.0f, 30.0f})
      for (const bool with_sinks : {false, true})
        for (const uint32_t n : {1u, 5u}) {
          INFO("window " << window << " softcap " << softcap << " sinks " << with_sinks << " queries " << n);
          Options options;
          options.queries = n, options.window = window, options.softcap = softcap, options.sinks = with_sinks ? sinks.data() : nullptr;
          cache.check(queries(cache, random, n), options);
        }
}

TEST_CASE("a sequence may hold more packed formats than are open at once, in any order") {
  Random random(104);
  Cache cache(layer_of(1, 4, 72, 72));
  std::vector<std::shared_ptr<const kvq::PageFormat>> formats;
  for (const char *text : {"lloyd(levels=4)", "lloyd(levels=8,seed=7)", "affine-token(levels=5,group=72,rotate=1)", "raw", "lloyd(levels=5,seed=9)",
                           "progressive(bits=8)", "lloyd(levels=16,rotate=0)"})
    formats.push_back(cache.format(text, text, 64));
  for (uint32_t i = 0; i < 30; i++) fill(cache, random, formats[random.below(formats.size())].get(), 0, 20 + uint32_t(random.below(60)), uint32_t(random.below(3)));
  cache.check(queries(cache, random, 1));
}

TEST_CASE("pages of a token class list their positions, and rows see them causally") {
  Random random(105);
  Cache cache(layer_of(2, 2, 64, 64));
  const auto low = cache.format("affine-token(levels=5,group=64,rotate=1)", "affine-token(levels=5,group=64,rotate=1)", 64);
  const auto high = cache.format("affine-token(levels=6,group=64,rotate=1)", "affine-token(levels=6,group=64,rotate=1)", 64);
  // Interleave two classes: even positions low, odd ones high.  The oracle needs values by position.
  fill(cache, random, low.get(), 0, 60, 0);
  fill(cache, random, high.get(), 0, 60, 0);
  std::vector<uint32_t> order(120);
  for (uint32_t i = 0; i < 60; i++) order[2 * i] = i, order[2 * i + 1] = 60 + i;
  for (uint32_t cls = 0; cls < 2; cls++) {
    cache.positions.emplace_back();
    for (uint32_t i = 0; i < 60; i++) cache.positions.back().push_back(2 * i + cls);
    cache.views[cls].positions = cache.positions.back().data();
  }
  cache.reorder(order);
  for (const uint32_t window : {0u, 5u, 64u}) {
    Options options;
    options.queries = 6, options.window = window;
    cache.check(queries(cache, random, 6), options);
  }
}

TEST_CASE("a view may begin and end inside a page") {
  Random random(106);
  for (const CodecCase &item : codec_cases(64)) {
    INFO(item.text);
    Cache cache(layer_of(1, 2, 64, 64));
    const auto format = cache.format(item.text, item.text, page_tokens_of(item.group));
    fill(cache, random, format.get(), 0, page_tokens_of(item.group), 0);
    cache.cut(5, 42);
    Options options;
    options.queries = 3;
    cache.check(queries(cache, random, 3), options);
  }
}

TEST_CASE("pages of several tiles, and groups that no tile divides") {
  Random random(107);
  for (const auto &[group, page] : {std::pair{256u, 256u}, {200u, 200u}, {20u, 80u}, {17u, 68u}, {100u, 300u}, {3u, 66u}}) {
    const std::string g = std::to_string(group);
    for (const std::string &text : {"affine-channel(levels=8,group=" + g + ")", "polar(radius=4,angle=8,group=" + g + ")"}) {
      INFO(text << " page " << page);
      Cache cache(layer_of(1, 4, 64, 64));
      const auto format = cache.format(text, text, page), rows = cache.format("lloyd(levels=5)", text, page);
      fill(cache, random, format.get(), 0, page, 3);
      fill(cache, random, rows.get(), 1, page, 3);
      cache.check(queries(cache, random, 1));
    }
  }
}

TEST_CASE("centred keys, wide books and small groups in odd dimensions") {
  Random random(108);
  for (const uint32_t dim : {2u, 6u, 10u, 66u, 70u, 130u, 1024u}) {
    for (const char *text : {"lloyd(levels=8,center=1)", "affine-token(levels=6,group=2,center=1)", "lloyd(levels=256,center=1)", "lloyd(levels=128,center=1,rotate=0)"}) {
      INFO("dim " << dim << " " << text);
      Cache cache(layer_of(2, 2, dim, dim));
      const auto format = cache.format(text, "lloyd(levels=256)", 64, true, &random);
      fill(cache, random, format.get(), 2, 70, 1);
      cache.check(queries(cache, random, 1));
    }
  }
}

TEST_CASE("a query that is large where keys are constant keeps its small channels") {
  Random random(109);
  for (const char *text : {"affine-token(levels=16,group=64)", "affine-channel(levels=16,group=32)", "lloyd(levels=16,rotate=0)"}) {
    INFO(text);
    Cache cache(layer_of(1, 4, 64, 64));
    const auto format = cache.format(text, "lloyd(levels=4)", 64);
    std::vector<float> k = key_rows(cache, random, 128);
    for (size_t t = 0; t < 128; t++) k[t * 64] = 0;
    cache.append(k, value_rows(cache, random, 128), format.get());
    std::vector<float> q = queries(cache, random, 1);
    for (size_t h = 0; h < 4; h++) q[h * 64] = 20000;
    cache.check(q);
  }
}

TEST_CASE("nothing depends on other sequences, on threads, or on how queries come together") {
  Random random(110);
  on_every_path([&] {
    const LayerShape layer = layer_of(2, 6, 64, 64);
    std::vector<std::unique_ptr<Cache>> caches;
    Random same(111);
    for (uint32_t threads : {1u, 2u, 5u}) {
      Random copy = same;
      caches.push_back(std::make_unique<Cache>(layer, threads));
      const auto format = caches.back()->format("affine-channel(levels=5,group=64)", "lloyd(levels=6)", 64);
      fill(*caches.back(), copy, format.get(), 3, 192, 17);
    }
    const std::vector<float> q = queries(*caches[0], random, 4);
    Options options;
    options.queries = 4;
    const Outputs first = caches[0]->attend(q, options);
    CHECK(caches[1]->attend(q, options) == first);
    CHECK(caches[2]->attend(q, options) == first);

    // Row i of four queries is the one query of a sequence that ends at it.
    for (uint32_t i = 0; i < 4; i++) {
      Cache &cache = *caches[0];
      const std::vector<PageView> views = cache.views;
      cache.cut(0, uint32_t(cache.tokens() - 3 + i));
      const size_t row = size_t(layer.q_heads) * 64;
      const Outputs one = cache.attend(std::vector<float>(q.begin() + i * row, q.begin() + (i + 1) * row));
      cache.views = views;
      cache.uncut();
      CHECK(std::equal(one.out.begin(), one.out.end(), first.out.begin() + i * row));
      CHECK(std::equal(one.lse.begin(), one.lse.end(), first.lse.begin() + i * layer.q_heads));
    }

    // Two sequences in one call.
    const Cache &cache = *caches[1];
    Outputs both;
    both.out.resize(2 * first.out.size());
    both.lse.resize(2 * first.lse.size());
    std::vector<float> twice = queries(cache, random, 4);
    twice.insert(twice.end(), q.begin(), q.end());
    const kvq_tensor query = tensor_of(twice.data(), layer.q_heads, 64), out = tensor_of(both.out.data(), layer.q_heads, 64);
    const kvq::AttendSequence sequences[2] = {{cache.page_list(), cache.tokens(), 0, 4}, {cache.page_list(), cache.tokens(), 4, 4}};
    const kvq::AttendCall call{0, &cache.shape, &query, &out, both.lse.data(), cache.scale(), 0, 0, nullptr, sequences};
    REQUIRE(cache.backend->attend(call, cache.workspace().get()) == KVQ_OK);
    CHECK(std::equal(first.out.begin(), first.out.end(), both.out.begin() + first.out.size()));
    CHECK(std::equal(first.lse.begin(), first.lse.end(), both.lse.begin() + first.lse.size()));
  });
}

TEST_CASE("an empty sequence gives zeros, or its sinks") {
  Random random(112);
  const Cache cache(layer_of(2, 2, 32, 32));
  const std::vector<float> sinks = {1, -2, 0.5f, 30}, q = queries(cache, random, 1);
  Outputs outputs = cache.attend(q);
  for (const float x : outputs.out) CHECK(x == 0);
  for (const float x : outputs.lse) CHECK(x == -std::numeric_limits<float>::infinity());
  Options options;
  options.sinks = sinks.data();
  outputs = cache.attend(q, options);
  for (const float x : outputs.out) CHECK(x == 0);
  for (size_t i = 0; i < 4; i++) CHECK(std::fabs(outputs.lse[i] - sinks[i]) <= 1e-5f);
}

TEST_CASE("a query that is not finite is refused before anything is written") {
  Random random(113);
  Cache cache(layer_of(2, 2, 32, 32));
  fill(cache, random, nullptr, 0, 0, 9);
  std::vector<float> q = queries(cache, random, 2);
  q[(4 + 3) * 32 + 17] = std::numeric_limits<float>::quiet_NaN();
  Options options;
  options.queries = 2;
  Outputs outputs;
  CHECK(cache.attend_into(q, options, &outputs) == KVQ_E_NONFINITE);
  for (const float x : outputs.out) CHECK(x == -7);
  for (const float x : outputs.lse) CHECK(x == -7);
  const std::string detail = kvq::failure_detail();
  CHECK(detail.find("token 1") != std::string::npos);
  CHECK(detail.find("head 3") != std::string::npos);
  CHECK(detail.find("channel 17") != std::string::npos);
}

TEST_CASE("queries enter by rule 1.4 from every type, and results leave in every type with any stride") {
  Random random(114);
  Cache cache(layer_of(2, 2, 48, 32));
  const auto format = cache.format("lloyd(levels=8)", "lloyd(levels=8)", 64);
  fill(cache, random, format.get(), 0, 64, 9);
  std::vector<float> q = queries(cache, random, 1);
  q[0] = 1e-7f, q[1] = -3e-8f, q[2] = 1e30f, q[3] = -65519.0f, q[4] = 0x1.ffep-15f;
  const Outputs expected = cache.attend(q);
  std::vector<uint16_t> halves_of_q = halves(q);
  std::vector<double> doubles_of_q(q.begin(), q.end());
  const size_t row = 4 * 32;
  std::vector<double> wide(4 * 50);
  std::vector<uint16_t> half_out(row), brain_out(row);
  const auto run = [&](const void *queries_in, uint32_t q_dtype, void *out_data, uint32_t out_dtype, int64_t head_stride) {
    const kvq_tensor query = tensor_of(queries_in, 4, 48, q_dtype);
    kvq_tensor out = tensor_of(out_data, 4, 32, out_dtype);
    out.head_stride = head_stride;
    const kvq::AttendSequence sequence{cache.page_list(), cache.tokens(), 0, 1};
    const kvq::AttendCall call{0, &cache.shape, &query, &out, nullptr, cache.scale(), 0, 0, nullptr, {&sequence, 1}};
    REQUIRE(cache.backend->attend(call, cache.workspace().get()) == KVQ_OK);
  };
  run(halves_of_q.data(), KVQ_DTYPE_F16, wide.data(), KVQ_DTYPE_F64, 50);
  run(doubles_of_q.data(), KVQ_DTYPE_F64, half_out.data(), KVQ_DTYPE_F16, 32);
  run(q.data(), KVQ_DTYPE_F32, brain_out.data(), KVQ_DTYPE_BF16, 32);
  for (size_t h = 0; h < 4; h++)
    for (size_t c = 0; c < 32; c++) {
      const float want = expected.out[h * 32 + c];
      CHECK(wide[h * 50 + c] == double(want));
      CHECK(half_out[h * 32 + c] == half_bits(want));
      const float brain = std::bit_cast<float>(uint32_t(brain_out[h * 32 + c]) << 16);
      CHECK(std::fabs(brain - want) <= std::fabs(want) * 0x1p-8f);
    }
}

TEST_CASE("the workspace has the size that the dimensions give, and attention allocates nothing") {
  Random random(115);
  kvq::Memory memory;
  Cache cache(layer_of(2, 2, 64, 64), 1, &memory);
  const auto format = cache.format("lloyd(levels=8)", "lloyd(levels=8)", 64);
  fill(cache, random, format.get(), 0, 64, 9);
  const auto workspace = cache.workspace();
  const uint64_t used = memory.used(), bytes = workspace->bytes;
  CHECK(bytes > 0);
  const std::vector<float> q = queries(cache, random, 1);
  cache.attend(q);
  fill(cache, random, format.get(), 0, 640, 9);
  CHECK(cache.workspace()->bytes == bytes);
  CHECK(memory.used() > used);
  const kvq_tensor query = tensor_of(q.data(), 4, 64);
  std::vector<float> result(4 * 64);
  const kvq_tensor out = tensor_of(result.data(), 4, 64);
  const kvq::AttendSequence sequence{cache.page_list(), cache.tokens(), 0, 1};
  const kvq::AttendCall call{0, &cache.shape, &query, &out, nullptr, cache.scale(), 0, 0, nullptr, {&sequence, 1}};
  const uint64_t before = memory.used(), peak = memory.peak();
  REQUIRE(cache.backend->attend(call, workspace.get()) == KVQ_OK);
  CHECK(memory.used() == before);
  CHECK(memory.peak() == peak);
}

// Rows of 1000 times the others, a channel of 500 times the others on an offset, or one saturated value.
std::vector<float> uneven_values(Random &random, uint32_t tokens, uint32_t dim, uint32_t kind) {
  std::vector<float> v = random.normals(size_t(tokens) * dim);
  for (uint32_t t = 0; t < tokens; t++)
    for (uint32_t c = 0; c < dim; c++) {
      float &x = v[size_t(t) * dim + c];
      if (kind == 0) x *= float(std::pow(10.0, 3.0 * t / tokens)) * (c % 3 ? 1.0f : 30.0f);
      if (kind == 1) x = x * (c == 0 ? 500.0f : 1.0f) + 200.0f;
      if (kind == 2 && t == tokens / 2 && c == dim / 2) x = 65504.0f;
    }
  return v;
}

TEST_CASE("outputs that are small beside the values that make them") {
  on_every_path([] {
    Random random(117);
    for (const uint32_t dim : {16u, 64u}) {
      for (const CodecCase &item : codec_cases(dim)) {
        const uint32_t kind = uint32_t(random.below(3)), tokens = page_tokens_of(item.group);
        const double sharp = random.below(2) ? 0.3 : 8.0;
        for (const std::string keys : {"lloyd(levels=8)", "affine-channel(levels=3,group=32)", "raw"}) {
          INFO("K " << keys << " V " << item.text << " dim " << dim << " kind " << kind << " sharp " << sharp);
          if (keys[0] == 'a' && tokens % 32) continue;
          Cache cache(layer_of(1, 4, 32, dim));
          const auto format = cache.format(keys, item.text, tokens);
          cache.append(random.normals(2 * tokens * 32), uneven_values(random, 2 * tokens, dim, kind), format.get());
          cache.append(random.normals(5 * 32), uneven_values(random, 5, dim, kind));
          cache.check(random.normals(4 * 32, sharp));
        }
      }
    }
  });
}

TEST_CASE("peaked attention over tokens of very different size") {
  Random random(116);
  for (const CodecCase &item : codec_cases(64)) {
    for (const double sharp : {1.0, 30.0}) {
      INFO(item.text << " sharp " << sharp);
      Cache cache(layer_of(1, 4, 64, 64));
      const auto format = cache.format("raw", item.text, page_tokens_of(item.group));
      const uint32_t tokens = page_tokens_of(item.group);
      std::vector<float> v = random.normals(tokens * 64);
      for (uint32_t t = 0; t < tokens; t++) {
        const double size = std::exp(2 * random.normal());
        for (uint32_t c = 0; c < 64; c++) v[t * 64 + c] *= float(size);
      }
      cache.append(random.normals(tokens * 64), v, format.get());
      cache.check(random.normals(4 * 64, sharp));
    }
  }
}
