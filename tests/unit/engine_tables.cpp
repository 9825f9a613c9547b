// What the engine tells a backend that keeps lists of pages from step to step (PageTable): whatever it does not call changed is as it
// was, and it does not call everything changed.
#include "engine_kit.hpp"

using namespace kvq_test;

namespace {

// A packed page as a device would remember it.
struct Known {
  const void *page;
  uint32_t count;
  uint64_t position;
  std::vector<uint32_t> positions;
  bool operator==(const Known &) const = default;
};

struct KnownPages final : kvq::PageTable {
  std::vector<Known> pages[NumberCache::kLayers][2];
};

// Plans steps, and compares what it remembers of packed pages with what is there.
class PlanningBackend final : public NumberBackend {
 public:
  using NumberBackend::NumberBackend;
  static std::shared_ptr<kvq::Backend> make(kvq::Memory *memory, uint32_t, const char *) { return kvq::make_shared_in<PlanningBackend>(memory, memory); }

  bool plans_steps() const override { return true; }
  Status plan_step(const kvq::StepSource &source, std::span<const kvq::LayerShape> shapes, kvq::Workspace *) override {
    rows_.assign(shapes.size(), {});
    for (size_t s = 0; s < source.sequences(); s++) {
      std::shared_ptr<kvq::PageTable> &slot = source.table(s);
      if (!slot) slot = std::make_shared<KnownPages>();
      for (uint32_t l = 0; l < shapes.size(); l++) {
        look(source.pages(s, l), l, static_cast<KnownPages *>(slot.get()));
        for (uint32_t t = 0; t < source.tokens(s) && source.stores(l); t++) rows_[l].push_back(source.row(s, l, t));
      }
      slot->same[0] = slot->same[1] = SIZE_MAX;
    }
    return KVQ_OK;
  }
  Status append(uint32_t layer, const kvq::LayerShape &shape, const kvq_tensor &k, const kvq_tensor &v, kvq::Workspace *) override {
    uint64_t saturated = 0;
    for (size_t t = 0; t < rows_[layer].size(); t++) KVQ_TRY(store_rows(shape, k, v, t, rows_[layer][t], &saturated));
    return KVQ_OK;
  }

  uint64_t looked = 0, remembered = 0;  // at packed pages; of them, without a change

 private:
  void look(const kvq::PageList &list, uint32_t layer, KnownPages *known) {
    for (uint32_t c = 0; c < 2; c++) {
      std::vector<Known> now;
      for (size_t i = 0; i < list.packed[c]; i++) {
        const kvq::PageView view = list.get(list.self, layer, list.front + (c ? list.packed[0] : 0) + i);
        if (!view.format) sound = false;
        now.push_back({view.page, view.count, view.position, {}});
        if (view.positions) now.back().positions.assign(view.positions, view.positions + view.count);
      }
      std::vector<Known> &before = known->pages[layer][c];
      const size_t same = std::min(before.size(), known->same[c]);
      if (same > now.size() || !std::equal(before.begin(), before.begin() + ptrdiff_t(same), now.begin())) sound = false;
      looked += now.size(), remembered += same;
      before = std::move(now);
    }
    for (size_t i = 0; i < list.count; i++) {
      const bool packed = i >= list.front && i < list.front + list.packed[0] + list.packed[1];
      if ((list.get(list.self, layer, i).format != nullptr) != packed) sound = false;
    }
  }
  std::vector<std::vector<PageRows>> rows_;  // of the step's tokens, by layer
};

const char *const kRecipes[] = {
    "k=lloyd(levels=4);v=lloyd(levels=4);block=8;sinks=3;recent=5", "k=affine-channel(levels=4,group=16);v=lloyd(levels=4);block=48",
    "k=lloyd(levels=4);v=lloyd(levels=4);block=100", "policy=semkv(r=1/4,low=lloyd(levels=5),high=lloyd(levels=6));block=16;sinks=4"};

}  // namespace

TEST_CASE("packed pages that are not called changed are what they were") {
  INFO("seed " << seed());
  Random random(91);
  for (const char *recipe : kRecipes) {
    INFO(recipe);
    NumberCache cache(recipe, 0, {}, nullptr, PlanningBackend::make);
    PlanningBackend &backend = static_cast<PlanningBackend &>(cache.backend());
    std::vector<uint64_t> ids = {cache.create()};
    uint32_t next = 1;
    const auto tokens = [&](uint64_t most) {
      const std::vector<uint32_t> made = tokens_from(next, 1 + random.below(most));
      next += uint32_t(made.size());
      return made;
    };
    for (int round = 0; round < 600; round++) {
      const size_t pick = random.below(ids.size());
      const uint64_t id = ids[pick], length = cache.lengths(id).total;
      switch (random.below(10)) {
        case 0:
          if (ids.size() < 5) ids.push_back(cache.create());
          break;
        case 1: {
          const std::vector<uint32_t> made = tokens(200);
          for (uint32_t l = 0; l < NumberCache::kLayers; l++) {
            REQUIRE(cache.chunk(id, l, made, true) == KVQ_OK);
            if (length > 0) cache.numbers(id, 0);  // between the layers of a prompt
          }
          break;
        }
        case 2: {
          uint64_t child;
          if (ids.size() >= 5) break;
          REQUIRE(cache->fork(*cache.use(id), random.below(length + 1), &child) == KVQ_OK);
          ids.push_back(child);
          break;
        }
        case 3:
          REQUIRE(cache->truncate(*cache.use(id), length - random.below(std::min<uint64_t>(length, 90) + 1)) == KVQ_OK);
          break;
        case 4: {
          auto use = cache.use(id);
          if (use->committed) REQUIRE(cache->end_turn(*use) == KVQ_OK);
          break;
        }
        default: {
          const std::vector<uint32_t> made = tokens(random.below(5) ? 4 : 150);
          REQUIRE(cache.append(id, made, uint32_t(random.below(3) ? made.size() : random.below(made.size() + 1))) == KVQ_OK);
        }
      }
      REQUIRE(backend.sound);
    }
    CHECK(backend.remembered > backend.looked * 8 / 10);
  }
}
