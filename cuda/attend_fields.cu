// Fused kernels for affine codes of 2^w levels in small groups, in rows of keys, and with boosted channels (KIVI, Kitty).
#include "cuda/fields.cuh"
#include "cuda/fused_kernel.cuh"

namespace kvq::cuda {
namespace {

template <int U, int N, class Keys, class Values>
constexpr FusedKernel fields(Code keys, Code values) {
  return fused<U, N, Pages<Keys, Values>, NoPages>({keys, values}, {});
}
template <int U, int N>
constexpr FusedKernel any() {
  return fields<U, N, Fields, Fields>(Code::fields, Code::fields);
}
constexpr FusedKernel kFields[] = {
    fields<8, 1, HalfFields, HalfFields>(Code::halves, Code::halves),
    fields<8, 2, HalfFields, HalfFields>(Code::halves, Code::halves),
    fields<8, 1, Fields, Crumbs>(Code::fields, Code::crumbs),
    any<8, 1>(),
    any<8, 2>(),
    any<4, 1>(),
    any<16, 1>(),
};

}  // namespace

std::span<const FusedKernel> fused_fields() { return kFields; }

}  // namespace kvq::cuda
