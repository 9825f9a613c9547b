// The loops of packing (util/loops.h): every table against the rules written out one number at a time, on values that round, saturate,
// vanish and tie, and every codec's blocks on every level that runs here.
#include "util/loops.h"

#include <algorithm>
#include <bit>
#include <catch2/catch_test_macros.hpp>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <memory>
#include <numbers>
#include <set>
#include <string>

#include "codec/affine.h"
#include "codec/books.h"
#include "codec_kit.hpp"
#include "cpu/layout.h"
#include "cpu_kit.hpp"
#include "util/fp.h"

using namespace kvq_test;
using kvq::CodeLanes;
using kvq::kRowLanes;
using kvq::Loops;
using kvq::RowLanes;

namespace {

constexpr const char *kLevels[] = {"portable", "avx2", "avxvnni", "avx512"};

// KVQ_CPU while it lives.
class Level {
 public:
  explicit Level(const char *name) {
    if (const char *before = std::getenv("KVQ_CPU")) before_ = before;
    setenv("KVQ_CPU", name, 1);
  }
  ~Level() { before_.empty() ? unsetenv("KVQ_CPU") : setenv("KVQ_CPU", before_.c_str(), 1); }

 private:
  std::string before_;
};

std::set<const Loops *> tables() {
  std::set<const Loops *> found;
  for (const char *name : kLevels) {
    const Level level(name);
    found.insert(&kvq::select_loops());
  }
  return found;
}

constexpr uint32_t kWidths[] = {1, 2, 3, 6, 7, 16, 40, 46, 64, 80, 96, 128, 320, 1024};

// An fp16 number that a cache may hold; `kind` chooses what is hard about it.
uint16_t torture(Random &random, uint64_t kind) {
  constexpr uint16_t kEdges[] = {0, 1, 2, 0x3ff, 0x400, 0x3c00, 0x7bff, 0x8001, 0x83ff, 0x8400, 0xbc00, 0xfbff};
  uint16_t h = 0;
  switch (kind % 4) {
    case 0:
      h = half_bits(random.normal());
      break;
    case 1:
      h = kEdges[random.below(std::size(kEdges))];
      break;
    case 2:
      h = half_bits(std::nearbyint(2 * random.normal()) / 2);
      break;
    default:
      h = uint16_t(random.bits());
  }
  if ((h & 0x7c00) == 0x7c00) h ^= 0x4000;
  return h == 0x8000 ? 0 : h;
}

std::vector<uint16_t> torture_rows(Random &random, size_t n, uint64_t kind) {
  std::vector<uint16_t> x(n);
  for (uint16_t &h : x) h = torture(random, kind);
  return x;
}

float value(uint16_t h) { return float(half_value(h)); }

struct Lanes {
  explicit Lanes(uint32_t n) : y(new RowLanes[n]()), codes(new CodeLanes[n]()) {}
  std::unique_ptr<RowLanes[]> y;
  std::unique_ptr<CodeLanes[]> codes;
};

Lanes torture_lanes(Random &random, uint32_t n, uint64_t kind) {
  Lanes lanes(n);
  for (uint32_t j = 0; j < n; j++)
    for (uint32_t l = 0; l < kRowLanes; l++) lanes.y[j][l] = l == 3 ? 0.0f : value(torture(random, kind + l));
  return lanes;
}

bool same_bits(float a, float b) { return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b); }

float tree_of(const RowLanes *y, uint32_t n, uint32_t lane, auto &&f) {
  std::vector<float> v(std::bit_ceil(n));
  for (uint32_t j = 0; j < n; j++) v[j] = f(j, y[j][lane]);
  return kvq::tree_sum(v.data(), n);
}

}  // namespace

