// Ids: stale ones are refused, those in use by another thread are busy, slots are used again under new ids.
#include <catch2/catch_test_macros.hpp>
#include <memory_resource>
#include <set>
#include <thread>

#include "engine/table.h"

using kvq::Table;

namespace {
struct Thing {
  int value = 0;
};
}  // namespace

TEST_CASE("an id is stale after its object has gone, also when the slot is used again") {
  Table<Thing> table("thing", 2, std::pmr::get_default_resource());
  Thing a, b, c, d;
  uint64_t id_a = 0, id_b = 0, id_c = 0, id_d = 0;
  REQUIRE(table.insert(&a, "limit", &id_a) == KVQ_OK);
  REQUIRE(table.insert(&b, "limit", &id_b) == KVQ_OK);
  REQUIRE(table.insert(&c, "limit", &id_c) == KVQ_E_FULL);
  REQUIRE((id_a != 0 && id_b != 0 && id_a != id_b));
  REQUIRE(table.count() == 2);

  Table<Thing>::Use use;
  REQUIRE(table.use(id_a, &use) == KVQ_OK);
  REQUIRE(&*use == &a);
  REQUIRE(table.remove(use) == &a);
  REQUIRE(table.use(id_a, &use) == KVQ_E_STALE);
  REQUIRE(table.insert(&d, "limit", &id_d) == KVQ_OK);
  REQUIRE(id_d != id_a);
  REQUIRE(table.use(id_a, &use) == KVQ_E_STALE);
  REQUIRE(table.use(id_d, &use) == KVQ_OK);
  REQUIRE(&*use == &d);
}

TEST_CASE("an object in use is busy until the use ends") {
  Table<Thing> table("thing", 4, std::pmr::get_default_resource());
  Thing a;
  uint64_t id = 0;
  REQUIRE(table.insert(&a, "limit", &id) == KVQ_OK);
  {
    Table<Thing>::Use first, second;
    REQUIRE(table.use(id, &first) == KVQ_OK);
    REQUIRE(table.use(id, &second) == KVQ_E_BUSY);
    Table<Thing>::Use moved = std::move(first);
    REQUIRE(table.use(id, &second) == KVQ_E_BUSY);
    moved.release();
    REQUIRE(table.use(id, &second) == KVQ_OK);
  }
  Table<Thing>::Use after;
  REQUIRE(table.use(id, &after) == KVQ_OK);
}

TEST_CASE("ids of one table mean nothing to another, nor do numbers that were never ids") {
  Table<Thing> one("thing", 8, std::pmr::get_default_resource()), other("thing", 8, std::pmr::get_default_resource());
  Thing things[8];
  Table<Thing>::Use use;
  for (Thing &thing : things) {
    uint64_t id = 0, elsewhere = 0;
    REQUIRE(one.insert(&thing, "limit", &id) == KVQ_OK);
    REQUIRE(other.insert(&thing, "limit", &elsewhere) == KVQ_OK);
    REQUIRE(other.use(id, &use) == KVQ_E_STALE);
    REQUIRE(one.use(elsewhere, &use) == KVQ_E_STALE);
  }
  for (const uint64_t number : {uint64_t(0), uint64_t(1), uint64_t(8), UINT64_MAX, uint64_t(1) << 63, uint64_t(1) << 20})
    REQUIRE(one.use(number, &use) == KVQ_E_STALE);
}

TEST_CASE("no two ids are ever the same") {
  Table<Thing> table("thing", 3, std::pmr::get_default_resource());
  Thing a;
  std::set<uint64_t> ids;
  for (int i = 0; i < 1000; i++) {
    uint64_t id = 0;
    Table<Thing>::Use use;
    REQUIRE(table.insert(&a, "limit", &id) == KVQ_OK);
    REQUIRE(ids.insert(id).second);
    REQUIRE(table.use(id, &use) == KVQ_OK);
    table.remove(use);
  }
}

TEST_CASE("of many threads that want one object, one at a time has it") {
  Table<Thing> table("thing", 1, std::pmr::get_default_resource());
  Thing a;
  uint64_t id = 0;
  REQUIRE(table.insert(&a, "limit", &id) == KVQ_OK);
  std::atomic<int> taken{0};
  const auto work = [&] {
    for (int i = 0; i < 5000; i++) {
      Table<Thing>::Use use;
      if (table.use(id, &use) != KVQ_OK) continue;
      use->value++;  // a data race if two had it
      taken++;
    }
  };
  std::thread first(work), second(work);
  first.join(), second.join();
  REQUIRE(a.value == taken);
  REQUIRE(taken > 0);
}
