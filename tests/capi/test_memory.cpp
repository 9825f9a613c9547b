// Memory: what is counted, what is limited, what happens when there is none, and what a recipe costs.
// (Cases A1 to A3, A5 to A10, A12, T6, X16, X21.)
#include <catch2/catch_approx.hpp>

#include "allocator.hpp"
#include "mirror.hpp"

using namespace kvq_test;

namespace {

// Bytes of a stream of n codes of `levels` levels: section 4, from its table.
uint64_t stream_bytes(uint32_t levels, uint64_t n) {
  const auto log2_up = [](uint64_t x) { return uint64_t(std::bit_width(x - 1)); };
  uint64_t digits = 1, bits = log2_up(levels);
  if (levels == 3) digits = 5, bits = 8;
  if (levels == 5) digits = 3, bits = 7;
  if (levels == 6) digits = 5, bits = 13;
  if (levels == 7) digits = 6, bits = 17;
  uint64_t rest = 1;
  for (uint64_t i = 0; i < n % digits; ++i) rest *= levels;
  return (n / digits * bits + (n % digits ? log2_up(rest) : 0) + 7) / 8;
}

// Wire bytes of one KV head of D = 128 by section 5: K and V, for n packed tokens exported as one block.
struct Cost {
  const char *preset;
  uint64_t (*k)(uint64_t n), (*v)(uint64_t n);
};
constexpr uint64_t D = 128;
// A mean of `bits` a channel, scale and zero of every channel and group.
uint64_t column(uint64_t n, uint64_t bits, uint64_t group) { return n * D * bits / 8 + n / group * D * 4; }
uint64_t rows(uint64_t n, uint32_t levels, uint64_t parameters) { return stream_bytes(levels, n * D) + n * parameters; }
template <uint32_t Levels, uint64_t Parameters>
uint64_t rows_of(uint64_t n) { return rows(n, Levels, Parameters); }
template <uint64_t Bits, uint64_t Group>
uint64_t columns_of(uint64_t n) { return column(n, Bits, Group); }

const Cost kCosts[] = {
    {"fp16", [](uint64_t n) { return n * D * 2; }, [](uint64_t n) { return n * D * 2; }},
    {"kivi-2", columns_of<2, 128>, rows_of<4, 4>},
    {"kivi-2-g32", columns_of<2, 32>, rows_of<4, 16>},
    {"polar-2", columns_of<2, 128>, rows_of<4, 4>},
    // floor(128/32) = 4 boosted channels have 2 more bits; one position byte a channel and group.
    {"kitty", [](uint64_t n) { return column(n, 2, 128) + n * 4 * 2 / 8 + n / 128 * D; }, rows_of<4, 4>},
    {"pnmix", columns_of<2, 128>, rows_of<4, 4>},
    // r = 2/5 of 64 pairs: 25 pairs at 3 bits, 39 at 1.
    {"pnmix-g64", [](uint64_t n) { return n * (25 * 2 * 3 + 39 * 2) / 8 + n / 64 * D * 4; }, rows_of<4, 4>},
    {"tq-2", rows_of<4, 2>, rows_of<4, 2>},
    {"tq-3", rows_of<8, 2>, rows_of<8, 2>},
    {"tq-4", rows_of<16, 2>, rows_of<16, 2>},
    {"tq-1.585", rows_of<3, 2>, rows_of<3, 2>},
    {"tq-2.322", rows_of<5, 2>, rows_of<5, 2>},
    {"tq-2.585", rows_of<6, 2>, rows_of<6, 2>},
    {"tq-split", [](uint64_t n) { return n * 64 * 5 / 8 + n * 4; }, [](uint64_t n) { return n * 64 * 5 / 8 + n * 4; }},
    {"kvq-2", columns_of<2, 128>, rows_of<3, 1>},
    // floor(21/8 * 64) = 168 bits over 64 pairs, two channels each.
    {"kvq-2.5", [](uint64_t n) { return n * 168 * 2 / 8 + n / 128 * D * 4; }, rows_of<4, 1>},
    {"kvq-3", columns_of<3, 128>, rows_of<6, 1>},
    {"tq-2c", rows_of<4, 2>, rows_of<4, 2>},
    {"tq-3c", rows_of<8, 2>, rows_of<8, 2>},
};

kvq_account account_of(const std::string &recipe, const std::vector<kvq_layer> &layers, uint64_t tokens, const Bytes &bits = {}) {
  auto account = sized<kvq_account>();
  auto data = sized<kvq_recipe_data>();
  data.bits = bits.data(), data.n_bits = bits.size();
  INFO(recipe);
  ok(kvq_recipe_account(recipe.c_str(), layers.data(), uint32_t(layers.size()), tokens, bits.empty() ? nullptr : &data, &account));
  return account;
}

// A figure of the table, given to `digits` decimals.
void near_figure(double got, double figure, int digits, const std::string &what) {
  INFO(what << ": " << got << " instead of " << figure);
  CHECK(std::fabs(got - figure) <= 0.5 * std::pow(10.0, -digits) + 1e-9);
}

}  // namespace

