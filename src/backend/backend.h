// What the engine asks of a device: raw pages, packed pages, and attention over both.
//
// The engine owns sequences and decides which tokens lie where; a backend owns the layout of a page and everything that touches
// its bytes.  Memory of pages comes from allocate_page, so a backend may place it on its device.
#pragma once
#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>

#include "codec/codec.h"
#include "policy/policy.h"
#include "util/memory.h"
#include "util/status.h"

namespace kvq {

// One layer, resolved from kvq_layer (no zero stands for a default any more).
struct LayerShape {
  uint32_t kv_heads, q_heads, dim_k, dim_v, rope_layout, rotary_dim, rotary_first, window;
  uint32_t source;  // layer whose pages it reads; its own index if it stores them
  HeadShape head(uint32_t tensor) const;
};

// Layout of a packed page of one layer: all KV heads, K and V, page_tokens tokens.  Backends derive from it.
struct PageFormat {
  explicit PageFormat(std::pmr::memory_resource *memory) : k(memory), v(memory) {}
  virtual ~PageFormat() = default;
  std::pmr::vector<HeadFormat> k, v;  // [kv_heads]
  uint32_t page_tokens = 0;
  size_t bytes = 0;                   // of a page
};

// Consecutive rows of a page.
struct PageRows {
  void *page;
  uint32_t first, count;
};

// Rows of a prompt's chunk in the caller's tensors, from row `first` on.
struct ChunkRows {
  const kvq_tensor &k, &v;
  const kvq_tensor *q;  // or nullptr
  uint64_t first;
};

// A piece of a sequence as attention sees it: rows [first, first + count) of a page.
struct PageView {
  const void *page = nullptr;
  const PageFormat *format = nullptr;   // nullptr: a raw page
  uint32_t first = 0, count = 0;
  uint64_t position = 0;                // of row `first`; the others follow
  const uint32_t *positions = nullptr;  // or, for pages of a token class: position of row `first`, first + 1, ...; ascending
};

// The pages of one sequence in one layer; get(self, layer, i) for i < count: raw ones in front, packed ones by class, raw ones behind.
struct PageList {
  const void *self;
  size_t count;
  PageView (*get)(const void *self, uint32_t layer, size_t i);
  size_t front = 0, packed[2] = {0, 0};  // raw pages in front; packed pages of each class
};

// What a backend keeps of the packed pages of a sequence from step to step, so that a step costs what has changed since the last.
struct PageTable {
  virtual ~PageTable() = default;
  // The list of a class is another from page `first` on, in some layer.
  void changed(uint32_t cls, size_t first) noexcept { same[cls] = std::min(same[cls], first); }
  size_t same[2] = {0, 0};  // pages that are what they were when the backend last looked
};

struct AttendSequence {
  PageList pages;
  uint64_t length;       // tokens that the newest query sees (before the window); pages hold exactly these
  uint32_t first_query;  // row in q, out, lse
  uint32_t n_queries;    // queries of the newest n tokens: query i sees positions < length - n_queries + i + 1
};

struct AttendCall {
  uint32_t layer;                // index for PageList::get
  const LayerShape *shape;
  const kvq_tensor *q, *out;     // strides resolved
  float *lse;                    // or nullptr
  float scale, softcap;          // softcap 0: none
  uint32_t window;               // 0: none
  const float *sinks;            // [q_heads] or nullptr
  std::span<const AttendSequence> sequences;
  uint32_t head_first = 0, head_count = 0;  // KV heads that a caller with threads of its own asks for; 0: all
  uint32_t caller = 0;             // its number among those that run at once
  uint64_t *saturated = nullptr;   // increased by query elements beyond +-65504
  uint32_t heads() const { return head_count ? head_count : shape->kv_heads; }
};

// A step as a backend that plans ahead sees it, while it begins: the pages of every layer with the new rows, which append fills.
struct StepSource {
  virtual ~StepSource() = default;
  virtual size_t sequences() const = 0;
  virtual uint32_t tokens(size_t sequence) const = 0;  // new ones: rows of the step's tensors, in the order of the sequences
  virtual bool invariant() const = 0;  // results of a sequence must not depend on the others, in any bit
  virtual bool stores(uint32_t layer) const = 0;
  virtual uint64_t length(size_t sequence, uint32_t layer) const = 0;  // with the new tokens
  virtual PageList pages(size_t sequence, uint32_t layer) const = 0;
  virtual PageRows row(size_t sequence, uint32_t layer, uint32_t token) const = 0;  // where a new token goes
  virtual std::shared_ptr<PageTable> &table(size_t sequence) const = 0;  // the backend's, empty at first; it ends with the sequence
};

// The first element of K, V or Q of a sequence's new tokens that was not finite.
struct StepFinding {
  bool found = false;
  uint32_t token, head, channel;  // row of the step's tensors
  const char *tensor;
};

// Scratch of attention calls: made when a step begins, so that per-layer calls allocate nothing.
struct Workspace {
  virtual ~Workspace() = default;
  size_t bytes = 0;
};

// What a backend throws where a function has no status to return: its device has failed.
struct DeviceFailure : std::runtime_error {
  DeviceFailure(const char *what, const char *why) : std::runtime_error(std::string(what) + ": " + why) {}
};

class Backend {
 public:
  virtual ~Backend() = default;

