// A kvq_allocator that counts, checks what comes back, and fails on request.
#pragma once
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <unordered_map>

#include "kvq/kvq.h"

namespace kvq_test {

class CountingAllocator {
 public:
  std::atomic<uint64_t> allocations{0}, bytes{0}, mistakes{0};
  // Number of allocations that still succeed; the one after that returns NULL, and those after it.
  std::atomic<int64_t> remaining{INT64_MAX};

  kvq_allocator callbacks() {
    kvq_allocator table{};
    table.struct_size = sizeof table;
    table.user = this;
    table.alloc = [](void *user, size_t size, size_t align) { return static_cast<CountingAllocator *>(user)->take(size, align); };
    table.release = [](void *user, void *ptr, size_t size, size_t align) {
      static_cast<CountingAllocator *>(user)->give(ptr, size, align);
    };
    return table;
  }

 private:
  struct Block {
    size_t size, align;
  };

  void *take(size_t size, size_t align) {
    if (remaining.fetch_sub(1) <= 0) return nullptr;
    if (size == 0 || align == 0 || align > 4096 || (align & (align - 1))) ++mistakes;
    void *ptr = std::aligned_alloc(align, (size + align - 1) / align * align);
    const std::lock_guard lock(mutex_);
    blocks_[ptr] = {size, align};
    ++allocations;
    bytes += size;
    return ptr;
  }

  void give(void *ptr, size_t size, size_t align) {
    {
      const std::lock_guard lock(mutex_);
      const auto found = blocks_.find(ptr);
      if (found == blocks_.end() || found->second.size != size || found->second.align != align) {
        ++mistakes;
        return;
      }
      blocks_.erase(found);
    }
    bytes -= size;
    std::free(ptr);
  }

  std::mutex mutex_;
  std::unordered_map<void *, Block> blocks_;
};

}  // namespace kvq_test
