// Token scores in device memory: the rules of policy/indicator_rules.h by one warp a token, the bits that the host has.
//
// Calls only launch, on the caller's stream and on the device that the memory belongs to.
#include <cmath>

#include "backend/call_stream.h"
#include "cuda/check.h"
#include "cuda/cuda_backend.h"
#include "cuda/enter.cuh"
#include "policy/indicator_rules.h"

namespace kvq {
namespace cuda {
namespace {

constexpr uint32_t kWarps = 4;  // of a block of threads: tokens
constexpr uint32_t kAll = 0xffffffffu;

// Lanes of indicator_rules.h.  Every lane has the result.
struct Warp {
  uint32_t lane;
  __device__ double add(double x) const {
    for (uint32_t apart = 1; apart < kScoreLanes; apart *= 2) x = x + __shfl_xor_sync(kAll, x, apart);
    return x;
  }
  template <class F>
  __device__ double sum(uint32_t n, F &&term) const {
    double own = 0;
    for (uint64_t i = lane; i < n; i += kScoreLanes) own += term(uint32_t(i));
    return add(own);
  }
  template <class F>
  __device__ float max(uint32_t n, F &&term) const {
    float most = -INFINITY;
    for (uint64_t i = lane; i < n; i += kScoreLanes) most = fmaxf(most, term(uint32_t(i)));
    for (uint32_t apart = 1; apart < kScoreLanes; apart *= 2) most = fmaxf(most, __shfl_xor_sync(kAll, most, apart));
    return most;
  }
};

// Elements of a row; *bad tells whether one was not finite.
struct Row {
  const DeviceTensor &x;
  int64_t at;
  bool *bad;
  __device__ float operator()(uint32_t i) const {
    const float value = load_element(x, at + i);
    *bad |= !is_finite(value);
    return value;
  }
};

// Entered by rule 1.4.
struct EnteredRow {
  Row row;
  __device__ float operator()(uint32_t i) const { return widen(float_to_half(row(i))); }
};

// ---- what one launch adds to the sum of a token

struct Norm {
  DeviceTensor a, unused;
  __device__ double operator()(const Warp &warp, uint64_t token, uint32_t dim, bool *bad) const {
    return row_norm(warp, Row{a, int64_t(token) * a.token_stride, bad}, dim);
  }
};

struct Variance {
  DeviceTensor a, unused;
  __device__ double operator()(const Warp &warp, uint64_t token, uint32_t dim, bool *bad) const {
    return row_variance(warp, Row{a, int64_t(token) * a.token_stride, bad}, dim);
  }
};

struct Distance {
  DeviceTensor a, b;
  __device__ double operator()(const Warp &warp, uint64_t token, uint32_t dim, bool *bad) const {
    return row_distance(warp, Row{a, int64_t(token) * a.token_stride, bad}, Row{b, int64_t(token) * b.token_stride, bad}, dim);
  }
};

struct CosineDistance {
  DeviceTensor a, b;
  __device__ double operator()(const Warp &warp, uint64_t token, uint32_t dim, bool *bad) const {
    return row_cosine_distance(warp, Row{a, int64_t(token) * a.token_stride, bad}, Row{b, int64_t(token) * b.token_stride, bad}, dim);
  }
};

// The token of a warp; beyond the last one there is none.
__device__ uint64_t token_of() { return uint64_t(blockIdx.x) * kWarps + threadIdx.y; }

__device__ double or_nan(double value, bool bad) { return __any_sync(kAll, bad) ? double(NAN) : value; }

template <class Measure>
__global__ void __launch_bounds__(kWarps * 32) hidden_kernel(Measure measure, uint64_t n_tokens, uint32_t dim, bool first, double *sums) {
  const uint64_t token = token_of();
  if (token >= n_tokens) return;
  bool bad = false;
  const double value = or_nan(measure(Warp{threadIdx.x}, token, dim, &bad), bad);
  if (threadIdx.x == 0) sums[token] = first ? value : sums[token] + value;
}

__global__ void __launch_bounds__(kWarps * 32) norms_kernel(DeviceTensor rows, uint64_t n_tokens, uint32_t heads, uint32_t dim, bool first, double *sums) {
  const uint64_t token = token_of();
  if (token >= n_tokens) return;
  double sum = first ? 0 : sums[token];
  bool bad = false;
  for (uint32_t h = 0; h < heads; h++)
    sum += row_norm(Warp{threadIdx.x}, EnteredRow{{rows, int64_t(token) * rows.token_stride + h * rows.head_stride, &bad}}, dim);
  sum = or_nan(sum, bad);
  __syncwarp();  // every lane has read
  if (threadIdx.x == 0) sums[token] = sum;
}

__global__ void mean_kernel(const double *sums, uint64_t n_tokens, double n, float *scores) {
  const uint64_t token = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (token < n_tokens) scores[token] = float(sums[token] / n);
}

__global__ void __launch_bounds__(kWarps * 32) information_kernel(DeviceTensor logits, const uint32_t *targets, uint64_t n_tokens, uint32_t vocab, float *scores) {
  const uint64_t token = token_of();
  if (token >= n_tokens) return;
  const uint32_t target = targets[token];
  bool bad = target >= vocab;
  const Row row{logits, int64_t(token) * logits.token_stride, &bad};
  const double value = bad ? 0 : row_self_information(Warp{threadIdx.x}, row, target, vocab);
  const double score = or_nan(value, bad);
  if (threadIdx.x == 0) scores[token] = float(score);
}

// A block has 32 keys; its row of threads y is lane y, until the lanes of a key become those of a warp.
__global__ void __launch_bounds__(1024) attention_kernel(DeviceTensor weights, uint32_t heads, uint64_t n_queries, uint64_t n_keys, float *scores) {
  __shared__ double lanes[kScoreLanes][kScoreLanes + 1];
  const uint64_t first = uint64_t(blockIdx.x) * 32, key = first + threadIdx.x;
  double own = 0;
  for (uint32_t h = 0; key < n_keys && h < heads; h++)
    for (uint64_t q = threadIdx.y; q < n_queries; q += kScoreLanes) {
      const float weight = load_element(weights, int64_t(q) * weights.token_stride + h * weights.head_stride + int64_t(key));
      own += is_finite(weight) ? double(weight) : double(NAN);
    }
  lanes[threadIdx.y][threadIdx.x] = own;
  __syncthreads();
  const uint64_t mine = first + threadIdx.y;
  const double total = Warp{threadIdx.x}.add(lanes[threadIdx.x][threadIdx.y]);
  if (threadIdx.x == 0 && mine < n_keys) scores[mine] = float(double(scores[mine]) + total);
}

__global__ void random_kernel(uint64_t seed, uint64_t first, uint64_t n_tokens, float *scores) {
  const uint64_t i = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n_tokens) scores[i] = float(splitmix64(seed + first + i) >> 40);
}

// ---- the device of a call

// Makes the device that all memory of a call belongs to the current one, until the call ends.
class OnDevice {
 public:
  ~OnDevice() {
    if (before_ >= 0) cudaSetDevice(before_);
  }
  Status add(const void *data, const char *name) {
    cudaPointerAttributes attributes{};
    const cudaError_t error = cudaPointerGetAttributes(&attributes, data);
    if (error != cudaSuccess) cudaGetLastError();
    if (error != cudaSuccess || !attributes.devicePointer)
      return fail(KVQ_E_INVALID, "%s: memory=DEVICE, but no device can read its data at %p", name, data);
    if (before_ >= 0)
      return attributes.device == device_ ? KVQ_OK : fail(KVQ_E_INVALID, "%s: lies on device %d, the scores on %d", name, attributes.device, device_);
    device_ = attributes.device;
    int before = 0;
    KVQ_CUDA(cudaGetDevice(&before));
    before_ = before;
    KVQ_CUDA(cudaSetDevice(device_));
    return KVQ_OK;
  }
  cudaStream_t stream() const { return static_cast<cudaStream_t>(CallStream::current()->stream()); }