  // Tokens of a raw page (all layers alike), and its bytes in a layer.
  virtual uint32_t raw_page_tokens() const = 0;
  virtual size_t raw_page_bytes(const LayerShape &shape) const = 0;
  // Tokens of a packed page, a multiple of the recipe's.
  virtual uint32_t page_tokens(uint32_t recipe) const { return recipe; }
  // Format of packed pages; takes the heads' formats.  Its bytes depend only on codecs, shapes and the multiset of table entries.
  virtual std::shared_ptr<const PageFormat> make_format(const LayerShape &shape, uint32_t page_tokens,
                                                        std::pmr::vector<HeadFormat> &&k, std::pmr::vector<HeadFormat> &&v) = 0;
  virtual void *allocate_page(size_t bytes) = 0;  // throws std::bad_alloc
  virtual void release_page(void *page, size_t bytes) noexcept = 0;
  // Many pages of one size: all, or an exception and none.
  virtual void allocate_pages(size_t bytes, std::span<void *> pages);
  virtual void release_pages(size_t bytes, std::span<void *const> pages) noexcept;

  // Enter rows [first, first + rows.count) of k and v (rule 1.4) into a raw page.  NONFINITE names token (`first` based), head and
  // channel; the rows written so far are garbage that nobody reads.  *saturated is increased.
  virtual Status store_rows(const LayerShape &shape, const kvq_tensor &k, const kvq_tensor &v, uint64_t first, PageRows rows,
                            uint64_t *saturated) = 0;
  // A chunk of a prompt: store_rows into consecutive pieces, check_rows of as many queries, and add_statistics of all if asked for.
  // Where that fails, what was added so far is garbage.
  virtual Status store_chunk(const LayerShape &shape, const ChunkRows &rows, std::span<const PageRows> pieces, LayerStatistics *statistics,
                             uint64_t *saturated);
  // Rule 1.4 on finite rows [0, count), to host memory [count][heads][dim].
  virtual void enter_rows(const kvq_tensor &x, uint64_t count, uint32_t heads, uint32_t dim, uint16_t *out);
  // Refuse non-finite elements of rows [first, first + count) of a tensor [..][heads][dim]; `name` is "q".  Counts saturation.
  virtual Status check_rows(const kvq_tensor &x, uint64_t first, uint64_t count, uint32_t heads, uint32_t dim, const char *name,
                            uint64_t *saturated) = 0;
  virtual void copy_rows(const LayerShape &shape, const void *from, uint32_t from_row, void *to, uint32_t to_row, uint32_t count) = 0;
  // Raw rows of one head and tensor as fp16 [count][dim] in host memory.
  virtual void load_rows(const LayerShape &shape, PageRows rows, uint32_t head, uint32_t tensor, uint16_t *out) = 0;
  // Add raw rows, and rows [q_first, q_first + total count) of q if given (checked before), to a layer's statistics (section 6).
  virtual void add_statistics(const LayerShape &shape, std::span<const PageRows> kv, const kvq_tensor *q, uint64_t q_first,
                              LayerStatistics *statistics) = 0;
  // Add the keys of raw rows to the sums of every head.
  virtual void sum_keys(const LayerShape &shape, std::span<const PageRows> rows, std::span<CenterSum> sums);

  // Encode raw tokens, in order, into rows of packed pages, in order (equal totals).  Column codecs get whole groups at whole groups.
  virtual void pack(const LayerShape &shape, const PageFormat &format, std::span<const PageRows> from, std::span<const PageRows> to) = 0;
  virtual void copy_packed(const PageFormat &format, const void *from, void *to) = 0;
  // Rows [0, count) of a page of progressive codecs as a page of narrower ones (codec.h, narrow).
  virtual void narrow_packed(const PageFormat &from_format, const void *from, const PageFormat &to_format, void *to,
                             uint32_t count) = 0;
  // Rows of one head and tensor of a packed page, appended to `block` (column codecs: first is the start of a group and the
  // last group is whole).
  virtual void unpack(const PageFormat &format, const void *page, uint32_t first, uint32_t count, uint32_t head, uint32_t tensor,
                      Block *block) = 0;

  // How many calls of attend over head ranges may run at once with one workspace; before the first workspace is made.
  virtual void expect_callers(uint32_t) {}
  // One workspace per step, for attention in any of these layers; its bytes depend on their dimensions only.
  virtual std::shared_ptr<Workspace> make_workspace(std::span<const LayerShape> layers) = 0;
  virtual Status attend(const AttendCall &call, Workspace *workspace) = 0;

  // Token scores in device memory, to host memory; only where steps are planned.
  virtual Status fetch_scores(const float *, size_t, float *) { return KVQ_OK; }

  // ---- devices: per-layer calls only launch, so the pages of all layers are handed over once, when the step begins.  A backend
  // that does not plan gets store_rows, check_rows and attend per layer instead of the calls below.
  virtual bool plans_steps() const { return false; }
  virtual Status plan_step(const StepSource &, std::span<const LayerShape>, Workspace *) { return KVQ_OK; }
  // Enter a layer's new rows where the plan says.  Elements that are not finite enter as +0 and are reported by finish_step.
  virtual Status append(uint32_t, const LayerShape &, const kvq_tensor &, const kvq_tensor &, Workspace *) { return KVQ_OK; }
  // Was the append of this layer captured in a graph, so that a replay stands for the call?
  virtual bool replays(uint32_t) const { return false; }
  // Wait for what the step's calls wrote.  findings: one for each sequence of the step.  May be called again.
  virtual Status finish_step(Workspace *, std::span<StepFinding>, uint64_t *) { return KVQ_OK; }
};

}  // namespace kvq
