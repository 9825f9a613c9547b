#include "codec/books.h"

#include <array>

#include "codec/books_data.h"
#include "codec/codec.h"

namespace kvq {
namespace {

// t_j = fp32 nearest to a * (m_j + m_j+1) / 2: the sum and the halving are exact, so one rounding is left.
template <size_t N>
constexpr std::array<float, N - 1> thresholds(const book_data::Levels<N> &data) {
  std::array<float, N - 1> t{};
  for (size_t j = 0; j + 1 < N; j++) t[j] = data.scale * float(data.level[j] + data.level[j + 1]) * 0.5f;
  return t;
}

template <const auto &data>
constexpr auto kThresholds = thresholds(data);

template <const auto &data>
constexpr Book book() {
  return {data.scale, data.level, kThresholds<data>};
}

constexpr Book kNone;
constexpr Book kBooks[] = {
    book<book_data::kNormal2>(),
    book<book_data::kNormal3>(),
    book<book_data::kNormal4>(),
    book<book_data::kNormal5>(),
    book<book_data::kNormal6>(),
    book<book_data::kNormal7>(),
    book<book_data::kNormal8>(),
    book<book_data::kNormal16>(),
    book<book_data::kNormal32>(),
    book<book_data::kNormal64>(),
    book<book_data::kNormal128>(),
    book<book_data::kNormal256>(),
};

}  // namespace

const Book &find_book(uint32_t levels) {
  for (const Book &book : kBooks)
    if (book.level.size() == levels) return book;
  return kNone;
}

std::span<const int16_t> book_levels(uint32_t levels) { return find_book(levels).level; }

float book_scale(uint32_t levels) { return find_book(levels).scale; }

}  // namespace kvq
