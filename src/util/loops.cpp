// Which table of loops runs here.
#include "util/loops.h"

#include <cstdlib>
#include <cstring>

namespace kvq {
namespace {

#if defined(__x86_64__)
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"); }
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl");
}
#else
bool has_avx2() { return false; }
bool has_avx512() { return false; }
#endif

// Tables by what they need, and the levels of KVQ_CPU that forbid them.
struct Entry {
  const Loops *table;
  bool runs;
  const char *forbidding[3];
};

}  // namespace

const Loops &select_loops() {
  const char *wanted = std::getenv("KVQ_CPU");
  const Entry entries[] = {{loops_avx512, has_avx512(), {"avxvnni", "avx2", "portable"}}, {loops_avx2, has_avx2(), {"portable"}}};
  for (const Entry &entry : entries) {
    bool allowed = entry.table && entry.runs;
    for (const char *level : entry.forbidding) allowed = allowed && !(wanted && level && std::strcmp(level, wanted) == 0);
    if (allowed) return *entry.table;
  }
  return loops_portable;
}

}  // namespace kvq
