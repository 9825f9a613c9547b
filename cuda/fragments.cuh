// Codes of a tile (layout.h) to operands of mma.m16n8k32: registers of four int8 levels or digits.
//
// A Code decodes a tile unit by unit and hands pairs of units to the matrix instructions of its user, which are K's or V's alike.
// A permute instruction looks up four codes of a nibble each in a table of eight bytes; bit 3 of a nibble must be 0.
#pragma once
#include <utility>

#include "codec/books_data.h"
#include "cuda/layout.h"

namespace kvq::cuda {

__device__ __forceinline__ uint32_t permute(uint32_t low, uint32_t high, uint32_t selector) {
  uint32_t out;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(low), "r"(high), "r"(selector));
  return out;
}

// A lane's words of a unit (lane_word in layout.h).
template <int W>
__device__ __forceinline__ void load_unit(const uint8_t *unit, uint32_t lane, uint32_t (&words)[W]) {
  int i = 0;
  if constexpr (W >= 4) {
    const uint4 v = *reinterpret_cast<const uint4 *>(unit + lane * 16);
    words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
    i = 4;
  }
  if constexpr (W % 4 >= 2) {
    const uint2 v = *reinterpret_cast<const uint2 *>(unit + i * 128 + lane * 8);
    words[i] = v.x, words[i + 1] = v.y;
  }
  if constexpr (W % 2) words[W - 1] = *reinterpret_cast<const uint32_t *>(unit + (W - 1) * 128 + lane * 4);
}

// Levels of codes 0..7 in the bytes of a table; fewer codes repeat.
struct LevelTable {
  uint32_t low, high;
};

struct RowClass;

// What a Code says of itself.
struct CodeTraits {
  using Rows = RowClass;                    // what its rows need besides their bytes
  static constexpr uint32_t kWarps = 16;    // of a block: 128 registers a thread; 12: 168
  static constexpr bool kUnsigned = false;  // registers are unsigned bytes
  static constexpr bool kAffine = false;    // rows have a zero
  static constexpr bool kFromOne = false;   // digit d is level d - 1
  static constexpr bool kNested = false;    // values: registers may hold quotients (nested)
  static constexpr bool kScattered = false; // values: slots may be other channels, and rotate in groups
  // Values: registers of y hold quotients, of which the level is this one less `nested` times the next.
  __device__ static constexpr int nested(int) { return 0; }
  // Values: registers of y are this many times their codes.
  __device__ static constexpr int weight(int) { return 1; }
};

// Books of 2^B levels, stored in W bits.  Levels of 16 and more are antisymmetric and without 0: codes have a magnitude and a sign.
template <int W, int B = W>
struct Nibbles : CodeTraits {
  static constexpr bool kSigned = W >= 4;
  static constexpr uint32_t kWarps = kSigned ? 12 : 16;
  __device__ static constexpr int bytes(int units) { return units * W * 128; }

