// The kernels for aarch64 processors with the dot product and fp16 instructions (cmake/kernels.cmake).
//
// The portable kernels, with the dot products of codes by UDOT and SDOT: a weight w = 256 * high + low has a signed high and an
// unsigned low byte, and a code x an unsigned one, so x * w = x * low + 256 * ((x - 128) * high + 128 * high).
// Per word of four codes and row: two instructions for 4 lanes, and one for the row.
#if defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>

#define KVQ_KERNELS_NAME "neon"
#include "cpu/kernels_impl.h"

namespace kvq::cpu {
namespace {

constexpr uint32_t kVectors = 2;  // of 4 lanes in a block

// Bytes of the weights of a word in the order of its codes, {0, 2, 1, 3}.
struct Weights {
  uint8x16_t low;
  int8x16_t high;
};
inline __attribute__((always_inline)) Weights load_weights(const int16_t *w) {
  const uint8x8_t four = vld1_u8(reinterpret_cast<const uint8_t *>(w));  // l0 h0 l1 h1 l2 h2 l3 h3
  const uint8x8_t order = vcreate_u8(0x0703050106020400);
  const uint8x8_t bytes = vtbl1_u8(four, order);  // l0 l2 l1 l3 h0 h2 h1 h3
  const uint32x4_t words = vreinterpretq_u32_u8(vcombine_u8(bytes, bytes));
  return {vreinterpretq_u8_u32(vdupq_laneq_u32(words, 0)), vreinterpretq_s8_u32(vdupq_laneq_u32(words, 1))};
}

// ROWS rows x kVectors vectors of lanes over quads [first, end).
template <uint32_t ROWS>
void codes_block(const Dot &dot, uint32_t row, uint32_t lane, uint32_t first, uint32_t end) {
  const int16_t *w = static_cast<const int16_t *>(dot.w) + weight_place(dot.w_stride, row, first);
  const uint8_t *x = static_cast<const uint8_t *>(dot.x) + first * dot.stride + lane * 4;
  const int8x16_t ones = vdupq_n_s8(1);
  uint32x4_t low[ROWS][kVectors];
  int32x4_t high[ROWS][kVectors], sum[ROWS];
  for (uint32_t r = 0; r < ROWS; r++) {
    sum[r] = vdupq_n_s32(0);
    for (uint32_t v = 0; v < kVectors; v++) low[r][v] = vdupq_n_u32(0), high[r][v] = vdupq_n_s32(0);
  }
  for (uint32_t q = first; q < end; q++, x += dot.stride, w += 16) {
    uint8x16_t codes[kVectors];
    int8x16_t centred[kVectors];
    for (uint32_t v = 0; v < kVectors; v++) {
      codes[v] = vld1q_u8(x + 16 * v);
      centred[v] = vreinterpretq_s8_u8(veorq_u8(codes[v], vdupq_n_u8(0x80)));
    }
    for (uint32_t r = 0; r < ROWS; r++) {
      const Weights weights = load_weights(w + r * 4);
      sum[r] = vdotq_s32(sum[r], weights.high, ones);
      for (uint32_t v = 0; v < kVectors; v++) {
        low[r][v] = vdotq_u32(low[r][v], codes[v], weights.low);
        high[r][v] = vdotq_s32(high[r][v], centred[v], weights.high);
      }
    }
  }
  for (uint32_t r = 0; r < ROWS; r++) {
    const int32_t bias = dot.bias ? dot.bias * dot.sum[(row + r) * dot.sum_stride + first / (kSumSpan / 4)] : 0;
    for (uint32_t v = 0; v < kVectors && lane + v * 4 < dot.lanes; v++) {
      const int32x4_t upper = vshlq_n_s32(vmlaq_n_s32(high[r][v], sum[r], 128), 8);
      const int32x4_t total = vsubq_s32(vaddq_s32(vreinterpretq_s32_u32(low[r][v]), upper), vdupq_n_s32(bias));
      finish(dot, row + r, lane + v * 4, to_float(VInt(total)), all(dot.scale[row + r]));
    }
  }
}

template <uint32_t ROWS>
void codes_rows(const Dot &dot, uint32_t row, uint32_t first, uint32_t end) {
  for (uint32_t lane = 0; lane < dot.lanes; lane += 4 * kVectors) codes_block<ROWS>(dot, row, lane, first, end);
}

// The lines that go beside the work are asked for at its end: these processors have prefetchers that follow rows.
void dot_codes_neon(const Dot &whole) {
  constexpr uint32_t kSpan = kSumSpan / 4;
  Dot dot = whole;
  for (uint32_t first = 0; first < dot.depth; first += kSpan) {
    const uint32_t end = dot.depth - first < kSpan ? dot.depth : first + kSpan;
    uint32_t row = 0;
    for (; row + 4 <= dot.rows; row += 4) codes_rows<4>(dot, row, first, end);
    for (; row < dot.rows; row++) codes_rows<1>(dot, row, first, end);
    dot.add = true;
    dot.offset = nullptr;
  }
  for (Prefetch *lines = dot.prefetch; lines && lines->at < lines->end; lines->at += 64) __builtin_prefetch(lines->at, 0, 2);
}

constexpr Kernels neon_table() {
  Kernels table = kTable;
  table.dot_codes = dot_codes_neon;
  return table;
}
constexpr Kernels kNeon = neon_table();

}  // namespace

const Kernels *const kernels_neon = &kNeon;
}  // namespace kvq::cpu
#else
#include "cpu/kernels.h"

namespace kvq::cpu {
const Kernels *const kernels_neon = nullptr;
}  // namespace kvq::cpu
#endif
