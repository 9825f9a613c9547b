// What attention kernels read of a step, in device memory that step_begin refreshes: a graph of the per-layer calls stays valid.
#pragma once
#include <cuda_runtime.h>

#include "cuda/layout.h"
#include "cuda/rows.h"

namespace kvq::cuda {

constexpr uint32_t kRows = 4;  // (query, head) pairs that a block of threads works on at once
constexpr uint32_t kRawKind = 2;

// A piece of a sequence, as PageView.
struct PageEntry {
  const void *page;
  uint32_t first, count;
  uint32_t position;   // of row `first`
  uint32_t positions;  // 1 + index in Plan::positions of that of row `first`; 0: the others follow
  uint32_t kind;       // class, or kRawKind
  uint32_t pad;
};

struct SequenceEntry {
  const TensorFormat *tensors[2];  // of class 0 and 1, [kv_heads][2]
  const HeadBlob *blobs[2];
  uint32_t page_begin, pages;      // raw pages in front, packed ones, raw ones behind
  uint32_t raw_front, packed;
  uint32_t length, n_queries, first_query;
  uint32_t splits, item_begin, group_begin;  // items: [row block][split][kv head]; groups: [row block][kv head]
  uint32_t plain;  // every packed page is full and every query sees all of it (but for the window)
};

struct RowEntry {
  void *page;
  uint32_t row, pad;
};

// One layer.
struct Plan {
  const SequenceEntry *sequences;
  const PageEntry *pages;
  const uint32_t *positions;
  const RowEntry *rows;  // where the step's tokens go
  const uint16_t *owners;  // [item / kv heads] number of its sequence
  float *partials;       // [item][kRows][dim_v + 2]
  uint32_t *tickets;     // [group], 0 between launches
  uint32_t n_sequences, items, tokens, pad;
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