  // Levels, or magnitudes, of 8 * k and on as bytes.
  static constexpr LevelTable tabulate(int k) {
    LevelTable table{0, 0};
    for (int i = 0; i < 8; i++) {
      const int code = (kSigned ? (1 << (W - 1)) + 8 * k + i : i % (1 << W)) - int(centre(W, B));
      const int level = code >= 0 && code < 1 << B ? book_data::level(B, code) : 1;  // another book's: not 0, whose negative would carry
      (i < 4 ? table.low : table.high) |= (uint32_t(level) & 0xff) << 8 * (i % 4);
    }
    return table;
  }
  // As constants.
  template <int K = 0>
  __device__ static __forceinline__ LevelTable levels() {
    constexpr LevelTable kTable = tabulate(K);
    constexpr uint32_t kLow = kTable.low, kHigh = kTable.high;
    return {kLow, kHigh};
  }
  // Registers 2 * k and 2 * k + 1 from nibbles.
  __device__ static __forceinline__ void pair(uint32_t w, LevelTable table, uint32_t &even, uint32_t &odd) {
    const uint32_t x = w & 0x77777777u;
    even = permute(table.low, table.high, x), odd = permute(table.low, table.high, x >> 16);
  }
  __device__ static __forceinline__ void look_up(const uint32_t (&w)[W], LevelTable table, uint32_t (&r)[8]) {
    if constexpr (W == 1) {
#pragma unroll
      for (int b = 0; b < 4; b++) {
        const uint32_t x = w[0] >> b & 0x11111111u;
        r[2 * b] = permute(table.low, table.low, x), r[2 * b + 1] = permute(table.low, table.low, x >> 16);
      }
    } else if constexpr (W == 2) {
#pragma unroll
      for (int k = 0; k < 2; k++) {
        const uint32_t x = w[k] & 0x77777777u, y = w[k] >> 2 & 0x77777777u;  // bit 2 of a selector does not matter
        r[4 * k] = permute(table.low, table.low, x), r[4 * k + 1] = permute(table.low, table.low, x >> 16);
        r[4 * k + 2] = permute(table.low, table.low, y), r[4 * k + 3] = permute(table.low, table.low, y >> 16);
      }
    } else {
#pragma unroll
      for (int k = 0; k < (W == 3 ? 3 : 4); k++) pair(w[k], table, r[2 * k], r[2 * k + 1]);
      if constexpr (W == 3) {
        const uint32_t last = (w[0] >> 3 & 0x11111111u) | (w[1] >> 2 & 0x22222222u) | (w[2] >> 1 & 0x44444444u);
        r[6] = permute(table.low, table.high, last), r[7] = permute(table.low, table.high, last >> 16);
      }
    }
  }
  // Bytes of ones where codes of registers 2 * k and 2 * k + 1 are negative.
  __device__ static __forceinline__ void signs(uint32_t w, uint32_t &even, uint32_t &odd) {
    const uint32_t shifted = w << 4;
    even = permute(w, w, 0xba98u), odd = permute(shifted, shifted, 0xba98u);
  }
  // Codes whose magnitude's higher bits are K take their levels from table K.
  template <int K>
  __device__ static __forceinline__ void choose(const uint32_t (&w)[W], uint32_t (&r)[8]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      uint32_t x[2];
      pair(w[i], levels<K>(), x[0], x[1]);
#pragma unroll
      for (int odd = 0; odd < 2; odd++) {
        const int reg = 2 * i + odd;
        uint32_t mask = ~0u;
#pragma unroll
        for (int b = 0; b < W - 4; b++) {
          const uint32_t bits = w[4 + b] << (7 - reg), all = permute(bits, bits, 0xba98u);
          mask &= K >> b & 1 ? all : ~all;
        }
        r[reg] = (r[reg] & ~mask) | (x[odd] & mask);
      }
    }
  }
  template <int... K>
  __device__ static __forceinline__ void choose_all(const uint32_t (&w)[W], uint32_t (&r)[8], std::integer_sequence<int, K...>) {
    (choose<K + 1>(w, r), ...);
  }
  // Magnitudes with signs: -m is ~m + 1, which does not carry.  The ones are a product, since multipliers are idle where permutations
  // and logic are many: 255 * 0x01010101 is -1 modulo 2^32.
  __device__ static __forceinline__ void look_up_signed(const uint32_t (&w)[W], uint32_t (&r)[8]) {
    look_up(w, levels(), r);
    choose_all(w, r, std::make_integer_sequence<int, (1 << (W - 4)) - 1>());
#pragma unroll
    for (int k = 0; k < 4; k++) {
      uint32_t mask[2];
      signs(w[k], mask[0], mask[1]);
#pragma unroll
      for (int odd = 0; odd < 2; odd++) r[2 * k + odd] = (r[2 * k + odd] ^ mask[odd]) - mask[odd] * 0x01010101u;
    }
  }
  __device__ static __forceinline__ void unit(const uint8_t *at, uint32_t lane, LevelTable table, uint32_t (&r)[8]) {
    uint32_t w[W];
    load_unit<W>(at, lane, w);
    if constexpr (kSigned)
      look_up_signed(w, r);
    else
      look_up(w, table, r);
  }
  template <int U, class Use>
  __device__ static __forceinline__ void for_pairs(const uint8_t *codes, uint32_t lane, LevelTable table, Use &use) {
#pragma unroll
    for (int p = 0; p < U / 2; p++) {
      uint32_t u[8], v[8];
      unit(codes + 2 * p * W * 128, lane, table, u);
      unit(codes + (2 * p + 1) * W * 128, lane, table, v);
      use.add(p, u, v);
    }
  }
};