TEST_CASE("every preset costs what the table of section 8 says") {  // A6 to A9
  struct Figure {
    const char *preset;
    double k, v, both;  // 0: not in the table
    int digits;
  };
  const Figure table[] = {
      {"fp16", 16, 16, 16, 4}, {"kivi-2", 2.25, 2.25, 0, 4}, {"kivi-2-g32", 3, 3, 3, 4}, {"polar-2", 2.25, 0, 0, 4}, {"kitty", 2.3883, 0, 0, 4}, {"pnmix", 2.2634, 0, 0, 4}, {"pnmix-g64", 2.2946, 0, 0, 4}, {"tq-2", 2.125, 2.125, 2.125, 3}, {"tq-3", 3.125, 3.125, 3.125, 3}, {"tq-4", 4.125, 4.125, 4.125, 3}, {"tq-1.585", 1.725, 1.725, 1.725, 3}, {"tq-2.322", 2.458, 2.458, 2.458, 3}, {"tq-2.585", 2.725, 2.725, 2.725, 3}, {"tq-split", 2.75, 2.75, 2.75, 2}, {"semkv", 2.65, 2.65, 2.65, 2}, {"semkv-tq", 2.525, 2.525, 2.525, 3}, {"semkv-tq-2", 2.025, 2.025, 2.025, 3}, {"kvq-2", 2.2635, 1.6765, 1.970, 4}, {"kvq-2.5", 2.8879, 2.0762, 2.482, 4}, {"kvq-3", 3.2625, 2.6756, 2.969, 4}, {"tq-2c", 2.1267, 0, 0, 4}, {"tq-3c", 3.1266, 0, 0, 4}};
  const std::vector<kvq_layer> layers = {layer_of(8, 4, 128)};
  for (const Figure &figure : table) {
    const uint64_t tokens = find_preset(figure.preset)->rule.sinks + 32768;
    const kvq_account got = account_of(figure.preset, layers, tokens);
    near_figure(got.effective_bits_k, figure.k, figure.digits, std::string(figure.preset) + " K");
    if (figure.v) near_figure(got.effective_bits_v, figure.v, figure.digits, std::string(figure.preset) + " V");
    if (figure.both) near_figure(got.effective_bits, figure.both, std::min(figure.digits, 3), figure.preset);
    CHECK(got.fp16_bytes == 2 * tokens * 8 * 2 * 128);
  }
  // Block-GTQ: one fp16 scalar for every width present, 16/128 bits each.
  for (const auto &[name, k, v] : {std::tuple{"blockgtq-k3v3", 3.0, 3.125}, {"blockgtq-k3v2", 3.0, 2.125}, {"blockgtq-k2v2", 2.0, 2.125}}) {
    Bytes bits(8 * 64, uint8_t(k));
    near_figure(account_of(name, layers, 32768, bits).effective_bits_k, k + 0.125, 4, name);
    for (size_t head = 0; head < 8; ++head) bits[head * 64] += 1, bits[head * 64 + 9] -= 1;
    const kvq_account mixed = account_of(name, layers, 32768, bits);
    near_figure(mixed.effective_bits_k, k + 3 * 0.125, 4, name);
    near_figure(mixed.effective_bits_v, v, 3, name);
    auto missing = sized<kvq_account>();
    refused(kvq_recipe_account(name, layers.data(), 1, 32768, nullptr, &missing), KVQ_E_STATE);
  }
  for (const auto &[name, k, v] : {std::tuple{"blockgtq-k3v3-fast", 3.0, 3.0641}, {"blockgtq-k2v2-fast", 2.0, 2.0642}}) {
    Bytes bits(8 * 64, uint8_t(k));
    for (size_t i = 0; i < bits.size(); i += 64)
      for (size_t j = 0; j < 4; ++j) bits[i + j] += 1, bits[i + 8 + j] -= 1;
    const kvq_account got = account_of(name, layers, 32772, bits);
    near_figure(got.effective_bits_k, (64 + 32704 * (k + 3 / 16.0)) / 32708, 6, name);
    near_figure(got.effective_bits_v, v, 4, name);
  }
  CHECK(16 / account_of("semkv", layers, 32768).effective_bits == Catch::Approx(6.04).margin(0.005));
  CHECK(16 / account_of("semkv-tq-2", layers, 32768).effective_bits == Catch::Approx(7.9).margin(0.05));
}

