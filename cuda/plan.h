// What attention kernels read of a step, in device memory that step_begin refreshes: a graph of the per-layer calls stays valid.
#pragma once
#include <cuda_runtime.h>

#include "cuda/layout.h"
#include "cuda/rows.h"

namespace kvq::cuda {

constexpr uint32_t kRows = 4;  // (query, head) pairs of a row block; a block of threads works on one or more
constexpr uint32_t kRawKind = 2;
constexpr uint32_t kMaxSplits = 64;  // items that share the pages of a sequence

// A piece of a sequence, as PageView.
struct PageEntry {
  const void *page;
  uint32_t first, count;
  uint32_t position;   // of row `first`
  uint32_t positions;  // 1 + index in Plan::positions of that of row `first`; 0: the others follow
  uint32_t kind;       // class, or kRawKind
  uint32_t whole;      // full, and every query sees all of it (but for the window)
};

struct SequenceEntry {
  const TensorFormat *tensors[2];  // of class 0 and 1, [kv_heads][2]
  uint32_t page_begin, pages;      // raw pages in front, packed ones, raw ones behind
  uint32_t raw_front, packed;
  uint32_t length, n_queries, first_query;
  uint32_t splits, group_begin;    // groups: [row block][kv head]
};

// What the items of all KV heads share, with all of its sequence: one read before pages and queries are on their way.
struct ShareEntry {
  SequenceEntry sequence;
  uint32_t block, split;
  uint32_t first_page, packed;     // packed pages of this split
};

struct RowEntry {
  void *page;
  uint32_t row, pad;
};

// One layer.
struct Plan {
  const PageEntry *pages;
  const uint32_t *positions;
  const RowEntry *rows;  // where the step's tokens go
  const ShareEntry *shares;  // [item / kv heads]
  float *partials;       // [item][rows of an item][dim_v + 2]
  uint32_t *tickets;     // [group], 0 between launches
  uint32_t items, tokens;
  uint32_t item_rows;    // (query, head) pairs of an item: of one row block or more
};

constexpr uint32_t kMaxSinks = 512;

// Arguments of one attention call.
struct AttendArguments {
  const Plan *plan;
  DeviceTensor q, out;
  float *lse;
  Findings *findings;
  float scale, softcap;  // natural logits
  uint32_t window, kv_heads, ratio, dim_k, dim_v, has_sinks;
  float sinks[kMaxSinks];
};

// Where the newest rows of a layer go.
cudaError_t append_rows(const RawShape &shape, const DeviceTensor &k, const DeviceTensor &v, const Plan *plan, uint32_t tokens,
                        Findings *findings, cudaStream_t stream);

// The kernel for any format; blocks share the plan's items, whatever their number.
size_t general_shared_bytes(uint32_t dim_k, uint32_t dim_v);
cudaError_t attend_general(const AttendArguments &arguments, uint32_t processors, cudaStream_t stream);

}  // namespace kvq::cuda
