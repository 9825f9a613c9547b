// Fused kernels for keys in columns.
#include "cuda/fields.cuh"
#include "cuda/fused_kernel.cuh"

namespace kvq::cuda {
namespace {

template <int U, int N, class Values>
constexpr FusedKernel columns(Code values) {
  return fused<U, N, Pages<Planes, Values>, NoPages>({Code::planes, values}, {});
}
template <int L>
using Loose = Digits<L, L != 3, L == 3, false, true>;
constexpr FusedKernel kColumns[] = {
    columns<8, 1, Crumbs>(Code::crumbs),
    columns<8, 1, Nibbles<2>>(Code::book2),
    columns<8, 1, Loose<3>>(Code::levels3),
    columns<8, 1, Loose<6>>(Code::levels6),
    columns<8, 2, Crumbs>(Code::crumbs),
    columns<8, 2, Nibbles<2>>(Code::book2),
    columns<8, 2, Loose<3>>(Code::levels3),
    columns<8, 2, Loose<6>>(Code::levels6),
    columns<4, 1, Crumbs>(Code::crumbs),
    columns<4, 1, Nibbles<2>>(Code::book2),
    columns<4, 1, Digits<3, false, true, true>>(Code::levels3),
    columns<4, 1, Digits<6, true, false, true>>(Code::levels6),
    columns<16, 1, Crumbs>(Code::crumbs),
    columns<16, 1, Nibbles<2>>(Code::book2),
    columns<16, 1, Fields>(Code::fields),
    columns<16, 1, Loose<3>>(Code::levels3),
    columns<16, 1, Loose<6>>(Code::levels6),
};

}  // namespace

std::span<const FusedKernel> fused_columns() { return kColumns; }

}  // namespace kvq::cuda