TEST_CASE("chanmix costs what its profile says, pmkvq what its budgets leave") {
  const std::vector<kvq_layer> layers(32, layer_of(8, 4, 128));
  Bytes bits;
  for (int head = 0; head < 32 * 8; ++head)  // floor(256 / 10) = 25 heads at 4 bits; in the others quarters of 3 and 1 bits
    for (int c = 0; c < 128; ++c) bits.push_back(uint8_t(head < 25 ? 4 : c < 32 ? 3
                                                                     : c < 64   ? 1
                                                                                : 2));
  near_figure(account_of("chanmix", layers, 32768, bits).effective_bits_k, 2.3203, 4, "chanmix");

  const std::vector<kvq_layer> one = {layer_of(2, 2, 64), layer_of(1, 1, 128, 32)};
  const auto bytes = [&](size_t layer, uint64_t tokens, uint64_t width) {  // K and V, all heads; affine rows with one s and z
    const uint64_t channels = one[layer].dim_k + dim_v(one[layer]);
    return one[layer].kv_heads * tokens * (width == 16 ? 2 * channels : channels * width / 8 + 2 * 4);
  };
  for (uint64_t tokens : {1, 64, 128, 200, 640}) {
    const uint64_t packed = tokens / 64 * 64;
    for (const auto &[first, second] : {std::pair{16, 8}, {8, 4}, {4, 2}, {2, 16}}) {
      std::vector<uint64_t> budgets = {bytes(0, packed, uint64_t(first)), bytes(1, packed, uint64_t(second))};
      auto data = sized<kvq_recipe_data>();
      data.budgets = budgets.data(), data.n_budgets = 2;
      auto got = sized<kvq_account>();
      ok(kvq_recipe_account("pmkvq", one.data(), 2, tokens, &data, &got));
      REQUIRE(got.wire_bytes == budgets[0] + budgets[1]);  // just fits
      Mirror m(Setup{.recipe = "pmkvq", .layers = one, .recipe_data = &data});
      const kvq_seq s = m.create();
      m.commit(s, ids(0, tokens));
      uint64_t exported = 0;
      for (uint32_t layer = 0; layer < 2; ++layer)
        for (uint32_t head = 0; head < one[layer].kv_heads; ++head)
          for (uint32_t tensor : {KVQ_TENSOR_K, KVQ_TENSOR_V})
            for (const WireBlock &block : export_wire(m.cache, s, layer, head, tensor)) exported += block.bytes.size();
      REQUIRE(exported == got.wire_bytes);
      m.check(s);
      m.query(s, 1);
      for (uint64_t &budget : budgets) budget = packed ? budget - 1 : 0;  // does not fit: one width less
      ok(kvq_recipe_account("pmkvq", one.data(), 2, tokens, &data, &got));
      const auto next = [](int width) { return uint64_t(width == 2 ? 2 : width / 2); };
      REQUIRE(got.wire_bytes == bytes(0, packed, next(first)) + bytes(1, packed, next(second)));
    }
  }
}