// Values of four levels, left where they lie in their bytes.
struct Crumbs : CodeTraits {
  static constexpr bool kUnsigned = true, kAffine = true;
  __device__ static constexpr int weight(int y) { return 1 << 2 * (y % 4); }
  __device__ static constexpr int bytes(int units) { return units * 256; }
  template <int U, class Use>
  __device__ static __forceinline__ void for_pairs(const uint8_t *codes, uint32_t lane, LevelTable, Use &use) {
#pragma unroll
    for (int p = 0; p < U / 2; p++) {
      const uint4 w = *reinterpret_cast<const uint4 *>(codes + p * 512 + lane * 16);
      const uint32_t q[4] = {w.x, w.y, w.z, w.w};
      uint32_t u[8], v[8];
#pragma unroll
      for (int i = 0; i < 8; i++) u[i] = q[i / 2] & 0x03030303u << 2 * (i & 1), v[i] = q[i / 2] & 0x30303030u << 2 * (i & 1);
      use.add(p, u, v);
    }
  }
};

// Quotients of numbers in bytes (radix, layout.h), two at a time: x lies in the lower byte of an fp16 number 1024 + x, and its product
// with about 1 / L^d, rounded once with what is added, is 1280 + x / L^d.  Five levels: x is twice the number, and bit 0 is another's.
struct Division {
  int from;             // what is divided: 0: the number, or an earlier quotient
  uint16_t scale, add;  // fp16
};
KVQ_HD constexpr Division division(uint32_t levels, int d) {
  constexpr Division kThree[] = {{}, {0, 0x3555, 0x6355}, {0, 0x2f19, 0x648e}, {2, 0x3555, 0x62aa}, {2, 0x2f20, 0x6471}};
  constexpr Division kFive[] = {{}, {0, 0x2e68, 0x6499}, {0, 0x2520, 0x64eb}};
  constexpr Division kSix[] = {{}, {0, 0x3155, 0x6455}, {0, 0x2720, 0x64e3}};
  return levels == 3 ? kThree[d] : levels == 5 ? kFive[d] : kSix[d];
}
// Is it right for all numbers?
constexpr bool divides(uint32_t levels) {
  const auto part = [](uint16_t half) { return int64_t(1024 + half % 1024) << (half / 1024 - 9); };  // in 2^-16, of a normal number from 2^-6 on
  int64_t power[6] = {levels == 5 ? 2 : 1};
  for (uint32_t d = 1; d <= digits_of(levels, false).digits; d++) power[d] = power[d - 1] * levels;
  for (int64_t x = 0; x < power[digits_of(levels, false).digits]; x++)
    for (uint32_t d = 1; d < digits_of(levels, false).digits; d++) {
      const Division by = division(levels, int(d));
      const int64_t from = by.from ? 1280 + x / power[by.from] : 1024 + x, quotient = x / power[d];
      const int64_t miss = from * part(by.scale) + part(by.add) - (1280 + quotient) * 65536;
      if (miss < -32768 + quotient % 2 || miss >= 32768) return false;  // halves go to even ones
    }
  return true;
}
static_assert(divides(3) && divides(5) && divides(6));

// Both halves.
__device__ __forceinline__ uint32_t divide(uint32_t x, Division by) {
  uint32_t out;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(x), "r"(by.scale * 0x10001u), "r"(by.add * 0x10001u));
  return out;
}

