#include "cpu/cpu_backend.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "cpu/kernels.h"
#include "cpu/layout.h"
#include "cpu/page_pool.h"
#include "cpu/raw_page.h"
#include "cpu/schedule.h"
#include "policy/policy.h"
#include "util/entry.h"

namespace kvq {
namespace cpu {
namespace {

class CpuBackend final : public Backend {
 public:
  CpuBackend(Memory *memory, uint32_t n_threads, const char *path) : memory_(memory), kernels_(*select_kernels(path)), loops_(select_loops()), pages_(memory), pool_(memory, n_threads) {}

  uint32_t raw_page_tokens() const override { return kRawTokens; }
  size_t raw_page_bytes(const LayerShape &shape) const override {
    return raw_head_bytes(shape) * shape.kv_heads + (shape.dim_v % 16 ? 64 : 0);  // vector loads of the last row
  }

  // As many as a tile has room for: what a tile costs besides its products it then costs less often.
  uint32_t page_tokens(uint32_t recipe) const override { return std::max(1u, kTileTokens / recipe) * recipe; }

  std::shared_ptr<const PageFormat> make_format(const LayerShape &, uint32_t page_tokens, std::pmr::vector<HeadFormat> &&k,
                                                std::pmr::vector<HeadFormat> &&v) override {
    return make_shared_in<CpuPageFormat>(memory_, memory_, tables_, page_tokens, std::move(k), std::move(v));
  }

  void *allocate_page(size_t bytes) override { return pages_.allocate(bytes); }  // zeros: attention multiplies rows that nobody wrote by 0
  void release_page(void *page, size_t bytes) noexcept override { pages_.release(page, bytes); }

  Status store_rows(const LayerShape &shape, const kvq_tensor &k, const kvq_tensor &v, uint64_t first, PageRows rows,
                    uint64_t *saturated) override {
    return store_raw_rows(loops_, shape, k, v, first, rows, saturated);
  }
  Status check_rows(const kvq_tensor &x, uint64_t first, uint64_t count, uint32_t heads, uint32_t dim, const char *name,
                    uint64_t *saturated) override {
    return cpu::check_rows(loops_, x, first, count, heads, dim, name, saturated);
  }
  void copy_rows(const LayerShape &shape, const void *from, uint32_t from_row, void *to, uint32_t to_row, uint32_t count) override {
    copy_raw_rows(shape, from, from_row, to, to_row, count);
  }
  void load_rows(const LayerShape &shape, PageRows rows, uint32_t head, uint32_t tensor, uint16_t *out) override {
    load_raw_rows(loops_, shape, rows, head, tensor, out);
  }

  void add_statistics(const LayerShape &shape, std::span<const PageRows> kv, const kvq_tensor *q, uint64_t q_first,
                      LayerStatistics *statistics) override;
  void pack(const LayerShape &shape, const PageFormat &format, std::span<const PageRows> from,
            std::span<const PageRows> to) override;

  void copy_packed(const PageFormat &format, const void *from, void *to) override { std::memcpy(to, from, format.bytes); }
  void narrow_packed(const PageFormat &from_format, const void *from, const PageFormat &to_format, void *to,
                     uint32_t count) override;
  void unpack(const PageFormat &format, const void *page, uint32_t first, uint32_t count, uint32_t head, uint32_t tensor,
              Block *block) override {
    read_rows(static_cast<const CpuPageFormat &>(format), page, head, tensor, first, count, block);
  }

  void expect_callers(uint32_t callers) override { callers_ = callers; }
  std::shared_ptr<Workspace> make_workspace(std::span<const LayerShape> layers) override;
  Status attend(const AttendCall &call, Workspace *workspace) override;

 private:
  void add_queries(const LayerShape &shape, const kvq_tensor &q, uint64_t first, uint64_t tokens, uint32_t head, uint16_t *halves, uint32_t wanted,
                   HeadStatistics *sums);
  Status check_queries(const AttendCall &call, const AttendSequence &sequence);

