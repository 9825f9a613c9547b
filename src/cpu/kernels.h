// The hot loops of CPU attention, one table of functions per instruction set.
//
// kernels_impl.h holds their source; kernels_NAME.cpp compiles it with that instruction set's flags, and select_kernels() asks the
// processor.  Everything here is plain data, so that no inline function is shared between objects compiled with different flags.
#pragma once
#include <cstddef>
#include <cstdint>

namespace kvq::cpu {

inline constexpr uint32_t kTileTokens = 128;  // most tokens of a tile
inline constexpr uint32_t kRows = 16;         // query rows (query token x query head) that share one decoded tile
inline constexpr uint32_t kSlack = 512;       // bytes behind every scratch array that kernels may touch
inline constexpr uint32_t kNearBytes = 8192;
inline constexpr uint32_t kDepth = 16;        // quads that dot_codes may read at once: behind the last one they may hold anything
inline constexpr float kFineSteps = 32768.0f;  // half of them is a weight
inline constexpr uint32_t kSumSpan = 256;     // weights that one int32 accumulator may take: 255 * 32767 * 256 < 2^31

// How codes of `levels` levels lie in planes of 64 bytes; layout.h explains it.
enum SchemeId : uint8_t {
  kBits1,
  kBits2,
  kBits3,
  kBits4,
  kBits5,
  kBits6,
  kBits7,
  kBits8,
  kBase3,
  kBase5,
  kBase6,
  kSchemes
};

struct Scheme {
  uint32_t bits, digits, base;              // of a field; digits are 0..base-1
  uint32_t direct, spare, planes, fields;   // fields and spare bits of a plane; planes and fields of a unit
};
inline constexpr Scheme kSchemeTable[kSchemes] = {
    {1, 1, 2, 8, 0, 1, 8}, {2, 1, 4, 4, 0, 1, 4}, {3, 1, 8, 2, 2, 3, 8}, {4, 1, 16, 2, 0, 1, 2}, {5, 1, 32, 1, 3, 5, 8}, {6, 1, 64, 1, 2, 3, 4}, {7, 1, 128, 1, 1, 7, 8}, {8, 1, 256, 1, 0, 1, 1}, {8, 5, 3, 1, 0, 1, 1}, {7, 3, 5, 1, 1, 7, 8}, {8, 3, 6, 1, 0, 1, 1}};
// A field of fewer digits than its scheme's takes as many bits as they need.
inline constexpr uint8_t kShortBits[kSchemes][5] = {{}, {}, {}, {}, {}, {}, {}, {}, {0, 2, 4, 5, 7}, {0, 3, 5}, {0, 3, 6}};

// A run of 64-byte code vectors: `units` whole units in planes of their own, then single fields one after the other in the bits of
// planes that they share with other runs.
//
// The digits of a field come from vectors that are 2^spread apart: field f has them of vectors (f / n * digits + d) * n + f mod n, n = 2^spread.
struct Packing {
  SchemeId scheme;
  uint8_t tail_fields, short_fields, last_digits;  // fields behind the units, how many at their end have fewer digits, and which number
  uint8_t spread;
  uint16_t tail_bit;                 // of the shared planes, where they begin; bit b is bit b mod 8 of plane b / 8
  uint32_t units, vectors;
};
static inline uint32_t vector_of(uint32_t digits, uint32_t spread, uint32_t field, uint32_t digit) {
  return (((field >> spread) * digits + digit) << spread) + (field & ((1u << spread) - 1));
}

// Cache lines that are fetched beside other work: one with every step over codes, two with every step over floats.
struct Prefetch {
  const uint8_t *at, *end;
};

// Codes that a dot product takes from their planes, if a region is regular (layout.h): `across` vectors of lanes a quad.
struct Planes {
  const uint8_t *at, *shared;  // of the first quad; the shared ones
  const uint8_t *table;        // as for unpack()
  const Packing *packing;
  uint32_t across, vector;     // vectors of a quad; the one that the dot product's lanes begin with
};

// out[r][lane] (+)= lane_scale[lane] * scale[r] * sum_i w[r][i] * x[i][lane] + offset[r] * lane_offset[lane]
// Null pointers stand for 1; offset null for 0.  dot_codes: w is what quantize() made (every table its own way), x holds one byte per element in words of four (i = 4 * quad + k is byte
// {0, 2, 1, 3}[k]), minus `bias`; depth counts quads.  Keys: i is a slot and a lane a token; values: i a token, a lane a slot.
struct Dot {
  const void *x;
  size_t stride;           // bytes between quads (codes) or between i
  uint32_t depth, lanes, rows;
  const void *w;           // int16_t (codes) or float
  size_t w_stride;         // elements between rows (codes: of weight_place)
  const float *scale;      // [rows]
  const int32_t *sum;      // codes: [rows][sum_stride] sums of kSumSpan weights each
  size_t sum_stride;
  int32_t bias;
  const float *lane_scale, *lane_offset;  // [lanes]
  const float *offset;     // [rows]
  float *out;
  size_t out_stride;
  bool add;
  Prefetch *prefetch;      // or null
  Planes planes;           // dot_planes, instead of x and stride: lanes are a multiple of 64, depth is even or (digits) all of it
};

// Weights of rows lie in groups of four rows, [quad][row][4], so that a step of four rows reads one place.
static inline size_t weight_place(size_t stride, uint32_t row, uint32_t quad) {
  return row / 4 * 4 * stride + size_t(quad) * 16 + row % 4 * 4;
}

// x[row][i] * s[i] as 16-bit integers times one scale a row.
struct Quantize {
  float *x;
  const float *s;           // may be null
  size_t x_stride;
  uint32_t n, row, rows;    // row: number of the first one
  int16_t *w;               // weight_place of row 0; zeros up to a whole vector.  Rows of the last group of four change, too
  size_t w_stride;
  int16_t *fine;            // null, or (one row) the same of what rounding left, in steps of scale / kFineSteps; weight_place(0, 0, quad)
  int32_t *sum, *fine_sum;  // [rows][sum_stride], of kSumSpan weights each
  size_t sum_stride;
  // Null, or (n <= kSumSpan, no `fine`, no bound) where spans with a scale of their own end, multiples of 16.  All that is said of a span
  // lies span_stride elements (of four bytes) behind what is said of the one before.
  const uint32_t *ends;
  size_t span_stride;
  const float *bound;       // [rows] of |x * s|; null: not known
  const float *share, *doubt;  // null, or factors of the squares whose sum is `power`: [n], without it s^2; [rows][doubt_stride]
  size_t doubt_stride;
  const float *zero;        // null, or (no `fine`) [n]
  // Null, or logits x become 2^(x - reference) first, and `bound` is that of s.  n is a multiple of 16, s not null.
  const float *reference, *most;  // [rows]; the largest x
  float *exponentials, *largest;  // [rows], the first up to the next multiple of four: the sum of 2^(x - reference), the largest
  // Out, [rows] up to the next multiple of four: the sum of x * s - w * scale, of x^2 * share * doubt, of x * s, of x * zero.
  float *scale, *error, *power, *total, *zeros;
};

struct Kernels {
  const char *name;
  // Null, or what a thread calls before and after it runs other kernels for blocks of this many rows.
  void (*begin)(uint32_t rows);
  void (*end)();
  // Planes to codes, 64 bytes a vector; may write kSlack bytes more.  table: null, or what replaces each code, repeating up to 64
  // entries.  shared: the planes of single fields.
  void (*unpack)(const Packing &packing, const uint8_t *planes, const uint8_t *shared, const uint8_t *table, uint8_t *codes);
  void (*dot_codes)(const Dot &dot);
  // The same from planes that are not decoded to memory first; null: not offered.  Tables may have `mapped` entries.  It is faster than
  // unpack and dot_codes up to so many rows; where fields have several digits up to digits_rows, and if what they are decoded to takes
  // at most kNearBytes, which leaves room in the nearest cache, up to near_rows.  0: not offered.
  void (*dot_planes)(const Dot &dot);
  uint32_t mapped, planes_rows, digits_rows, near_rows;
  void (*dot_halves)(const Dot &dot);
  void (*dot_floats)(const Dot &dot);
  void (*quantize)(const Quantize &q);
  // n is rounded up to a multiple of 16 in all of these.
  // The largest one is returned.
  float (*halves_to_floats)(const uint16_t *x, uint32_t n, float scale, float *out);
  float (*maximum)(const float *x, uint32_t n);
  // Of n floats of every row: maximum, sum, sum of squares, [rows] up to the next multiple of four.
  void (*survey)(const float *x, size_t stride, uint32_t rows, uint32_t n, float *most, float *sum, float *squares);
  float (*dot_product)(const float *x, const float *y, uint32_t n);
  // out = (scale^2 * usual + (zero + scale * middle)^2) * factor; null pointers: without what they are in
  void (*shares)(const float *scale, const float *zero, float usual, float middle, const float *factor, uint32_t n, float *out);
  void (*add_scaled)(const float *x, uint32_t n, float factor, float *out);  // out += factor * x, exactly n of them
  // out[row] (+)= factor[row] * x^2
  void (*add_squares)(const float *x, uint32_t n, const float *factor, uint32_t rows, bool add, float *out, size_t stride);
  // Of every row: x = 2^(x - reference), 0 below 2^-126; the sum, and what became of the largest x.
  void (*exponentials)(float *x, size_t stride, uint32_t rows, uint32_t n, const float *reference, const float *most, float *sum,
                       float *largest);
  void (*softcap)(float *x, uint32_t n, float cap);              // x = log2(e) * cap * tanh(x / cap)
  // out[i] = zero[i * step] + scale[i * step] * (byte `byte` of word i), exactly n of them
  void (*expand)(const uint8_t *words, uint32_t byte, uint32_t n, const float *scale, const float *zero, uint32_t step, float *out);
  // (radius, angle) -> (radius * cos(angle), radius * sin(angle)), in place
  void (*polar)(float *radius, float *angle, uint32_t n);
  // Rule 1.4 of finite floats, times a scale; and whether they are finite.
  void (*enter_floats)(const float *x, uint32_t n, float scale, float *out);
  bool (*all_finite)(const float *x, uint32_t n);
  // The Walsh-Hadamard transform of n = 2^k values times a scale, in place.
  void (*hadamard)(float *x, uint32_t n, float scale);
};

extern const Kernels kernels_portable;
// Null where the build or its processor family lacks them.
extern const Kernels *const kernels_avx2, *const kernels_avxvnni, *const kernels_avx512, *const kernels_amx, *const kernels_neon;

// The tables that run here; null: one that does not.
struct UsableKernels {
  const Kernels *best_first[6];
};
UsableKernels usable_kernels();
// The table of this name (portable, avx2, avxvnni, avx512, amx, neon); null if it does not run here.  No name: that of the environment variable
// KVQ_CPU if it runs here, or else the best.
const Kernels *select_kernels(const char *name);

}  // namespace kvq::cpu