// Rows of 3, 5 or 6 levels (radix, layout.h).  kTable: digits are looked up, else they are levels.  kQuotients: values of rows that are
// not looked up keep x / L^d (of five levels twice the number itself), and their user subtracts sums in place of digits.
// kHalf: of 64 channels; kLoose: as DigitShape says.
template <int L, bool kTable, bool kQuotients, bool kHalf = false, bool kLoose = false>
struct Digits : CodeTraits {
  static_assert(!kTable || !kQuotients);
  static_assert(!kLoose || (!kHalf && L != 5));
  static constexpr bool kUnsigned = !kTable, kAffine = !kTable && L != 3, kFromOne = L == 3, kNested = kQuotients;
  static constexpr DigitShape kRadix = digits_of(L, kHalf, kLoose);
  static constexpr int N = int(kRadix.digits), kGroups = int(kRadix.blocks()), kWords = int(kRadix.whole_words());
  __device__ static constexpr bool keeps(int y) { return kQuotients && y % 16 < kGroups * N; }
  // Loose, 3 levels: where the two bits of a code lie in their bytes; of the last two y, of even q.
  __device__ static constexpr int crumb(int y) { return 2 * ((y - kGroups * N) % 4); }
  __device__ static constexpr int weight(int y) {
    if (kQuotients && kLoose && !keeps(y)) return 1 << crumb(y % 16);
    return keeps(y) && L == 5 && y % 16 % N == 0 ? 2 : 1;
  }
  __device__ static constexpr int nested(int y) { return keeps(y) && y % 16 % N != N - 1 ? L * weight(y) : 0; }
  __device__ static constexpr int bytes(int units) { return units * int(kRadix.words) * 16; }

