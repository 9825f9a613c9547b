// Attention of one block of query rows over the pages of one sequence and KV head.
//
// A row is one query token and query head; up to kRows rows share every decoded tile.  Scales never reach the inner loops: queries
// and probabilities carry them (layout.h, kernels.h), rotated formats see a rotated query and collect their output in the rotated
// domain, and the softmax works in base 2 with a reference that moves only when a logit passes it by kRaise.
// Every row's arithmetic is the same whatever the other rows, the other sequences and the number of threads are.
//
// Weights of 16 bits are enough unless much of a row's output cancels.  So every row keeps book of what rounding may have done to it
// (doubt.h), and the few that may have left section 9's tolerance are computed again with weights of 31 bits.
#pragma once
#include <algorithm>
#include <cstdint>

#include "cpu/doubt.h"
#include "cpu/kernels.h"
#include "cpu/layout.h"
#include "cpu/raw_page.h"

namespace kvq::cpu {

inline constexpr uint32_t kDomains = 4;   // packed formats of a sequence that are open at once
inline constexpr uint32_t kLogitStride = kTileTokens + 16;
inline constexpr uint32_t kRegions = 9;   // widths 0..8
inline constexpr float kRaise = 4.0f;     // in powers of two: exp2 and sums have room for it

// Vectors reach to the next multiple of 16.
inline uint32_t round16(uint32_t n) { return (n + 15) / 16 * 16; }

// Largest dimensions that a workspace serves, and the strides of its arrays.
struct Dims {
  uint32_t k = 0, v = 0;
  uint32_t query() const { return round16(k) + 16; }
  uint32_t output() const { return round16(v) + 16; }
  uint32_t weights() const { return round16(2 * k) + 320; }  // quads of a decoded tile: wide books, rests, boosted channels
  uint32_t segments() const { return most() / 16 + 9; }
  uint32_t most() const { return k > v ? k : v; }
};

// Four rows at once: arrays by row have room for them.
typedef float Four __attribute__((vector_size(16)));
typedef double FourDoubles __attribute__((vector_size(32)));
inline Four four_of(const float *x) {
  Four v;
  __builtin_memcpy(&v, x, sizeof v);
  return v;
}
inline void set_four(float *x, Four v) { __builtin_memcpy(x, &v, sizeof v); }
inline void add_four(double *x, Four v) {
  FourDoubles sum;
  __builtin_memcpy(&sum, x, sizeof sum);
  sum += __builtin_convertvector(v, FourDoubles);
  __builtin_memcpy(x, &sum, sizeof sum);
}
inline Four greater_of(Four a, Four b) { return a > b ? a : b; }

// Quantized weights of all rows for one segment.
struct RowWeights {
  static constexpr uint32_t kSpans = 4;  // of at most 1024 slots
  float scale[kRows], error[kRows], power[kRows], total[kRows];  // as in Quantize
  float offset[kRows];  // what multiplies zeros
  float doubt[kRows];   // of keys: d^2 of a token per square of its scale (doubt.h)
  int32_t sum[kRows][kSpans], fine_sum[4][kSpans];
};

// What one packed format needs besides its pages: the query in its terms and the output in its terms.
// A dot product with codes of a segment or region of a tensor, but for the place of the tile.
struct Product {
  Dot dot;
  size_t offset;  // planes: of the first code in the tile's codes
};

struct Domain {
  const CpuPageFormat *format;
  float *query;        // [kRows][dims.query()] by slot
  float *lined;        // [kRows][dims.weights()] by place in a decoded tile (columns)
  int16_t *w, *fine;   // weights of all rows (weight_place), and what rounding left of one row's
  RowWeights *segment; // [dims.segments()]
  Product *keys, *values;  // of segments; keys by column: of regions
  float constant[kRows];  // q . mu
  float *out;          // [kRows][dims.output()] by slot
};

// Scratch of one thread.
struct Slice {
  float *query;          // [kRows][dims.query()] by channel, times the softmax scale
  float *logit;          // [kRows][kLogitStride]: logits, then probabilities
  float *doubtful;       // [kRows][kLogitStride]: d^2 of the logits (doubt.h), less a factor; the same for all rows if doubt_stride is 0
  float *out;            // [kRows][dims.output()] by channel
  float *scale, *zero, *middle;  // [max(kTileTokens, dims) + 16]: scalars of lanes; zero + scale * middle code
  float *line;           // [dims.weights()]
  float *signs;          // [2][dims.most()] of a rotation
  uint32_t *map;         // [dims.most()] slot -> channel
  float *part;           // [kRows][256 + 16]
  int16_t *w, *fine;     // as in Domain
  RowWeights *weights;   // [kRegions]
  uint8_t *codes;        // decoded tile
  float *values;         // the same as floats
  float reference[kRows], denominator[kRows];
  float largest[kRows], peak[kRows];  // of the tile: probability, d^2
  const float *doubt_factor;          // [kRows]
  float group_doubt[kRows];
  uint32_t doubt_stride;
  float most[kRows + 3];              // the largest logits of the tile; four at a time
  bool deferred;                      // the logits of the tile are still to become probabilities
  Doubts doubt;
  Domain domain[kDomains];
  bool has_doubt;            // in the current tile; otherwise `doubtful` is not set
  Prefetch prefetch;         // what comes after the current tile
  uint32_t domains, oldest;  // open ones; the next to close if all are
};

// Lay a slice out at `base` (which may be null, to learn its size).
size_t arrange_slice(const Dims &dims, char *base, Slice *slice);

// A tile of a page as the current rows see it.
struct Tile {
  const uint8_t *k, *v, *shared;    // codes or fp16 values, shared planes
  const uint8_t *k_params, *v_params;
  uint32_t start;                   // page row of its first token
  uint32_t first, end;              // tokens that some row sees; `from` is `first` rounded down to a multiple of 16
  uint32_t from;
  const uint32_t *low_rows, *high_rows;  // page rows that a row sees; null: all see [first, end)
  uint32_t low(uint32_t row) const { return low_rows ? clip(low_rows[row]) : first; }
  uint32_t high(uint32_t row) const { return high_rows ? clip(high_rows[row]) : end; }
  uint32_t tokens;                  // of the tile
  uint32_t clip(uint32_t row) const { return std::clamp(row, start, start + tokens) - start; }
};

// The rows that run together and everything they need.
struct Run {
  const Kernels &kernels;
  const Tables &tables;
  const Dims &dims;
  Slice &slice;
  uint32_t rows, head;
  float unit;    // of the logits, in natural ones
  bool precise;  // one row, with weights of 31 bits
};

// d^2 of one token of a region per square of its scale, or of its group (doubt.h), for weights of `scale`.
inline float doubt_of(const Run &run, float scale, const Region &region, uint32_t count) {
  const float step = scale * run.unit;
  return step * step * region.spread.even * float(count) / 12.0f;
}

// logit[row][token] of a tile.
void key_logits(const Run &run, Domain &domain, const Tile &tile);
// domain.out += probabilities . values.
void add_values(const Run &run, Domain &domain, const Tile &tile);
// The same with fp16 pages, whose domain is the channels.
void raw_logits(const Run &run, uint32_t dim, uint32_t tokens, const float *query, const Tile &tile);
void add_raw_values(const Run &run, uint32_t dim, float *out, const Tile &tile);

// The domain of a format, opened if necessary.
Domain &open_domain(const Run &run, const CpuPageFormat &format);
// Add what a domain collected to slice.out, and what all did.
void close_domains(const Run &run);

// One block of rows: queries [row / ratio] of a sequence.
struct RowBlock {
  const AttendCall &call;
  const AttendSequence &sequence;
  uint32_t head, first, count;  // KV head; rows of the sequence, query-major: row = query * ratio + head in the group
};
void attend_rows(const Kernels &kernels, const Tables &tables, const Dims &dims, const RowBlock &block, Slice &slice);

// The same in parts (parts.h): collect over part `number` of the sequence's pages; finish what the slice holds of all of them.
struct PartOf {
  uint32_t number, parts;
};
void attend_part(const Kernels &kernels, const Tables &tables, const Dims &dims, const RowBlock &block, PartOf part, Slice &slice);
void finish_rows(const Kernels &kernels, const Tables &tables, const Dims &dims, const RowBlock &block, Slice &slice);

}  // namespace kvq::cpu