TEST_CASE("every table of loops enters numbers by rule 1.4") {
  std::vector<uint32_t> bits;
  for (uint64_t b = 0; b < 1ull << 32; b += 30011) bits.push_back(uint32_t(b));
  for (const uint32_t edge : {0x33000000u, 0x38800000u, 0x477fe000u, 0x477ff000u, 0x7f7fffffu})
    for (uint32_t d = 0; d < 5; d++) bits.push_back(edge + d - 2), bits.push_back((edge + d - 2) | 0x80000000u);
  std::erase_if(bits, [](uint32_t b) { return (b & 0x7f800000u) == 0x7f800000u; });
  for (const Loops *loops : tables()) {
    INFO(loops->name);
    std::vector<uint16_t> out(bits.size());
    uint32_t beyond = 0, wrong = 0;
    const kvq::Entered entered = loops->enter_f32(bits.data(), uint32_t(bits.size()), out.data());
    for (size_t i = 0; i < bits.size(); i++) {
      const float x = std::bit_cast<float>(bits[i]);
      beyond += std::fabs(x) > 65504;
      const uint16_t expected = half_bits(x);
      wrong += out[i] != (expected == 0x8000 ? 0 : expected);
    }
    REQUIRE(wrong == 0);
    REQUIRE(entered.finite);
    REQUIRE(entered.saturated == beyond);
    for (uint32_t h = 0; h < 65536; h++) {
      const uint16_t half = uint16_t(h);
      uint16_t f16 = 1, bf16 = 1;
      const bool finite = (half & 0x7c00) != 0x7c00;
      REQUIRE(loops->enter_f16(&half, 1, &f16).finite == finite);
      if (finite) REQUIRE(f16 == (half == 0x8000 ? 0 : half));
      REQUIRE(loops->enter_bf16(&half, 1, &bf16).finite == ((half & 0x7f80) != 0x7f80));
      if ((half & 0x7f80) != 0x7f80) {
        const uint16_t expected = half_bits(std::bit_cast<float>(h << 16));
        REQUIRE(bf16 == (expected == 0x8000 ? 0 : expected));
      }
    }
  }
}

TEST_CASE("every table of loops sees a number that is not finite wherever it stands") {
  for (const Loops *loops : tables())
    for (const uint32_t n : {1u, 5u, 16u, 31u, 33u, 64u, 130u})
      for (uint32_t at = 0; at < n; at++) {
        std::vector<float> x(n, 1.0f);
        std::vector<uint16_t> h(n, 0x3c00), out(n);
        x[at] = at % 2 ? std::numeric_limits<float>::quiet_NaN() : -std::numeric_limits<float>::infinity();
        h[at] = at % 2 ? 0x7c01 : 0xfc00;
        REQUIRE_FALSE(loops->enter_f32(x.data(), n, out.data()).finite);
        REQUIRE_FALSE(loops->enter_f16(h.data(), n, out.data()).finite);
      }
}

