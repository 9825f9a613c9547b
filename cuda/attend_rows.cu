// Fused kernels for rows of 3, 5 and 6 levels, most of them for two classes of pages (SemKV).
#include "cuda/fused_kernel.cuh"

namespace kvq::cuda {
namespace {

template <int U, int L>
using Affine = Pages<Digits<L, false, false, U == 4>, Digits<L, false, true, U == 4>>;
template <int U, int L>
using Book = Pages<Digits<L, L != 3, false, U == 4>, Digits<L, L != 3, L == 3, U == 4>>;

template <int U, int N, class First, class Second>
constexpr FusedKernel rows(Code first, Code second) {
  return fused<U, N, First, Second>({first, first}, {second, second});
}
template <int U, int N>
constexpr FusedKernel affine() {
  return rows<U, N, Affine<U, 5>, Affine<U, 6>>(Code::rows5, Code::rows6);
}
template <int U, int N>
constexpr FusedKernel book() {
  return rows<U, N, Book<U, 5>, Book<U, 6>>(Code::levels5, Code::levels6);
}
template <int U, int N>
constexpr FusedKernel small() {
  return rows<U, N, Book<U, 3>, Pages<Nibbles<2>, Nibbles<2>>>(Code::levels3, Code::book2);
}
constexpr FusedKernel kRowKernels[] = {
    affine<8, 1>(), book<8, 1>(), small<8, 1>(), affine<8, 2>(), book<8, 2>(), small<8, 2>(),
    affine<4, 1>(), book<4, 1>(), small<4, 1>(), affine<16, 1>(), book<16, 1>(), small<16, 1>(),
};

}  // namespace

std::span<const FusedKernel> fused_rows() { return kRowKernels; }

}  // namespace kvq::cuda
