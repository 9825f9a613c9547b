// The CUDA backend: what backend.h asks for, by the kernels of this folder.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstring>

#include "cuda/attend_fast.h"
#include "cuda/check.h"
#include "cuda/cuda_backend.h"
#include "cuda/order.h"
#include "cuda/pack.h"
#include "cuda/page_format.h"
#include "cuda/step.h"
#include "policy/policy.h"
#include "util/entry.h"
#include "util/fp.h"

namespace kvq {
namespace cuda {
namespace {

void must(cudaError_t error, const char *what) {
  if (error != cudaSuccess) throw DeviceFailure(what, cudaGetErrorString(error));
}

// What bad_key has put together.
struct BadElement {
  uint64_t token;
  uint32_t tensor, head, channel;
};
BadElement bad_element(uint64_t key) { return {key >> 24, uint32_t(key >> 23 & 1), uint32_t(key >> 10 & 0x1fff), uint32_t(key & 0x3ff)}; }

RawShape raw_shape(const LayerShape &shape) { return {shape.kv_heads, shape.dim_k, shape.dim_v}; }

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
  void *allocate_page(size_t bytes) override { return arena_.allocate_page(bytes); }
  void release_page(void *page, size_t bytes) noexcept override { arena_.release_page(page, bytes); }

  Status store_rows(const LayerShape &shape, const kvq_tensor &k, const kvq_tensor &v, uint64_t first, PageRows rows,
                    uint64_t *saturated) override {
    return store_pieces(shape, k, v, first, std::span(&rows, 1), saturated);
  }
  Status store_pieces(const LayerShape &shape, const kvq_tensor &k, const kvq_tensor &v, uint64_t first,
                      std::span<const PageRows> pieces, uint64_t *saturated) override;
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
  Status clear_findings(const Turn &turn, Buffer *findings) {
    findings->reserve(sizeof(Findings));
    KVQ_CUDA(cudaMemcpyAsync(findings->data(), nothing_.data(), sizeof(Findings), cudaMemcpyDeviceToDevice, turn.stream()));
    return KVQ_OK;
  }
  Status read_findings(const Turn &turn, const Findings *device, const char *const (&names)[2], uint64_t first, uint64_t *saturated);
  PackPlan pack_plan(const CudaPageFormat &format) const;