TEST_CASE("every table of loops transposes and packs whole and broken squares") {
  Random random;
  for (const Loops *loops : tables())
    for (int trial = 0; trial < 40; trial++) {
      const uint32_t rows = uint32_t(1 + random.below(40)), columns = uint32_t(1 + random.below(70)), stride = columns + uint32_t(random.below(5));
      std::vector<uint16_t> halves_in = torture_rows(random, size_t(rows) * stride, 3), halves_out(size_t(columns) * (rows + 2), 7);
      std::vector<uint8_t> in(size_t(rows) * stride), out(size_t(columns) * (rows + 2), 7);
      for (uint8_t &byte : in) byte = uint8_t(random.bits());
      std::vector<uint32_t> index(rows);
      for (uint32_t &row : index) row = uint32_t(random.below(rows));
      std::vector<uint16_t> picked_out(halves_out);
      loops->transpose_halves(halves_in.data(), stride, nullptr, rows, columns, halves_out.data(), rows + 2);
      loops->transpose_halves(halves_in.data(), stride, index.data(), rows, columns, picked_out.data(), rows + 2);
      loops->transpose_bytes(in.data(), stride, rows, columns, out.data(), rows + 2);
      bool right = true;
      for (uint32_t c = 0; c < columns; c++)
        for (uint32_t r = 0; r < rows + 2; r++) {
          right = right && out[c * (rows + 2) + r] == (r < rows ? in[r * stride + c] : 7);
          right = right && halves_out[c * (rows + 2) + r] == (r < rows ? halves_in[r * stride + c] : 7);
          right = right && picked_out[c * (rows + 2) + r] == (r < rows ? halves_in[index[r] * stride + c] : 7);
        }
      std::vector<uint32_t> column;
      for (uint32_t c = 0; c < std::min(columns, 32u); c++)
        if (trial % 4 == 0 || random.below(3) == 0 || c == 0) column.push_back(c);
      const size_t picked = column.size(), across = picked + 1;
      std::vector<uint16_t> some(rows * across, 7);
      loops->pick_halves(halves_in.data(), stride, rows, column.data(), uint32_t(picked), some.data(), across);
      for (size_t i = 0; i < some.size(); i++) right = right && some[i] == (i % across < picked ? halves_in[i / across * stride + column[i % across]] : 7);
      const uint32_t quads = columns / 4;
      std::vector<uint8_t> line(size_t(quads) * 4 * (rows + 1), 7), words(size_t(columns) * 4, 7);
      loops->key_words(in.data(), stride, rows, quads, line.data(), 4 * (rows + 1));
      for (uint32_t i = 0; i < rows * quads * 4; i++) {
        const uint32_t t = i / (quads * 4), slot = i % (quads * 4);
        right = right && line[slot / 4 * 4 * (rows + 1) + 4 * t + kvq::cpu::kByte[slot % 4]] == in[t * stride + slot];
      }
      if (rows >= 4) {
        loops->value_words(in.data(), stride, columns, words.data());
        for (uint32_t i = 0; i < 4 * columns; i++) right = right && words[i / 4 * 4 + kvq::cpu::kByte[i % 4]] == in[i % 4 * stride + i / 4];
      }
      uint8_t bytes[64], plane[64], expected[64];
      const uint32_t n = uint32_t(1 + random.below(8)), from = uint32_t(random.below(9 - n)), to = uint32_t(random.below(9 - n));
      for (uint32_t i = 0; i < 64; i++) {
        bytes[i] = uint8_t(random.bits()), plane[i] = uint8_t(random.bits());
        const uint32_t mask = ((1u << n) - 1) << to;
        expected[i] = uint8_t((plane[i] & ~mask) | (((bytes[i] >> from) << to) & mask));
      }
      loops->put_bits(bytes, from, n, to, plane);
      right = right && std::equal(plane, plane + 64, expected);
      INFO(loops->name << " " << rows << " x " << columns);
      REQUIRE(right);
    }
}

TEST_CASE("every table of loops rotates and sums rows as section 3 and tree() say") {
  Random random;
  for (const Loops *loops : tables())
    for (const uint32_t n : kWidths)
      for (uint64_t kind = 0; kind < 4; kind++) {
        INFO(loops->name << " n " << n << " kind " << kind);
        const Lanes lanes = torture_lanes(random, n, kind);
        std::vector<uint16_t> mu = torture_rows(random, n, 0);
        std::unique_ptr<uint16_t[][kRowLanes]> x(new uint16_t[n][kRowLanes]);
        std::vector<uint32_t> channel(n);
        std::vector<uint64_t> words(n / 64 + 1);
        for (uint64_t &word : words) word = random.bits();
        for (uint32_t j = 0; j < n; j++) {
          channel[j] = (j * 5 + 3) % n;
          for (uint32_t l = 0; l < kRowLanes; l++) x[j][l] = torture(random, kind);
        }
        Lanes loaded(n), flipped(n), turned(n);
        loops->load_lanes(x[0], kRowLanes, channel.data(), n, kind % 2 ? mu.data() : nullptr, loaded.y.get());
        std::copy_n(lanes.y[0], n * kRowLanes, flipped.y[0]);
        loops->flip_lanes(flipped.y.get(), n, words.data());
        const uint32_t p = std::bit_floor(n);
        std::copy_n(lanes.y[0], n * kRowLanes, turned.y[0]);
        loops->butterfly_lanes(turned.y.get(), p, 0.3f);
        float squares[kRowLanes];
        loops->square_lanes(lanes.y.get(), n, squares);
        bool right = true;
        for (uint32_t l = 0; l < kRowLanes; l++) {
          std::vector<float> y(p);
          for (uint32_t j = 0; j < p; j++) y[j] = lanes.y[j][l];
          for (uint32_t d = 1; d < p; d *= 2)
            for (uint32_t i = 0; i < p; i++)
              if (!(i & d)) {
                const float a = y[i], b = y[i + d];
                y[i] = a + b, y[i + d] = a - b;
              }
          for (uint32_t j = 0; j < p; j++) right = right && same_bits(turned.y[j][l], p > 1 ? y[j] * 0.3f : y[j]);
          for (uint32_t j = 0; j < n; j++) {
            const float entered = value(x[channel[j]][l]);
            right = right && same_bits(loaded.y[j][l], kind % 2 ? entered - value(mu[channel[j]]) : entered);
            right = right && same_bits(flipped.y[j][l], words[j / 64] >> j % 64 & 1 ? -lanes.y[j][l] : lanes.y[j][l]);
          }
          right = right && same_bits(squares[l], tree_of(lanes.y.get(), n, l, [](uint32_t, float v) { return v * v; }));
        }
        REQUIRE(right);
      }
}