TEST_CASE("a shrunk layer holds what the chain of codes says, and never grows back") {  // V36
  const std::vector<kvq_layer> layers = {layer_of(2, 2, 64)};
  const uint64_t budget = 2 * 128 * (64 / 2 + 4) * 2;  // 128 tokens at 4 bits
  auto data = sized<kvq_recipe_data>();
  data.budgets = &budget, data.n_budgets = 1;
  Mirror m(Setup{.recipe = "pmkvq", .layers = layers, .recipe_data = &data});
  const kvq_seq s = m.create();
  m.commit(s, ids(0, 64));
  const auto blocks_at = [&] { return export_wire(m.cache, s, 0, 1, KVQ_TENSOR_V); };
  REQUIRE(blocks_at()[0].bytes.size() == 64 * (64 + 4));  // 8 bits
  const Bytes eight = blocks_at()[0].bytes;
  m.append(s, ids(64, 64), 9);
  REQUIRE(blocks_at()[0].bytes.size() == 64 * (32 + 4));
  const Bytes four = blocks_at()[0].bytes;
  for (size_t i = 0; i < 64 * 64; ++i) REQUIRE((four[i / 2] >> (i % 2 * 4) & 15) == (2 * eight[i] + 17) / 34);
  const auto half = [](const Bytes &bytes, size_t at) { return uint16_t(bytes[at] | bytes[at + 1] << 8); };
  for (size_t t = 0; t < 64; ++t) {
    REQUIRE(half(four, 64 * 32 + 4 * t) == half_bits(17 * half_value(half(eight, 64 * 64 + 4 * t))));
    REQUIRE(half(four, 64 * 32 + 4 * t + 2) == half(eight, 64 * 64 + 4 * t + 2));
  }
  m.append(s, ids(128, 64), 10);
  const Bytes two = blocks_at()[0].bytes;
  REQUIRE(two.size() == 64 * (16 + 4));
  for (size_t i = 0; i < 64 * 64; ++i) REQUIRE((two[i / 4] >> (i % 4 * 2) & 3) == (2 * (four[i / 2] >> (i % 2 * 4) & 15) + 5) / 10);
  m.truncate(s, 64);
  REQUIRE(blocks_at()[0].bytes == two);
  const kvq_seq child = m.fork(s);
  m.append(child, ids(300, 64));
  REQUIRE(export_wire(m.cache, child, 0, 1, KVQ_TENSOR_V)[1].bytes.size() == 64 * (16 + 4));
  m.check(s), m.check(child);
  m.query({s, child}, {2, 2});
}

TEST_CASE("accounting agrees with the format's arithmetic and with the exported bytes, at every length") {  // A1
  const std::vector<kvq_layer> layers = {layer_of(2, 2, 128)};
  for (const Cost &cost : kCosts) {
    const Rule &rule = find_preset(cost.preset)->rule;
    for (uint64_t tokens : {0, 1, 31, 32, 33, 128, 160, 330, 420}) {
      INFO(cost.preset << ", " << tokens << " tokens");
      const kvq_account got = account_of(cost.preset, layers, tokens);
      const uint64_t behind = tokens - std::min(tokens, rule.sinks);
      const uint64_t packed = behind < rule.recent ? 0 : (behind - rule.recent) / rule.block * rule.block;
      const uint64_t sinks = std::min(tokens, rule.sinks), tail = behind - packed;
      REQUIRE((got.sink_tokens == sinks && got.packed_tokens == packed && got.tail_tokens == tail));
      REQUIRE(got.wire_bytes == 2 * (sinks * 2 * D * 2 + cost.k(packed) + cost.v(packed)));
      REQUIRE(got.tail_bytes == 2 * tail * 2 * D * 2);
      REQUIRE(got.fp16_bytes == 2 * tokens * 2 * D * 2);
      if (tokens == 0) continue;
      Mirror m(Setup{.recipe = cost.preset, .layers = layers});
      const kvq_seq s = m.create();
      m.commit(s, ids(0, tokens));
      for (uint32_t head = 0; head < 2; ++head)
        for (uint32_t tensor : {KVQ_TENSOR_K, KVQ_TENSOR_V}) {
          const auto blocks = export_wire(m.cache, s, 0, head, tensor);
          REQUIRE(blocks.size() == packed / rule.block);
          for (const WireBlock &block : blocks) {
            REQUIRE(block.tokens == rule.block);
            REQUIRE(block.bytes.size() == (tensor == KVQ_TENSOR_K ? cost.k : cost.v)(rule.block));
          }
        }
    }
  }
}

