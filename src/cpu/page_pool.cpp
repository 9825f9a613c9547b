#include "cpu/page_pool.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>

namespace kvq::cpu {
namespace {

constexpr size_t kAlign = 64;
constexpr size_t kHuge = size_t(2) << 20;      // bytes of a huge page
constexpr size_t kPlain = kHuge;               // of pages of a size that are allocated one by one: small caches take no more than they use
constexpr size_t kMapping = size_t(32) << 20;  // address space; memory is taken as slots are used
constexpr size_t kKept = 4;                    // mappings: the raw keys and values of a layer, 32768 tokens of 8 heads of 128 channels

size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

// Zeros at a multiple of kHuge, or nullptr.
char *map_huge(size_t bytes) {
  void *const all = mmap(nullptr, bytes + kHuge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (all == MAP_FAILED) return nullptr;
  char *const first = static_cast<char *>(all), *const begin = reinterpret_cast<char *>(round_up(reinterpret_cast<uintptr_t>(first), kHuge));
  if (begin > first) munmap(first, size_t(begin - first));
  if (const size_t rest = size_t(first + kHuge - begin)) munmap(begin + bytes, rest);
#ifdef MADV_HUGEPAGE
  madvise(begin, bytes, MADV_HUGEPAGE);  // a wish: without it the pages are small
#endif
  return begin;
}

}  // namespace

bool PagePool::is_kept(const Mapping &mapping) { return mapping.slot == 0; }

PagePool::~PagePool() {
  for (const Mapping &mapping : mappings_) munmap(mapping.begin, mapping.size);
}

void *PagePool::allocate(size_t bytes) {
  const size_t slot = round_up(bytes, kAlign);
  if (memory_->standard() && slot <= kHuge) {
    const std::lock_guard lock(mutex_);
    if (wants_slot(slot, bytes)) {
      void *const page = take_slot(slot);
      if (page) try {
          memory_->charge(bytes);
          return page;
        } catch (...) {
          return_slot(page);
          throw;
        }
    }
  }
  void *page = memory_->allocate(bytes, kAlign);
  std::memset(page, 0, bytes);
  return page;
}

// Is the share of plain pages of this size used up?  Counts one if not.
bool PagePool::wants_slot(size_t slot, size_t bytes) {
  auto size = std::find_if(sizes_.begin(), sizes_.end(), [slot](const Size &s) { return s.slot == slot; });
  if (size == sizes_.end()) size = sizes_.insert(sizes_.end(), {slot, 0});
  if (size->plain + bytes > kPlain) return true;
  size->plain += bytes;
  return false;
}

// nullptr: the system gives no mapping.
void *PagePool::take_slot(size_t slot) {
  for (int attempt = 0; attempt < 2; attempt++) {
    for (Mapping &mapping : mappings_) {
      if (mapping.slot != slot) continue;
      if (void *page = mapping.free) {
        std::memcpy(&mapping.free, page, sizeof mapping.free);
        std::memset(page, 0, slot);
        mapping.used++;
        return page;
      }
      const size_t at = mapping.fresh * slot, end = at + slot;
      if (end > mapping.size) continue;
      if (at < mapping.dirty) std::memset(mapping.begin + at, 0, std::min(end, mapping.dirty) - at);
      mapping.dirty = std::max(mapping.dirty, end);
      mapping.fresh++, mapping.used++;
      return mapping.begin + at;
    }
    add_mapping(slot);
  }
  return nullptr;
}

// A kept one, or another.
void PagePool::add_mapping(size_t slot) {
  const auto kept = std::find_if(mappings_.begin(), mappings_.end(), is_kept);
  if (kept != mappings_.end()) {
    kept->slot = slot;
    return;
  }
  mappings_.reserve(mappings_.size() + 1);
  char *const begin = map_huge(kMapping);
  if (!begin) return;
  const auto behind = std::find_if(mappings_.begin(), mappings_.end(), [begin](const Mapping &m) { return m.begin > begin; });
  mappings_.insert(behind, {begin, kMapping, slot, 0, 0, 0, nullptr});
}

void PagePool::release(void *page, size_t bytes) noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (return_slot(page)) return memory_->discharge(bytes);
    const size_t slot = round_up(bytes, kAlign);
    for (Size &size : sizes_)
      if (size.slot == slot) size.plain -= std::min(size.plain, bytes);
  }
  memory_->deallocate(page, bytes, kAlign);
}

bool PagePool::return_slot(void *page) noexcept {
  char *const at = static_cast<char *>(page);
  const auto behind = std::upper_bound(mappings_.begin(), mappings_.end(), at, [](const char *p, const Mapping &m) { return p < m.begin; });
  if (behind == mappings_.begin()) return false;
  Mapping &mapping = behind[-1];
  if (at >= mapping.begin + mapping.size) return false;
  std::memcpy(page, &mapping.free, sizeof mapping.free);
  mapping.free = page;
  if (--mapping.used > 0) return true;
  if (size_t(std::count_if(mappings_.begin(), mappings_.end(), is_kept)) < kKept) {
    mapping.slot = mapping.fresh = 0, mapping.free = nullptr;
#ifdef MADV_FREE
    madvise(mapping.begin, mapping.dirty, MADV_FREE);  // zeros or what was there
#endif
  } else {
    munmap(mapping.begin, mapping.size);
    mappings_.erase(behind - 1);
  }
  return true;
}

}  // namespace kvq::cpu
