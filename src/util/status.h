// Statuses are values (the KVQ_* numbers of kvq.h); the sentence that goes with a failure is kept per thread.
#pragma once
#include <cstdint>

#include "kvq/kvq.h"

namespace kvq {

using Status = int32_t;

// Record the sentence for kvq_error_detail and return `code`.  Name the argument, its value and what was allowed.
[[gnu::format(printf, 2, 3)]] Status fail(Status code, const char *format, ...) noexcept;

// The calling thread's newest sentence.
const char *failure_detail() noexcept;

}  // namespace kvq

#define KVQ_TRY(expression)                                                            \
  do {                                                                                 \
    if (const ::kvq::Status status_ = (expression); status_ != KVQ_OK) return status_; \
  } while (0)
