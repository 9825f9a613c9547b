// Raw and packed pages of the CPU backend: what is stored comes back, bit for bit, and costs what the formats allow.
#include "cpu_kit.hpp"
#include "policy/policy.h"

using namespace kvq_test;

namespace {

struct Pages {
  explicit Pages(const LayerShape &layer) : shape(layer), backend(kvq::make_cpu_backend(&memory, 1)) {}
  ~Pages() {
    for (const auto &[page, bytes] : owned) backend->release_page(page, bytes);
  }
  void *allocate(size_t bytes) {
    owned.emplace_back(backend->allocate_page(bytes), bytes);
    return owned.back().first;
  }
  // Tokens in raw pages, some of them starting inside a page.
  std::vector<kvq::PageRows> store(const std::vector<float> &k, const std::vector<float> &v, uint32_t tokens) {
    const kvq_tensor keys = tensor_of(k.data(), shape.kv_heads, shape.dim_k), vals = tensor_of(v.data(), shape.kv_heads, shape.dim_v);
    std::vector<kvq::PageRows> rows;
    for (uint32_t t = 0; t < tokens;) {
      const uint32_t first = rows.size() % 2 ? 5 : 0, count = std::min(backend->raw_page_tokens() - first, tokens - t);
      rows.push_back({allocate(backend->raw_page_bytes(shape)), first, count});
      REQUIRE(backend->store_rows(shape, keys, vals, t, rows.back(), &saturated) == KVQ_OK);
      t += count;
    }
    return rows;
  }
  std::shared_ptr<const kvq::PageFormat> format(const std::string &k, const std::string &v, uint32_t tokens) {
    std::pmr::vector<HeadFormat> keys, vals;
    for (uint32_t h = 0; h < shape.kv_heads; h++) {
      keys.push_back(format_of(k, shape.head(KVQ_TENSOR_K)));
      vals.push_back(format_of(v, shape.head(KVQ_TENSOR_V)));
    }
    return backend->make_format(shape, tokens, std::move(keys), std::move(vals));
  }

  const LayerShape shape;
  kvq::Memory memory;
  std::shared_ptr<kvq::Backend> backend;
  std::vector<std::pair<void *, size_t>> owned;
  uint64_t saturated = 0;
};

// fp16 rows of one head: what encode gets.
std::vector<uint16_t> head_rows(const std::vector<float> &x, uint32_t heads, uint32_t dim, uint32_t head) {
  std::vector<uint16_t> rows;
  for (size_t t = 0; t < x.size() / (heads * dim); t++)
    for (uint32_t c = 0; c < dim; c++) rows.push_back(half_bits(x[(t * heads + head) * dim + c] + 0.0f));
  return rows;
}

uint32_t page_tokens_of(uint32_t group) { return (63 / group + 1) * group; }

}  // namespace

TEST_CASE("packed pages give back exactly the codes and parameters of the encoder") {
  Random random(120);
  for (const uint32_t dim : {2u, 10u, 32u, 66u, 72u, 128u, 576u}) {
    for (const CodecCase &item : codec_cases(dim)) {
      if (dim > 128 && item.text.find("group=2)") != std::string::npos) continue;
      INFO("dim " << dim << " " << item.text);
      Pages pages(layer_of(2, 1, dim, dim));
      const uint32_t tokens = page_tokens_of(item.group);
      const auto format = pages.format(item.text, item.text, tokens);
      const std::vector<float> k = random.rows(tokens, 2, dim), v = random.rows(tokens, 2, dim, -1);
      // Row codecs in runs of any length, column codecs group by group; the last run first.
      std::vector<kvq::PageRows> runs;
      void *page = pages.allocate(format->bytes);
      for (uint32_t t = 0; t < tokens;) {
        const uint32_t n = item.group > 1 ? item.group : std::min<uint32_t>(tokens - t, 1 + uint32_t(random.below(40)));
        runs.push_back({page, t, n});
        t += n;
      }
      pages.backend->pack(pages.shape, *format, pages.store(k, v, tokens), runs);
      for (uint32_t head = 0; head < 2; head++)
        for (const uint32_t tensor : {KVQ_TENSOR_K, KVQ_TENSOR_V}) {
          const HeadFormat &head_format = tensor == KVQ_TENSOR_K ? format->k[head] : format->v[head];
          const Block expected = encoded(head_format, head_rows(tensor == KVQ_TENSOR_K ? k : v, 2, dim, head));
          Block block(std::pmr::get_default_resource());
          const uint32_t cut = item.group > 1 ? item.group : 7;
          pages.backend->unpack(*format, page, 0, cut, head, tensor, &block);
          pages.backend->unpack(*format, page, cut, tokens - cut, head, tensor, &block);
          CHECK(block.tokens == tokens);
          CHECK(block.codes == expected.codes);
          CHECK(block.params == expected.params);
          CHECK(block.boosted == expected.boosted);
          CHECK(wire_of(head_format, block) == wire_of(head_format, expected));
        }
    }
  }
}

