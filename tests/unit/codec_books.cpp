// Section 2.3: the codebooks (V20), against the normal distribution itself.
#include <catch2/catch_test_macros.hpp>
#include <cmath>

#include "codec/books.h"
#include "codec/codec.h"

namespace {

double density(double x) { return std::isinf(x) ? 0 : std::exp(-x * x / 2) / std::sqrt(2 * M_PI); }
double below(double x) { return std::erfc(-x / std::sqrt(2.0)) / 2; }
// Integral of x^2 times the density up to x.
double second_moment(double x) { return below(x) - (std::isinf(x) ? 0 : x * density(x)); }

// Mean squared error of N(0, 1) when the levels of `book` are chosen by its thresholds.
double normal_mse(const kvq::Book &book) {
  double sum = 0;
  for (size_t i = 0; i < book.level.size(); i++) {
    const double a = i ? double(book.threshold[i - 1]) : -INFINITY;
    const double b = i + 1 < book.level.size() ? double(book.threshold[i]) : INFINITY;
    const double c = double(book.scale) * book.level[i];
    sum += second_moment(b) - second_moment(a) - 2 * c * (density(a) - density(b)) + c * c * (below(b) - below(a));
  }
  return sum;
}

struct Optimum {
  uint32_t levels;
  double mse, factor;  // of the best quantizer (Max 1960), and how far from it a book may be
};
constexpr Optimum kOptima[] = {
    {2, .36338, 1.0001},
    {3, .19017, 1.0001},
    {4, .11748, 1.0001},
    {5, .07994, 1.0001},
    {6, .05798, 1.0001},
    {7, .04400, 1.0001},
    {8, .03455, 1.0001},
    {16, .009501, 1.001},
    {32, .0025047, 1.01},
    {64, .00064424, 1.03},
    {128, .000163, 1.1},
    {256, .0000412, 1.1},
};

}  // namespace

TEST_CASE("books exist for the level counts of the format, and no others") {
  for (uint32_t levels = 0; levels <= 300; levels++) {
    bool listed = false;
    for (const Optimum &optimum : kOptima) listed |= optimum.levels == levels;
    REQUIRE(kvq::find_book(levels).level.size() == (listed ? levels : 0));
  }
}

TEST_CASE("books are antisymmetric and ascending, with thresholds in the middle") {
  for (const Optimum &optimum : kOptima) {
    const kvq::Book &book = kvq::find_book(optimum.levels);
    REQUIRE(book.threshold.size() == book.level.size() - 1);
    for (size_t i = 0; i < book.level.size(); i++) REQUIRE(book.level[i] == -book.level[book.level.size() - 1 - i]);
    for (size_t i = 0; i < book.threshold.size(); i++) {
      REQUIRE(book.level[i] < book.level[i + 1]);
      REQUIRE(book.threshold[i] == -book.threshold[book.threshold.size() - 1 - i]);
      const double middle = double(book.scale) * (book.level[i] + book.level[i + 1]) / 2;
      REQUIRE(book.threshold[i] == float(middle));
    }
    const int largest = optimum.levels <= 64 ? 127 : 32767;  // int8 up to 6 bits, int16 beyond
    REQUIRE(book.level.back() <= largest);
  }
}

TEST_CASE("books come close to the best error on N(0, 1)") {
  for (const Optimum &optimum : kOptima) {
    const double mse = normal_mse(kvq::find_book(optimum.levels));
    INFO(optimum.levels << " levels: " << mse);
    CHECK(mse <= optimum.mse * optimum.factor);
    CHECK(mse >= optimum.mse * 0.99);
  }
}

TEST_CASE("the published constants") {
  // codebooks.json, 4 levels: scale_f32 0x3c8979b3, threshold 0x3f7b527b.
  CHECK(kvq::book_scale(4) == 0x1.12f366p-6f);
  CHECK(kvq::find_book(4).threshold[2] == 0x1.f6a4f6p-1f);
  CHECK(kvq::book_levels(4)[0] == -90);
  CHECK(kvq::book_levels(256)[255] == 32767);
}
