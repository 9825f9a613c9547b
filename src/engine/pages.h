// Pages: raw ones (fp16, one layer) and packed ones (one object for all layers, whose memory comes layer by layer).
//
// Pages are counted references: sequences that share a prefix share its pages, and whoever wants to write into a page that others
// hold copies it first.  A page frees its memory with its last reference; nothing is kept in reserve.
#pragma once
#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <span>
#include <utility>

#include "backend/backend.h"
#include "util/memory.h"

namespace kvq {

// Where the pages of a cache come from, and how many there are.
struct PageStore {
  PageStore(std::pmr::memory_resource *resource, Backend &device, std::span<const LayerShape> layers, uint32_t packed_tokens,
            bool with_positions);

  std::pmr::memory_resource *memory;
  Backend &backend;
  std::span<const LayerShape> shapes;
  Vector<size_t> raw_bytes;  // of a raw page, by layer
  uint32_t raw_tokens;       // tokens of a raw page
  uint32_t page_tokens;      // tokens of a packed page
  bool positions;            // packed pages list their tokens' positions (token classes)
  std::atomic<uint64_t> pages_raw{0}, pages_packed{0}, bytes_raw{0}, bytes_packed{0};
};

// Memory of one page from the backend.
class PageMemory {
 public:
  PageMemory() = default;
  using Counter = std::atomic<uint64_t> PageStore::*;
  PageMemory(PageStore &store, size_t bytes, Counter counter);  // throws std::bad_alloc
  PageMemory(PageMemory &&other) noexcept { swap(other); }
  PageMemory &operator=(PageMemory &&other) noexcept {
    swap(other);
    return *this;
  }
  ~PageMemory();
  void *data() const { return data_; }

 private:
  friend class PageBatch;
  friend class PageReturn;
  PageMemory(PageStore &store, void *data, size_t bytes, Counter counter);
  void *give_up() noexcept;
  void swap(PageMemory &other) noexcept {
    std::swap(store_, other.store_), std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_), std::swap(counter_, other.counter_);
  }
  PageStore *store_ = nullptr;
  void *data_ = nullptr;
  size_t bytes_ = 0;
  Counter counter_ = nullptr;
};

// Memory of many pages of one size, by one call of the backend; what is not taken goes back.
class PageBatch {
 public:
  PageBatch(PageStore &store, size_t bytes, size_t count, PageMemory::Counter counter);  // throws std::bad_alloc
  ~PageBatch();
  PageBatch(const PageBatch &) = delete;
  std::span<void *const> pages() const { return pages_; }
  PageMemory take() noexcept;  // the next of them

 private:
  PageStore &store_;
  size_t bytes_, taken_ = 0;
  PageMemory::Counter counter_;
  Vector<void *> pages_;
};

// Memory that goes back to the backend, many pages by one call.
class PageReturn {
 public:
  PageReturn() = default;
  ~PageReturn() { flush(); }
  PageReturn(const PageReturn &) = delete;
  void add(PageMemory *memory) noexcept;

 private:
  void flush() noexcept;

  PageStore *store_ = nullptr;
  size_t bytes_ = 0, count_ = 0;
  std::array<void *, 256> pages_;
};

struct RawPage {
  RawPage(PageStore &owner, PageMemory &&rows);
  ~RawPage();

  std::atomic<uint32_t> references{0};
  PageStore &store;
  PageMemory memory;
};

// One slot of all layers.  A layer without memory has not been packed yet.
struct PackedPage {
  explicit PackedPage(PageStore &owner);
  ~PackedPage();

  std::atomic<uint32_t> references{0};
  PageStore &store;
  Vector<PageMemory> layers;
  Vector<uint32_t> positions;  // [page_tokens] where pages hold a token class, else empty
};

// A counted reference.
template <class Page>
class Ref {
 public:
  Ref() = default;
  Ref(const Ref &other) noexcept : page_(other.page_) {
    if (page_) page_->references.fetch_add(1, std::memory_order_relaxed);
  }
  Ref(Ref &&other) noexcept : page_(std::exchange(other.page_, nullptr)) {}
  Ref &operator=(Ref other) noexcept {
    std::swap(page_, other.page_);
    return *this;
  }
  ~Ref() {
    if (!page_ || page_->references.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    std::pmr::polymorphic_allocator<Page>(page_->store.memory).delete_object(page_);
  }
  template <class... Args>
  static Ref make(PageStore &store, Args &&...args) {
    Ref made;
    made.page_ = std::pmr::polymorphic_allocator<Page>(store.memory).template new_object<Page>(store, std::forward<Args>(args)...);
    made.page_->references.store(1, std::memory_order_relaxed);
    return made;
  }
  // Is this the only reference?  Then the page may be written: what former holders read of it has happened before.
  bool unique() const noexcept { return page_->references.load(std::memory_order_acquire) == 1; }
  Page *operator->() const { return page_; }
  Page &operator*() const { return *page_; }
  explicit operator bool() const { return page_ != nullptr; }

 private:
  Page *page_ = nullptr;
};

// Let go of pages, and of the memory of those that nobody else holds by few calls.
void release(std::span<Ref<RawPage>> pages) noexcept;

// Raw tokens of one layer in order: rows [first, first + count) of consecutive pages.  No page is wholly unused.
struct RawRows {
  explicit RawRows(std::pmr::memory_resource *memory) : pages(memory) {}
  RawRows(const RawRows &other, std::pmr::memory_resource *memory)
      : pages(other.pages, memory), first(other.first), count(other.count) {}
  RawRows(RawRows &&) noexcept = default;
  ~RawRows() { release(pages); }

  Vector<Ref<RawPage>> pages;
  uint32_t first = 0;
  uint64_t count = 0;

  void truncate(uint32_t page_tokens, uint64_t new_count) noexcept;
  void swap(RawRows &other) noexcept {
    pages.swap(other.pages);
    std::swap(first, other.first), std::swap(count, other.count);
  }
};

// Room for `more` rows behind `rows`, without changing them: true if a new page list is needed (pages added, or the last one
// copied because others hold it), which is then in *grown.
bool grow(PageStore &store, uint32_t layer, const RawRows &rows, uint64_t more, Vector<Ref<RawPage>> *grown);

// f(PageRows) for the rows [from, from + count) of a page list whose row 0 is row `first` of its first page.
template <class F>
void for_rows(std::span<const Ref<RawPage>> pages, uint32_t page_tokens, uint32_t first, uint64_t from, uint64_t count, F &&f) {
  for (uint64_t row = first + from, end = row + count; row < end;) {
    const uint32_t in_page = uint32_t(row % page_tokens);
    const uint32_t n = uint32_t(std::min<uint64_t>(page_tokens - in_page, end - row));
    f(PageRows{pages[size_t(row / page_tokens)]->memory.data(), in_page, n});
    row += n;
  }
}
// The same as a list.
void gather(std::span<const Ref<RawPage>> pages, uint32_t page_tokens, uint32_t first, uint64_t from, uint64_t count,
            Vector<PageRows> *out);

}  // namespace kvq
