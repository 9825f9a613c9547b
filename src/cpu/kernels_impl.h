// Source of the kernels: kernels_NAME.cpp includes it with KVQ_KERNELS set to the name of its table.  Everything is in an anonymous
// namespace and nothing of the standard library's templates is used (kernels.h says why).
#include "cpu/kernels.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // g++ 12 means its own AVX-512 header (bug 105593)
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

namespace kvq::cpu {
namespace {

#include "cpu/simd.h"
#include "cpu/unpack.h"

// ---------------------------------------------------------------------------------------------------- dot products

// The lines of a dot product, a copy in registers; where there are none, what it reads anyway.
KVQ_INLINE Prefetch lines_of(const Dot &dot) {
  if (dot.prefetch && dot.prefetch->at) return *dot.prefetch;
  return {(const uint8_t *)dot.w, (const uint8_t *)dot.w};
}

// The next lines, to the nearest cache or (floats, which are too many for it) the one behind it.  Going past their end harms nobody.
template <uint32_t LINES, int LEVEL = 3>
KVQ_INLINE void fetch(Prefetch *lines) {
  if (lines->at >= lines->end) return;
#pragma GCC unroll 8
  for (uint32_t i = 0; i < LINES; i++) __builtin_prefetch(lines->at + i * 64, 0, LEVEL);
  lines->at += LINES * 64;
}

// The first n of kLanes floats, and zeros.
KVQ_INLINE VFloat load_some(const float *x, uint32_t n) {
  if (n >= kLanes) return load<VFloat>(x);
  float some[kLanes] = {};
  for (uint32_t i = 0; i < n; i++) some[i] = x[i];
  return load<VFloat>(some);
}
KVQ_INLINE void store_some(float *x, uint32_t n, VFloat v) {
  if (n >= kLanes) return store(x, v);
  float some[kLanes];
  store(some, v);
  for (uint32_t i = 0; i < n; i++) x[i] = some[i];
}

// Results of one row and one vector of lanes: scaled, shifted, added, stored.
KVQ_INLINE void finish(const Dot &dot, uint32_t row, uint32_t lane, VFloat sum, VFloat scale) {
  float *out = dot.out + row * dot.out_stride + lane;
  const uint32_t left = dot.lanes - lane;
  VFloat base = dot.add ? load_some(out, left) : VFloat{};
  if (dot.offset) base = dot.lane_offset ? multiply_add(all(dot.offset[row]), load<VFloat>(dot.lane_offset + lane), base) : base + dot.offset[row];
  store_some(out, left, dot.lane_scale ? multiply_add(scale * sum, load<VFloat>(dot.lane_scale + lane), base) : multiply_add(scale, sum, base));
}

// One quad: ROWS rows x VECTORS vectors of lanes.
template <uint32_t ROWS, uint32_t VECTORS>
KVQ_INLINE void add_words(Sums (&sums)[ROWS][VECTORS], const Words (&words)[VECTORS], const int16_t *w) {
#pragma GCC unroll 4
  for (uint32_t r = 0; r < ROWS; r++) {
    const VInt first_pair = all_pairs(w + r * 4), second_pair = all_pairs(w + r * 4 + 2);
#pragma GCC unroll 4
    for (uint32_t v = 0; v < VECTORS; v++) add_products(&sums[r][v], words[v], first_pair, second_pair);
    keep_order(sums[r]);
  }
}
template <uint32_t ROWS, uint32_t VECTORS>
KVQ_INLINE void add_quad(Sums (&sums)[ROWS][VECTORS], const uint8_t *x, const int16_t *w) {
  Words words[VECTORS];
#pragma GCC unroll 4
  for (uint32_t v = 0; v < VECTORS; v++) words[v] = to_words(load<VByte>(x + v * KVQ_VECTOR_BYTES));
  add_words<ROWS, VECTORS>(sums, words, w);
}

// What a row's sum begins with; `span`: of weights.
KVQ_INLINE int32_t start_of(const Dot &dot, uint32_t row, uint32_t span) { return dot.bias ? -dot.bias * dot.sum[row * dot.sum_stride + span] : 0; }

template <uint32_t ROWS, uint32_t VECTORS>
KVQ_INLINE void start_block(Sums (&sums)[ROWS][VECTORS], const Dot &dot, uint32_t row, uint32_t first) {
#pragma GCC unroll 4
  for (uint32_t r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (uint32_t v = 0; v < VECTORS; v++)
      sums[r][v] = start_sums(start_of(dot, row + r, first / (kSumSpan / 4)));
}
template <uint32_t ROWS, uint32_t VECTORS>
KVQ_INLINE void finish_block(const Sums (&sums)[ROWS][VECTORS], const Dot &dot, uint32_t row, uint32_t lane) {
#pragma GCC unroll 4
  for (uint32_t r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (uint32_t v = 0; v < VECTORS; v++)
      if (v == 0 || lane + v * kLanes < dot.lanes) finish(dot, row + r, lane + v * kLanes, to_float(total(sums[r][v])), all(dot.scale[row + r]));
}

// Quads [first, end), kQuads at a time: the accumulators stay in registers, and scalar operations take few places of dot products.
template <uint32_t ROWS, uint32_t VECTORS>
KVQ_INLINE void dot_codes_block(const Dot &dot, uint32_t row, uint32_t lane, uint32_t first, uint32_t end) {
  const int16_t *w = (const int16_t *)dot.w + weight_place(dot.w_stride, row, first);
  const size_t stride = dot.stride;
  const uint8_t *x = (const uint8_t *)dot.x + first * stride + lane * 4;
  Sums sums[ROWS][VECTORS];
  start_block<ROWS, VECTORS>(sums, dot, row, first);
  Prefetch lines = lines_of(dot);
#pragma GCC unroll 1
  for (const int16_t *last = w + (end - first) / kQuads * kQuads * 16; w < last; x += kQuads * stride, w += kQuads * 16) {
    fetch<kQuads>(&lines);
#pragma GCC unroll 2
    for (uint32_t i = 0; i < kQuads; i++) add_quad<ROWS, VECTORS>(sums, x + i * stride, w + i * 16);
  }
  if ((end - first) % kQuads) add_quad<ROWS, VECTORS>(sums, x, w);
  if (dot.prefetch) *dot.prefetch = lines;
  finish_block<ROWS, VECTORS>(sums, dot, row, lane);
}

template <uint32_t ROWS>
KVQ_INLINE void dot_codes_rows(const Dot &dot, uint32_t row, uint32_t first, uint32_t end) {
  constexpr uint32_t kWide = kWordVectors;
  uint32_t lane = 0;
  for (; lane + (kWide - 1) * kLanes < dot.lanes; lane += kWide * kLanes) dot_codes_block<ROWS, kWide>(dot, row, lane, first, end);
  if (kWide > 2 && lane + kLanes < dot.lanes) dot_codes_block<ROWS, 2>(dot, row, lane, first, end), lane += 2 * kLanes;
  for (; lane < dot.lanes; lane += kLanes) dot_codes_block<ROWS, 1>(dot, row, lane, first, end);
}

// What the blocks of a dot product whose lanes are whole vectors have in common, ready for use: they have nothing to ask.
struct Batch {
  Prefetch lines;
  const float *lane_scale, *lane_offset;   // [lanes], or ones
  uint32_t scale_lanes, offset_lanes;      // masks of a lane's number: nothing of it counts for ones
  float *out;
  size_t out_stride;
  Kept kept;                               // of what `out` held
  float scale[kRows], offset[kRows];
  int32_t start[kRows];                    // of sums
};

struct alignas(64) Ones {
  float of[64];
};
constexpr Ones make_ones() {
  Ones ones{};
  for (float &x : ones.of) x = 1.0f;
  return ones;
}

KVQ_INLINE Batch batch_of(const Dot &dot, uint32_t span) {
  static constexpr Ones kOnes = make_ones();
  Batch batch;
  batch.lines = lines_of(dot);
  batch.lane_scale = dot.lane_scale ? dot.lane_scale : kOnes.of;
  batch.lane_offset = dot.lane_offset ? dot.lane_offset : kOnes.of;
  batch.scale_lanes = dot.lane_scale ? ~0u : 0u;
  batch.offset_lanes = dot.lane_offset ? ~0u : 0u;
  batch.out = dot.out;
  batch.out_stride = dot.out_stride;
  batch.kept = kept_if(dot.add);
  for (uint32_t r = 0; r < dot.rows; r++) {
    batch.scale[r] = dot.scale[r];
    batch.offset[r] = dot.offset ? dot.offset[r] : 0.0f;
    batch.start[r] = start_of(dot, r, span);
  }
  for (uint32_t r = dot.rows; r % 4; r++) batch.scale[r] = batch.offset[r] = 0.0f, batch.start[r] = 0;  // computed along with three, and not stored
  return batch;
}

// Results of `rows` rows from `row` on.  LANES: lanes have factors of their own.
template <bool LANES, uint32_t ROWS, uint32_t N>
KVQ_INLINE void store_totals(const VInt (&totals)[ROWS][N], const Batch &batch, uint32_t row, uint32_t rows, uint32_t lane) {
  const float *lane_scale = batch.lane_scale + (lane & batch.scale_lanes), *lane_offset = batch.lane_offset + (lane & batch.offset_lanes);
  const size_t stride = batch.out_stride;  // copies: stores could be to a batch
  const Kept kept = batch.kept;
  float *out = batch.out + row * stride + lane;
#pragma GCC unroll 4
  for (uint32_t r = 0; r < ROWS; r++, out += stride) {
    if (r == 3 && rows < 4) break;
    const VFloat scale = all(batch.scale[row + r]), offset = all(batch.offset[row + r]);
#pragma GCC unroll 4
    for (uint32_t i = 0; i < N; i++) {
      const VFloat sum = to_float(totals[r][i]), base = load_kept(out + i * kLanes, kept);
      store(out + i * kLanes, LANES ? multiply_add(scale * sum, load<VFloat>(lane_scale + i * kLanes),
                                                   multiply_add(offset, load<VFloat>(lane_offset + i * kLanes), base))
                                    : multiply_add(scale, sum, base + offset));
    }
  }
}
template <uint32_t ROWS, uint32_t N>
KVQ_INLINE void finish_totals(const VInt (&totals)[ROWS][N], const Batch &batch, uint32_t row, uint32_t rows, uint32_t lane) {
  batch.scale_lanes | batch.offset_lanes ? store_totals<true>(totals, batch, row, rows, lane) : store_totals<false>(totals, batch, row, rows, lane);
}

#include "cpu/tiles.h"

// One span of at most kSumSpan weights, for all rows.
void dot_vectors(const Dot &dot, uint32_t first, uint32_t end) {
  uint32_t row = 0;
  for (; row + 4 <= dot.rows; row += 4) dot_codes_rows<4>(dot, row, first, end);
  switch (dot.rows - row) {
    case 3:
      return dot_codes_rows<3>(dot, row, first, end);
    case 2:
      return dot_codes_rows<2>(dot, row, first, end);
    case 1:
      return dot_codes_rows<1>(dot, row, first, end);
  }
}

void dot_codes_span(const Dot &dot, uint32_t first, uint32_t end) {
#ifdef KVQ_TILES
  const uint32_t lanes = dot.lanes / kTileLanes * kTileLanes;
  if (dot.rows < kTileRows || lanes == 0) return dot_vectors(dot, first, end);
  dot_tiles(dot, first, end, lanes);
  if (lanes == dot.lanes) return;
  Dot rest = dot;
  rest.x = (const uint8_t *)dot.x + lanes * 4, rest.out += lanes, rest.lanes -= lanes;
  if (dot.lane_scale) rest.lane_scale += lanes;
  if (dot.lane_offset) rest.lane_offset += lanes;
  dot_vectors(rest, first, end);
#else
  dot_vectors(dot, first, end);
#endif
}

void dot_codes(const Dot &dot) {
  constexpr uint32_t kSpan = kSumSpan / 4;
  if (dot.depth <= kSpan) return dot_codes_span(dot, 0, dot.depth);
  Dot rest = dot;
  for (uint32_t first = 0; first < dot.depth; first += kSpan) {
    dot_codes_span(rest, first, dot.depth - first < kSpan ? dot.depth : first + kSpan);
    rest.add = true;
    rest.offset = nullptr;
  }
}

#include "cpu/fused.h"

struct Halves {
  static constexpr uint32_t kBytes = 2;
  KVQ_INLINE VFloat get(const void *p) { return load_halves((const uint16_t *)p); }
};
struct Floats {
  static constexpr uint32_t kBytes = 4;
  KVQ_INLINE VFloat get(const void *p) { return load<VFloat>(p); }
};

template <class X, uint32_t ROWS, uint32_t VECTORS>
KVQ_INLINE void dot_block(const Dot &dot, uint32_t row, uint32_t lane) {
  const float *w = (const float *)dot.w + row * dot.w_stride;
  const uint8_t *x = (const uint8_t *)dot.x + lane * X::kBytes;
  VFloat sum[ROWS][VECTORS] = {};
  Prefetch lines = lines_of(dot);
#pragma GCC unroll 1
  for (uint32_t i = 0; i < dot.depth; i++, x += dot.stride) {
    fetch<2, 2>(&lines);
    VFloat value[VECTORS];
#pragma GCC unroll 4
    for (uint32_t v = 0; v < VECTORS; v++) value[v] = X::get(x + v * kLanes * X::kBytes);
#pragma GCC unroll 4
    for (uint32_t r = 0; r < ROWS; r++) {
      const VFloat weight = all(w[r * dot.w_stride + i]);
#pragma GCC unroll 4
      for (uint32_t v = 0; v < VECTORS; v++) sum[r][v] += weight * value[v];
    }
  }
  if (dot.prefetch) *dot.prefetch = lines;
#pragma GCC unroll 4
  for (uint32_t r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (uint32_t v = 0; v < VECTORS; v++)
      if (v == 0 || lane + v * kLanes < dot.lanes) finish(dot, row + r, lane + v * kLanes, sum[r][v], all(1.0f));
}

constexpr uint32_t kWide = KVQ_VECTOR_BYTES == 64 ? 4 : 2;  // vectors of lanes in a block of four rows: what the registers hold

template <class X, uint32_t ROWS>
KVQ_INLINE void dot_rows(const Dot &dot, uint32_t row) {
  uint32_t lane = 0;
  for (; lane + (kWide - 1) * kLanes < dot.lanes; lane += kWide * kLanes) dot_block<X, ROWS, kWide>(dot, row, lane);
  if (kWide > 2 && lane + kLanes < dot.lanes) dot_block<X, ROWS, 2>(dot, row, lane), lane += 2 * kLanes;
  for (; lane < dot.lanes; lane += kLanes) dot_block<X, ROWS, 1>(dot, row, lane);
}

template <class X>
void dot_values(const Dot &dot) {
  uint32_t row = 0;
  for (; row + 4 <= dot.rows; row += 4) dot_rows<X, 4>(dot, row);
  switch (dot.rows - row) {
    case 3:
      return dot_rows<X, 3>(dot, row);
    case 2:
      return dot_rows<X, 2>(dot, row);
    case 1:
      return dot_rows<X, 1>(dot, row);
  }
}

// ---------------------------------------------------------------------------------------------------- rows of floats

#include "cpu/weigh.h"

void enter_floats(const float *x, uint32_t n, float scale, float *out) {
  for (uint32_t i = 0; i < n; i += kLanes) {
    // Nearest even at 10 bits of fraction, or at steps of 2^-24 below 2^-14, whose sum with 1/2 has them as its last bit.
    const VFloat v = load_some(x + i, n - i), m = magnitude(v), a = m < 65504.0f ? m : all(65504.0f);
    const VInt bits = (VInt)a, normal = (bits + 0xfff + (bits >> 13 & 1)) & ~0x1fff;
    const VFloat rounded = a < 0x1p-14f ? (a + 0.5f) - 0.5f : (VFloat)normal;
    store_some(out + i, n - i, (v < 0.0f ? -rounded : rounded) * scale);
  }
}

bool all_finite(const float *x, uint32_t n) {
  int32_t most = 0;
  for (uint32_t i = 0; i < n; i++) {
    int32_t bits;
    __builtin_memcpy(&bits, x + i, 4);
    bits &= 0x7fffffff;
    most = most > bits ? most : bits;
  }
  return most < 0x7f800000;
}

// Butterflies of one vector: distances 1, 2, ... between its lanes.
template <uint32_t D>
KVQ_INLINE VFloat butterfly(VFloat v) {
  if constexpr (D < kLanes) {
    VFloat sign;
    for (uint32_t i = 0; i < kLanes; i++) sign[i] = i & D ? -1.0f : 1.0f;
    return butterfly<2 * D>(v * sign + swap_lanes<D>(v));
  }
  return v;
}

// Butterflies between vectors `distance` apart.
KVQ_INLINE void butterflies(float *x, uint32_t n, uint32_t distance) {
  for (uint32_t base = 0; base < n; base += 2 * distance)
    for (uint32_t i = base; i < base + distance; i += kLanes) {
      const VFloat a = load<VFloat>(x + i), b = load<VFloat>(x + i + distance);
      store(x + i, a + b);
      store(x + i + distance, a - b);
    }
}

void hadamard(float *x, uint32_t n, float scale) {
  if (n >= kLanes) {
    for (uint32_t i = 0; i < n; i += kLanes) store(x + i, butterfly<1>(load<VFloat>(x + i)) * scale);
    for (uint32_t distance = kLanes; distance < n; distance *= 2) butterflies(x, n, distance);
    return;
  }
  for (uint32_t i = 0; i < n; i++) x[i] *= scale;
  for (uint32_t distance = 1; distance < n; distance *= 2)
    for (uint32_t i = 0; i < n; i++) {
      const float a = x[i], b = x[i ^ distance];
      if (i & distance) continue;
      x[i] = a + b;
      x[i ^ distance] = a - b;
    }
}

float halves_to_floats(const uint16_t *x, uint32_t n, float scale, float *out) {
  VFloat most = load_halves(x) * scale;
  for (uint32_t i = 0; i < n; i += kLanes) {
    const VFloat v = load_halves(x + i) * scale;
    store(out + i, v);
    most = greater(most, v);
  }
  return max_lanes(most);
}

float maximum(const float *x, uint32_t n) {
  VFloat most = load<VFloat>(x);
  for (uint32_t i = kLanes; i < n; i += kLanes) most = greater(most, load<VFloat>(x + i));
  return max_lanes(most);
}

void survey(const float *x, size_t stride, uint32_t rows, uint32_t n, float *most, float *sum, float *squares) {
  for (uint32_t row = 0; row < rows; row += 4) {
    VFloat first[4], second[4], top[4];
    for (uint32_t r = 0; r < 4; r++) {
      const float *at = x + (row + r < rows ? row + r : row) * stride;
      VFloat total = {}, square = {}, largest = load<VFloat>(at);
      for (uint32_t i = 0; i < n; i += kLanes) {
        const VFloat v = load<VFloat>(at + i);
        total += v;
        square += v * v;
        largest = greater(largest, v);
      }
      first[r] = total, second[r] = square, top[r] = largest;
    }
    store_four(most + row, max_four(top));
    store_four(sum + row, sum_four(first));
    store_four(squares + row, sum_four(second));
  }
}

void add_scaled(const float *x, uint32_t n, float factor, float *out) {
  for (uint32_t i = 0; i < n; i += kLanes) store_some(out + i, n - i, load_some(out + i, n - i) + load_some(x + i, n - i) * factor);
}

void add_squares(const float *x, uint32_t n, const float *factor, uint32_t rows, bool add, float *out, size_t stride) {
  for (uint32_t i = 0; i < n; i += kLanes) {
    const VFloat v = load<VFloat>(x + i), square = v * v;
    for (uint32_t r = 0; r < rows; r++) {
      float *to = out + r * stride + i;
      store(to, add ? load<VFloat>(to) + square * factor[r] : square * factor[r]);
    }
  }
}

void shares(const float *scale, const float *zero, float usual, float middle, const float *factor, uint32_t n, float *out) {
  for (uint32_t i = 0; i < n; i += kLanes) {
    const VFloat s = load<VFloat>(scale + i), v = zero ? load<VFloat>(zero + i) + s * middle : VFloat{};
    const VFloat square = s * s * usual + v * v;
    store(out + i, factor ? square * load<VFloat>(factor + i) : square);
  }
}

float dot_product(const float *x, const float *y, uint32_t n) {
  VFloat total = {};
  for (uint32_t i = 0; i < n; i += kLanes) total += load<VFloat>(x + i) * load<VFloat>(y + i);
  return sum_lanes(total);
}

// tanh(y) = 1 - 2 / (e^(2y) + 1); |y| beyond 40 is 1 to the last bit.
void softcap(float *x, uint32_t n, float cap) {
  constexpr float kLog2e = 1.44269504f;
  for (uint32_t i = 0; i < n; i += kLanes) {
    VFloat y = load<VFloat>(x + i) * (2.0f * kLog2e / cap);
    y = y < 100.0f ? y : all(100.0f);
    store(x + i, (1.0f - 2.0f / (exp2_lanes(y) + 1.0f)) * (kLog2e * cap));
  }
}

void expand(const uint8_t *words, uint32_t byte, uint32_t n, const float *scale, const float *zero, uint32_t step, float *out) {
  const VFloat one_scale = all(scale[0]), one_zero = all(zero[0]);
  for (uint32_t i = 0; i < n; i += kLanes) {
    const VFloat code = to_float(load<VInt>(words + i * 4) >> int(8 * byte) & 0xff);
    const uint32_t left = n - i;
    const VFloat s = step ? load_some(scale + i, left) : one_scale, z = step ? load_some(zero + i, left) : one_zero;
    store_some(out + i, left, z + s * code);
  }
}

// Quarter turns are taken off first; sine and cosine of the rest by their Taylor polynomials, 1e-7 on [-pi/4, pi/4].
KVQ_INLINE void polar_lanes(VFloat *radius, VFloat *angle) {
  const VFloat shifted = *angle * 0.636619772f + 12582912.0f, quarters = shifted - 12582912.0f;
  const VFloat r = (*angle - quarters * 0x1.92p+0f) - quarters * 0x1.fb5444p-12f, t = r * r;
  VFloat sine = all(2.7557319e-6f), cosine = all(2.4801587e-5f);
  sine = sine * t - 1.9841270e-4f;
  sine = sine * t + 8.3333333e-3f;
  sine = sine * t - 1.6666667e-1f;
  sine = (sine * t + 1.0f) * r;
  cosine = cosine * t - 1.3888889e-3f;
  cosine = cosine * t + 4.1666667e-2f;
  cosine = cosine * t - 0.5f;
  cosine = cosine * t + 1.0f;
  const VInt quarter = (VInt)shifted, odd = -(quarter & 1);
  const VInt x = ((VInt)cosine & ~odd) | ((VInt)sine & odd), y = ((VInt)sine & ~odd) | ((VInt)cosine & odd);
  *angle = *radius * (VFloat)(y ^ ((quarter & 2) << 30));
  *radius = *radius * (VFloat)(x ^ (((quarter + 1) & 2) << 30));
}

void polar(float *radius, float *angle, uint32_t n) {
  for (uint32_t i = 0; i < n; i += kLanes) {
    VFloat r = load_some(radius + i, n - i), a = load_some(angle + i, n - i);
    polar_lanes(&r, &a);
    store_some(radius + i, n - i, r);
    store_some(angle + i, n - i, a);
  }
}

constexpr Kernels kTable = {
    .name = KVQ_KERNELS_NAME,
#ifdef KVQ_TILES
    .begin = begin_tiles,
    .end = end_tiles,
#else
    .begin = nullptr,
    .end = nullptr,
#endif
    .unpack = unpack,
    .dot_codes = dot_codes,
#ifdef KVQ_FUSED
    .dot_planes = dot_planes,
#else
    .dot_planes = nullptr,
#endif
    .mapped = kTableEntries,
#ifdef KVQ_TILES
    .planes_rows = 4,
    .digits_rows = 4,
    .near_rows = kTileRows - 1,
#else
    .planes_rows = 8,
    .digits_rows = KVQ_VECTOR_BYTES == 64 ? 4 : 0,
    .near_rows = KVQ_VECTOR_BYTES == 64 ? 4 : 0,
#endif
    .dot_halves = dot_values<Halves>,
    .dot_floats = dot_values<Floats>,
    .quantize = quantize,
    .halves_to_floats = halves_to_floats,
    .maximum = maximum,
    .survey = survey,
    .dot_product = dot_product,
    .shares = shares,
    .add_scaled = add_scaled,
    .add_squares = add_squares,
    .exponentials = exponentials,
    .softcap = softcap,
    .expand = expand,
    .polar = polar,
    .enter_floats = enter_floats,
    .all_finite = all_finite,
    .hadamard = hadamard,
};

}  // namespace
}  // namespace kvq::cpu