TEST_CASE("every table of loops chooses the codes of rules 2.1 and 2.2") {
  Random random;
  for (const Loops *loops : tables())
    for (const uint32_t n : kWidths)
      for (const uint32_t levels : {2u, 3u, 4u, 5u, 6u, 7u, 8u, 16u, 32u, 64u, 128u, 256u}) {
        INFO(loops->name << " n " << n << " levels " << levels);
        const kvq::Book &book = kvq::find_book(levels);
        Lanes lanes = torture_lanes(random, n, n + levels);
        float sigma[kRowLanes], products[kRowLanes], mn[kRowLanes], mx[kRowLanes], zero[kRowLanes], step[kRowLanes], top[kRowLanes];
        uint64_t squares[kRowLanes];
        for (uint32_t l = 0; l < kRowLanes; l++) sigma[l] = l == 3 ? 0.0f : std::fabs(value(torture(random, l)));
        for (uint32_t l = 0; l < kRowLanes; l++) lanes.y[0][l] = book.threshold[random.below(levels - 1)] * sigma[l];  // a tie
        loops->book_lanes({levels, book.threshold.data(), book.level.data()}, lanes.y.get(), n, sigma, lanes.codes.get(), squares);
        loops->product_lanes(lanes.y.get(), lanes.codes.get(), book.level.data(), n, products);
        loops->range_lanes(lanes.y.get(), n, mn, mx);
        for (uint32_t l = 0; l < kRowLanes; l++) {
          const kvq::AffineCoder coder =
              kvq::affine_coder(kvq::affine_params(mn[l], mx[l], levels, false, kvq::ParamType::fp16), levels, kvq::ParamType::fp16);
          zero[l] = coder.zero, step[l] = coder.step, top[l] = coder.top;
        }
        Lanes affine(n);
        loops->affine_lanes(lanes.y.get(), n, zero, step, top, affine.codes.get());
        bool right = true;
        for (uint32_t l = 0; l < kRowLanes; l++) {
          uint64_t sum = 0;
          float low = lanes.y[0][l], high = low;
          for (uint32_t j = 0; j < n; j++) {
            const float y = lanes.y[j][l];
            uint32_t code = 0;
            for (const float t : book.threshold) code += y > t * sigma[l];
            sum += uint64_t(int64_t(book.level[code]) * book.level[code]);
            low = std::min(low, y), high = std::max(high, y);
            right = right && lanes.codes[j][l] == code && affine.codes[j][l] == kvq::affine_code(y, zero[l], step[l], top[l]);
          }
          const float product = tree_of(lanes.y.get(), n, l, [&](uint32_t j, float v) { return v * float(book.level[lanes.codes[j][l]]); });
          right = right && squares[l] == sum && products[l] == product && mn[l] == low && mx[l] == high;
        }
        REQUIRE(right);
      }
}

