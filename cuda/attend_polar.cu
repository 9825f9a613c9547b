// Fused kernels for polar keys.
#include "cuda/fused_kernel.cuh"
#include "cuda/polar.cuh"

namespace kvq::cuda {
namespace {

template <int U, int N>
constexpr FusedKernel polar() {
  return fused<U, N, Pages<Polar, Crumbs>, NoPages>({Code::polar, Code::crumbs}, {});
}
constexpr FusedKernel kPolar[] = {polar<8, 1>(), polar<8, 2>(), polar<4, 1>(), polar<16, 1>()};

}  // namespace

std::span<const FusedKernel> fused_polar() { return kPolar; }

}  // namespace kvq::cuda