TEST_CASE("the account of Block-GTQ and SemKV is the exported wire") {  // A1, A8, A12
  const std::vector<kvq_layer> layers = {layer_of(2, 2, 128)};
  Mirror m(Setup{.recipe = "blockgtq-k3v3;block=330", .layers = layers});
  const kvq_seq s = m.create();
  m.commit(s, ids(0, 330));
  Bytes bits;
  for (uint32_t head = 0; head < 2; ++head) {  // the same decision, stateless
    const auto one_head = [&](Text::Kind kind, size_t per_kv) {
      const Floats all = m.text.rows(0, kind, ids(0, 330));
      Floats some;
      for (size_t t = 0; t < 330; ++t)
        some.insert(some.end(), all.begin() + long((t * 2 + head) * per_kv * D), all.begin() + long((t * 2 + head + 1) * per_kv * D));
      return Tensor(some, per_kv, D);
    };
    const Tensor k = one_head(Text::K, 1), q = one_head(Text::Q, 2);
    auto policy = sized<kvq_policy>();
    policy.text = "blockgtq(avg=3)";
    policy.q_heads = 2, policy.dim = D, policy.n_tokens = 330, policy.k = k.view(), policy.q = q.view();
    Bytes list(64);
    ok(kvq_policy_decide(&policy, list.data(), list.size(), nullptr));
    bits.insert(bits.end(), list.begin(), list.end());
  }
  uint64_t exported = 0;
  for (uint32_t head = 0; head < 2; ++head) {
    const auto keys = export_wire(m.cache, s, 0, head, KVQ_TENSOR_K), values = export_wire(m.cache, s, 0, head, KVQ_TENSOR_V);
    REQUIRE((keys.size() == 1 && values.size() == 1));
    uint64_t want = 0;
    for (uint8_t width = 1; width <= 8; ++width)
      if (const uint64_t pairs = uint64_t(std::count(bits.begin() + head * 64, bits.begin() + head * 64 + 64, width)))
        want += stream_bytes(1u << width, 330 * pairs * 2) + 330 * 2;
    REQUIRE(keys[0].bytes.size() == want);
    exported += keys[0].bytes.size() + values[0].bytes.size();
  }
  REQUIRE(account_of("blockgtq-k3v3;block=330", layers, 330, bits).wire_bytes == exported);

  for (const char *recipe : {"semkv", "semkv-tq", "semkv-tq-2"})
    for (uint64_t tokens : {1, 3, 64, 333}) {
      INFO(recipe << " " << tokens);
      Mirror sem(Setup{.recipe = recipe, .layers = layers});
      const kvq_seq q = sem.create();
      sem.commit(q, ids(0, tokens));
      const std::string_view name = recipe;
      const uint32_t high = name == "semkv-tq-2" ? 4 : 6, low = high - 1, parameters = name == "semkv" ? 4 : 2;
      const uint64_t n_high = name == "semkv-tq-2" ? tokens * 3 / 4 : tokens / 4, n_low = tokens - n_high;
      const uint64_t flags = (tokens + 7) / 8, bytes = rows(n_high, high, parameters) + rows(n_low, low, parameters);
      const kvq_account got = account_of(recipe, layers, tokens);
      REQUIRE(got.wire_bytes == 4 * bytes);
      REQUIRE(got.metadata_bytes == flags);
      for (uint32_t tensor : {KVQ_TENSOR_K, KVQ_TENSOR_V})
        REQUIRE(export_wire(sem.cache, q, 0, 1, tensor)[0].bytes.size() == bytes + flags);
    }
}