  Memory *memory_;
  int device_;
  Order order_;
  Arena arena_;
  Books books_;
  Processors processors_;
  size_t shared_limit_ = 0;        // shared memory of a block of threads
  bool reads_host_memory_ = false;  // any address of the process
  Buffer nothing_;                 // Findings that have found nothing
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

StepState &state_of(Workspace *workspace) { return *static_cast<CudaWorkspace *>(workspace)->state; }

Status CudaBackend::prepare() {
  KVQ_CUDA(order_.prepare());
  int processors = 1, shared = 0, processor_shared = 0;
  KVQ_CUDA(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device_));
  KVQ_CUDA(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device_));
  KVQ_CUDA(cudaDeviceGetAttribute(&processor_shared, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device_));
  processors_ = {uint32_t(processors), uint32_t(shared), uint32_t(processor_shared)}, shared_limit_ = size_t(shared);
  KVQ_CUDA(prepare_packing(shared_limit_));
  KVQ_CUDA(prepare_general(processors_.block_bytes));
  int pageable = 0;
  KVQ_CUDA(cudaDeviceGetAttribute(&pageable, cudaDevAttrPageableMemoryAccess, device_));
  reads_host_memory_ = pageable != 0;
  const Findings nothing{kNothingBad, 0};
  nothing_.reserve(sizeof nothing);
  KVQ_CUDA(cudaMemcpy(nothing_.data(), &nothing, sizeof nothing, cudaMemcpyHostToDevice));
  return books_.upload();
}

std::shared_ptr<const PageFormat> CudaBackend::make_format(const LayerShape &, uint32_t page_tokens, std::pmr::vector<HeadFormat> &&k,
                                                           std::pmr::vector<HeadFormat> &&v) {
  const auto format = make_shared_in<CudaPageFormat>(memory_, memory_, arena_, books_, page_tokens, std::move(k), std::move(v));
  const Turn turn(order_);
  if (const Status status = format->upload(turn.stream()); status != KVQ_OK) throw DeviceFailure("upload of a page format", failure_detail());
  return format;
}

// ---- rows

uint32_t CudaBackend::upload_pieces(const Turn &turn, std::span<const PageRows> pieces, Buffer *buffer) {
  Vector<DevicePiece> host(memory_);
  host.reserve(pieces.size());
  uint32_t start = 0;
  for (const PageRows &piece : pieces) {
    host.push_back({piece.page, piece.first, piece.count, start, 0});
    start += piece.count;
  }
  upload(turn, host.data(), host.size() * sizeof(DevicePiece), buffer);
  return start;
}

Status CudaBackend::check_memory(const void *data, const char *name) {
  const void *&known = known_[reinterpret_cast<uintptr_t>(data) / 256 % known_.size()];
  if (known == data || reads_host_memory_) return KVQ_OK;
  cudaPointerAttributes attributes{};
  const cudaError_t error = cudaPointerGetAttributes(&attributes, data);
  if (error != cudaSuccess) cudaGetLastError();
  if (error != cudaSuccess || !attributes.devicePointer)
    return fail(KVQ_E_INVALID, "%s: memory=DEVICE, but device %d cannot read its data at %p", name, device_, data);
  known = data;
  return KVQ_OK;
}

Status CudaBackend::to_device(const Turn &turn, const kvq_tensor &x, uint64_t first, uint64_t count, uint32_t heads, uint32_t dim,
                              const char *name, Buffer *buffer, DeviceTensor *out, uint64_t *saturated) {
  const int64_t size = dtype_bytes(x.dtype);
  const int64_t head_stride = x.head_stride ? x.head_stride : dim, token_stride = x.token_stride ? x.token_stride : int64_t(heads) * dim;
  const char *data = static_cast<const char *>(x.data) + int64_t(first) * token_stride * size;
  *out = {data, x.dtype, token_stride, head_stride};
  if (x.memory == KVQ_MEMORY_DEVICE) return check_memory(x.data, name);
  if (turn.capturing()) return fail(KVQ_E_UNSUPPORTED, "%s: host memory cannot be captured in a CUDA graph", name);
  Vector<uint16_t> rows(size_t(count) * heads * dim, memory_);
  for (uint64_t t = 0; t < count; t++)
    for (uint32_t h = 0; h < heads; h++) {
      const void *row = data + (int64_t(t) * token_stride + h * head_stride) * size;
      const uint32_t bad = enter_row(row, x.dtype, dim, rows.data() + (t * heads + h) * dim, saturated);
      if (bad < dim)
        return fail(KVQ_E_NONFINITE, "%s: token %llu, head %u, channel %u is NaN or infinite; only finite numbers are allowed", name,
                    (unsigned long long)(first + t), h, bad);
    }
  upload(turn, rows.data(), rows.size() * sizeof(uint16_t), buffer);
  *out = {buffer->data(), KVQ_DTYPE_F16, int64_t(heads) * dim, dim};
  return KVQ_OK;
}

Status CudaBackend::read_findings(const Turn &turn, const Findings *device, const char *const (&names)[2], uint64_t first, uint64_t *saturated) {
  Findings found;
  KVQ_CUDA(cudaMemcpyAsync(&found, device, sizeof found, cudaMemcpyDeviceToHost, turn.stream()));
  KVQ_CUDA(cudaStreamSynchronize(turn.stream()));
  *saturated += found.saturated;
  if (found.bad == kNothingBad) return KVQ_OK;
  const BadElement bad = bad_element(found.bad);
  return fail(KVQ_E_NONFINITE, "%s: token %llu, head %u, channel %u is NaN or infinite; only finite numbers are allowed",
              names[bad.tensor], (unsigned long long)(first + bad.token), bad.head, bad.channel);
}

Status CudaBackend::store_pieces(const LayerShape &shape, const kvq_tensor &k, const kvq_tensor &v, uint64_t first,
                                 std::span<const PageRows> pieces, uint64_t *saturated) {
  const Turn turn(order_);
  if (turn.capturing()) return fail(KVQ_E_UNSUPPORTED, "a prompt cannot be captured in a CUDA graph");
  uint64_t count = 0;
  for (const PageRows &piece : pieces) count += piece.count;
  Buffer list(arena_), key_rows(arena_), value_rows(arena_), findings(arena_);
  DeviceTensor keys, values;
  KVQ_TRY(to_device(turn, k, first, count, shape.kv_heads, shape.dim_k, "k", &key_rows, &keys, saturated));
  KVQ_TRY(to_device(turn, v, first, count, shape.kv_heads, shape.dim_v, "v", &value_rows, &values, saturated));
  const uint32_t rows = upload_pieces(turn, pieces, &list);
  KVQ_TRY(clear_findings(turn, &findings));
  KVQ_CUDA(cuda::enter_rows(raw_shape(shape), keys, values, 0, list.as<DevicePiece>(), uint32_t(pieces.size()), rows,
                            findings.as<Findings>(), turn.stream()));
  if (k.memory == KVQ_MEMORY_HOST && v.memory == KVQ_MEMORY_HOST) return KVQ_OK;
  return read_findings(turn, findings.as<Findings>(), {"k", "v"}, first, saturated);
}

Status CudaBackend::check_rows(const kvq_tensor &x, uint64_t first, uint64_t count, uint32_t heads, uint32_t dim, const char *name,
                               uint64_t *saturated) {
  const Turn turn(order_);
  Buffer rows(arena_), findings(arena_);
  DeviceTensor device;
  KVQ_TRY(to_device(turn, x, first, count, heads, dim, name, &rows, &device, saturated));
  if (x.memory == KVQ_MEMORY_HOST) return KVQ_OK;
  KVQ_TRY(clear_findings(turn, &findings));
  KVQ_CUDA(cuda::check_rows(device, count, heads, dim, findings.as<Findings>(), turn.stream()));
  return read_findings(turn, findings.as<Findings>(), {name, name}, first, saturated);
}

void CudaBackend::enter_rows(const kvq_tensor &x, uint64_t count, uint32_t heads, uint32_t dim, uint16_t *out) {
  if (x.memory == KVQ_MEMORY_HOST) return Backend::enter_rows(x, count, heads, dim, out);
  const Turn turn(order_);
  const size_t bytes = size_t(count) * heads * dim * sizeof(uint16_t);
  Buffer rows(arena_, bytes), findings(arena_, sizeof(Findings));
  const DeviceTensor device{x.data, x.dtype, x.token_stride, x.head_stride};
  must(enter_dense(device, count, heads, dim, rows.as<uint16_t>(), findings.as<Findings>(), turn.stream()), "enter rows");
  download(turn, rows.data(), bytes, out);
}

void CudaBackend::copy_rows(const LayerShape &shape, const void *from, uint32_t from_row, void *to, uint32_t to_row, uint32_t count) {
  const Turn turn(order_);
  must(copy_raw(raw_shape(shape), from, from_row, to, to_row, count, turn.stream()), "copy rows");
}

void CudaBackend::load_rows(const LayerShape &shape, PageRows rows, uint32_t head, uint32_t tensor, uint16_t *out) {
  const Turn turn(order_);
  const size_t bytes = size_t(rows.count) * (tensor == KVQ_TENSOR_K ? shape.dim_k : shape.dim_v) * sizeof(uint16_t);
  Buffer list(arena_), dense(arena_, bytes);
  upload_pieces(turn, std::span(&rows, 1), &list);
  must(load_raw(raw_shape(shape), list.as<DevicePiece>(), 1, rows.count, head, tensor, dense.as<uint16_t>(), turn.stream()), "load rows");
  download(turn, dense.data(), bytes, out);
}

// ---- statistics

namespace {

UInt128 join(const Wide &sum) { return UInt128(sum.high) << 64 | sum.low; }

float unorder(uint32_t ordered) {
  const uint16_t o = uint16_t(ordered ^ 0x8000u);
  return half_to_float(uint16_t(o ^ (uint16_t(int16_t(o) >> 15) & 0x7fffu)));
}

void add_channels(const Wide *sums, const uint32_t *ranges, Vector<ChannelSums> *channels) {
  for (size_t c = 0; c < channels->size(); c++) {
    ChannelSums &to = (*channels)[c];
    to.sum += Int128(join(sums[2 * c]));
    to.abs += join(sums[2 * c + 1]);
    to.min = std::min(to.min, unorder(ranges[2 * c]));
    to.max = std::max(to.max, unorder(ranges[2 * c + 1]));
  }
}

}  // namespace

void CudaBackend::add_statistics(const LayerShape &shape, std::span<const PageRows> kv, const kvq_tensor *q, uint64_t q_first,
                                 LayerStatistics *statistics) {
  const Turn turn(order_);
  const StatisticsLayout layout{shape.kv_heads, shape.q_heads / shape.kv_heads, shape.dim_k, shape.dim_v};
  const HeadShape keys = shape.head(KVQ_TENSOR_K);
  Vector<uint16_t> pairs(memory_);
  for (uint32_t p = 0; p < shape.dim_k / 2; p++) {
    const Pair pair = pair_channels(keys, p);
    pairs.push_back(uint16_t(pair.u)), pairs.push_back(uint16_t(pair.v));
  }
  Vector<Wide> sums(size_t(layout.sums()) * shape.kv_heads, Wide{0, 0}, memory_);
  Vector<uint32_t> ranges(memory_);
  for (size_t i = 0; i < size_t(layout.ranges()) * shape.kv_heads; i++) ranges.push_back(i % 2 ? 0 : ~0u);
  Buffer list(arena_), table(arena_), device_sums(arena_), device_ranges(arena_), queries(arena_);
  const uint32_t rows = upload_pieces(turn, kv, &list);
  if (rows == 0) return;
  upload(turn, pairs.data(), pairs.size() * sizeof(uint16_t), &table);
  upload(turn, sums.data(), sums.size() * sizeof(Wide), &device_sums);
  upload(turn, ranges.data(), ranges.size() * sizeof(uint32_t), &device_ranges);
  DeviceTensor query_rows{};
  uint64_t ignored = 0;
  if (q && to_device(turn, *q, q_first, rows, shape.q_heads, shape.dim_k, "q", &queries, &query_rows, &ignored) != KVQ_OK)
    throw DeviceFailure("statistics of q", failure_detail());
  must(sum_statistics(layout, list.as<DevicePiece>(), uint32_t(kv.size()), rows, q ? &query_rows : nullptr, table.as<uint16_t>(),
                      processors_.count, device_sums.as<Wide>(), device_ranges.as<uint32_t>(), turn.stream()),
       "statistics");
  download(turn, device_sums.data(), sums.size() * sizeof(Wide), sums.data());
  download(turn, device_ranges.data(), ranges.size() * sizeof(uint32_t), ranges.data());
  for (uint32_t h = 0; h < shape.kv_heads; h++) {
    HeadStatistics &to = statistics->heads[h];
    const Wide *from = sums.data() + size_t(h) * layout.sums();
    const uint32_t *range = ranges.data() + size_t(h) * layout.ranges();
    for (size_t p = 0; p < to.pairs.size(); p++, from += 4) {
      to.pairs[p].k1 += join(from[0]), to.pairs[p].k2 += join(from[1]);
      to.pairs[p].q1 += join(from[2]), to.pairs[p].q2 += join(from[3]);
    }
    add_channels(from, range, &to.k);
    add_channels(from + 2 * shape.dim_k, range + 2 * shape.dim_k, &to.v);
    to.nk += rows;
    if (q) to.nq += uint64_t(rows) * layout.ratio;
  }
}

void CudaBackend::sum_keys(const LayerShape &shape, std::span<const PageRows> rows, std::span<CenterSum> sums) {
  LayerStatistics statistics(memory_);
  reset_statistics(shape, &statistics);
  add_statistics(shape, rows, nullptr, 0, &statistics);
  for (uint32_t h = 0; h < shape.kv_heads; h++) sums[h].add(statistics.heads[h].k.data(), statistics.heads[h].nk);
}

// ---- packing

PackPlan CudaBackend::pack_plan(const CudaPageFormat &format) const {
  const RawShape shape{uint32_t(format.k.size()), format.k[0].shape.dim, format.v[0].shape.dim};
  return PackPlan(shape, format.page_tokens, format.tensors, shared_limit_, processors_.count);
}

void CudaBackend::pack(const LayerShape &, const PageFormat &page_format, std::span<const PageRows> from, std::span<const PageRows> to) {
  const CudaPageFormat &format = static_cast<const CudaPageFormat &>(page_format);
  const PackPlan plan = pack_plan(format);
  const Turn turn(order_);
  Buffer sources(arena_), targets(arena_), scratch(arena_);
  upload_pieces(turn, from, &sources);
  upload_pieces(turn, to, &targets);
  if (!plan.shared) scratch.reserve(plan.bytes * plan.blocks);
  must(cuda::pack(plan, format.device, sources.as<DevicePiece>(), uint32_t(from.size()), targets.as<DevicePiece>(), uint32_t(to.size()),
                  scratch.data(), turn.stream()),
       "pack");
}

void CudaBackend::copy_packed(const PageFormat &format, const void *from, void *to) {
  const Turn turn(order_);
  must(cudaMemcpyAsync(to, from, format.bytes, cudaMemcpyDeviceToDevice, turn.stream()), "copy a page");
}

void CudaBackend::narrow_packed(const PageFormat &from_format, const void *from, const PageFormat &to_format, void *to, uint32_t count) {
  const CudaPageFormat &wide = static_cast<const CudaPageFormat &>(from_format), &slim = static_cast<const CudaPageFormat &>(to_format);
  const PackPlan plan = pack_plan(slim);
  const Turn turn(order_);
  Buffer scratch(arena_);
  if (!plan.shared) scratch.reserve(plan.bytes * plan.blocks);
  must(narrow(plan, wide.device, from, slim.device, to, count, scratch.data(), turn.stream()), "narrow");
}

void CudaBackend::unpack(const PageFormat &page_format, const void *page, uint32_t first, uint32_t count, uint32_t head, uint32_t tensor,
                         Block *block) {
  const CudaPageFormat &format = static_cast<const CudaPageFormat &>(page_format);
  const TensorFormat &f = format.tensors[2 * head + tensor];
  const size_t n_params = params_of(f, count), n_codes = f.family == Family::raw ? 0 : size_t(count) * f.dim;
  const size_t n_boosted = f.positions ? size_t(count / f.group) * f.dim : 0;
  const size_t codes = block->codes.size(), params = block->params.size(), boosted = block->boosted.size();
  block->tokens += count;
  block->params.resize(params + n_params), block->codes.resize(codes + n_codes), block->boosted.resize(boosted + n_boosted);
  const size_t param_bytes = n_params * sizeof(uint16_t);
  Vector<uint8_t> host(param_bytes + n_codes + n_boosted, memory_);
  const Turn turn(order_);
  Buffer rows(arena_, host.size());
  uint8_t *const data = rows.as<uint8_t>();
  must(cuda::unpack(format.device, page, first, count, head, tensor, {data + param_bytes, rows.as<uint16_t>(), data + param_bytes + n_codes}, turn.stream()),
       "unpack");
  download(turn, data, host.size(), host.data());  // all at once: it is a wait that costs
  const uint8_t *const codes_at = host.data() + param_bytes;
  if (n_params) std::memcpy(block->params.data() + params, host.data(), param_bytes);
  if (n_codes) std::memcpy(block->codes.data() + codes, codes_at, n_codes);
  if (n_boosted) std::memcpy(block->boosted.data() + boosted, codes_at + n_codes, n_boosted);
}

// ---- steps

std::shared_ptr<Workspace> CudaBackend::make_workspace(std::span<const LayerShape> layers) {
  const std::lock_guard lock(states_mutex_);
  StepState *state = nullptr;
  for (StepState *each : states_)
    if (!each->in_use) {
      state = each;
      break;
    }
  if (!state) {
    states_.reserve(states_.size() + 1);
    state = std::pmr::polymorphic_allocator<StepState>(memory_).new_object<StepState>(memory_, arena_);
    states_.push_back(state);
  }
  state->reserve(layers, processors_);
  state->in_use = true;
  state->planned = false;
  const auto workspace = make_shared_in<CudaWorkspace>(memory_, this, state);
  workspace->bytes = state->bytes();
  return workspace;
}

Status CudaBackend::plan_step(const StepSource &source, std::span<const LayerShape> shapes, Workspace *workspace) {
  const Turn turn(order_);
  StepState &state = state_of(workspace);
  if (turn.capturing()) return state.planned ? KVQ_OK : fail(KVQ_E_UNSUPPORTED, "a step cannot begin inside a capture");
  if (source.invariant() && captured_)
    return fail(KVQ_E_UNSUPPORTED, "flags: no step is INVARIANT in a cache whose calls have been captured in a CUDA graph");
  if (replays_.size() < shapes.size()) replays_.resize(shapes.size());
  KVQ_TRY(cuda::plan_step(source, shapes, processors_, arena_, turn.stream(), &state));
  state.planned = true, state.invariant = source.invariant();
  state.saturated = 0;
  return KVQ_OK;
}

Status CudaBackend::append(uint32_t layer, const LayerShape &shape, const kvq_tensor &k, const kvq_tensor &v, Workspace *workspace) {
  const Turn turn(order_, Order::Call::layer);
  StepState &state = state_of(workspace);
  const uint32_t tokens = state.queries;
  if (tokens == 0) return KVQ_OK;
  Buffer key_rows(arena_), value_rows(arena_);
  DeviceTensor keys, values;
  uint64_t saturated = 0;
  KVQ_TRY(to_device(turn, k, 0, tokens, shape.kv_heads, shape.dim_k, "k", &key_rows, &keys, &saturated));
  KVQ_TRY(to_device(turn, v, 0, tokens, shape.kv_heads, shape.dim_v, "v", &value_rows, &values, &saturated));
  state.saturated += saturated;
  KVQ_CUDA(append_rows(raw_shape(shape), keys, values, state.plan(state.first_launch[layer]), tokens, turn.stream()));
  if (turn.capturing()) replays_[layer] = 1;
  return KVQ_OK;
}

Status CudaBackend::finish_step(Workspace *workspace, std::span<StepFinding> findings, uint64_t *saturated) {
  StepState &state = state_of(workspace);
  *saturated += state.saturated;
  if (!state.planned || state.sequences == 0) return KVQ_OK;
  Vector<Findings> found(state.sequences, memory_);
  const Turn turn(order_);
  KVQ_CUDA(cudaMemcpyAsync(found.data(), state.findings, found.size() * sizeof(Findings), cudaMemcpyDeviceToHost, turn.stream()));
  KVQ_CUDA(cudaStreamSynchronize(turn.stream()));
  for (size_t s = 0; s < found.size(); s++) {
    *saturated += found[s].saturated;
    if (found[s].bad == kNothingBad) continue;
    const BadElement bad = bad_element(found[s].bad);
    findings[s] = {true, uint32_t(bad.token), bad.head, bad.channel, bad.tensor ? "v" : "k or q"};
  }
  return KVQ_OK;
}

// Results for host memory, from packed rows on the device.
static void write_host(const kvq_tensor &out, const float *rows, uint32_t tokens, uint32_t heads, uint32_t dim) {
  char *data = static_cast<char *>(out.data);
  for (uint32_t t = 0; t < tokens; t++)
    for (uint32_t h = 0; h < heads; h++, rows += dim) {
      const int64_t at = t * out.token_stride + h * out.head_stride;
      for (uint32_t c = 0; c < dim; c++) {
        const uint32_t bits = std::bit_cast<uint32_t>(rows[c]);
        if (out.dtype == KVQ_DTYPE_F32) reinterpret_cast<float *>(data)[at + c] = rows[c];
        if (out.dtype == KVQ_DTYPE_F16) reinterpret_cast<uint16_t *>(data)[at + c] = float_to_half(rows[c]);
        if (out.dtype == KVQ_DTYPE_BF16) reinterpret_cast<uint16_t *>(data)[at + c] = uint16_t((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
      }
    }
}

Status CudaBackend::attend(const AttendCall &call, Workspace *workspace) {
  const Turn turn(order_, Order::Call::layer);
  StepState &state = state_of(workspace);
  const LayerShape &shape = *call.shape;
  const uint32_t tokens = state.queries;
  if (turn.capturing() && state.invariant) return fail(KVQ_E_UNSUPPORTED, "step: an INVARIANT one cannot be captured in a CUDA graph");
  if (turn.capturing()) captured_ = true;
  AttendArguments a{};
  a.scale = call.scale, a.softcap = call.softcap, a.window = call.window;
  a.kv_heads = shape.kv_heads, a.ratio = shape.q_heads / shape.kv_heads, a.dim_k = shape.dim_k, a.dim_v = shape.dim_v;
  if (call.sinks && shape.q_heads > kMaxSinks)
    return fail(KVQ_E_UNSUPPORTED, "options: sinks of %u query heads; the CUDA backend takes at most %u", shape.q_heads, kMaxSinks);
  Buffer query_rows(arena_), results(arena_);
  uint64_t saturated = 0;
  KVQ_TRY(to_device(turn, *call.q, 0, tokens, shape.q_heads, shape.dim_k, "q", &query_rows, &a.q, &saturated));
  const bool to_host = call.out->memory == KVQ_MEMORY_HOST;
  const size_t out_size = size_t(tokens) * shape.q_heads * shape.dim_v, lse_size = size_t(tokens) * shape.q_heads;
  if (to_host) {
    if (turn.capturing()) return fail(KVQ_E_UNSUPPORTED, "out: host memory cannot be captured in a CUDA graph");
    results.reserve((out_size + lse_size) * sizeof(float));
    a.out = {results.data(), KVQ_DTYPE_F32, int64_t(shape.q_heads) * shape.dim_v, shape.dim_v};
    a.lse = results.as<float>() + out_size;
  } else {
    KVQ_TRY(check_memory(call.out->data, "out"));
    if (call.lse) KVQ_TRY(check_memory(call.lse, "lse"));
    a.out = {call.out->data, call.out->dtype, call.out->token_stride, call.out->head_stride};
    a.lse = call.lse;
  }
  if (call.sinks) {
    Sinks sinks{shape.q_heads, {}};
    std::copy_n(call.sinks, shape.q_heads, sinks.value);
    a.sinks = state.sinks.as<const float>();
    KVQ_CUDA(store_sinks(sinks, state.sinks.as<float>(), turn.stream()));
  }
  for (uint32_t l = state.first_launch[call.layer]; l < state.first_launch[call.layer + 1]; l++) {
    a.plan = state.plan(l);
    KVQ_CUDA(launch_attention(a, state.launches[l], processors_, turn.stream()));
  }
  state.saturated += saturated;
  if (!to_host) return KVQ_OK;
  Vector<float> host(out_size + lse_size, memory_);
  download(turn, results.data(), host.size() * sizeof(float), host.data());
  write_host(*call.out, host.data(), tokens, shape.q_heads, shape.dim_v);
  if (call.lse) std::copy_n(host.data() + out_size, lse_size, call.lse);
  return KVQ_OK;
}

}  // namespace
}  // namespace cuda

// ---- what the engine sees

uint32_t cuda_devices(char *path, size_t path_size, char *reason, size_t reason_size) {
  int count = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess) {
    cudaGetLastError();
    std::snprintf(reason, reason_size, "%s", cudaGetErrorString(error));
    return 0;
  }
  if (count == 0) {
    std::snprintf(reason, reason_size, "there is no CUDA device");
    return 0;
  }
  int major = 0, minor = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0);
  std::snprintf(path, path_size, "sm_%d%d", major, minor);
  return uint32_t(count);
}