 private:
  int device_ = 0, before_ = -1;
};

// Sums of a call, in the order of its stream.
class Sums {
 public:
  Sums(cudaStream_t stream, uint64_t n) : stream_(stream) { error_ = cudaMallocAsync(reinterpret_cast<void **>(&data_), n * sizeof(double), stream); }
  ~Sums() {
    if (data_) cudaFreeAsync(data_, stream_);
  }
  Sums(const Sums &) = delete;
  Status check() const {
    if (error_ == cudaSuccess) return KVQ_OK;
    cudaGetLastError();
    return fail(KVQ_E_NOMEM, "the device has no memory for the sums of the scores");
  }
  double *data() const { return data_; }

 private:
  cudaStream_t stream_;
  cudaError_t error_;
  double *data_ = nullptr;
};

DeviceTensor tensor_of(const kvq_tensor &x) { return {x.data, x.dtype, x.token_stride, x.head_stride}; }
uint32_t blocks_of(uint64_t n, uint32_t each) { return uint32_t((n + each - 1) / each); }
constexpr dim3 kTokenThreads(32, kWarps);

template <class Measure>
void launch_hidden(const DeviceTensor &a, const DeviceTensor &b, uint64_t n_tokens, uint32_t dim, bool first, double *sums, cudaStream_t stream) {
  hidden_kernel<<<blocks_of(n_tokens, kWarps), kTokenThreads, 0, stream>>>(Measure{a, b}, n_tokens, dim, first, sums);
}

// In the order of KVQ_SCORE_*.
constexpr void (*kHidden[])(const DeviceTensor &, const DeviceTensor &, uint64_t, uint32_t, bool, double *, cudaStream_t) = {
    launch_hidden<Distance>, launch_hidden<CosineDistance>, launch_hidden<Norm>, launch_hidden<Variance>};

Status write_means(const Sums &sums, uint64_t n_tokens, double n, float *scores, cudaStream_t stream) {
  mean_kernel<<<blocks_of(n_tokens, 256), 256, 0, stream>>>(sums.data(), n_tokens, n, scores);
  KVQ_CUDA(cudaGetLastError());
  return KVQ_OK;
}

Status score_hidden(uint32_t kind, const kvq_tensor *hidden, uint32_t n_hidden, uint64_t n_tokens, uint32_t dim, float *scores) {
  uint32_t first = 0;
  KVQ_TRY(check_hidden(kind, n_hidden, &first));
  if (n_tokens == 0) return KVQ_OK;
  OnDevice device;
  KVQ_TRY(device.add(scores, "scores"));
  for (uint32_t l = first; l < n_hidden; l++) KVQ_TRY(device.add(hidden[l].data, "hidden"));
  const Sums sums(device.stream(), n_tokens);
  KVQ_TRY(sums.check());
  const uint32_t least = n_hidden - first == 1 ? first : first + 1;  // the row of a layer and, where there is one, of the layer before
  for (uint32_t l = least; l < n_hidden; l++)
    kHidden[kind](tensor_of(hidden[l]), tensor_of(hidden[l ? l - 1 : 0]), n_tokens, dim, l == least, sums.data(), device.stream());
  return write_means(sums, n_tokens, n_hidden - least, scores, device.stream());
}

Status score_norms(const kvq_tensor *rows, uint32_t n_layers, uint64_t n_tokens, uint32_t heads, uint32_t dim, float *scores) {
  if (n_tokens == 0) return KVQ_OK;
  OnDevice device;
  KVQ_TRY(device.add(scores, "scores"));
  for (uint32_t l = 0; l < n_layers; l++) KVQ_TRY(device.add(rows[l].data, "rows"));
  const Sums sums(device.stream(), n_tokens);
  KVQ_TRY(sums.check());
  for (uint32_t l = 0; l < n_layers; l++)
    norms_kernel<<<blocks_of(n_tokens, kWarps), kTokenThreads, 0, device.stream()>>>(tensor_of(rows[l]), n_tokens, heads, dim, l == 0, sums.data());
  return write_means(sums, n_tokens, double(n_layers) * heads, scores, device.stream());
}

Status score_self_information(const kvq_tensor &logits, const uint32_t *targets, uint64_t n_tokens, uint32_t vocab, float *scores) {
  OnDevice device;
  KVQ_TRY(device.add(scores, "scores"));
  KVQ_TRY(device.add(logits.data, "logits"));
  KVQ_TRY(device.add(targets, "targets"));
  information_kernel<<<blocks_of(n_tokens, kWarps), kTokenThreads, 0, device.stream()>>>(tensor_of(logits), targets, n_tokens, vocab, scores);
  KVQ_CUDA(cudaGetLastError());
  return KVQ_OK;
}

Status score_attention(const kvq_tensor &weights, uint32_t heads, uint64_t n_queries, uint64_t n_keys, float *scores) {
  OnDevice device;
  KVQ_TRY(device.add(scores, "scores"));
  KVQ_TRY(device.add(weights.data, "weights"));
  attention_kernel<<<blocks_of(n_keys, 32), dim3(32, kScoreLanes), 0, device.stream()>>>(tensor_of(weights), heads, n_queries, n_keys, scores);
  KVQ_CUDA(cudaGetLastError());
  return KVQ_OK;
}

Status score_random(uint64_t seed, uint64_t first, uint64_t n_tokens, float *scores) {
  if (n_tokens == 0) return KVQ_OK;
  OnDevice device;
  KVQ_TRY(device.add(scores, "scores"));
  random_kernel<<<blocks_of(n_tokens, 256), 256, 0, device.stream()>>>(seed, first, n_tokens, scores);
  KVQ_CUDA(cudaGetLastError());
  return KVQ_OK;
}

}  // namespace
}  // namespace cuda

constinit const Indicators cuda_indicators = {cuda::score_hidden, cuda::score_norms, cuda::score_self_information, cuda::score_attention,
                                              cuda::score_random};

}  // namespace kvq
