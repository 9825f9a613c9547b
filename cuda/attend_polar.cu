// Fused kernels for polar keys.
#include "cuda/fields.cuh"
#include "cuda/fused_kernel.cuh"
#include "cuda/polar.cuh"

namespace kvq::cuda {
namespace {

template <int U, int N, class Values>
constexpr FusedKernel polar(Code values) {
  return fused<U, N, Pages<Polar, Values>, NoPages>({Code::polar, values}, {});
}
constexpr FusedKernel kPolar[] = {
    polar<8, 1, Crumbs>(Code::crumbs), polar<8, 2, Crumbs>(Code::crumbs), polar<4, 1, Crumbs>(Code::crumbs),
    polar<16, 1, Crumbs>(Code::crumbs), polar<16, 1, Fields>(Code::fields),
};

}  // namespace

std::span<const FusedKernel> fused_polar() { return kPolar; }

}  // namespace kvq::cuda
