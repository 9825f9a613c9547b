// Ids of sequences and steps: slot and generation.  An id whose object has gone is STALE, an object in use by another thread BUSY.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory_resource>
#include <mutex>

#include "util/fp.h"
#include "util/memory.h"
#include "util/status.h"

namespace kvq {

// A fixed array of slots.  A slot's word is its id, with the top bit set while a thread uses the object, so that one
// compare-and-swap checks the id and takes the object: no lock, no wait.  Threads that share an object count themselves first and look at
// the word then; one that wants it alone takes the word first and looks at the count then: one of them sees the other at least.  Ids are 20 bits of slot below 42 bits of generation;
// generations begin at a number of the table's own, so ids of another cache do not fit by accident.
template <class T>
class Table {
  static constexpr uint64_t kBusy = uint64_t(1) << 63, kFree = uint64_t(1) << 62;
  static constexpr uint32_t kSlotBits = 20, kNone = UINT32_MAX;

  struct Slot {
    std::atomic<uint64_t> word{kFree};  // free: kFree and the id that comes next
    std::atomic<uint32_t> sharers{0};
    union {
      T *object = nullptr;
      uint32_t next_free;
    };
  };

 public:
  static constexpr uint32_t kMaxSlots = 1u << kSlotBits;

  // Exclusive use of an object; ends with the guard.
  class Use {
   public:
    Use() = default;
    Use(Use &&other) noexcept : slot_(other.slot_), id_(other.id_) { other.slot_ = nullptr; }
    Use &operator=(Use &&other) noexcept {
      std::swap(slot_, other.slot_), std::swap(id_, other.id_);
      return *this;
    }
    ~Use() { release(); }
    void release() noexcept {
      if (slot_) slot_->word.store(id_, std::memory_order_release);
      slot_ = nullptr;
    }
    T &operator*() const { return *slot_->object; }
    T *operator->() const { return slot_->object; }

   private:
    friend Table;
    Slot *slot_ = nullptr;
    uint64_t id_ = 0;
  };

  // Use of an object together with other threads.
  class Share {
   public:
    Share() = default;
    Share(const Share &) = delete;
    Share &operator=(const Share &) = delete;
    ~Share() { release(); }
    void release() noexcept {
      if (slot_) slot_->sharers.fetch_sub(1);
      slot_ = nullptr;
    }
    T &operator*() const { return *slot_->object; }
    T *operator->() const { return slot_->object; }

   private:
    friend Table;
    Slot *slot_ = nullptr;
  };

  // `name` is what messages call the object: "seq", "step".
  Table(const char *name, uint32_t slots, std::pmr::memory_resource *memory) : name_(name), slots_(slots, memory) {
    const uint64_t clock = uint64_t(std::chrono::steady_clock::now().time_since_epoch().count());
    const uint64_t first = splitmix64(splitmix64(reinterpret_cast<uintptr_t>(this)) ^ clock) >> (kSlotBits + 3);  // half of them
    for (uint32_t i = 0; i < slots; i++) {
      slots_[i].word.store(kFree | (first + 1) << kSlotBits | i, std::memory_order_relaxed);
      slots_[i].next_free = i + 1 < slots ? i + 1 : kNone;
    }
    free_ = slots ? 0 : kNone;
  }

  // Take the object for this thread.
  Status use(uint64_t id, Use *use) {
    Slot *slot = find(id);
    if (!slot) return stale(id);
    uint64_t word = id;
    if (!slot->word.compare_exchange_strong(word, id | kBusy)) return word == (id | kBusy) ? busy(id) : stale(id);
    if (slot->sharers.load() != 0) {
      slot->word.store(id);
      return busy(id);
    }
    use->release();
    use->slot_ = slot, use->id_ = id;
    return KVQ_OK;
  }

  // Take the object for this thread and others.
  Status share(uint64_t id, Share *share) {
    Slot *slot = find(id);
    if (!slot) return stale(id);
    slot->sharers.fetch_add(1);
    const uint64_t word = slot->word.load();
    if (word != id) {
      slot->sharers.fetch_sub(1);
      return word == (id | kBusy) ? busy(id) : stale(id);
    }
    share->release();
    share->slot_ = slot;
    return KVQ_OK;
  }

  // Give an object an id.  `limit` is what messages call the number of slots.
  Status insert(T *object, const char *limit, uint64_t *id) {
    const std::lock_guard lock(mutex_);
    if (free_ == kNone) return fail(KVQ_E_FULL, "%s: all %zu are in use (%s)", name_, slots_.size(), limit);
    Slot &slot = slots_[free_];
    free_ = slot.next_free;
    slot.object = object;
    *id = slot.word.load(std::memory_order_relaxed) & ~kFree;
    count_.fetch_add(1, std::memory_order_relaxed);
    slot.word.store(*id, std::memory_order_release);
    return KVQ_OK;
  }

  // End the id of an object in use; the object is the caller's again.
  T *remove(Use &use) noexcept {
    const std::lock_guard lock(mutex_);
    Slot &slot = *use.slot_;
    T *object = slot.object;
    slot.next_free = free_;
    slot.word.store(kFree | (use.id_ + (uint64_t(1) << kSlotBits)), std::memory_order_release);
    free_ = uint32_t(&slot - slots_.data());
    count_.fetch_sub(1, std::memory_order_relaxed);
    use.slot_ = nullptr;
    return object;
  }

  uint32_t count() const noexcept { return count_.load(std::memory_order_relaxed); }
  uint32_t capacity() const noexcept { return uint32_t(slots_.size()); }

  // For the end of a cache: every object that is left.
  template <class F>
  void for_each(F &&f) {
    for (Slot &slot : slots_)
      if (!(slot.word.load(std::memory_order_relaxed) & kFree)) f(slot.object);
  }

 private:
  Slot *find(uint64_t id) {
    const uint64_t index = id & (kMaxSlots - 1);
    return id != 0 && id < kFree && index < slots_.size() ? &slots_[index] : nullptr;
  }
  Status busy(uint64_t id) const { return fail(KVQ_E_BUSY, "%s=%llu is in use by another call", name_, (unsigned long long)id); }
  Status stale(uint64_t id) const {
    return fail(KVQ_E_STALE, "%s=%llu does not exist (any more) in this cache", name_, (unsigned long long)id);
  }

  const char *name_;
  Vector<Slot> slots_;
  uint32_t free_ = kNone;
  std::atomic<uint32_t> count_{0};
  std::mutex mutex_;  // of the free list
};

}  // namespace kvq
