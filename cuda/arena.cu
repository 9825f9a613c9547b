#include "cuda/arena.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <bit>

namespace kvq::cuda {

namespace {

constexpr size_t kSmallest = 256, kLargestSlab = size_t(256) << 20;

}  // namespace

size_t Arena::rounded(size_t bytes) {
  bytes = std::max(bytes, kSmallest);
  const size_t step = std::max<size_t>(std::bit_floor(bytes) / 8, kSmallest);
  return (bytes + step - 1) / step * step;
}

Arena::Arena(Memory *memory, int device) : memory_(memory), device_(device), slabs_(memory), classes_(memory) {}

Arena::~Arena() {
  for (const Slab &slab : slabs_) cudaFree(slab.data);
}

Arena::Class &Arena::class_of(size_t bytes) {
  for (Class &c : classes_)
    if (c.size == bytes) return c;
  Class &made = classes_.emplace_back(memory_);
  made.size = bytes;
  return made;
}

void Arena::add_slab(size_t at_least) {
  slabs_.reserve(slabs_.size() + 1);
  for (size_t bytes = std::max(next_, at_least);; bytes = std::max(at_least, bytes / 4)) {
    void *data = nullptr;
    if (cudaMalloc(&data, bytes) == cudaSuccess) {
      slabs_.push_back({static_cast<char *>(data), bytes});
      at_ = slabs_.back().data;
      end_ = at_ + bytes;
      next_ = std::min(kLargestSlab, std::max(next_, bytes) * 2);
      return;
    }
    cudaGetLastError();
    if (bytes == at_least) throw std::bad_alloc();
  }
}

void Arena::allocate_exactly(size_t bytes, std::span<void *> blocks) {
  const std::lock_guard lock(mutex_);
  memory_->charge(bytes * blocks.size());
  size_t n = 0;
  try {
    for (Class &c = class_of(bytes); n < blocks.size(); n++) blocks[n] = cut(c);
  } catch (...) {
    put_back(bytes, blocks.first(n));
    memory_->discharge(bytes * (blocks.size() - n));
    throw;
  }
}

void *Arena::cut(Class &c) {
  if (!c.free.empty()) {
    void *block = c.free.back();
    c.free.pop_back();
    return block;
  }
  if (c.blocks + 1 > c.free.capacity()) c.free.reserve(std::max<size_t>(2 * c.free.capacity(), 16));
  cudaSetDevice(device_);
  if (size_t(end_ - at_) < c.size) add_slab(c.size);
  void *block = at_;
  at_ += c.size;
  c.blocks++;
  return block;
}

void Arena::release_exactly(size_t bytes, std::span<void *const> blocks) noexcept {
  const std::lock_guard lock(mutex_);
  put_back(bytes, blocks);
}

// The first is the first to be taken again.
void Arena::put_back(size_t bytes, std::span<void *const> blocks) noexcept {
  if (blocks.empty()) return;
  memory_->discharge(bytes * blocks.size());
  Class &c = class_of(bytes);
  c.free.insert(c.free.end(), blocks.rbegin(), blocks.rend());
}

}  // namespace kvq::cuda