  Memory *memory_;
  const Kernels &kernels_;
  const Loops &loops_;
  const Tables tables_;
  uint32_t callers_ = 1;
  PagePool pages_;
  Pool pool_;
};

void CpuBackend::add_statistics(const LayerShape &shape, std::span<const PageRows> kv, const kvq_tensor *q, uint64_t q_first,
                                LayerStatistics *statistics) {
  const uint32_t wanted = statistics->wanted;
  uint64_t tokens = 0;
  for (const PageRows &rows : kv) tokens += rows.count;
  Vector<uint16_t> halves(size_t(kSumTokens) * shape.dim_k, memory_);
  for (uint32_t head = 0; head < shape.kv_heads; head++) {
    HeadStatistics &sums = statistics->heads[head];
    for (const PageRows &rows : kv) {
      load_rows(shape, rows, head, KVQ_TENSOR_K, halves.data());
      add_key_statistics(shape.head(KVQ_TENSOR_K), halves.data(), shape.dim_k, rows.count, &sums, loops_, wanted);
      if (wanted & kValueChannels)
        add_value_statistics(raw_row(shape, rows.page, head, KVQ_TENSOR_V, rows.first).first, shape.dim_v, rows.count, &sums, loops_);
    }
    const uint32_t ratio = shape.q_heads / shape.kv_heads;
    for (uint32_t i = 0; q && i < ratio; i++) add_queries(shape, *q, q_first, tokens, head * ratio + i, halves.data(), wanted, &sums);
  }
}

// Rows of one query head, by way of `halves` [kSumTokens][dim_k].  Squares do not care for the sign of a zero, so fp16 is read in place.
void CpuBackend::add_queries(const LayerShape &shape, const kvq_tensor &q, uint64_t first, uint64_t tokens, uint32_t head,
                             uint16_t *halves, uint32_t wanted, HeadStatistics *sums) {
  const uint32_t dim = shape.dim_k;
  const uint16_t *data = static_cast<const uint16_t *>(tensor_row(q, first, head, shape.q_heads, dim));
  if (q.dtype == KVQ_DTYPE_F16 && reinterpret_cast<uintptr_t>(data) % alignof(uint16_t) == 0) {
    const size_t stride = q.token_stride ? size_t(q.token_stride) : size_t(shape.q_heads) * dim;
    return add_query_statistics(shape.head(KVQ_TENSOR_K), data, stride, tokens, sums, loops_, wanted);
  }
  for (uint64_t t = 0; t < tokens; t += kSumTokens) {
    const uint32_t count = uint32_t(std::min<uint64_t>(kSumTokens, tokens - t));
    uint64_t ignored = 0;
    for (uint32_t i = 0; i < count; i++)
      enter_row(tensor_row(q, first + t + i, head, shape.q_heads, dim), q.dtype, dim, halves + size_t(i) * dim, &ignored, loops_);
    add_query_statistics(shape.head(KVQ_TENSOR_K), halves, dim, count, sums, loops_, wanted);
  }
}

// Raw rows of one head and tensor in their order, a few at a time: keys by channel, as they lie in raw pages.
class RowReader {
 public:
  RowReader(const Loops &loops, const LayerShape &shape, std::span<const PageRows> from, uint32_t head, uint32_t tensor)
      : loops_(loops), shape_(shape), from_(from), head_(head), tensor_(tensor) {}

  HalfRows read(uint32_t count, uint16_t *out) {
    const bool keys = tensor_ == KVQ_TENSOR_K;
    for (uint32_t done = 0; done < count;) {
      void *const page = from_[source_].page;
      uint32_t token[kRawTokens];
      const uint32_t n = take(std::min(count - done, kRawTokens), token);
      if (keys)
        loops_.pick_halves(raw_row(shape_, page, head_, tensor_, 0).first, kRawTokens, shape_.dim_k, token, n, out + done, count);
      else
        for (uint32_t i = 0; i < n; i++)
          std::memcpy(out + size_t(done + i) * shape_.dim_v, raw_row(shape_, page, head_, tensor_, token[i]).first, size_t(2) * shape_.dim_v);
      done += n;
    }
    return keys ? HalfRows{out, 1, count} : HalfRows{out, shape_.dim_v};
  }

 private:
  // The next tokens, at most `most` and all of one page.
  uint32_t take(uint32_t most, uint32_t *token) {
    uint32_t n = 0;
    for (const void *page = from_[source_].page; n < most && source_ < from_.size() && from_[source_].page == page;) {
      const PageRows &rows = from_[source_];
      token[n++] = rows.first + taken_++;
      if (taken_ == rows.count) source_++, taken_ = 0;
    }
    return n;
  }

