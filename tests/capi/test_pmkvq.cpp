// PM-KVQ: the packed tokens of a layer go to a narrower width when they outgrow its budget, and never back.
#include <functional>

#include "allocator.hpp"
#include "wire.hpp"

using namespace kvq_test;

namespace {

constexpr uint32_t kHeads = 2, kDimK = 16, kDimV = 8;
const std::string kRecipe = "k=progressive(bits=16);v=progressive(bits=16);block=8;sinks=2;policy=pmkvq";
constexpr uint32_t kWidths[] = {16, 8, 4, 2};

// Wire bytes of n tokens of a layer: codes of K and V, and from 8 bits down a scale and a zero per row.
uint64_t layer_bytes(uint64_t n, uint32_t width) {
  const uint64_t rows = n * (kDimK + kDimV) * width / 8;
  return kHeads * (width == 16 ? rows : rows + n * 2 * 4);
}

struct Budgets {
  std::vector<uint64_t> bytes;
  kvq_recipe_data data = sized<kvq_recipe_data>();
  explicit Budgets(std::vector<uint64_t> b) : bytes(std::move(b)) { data.budgets = bytes.data(), data.n_budgets = bytes.size(); }
};

Setup setup_of(const Budgets &budgets, const kvq_allocator *allocator = nullptr) {
  return {.recipe = kRecipe,
          .layers = std::vector<kvq_layer>(budgets.bytes.size(), layer_of(kHeads, 2, kDimK, kDimV)),
          .allocator = allocator,
          .recipe_data = &budgets.data};
}

// Every block of every head is that of the chain at the layer's width.
void check_widths(Mirror &m, kvq_seq s, const std::vector<uint32_t> &widths, const std::source_location where = std::source_location::current()) {
  const Shadow &shadow = m.shadow(s);
  for (uint32_t layer = 0; layer < widths.size(); ++layer)
    for (uint32_t head = 0; head < kHeads; ++head)
      for (uint32_t tensor : {KVQ_TENSOR_K, KVQ_TENSOR_V}) {
        INFO("line " << where.line() << ", layer " << layer << ", width " << widths[layer]);
        const auto blocks = export_wire(m.cache, s, layer, head, tensor);
        REQUIRE(blocks.size() == shadow.blocks.size());
        size_t first = shadow.sinks;
        for (size_t b = 0; b < blocks.size(); first += shadow.blocks[b++])
          REQUIRE(blocks[b].bytes == encoded(m, layer, head, tensor, "progressive(bits=" + std::to_string(widths[layer]) + ")",
                                             part(shadow.tokens, first, first + shadow.blocks[b])));
      }
}

uint32_t widest(uint64_t tokens, uint64_t budget, uint32_t now) {
  for (uint32_t width : kWidths)
    if (width <= now && layer_bytes(tokens, width) <= budget) return width;
  return 2;
}

}  // namespace

TEST_CASE("a layer has the widest width at which its packed tokens fit, at every length") {
  const Budgets budgets({layer_bytes(24, 16), layer_bytes(40, 8), layer_bytes(200, 4) - 1, 0});
  Mirror m(setup_of(budgets));
  const kvq_seq s = m.create();
  std::vector<uint32_t> widths(4, 16);
  m.commit(s, ids(0, 11), 3);
  for (uint32_t next = 11; next < 230; next += 3) {
    for (size_t l = 0; l < 4; ++l) widths[l] = widest(m.shadow(s).packed(), budgets.bytes[l], widths[l]);
    if (next % 4 == 3) {
      check_widths(m, s, widths);
      m.query(s, 2);
    }
    m.step({s}, {ids(next, 3)});
  }
  REQUIRE((widths == std::vector<uint32_t>{2, 2, 2, 2}));
}

TEST_CASE("a long prompt is packed at its final width at once, whatever its pieces") {
  const Budgets budgets({layer_bytes(100, 4), layer_bytes(100, 8)});
  Mirror m(setup_of(budgets));
  const kvq_seq whole = m.create(), cut = m.create();
  m.commit(whole, ids(0, 99));
  m.commit(cut, ids(0, 99), 7);
  check_widths(m, whole, {4, 8});
  REQUIRE((m.picture(whole) == m.picture(cut)));
}

TEST_CASE("a later prompt may narrow its layers one by one") {
  const Budgets budgets({layer_bytes(48, 16), layer_bytes(48, 8), layer_bytes(1000, 16)});
  for (const bool shared : {false, true}) {
    Mirror m(setup_of(budgets));
    const kvq_seq s = m.create();
    m.commit(s, ids(0, 47));  // 40 packed
    check_widths(m, s, {16, 8, 16});
    const kvq_seq child = shared ? m.fork(s) : 0;
    for (const uint32_t layer : {2, 1, 0}) ok(m.prefill(s, layer, ids(47, 40), KVQ_PREFILL_FINAL, false));
    m.appended(s, ids(47, 40));
    check_widths(m, s, {4, 2, 16});
    m.query(s, 5);
    if (shared) check_widths(m, child, {16, 8, 16});
  }
}

