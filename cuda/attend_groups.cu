// Fused kernels for keys in groups of channels (Block-GTQ).
#include "cuda/fused_kernel.cuh"

namespace kvq::cuda {
namespace {

template <int N, int W>
constexpr FusedKernel groups(Code values) {
  return fused<8, N, Pages<Groups, Nibbles<W>>, NoPages>({Code::groups, values}, {});
}
constexpr FusedKernel kGroups[] = {groups<1, 3>(Code::book3), groups<1, 2>(Code::book2), groups<2, 3>(Code::book3), groups<2, 2>(Code::book2)};

}  // namespace

std::span<const FusedKernel> fused_groups() { return kGroups; }

}  // namespace kvq::cuda