Status check_cuda(uint32_t device, std::span<const LayerShape> shapes) {
  int count = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess) {
    cudaGetLastError();
    return fail(KVQ_E_DEVICE, "backend=CUDA: %s", cudaGetErrorString(error));
  }
  if (int64_t(device) >= count) return fail(KVQ_E_DEVICE, "device=%u: there are %d CUDA devices", device, count);
  int shared = 0;
  cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, int(device));
  for (size_t l = 0; l < shapes.size(); l++) {
    const size_t needed = cuda::general_shared_bytes(shapes[l].dim_k, shapes[l].dim_v);
    if (needed > size_t(shared))
      return fail(KVQ_E_UNSUPPORTED, "layer %zu: dim_k=%u and dim_v=%u need %zu bytes of shared memory; device %u has %d", l,
                  shapes[l].dim_k, shapes[l].dim_v, needed, device, shared);
  }
  return KVQ_OK;
}

bool cuda_reads_fused(const LayerShape &shape, const Codec &k, const Codec &v, uint32_t page_tokens, uint32_t bmax, uint32_t unit) {
  return cuda::reads_fused(shape, k, v, page_tokens, bmax, unit);
}

std::shared_ptr<Backend> make_cuda_backend(Memory *memory, uint32_t device, const char *) {
  auto backend = make_shared_in<cuda::CudaBackend>(memory, memory, device);
  if (backend->prepare() != KVQ_OK) throw DeviceFailure("opening the device", failure_detail());
  return backend;
}

}  // namespace kvq