TEST_CASE("rows written later leave earlier rows of the page as they are") {
  Random random(121);
  for (const CodecCase &item : codec_cases(64)) {
    INFO(item.text);
    Pages pages(layer_of(1, 1, 64, 64));
    const auto format = pages.format(item.text, item.text, page_tokens_of(item.group));
    void *page = pages.allocate(format->bytes);
    const uint32_t n = item.group > 1 ? item.group : 13;
    if (2 * n > format->page_tokens) continue;
    const std::vector<float> x = random.rows(n, 1, 64), y = random.rows(n, 1, 64);
    const kvq::PageRows first{page, 0, n}, second{page, n, n};
    const auto codes = [&] {
      Block block(std::pmr::get_default_resource());
      pages.backend->unpack(*format, page, 0, n, 0, KVQ_TENSOR_V, &block);
      return wire_of(format->v[0], block);
    };
    pages.backend->pack(pages.shape, *format, pages.store(x, x, n), {&first, 1});
    const std::vector<uint8_t> before = codes();
    pages.backend->pack(pages.shape, *format, pages.store(y, y, n), {&second, 1});
    CHECK(codes() == before);
    void *copy = pages.allocate(format->bytes);
    pages.backend->copy_packed(*format, page, copy);
    page = copy;
    CHECK(codes() == before);
  }
}

TEST_CASE("a packed page is at most 6% larger than its wire bytes, 12% with width groups of odd sizes") {
  for (const uint32_t dim : {64u, 72u, 80u, 96u, 112u, 128u, 192u, 256u, 576u, 1024u}) {
    for (const CodecCase &item : codec_cases(dim)) {
      if (item.text.find("group=2)") != std::string::npos) continue;  // its scalars are most of it
      Pages pages(layer_of(3, 1, dim, dim));
      const uint32_t tokens = page_tokens_of(item.group);
      const auto format = pages.format(item.text, item.text, tokens);
      size_t wire = 0;
      for (uint32_t head = 0; head < 3; head++) wire += kvq::wire_size(format->k[head], tokens) + kvq::wire_size(format->v[head], tokens);
      const bool odd = item.text.starts_with("width-groups");
      INFO("dim " << dim << " " << item.text << ": " << format->bytes << " of " << wire << " is " << 100.0 * double(format->bytes) / double(wire) - 100 << "% more");
      CHECK(double(format->bytes) <= double(wire) * (odd ? 1.12 : 1.06));
    }
  }
}