TEST_CASE("metadata is counted apart, and before any token") {
  const std::vector<kvq_layer> layers = {layer_of(2, 2, 128), layer_of(2, 2, 64)};
  for (uint64_t tokens : {0, 500}) {
    CHECK(account_of("pnmix", layers, tokens).metadata_bytes == 2 * (64 + 32) / 8);        // a bit a pair
    CHECK(account_of("kvq-3", layers, tokens).metadata_bytes == 2 * (64 + 32));            // a byte a pair
    CHECK(account_of("tq-3c", layers, tokens).metadata_bytes == 2 * 2 * (128 + 64));       // fp16 a channel of K
    CHECK(account_of("tq-split", layers, tokens).metadata_bytes == 2 * 2 * (128 + 64) / 8);  // a bit a channel, K and V
    CHECK(account_of("tq-3", layers, tokens).metadata_bytes == 0);
  }
}

TEST_CASE("bytes_used is what the allocator handed out, and everything comes back") {  // A2, A3
  for (const char *recipe : {kK4V4, "kvq-2", "semkv-tq", "blockgtq-k3v2", "tq-2c"}) {
    CountingAllocator memory;
    const kvq_allocator callbacks = memory.callbacks();
    {
      const Setup setup{.recipe = recipe, .layers = {layer_of(2, 2, 64), layer_of(2, 2, 64)}, .allocator = &callbacks};
      Mirror m(setup);
      const auto exact = [&] {
        if (on_device())  // whose memory counts too, though the allocator has not given it
          REQUIRE(stats(m.cache).bytes_used > memory.bytes);
        else
          REQUIRE(stats(m.cache).bytes_used == memory.bytes);
        REQUIRE(stats(m.cache).bytes_peak >= memory.bytes);
      };
      exact();
      const uint64_t empty = memory.bytes;
      const kvq_seq s = m.create();
      m.commit(s, ids(0, 1));
      exact();
      REQUIRE(memory.bytes > empty);
      m.append(s, ids(1, 900), 61);
      exact();
      const kvq_seq child = m.fork(s);
      m.append(child, ids(1000, 77));
      m.truncate(s, 100);
      exact();
      m.remove(s), m.remove(child);
      exact();
      const uint64_t once = memory.bytes;
      for (uint32_t round = 0; round < 1000 / kSlow; ++round) {
        const kvq_seq again = m.create();
        m.commit(again, ids(0, 20));
        m.append(again, ids(20, 50));
        m.remove(again);
      }
      exact();
      REQUIRE((memory.bytes <= once || unchanged_bytes(memory.bytes, once)));
      REQUIRE((stats(m.cache).pages_raw == 0 && stats(m.cache).pages_packed == 0));
      REQUIRE((stats(m.cache).page_bytes_raw == 0 && stats(m.cache).page_bytes_packed == 0));
      m.create();  // left for destroy
      m.step({m.create()}, {ids(0, 9)});
    }
    REQUIRE((memory.bytes == 0 && memory.mistakes == 0));
  }
}

