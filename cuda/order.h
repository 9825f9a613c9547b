// One order for all device work of a cache.
//
// Calls launch on the caller's stream, or on the cache's own where they have none.  A change of streams waits for what was launched
// before, so pages can be freed and reused as the host sees fit.  While a stream is captured into a graph nothing is waited for and
// nothing recorded: whoever replays a graph lets it finish before the next call that is not part of one.
#pragma once
#include <cuda_runtime.h>

#include <mutex>

#include "backend/call_stream.h"

namespace kvq::cuda {

class Order {
 public:
  explicit Order(int device) : device_(device) {}
  ~Order() {
    if (own_) cudaStreamSynchronize(own_), cudaStreamDestroy(own_);
    if (done_) cudaEventDestroy(done_);
  }
  Order(const Order &) = delete;
  cudaError_t prepare() {
    if (const cudaError_t error = cudaSetDevice(device_); error != cudaSuccess) return error;
    if (const cudaError_t error = cudaStreamCreateWithFlags(&own_, cudaStreamNonBlocking); error != cudaSuccess) return error;
    last_ = own_;
    return cudaEventCreateWithFlags(&done_, cudaEventDisableTiming);
  }

  // Launches of one call; no other thread's come between.
  class Turn {
   public:
    explicit Turn(Order &order) : order_(order), lock_(order.mutex_) {
      cudaSetDevice(order.device_);
      const CallStream *call = CallStream::current();
      stream_ = call ? static_cast<cudaStream_t>(call->stream()) : order.own_;
      cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
      cudaStreamIsCapturing(stream_, &status);
      capturing_ = status != cudaStreamCaptureStatusNone;
      if (!capturing_ && stream_ != order.last_) cudaStreamWaitEvent(stream_, order.done_);
    }
    ~Turn() {
      if (capturing_) return;
      cudaEventRecord(order_.done_, stream_);
      order_.last_ = stream_;
    }
    Turn(const Turn &) = delete;
    cudaStream_t stream() const { return stream_; }
    bool capturing() const { return capturing_; }

   private:
    Order &order_;
    std::unique_lock<std::recursive_mutex> lock_;
    cudaStream_t stream_;
    bool capturing_;
  };

  // Wait on the host for all that was launched.
  cudaError_t wait() {
    const std::lock_guard lock(mutex_);
    return cudaEventSynchronize(done_);
  }

 private:
  int device_;
  std::recursive_mutex mutex_;
  cudaStream_t own_ = nullptr, last_ = nullptr;
  cudaEvent_t done_ = nullptr;
};

}  // namespace kvq::cuda