TEST_CASE("narrowing gives memory back") {
  const Budgets budgets({layer_bytes(512, 16)});
  Mirror m(setup_of(budgets));
  const kvq_seq s = m.create();
  m.commit(s, ids(0, 514));
  const kvq_stats before = stats(m.cache);
  m.append(s, ids(514, 8));
  check_widths(m, s, {8});
  const kvq_stats after = stats(m.cache);
  REQUIRE(after.pages_packed == before.pages_packed + 1);
  REQUIRE(after.page_bytes_packed < before.page_bytes_packed);
  REQUIRE(after.bytes_used < before.bytes_used);
}

TEST_CASE("forks keep their width: what one narrows, the other does not see") {
  const Budgets budgets({layer_bytes(64, 16), layer_bytes(64, 8)});
  Mirror m(setup_of(budgets));
  const kvq_seq s = m.create();
  m.commit(s, ids(0, 66));
  check_widths(m, s, {16, 8});
  const kvq_seq twin = m.fork(s), early = m.fork(s, 30);
  const auto before = m.picture(twin);
  m.append(s, ids(66, 8));
  check_widths(m, s, {8, 4});
  REQUIRE((m.picture(twin) == before));
  check_widths(m, early, {16, 8});
  const kvq_seq child = m.fork(s, 20);
  m.append(child, ids(300, 20), 4);
  check_widths(m, child, {8, 4});  // of a parent that had narrowed
  m.append(early, ids(400, 20), 4);
  check_widths(m, early, {16, 8});
  m.step({s, twin, early, child}, {ids(500, 2), ids(510, 8), ids(520, 1), ids(530, 3)});
  check_widths(m, twin, {8, 4});
  m.remove(s);
  m.query({twin, early, child}, {1, 2, 3});
}

TEST_CASE("a narrowed sequence stays narrow after truncation") {
  const Budgets budgets({layer_bytes(40, 16)});
  Mirror m(setup_of(budgets));
  const kvq_seq s = m.create();
  m.commit(s, ids(0, 50));
  check_widths(m, s, {8});
  m.truncate(s, 21);  // within a block
  check_widths(m, s, {8});
  m.append(s, ids(100, 8));
  REQUIRE(m.shadow(s).packed() == 27);
  check_widths(m, s, {8});
  m.append(s, ids(200, 80), 9);
  check_widths(m, s, {2});
  m.truncate(s, 0);
  m.append(s, ids(300, 12));
  check_widths(m, s, {2});
  m.query(s, 3);
}

TEST_CASE("narrowing without memory leaves all as it was, for every allocation that may fail") {
  for (const bool shared : {false, true}) {
    CountingAllocator memory;
    const kvq_allocator callbacks = memory.callbacks();
    {
      const Budgets budgets({layer_bytes(72, 16), layer_bytes(72, 4)});
      Mirror m(setup_of(budgets, &callbacks));
      const kvq_seq s = m.create();
      m.commit(s, ids(0, 81));
      const kvq_seq child = shared ? m.fork(s) : 0;
      check_widths(m, s, {16, 4});
      const auto picture = m.picture(s);
      const uint32_t one = 1;
      kvq_step step = 0;
      ok(kvq_step_begin(m.cache, &s, &one, 1, 0, &step));
      for (uint32_t layer : {0, 1}) {
        const Tensor k = m.tensor(layer, Text::K, ids(81, 1)), v = m.tensor(layer, Text::V, ids(81, 1));
        ok(kvq_append(m.cache, step, layer, k.view(), v.view(), nullptr, nullptr));
      }
      int64_t room = 0;
      for (int32_t status = KVQ_E_NOMEM; status != KVQ_OK; ++room) {
        REQUIRE(room < 2000);
        const uint64_t bytes = memory.bytes;
        memory.remaining = room;
        status = kvq_step_end(m.cache, step, nullptr, nullptr);
        memory.remaining = INT64_MAX;
        if (status == KVQ_OK) break;
        refused(status, KVQ_E_NOMEM);
        REQUIRE(unchanged_bytes(memory.bytes, bytes));
        REQUIRE((m.picture(s) == picture));
      }
      REQUIRE(room > 4);
      m.appended(s, ids(81, 1));
      REQUIRE(m.shadow(s).packed() == 80);
      check_widths(m, s, {8, 2});
      m.query(s, 2);
      if (shared) check_widths(m, child, {16, 4});
    }
    REQUIRE((memory.bytes == 0 && memory.mistakes == 0));
  }
}

TEST_CASE("a policy blob of a pmkvq cache says nothing, and takes nothing away") {
  const Budgets budgets({layer_bytes(16, 8)});
  Mirror m(setup_of(budgets));
  const kvq_seq s = m.create();
  m.commit(s, ids(0, 40));
  check_widths(m, s, {2});
  const Bytes blob = policy_blob(m.cache, s);
  const kvq_seq t = m.create();
  ok(kvq_policy_set(m.cache, t, blob.data(), blob.size()));
  m.commit(t, ids(0, 20));
  check_widths(m, t, {8});
}
