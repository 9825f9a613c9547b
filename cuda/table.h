// The packed pages of a sequence as attention kernels read them: entries in device memory that stay from step to step.
//
// Layers have the same room; in each, the entries of class 1 lie backwards in front of those of class 0, so that both can grow and
// all pages of a layer are one range.  Positions of tokens (pages of token classes) are the same for all layers and lie likewise.
#pragma once
#include <array>

#include "backend/backend.h"
#include "cuda/arena.h"
#include "cuda/plan.h"

namespace kvq::cuda {

// 16-byte units on their way into tables: from an offset in the upload to memory of the device.
struct Patch {
  void *to;
  uint32_t from, units;
};
// Carry out patches that lie on the device in front of what they copy.
cudaError_t apply_patches(const void *upload, uint32_t patches, cudaStream_t stream);

// What changes in the tables of a step's sequences.
struct Patches {
  explicit Patches(std::pmr::memory_resource *memory) : list(memory), data(memory) {}
  void add(void *to, const void *from, size_t bytes);
  Vector<Patch> list;  // offsets count from the beginning of `data`
  Vector<char> data;
};

// A sequence of a step.
struct StepSequence {
  const StepSource &source;
  size_t index;
  std::span<const LayerShape> shapes;
  PageList pages(uint32_t layer) const { return source.pages(index, layer); }  // until the next call
  bool stores(uint32_t layer) const { return shapes[layer].source == layer; }
};

class SequenceTable final : public PageTable {
 public:
  SequenceTable(std::pmr::memory_resource *memory, Arena &arena, size_t layers) : arena_(&arena), entries_(arena), positions_(arena), ready_(layers, Ready{}, memory) {}

  // What brings the table up to date is added to the patches.
  void update(const StepSequence &sequence, Patches *patches);
  // They have been carried out.
  void confirm(const StepSequence &sequence);

  // The entries of a layer with so many pages.
  const PageEntry *entries(uint32_t layer, const PageList &list) const { return at(layer, 1, uint32_t(list.packed[1])) + 1; }
  const uint32_t *positions() const { return positions_.as<const uint32_t>(); }

 private:
  using Ready = std::array<size_t, 2>;  // leading entries of each class that are on the device
  // Place of page i of a class in a layer's part; for class 1 also of the one in front of its first.
  uint32_t place(uint32_t cls, uint32_t i) const { return cls ? room_[1] - 1 - i : room_[1] + i; }
  PageEntry *at(uint32_t layer, uint32_t cls, uint32_t i) const {
    return entries_.as<PageEntry>() + ptrdiff_t(size_t(layer) * (room_[0] + room_[1])) + int32_t(place(cls, i));
  }
  bool forget_changes(const StepSequence &sequence);
  void make_room(const size_t (&most)[2]);
  void patch_entries(uint32_t layer, const PageList &list, uint32_t cls, Patches *patches);
  void patch_positions(uint32_t layer, const PageList &list, uint32_t cls, Patches *patches);

  Arena *arena_;
  Buffer entries_, positions_;
  uint32_t room_[2] = {0, 0};      // pages of each class
  uint32_t page_tokens_ = 0;       // of pages with positions; 0: there are none
  Vector<Ready> ready_;            // by layer
  Ready placed_ = {0, 0};          // the same for positions
};

}  // namespace kvq::cuda
