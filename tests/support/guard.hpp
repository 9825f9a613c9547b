// A buffer that ends at an unreadable page and can be made read-only: a read or write beyond its end, or a write into an input,
// stops the test at the instruction that does it.
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstring>
#include <new>

namespace kvq_test {

class GuardedBuffer {
 public:
  explicit GuardedBuffer(size_t size) : size_(size) {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    usable_ = (size + page - 1) / page * page;
    mapped_ = usable_ + page;
    base_ = static_cast<char *>(mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (base_ == MAP_FAILED) throw std::bad_alloc();
    mprotect(base_ + usable_, page, PROT_NONE);
  }
  GuardedBuffer(const void *source, size_t size) : GuardedBuffer(size) { std::memcpy(data(), source, size); }
  GuardedBuffer(const GuardedBuffer &) = delete;
  GuardedBuffer &operator=(const GuardedBuffer &) = delete;
  ~GuardedBuffer() { munmap(base_, mapped_); }

  // The last byte lies right before the guard page.
  void *data() const { return base_ + usable_ - size_; }
  void freeze() { mprotect(base_, usable_, PROT_READ); }

 private:
  char *base_;
  size_t size_, usable_ = 0, mapped_ = 0;
};

}  // namespace kvq_test
