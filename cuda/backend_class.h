// The CUDA backend: what backend.h asks for, by the kernels of this folder.  backend.cu has devices and steps, commit.cu the rest.
#pragma once
#include <array>
#include <atomic>
#include <mutex>

#include "cuda/arena.h"
#include "cuda/check.h"
#include "cuda/cuda_backend.h"
#include "cuda/order.h"
#include "cuda/pack.h"
#include "cuda/page_format.h"
#include "cuda/step.h"

namespace kvq::cuda {

inline void must(cudaError_t error, const char *what) {
  if (error != cudaSuccess) throw DeviceFailure(what, cudaGetErrorString(error));
}

// What bad_key has put together.
struct BadElement {
  uint64_t token;
  uint32_t tensor, head, channel;
};
inline BadElement bad_element(uint64_t key) { return {key >> 24, uint32_t(key >> 23 & 1), uint32_t(key >> 10 & 0x1fff), uint32_t(key & 0x3ff)}; }

inline RawShape raw_shape(const LayerShape &shape) { return {shape.kv_heads, shape.dim_k, shape.dim_v}; }

struct Outcome;

class CudaBackend final : public Backend {
 public:
  CudaBackend(Memory *memory, uint32_t device)
      : memory_(memory), device_(int(device)), order_(device_), arena_(memory, device_), books_(arena_), nothing_(arena_), states_(memory), replays_(memory) {}
  ~CudaBackend() override {
    order_.wait();
    for (StepState *state : states_) std::pmr::polymorphic_allocator<StepState>(memory_).delete_object(state);
  }
  Status prepare();

  uint32_t raw_page_tokens() const override { return kRawTokens; }
  size_t raw_page_bytes(const LayerShape &shape) const override { return raw_shape(shape).head_elements() * shape.kv_heads * 2; }
  std::shared_ptr<const PageFormat> make_format(const LayerShape &shape, uint32_t page_tokens, std::pmr::vector<HeadFormat> &&k,
                                                std::pmr::vector<HeadFormat> &&v) override;
  void *allocate_page(size_t bytes) override {
    void *page;
    arena_.allocate_pages(bytes, std::span(&page, 1));
    return page;
  }
  void release_page(void *page, size_t bytes) noexcept override { arena_.release_pages(bytes, std::span(&page, 1)); }
  void allocate_pages(size_t bytes, std::span<void *> pages) override { arena_.allocate_pages(bytes, pages); }
  void release_pages(size_t bytes, std::span<void *const> pages) noexcept override { arena_.release_pages(bytes, pages); }

  Status store_rows(const LayerShape &shape, const kvq_tensor &k, const kvq_tensor &v, uint64_t first, PageRows rows,
                    uint64_t *saturated) override {
    return store_chunk(shape, {k, v, nullptr, first}, std::span(&rows, 1), nullptr, saturated);
  }
  Status store_chunk(const LayerShape &shape, const ChunkRows &rows, std::span<const PageRows> pieces, LayerStatistics *statistics,
                     uint64_t *saturated) override;
  void enter_rows(const kvq_tensor &x, uint64_t count, uint32_t heads, uint32_t dim, uint16_t *out) override;
  Status check_rows(const kvq_tensor &x, uint64_t first, uint64_t count, uint32_t heads, uint32_t dim, const char *name,
                    uint64_t *saturated) override;
  void copy_rows(const LayerShape &shape, const void *from, uint32_t from_row, void *to, uint32_t to_row, uint32_t count) override;
  void load_rows(const LayerShape &shape, PageRows rows, uint32_t head, uint32_t tensor, uint16_t *out) override;
  void add_statistics(const LayerShape &shape, std::span<const PageRows> kv, const kvq_tensor *q, uint64_t q_first,
                      LayerStatistics *statistics) override;
  void sum_keys(const LayerShape &shape, std::span<const PageRows> rows, std::span<CenterSum> sums) override;
  void pack(const LayerShape &shape, const PageFormat &format, std::span<const PageRows> from, std::span<const PageRows> to) override;
  void copy_packed(const PageFormat &format, const void *from, void *to) override;
  void narrow_packed(const PageFormat &from_format, const void *from, const PageFormat &to_format, void *to, uint32_t count) override;
  void unpack(const PageFormat &format, const void *page, uint32_t first, uint32_t count, uint32_t head, uint32_t tensor,
              Block *block) override;