TEST_CASE("every table of loops quantizes and sums columns exactly") {
  Random random;
  for (const Loops *loops : tables())
    for (const uint32_t n : kWidths)
      for (const uint32_t rows : {1u, 3u, 32u, 64u}) {
        INFO(loops->name << " n " << n << " rows " << rows);
        const std::vector<uint16_t> x = torture_rows(random, size_t(rows) * n, n + rows);
        std::vector<float> mn(n), mx(n), zero(n), step(n), top(n);
        std::vector<uint8_t> codes(size_t(rows) * n);
        std::vector<kvq::ChannelUnits> channels(n);
        std::vector<uint64_t> norms(n / 2), squares(n / 2);
        std::vector<int64_t> values(n);
        std::vector<uint32_t> u(n / 2), v(n / 2);
        std::vector<uint16_t> polar(size_t(rows) * n / 2 * 2);
        for (uint32_t p = 0; p < n / 2; p++) u[p] = rows % 2 ? 2 * p : p, v[p] = rows % 2 ? 2 * p + 1 : p + n / 2;
        loops->range_columns(x.data(), rows, n, mn.data(), mx.data());
        for (uint32_t c = 0; c < n; c++) zero[c] = mn[c], step[c] = mx[c] > mn[c] ? (mx[c] - mn[c]) / 7 : 1, top[c] = 7;
        loops->affine_columns(x.data(), rows, n, zero.data(), step.data(), top.data(), codes.data());
        loops->sum_channels(x.data(), n, rows, n, channels.data());
        loops->sum_values(x.data(), n, rows, n, values.data());
        loops->sum_norms(x.data(), n, rows, u.data(), v.data(), n / 2, norms.data());
        loops->sum_squares(x.data(), n, rows, u.data(), v.data(), n / 2, squares.data());
        loops->polar_columns(x.data(), n, rows, u.data(), v.data(), n / 2, polar.data());
        bool right = true;
        for (uint32_t c = 0; c < n; c++) {
          double low = INFINITY, high = -INFINITY, sum = 0, abs = 0;
          for (uint32_t t = 0; t < rows; t++) {
            const double y = half_value(x[t * n + c]);
            low = std::min(low, y), high = std::max(high, y), sum += y, abs += std::fabs(y);
            right = right && codes[t * n + c] == kvq::affine_code(float(y), zero[c], step[c], top[c]);
          }
          right = right && mn[c] == low && mx[c] == high && channels[c].min == low && channels[c].max == high;
          right = right && channels[c].sum == int64_t(std::ldexp(sum, 24)) && channels[c].abs == int64_t(std::ldexp(abs, 24)) && values[c] == channels[c].sum;
        }
        for (uint32_t p = 0; p < n / 2; p++) {
          uint64_t norm = 0, square = 0;
          for (uint32_t t = 0; t < rows; t++) {
            const float a = value(x[t * n + u[p]]), b = value(x[t * n + v[p]]), aa = a * a, bb = b * b, r2 = aa + bb;
            square += uint64_t(std::floor(std::ldexp(double(r2), 24)));
            norm += uint64_t(std::floor(std::ldexp(double(std::sqrt(r2)), 24)));
            const uint16_t *at = polar.data() + size_t(t) * (n / 2 * 2) + p;
            const double angle = std::atan2(double(b), double(a)), turns = angle < 0 ? angle + 2 * std::numbers::pi : angle;
            right = right && at[0] == kvq::float_to_half(std::sqrt(r2));
            right = right && std::abs(std::remainder(half_value(at[n / 2]) - turns, 2 * std::numbers::pi)) <= 0x1p-9 + 1e-6;
          }
          right = right && norms[p] == norm && squares[p] == square;
        }
        REQUIRE(right);
      }
}

TEST_CASE("every level gives every codec the same codes and parameters") {
  Random random;
  for (const uint32_t dim : {64u, 80u, 128u, 576u})
    for (const CodecCase &kind : codec_cases(dim)) {
      const uint32_t tokens = kind.group > 1 ? 2 * kind.group : 37;
      for (uint64_t trial = 0; trial < 4; trial++) {
        const std::vector<uint16_t> x = torture_rows(random, size_t(tokens) * dim, trial);
        std::vector<Block> blocks;
        for (const char *name : kLevels) {
          const Level level(name);
          blocks.push_back(encoded(format_of(kind.text, keys(dim)), x));
        }
        INFO(kind.text << " dim " << dim << " trial " << trial);
        for (const Block &block : blocks) {
          REQUIRE(block.codes == blocks[0].codes);
          REQUIRE(block.params == blocks[0].params);
          REQUIRE(block.boosted == blocks[0].boosted);
        }
      }
    }
}
