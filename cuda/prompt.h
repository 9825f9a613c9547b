// Attention of many new tokens at once: prompts and long turns.
//
// Pages are decoded once per call into images, fp16 tiles of 64 tokens as the tensor cores read them (prompt.cuh); then blocks of 128
// rows multiply the images.  Images hold values as they are exported, by channel, so one kernel serves every codec and mixture of
// pages.  All of them at once would take the memory that packing saved: heads take turns where there are more than kImageBytes.
#pragma once
#include "cuda/plan.h"

namespace kvq::cuda {

constexpr uint32_t kPromptRows = 128;       // (query, head) pairs of an item
constexpr uint32_t kLeastFusedRows = 512, kLeastRows = 64;  // of a sequence: with fewer the fused kernels are faster, or the general one
constexpr size_t kImageBytes = size_t(320) << 20;

// Images of a head dimension: `panels` of 64 channels (1, 2 or 4); 0: none can be made.
constexpr uint32_t prompt_panels(uint32_t dim_k, uint32_t dim_v) {
  const uint32_t dim = dim_k > dim_v ? dim_k : dim_v;
  return dim <= 64 ? 1 : dim <= 128 ? 2
                     : dim <= 256   ? 4
                                    : 0;
}
constexpr size_t image_bytes(uint32_t panels) { return size_t(panels) * 64 * 64 * 2; }
constexpr size_t kLineBytes = 1024, kNoteBytes = 16;  // scales of a tile's tokens; what else there is to say of it
// Of one tile and KV head: keys and values in two parts, the scales of values.
constexpr size_t tile_image_bytes(uint32_t panels) { return 4 * image_bytes(panels) + kLineBytes + kNoteBytes; }

// Is there shared memory enough for a block?
bool has_prompt_kernel(uint32_t dim_k, uint32_t dim_v, const Processors &processors);
// Make the images of a group of KV heads.
cudaError_t make_images(const AttendArguments &arguments, uint32_t group, const Processors &processors, cudaStream_t stream);
// Decode and attend, head group by head group.  arguments.plan: of the prompts.
cudaError_t attend_prompts(const AttendArguments &arguments, const PromptLaunch &launch, const Processors &processors, cudaStream_t stream);

}  // namespace kvq::cuda
