// What attention kernels read of a step, in device memory that step_begin refreshes: a graph of the per-layer calls stays valid.
#pragma once
#include <cuda_runtime.h>

#include "cuda/layout.h"
#include "cuda/rows.h"

namespace kvq::cuda {

// What a device offers to a launch: processors, and shared memory of a block and of a processor.
struct Processors {
  uint32_t count = 1, block_bytes = 0, bytes = 0;
  bool early = false;  // a kernel may begin before the one in front of it has ended
};

constexpr uint32_t kRows = 4;  // (query, head) pairs of a row block; a block of threads works on one or more
constexpr uint32_t kMostItemRows = 16;
constexpr uint32_t kRawKind = 2;
constexpr uint32_t kMaxSplits = 64;  // items that share the pages of a sequence

// A piece of a sequence, as PageView.
struct alignas(16) PageEntry {
  const void *page;
  uint32_t kind;       // class, or kRawKind
  uint32_t last;       // of a full packed page: its largest position; else kNotFull
  uint32_t first, count;
  uint32_t position;   // of row `first`
  uint32_t positions;  // 1 + index in SequenceEntry::positions of that of row `first`; 0: the others follow
};
constexpr uint32_t kNotFull = ~0u;

// A sequence in one layer: `front` raw pages, `listed` pages of its table (packed ones; raw where the recipe packs to fp16), raw pages.
struct SequenceEntry {
  const TensorFormat *tensors[2];  // of class 0 and 1, [kv_heads][2]
  const PageEntry *table;          // kept from step to step (table.h)
  const uint32_t *positions;
  uint32_t raw_begin, pages;       // raw pages in Plan::pages; number of all pages
  uint32_t front, listed, packed;  // packed: `listed` or 0
  uint32_t length, n_queries, first_query;
  uint32_t splits;
  uint32_t flip;                   // 1: classes are numbered the other way round in the table
  uint32_t index;                  // in Plan::findings
  uint32_t first_tile, page_tiles; // prompts: among the tiles of all sequences; tiles of a listed page
};

// Page `p` of a sequence.
KVQ_HD inline const PageEntry &page_of(const PageEntry *raw, const SequenceEntry &sequence, uint32_t p) {
  if (p < sequence.front) return raw[sequence.raw_begin + p];
  p -= sequence.front;
  return p < sequence.listed ? sequence.table[p] : raw[sequence.raw_begin + sequence.front + p - sequence.listed];
}

// What the items of all KV heads share, with all of its sequence: one read before pages and queries are on their way.
struct ShareEntry {
  SequenceEntry sequence;
  uint32_t block, split;
  uint32_t first_page, packed;     // packed pages of this split, in the table
  uint32_t partial, group;         // with several splits: of Plan::partials and Plan::tickets for KV head 0
};

struct RowEntry {
  void *page;
  uint32_t row, sequence;  // sequence: index in Plan::findings
};

// One layer.
struct Plan {
  const PageEntry *pages;  // raw ones that are in no table
  const RowEntry *rows;  // where the step's tokens go
  const ShareEntry *shares;  // [item / kv heads]
  float *partials;       // [split item][rows of an item][dim_v + 2]
  uint32_t *tickets;     // [group of splits], 0 between launches
  Findings *findings;    // [sequence]
  uint32_t items, tokens;
  uint32_t item_rows;    // (query, head) pairs of an item: of one row block or more
  // Blocks of a fused kernel that come before those with an item: as many as there are processors without one, where several blocks run on
  // each.  A kernel's first blocks go to processors that the kernel in front leaves idle, and later ones go there again: two items on one.
  uint32_t idle;
  // Prompts.
  const SequenceEntry *sequences;
  uint8_t *images;
  uint32_t n_sequences, tiles;  // tiles: of a KV head, of all sequences
  uint32_t heads_at_once;       // KV heads whose images there is room for
};

// ---- on the host

// How fused kernels read the codes of a tensor: books of 2^w levels, books and affine rows of 3, 5, 6 levels, columns, values of 4 levels,
// keys in groups of channels with a book each, affine codes of 2^w levels in any groups that fill half a tile or a pair of units (halves: those
// of 4 levels in just such groups), polar keys.
enum class Code : uint8_t {
  none,
  book2,
  book3,
  book4,
  levels3,
  levels5,
  levels6,
  rows5,
  rows6,
  planes,
  crumbs,
  groups,
  fields,
  halves,
  polar
};
struct PagePath {
  Code keys = Code::none, values = Code::none;
  constexpr bool operator==(const PagePath &) const = default;
};

struct FusedKernel;

// A block of threads: its warps, its shared memory besides what is fixed, and how many run on a processor at once.
struct BlockShape {
  uint32_t warps = 0, dynamic_bytes = 0, at_once = 1;
  bool operator==(const BlockShape &) const = default;
};

// A launch for sequences with many new tokens (prompt.h).
struct PromptLaunch {
  uint32_t groups = 0;  // of KV heads, one after the other; 0: this is none
  bool splits = false;  // do some items share the pages of a sequence?
};

// How a layer's attention runs in this step, or that of some of its sequences.
struct LayerLaunch {
  PromptLaunch prompts;
  const FusedKernel *kernel = nullptr;  // nullptr: the general one
  uint32_t stage_bytes = 128;           // of the largest tile
  uint32_t item_rows = kRows, blocks = 0;
  BlockShape shape;
  bool settled = false;  // what its sequences will ever have, it reads: a graph may keep it
  // May sequences share the launch without a change of their results?
  bool joins(const LayerLaunch &other) const {
    return prompts.groups == 0 && other.prompts.groups == 0 && kernel == other.kernel && stage_bytes == other.stage_bytes && item_rows == other.item_rows && shape == other.shape;
  }
};

constexpr uint32_t kMaxSinks = 512;

// Arguments of one attention call.
struct AttendArguments {
  const Plan *plan;
  DeviceTensor q, out;
  float *lse;
  float scale, softcap;  // natural logits
  uint32_t window, kv_heads, ratio, dim_k, dim_v;
  const float *sinks;     // or nullptr
};

// Learned sinks of a call, as an argument of a launch: a graph keeps them.
struct Sinks {
  uint32_t count;
  float value[kMaxSinks];
};
cudaError_t store_sinks(const Sinks &sinks, float *to, cudaStream_t stream);

// Where the newest rows of a layer go.
cudaError_t append_rows(const RawShape &shape, const DeviceTensor &k, const DeviceTensor &v, const Plan *plan, uint32_t tokens,
                        cudaStream_t stream);

// The kernel for any format; blocks share the plan's items, whatever their number.
size_t general_shared_bytes(uint32_t dim_k, uint32_t dim_v);
cudaError_t prepare_general(uint32_t shared_bytes);  // of a block, the device's most
cudaError_t attend_general(const AttendArguments &arguments, uint32_t processors, cudaStream_t stream);

}  // namespace kvq::cuda
