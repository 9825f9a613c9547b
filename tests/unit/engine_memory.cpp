// The caller's allocator: what is counted, what is refused, and what callbacks may do.
#include <catch2/catch_test_macros.hpp>
#include <cstdlib>
#include <vector>

#include "util/memory.h"

using kvq::LimitReached;
using kvq::Memory;

namespace {

struct Calls {
  size_t size = 0, align = 0, released = 0;
  bool empty = false, throws = false;
};

kvq_allocator recording(Calls *calls) {
  return {sizeof(kvq_allocator), 0, calls,
          [](void *user, size_t size, size_t align) -> void * {
            Calls &own = *static_cast<Calls *>(user);
            if (own.throws) throw 1;
            own.size = size, own.align = align;
            return own.empty ? nullptr : std::aligned_alloc(align, (size + align - 1) / align * align);
          },
          [](void *user, void *ptr, size_t size, size_t) {
            static_cast<Calls *>(user)->released += size;
            std::free(ptr);
          }};
}

}  // namespace

TEST_CASE("every byte is counted while it is held") {
  Calls calls;
  const kvq_allocator table = recording(&calls);
  Memory memory(&table);
  void *a = memory.allocate(100, 64), *b = memory.allocate(28, 8);
  REQUIRE((calls.size == 28 && calls.align == 8));
  REQUIRE(memory.used() == 128);
  memory.deallocate(a, 100, 64);
  REQUIRE(memory.used() == 28);
  REQUIRE(memory.peak() == 128);
  memory.deallocate(b, 28, 8);
  REQUIRE(memory.used() == 0);
  REQUIRE(calls.released == 128);
}

TEST_CASE("a limit holds exactly, and a refusal counts nothing") {
  Memory memory(nullptr, 1000);
  void *a = memory.allocate(600, 8);
  REQUIRE_THROWS_AS(memory.allocate(401, 8), LimitReached);
  REQUIRE(memory.used() == 600);
  void *b = memory.allocate(400, 8);
  REQUIRE(memory.used() == 1000);
  REQUIRE_THROWS_AS(memory.allocate(1, 1), LimitReached);
  memory.deallocate(a, 600, 8);
  memory.deallocate(b, 400, 8);
  REQUIRE(memory.peak() == 1000);
}

TEST_CASE("an allocator that returns NULL or throws is out of memory") {
  Calls calls;
  const kvq_allocator table = recording(&calls);
  Memory memory(&table);
  calls.empty = true;
  REQUIRE_THROWS_AS(memory.allocate(10, 8), std::bad_alloc);
  calls.empty = false, calls.throws = true;
  REQUIRE_THROWS_AS(memory.allocate(10, 8), std::bad_alloc);
  REQUIRE((memory.used() == 0 && memory.peak() == 0));
  REQUIRE_THROWS_AS(memory.allocate(SIZE_MAX / 2 + 1, 8), std::bad_alloc);  // never reaches the callback
}

TEST_CASE("the standard allocator keeps to any alignment") {
  Memory memory;
  for (const size_t align : {1, 8, 16, 64, 256, 4096}) {
    void *p = memory.allocate(40, align);
    REQUIRE(reinterpret_cast<uintptr_t>(p) % align == 0);
    memory.deallocate(p, 40, align);
  }
  REQUIRE(memory.used() == 0);
}
