// One order for all device work of a cache.
//
// Calls launch on the caller's stream, or on the cache's own where they have none.  A change of streams waits for what was launched
// before, so pages can be freed and reused as the host sees fit.  The event that later streams wait for is recorded when a call
// ends, except by the per-layer calls of a step and on the cache's own stream: there it is recorded when somebody has to wait, for
// the caller keeps a stream until the step is over (kvq.h).  While a stream is captured into a graph nothing is waited for and
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

  enum class Call {
    layer,
    other
  };
  // Launches of one call; no other thread's come between.
  class Turn {
   public:
    explicit Turn(Order &order, Call call = Call::other) : order_(order), lock_(order.mutex_), call_(call) {
      cudaSetDevice(order.device_);
      const CallStream *callers = CallStream::current();
      stream_ = callers ? static_cast<cudaStream_t>(callers->stream()) : order.own_;
      if (callers) {
        cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
        cudaStreamIsCapturing(stream_, &status);
        capturing_ = status != cudaStreamCaptureStatusNone;
      }
      if (capturing_ || stream_ == order.last_) return;
      order.record();
      cudaStreamWaitEvent(stream_, order.done_);
    }
    ~Turn() {
      if (capturing_) return;
      order_.last_ = stream_;
      order_.unrecorded_ = true;
      if (call_ == Call::other && stream_ != order_.own_) order_.record();
    }
    Turn(const Turn &) = delete;
    cudaStream_t stream() const { return stream_; }
    bool capturing() const { return capturing_; }

   private:
    Order &order_;
    std::unique_lock<std::recursive_mutex> lock_;
    Call call_;
    cudaStream_t stream_;
    bool capturing_ = false;
  };

  // The streams of calls so far may go.
  void settle() {
    const std::lock_guard lock(mutex_);
    record();
  }
  // Wait on the host for all that was launched.
  cudaError_t wait() {
    const std::lock_guard lock(mutex_);
    record();
    return cudaEventSynchronize(done_);
  }

 private:
  void record() {
    if (unrecorded_) cudaEventRecord(done_, last_);
    unrecorded_ = false;
  }

  int device_;
  std::recursive_mutex mutex_;
  cudaStream_t own_ = nullptr, last_ = nullptr;
  cudaEvent_t done_ = nullptr;
  bool unrecorded_ = false;  // is there work on last_ behind the event?
};

}  // namespace kvq::cuda
