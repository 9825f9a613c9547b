// Device memory of a cache: slabs that pages and tables are cut from, counted in the cache's Memory.
//
// Pages are multiples of 256 bytes; other blocks are rounded to one of eight sizes between powers of two.  Freed blocks wait in a
// list of their size.  Reuse is safe without waiting because a backend orders all work of a cache (order.h).  Counted are the
// blocks in use: slabs are a reserve, freed with the cache, of at most the peak of that count and one slab more.
#pragma once
#include <cstdint>
#include <mutex>
#include <span>

#include "util/memory.h"

namespace kvq::cuda {

class Arena {
 public:
  Arena(Memory *memory, int device);
  ~Arena();
  Arena(const Arena &) = delete;

  // Throw std::bad_alloc or LimitReached.
  void allocate_pages(size_t bytes, std::span<void *> pages) { allocate_exactly(page_size(bytes), pages); }
  void *allocate(size_t bytes) {
    void *block;
    allocate_exactly(rounded(bytes), std::span(&block, 1));
    return block;
  }
  void release_pages(size_t bytes, std::span<void *const> pages) noexcept { release_exactly(page_size(bytes), pages); }
  void release(void *block, size_t bytes) noexcept { release_exactly(rounded(bytes), std::span(&block, 1)); }

 private:
  struct Slab {
    char *data;
    size_t bytes;
  };
  struct Class {
    explicit Class(std::pmr::memory_resource *memory) : free(memory) {}
    size_t size = 0;
    Vector<void *> free;
    uint64_t blocks = 0;  // cut so far, so that release never allocates
  };
  static size_t page_size(size_t bytes) { return (bytes + 255) / 256 * 256; }
  static size_t rounded(size_t bytes);
  void allocate_exactly(size_t bytes, std::span<void *> blocks);
  void *cut(Class &c);
  void release_exactly(size_t bytes, std::span<void *const> blocks) noexcept;
  void put_back(size_t bytes, std::span<void *const> blocks) noexcept;
  Class &class_of(size_t bytes);
  void add_slab(size_t at_least);

  Memory *memory_;
  int device_;
  std::mutex mutex_;
  Vector<Slab> slabs_;
  Vector<Class> classes_;
  char *at_ = nullptr, *end_ = nullptr;  // what is left of the newest slab
  size_t next_ = size_t(1) << 20;
};

// A buffer from the arena.
class Buffer {
 public:
  explicit Buffer(Arena &arena) : arena_(&arena) {}
  Buffer(Arena &arena, size_t bytes) : arena_(&arena) { reserve(bytes); }
  Buffer(Buffer &&other) noexcept : arena_(other.arena_), data_(std::exchange(other.data_, nullptr)), bytes_(other.bytes_) {}
  Buffer &operator=(Buffer &&other) noexcept {
    std::swap(data_, other.data_), std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Buffer() { release(); }
  // At least this many bytes; what was there is lost if it grows.
  void reserve(size_t bytes) {
    if (data_ && bytes <= bytes_) return;
    release();
    data_ = arena_->allocate(bytes);
    bytes_ = bytes;
  }
  void release() noexcept {
    if (data_) arena_->release(data_, bytes_);
    data_ = nullptr, bytes_ = 0;
  }
  void *data() const { return data_; }
  size_t bytes() const { return bytes_; }
  template <class T>
  T *as() const {
    return static_cast<T *>(data_);
  }

 private:
  Arena *arena_;
  void *data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace kvq::cuda