  // Digits or quotients of four bytes: `even` of bytes 0 and 2, `odd` of bytes 1 and 3.
  template <bool kKeep>
  __device__ static __forceinline__ void split(uint32_t w, uint32_t (&x)[N]) {
    uint32_t even[N], odd[N];
    even[0] = permute(w, 0x64646464u, 0x4240u), odd[0] = permute(w, 0x64646464u, 0x4341u);
    x[0] = L != 5 ? w : kKeep ? w & 0xfefefefeu : w >> 1 & 0x7f7f7f7fu;
#pragma unroll
    for (int d = 1; d < N; d++) {
      const Division by = division(L, d);
      even[d] = divide(even[by.from], by), odd[d] = divide(odd[by.from], by);
      x[d] = permute(even[d], odd[d], 0x6240u);
    }
#pragma unroll
    for (int d = 0; d < N - 1 && !kKeep; d++) x[d] -= L * x[d + 1];
  }
  // Levels of two q: their digits are the nibbles of one selector.
  __device__ static __forceinline__ void look_up(LevelTable table, uint32_t &a, uint32_t &b) {
    const uint32_t selector = a + 16 * b;
    a = permute(table.low, table.high, selector);
    b = permute(table.low, table.high, selector >> 16);
  }
  __device__ static __forceinline__ void load_group(const uint8_t *codes, uint32_t lane, int k, uint32_t (&w)[4]) {
    if (k < kWords / 4) {
      const uint4 v = *reinterpret_cast<const uint4 *>(codes + k * 512 + lane * 16);
      w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
    } else {
      const uint8_t *rest = codes + kWords / 4 * 512;
      if constexpr (kWords % 4 >= 2) {
        const uint2 v = *reinterpret_cast<const uint2 *>(rest + lane * 8);
        w[0] = v.x, w[1] = v.y;
      }
      if constexpr (kWords % 2) w[kWords % 4 - 1] = *reinterpret_cast<const uint32_t *>(codes + (kWords - 1) * 128 + lane * 4);
    }
  }
  // Five levels: what bit 0 of word i adds to the 20th word and to the singles.
  __device__ static __forceinline__ void carry(uint32_t w, int i, uint32_t &last, uint32_t (&single)[4]) {
    const uint32_t bits = w & 0x01010101u;
    if (i < 7)
      last += bits << (i + 1);
    else
      single[(i - 7) / 3] += bits << (i - 7) % 3;
  }
  template <int U, class Use>
  __device__ static __forceinline__ void for_pairs(const uint8_t *codes, uint32_t lane, LevelTable table, Use &use) {
    static_assert(kHalf ? U == 4 : U == 8 || U == 16);
    if constexpr (kHalf)
      for_half(codes, lane, table, use);
    else
      for_eight<0>(codes, lane, table, use);
    if constexpr (U == 16) for_eight<4>(codes + kWords * 128, lane, table, use);
  }
  // Eight units, from pair kFirst on.
  template <int kFirst, class Use>
  __device__ static __forceinline__ void for_eight(const uint8_t *codes, uint32_t lane, LevelTable table, Use &use) {
    if constexpr (kLoose)
      for_loose<kFirst>(codes, lane, table, use);
    else
      for_part<kFirst>(codes, lane, table, use);
  }
  // Registers of the units 2 * p and 2 * p + 1, from those by y and q.
  template <int Y, class Use>
  __device__ static __forceinline__ void hand(int p, int y, const uint32_t (&r)[Y][4], Use &use) {
    const uint32_t u[8] = {r[y][0], r[y + 1][0], r[y][1], r[y + 1][1], r[y][2], r[y + 1][2], r[y][3], r[y + 1][3]};
    const uint32_t v[8] = {r[y + 2][0], r[y + 3][0], r[y + 2][1], r[y + 3][1], r[y + 2][2], r[y + 3][2], r[y + 2][3], r[y + 3][3]};
    use.add(p, u, v);
  }
  // The two singles of 64 channels, from words, of which the last number of five levels is gathered, and from half a word.
  __device__ static __forceinline__ void half_singles(const uint8_t *codes, uint32_t lane, uint32_t (&w)[12], uint32_t (&single)[2]) {
    uint32_t nibbles = 0;
    if constexpr (kRadix.words % 2) {
      const uint32_t half = reinterpret_cast<const uint16_t *>(codes + kWords * 128)[lane];
      nibbles = permute(half & 0x0f0fu, half >> 4 & 0x0f0fu, 0x5410u);
    }
    if constexpr (L == 3) {
      single[0] = nibbles & 0x03030303u, single[1] = nibbles >> 2 & 0x03030303u;
    } else if constexpr (L == 6) {
      single[0] = w[10] & 0x07070707u, single[1] = w[10] >> 4 & 0x07070707u;
    } else {
#pragma unroll
      for (int i = 0; i < 7; i++) w[9] += (w[i] & 0x01010101u) << (i + 1);
      single[0] = (w[7] & 0x01010101u) | (w[8] & 0x01010101u) << 1 | (nibbles & 0x01010101u) << 2;
      single[1] = nibbles >> 1 & 0x07070707u;
    }
  }
  template <class Use>
  __device__ static __forceinline__ void for_half(const uint8_t *codes, uint32_t lane, LevelTable table, Use &use) {
    constexpr DigitShape kShape = kRadix;
    uint32_t w[12] = {}, r[8][4], x[N];
#pragma unroll
    for (int k = 0; 4 * k < kWords; k++) {
      uint32_t four[4] = {};
      load_group(codes, lane, k, four);
#pragma unroll
      for (int q = 0; q < 4; q++) w[4 * k + q] = four[q];
    }
    uint32_t single[2];
    half_singles(codes, lane, w, single);
    r[7][2] = single[0], r[7][3] = single[1];
#pragma unroll
    for (int i = 0; i < int(kShape.numbers()); i++) {
      if (i < 4 * kGroups)
        split<kQuotients>(w[i], x);
      else
        split<false>(w[i], x);
#pragma unroll
      for (int d = 0; d < N; d++) r[kShape.digit_register(i, d) / 4][kShape.digit_register(i, d) % 4] = x[d];
    }
#pragma unroll
    for (int y = 0; y < 8 && kTable; y++) look_up(table, r[y][0], r[y][1]), look_up(table, r[y][2], r[y][3]);
    hand(0, 0, r, use), hand(1, 4, r, use);
  }
  // Those of a loose shape.
  template <int kFirst, class Use>
  __device__ static __forceinline__ void for_loose(const uint8_t *codes, uint32_t lane, LevelTable table, Use &use) {
    uint32_t r[16][4];
    int done = 0;  // pairs of units
    const auto hand_to = [&](int y) {
#pragma unroll
      for (int p = 0; p < 4; p++)
        if (p >= done && 4 * p + 4 <= y) hand(kFirst + p, 4 * p, r, use), done = p + 1;
    };
#pragma unroll
    for (int k = 0; k < kGroups; k++) {
      uint32_t w[4], x[N];
      load_group(codes, lane, k, w);
#pragma unroll
      for (int q = 0; q < 4; q++) {
        split<kQuotients>(w[q], x);
#pragma unroll
        for (int d = 0; d < N; d++) r[k * N + d][q] = x[d];
      }
#pragma unroll
      for (int y = k * N; y < k * N + N && kTable; y++) look_up(table, r[y][0], r[y][1]), look_up(table, r[y][2], r[y][3]);
      hand_to(k * N + N);
    }
    constexpr int kFour = kWords / 4 * 4, kStep = L == 3 ? 4 : 2;  // kStep: y that come at once
    uint32_t w[16];
#pragma unroll
    for (int i = 8; i < kFour + 4; i += 4) {
      uint32_t four[4] = {};
      load_group(codes, lane, i / 4, four);
#pragma unroll
      for (int q = 0; q < 4; q++) w[i - 8 + q] = four[q];
    }
#pragma unroll
    for (int y = kGroups * N; y < 16; y += kStep) {
      if constexpr (L == 3) {
#pragma unroll
        for (int q = 0; q < 4; q++)
#pragma unroll
          for (int i = 0; i < 4 && y + i < 16; i++) r[y + i][q] = take_crumb(y + i < 14 ? w[q] : w[4 + q / 2] >> 4 * (q & 1), crumb(y + i));
      } else {
        const int from = (y - kGroups * N) / 2 * 3;
        const uint32_t unit[3] = {w[from], w[from + 1], w[from + 2]};
        uint32_t levels[8];
        Nibbles<3>::look_up(unit, table, levels);
#pragma unroll
        for (int i = 0; i < 8; i++) r[y + i % 2][i / 2] = levels[i];
      }
      hand_to(y + kStep < 16 ? y + kStep : 16);
    }
  }
  __device__ static __forceinline__ uint32_t take_crumb(uint32_t w, int at) { return kQuotients ? w & 0x03030303u << at : w >> at & 0x03030303u; }
  // Those of others.
  template <int kFirst, class Use>
  __device__ static __forceinline__ void for_part(const uint8_t *codes, uint32_t lane, LevelTable table, Use &use) {
    uint32_t r[16][4], last = 0, single[4] = {};
#pragma unroll
    for (int k = 0; k <= kGroups; k++) {
      uint32_t w[4] = {};
      if (4 * k < kWords) load_group(codes, lane, k, w);
      if (L == 5 && k < kGroups) {
#pragma unroll
        for (int q = 0; q < 4; q++)
          if (4 * k + q < kWords) carry(w[q], 4 * k + q, last, single);
        if (k == kGroups - 1) w[3] = last;
      }
#pragma unroll
      for (int q = 0; q < 4; q++) {
        if (k == kGroups) {
          r[15][q] = L == 5 ? single[q] : L == 3 ? w[0] >> 2 * q & 0x03030303u : w[q / 2] >> 4 * (q & 1) & 0x07070707u;
        } else {
          uint32_t x[N];
          split<kQuotients>(w[q], x);
#pragma unroll
          for (int d = 0; d < N; d++) r[(k * N + d) % 16][q] = x[d];
        }
      }
      const int from = k * N, to = k == kGroups ? 16 : from + N;  // y that are there now
#pragma unroll
      for (int y = from; y < to && kTable; y++) look_up(table, r[y][0], r[y][1]), look_up(table, r[y][2], r[y][3]);
#pragma unroll
      for (int p = 0; p < 4; p++)
        if (4 * p + 4 > from && 4 * p + 4 <= to) hand(kFirst + p, 4 * p, r, use);
    }
  }
};

