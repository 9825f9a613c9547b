// A sequence: what it holds, in position order: raw sinks, packed pages, a raw tail.
//
// Before the first commit everything lies in the tails, and layers may differ in length: the prompt is staged layer by layer.
// Changes that can fail are prepared outside (growth of raw lists, see LayerGrowth, and packing, see pack.h) and then applied by
// functions that cannot fail, so that a failing call leaves everything as it was.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>

#include "engine/pages.h"
#include "engine/policies.h"

namespace kvq {

// The first `count` rows of a packed page; they are tokens of consecutive positions, or those that page->positions lists.
struct PackedRef {
  Ref<PackedPage> page;
  uint64_t position = 0;  // of row 0
  uint32_t count = 0;
  uint64_t end() const { return (page->positions.empty() ? position + count - 1 : page->positions[count - 1]) + 1; }
};

// Blocks of the wire in the order of packing: consecutive blocks of `size` tokens, the last one cut if `tokens` is no multiple.
struct BlockRun {
  uint64_t position = 0, size = 0, tokens = 0;
  uint64_t blocks() const { return (tokens + size - 1) / size; }
};

// Device memory held an element that is not finite: the first token of the sequence whose K, V or Q had one.
struct BadToken {
  uint64_t position;
  uint32_t head, channel;
  const char *tensor;
};

struct SequenceLayer {
  explicit SequenceLayer(std::pmr::memory_resource *memory) : sinks(memory), tail(memory) {}
  RawRows sinks, tail;
  uint64_t packed = 0;   // tokens of the packed pages that this layer has
  bool complete = false;  // FINAL was given in the prompt that is being committed
  LayerFormats formats;
  std::shared_ptr<LayerStatistics> statistics;  // of the tokens before the first commit, if the policy wants them
  uint64_t length() const { return sinks.count + packed + tail.count; }
};

// The prompt of a commit that is not complete.
struct Prompt {
  bool open = false;      // a later prompt has begun: its chunks lie in the tails
  uint64_t start = 0;     // length when it began
  uint32_t complete = 0;  // layers that are FINAL; from the first on, the lists of packed pages are those of the whole prompt
  uint64_t length = 0;    // tokens that every complete layer has
};

class Sequence {
 public:
  Sequence(std::pmr::memory_resource *memory, size_t n_layers);
  Sequence(const Sequence &parent, std::pmr::memory_resource *memory, const Policies &policies);

  uint64_t length() const;  // tokens that every layer has
  uint64_t packed() const;  // of them, in packed pages
  bool uniform() const;     // do all layers have the same length?

  // Refuse what needs tokens before `end`, if one of them is bad.
  Status check_finite(uint64_t end = UINT64_MAX) const;

  // The list of a class's packed pages is another from page `first` on.
  void pages_changed(uint32_t cls, size_t first) noexcept {
    if (table) table->changed(cls, first);
  }

  // Forget the tokens from `length` on, which every layer has.
  void truncate(uint64_t length, uint64_t sink_tokens, uint32_t raw_page_tokens) noexcept;

  Vector<SequenceLayer> layers;  // those that read another layer's pages stay empty
  Vector<uint32_t> storing;      // indices of the others
  Vector<PackedRef> pages[2];    // packed pages by class
  Vector<BlockRun> blocks;
  Vector<float> scores;          // SemKV: of the tokens in the tails (NaN: not given yet)
  GivenTables given;             // kvq_policy_set
  Prompt prompt;
  bool committed = false;
  bool in_step = false;
  uint64_t released = 0;         // windows: packed tokens below this position are gone
  uint64_t counted = 0;          // tokens that the cache's total counts for it
  uint64_t version = 0;          // another one after every change
  std::optional<BadToken> bad;
  std::shared_ptr<PageTable> table;  // the backend's; forks begin without one

 private:
  void cut_packed(uint64_t end) noexcept;
};

// Rows that are to be added to a raw list.
struct Growth {
  explicit Growth(std::pmr::memory_resource *memory) : pages(memory) {}
  Vector<Ref<RawPage>> pages;  // the list with room for them, if it differs from the list that is there
  bool replaces = false;
  uint64_t tokens = 0;

  void reserve(PageStore &store, uint32_t layer, const RawRows &rows, uint64_t more) {
    replaces = grow(store, layer, rows, more, &pages);
    tokens = more;
  }
  const Vector<Ref<RawPage>> &list(const RawRows &rows) const { return replaces ? pages : rows.pages; }
  // Make `kept` of the tokens part of the list, and take that back.
  void apply(RawRows *rows, uint64_t kept) noexcept {
    rows->count += kept;
    if (replaces) rows->pages.swap(pages);
  }
  void undo(RawRows *rows, uint64_t kept) noexcept {
    rows->count -= kept;
    if (replaces) rows->pages.swap(pages);
  }
};

// New tokens of one layer: sinks are filled first, then the tail.
struct LayerGrowth {
  explicit LayerGrowth(std::pmr::memory_resource *memory) : sinks(memory), tail(memory) {}
  Growth sinks, tail;

  void reserve(PageStore &store, uint32_t layer, const SequenceLayer &rows, uint64_t to_sinks, uint64_t to_tail) {
    sinks.reserve(store, layer, rows.sinks, to_sinks);
    tail.reserve(store, layer, rows.tail, to_tail);
  }
  void apply(SequenceLayer *rows, uint64_t kept) noexcept {
    sinks.apply(&rows->sinks, std::min(kept, sinks.tokens));
    tail.apply(&rows->tail, kept - std::min(kept, sinks.tokens));
  }
  void undo(SequenceLayer *rows, uint64_t kept) noexcept {
    sinks.undo(&rows->sinks, std::min(kept, sinks.tokens));
    tail.undo(&rows->tail, kept - std::min(kept, sinks.tokens));
  }
};

// A sequence in one layer as attention and export see it.
class SequenceView {
 public:
  SequenceView() = default;
  // With the rows of `growth`, if given.
  SequenceView(const Sequence &sequence, uint32_t layer, const PageStore &store, const LayerGrowth *growth);

  size_t count() const { return sinks_.pages + packed_[0] + packed_[1] + tail_.pages; }
  PageList list() const { return {this, count(), get, sinks_.pages, {packed_[0], packed_[1]}}; }
  uint64_t length() const { return length_; }
  PageView page(size_t i) const;
  // Of a packed page: its class, and the page itself.
  uint32_t class_of(size_t i) const { return i < sinks_.pages + packed_[0] ? 0 : 1; }
  const PackedPage &packed_of(size_t i) const {
    i -= sinks_.pages;
    return *sequence_->pages[i < packed_[0] ? 0 : 1][i < packed_[0] ? i : i - packed_[0]].page;
  }
  static PageView get(const void *self, uint32_t, size_t i) { return static_cast<const SequenceView *>(self)->page(i); }

 private:
  struct Raw {
    const Ref<RawPage> *list = nullptr;
    uint32_t first = 0;
    uint64_t rows = 0, position = 0;
    size_t pages = 0;
  };
  Raw raw(const RawRows &rows, const Growth *growth, uint64_t position) const;
  PageView raw_page(const Raw &raw, size_t i) const;
  PageView packed_page(uint32_t cls, size_t i) const;

  const Sequence *sequence_ = nullptr;
  uint32_t layer_ = 0, page_tokens_ = 1;
  Raw sinks_, tail_;
  size_t packed_[2] = {0, 0};  // pages by class
  uint64_t packed_end_ = 0;    // position behind the packed tokens of this layer
  uint64_t length_ = 0;
};

}  // namespace kvq
