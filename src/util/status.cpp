// The sentence of the newest failure, per thread.
#include "util/status.h"

#include <cstdarg>
#include <cstdio>

namespace kvq {

namespace {
thread_local char detail[512];  // plain memory: nothing to construct or to destroy with a thread or the library
}

Status fail(Status code, const char *format, ...) noexcept {
  char sentence[sizeof detail];  // formatted apart: the arguments may point into `detail`
  va_list arguments;
  va_start(arguments, format);
  const int written = std::vsnprintf(sentence, sizeof sentence, format, arguments);
  va_end(arguments);
  std::snprintf(detail, sizeof detail, "%s", written < 0 ? format : sentence);
  return code;
}

const char *failure_detail() noexcept { return detail; }

}  // namespace kvq
