// The caller's CUDA stream during a call that has one.  A device backend asks for it where it launches, so that nothing between the
// C boundary and the backend has to pass it on; the CPU backend never looks.
#pragma once

namespace kvq {

class CallStream {
 public:
  explicit CallStream(void *stream);
  ~CallStream();
  CallStream(const CallStream &) = delete;
  // Of the call that this thread is in; nullptr: the call has no stream.
  static const CallStream *current();
  void *stream() const { return stream_; }

 private:
  void *stream_;
  const CallStream *outer_;
};

}  // namespace kvq
