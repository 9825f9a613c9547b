// All memory of a cache: the caller's allocator behind std::pmr, counted and limited.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <memory_resource>
#include <new>
#include <utility>
#include <vector>

#include "kvq/kvq.h"

namespace kvq {

// Thrown where max_bytes would be passed; the C boundary turns it into KVQ_E_FULL and std::bad_alloc into KVQ_E_NOMEM.
struct LimitReached : std::bad_alloc {
  LimitReached(uint64_t limit_bytes, uint64_t asked_bytes) noexcept : limit(limit_bytes), asked(asked_bytes) {}
  uint64_t limit, asked;
  const char *what() const noexcept override { return "max_bytes reached"; }
};

class Memory final : public std::pmr::memory_resource {
 public:
  // allocator == nullptr: malloc and free.  max_bytes == 0: no limit.
  explicit Memory(const kvq_allocator *allocator = nullptr, uint64_t max_bytes = 0) noexcept;
  // The same allocator, counting on from what `other` holds: a cache's own object is made before its Memory exists.
  Memory(const Memory &other) noexcept;

  // Is there no allocator of the caller's?
  bool standard() const noexcept;
  // Count memory that a backend holds elsewhere (on a device, in mappings) as if the allocator had given it.  charge throws LimitReached.
  void charge(size_t bytes);
  void discharge(size_t bytes) noexcept { used_.fetch_sub(bytes, std::memory_order_relaxed); }

  uint64_t used() const noexcept { return used_.load(std::memory_order_relaxed); }
  uint64_t peak() const noexcept { return peak_.load(std::memory_order_relaxed); }

 private:
  void raise_peak(uint64_t used) noexcept;
  void *do_allocate(size_t bytes, size_t align) override;
  void do_deallocate(void *p, size_t bytes, size_t align) override;
  bool do_is_equal(const memory_resource &other) const noexcept override { return this == &other; }

  kvq_allocator allocator_;
  uint64_t max_bytes_;
  std::atomic<uint64_t> used_{0}, peak_{0};
};

template <class T>
using Vector = std::pmr::vector<T>;

// std::make_shared from a Memory.
template <class T, class... Args>
std::shared_ptr<T> make_shared_in(std::pmr::memory_resource *memory, Args &&...args) {
  return std::allocate_shared<T>(std::pmr::polymorphic_allocator<T>(memory), std::forward<Args>(args)...);
}

}  // namespace kvq
