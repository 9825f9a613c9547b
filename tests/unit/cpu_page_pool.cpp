// Memory of pages (cpu/page_pool.h): zeros, in nobody else's way, counted to the byte, with and without mappings.
#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <cstdint>
#include <cstring>
#include <map>
#include <vector>

#include "allocator.hpp"
#include "cpu/page_pool.h"
#include "random.hpp"

using namespace kvq_test;
using kvq::Memory;
using kvq::cpu::PagePool;

namespace {

bool is_zero(const void *page, size_t bytes) {
  const char *x = static_cast<const char *>(page);
  return std::all_of(x, x + bytes, [](char c) { return c == 0; });
}

constexpr size_t kSizes[] = {100, 4096, 51200, 131072, (size_t(2) << 20) + 64};

}  // namespace

TEST_CASE("pages are zeros, aligned, and nobody else's, through thousands of random allocations and releases") {
  Memory memory;
  Random random;
  {
    PagePool pool(&memory);
    struct Page {
      char *at;
      size_t bytes;
      uint8_t mark;
    };
    std::vector<Page> pages;
    size_t used = 0;
    std::map<size_t, int> seen;
    for (int i = 0; i < 6000; i++) {
      const bool shrinking = i / 1500 % 2;
      if (pages.empty() || random.below(10) < (shrinking ? 3u : 7u)) {
        const size_t bytes = kSizes[random.below(400) == 0 ? 4 : random.below(4)];  // the largest are never in slots
        char *const at = static_cast<char *>(pool.allocate(bytes));
        REQUIRE(reinterpret_cast<uintptr_t>(at) % 64 == 0);
        REQUIRE(is_zero(at, bytes));
        const uint8_t mark = uint8_t(1 + random.below(255));
        std::memset(at, mark, bytes);
        pages.push_back({at, bytes, mark});
        used += bytes, seen[bytes]++;
      } else {
        std::swap(pages[random.below(pages.size())], pages.back());
        const Page page = pages.back();
        pages.pop_back();
        REQUIRE(std::all_of(page.at, page.at + page.bytes, [&](char c) { return uint8_t(c) == page.mark; }));
        pool.release(page.at, page.bytes);
        used -= page.bytes;
      }
    }
    REQUIRE(seen.size() == std::size(kSizes));
    REQUIRE(memory.used() >= used);
    REQUIRE(memory.used() <= used + 16384);  // its lists
    for (const Page &page : pages) pool.release(page.at, page.bytes);
  }
  REQUIRE(memory.used() == 0);
}

TEST_CASE("mappings that are kept give zeros again, to pages of any size, and are nobody's memory") {
  Memory memory;
  PagePool pool(&memory);
  constexpr size_t kBytes = size_t(192) << 20;  // more than is kept
  for (const size_t bytes : {131072, 51200, 131072, 4096}) {
    std::vector<void *> pages;
    const uint64_t before = memory.used();
    for (size_t used = 0; used < kBytes; used += bytes) {
      pages.push_back(pool.allocate(bytes));
      REQUIRE(is_zero(pages.back(), bytes));
      std::memset(pages.back(), 0xff, bytes);
    }
    REQUIRE(memory.used() >= before + kBytes);
    for (void *page : pages) pool.release(page, bytes);
    REQUIRE(memory.used() <= before + 16384);  // its lists
  }
}

TEST_CASE("a limit holds to the byte, and what was refused leaves no trace") {
  constexpr size_t kPage = 131072, kLimit = 100 * kPage;
  Memory memory(nullptr, kLimit);
  PagePool pool(&memory);
  std::vector<void *> pages;
  for (;;) {
    try {
      pages.push_back(pool.allocate(kPage));
    } catch (const kvq::LimitReached &) {
      break;
    }
  }
  REQUIRE(pages.size() == 99);  // a hundred less what the lists take
  const uint64_t used = memory.used();
  REQUIRE_THROWS_AS(pool.allocate(kPage), kvq::LimitReached);
  REQUIRE(memory.used() == used);
  pool.release(pages.back(), kPage);
  pages.back() = pool.allocate(kPage);
  REQUIRE(is_zero(pages.back(), kPage));
  for (void *page : pages) pool.release(page, kPage);
}

TEST_CASE("a caller's allocator sees every page") {
  CountingAllocator allocator;
  {
    const kvq_allocator callbacks = allocator.callbacks();
    Memory memory(&callbacks);
    PagePool pool(&memory);
    std::vector<void *> pages;
    for (int i = 0; i < 64; i++) pages.push_back(pool.allocate(131072));
    REQUIRE(allocator.bytes >= 64 * 131072);
    for (void *page : pages) pool.release(page, 131072);
  }
  REQUIRE(allocator.bytes == 0);
  REQUIRE(allocator.mistakes == 0);
}
