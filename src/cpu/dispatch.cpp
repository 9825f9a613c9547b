// Which table of kernels runs here.
#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

#include <cstdlib>
#include <cstring>

#include "cpu/kernels.h"

namespace kvq::cpu {
namespace {

#if defined(__x86_64__)
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"); }
bool has_avxvnni() {  // CPUID leaf 7, subleaf 1; older compilers have no name for it
  unsigned a = 0, b, c, d;
  return has_avx2() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni") &&
         __builtin_cpu_supports("gfni");
}
// Tiles of AMX are state that a process has to ask Linux for, once; signal frames are larger then.
bool has_amx() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  constexpr unsigned kTiles = 1u << 24 | 1u << 25;             // CPUID leaf 7: AMX-TILE, AMX-INT8
  unsigned a, b, c, d = 0;
  return has_avx512() && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kTiles) == kTiles &&
         syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#else
bool has_amx() { return false; }
bool has_avx2() { return false; }
bool has_avxvnni() { return false; }
bool has_avx512() { return false; }
#endif
#if defined(__aarch64__)
bool has_neon() {
  constexpr unsigned long kNeeded = HWCAP_ASIMDHP | HWCAP_ASIMDDP;
  return (getauxval(AT_HWCAP) & kNeeded) == kNeeded;
}
#else
bool has_neon() { return false; }
#endif

}  // namespace

UsableKernels usable_kernels() {
  return {{has_amx() ? kernels_amx : nullptr, has_avx512() ? kernels_avx512 : nullptr, has_avxvnni() ? kernels_avxvnni : nullptr, has_avx2() ? kernels_avx2 : nullptr,
           has_neon() ? kernels_neon : nullptr, &kernels_portable}};
}

const Kernels *select_kernels(const char *name) {
  const UsableKernels usable = usable_kernels();
  const char *wanted = name ? name : std::getenv("KVQ_CPU");
  for (const Kernels *table : usable.best_first)
    if (table && wanted && std::strcmp(table->name, wanted) == 0) return table;
  for (const Kernels *table : usable.best_first)
    if (table && !name) return table;
  return nullptr;
}

}  // namespace kvq::cpu