  std::shared_ptr<Workspace> make_workspace(std::span<const LayerShape> layers) override;
  Status attend(const AttendCall &call, Workspace *workspace) override;
  bool plans_steps() const override { return true; }
  Status plan_step(const StepSource &source, std::span<const LayerShape> shapes, Workspace *workspace) override;
  Status append(uint32_t layer, const LayerShape &shape, const kvq_tensor &k, const kvq_tensor &v, Workspace *workspace) override;
  bool replays(uint32_t layer) const override { return layer < replays_.size() && replays_[layer]; }
  Status finish_step(Workspace *workspace, std::span<StepFinding> findings, uint64_t *saturated) override;
  Status fetch_scores(const float *scores, size_t count, float *out) override {
    KVQ_TRY(check_memory(scores, "scores"));
    const Turn turn(order_);
    KVQ_CUDA(cudaMemcpyAsync(out, scores, count * sizeof *out, cudaMemcpyDeviceToHost, turn.stream()));
    KVQ_CUDA(cudaStreamSynchronize(turn.stream()));
    return KVQ_OK;
  }

  void give_back(StepState *state) noexcept {
    order_.settle();
    state->images.release();
    const std::lock_guard lock(states_mutex_);
    state->in_use = false;
  }

 private:
  using Turn = Order::Turn;
  // Host memory to a buffer; the memory may change when this returns.
  void upload(const Turn &turn, const void *data, size_t bytes, Buffer *buffer) {
    buffer->reserve(std::max<size_t>(bytes, 1));
    must(cudaMemcpyAsync(buffer->data(), data, bytes, cudaMemcpyHostToDevice, turn.stream()), "copy to the device");
  }
  void download(const Turn &turn, const void *data, size_t bytes, void *out) {
    if (bytes == 0) return;
    must(cudaMemcpyAsync(out, data, bytes, cudaMemcpyDeviceToHost, turn.stream()), "copy from the device");
    must(cudaStreamSynchronize(turn.stream()), "wait");
  }
  uint32_t upload_pieces(const Turn &turn, std::span<const PageRows> pieces, Buffer *buffer);
  // A tensor as kernels take it: device memory as it is, host memory entered, checked and copied to `buffer`.
  Status to_device(const Turn &turn, const kvq_tensor &x, uint64_t first, uint64_t count, uint32_t heads, uint32_t dim, const char *name,
                   Buffer *buffer, DeviceTensor *out, uint64_t *saturated);
  // Is memory that the caller says to be a device's readable there?  A kernel that finds out would take the device down with it.
  Status check_memory(const void *data, const char *name);
  static Status report(const Findings &found, const char *const (&names)[2], uint64_t first, uint64_t *saturated);
  Status begin(const Turn &turn, Outcome *outcome);
  Status sum_rows(const Turn &turn, const LayerShape &shape, const Buffer &pieces, uint32_t n_pieces, uint32_t rows, const DeviceTensor *q,
                  uint32_t wanted, Outcome *outcome);
  PackPlan pack_plan(const CudaPageFormat &format, bool narrows = false) const;

  Memory *memory_;
  int device_;
  Order order_;
  Arena arena_;
  Books books_;
  Processors processors_;
  size_t shared_limit_ = 0;        // shared memory of a block of threads
  bool reads_host_memory_ = false;  // any address of the process
  Buffer nothing_;                 // two Findings that have found nothing
  std::array<const void *, 64> known_{};  // addresses that have been seen to be device memory
  std::mutex states_mutex_;
  Vector<StepState *> states_;
  Vector<uint8_t> replays_;  // by layer
  std::atomic<bool> captured_{false};  // has a graph captured attention?
};

class CudaWorkspace final : public Workspace {
 public:
  CudaWorkspace(CudaBackend *backend, StepState *state) : state(state), backend_(backend) {}
  ~CudaWorkspace() override { backend_->give_back(state); }
  StepState *const state;

 private:
  CudaBackend *backend_;
};

}  // namespace kvq::cuda
