// The loops over numbers that packing a prompt spends its time in, compiled once per instruction set.
//
// loops_impl.h holds their source, loops_NAME.cpp compiles it with that instruction set's flags (cmake/kernels.cmake), and
// select_loops() asks the processor.  Every operation is rounded as section 1 says, so every table gives the same bits.
// Everything here is plain data, so that no inline function is shared between objects compiled with different flags.
#pragma once
#include <cstddef>
#include <cstdint>

namespace kvq {

// Rows (tokens) that row codecs work on at once: y[slot][lane], a lane per token, so that every step of a row is the same plain fp32
// operation in every lane.
inline constexpr uint32_t kRowLanes = 16;
using RowLanes = float[kRowLanes];
using CodeLanes = uint8_t[kRowLanes];

// Thresholds that step 3 of rule 2.2 counts, and what the counts stand for.
struct BookView {
  uint32_t levels;
  const float *threshold;  // [levels - 1], for unit variance
  const int16_t *level;    // [levels]
};

// Exact sums over at most kSumTokens tokens, in units of 2^-24.
inline constexpr uint32_t kSumTokens = 64;
struct ChannelUnits {
  int64_t sum, abs;
  float min, max;
};

// Digits to a field, without a division: the number n that they are in a base becomes n + (n * factor + offset >> shift), in 16 bits.
struct DigitRule {
  uint8_t base, digits, shift;
  uint16_t factor, offset;
};

// What entered: whether all elements are finite (or the output is void), and the number of those beyond 65504.
struct Entered {
  bool finite;
  uint32_t saturated;
};

struct Loops {
  const char *name;

  // Rule 1.4 of n elements, aligned or not.
  Entered (*enter_f16)(const void *x, uint32_t n, uint16_t *out);
  Entered (*enter_f32)(const void *x, uint32_t n, uint16_t *out);
  Entered (*enter_bf16)(const void *x, uint32_t n, uint16_t *out);

  // out[column * out_stride + row] = in[row * in_stride + column], of halves with index[row] for the row of `in` if index is not null
  void (*transpose_halves)(const uint16_t *in, size_t in_stride, const uint32_t *index, uint32_t rows, uint32_t columns, uint16_t *out,
                           size_t out_stride);
  // out[row * out_stride + i] = in[row * in_stride + column[i]] for i < n; columns ascend and are below 32
  void (*pick_halves)(const uint16_t *in, size_t in_stride, uint32_t rows, const uint32_t *column, uint32_t n, uint16_t *out,
                      size_t out_stride);
  void (*transpose_bytes)(const uint8_t *in, size_t in_stride, uint32_t rows, uint32_t columns, uint8_t *out, size_t out_stride);

  // y[j][lane] = x[channel[j] * stride + lane] - mu[channel[j]] of finite fp16; mu may be null
  void (*load_lanes)(const uint16_t *x, size_t stride, const uint32_t *channel, uint32_t n, const uint16_t *mu, RowLanes *y);
  // y[j] = -y[j] where bit j mod 64 of word j / 64 is set
  void (*flip_lanes)(RowLanes *y, uint32_t n, const uint64_t *words);
  // Butterflies at distances 1, 2, ..., n / 2 (n a power of two), then the factor, unless n is 1.
  void (*butterfly_lanes)(RowLanes *y, uint32_t n, float factor);
  // tree() of y * y, and of y * level of the codes
  void (*square_lanes)(const RowLanes *y, uint32_t n, float *sum);
  void (*product_lanes)(const RowLanes *y, const CodeLanes *codes, const int16_t *level, uint32_t n, float *sum);
  // Codes of y under thresholds times sigma, and the sum of the squared levels.
  void (*book_lanes)(const BookView &book, const RowLanes *y, uint32_t n, const float *sigma, CodeLanes *codes, uint64_t *squares);
  void (*range_lanes)(const RowLanes *y, uint32_t n, float *mn, float *mx);
  // affine.h's affine_code in every lane
  void (*affine_lanes)(const RowLanes *y, uint32_t n, const float *zero, const float *step, const float *top, CodeLanes *codes);

  // The same by columns: values [rows][n] in fp16 and a rule per column.
  void (*range_columns)(const uint16_t *x, uint32_t rows, uint32_t n, float *mn, float *mx);
  void (*affine_columns)(const uint16_t *x, uint32_t rows, uint32_t n, const float *zero, const float *step, const float *top,
                         uint8_t *codes);

  // Section 2.4, over rows x[t * stride] of fp16: radii, then angles of pairs (u[i], v[i]) of channels, out[t][2 * pairs].
  void (*polar_columns)(const uint16_t *x, size_t stride, uint32_t rows, const uint32_t *u, const uint32_t *v, uint32_t pairs,
                        uint16_t *out);

  // Codes to words of four, whose number k is byte {0, 2, 1, 3}[k] (cpu/layout.h): of one token, line[quad * line_stride + 4 * token],
  // from codes[token * stride + slot]; or of one slot, line[4 * slot], from four rows of codes.
  void (*key_words)(const uint8_t *codes, size_t stride, uint32_t tokens, uint32_t quads, uint8_t *line, size_t line_stride);
  void (*value_words)(const uint8_t *codes, size_t stride, uint32_t slots, uint8_t *line);
  // Fields of 64 bytes: byte i of `digits` rows of 64, the first row the highest digit.
  void (*join_digits)(const DigitRule &rule, const uint8_t *line, uint8_t *fields);
  // Bits [from, from + n) of 64 bytes to bits [to, to + n) of 64 others.
  void (*put_bits)(const uint8_t *bytes, uint32_t from, uint32_t n, uint32_t to, uint8_t *out);

  // Over rows x[t * stride], t < rows <= kSumTokens: of pairs (u[i], v[i]) of channels sqrt(u*u + v*v), or u*u + v*v, each term rounded
  // down; channels, and of these the sums alone.
  void (*sum_norms)(const uint16_t *x, size_t stride, uint32_t rows, const uint32_t *u, const uint32_t *v, uint32_t pairs, uint64_t *out);
  void (*sum_squares)(const uint16_t *x, size_t stride, uint32_t rows, const uint32_t *u, const uint32_t *v, uint32_t pairs, uint64_t *out);
  void (*sum_channels)(const uint16_t *x, size_t stride, uint32_t rows, uint32_t n, ChannelUnits *out);
  void (*sum_values)(const uint16_t *x, size_t stride, uint32_t rows, uint32_t n, int64_t *out);
};

extern const Loops loops_portable;
// Null where the build or its processor family lacks them.
extern const Loops *const loops_avx2, *const loops_avx512;

// The best table for this processor, or the best below the level that the environment variable KVQ_CPU names.
const Loops &select_loops();

}  // namespace kvq