TEST_CASE("the cache holds little more than its wire bytes") {  // A1, A2, A6, A11
  for (const Cost &cost : kCosts) {
    if (kSlow > 1 && cost.preset[0] != 'k') continue;
    INFO(cost.preset);
    Mirror m(Setup{.recipe = cost.preset, .layers = {layer_of(4, 1, 128)}});
    const uint64_t tokens = 4096 + 64;
    Ids list(tokens - 64);
    for (size_t i = 0; i < list.size(); ++i) list[i] = uint32_t(i % 200);
    const auto fill = [&] {
      const kvq_seq s = m.create();
      m.commit(s, ids(0, 64));
      m.append(s, list, 512);
      return s;
    };
    if (on_device()) m.remove(fill());  // a device keeps the tables and the scratch of the widest step
    const uint64_t before = stats(m.cache).bytes_used;
    fill();
    const kvq_account account = account_of(cost.preset, m.setup.layers, tokens);
    const double wire = double(account.wire_bytes + account.tail_bytes), used = double(stats(m.cache).bytes_used - before);
    const double raw_page = 128 * 4 * 2 * 128 * 2.0;  // at most: 128 tokens of 4 heads, K and V
    CHECK(used <= wire * 1.06 + 3 * raw_page + 65536);
    CHECK(double(stats(m.cache).page_bytes_packed) <= 1.06 * double(account.wire_bytes) + raw_page);
    CHECK(used >= wire * 0.98);
  }
}

TEST_CASE("max_bytes refuses with FULL and leaves everything as it was") {
  const Setup free{.recipe = "kvq-3;sinks=4", .layers = {layer_of(2, 2, 64), layer_of(2, 2, 64)}};
  uint64_t need = 0;
  {
    Mirror m(free);
    const kvq_seq s = m.create();
    m.commit(s, ids(0, 600));
    need = stats(m.cache).bytes_used;
  }
  Setup tight = free;
  tight.max_bytes = need + need / 2;  // with the workspace that waits for the next step
  Mirror m(tight);
  const kvq_seq s = m.create();
  m.commit(s, ids(0, 200));
  uint32_t next = 200;
  int32_t status = KVQ_OK;
  while (status == KVQ_OK && next < 100000) {
    const bool room = stats(m.cache).bytes_used + 16384 <= tight.max_bytes;  // for a picture and a query, which take some on a device
    REQUIRE((room || on_device()));
    const auto picture = room ? m.picture(s) : decltype(m.picture(s)){};
    const Seen seen = room ? m.query(s, 1, {.check = false}) : Seen{};
    const uint64_t used = stats(m.cache).bytes_used;  // with what a device keeps of the pages since that query
    const Ids list = ids(next % 2000, 50);
    const uint32_t count = 50;
    kvq_step step = 0;
    status = kvq_step_begin(m.cache, &s, &count, 1, 0, &step);
    if (status == KVQ_OK) {
      for (uint32_t layer = 0; layer < 2; ++layer) {
        const Tensor k = m.tensor(layer, Text::K, list), v = m.tensor(layer, Text::V, list);
        status = kvq_append(m.cache, step, layer, k.view(), v.view(), nullptr, nullptr);
        if (!on_device()) ok(status);  // there host tensors take room on their way
        if (status != KVQ_OK) break;
      }
      if (status == KVQ_OK) status = kvq_step_end(m.cache, step, nullptr, nullptr);
      if (status != KVQ_OK) {
        const std::string sentence = detail();
        REQUIRE(sentence.find(std::to_string(tight.max_bytes)) != std::string::npos);
        ok(kvq_step_abort(m.cache, step));  // it was not over
      } else {
        m.appended(s, list);
        next += count;
      }
    }
    if (status != KVQ_OK) {
      refused(status, KVQ_E_FULL);
      if (room) {
        REQUIRE((m.picture(s) == picture));
        REQUIRE(same_bits(m.query(s, 1), seen));
      }
      REQUIRE(stats(m.cache).bytes_used == used);
    }
    REQUIRE(stats(m.cache).bytes_peak <= tight.max_bytes);
  }
  REQUIRE(next > 600);
  REQUIRE(next < 100000);
  REQUIRE(status == KVQ_E_FULL);
  m.truncate(s, 100);
  m.append(s, ids(0, 60));
  m.check(s);
  Setup tiny = free;
  tiny.max_bytes = 64;
  const kvq_config config = config_of(tiny);
  kvq_cache *cache = nullptr;
  refused(kvq_create(&config, &cache), KVQ_E_FULL);
}

