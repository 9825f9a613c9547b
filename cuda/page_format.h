// Page formats on the device: the layout of every head, and what attention needs to choose a kernel.
#pragma once
#include <cuda_runtime.h>

#include "backend/backend.h"
#include "cuda/arena.h"
#include "cuda/layout.h"
#include "cuda/plan.h"

namespace kvq::cuda {

// Books of section 2.3 in device memory, shared by all formats of a backend.
class Books {
 public:
  explicit Books(Arena &arena) : buffer_(arena) {}
  Status upload();
  const DeviceBook *find(uint32_t levels) const;  // nullptr: none
 private:
  Buffer buffer_;
};

// Will attention on pages of these codecs be fused?  bmax: the largest of the widths that a policy gives K.
bool reads_fused(const LayerShape &shape, const Codec &k, const Codec &v, uint32_t page_tokens, uint32_t bmax);

class CudaPageFormat final : public PageFormat {
 public:
  CudaPageFormat(std::pmr::memory_resource *memory, Arena &arena, const Books &books, uint32_t page_tokens,
                 std::pmr::vector<HeadFormat> &&keys, std::pmr::vector<HeadFormat> &&values);
  Status upload(cudaStream_t stream);

  const HeadFormat &head_format(uint32_t head, uint32_t tensor) const { return tensor == KVQ_TENSOR_K ? k[head] : v[head]; }
  DeviceFormat device;
  PagePath path;            // of its kernel; none: pages are streams, and the general kernel reads them
  bool raw = false;         // pages are raw pages, bit for bit
  uint32_t stage_bytes = 0;  // fragments: the largest head's group parameters and one tile
  Vector<TensorFormat> tensors;  // [kv_heads][2], as on the device

 private:
  void describe(const HeadFormat &head, bool fragments, TensorFormat *f);
  void lay_out_streams(TensorFormat *f, uint32_t *at);
  void lay_out_units(TensorFormat *f, Code code);
  void lay_out_fragments(TensorFormat *key, TensorFormat *value, uint32_t *at);
  void add_tables(const HeadFormat &head, TensorFormat *f);
  void keep_chain();

  const Books &books_;
  Vector<uint16_t> tables_;  // channels and centres
  Buffer buffer_;
};

}  // namespace kvq::cuda
