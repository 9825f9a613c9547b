// Memory of pages.  A caller's allocator is asked for each page.  With the standard one, pages beyond the first few of a size lie in
// slots of large mappings that ask the system for huge pages: a long cache is read at another speed then (a third less time at 32768
// tokens), and its first writes fault 512 times less often.
//
// Mappings that nobody uses any more are kept, at most kKept of them: the raw pages of a prompt's next layer come when those of the last
// one go, and to clear fresh memory takes Linux a fifth of a commit.  The system may have their memory back whenever it is short of it.
#pragma once
#include <cstddef>
#include <mutex>

#include "util/memory.h"

namespace kvq::cpu {

// Thread-safe.  Counted as the memory that it is made of: byte by byte, page by page.
class PagePool {
 public:
  explicit PagePool(Memory *memory) : memory_(memory), sizes_(memory), mappings_(memory) {}
  PagePool(const PagePool &) = delete;
  PagePool &operator=(const PagePool &) = delete;
  ~PagePool();

  void *allocate(size_t bytes);  // zeros; throws as Memory does
  void release(void *page, size_t bytes) noexcept;

 private:
  // A mapping is slots of one size, used of them in use and as many as `fresh` given out so far; what lies behind `dirty` is zeros still.
  // A kept one has no size.
  struct Mapping {
    char *begin;
    size_t size, slot, fresh, used, dirty;
    void *free;  // a slot that was given back; its first word leads to the next
  };
  struct Size {
    size_t slot;
    size_t plain;  // bytes outside mappings
  };
  static bool is_kept(const Mapping &mapping);
  bool wants_slot(size_t slot, size_t bytes);
  void *take_slot(size_t slot);
  void add_mapping(size_t slot);
  bool return_slot(void *page) noexcept;

  Memory *memory_;
  std::mutex mutex_;
  Vector<Size> sizes_;
  Vector<Mapping> mappings_;  // by address
};

}  // namespace kvq::cpu
