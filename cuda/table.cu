#include "cuda/table.h"

#include <algorithm>
#include <cstring>

#include "cuda/page_format.h"

namespace kvq::cuda {

namespace {

constexpr uint32_t kThreads = 128, kBlocks = 4;  // blocks of threads of a patch
constexpr uint32_t kMostUnits = 8192;            // of a patch that others are joined to

__global__ void __launch_bounds__(kThreads) patch_kernel(const Patch *patches, const char *data) {
  const Patch patch = patches[blockIdx.x];
  const uint4 *from = reinterpret_cast<const uint4 *>(data + patch.from);
  for (uint32_t i = blockIdx.y * kThreads + threadIdx.x; i < patch.units; i += kThreads * kBlocks) static_cast<uint4 *>(patch.to)[i] = from[i];
}

PageView page_at(const PageList &list, uint32_t layer, uint32_t cls, size_t i) {
  return list.get(list.self, layer, list.front + (cls ? list.packed[0] : 0) + i);
}

}  // namespace

cudaError_t apply_patches(const void *upload, uint32_t patches, cudaStream_t stream) {
  if (patches == 0) return cudaSuccess;
  const auto *list = static_cast<const Patch *>(upload);
  patch_kernel<<<dim3(patches, kBlocks), kThreads, 0, stream>>>(list, reinterpret_cast<const char *>(list + patches));
  return cudaGetLastError();
}

void Patches::add(void *to, const void *from, size_t bytes) {
  static_assert(sizeof(Patch) % 16 == 0 && sizeof(PageEntry) % 16 == 0);
  const size_t at = data.size(), units = (bytes + 15) / 16;
  data.resize(at + units * 16);
  std::memcpy(data.data() + at, from, bytes);
  if (!list.empty() && list.back().units < kMostUnits && static_cast<char *>(list.back().to) + size_t(list.back().units) * 16 == to)
    list.back().units += uint32_t(units);
  else
    list.push_back({to, uint32_t(at), uint32_t(units)});
}

// Count what the engine has changed; is everything there then?
bool SequenceTable::forget_changes(const StepSequence &sequence) {
  bool complete = true;
  for (uint32_t l = 0; l < ready_.size(); l++)
    for (uint32_t c = 0; c < 2; c++) ready_[l][c] = std::min(ready_[l][c], same[c]);
  for (uint32_t c = 0; c < 2; c++) placed_[c] = std::min(placed_[c], same[c]), same[c] = SIZE_MAX;
  for (uint32_t l = 0; l < ready_.size() && complete; l++) {
    if (!sequence.stores(l)) continue;
    const PageList list = sequence.pages(l);
    complete = ready_[l][0] >= list.packed[0] && ready_[l][1] >= list.packed[1];
  }
  return complete;
}

// Half as much again as is needed now: what is there is copied only now and then.  Where there is no room the table stays as it is.
void SequenceTable::make_room(const size_t (&most)[2]) {
  if (most[0] <= room_[0] && most[1] <= room_[1]) return;
  uint32_t room[2];
  for (uint32_t c = 0; c < 2; c++) room[c] = most[c] <= room_[c] ? room_[c] : uint32_t(most[c] + most[c] / 2 + 8);
  const size_t pages = size_t(room[0]) + room[1];
  Buffer entries(*arena_, pages * ready_.size() * sizeof(PageEntry)), positions(*arena_);
  if (page_tokens_) positions.reserve(pages * page_tokens_ * sizeof(uint32_t));
  entries_ = std::move(entries), positions_ = std::move(positions);
  ready_.assign(ready_.size(), Ready{0, 0});
  placed_ = {0, 0};
  room_[0] = room[0], room_[1] = room[1];
}

void SequenceTable::update(const StepSequence &sequence, Patches *patches) {
  if (forget_changes(sequence)) return;
  size_t most[2] = {0, 0};
  for (uint32_t l = 0; l < ready_.size(); l++) {
    if (!sequence.stores(l)) continue;
    const PageList list = sequence.pages(l);
    for (uint32_t c = 0; c < 2; c++) {
      most[c] = std::max(most[c], list.packed[c]);
      if (list.packed[c] == 0) continue;
      const PageView view = page_at(list, l, c, 0);
      if (view.positions) page_tokens_ = view.format->page_tokens;
    }
  }
  make_room(most);
  Ready placed = placed_;
  for (uint32_t l = 0; l < ready_.size(); l++) {
    if (!sequence.stores(l)) continue;
    const PageList list = sequence.pages(l);
    for (uint32_t c = 0; c < 2; c++) {
      patch_entries(l, list, c, patches);
      if (page_tokens_ == 0 || list.packed[c] <= placed[c]) continue;
      patch_positions(l, list, c, patches);
      placed[c] = list.packed[c];
    }
  }
}

void SequenceTable::confirm(const StepSequence &sequence) {
  for (uint32_t l = 0; l < ready_.size(); l++) {
    if (!sequence.stores(l)) continue;
    const PageList list = sequence.pages(l);
    for (uint32_t c = 0; c < 2; c++) {
      ready_[l][c] = std::max(ready_[l][c], list.packed[c]);
      placed_[c] = std::max(placed_[c], list.packed[c]);
    }
  }
}

void SequenceTable::patch_entries(uint32_t layer, const PageList &list, uint32_t cls, Patches *patches) {
  const size_t first = ready_[layer][cls], end = list.packed[cls];
  for (size_t n = first; n < end; n++) {
    const uint32_t i = uint32_t(cls ? end - 1 - (n - first) : n);  // upwards in memory
    const PageView view = page_at(list, layer, cls, i);
    const auto &format = *static_cast<const CudaPageFormat *>(view.format);
    PageEntry entry{view.page, format.raw ? kRawKind : cls, kNotFull, view.first, view.count, uint32_t(view.position), 0};
    if (view.positions) entry.positions = 1 + place(cls, i) * page_tokens_;
    if (view.count == format.page_tokens)
      entry.last = view.positions ? view.positions[view.count - 1] : uint32_t(view.position + view.count - 1);
    patches->add(at(layer, cls, i), &entry, sizeof entry);
  }
}

void SequenceTable::patch_positions(uint32_t layer, const PageList &list, uint32_t cls, Patches *patches) {
  const size_t first = placed_[cls], end = list.packed[cls];
  for (size_t n = first; n < end; n++) {
    const uint32_t i = uint32_t(cls ? end - 1 - (n - first) : n);
    const PageView view = page_at(list, layer, cls, i);
    patches->add(positions_.as<uint32_t>() + size_t(place(cls, i)) * page_tokens_, view.positions, view.count * sizeof(uint32_t));
  }
}

}  // namespace kvq::cuda
