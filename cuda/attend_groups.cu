// Fused kernels for books in groups of channels (Block-GTQ, channel-split), and for rows of different books in keys and values.
#include "cuda/groups.cuh"
#include "cuda/fused_kernel.cuh"

namespace kvq::cuda {
namespace {

template <int U, int N, class Values>
constexpr FusedKernel groups(Code values) {
  return fused<U, N, Pages<Groups, Values>, NoPages>({Code::groups, values}, {});
}
constexpr FusedKernel kGroups[] = {
    groups<8, 1, Nibbles<3>>(Code::book3),
    groups<8, 1, Nibbles<2>>(Code::book2),
    groups<8, 2, Nibbles<3>>(Code::book3),
    groups<8, 2, Nibbles<2>>(Code::book2),
    groups<8, 1, GroupValues>(Code::groups),
    groups<8, 2, GroupValues>(Code::groups),
    groups<4, 1, GroupValues>(Code::groups),
    groups<16, 1, GroupValues>(Code::groups),
};

}  // namespace

std::span<const FusedKernel> fused_groups() { return kGroups; }

}  // namespace kvq::cuda