TEST_CASE("raw rows come back rounded by rule 1.4, and copies and sums see them") {
  Random random(122);
  Pages pages(layer_of(3, 2, 18, 10));
  std::vector<float> k = random.rows(50, 3, 18), v = random.rows(50, 3, 10);
  k[5] = 1e9f, k[6] = -0.0f, v[7] = -70000.0f;
  const std::vector<kvq::PageRows> rows = pages.store(k, v, 50);
  CHECK(pages.saturated == 2);
  const auto loaded = [&](uint32_t head, uint32_t tensor, uint32_t dim) {
    std::vector<uint16_t> all;
    for (const kvq::PageRows &run : rows) {
      std::vector<uint16_t> part(size_t(run.count) * dim);
      pages.backend->load_rows(pages.shape, run, head, tensor, part.data());
      all.insert(all.end(), part.begin(), part.end());
    }
    return all;
  };
  kvq::LayerStatistics sums(std::pmr::get_default_resource()), expected(std::pmr::get_default_resource());
  kvq::reset_statistics(pages.shape, &sums);
  kvq::reset_statistics(pages.shape, &expected);
  const std::vector<float> q = random.normals(size_t(60) * 6 * 18);
  const kvq_tensor queries = tensor_of(q.data(), 6, 18);
  pages.backend->add_statistics(pages.shape, rows, &queries, 10, &sums);
  for (uint32_t head = 0; head < 3; head++) {
    const std::vector<uint16_t> keys = head_rows(k, 3, 18, head), vals = head_rows(v, 3, 10, head);
    CHECK(loaded(head, KVQ_TENSOR_K, 18) == keys);
    CHECK(loaded(head, KVQ_TENSOR_V, 10) == vals);
    kvq::add_key_statistics(pages.shape.head(KVQ_TENSOR_K), keys.data(), 18, 50, &expected.heads[head]);
    kvq::add_value_statistics(vals.data(), 10, 50, &expected.heads[head]);
    for (uint32_t t = 10; t < 60; t++)
      for (uint32_t i = 0; i < 2; i++) {
        std::vector<uint16_t> row;
        for (uint32_t c = 0; c < 18; c++) row.push_back(half_bits(q[(size_t(t) * 6 + head * 2 + i) * 18 + c]));
        kvq::add_query_statistics(pages.shape.head(KVQ_TENSOR_K), row.data(), 18, 1, &expected.heads[head]);
      }
    CHECK(sums.heads[head].nk == expected.heads[head].nk);
    CHECK(sums.heads[head].nq == expected.heads[head].nq);
    for (uint32_t p = 0; p < 9; p++) {
      CHECK(sums.heads[head].pairs[p].k2 == expected.heads[head].pairs[p].k2);
      CHECK(sums.heads[head].pairs[p].q1 == expected.heads[head].pairs[p].q1);
    }
    for (uint32_t c = 0; c < 10; c++) CHECK(sums.heads[head].v[c].abs == expected.heads[head].v[c].abs);
  }
  // Only what is wanted is added up; tokens are counted.
  for (const uint32_t wanted : {uint32_t(kvq::kPairSquares | kvq::kKeySums), uint32_t(kvq::kPairNorms), uint32_t(kvq::kKeyChannels | kvq::kValueChannels)}) {
    kvq::LayerStatistics some(std::pmr::get_default_resource());
    kvq::reset_statistics(pages.shape, &some);
    some.wanted = wanted;
    pages.backend->add_statistics(pages.shape, rows, &queries, 10, &some);
    for (uint32_t head = 0; head < 3; head++) {
      const kvq::HeadStatistics &got = some.heads[head], &all = sums.heads[head];
      const auto is = [&](uint32_t what, const auto &part, const auto &whole) { return wanted & what ? part == whole : part == 0; };
      CHECK(got.nk == all.nk);
      CHECK(got.nq == all.nq);
      for (uint32_t p = 0; p < 9; p++) {
        const kvq::PairSums &a = got.pairs[p], &b = all.pairs[p];
        CHECK((is(kvq::kPairNorms, a.k1, b.k1) && is(kvq::kPairNorms, a.q1, b.q1) && is(kvq::kPairSquares, a.k2, b.k2) && is(kvq::kPairSquares, a.q2, b.q2)));
      }
      for (uint32_t c = 0; c < 18; c++) CHECK((is(kvq::kKeySums | kvq::kKeyChannels, got.k[c].sum, all.k[c].sum) && is(kvq::kKeyChannels, got.k[c].abs, all.k[c].abs)));
      for (uint32_t c = 0; c < 10; c++) CHECK((is(kvq::kValueChannels, got.v[c].sum, all.v[c].sum) && is(kvq::kValueChannels, got.v[c].abs, all.v[c].abs)));
    }
  }
  void *copy = pages.allocate(pages.backend->raw_page_bytes(pages.shape));
  pages.backend->copy_rows(pages.shape, rows[1].page, 6, copy, 30, 2);
  std::vector<uint16_t> a(36), b(36);
  pages.backend->load_rows(pages.shape, {rows[1].page, 6, 2}, 2, KVQ_TENSOR_K, a.data());
  pages.backend->load_rows(pages.shape, {copy, 30, 2}, 2, KVQ_TENSOR_K, b.data());
  CHECK(a == b);
  pages.backend->load_rows(pages.shape, {rows[1].page, 7, 1}, 1, KVQ_TENSOR_V, a.data());
  pages.backend->load_rows(pages.shape, {copy, 31, 1}, 1, KVQ_TENSOR_V, b.data());
  CHECK(std::equal(a.begin(), a.begin() + 10, b.begin()));
}

TEST_CASE("a row that is not finite is refused with its token, head and channel") {
  Pages pages(layer_of(2, 1, 16, 16));
  std::vector<float> k(20 * 32, 1.0f), v(20 * 32, 1.0f);
  k[7 * 32 + 16 + 3] = std::numeric_limits<float>::infinity();
  const kvq_tensor keys = tensor_of(k.data(), 2, 16), vals = tensor_of(v.data(), 2, 16);
  uint64_t saturated = 0;
  const kvq::PageRows rows{pages.allocate(pages.backend->raw_page_bytes(pages.shape)), 0, 10};
  CHECK(pages.backend->store_rows(pages.shape, keys, vals, 0, rows, &saturated) == KVQ_E_NONFINITE);
  const std::string detail = kvq::failure_detail();
  CHECK(detail.find("token 7") != std::string::npos);
  CHECK(detail.find("head 1") != std::string::npos);
  CHECK(detail.find("channel 3") != std::string::npos);
  CHECK(pages.backend->check_rows(keys, 0, 20, 2, 16, "q", &saturated) == KVQ_E_NONFINITE);
  CHECK(pages.backend->check_rows(vals, 0, 20, 2, 16, "q", &saturated) == KVQ_OK);
}