TEST_CASE("a fork costs no copy of the packed tokens") {  // A10
  Mirror m(Setup{.recipe = kK4V4, .layers = {layer_of(2, 2, 64)}});
  const kvq_seq s = m.create();
  m.commit(s, ids(0, 100));
  uint64_t first = 0;
  for (uint32_t tokens : {500u, 10000u}) {
    Ids list(tokens - m.total(s));
    for (size_t i = 0; i < list.size(); ++i) list[i] = uint32_t(i % 300);
    m.append(s, list, 1000);
    const uint64_t before = stats(m.cache).bytes_used;
    const kvq_seq child = m.fork(s);
    const uint64_t grown = stats(m.cache).bytes_used - before;
    m.remove(child);
    if (first == 0)
      first = grown;
    else
      REQUIRE(grown <= first + 128 * 2 * 2 * 64 * 2 + 24 * tokens / 64);  // one raw page, and its list of pages
  }
}

TEST_CASE("appending and attending allocate nothing") {  // X16
  for (const char *recipe : {kK4V4, "kvq-3", "semkv-tq", "blockgtq-k3v3-fast", "polar-2"}) {
    CountingAllocator memory;
    const kvq_allocator callbacks = memory.callbacks();
    Mirror m(Setup{.recipe = recipe, .layers = {layer_of(2, 2, 64), layer_of(2, 2, 64)}, .n_threads = 1, .allocator = &callbacks});
    const kvq_seq seqs[2] = {m.create(), m.create()};
    m.commit(seqs[0], ids(0, 700)), m.commit(seqs[1], ids(0, 5));
    const uint32_t counts[2] = {3, 1};
    const Tensor k = m.tensor(0, Text::K, ids(0, 4)), v = m.tensor(0, Text::V, ids(0, 4)), q = m.tensor(0, Text::Q, ids(0, 4));
    Tensor out(4, 4, 64, KVQ_DTYPE_F32, Lay::packed);
    for (int round = 0; round < 50; ++round) {
      kvq_step step = 0;
      ok(kvq_step_begin(m.cache, seqs, counts, 2, 0, &step));
      const uint64_t before = memory.allocations;
      memory.remaining = on_device() ? INT64_MAX : 0;  // host tensors are staged there; device_calls has the others
      for (uint32_t layer = 0; layer < 2; ++layer) {
        ok(kvq_append(m.cache, step, layer, k.view(), v.view(), m.preset.needs_queries ? q.view() : nullptr, nullptr));
        for (int i = 0; i < 10; ++i) ok(kvq_attend(m.cache, step, layer, q.view(), out.view(), nullptr, nullptr, nullptr));
      }
      memory.remaining = INT64_MAX;
      REQUIRE((memory.allocations == before || on_device()));
      ok(kvq_step_abort(m.cache, step));
    }
  }
}

TEST_CASE("what attention needs does not grow with the length, and is what the counters say") {  // A4
  for (uint32_t queries : {1u, 64u}) {
    uint64_t first = 0;
    for (uint32_t tokens : {500u, 8000u}) {
      CountingAllocator memory;
      const kvq_allocator callbacks = memory.callbacks();
      Mirror m(Setup{.recipe = "kvq-3", .layers = {layer_of(2, 2, 64)}, .allocator = &callbacks});
      const kvq_seq s = m.create();
      m.commit(s, ids(0, 500));
      for (uint32_t at = 500; at < tokens; at += 500) m.append(s, ids(0, 500));
      const uint64_t before = memory.bytes, workspace = stats(m.cache).workspace_bytes;
      kvq_step step = 0;
      ok(kvq_step_begin(m.cache, &s, &queries, 1, KVQ_STEP_QUERY_ONLY, &step));
      const uint64_t taken = memory.bytes - before;
      ok(kvq_step_abort(m.cache, step));
      REQUIRE(unchanged_bytes(memory.bytes, before));
      REQUIRE(workspace > 0);
      if (on_device()) continue;  // a step has tables of its pages there
      REQUIRE(taken <= workspace + 16384);
      if (first == 0) first = taken;
      REQUIRE(taken == first);
    }
  }
}
