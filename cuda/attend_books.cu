// Fused kernels for rows of books of 2^w levels.
#include "cuda/fused_kernel.cuh"

namespace kvq::cuda {
namespace {

template <int U, int N, int W>
constexpr FusedKernel books(Code code) {
  return fused<U, N, Pages<Nibbles<W>, Nibbles<W>>, NoPages>({code, code}, {});
}
constexpr FusedKernel kBooks[] = {
    books<8, 1, 3>(Code::book3), books<8, 1, 2>(Code::book2), books<8, 1, 4>(Code::book4),
    books<8, 2, 3>(Code::book3), books<8, 2, 2>(Code::book2), books<8, 2, 4>(Code::book4),
    books<8, 4, 3>(Code::book3), books<8, 4, 2>(Code::book2),
    books<4, 1, 3>(Code::book3), books<4, 1, 2>(Code::book2), books<4, 1, 4>(Code::book4),
    books<4, 2, 3>(Code::book3), books<4, 2, 2>(Code::book2), books<4, 2, 4>(Code::book4),
    books<16, 1, 3>(Code::book3), books<16, 1, 2>(Code::book2), books<16, 1, 4>(Code::book4),
};

}  // namespace

std::span<const FusedKernel> fused_books() { return kBooks; }

}  // namespace kvq::cuda
