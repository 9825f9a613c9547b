// Pages and lists of raw pages.
#include "engine/pages.h"

namespace kvq {

PageStore::PageStore(std::pmr::memory_resource *resource, Backend &device, std::span<const LayerShape> layers,
                     uint32_t packed_tokens, bool with_positions)
    : memory(resource), backend(device), shapes(layers), raw_bytes(layers.size(), resource), raw_tokens(device.raw_page_tokens()), page_tokens(packed_tokens), positions(with_positions) {
  for (size_t l = 0; l < layers.size(); l++) raw_bytes[l] = device.raw_page_bytes(layers[l]);
}

PageMemory::PageMemory(PageStore &store, size_t bytes, Counter counter) : PageMemory(store, store.backend.allocate_page(bytes), bytes, counter) {}

PageMemory::PageMemory(PageStore &store, void *data, size_t bytes, Counter counter) : store_(&store), data_(data), bytes_(bytes), counter_(counter) {
  (store.*counter).fetch_add(bytes, std::memory_order_relaxed);
}

PageMemory::~PageMemory() {
  if (void *data = give_up()) store_->backend.release_page(data, bytes_);
}

void *PageMemory::give_up() noexcept {
  if (data_) (store_->*counter_).fetch_sub(bytes_, std::memory_order_relaxed);
  return std::exchange(data_, nullptr);
}

PageBatch::PageBatch(PageStore &store, size_t bytes, size_t count, PageMemory::Counter counter)
    : store_(store), bytes_(bytes), counter_(counter), pages_(count, store.memory) {
  store.backend.allocate_pages(bytes, pages_);
}

PageBatch::~PageBatch() { store_.backend.release_pages(bytes_, std::span(pages_).subspan(taken_)); }

PageMemory PageBatch::take() noexcept { return PageMemory(store_, pages_[taken_++], bytes_, counter_); }

void PageReturn::add(PageMemory *memory) noexcept {
  if (count_ == pages_.size() || memory->store_ != store_ || memory->bytes_ != bytes_) flush();
  store_ = memory->store_, bytes_ = memory->bytes_;
  pages_[count_++] = memory->give_up();
}

void PageReturn::flush() noexcept {
  if (count_) store_->backend.release_pages(bytes_, std::span(pages_).first(count_));
  count_ = 0;
}

RawPage::RawPage(PageStore &owner, PageMemory &&rows) : store(owner), memory(std::move(rows)) {
  store.pages_raw.fetch_add(1, std::memory_order_relaxed);
}

RawPage::~RawPage() { store.pages_raw.fetch_sub(1, std::memory_order_relaxed); }

PackedPage::PackedPage(PageStore &owner)
    : store(owner), layers(owner.shapes.size(), owner.memory), positions(owner.positions ? owner.page_tokens : 0, owner.memory) {
  store.pages_packed.fetch_add(1, std::memory_order_relaxed);
}

PackedPage::~PackedPage() { store.pages_packed.fetch_sub(1, std::memory_order_relaxed); }

void RawRows::truncate(uint32_t page_tokens, uint64_t new_count) noexcept {
  count = new_count;
  if (count == 0) first = 0;
  const size_t needed = size_t((first + count + page_tokens - 1) / page_tokens);
  release(std::span(pages).subspan(needed));
  pages.erase(pages.begin() + ptrdiff_t(needed), pages.end());
}

void release(std::span<Ref<RawPage>> pages) noexcept {
  PageReturn back;
  for (Ref<RawPage> &page : pages) {
    if (page && page.unique()) back.add(&page->memory);
    page = {};
  }
}

bool grow(PageStore &store, uint32_t layer, const RawRows &rows, uint64_t more, Vector<Ref<RawPage>> *grown) {
  if (more == 0) return false;
  const uint32_t tokens = store.raw_tokens;
  const uint64_t end = rows.first + rows.count;
  const size_t needed = size_t((end + more + tokens - 1) / tokens);
  const bool copy = end % tokens != 0 && !rows.pages.back().unique();
  if (!copy && needed == rows.pages.size()) return false;
  grown->reserve(needed);
  grown->assign(rows.pages.begin(), rows.pages.end());
  PageBatch batch(store, store.raw_bytes[layer], needed - rows.pages.size() + copy, &PageStore::bytes_raw);
  if (copy) {
    Ref<RawPage> mine = Ref<RawPage>::make(store, batch.take());
    const uint32_t begin = rows.pages.size() == 1 ? rows.first : 0;
    store.backend.copy_rows(store.shapes[layer], grown->back()->memory.data(), begin, mine->memory.data(), begin,
                            uint32_t(end % tokens) - begin);
    grown->back() = std::move(mine);
  }
  while (grown->size() < needed) grown->push_back(Ref<RawPage>::make(store, batch.take()));
  return true;
}

void gather(std::span<const Ref<RawPage>> pages, uint32_t page_tokens, uint32_t first, uint64_t from, uint64_t count,
            Vector<PageRows> *out) {
  for_rows(pages, page_tokens, first, from, count, [out](const PageRows &rows) { out->push_back(rows); });
}

}  // namespace kvq
