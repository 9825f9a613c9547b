// Lengths, truncation, copies and views of a sequence.
#include "engine/sequence.h"

#include <algorithm>

namespace kvq {

Sequence::Sequence(std::pmr::memory_resource *memory, size_t n_layers)
    : layers(memory), storing(memory), pages{Vector<PackedRef>(memory), Vector<PackedRef>(memory)}, blocks(memory), scores(memory) {
  layers.reserve(n_layers);
  for (size_t l = 0; l < n_layers; l++) layers.emplace_back(memory);
}

Sequence::Sequence(const Sequence &parent, std::pmr::memory_resource *memory, const Policies &policies)
    : layers(memory), storing(parent.storing, memory), pages{Vector<PackedRef>(parent.pages[0], memory), Vector<PackedRef>(parent.pages[1], memory)}, blocks(parent.blocks, memory), scores(parent.scores, memory), given(parent.given), prompt(parent.prompt), committed(parent.committed), released(parent.released) {
  layers.reserve(parent.layers.size());
  for (const SequenceLayer &from : parent.layers) {
    SequenceLayer &layer = layers.emplace_back(memory);
    RawRows(from.sinks, memory).swap(layer.sinks);
    RawRows(from.tail, memory).swap(layer.tail);
    layer.packed = from.packed;
    layer.complete = from.complete;
    layer.formats = from.formats;
    if (from.statistics) layer.statistics = policies.copy_statistics(*from.statistics);
  }
}

uint64_t Sequence::length() const {
  uint64_t shortest = UINT64_MAX;
  for (const uint32_t l : storing) shortest = std::min(shortest, layers[l].length());
  return shortest;
}

uint64_t Sequence::packed() const {
  uint64_t least = UINT64_MAX;
  for (const uint32_t l : storing) least = std::min(least, layers[l].packed);
  return committed ? least : 0;
}

bool Sequence::uniform() const {
  return std::all_of(storing.begin(), storing.end(), [&](uint32_t l) { return layers[l].length() == layers[storing[0]].length(); });
}

Status Sequence::check_finite(uint64_t end) const {
  if (!bad || bad->position >= end) return KVQ_OK;
  return fail(KVQ_E_NONFINITE, "%s: the token at position %llu, head %u, channel %u was NaN or infinite in device memory; truncate the sequence to %llu tokens or fewer",
              bad->tensor, (unsigned long long)bad->position, bad->head, bad->channel, (unsigned long long)bad->position);
}

void Sequence::truncate(uint64_t length, uint64_t sink_tokens, uint32_t raw_page_tokens) noexcept {
  const uint64_t sinks = committed ? std::min(length, sink_tokens) : 0;
  uint64_t tail = 0;
  for (const uint32_t l : storing) {
    SequenceLayer &layer = layers[l];
    layer.sinks.truncate(raw_page_tokens, sinks);
    layer.packed = std::min(layer.packed, length - sinks);
    tail = length - sinks - layer.packed;
    layer.tail.truncate(raw_page_tokens, tail);
  }
  cut_packed(length);
  if (scores.size() > tail) scores.resize(tail);
  if (committed && length <= prompt.start) prompt = Prompt();
  if (length <= sink_tokens) released = 0;
  if (bad && bad->position >= length) bad.reset();
}

void Sequence::cut_packed(uint64_t end) noexcept {
  for (uint32_t cls = 0; cls < 2; cls++) {
    Vector<PackedRef> &list = pages[cls];
    while (!list.empty() && list.back().position >= end) list.pop_back();
    pages_changed(cls, list.size());
    if (list.empty() || list.back().end() <= end) continue;
    PackedRef &last = list.back();
    pages_changed(cls, list.size() - 1);
    const Vector<uint32_t> &positions = last.page->positions;
    last.count = positions.empty()
                     ? uint32_t(end - last.position)
                     : uint32_t(std::lower_bound(positions.begin(), positions.begin() + last.count, end) - positions.begin());
  }
  while (!blocks.empty() && blocks.back().position >= end) blocks.pop_back();
  if (!blocks.empty()) blocks.back().tokens = std::min(blocks.back().tokens, end - blocks.back().position);
}

// ---- views

SequenceView::SequenceView(const Sequence &sequence, uint32_t layer, const PageStore &store, const LayerGrowth *growth)
    : sequence_(&sequence), layer_(layer), page_tokens_(store.raw_tokens) {
  const SequenceLayer &own = sequence.layers[layer];
  sinks_ = raw(own.sinks, growth ? &growth->sinks : nullptr, 0);
  packed_end_ = sinks_.rows + own.packed;
  tail_ = raw(own.tail, growth ? &growth->tail : nullptr, packed_end_);
  length_ = packed_end_ + tail_.rows;
  for (uint32_t c = 0; c < 2; c++) {
    const Vector<PackedRef> &list = sequence.pages[c];
    // A layer that is not complete yet does not have the pages of the prompt that is being committed.
    packed_[c] = list.size();
    while (packed_[c] > 0 && list[packed_[c] - 1].position >= packed_end_) packed_[c]--;
  }
}

SequenceView::Raw SequenceView::raw(const RawRows &rows, const Growth *growth, uint64_t position) const {
  Raw out;
  out.list = (growth ? growth->list(rows) : rows.pages).data();
  out.first = rows.first;
  out.rows = rows.count + (growth ? growth->tokens : 0);
  out.position = position;
  if (out.rows) out.pages = size_t((out.first + out.rows + page_tokens_ - 1) / page_tokens_);
  return out;
}

PageView SequenceView::raw_page(const Raw &raw, size_t i) const {
  const uint64_t begin = i ? i * page_tokens_ : raw.first;  // rows counted from row 0 of the first page
  const uint64_t end = std::min<uint64_t>((i + 1) * page_tokens_, raw.first + raw.rows);
  PageView view;
  view.page = raw.list[i]->memory.data();
  view.first = uint32_t(begin - i * page_tokens_);
  view.count = uint32_t(end - begin);
  view.position = raw.position + begin - raw.first;
  return view;
}

PageView SequenceView::packed_page(uint32_t cls, size_t i) const {
  const PackedRef &ref = sequence_->pages[cls][i];
  PageView view;
  view.page = ref.page->layers[layer_].data();
  view.format = sequence_->layers[layer_].formats.of[cls].get();
  view.count = ref.count;
  view.position = ref.position;
  if (ref.page->positions.empty())
    view.count = uint32_t(std::min<uint64_t>(view.count, packed_end_ - ref.position));
  else
    view.positions = ref.page->positions.data();
  return view;
}

PageView SequenceView::page(size_t i) const {
  if (i < sinks_.pages) return raw_page(sinks_, i);
  i -= sinks_.pages;
  for (uint32_t c = 0; c < 2; c++) {
    if (i < packed_[c]) return packed_page(c, i);
    i -= packed_[c];
  }
  return raw_page(tail_, i);
}

}  // namespace kvq