// ---- matrix instructions

// c += A * B: A of keys or values, signed or not, B of signed digits of a query or unsigned ones of probabilities.
#define KVQ_MULTIPLY(NAME, TYPES)                                                                                                    \
  __device__ __forceinline__ void NAME(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) { \
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32." TYPES ".s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"        \
                 : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])                                                                    \
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));                                                            \
  }
KVQ_MULTIPLY(multiply_s8_s8, "s8.s8")
KVQ_MULTIPLY(multiply_u8_s8, "u8.s8")
KVQ_MULTIPLY(multiply_s8_u8, "s8.u8")
KVQ_MULTIPLY(multiply_u8_u8, "u8.u8")
#undef KVQ_MULTIPLY

template <bool kUnsigned>
__device__ __forceinline__ void multiply_query(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  if constexpr (kUnsigned)
    multiply_u8_s8(c, a0, a1, a2, a3, b0, b1);
  else
    multiply_s8_s8(c, a0, a1, a2, a3, b0, b1);
}
template <bool kUnsigned>
__device__ __forceinline__ void multiply_weights(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  if constexpr (kUnsigned)
    multiply_u8_u8(c, a0, a1, a2, a3, b0, b1);
  else
    multiply_s8_u8(c, a0, a1, a2, a3, b0, b1);
}
// Half of it: one unit of keys.
#define KVQ_MULTIPLY(NAME, TYPES)                                                                                            \
  __device__ __forceinline__ void NAME(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t b) {                                  \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.s32." TYPES ".s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"          \
                 : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])                                                            \
                 : "r"(a0), "r"(a1), "r"(b));                                                                                \
  }
KVQ_MULTIPLY(multiply_unit, "u8.s8")
KVQ_MULTIPLY(multiply_signed_unit, "s8.s8")
#undef KVQ_MULTIPLY

// The same of fp16 numbers with sums in fp32; c: four of them.
__device__ __forceinline__ void multiply_halves(float *c, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// A thread's part of an 8 x 8 matrix of 16-bit numbers of a warp, row lane / 4, columns lane % 4 * 2 and the next, of its transpose.
__device__ __forceinline__ uint32_t transposed(uint32_t two) {
  uint32_t out;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(two));
  return out;
}

// ---- a ring of pages in shared memory

__device__ __forceinline__ uint32_t shared_address(const void *p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

#if __CUDA_ARCH__ >= 900 || !defined(__CUDA_ARCH__)
__device__ __forceinline__ void open_barrier(uint32_t barrier) { asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier)); }
// When nobody comes to it any more: its memory is memory again, which compute-sanitizer wants to know.
__device__ __forceinline__ void close_barrier(uint32_t barrier) { asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(barrier) : "memory"); }
__device__ __forceinline__ void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// Plain stores to the ring come before copies to it.
__device__ __forceinline__ void open_ring() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void fetch_page(uint32_t to, const uint8_t *from, uint32_t bytes, uint32_t barrier, uint32_t lane) {
  if (lane != 0) return;
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void await_page(uint32_t barrier, uint32_t phase) {
  uint32_t done = 0;
  while (!done)
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(barrier), "r"(phase)
                 : "memory");
}
#else
// Before sm_90 the warp copies a page itself.
__device__ __forceinline__ void open_barrier(uint32_t) {}
__device__ __forceinline__ void close_barrier(uint32_t) {}
__device__ __forceinline__ void publish_barriers() {}
__device__ __forceinline__ void open_ring() {}
__device__ __forceinline__ void fetch_page(uint32_t to, const uint8_t *from, uint32_t bytes, uint32_t, uint32_t lane) {
  for (uint32_t i = lane * 16; i < bytes; i += 512)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + i), "l"(from + i) : "memory");
  asm volatile("cp.async.commit_group;" ::: "memory");
}
__device__ __forceinline__ void await_page(uint32_t, uint32_t) {
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncwarp();
}
#endif

}  // namespace kvq::cuda
