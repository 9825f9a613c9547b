// Fused kernels for rows of 3, 5 and 6 levels, most of them for two classes of pages (SemKV).
#include "cuda/fused_kernel.cuh"

namespace kvq::cuda {
namespace {

template <int L>
using Affine = Pages<Digits<L, false, false>, Digits<L, false, true>>;
template <int L>
using Book = Pages<Digits<L, L != 3, false>, Digits<L, L != 3, L == 3>>;

template <int N, class First, class Second>
constexpr FusedKernel rows(Code first, Code second) {
  return fused<8, N, First, Second>({first, first}, {second, second});
}
constexpr FusedKernel kRowKernels[] = {
    rows<1, Affine<5>, Affine<6>>(Code::rows5, Code::rows6),
    rows<1, Book<5>, Book<6>>(Code::levels5, Code::levels6),
    rows<1, Book<3>, Pages<Nibbles<2>, Nibbles<2>>>(Code::levels3, Code::book2),
};

}  // namespace

std::span<const FusedKernel> fused_rows() { return kRowKernels; }

}  // namespace kvq::cuda