  const Loops &loops_;
  const LayerShape &shape_;
  const std::span<const PageRows> from_;
  const uint32_t head_, tensor_;
  size_t source_ = 0;
  uint32_t taken_ = 0;  // of from[source]
};

void CpuBackend::pack(const LayerShape &shape, const PageFormat &page_format, std::span<const PageRows> from,
                      std::span<const PageRows> to) {
  const CpuPageFormat &format = static_cast<const CpuPageFormat &>(page_format);
  Vector<uint16_t> halves(memory_);
  Block block(memory_);
  for (uint32_t head = 0; head < shape.kv_heads; head++)
    for (uint32_t tensor : {KVQ_TENSOR_K, KVQ_TENSOR_V}) {
      const HeadFormat &head_format = format.head_format(head, tensor);
      const uint32_t dim = head_format.shape.dim;
      RowReader rows(loops_, shape, from, head, tensor);
      for (const PageRows &target : to) {
        halves.resize(size_t(target.count) * dim);
        encode(head_format, rows.read(target.count, halves.data()), target.count, &block);
        write_rows(format, target.page, head, tensor, target.first, block);
      }
    }
}

void CpuBackend::narrow_packed(const PageFormat &from_format, const void *from, const PageFormat &to_format, void *to,
                               uint32_t count) {
  const CpuPageFormat &wide = static_cast<const CpuPageFormat &>(from_format);
  const CpuPageFormat &slim = static_cast<const CpuPageFormat &>(to_format);
  for (uint32_t head = 0; head < wide.k.size(); head++)
    for (uint32_t tensor : {KVQ_TENSOR_K, KVQ_TENSOR_V}) {
      Block block(memory_), narrowed(memory_);
      read_rows(wide, from, head, tensor, 0, count, &block);
      narrow(wide.head_format(head, tensor), block, slim.head_format(head, tensor), &narrowed);
      write_rows(slim, to, head, tensor, 0, narrowed);
    }
}

std::shared_ptr<Workspace> CpuBackend::make_workspace(std::span<const LayerShape> layers) {
  Dims dims;
  for (const LayerShape &shape : layers) dims.k = std::max(dims.k, shape.dim_k), dims.v = std::max(dims.v, shape.dim_v);
  pool_.prepare();
  return make_shared_in<CpuWorkspace>(memory_, memory_, dims, pool_.threads(), callers_);
}

// Refuse non-finite queries.
Status CpuBackend::check_queries(const AttendCall &call, const AttendSequence &sequence) {
  const LayerShape &shape = *call.shape;
  const uint32_t ratio = shape.q_heads / shape.kv_heads, first = call.head_first * ratio, end = first + call.heads() * ratio;
  uint64_t ignored = 0;
  for (uint32_t i = 0; i < sequence.n_queries; i++)
    for (uint32_t head = first; head < end; head++)
      KVQ_TRY(cpu::check_row(loops_, *call.q, uint64_t(sequence.first_query) + i, head, shape.q_heads, shape.dim_k, "q",
                             call.saturated ? call.saturated : &ignored));
  return KVQ_OK;
}

Status CpuBackend::attend(const AttendCall &call, Workspace *workspace) {
  for (const AttendSequence &sequence : call.sequences) KVQ_TRY(check_queries(call, sequence));
  attend_all(kernels_, tables_, call, static_cast<CpuWorkspace &>(*workspace), pool_);
  return KVQ_OK;
}

}  // namespace
}  // namespace cpu

std::shared_ptr<Backend> make_cpu_backend(Memory *memory, uint32_t n_threads, const char *path) {
  return make_shared_in<cpu::CpuBackend>(memory, memory, n_threads, path);
}

const char *cpu_path_name() { return cpu::select_kernels(nullptr)->name; }

void cpu_paths(const char *(&names)[kMostPaths + 1]) {
  static_assert(std::extent_v<decltype(cpu::UsableKernels::best_first)> <= kMostPaths);
  uint32_t n = 0;
  for (const cpu::Kernels *kernels : cpu::usable_kernels().best_first)
    if (kernels) names[n++] = kernels->name;
  names[n] = nullptr;
}

}  // namespace kvq
