// Packing: raw tokens at the front of the tail become packed pages.
//
// A plan does all that can fail (decide formats, allocate, encode) without a visible change; apply() then changes the sequence and
// cannot fail.  Plans of several sequences can be made before any is applied.
//
// With PM-KVQ more packed tokens may need a narrower width: then the plan rewrites all packed pages of the layer, too.
#pragma once
#include <cstdint>
#include <memory>
#include <span>

#include "engine/sequence.h"
#include "policy/policy.h"

namespace kvq {

// Tokens that become packed in blocks of `size`.  With SemKV each block chooses its high tokens on its own.
struct Segment {
  uint64_t tokens = 0, size = 0;
  Rounding rounding = Rounding::half_even;
};

// The blocks that are due with `tail` tokens behind the sinks (section 7).
Segment due_segment(const Recipe &recipe, uint64_t tail);

class PackPlan {
 public:
  PackPlan(std::pmr::memory_resource *memory, const Recipe &recipe, PageStore &store, Policies &policies);

  // Plan to pack `segments`, one behind the other, in `layers` of a sequence, whose new raw tokens lie in the tails already.
  // scores: of the tokens in the tails (SemKV).  At the first commit this also splits off the sinks and decides the formats.
  Status make(Sequence *sequence, std::span<const Segment> segments, std::span<const uint32_t> layers, std::span<const float> scores);
  void apply() noexcept;
  bool made() const { return sequence_ != nullptr; }

 private:
  // Rows of a packed page that are to be written.
  struct Target {
    PackedPage *page;
    uint32_t row, count;
    bool fresh() const { return row == 0; }  // no layer of the plan has memory for it yet
  };
  // What one class's list of pages becomes.
  struct Extension {
    explicit Extension(std::pmr::memory_resource *memory) : list(memory), fresh(memory), copies(memory), targets(memory) {}
    Vector<PackedRef> list;   // room for the whole list, if pages are added
    Vector<PackedRef> fresh;  // added pages
    Vector<Ref<PackedPage>> copies;  // by page of the list: replaces one that is to be written and that others hold too
    uint32_t added = 0;       // tokens added to the last page
    Vector<Target> targets;
  };
  struct LayerPlan {
    explicit LayerPlan(std::pmr::memory_resource *memory) : sinks(memory), tail(memory), memory(memory) {}
    uint32_t layer = 0;
    RawRows sinks, tail;  // afterwards
    LayerFormats formats;
    bool narrows = false;  // what is packed goes to other formats
    std::shared_ptr<LayerTables> to_freeze;
    Vector<std::pair<PackedPage *, PageMemory>> memory;  // of narrowed and fresh pages
  };

  Status select(std::span<const Segment> segments, std::span<const float> scores);
  void extend(uint32_t cls, std::span<const uint32_t> layers);
  void add_rows(uint32_t cls, uint64_t position, const Ref<PackedPage> &page, uint32_t row, uint32_t count);
  const Ref<PackedPage> &page_at(uint32_t cls, size_t i) const;
  void copy_page(uint32_t cls, size_t i);
  PageMemory narrowed(const PackedRef &ref, const LayerPlan &plan);
  void narrow_pages();
  void find_targets(uint32_t cls, uint64_t from);
  size_t first_changed(uint32_t cls) const;
  void add_blocks(std::span<const Segment> segments);
  Status plan_layer(uint32_t layer);
  void encode(LayerPlan *plan, const SequenceLayer &rows);
  void sources(const SequenceLayer &rows, uint32_t cls, Vector<PageRows> *from) const;
  void *written(const LayerPlan &plan, const Target &target) const;
  RawRows part(const RawRows &rows, uint64_t from, uint64_t count) const;

  std::pmr::memory_resource *memory_;
  const Recipe &recipe_;
  PageStore &store_;
  Policies &policies_;
  Sequence *sequence_ = nullptr;
  bool first_commit_ = false, extends_ = false;
  uint64_t tokens_ = 0;       // to be packed
  uint64_t position_ = 0;     // of the first of them: the packed tokens end here so far
  uint64_t skip_ = 0;         // sinks at the front of the tails (first commit)
  Vector<uint8_t> classes_;   // of the tokens, with SemKV
  Extension extension_[2];
  Vector<BlockRun> blocks_;
  Vector<float> scores_;      // of the tokens that stay
  Vector<LayerPlan> layers_;
};

}  // namespace kvq
