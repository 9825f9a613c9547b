// The caller's allocator, or malloc and free, behind std::pmr.
#include "util/memory.h"

#include <cstdlib>

namespace kvq {

namespace {

void *standard_alloc(void *, size_t size, size_t align) {
  if (align <= alignof(std::max_align_t)) return std::malloc(size);
  return std::aligned_alloc(align, (size + align - 1) / align * align);
}

void standard_release(void *, void *ptr, size_t, size_t) { std::free(ptr); }

constexpr kvq_allocator kStandard = {sizeof(kvq_allocator), 0, nullptr, standard_alloc, standard_release};

}  // namespace

Memory::Memory(const kvq_allocator *allocator, uint64_t max_bytes) noexcept
    : allocator_(allocator ? *allocator : kStandard), max_bytes_(max_bytes) {}

Memory::Memory(const Memory &other) noexcept
    : memory_resource(), allocator_(other.allocator_), max_bytes_(other.max_bytes_), used_(other.used()), peak_(other.peak()) {}

bool Memory::standard() const noexcept { return allocator_.alloc == standard_alloc; }

void Memory::raise_peak(uint64_t used) noexcept {
  uint64_t peak = peak_.load(std::memory_order_relaxed);
  while (peak < used && !peak_.compare_exchange_weak(peak, used, std::memory_order_relaxed)) {
  }
}

void Memory::charge(size_t bytes) {
  const uint64_t used = used_.fetch_add(bytes, std::memory_order_relaxed) + bytes;
  if (max_bytes_ == 0 || used <= max_bytes_) return raise_peak(used);
  discharge(bytes);
  throw LimitReached(max_bytes_, bytes);
}

void *Memory::do_allocate(size_t bytes, size_t align) {
  if (bytes == 0) bytes = 1;
  const uint64_t used = used_.fetch_add(bytes, std::memory_order_relaxed) + bytes;
  void *p = nullptr;
  const bool within = (max_bytes_ == 0 || used <= max_bytes_) && bytes <= size_t(PTRDIFF_MAX);
  if (within) {
    try {
      p = allocator_.alloc(allocator_.user, bytes, align);
    } catch (...) {  // a callback that throws has not allocated
    }
  }
  if (!p) {
    used_.fetch_sub(bytes, std::memory_order_relaxed);
    if (!within && max_bytes_ != 0) throw LimitReached(max_bytes_, bytes);
    throw std::bad_alloc();
  }
  raise_peak(used);
  return p;
}

void Memory::do_deallocate(void *p, size_t bytes, size_t align) {
  if (bytes == 0) bytes = 1;
  try {
    allocator_.release(allocator_.user, p, bytes, align);
  } catch (...) {
  }
  used_.fetch_sub(bytes, std::memory_order_relaxed);
}

}  // namespace kvq
