// The CUDA backend: devices and steps.
#include <algorithm>
#include <cstdio>

#include "cuda/attend_fast.h"
#include "cuda/backend_class.h"
#include "util/entry.h"
#include "util/fp.h"

namespace kvq {
namespace cuda {

static StepState &state_of(Workspace *workspace) { return *static_cast<CudaWorkspace *>(workspace)->state; }

// Programmatic launches: from sm_90 on, and in graphs since CUDA 12.3.
static bool launches_early(int device) {
  int major = 0, driver = 0;
  return cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess && cudaDriverGetVersion(&driver) == cudaSuccess &&
         major >= 9 && driver >= 12030;
}

Status CudaBackend::prepare() {
  KVQ_CUDA(order_.prepare());
  int processors = 1, shared = 0, processor_shared = 0;
  KVQ_CUDA(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device_));
  KVQ_CUDA(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device_));
  KVQ_CUDA(cudaDeviceGetAttribute(&processor_shared, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device_));
  processors_ = {uint32_t(processors), uint32_t(shared), uint32_t(processor_shared), launches_early(device_)}, shared_limit_ = size_t(shared);
  KVQ_CUDA(prepare_packing(shared_limit_));
  KVQ_CUDA(prepare_general(processors_.block_bytes));
  int pageable = 0;
  KVQ_CUDA(cudaDeviceGetAttribute(&pageable, cudaDevAttrPageableMemoryAccess, device_));
  reads_host_memory_ = pageable != 0;
  const Findings nothing[2] = {{kNothingBad, 0}, {kNothingBad, 0}};
  nothing_.reserve(sizeof nothing);
  KVQ_CUDA(cudaMemcpy(nothing_.data(), nothing, sizeof nothing, cudaMemcpyHostToDevice));
  return books_.upload();
}

std::shared_ptr<const PageFormat> CudaBackend::make_format(const LayerShape &, uint32_t page_tokens, std::pmr::vector<HeadFormat> &&k,
                                                           std::pmr::vector<HeadFormat> &&v) {
  const auto format = make_shared_in<CudaPageFormat>(memory_, memory_, arena_, books_, page_tokens, std::move(k), std::move(v));
  const Turn turn(order_);
  if (const Status status = format->upload(turn.stream()); status != KVQ_OK) throw DeviceFailure("upload of a page format", failure_detail());
  return format;
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

// A graph keeps the kernel that is launched now, which must be the one for the pages that there will be.
static Status check_capture(uint32_t layer, const StepState &state) {
  const auto first = state.launches.begin() + state.first_launch[layer], end = state.launches.begin() + state.first_launch[layer + 1];
  if (std::any_of(first, end, [](const LayerLaunch &launch) { return !launch.settled; }))
    return fail(KVQ_E_UNSUPPORTED, "step: none of its sequences has packed tokens in layer %u; a CUDA graph can be captured when one has", layer);
  return KVQ_OK;
}

Status CudaBackend::append(uint32_t layer, const LayerShape &shape, const kvq_tensor &k, const kvq_tensor &v, Workspace *workspace) {
  const Turn turn(order_, Order::Call::layer);
  StepState &state = state_of(workspace);
  const uint32_t tokens = state.queries;
  if (tokens == 0) return KVQ_OK;
  if (turn.capturing()) KVQ_TRY(check_capture(layer, state));
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
  if (turn.capturing()) KVQ_TRY(check_capture(call.layer, state));
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

bool cuda_reads_fused(const LayerShape &shape, const Codec &k, const Codec &v, uint32_t page_tokens, uint32_t bmax) {
  return cuda::reads_fused(shape, k, v, page_tokens, bmax);
}

std::shared_ptr<Backend> make_cuda_backend(Memory *memory, uint32_t device, const char *) {
  auto backend = make_shared_in<cuda::CudaBackend>(memory, memory, device);
  if (backend->prepare() != KVQ_OK) throw DeviceFailure("opening the device", failure_detail());
  return backend;
}

}  // namespace kvq
