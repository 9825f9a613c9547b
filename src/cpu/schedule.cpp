#include "cpu/schedule.h"

#include <algorithm>
#include <cstring>

namespace kvq::cpu {

CpuWorkspace::CpuWorkspace(std::pmr::memory_resource *memory, const Dims &dims, uint32_t threads, uint32_t callers)
    : dims(dims), memory_(memory), slices_(std::max(threads, callers), memory), parts_(threads > 1 ? kMostParts : callers, memory) {
  const auto rounded = [](size_t n) { return (n + kAlign - 1) / kAlign * kAlign; };
  Slice slice;
  Collected part;
  const size_t slice_bytes = rounded(arrange_slice(dims, nullptr, &slice)), part_bytes = rounded(arrange_part(dims, nullptr, &part));
  bytes = slice_bytes * slices_.size() + part_bytes * parts_.size();
  block_ = static_cast<char *>(memory->allocate(bytes, kAlign));
  std::memset(block_, 0, bytes);
  char *at = block_;
  for (Slice &each : slices_) arrange_slice(dims, at, &each), at += slice_bytes;
  for (Collected &each : parts_) arrange_part(dims, at, &each), at += part_bytes;
}

namespace {

// How a sequence is cut.  Nothing here depends on the call's other sequences, on the heads that it asks for, or on threads.
struct Cut {
  uint32_t blocks, heads, parts;
  uint32_t items() const { return blocks * heads * parts; }
};

// A run of sequences whose parts fit the workspace.
struct Work {
  const Kernels &kernels;
  const Tables &tables;
  const AttendCall &call;
  CpuWorkspace &workspace;
  std::span<const AttendSequence> sequences;
  bool alone;  // the thread that begins a block of rows does all of its parts

  uint32_t ratio() const { return call.shape->q_heads / call.shape->kv_heads; }
  Cut cut(const AttendSequence &sequence) const {
    const uint32_t blocks = (sequence.n_queries * ratio() + kRows - 1) / kRows, heads = call.shape->kv_heads;
    const uint64_t seen = call.window ? std::min<uint64_t>(sequence.length, uint64_t(call.window) + sequence.n_queries) : sequence.length;
    return {blocks, call.heads(), part_count(seen, sequence.pages.count, blocks * heads)};
  }

  RowBlock block(const AttendSequence &sequence, const Cut &cut, uint32_t number) const {
    const uint32_t first = number % cut.blocks * kRows, rows = sequence.n_queries * ratio();
    return {call, sequence, call.head_first + number / cut.blocks, first, std::min(kRows, rows - first)};
  }

  void whole(const RowBlock &rows, const Cut &cut, Slice &slice) const {
    if (cut.parts == 1) return attend_rows(kernels, tables, workspace.dims, rows, slice);
    const Collected &sum = workspace.part(call.caller), own = collected(slice);
    for (uint32_t p = 0; p < cut.parts; p++) {
      attend_part(kernels, tables, workspace.dims, rows, {p, cut.parts}, slice);
      if (p == 0)
        copy_rows(workspace.dims, rows.count, own, sum);
      else
        add_rows(workspace.dims, rows.count, own, sum);
    }
    copy_rows(workspace.dims, rows.count, sum, own);
    finish_rows(kernels, tables, workspace.dims, rows, slice);
  }

  // One item of a pool: a block of rows, or a part of one, which `first` says where to keep.
  void item(const AttendSequence &sequence, const Cut &cut, uint32_t item, uint32_t first, Slice &slice) const {
    if (alone || cut.parts == 1) return whole(block(sequence, cut, item), cut, slice);
    const RowBlock rows = block(sequence, cut, item / cut.parts);
    attend_part(kernels, tables, workspace.dims, rows, {item % cut.parts, cut.parts}, slice);
    copy_rows(workspace.dims, rows.count, collected(slice), workspace.part(first + item));
  }

  uint32_t items(const Cut &cut) const { return alone ? cut.blocks * cut.heads : cut.items(); }
  uint32_t kept(const Cut &cut) const { return alone || cut.parts == 1 ? 0 : cut.items(); }

  static void run(void *self, uint32_t number, uint32_t thread) {
    const Work &work = *static_cast<Work *>(self);
    uint32_t first = 0;
    for (const AttendSequence &sequence : work.sequences) {
      const Cut cut = work.cut(sequence);
      if (number < work.items(cut)) return work.item(sequence, cut, number, first, work.workspace.slice(thread));
      number -= work.items(cut);
      first += work.kept(cut);
    }
  }

  // Put parts together that threads have kept.
  void finish() const {
    Slice &slice = workspace.slice(0);
    uint32_t next = 0;
    for (const AttendSequence &sequence : sequences) {
      const Cut cut = this->cut(sequence);
      for (uint32_t i = 0; i < kept(cut); i += cut.parts, next += cut.parts) {
        const RowBlock rows = block(sequence, cut, i / cut.parts);
        for (uint32_t p = 1; p < cut.parts; p++)
          add_rows(workspace.dims, rows.count, workspace.part(next + p), workspace.part(next));
        copy_rows(workspace.dims, rows.count, workspace.part(next), collected(slice));
        finish_rows(kernels, tables, workspace.dims, rows, slice);
      }
    }
  }
};

}  // namespace

void attend_all(const Kernels &kernels, const Tables &tables, const AttendCall &call, CpuWorkspace &workspace, Pool &pool) {
  const bool by_caller = call.heads() < call.shape->kv_heads;
  Work work{kernels, tables, call, workspace, call.sequences, by_caller || pool.threads() == 1};
  for (size_t begin = 0; begin < call.sequences.size();) {
    size_t end = begin;
    uint32_t items = 0, kept = 0;
    for (; end < call.sequences.size(); end++) {
      const Cut cut = work.cut(call.sequences[end]);
      if (kept + work.kept(cut) > workspace.parts()) break;
      kept += work.kept(cut), items += work.items(cut);
    }
    work.sequences = call.sequences.subspan(begin, end - begin);
    if (work.alone)
      for (uint32_t i = 0; i < items; i++) Work::run(&work, i, call.caller);
    else
      pool.run(items, Work::run, &work);
    work.finish();
    begin = end;
  }
}

}  // namespace kvq::cpu
