// Books of 2^w levels in groups of channels, a scale each, in the fused kernels: keys with any widths (Block-GTQ), keys and values of
// two classes (channel-split), and rows of which keys and values have different books.
//
// Groups come in the order of their widths.  A unit that several of them share is stored at the width of the widest: it is decoded for
// each of them, with columns of B that are 0 where other groups lie.  Codes of 7 and 8 bits are bytes.
#pragma once
#include "cuda/fused.cuh"

namespace kvq::cuda {

// Fields of four bits of the units of a tile.
struct UnitWidths {
  uint64_t all;
  __device__ __forceinline__ void load(const TensorFormat &f) {
    all = 0;
    for (uint32_t u = 0; u < f.dim / 16; u++) all |= uint64_t(f.width[u]) << 4 * u;
    all = uint64_t(uniform(uint32_t(all >> 32))) << 32 | uniform(uint32_t(all));
  }
  __device__ __forceinline__ uint32_t of(uint32_t unit) const { return uint32_t(all >> 4 * unit) & 0xf; }
};

// ---- keys

struct Groups : CodeTraits {
  static constexpr uint32_t kWarps = 12;
};

template <int U, int N>
struct GroupKeys {
  static constexpr bool kColumns = false;
  static constexpr uint32_t kEntries = U + 7;  // units of all groups: up to eight share some
  float unit[N], center[N];
  uint32_t *shared;    // columns of B by entry
  uint64_t from, to;   // byte w - 1: the first unit of width w, and the end
  UnitWidths widths;   // as stored
  const TensorFormat *format;
  uint32_t params, param_bytes;

  __device__ __forceinline__ void begin_item(const Lane &me, const TensorFormat &f, const float *q, const float *centers, uint32_t *columns) {
    shared = columns, format = &f;
    params = f.params - f.codes, param_bytes = uniform(f.param_bytes);
    widths.load(f);
    uint32_t b[N][U];
#pragma unroll
    for (int n = 0; n < N; n++) {
      unit[n] = quantize_query<U>(me, [&](uint32_t slot, float (&x)[4]) { read_four(q + (4 * n + me.row) * query_stride(U) + slot, x); }, b[n]);
      center[n] = centers[4 * n + me.t];
    }
    from = to = 0;
    uint32_t entry = 0;
    for (uint32_t r = 0; r < uniform(f.regions); r++) {
      const uint32_t first = uniform(f.region[r].first), end = first + uniform(f.region[r].count), at = 8 * uniform(f.region[r].bits) - 8;
      from |= uint64_t(first / 16) << at, to |= uint64_t((end + 15) / 16) << at;
#pragma unroll
      for (int u = 0; u < U; u++) {
        if (16 * u + 16 <= first || 16 * uint32_t(u) >= end) continue;
        const uint32_t slot = 16 * u + 4 * me.t, keep = bytes_below(end - min(end, slot)) & ~bytes_below(first - min(first, slot));
#pragma unroll
        for (int n = 0; n < N; n++) shared[(entry * N + n) * 32 + me.lane] = b[n][u] & keep;
        entry++;
      }
    }
  }
  __device__ static __forceinline__ uint32_t bytes_below(uint32_t n) { return n >= 4 ? ~0u : (1u << 8 * n) - 1; }

  // A unit's levels times one entry of B.
  __device__ __forceinline__ static void multiply(const uint32_t (&r)[8], const uint32_t *b, int (&acc)[N][4][4]) {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) multiply_signed_unit(acc[n][i], r[2 * i], r[2 * i + 1], b[n * 32]);
  }
  // The same of two units and two entries.
  __device__ __forceinline__ static void multiply_two(const uint32_t (&r)[8], const uint32_t (&t)[8], const uint32_t *b, int (&acc)[N][4][4]) {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) multiply_query<false>(acc[n][i], r[2 * i], r[2 * i + 1], t[2 * i], t[2 * i + 1], b[n * 32], b[(N + n) * 32]);
  }
  // A unit of a group of W bits that is stored at `stored` bits.
  template <int W>
  __device__ __forceinline__ void add_shared(const Lane &me, const uint8_t *codes, uint32_t stored, const uint32_t *b, int (&acc)[N][4][4]) const {
    uint32_t r[8];
    if (W < 2 && stored == 2) Nibbles<W < 2 ? 2 : W, W>::unit(codes, me.lane, Nibbles<W < 2 ? 2 : W, W>::levels(), r);
    if (W < 3 && stored == 3) Nibbles<W < 3 ? 3 : W, W>::unit(codes, me.lane, Nibbles<W < 3 ? 3 : W, W>::levels(), r);
    if (W < 4 && stored == 4) Nibbles<W < 4 ? 4 : W, W>::unit(codes, me.lane, {}, r);
    if (W < 5 && stored == 5) Nibbles<W < 5 ? 5 : W, W>::unit(codes, me.lane, {}, r);
    if (W < 6 && stored == 6) Nibbles<W < 6 ? 6 : W, W>::unit(codes, me.lane, {}, r);
    if (stored == 8) {
      uint32_t unused[8];
      look_up_bytes(me, codes, W, r, unused);
    }
    multiply(r, b, acc);
  }
  // Codes that are bytes: levels, and those of 7 and 8 bits less 256 times `high`.
  __device__ __forceinline__ static void look_up(const uint8_t *codes, uint32_t lane, uint32_t width, const DeviceBook *book, uint32_t (&low)[8], uint32_t (&high)[8]) {
    const int middle = 128 - (1 << (width - 1)), most = (1 << width) - 1;
    for (int x = 0; x < 8; x++) {
      const uint32_t four = *reinterpret_cast<const uint32_t *>(codes + 4 * lane_word(8, lane, x));
      low[x] = high[x] = 0;
      for (int j = 0; j < 4; j++) {
        const int level = __ldg(book->level + min(max(int(four >> 8 * j & 0xff) - middle, 0), most));
        low[x] |= (uint32_t(level) & 0xff) << 8 * j, high[x] |= (uint32_t(level) >> 8 & 0xff) << 8 * j;
      }
    }
  }
  __device__ __forceinline__ const DeviceBook *book_of(uint32_t width) const {
    uint32_t r = 0;
    while (format->region[r].bits != width) r++;
    return format->region[r].book;
  }
  __device__ __forceinline__ void look_up_bytes(const Lane &me, const uint8_t *codes, uint32_t width, uint32_t (&low)[8], uint32_t (&high)[8]) const {
    look_up(codes, me.lane, width, book_of(width), low, high);
  }
  // Sums of a group to logits.
  template <class Sum>
  __device__ __forceinline__ void add_logits(const Lane &me, float scale, const uint8_t *&scales, float (&s)[N][8], Sum &&sum) const {
    float h[8];
    load_scales(scales, me.r, param_bytes, h);
    scales += kTile * param_bytes;
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int x = 0; x < 8; x++) s[n][x] = fmaf(sum(n, x), unit[n] * scale * h[x], s[n][x]);
  }
  // The units of one width.
  template <int W>
  __device__ __forceinline__ void add_width(const Lane &me, const uint8_t *&codes, const uint8_t *&scales, const uint32_t *&b, float (&s)[N][8]) const {
    const uint32_t first = from >> 8 * (W - 1) & 0xff, end = to >> 8 * (W - 1) & 0xff;
    if (first == end) return;
    int acc[N][4][4] = {};
    const uint32_t last = widths.of(end - 1);
    uint32_t left = end - first - (last != W);
#pragma unroll 1
    for (; left > 1; left -= 2, b += 2 * 32 * N, codes += 2 * W * 128) {
      uint32_t r[8], t[8];
      Nibbles<W>::unit(codes, me.lane, Nibbles<W>::levels(), r);
      Nibbles<W>::unit(codes + W * 128, me.lane, Nibbles<W>::levels(), t);
      multiply_two(r, t, b, acc);
    }
    if (left) {
      uint32_t r[8];
      Nibbles<W>::unit(codes, me.lane, Nibbles<W>::levels(), r);
      multiply(r, b, acc);
      b += 32 * N, codes += W * 128;
    }
    if (last != W) add_shared<W>(me, codes, last, b, acc), b += 32 * N;
    add_logits(me, book_data::scale(W), scales, s, [&](int n, int x) {
      const int *c = &acc[n][x / 2][2 * (x & 1)];
      return float(c[0] * 256 + c[1]);
    });
  }
  // 7 and 8 bits.
  __device__ __forceinline__ void add_wide(const Lane &me, uint32_t width, const uint8_t *&codes, const uint8_t *&scales, const uint32_t *&b, float (&s)[N][8]) const {
    const uint32_t first = from >> 8 * (width - 1) & 0xff, end = to >> 8 * (width - 1) & 0xff;
    if (first == end) return;
    int low[N][4][4] = {}, high[N][4][4] = {};
#pragma unroll 1
    for (uint32_t left = end - first; left; left--, b += 32 * N) {
      uint32_t r[8], upper[8];
      look_up_bytes(me, codes, width, r, upper);
      multiply(upper, b, high);
#pragma unroll
      for (int n = 0; n < N; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) multiply_unit(low[n][i], r[2 * i], r[2 * i + 1], b[n * 32]);
      const bool shares = left == 1 && width == 7 && to >> 56 && uint32_t(from >> 56) < end;  // with the next group
      codes += shares ? 0 : 8 * 128;
    }
    add_logits(me, book_of(width)->scale, scales, s, [&](int n, int x) {
      const int *l = &low[n][x / 2][2 * (x & 1)], *h = &high[n][x / 2][2 * (x & 1)];
      return fmaf(fmaf(float(h[0]), 256.0f, float(h[1]) + float(l[0])), 256.0f, float(l[1]));
    });
  }
  template <class>
  __device__ __forceinline__ void logits(const Lane &me, const RowClass &, const uint8_t *codes, const float (&from)[N], float (&s)[N][8]) const {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int x = 0; x < 8; x++) s[n][x] = center[n] - from[n];
    const uint8_t *scales = codes + params;
    const uint32_t *b = shared + me.lane;
    add_width<1>(me, codes, scales, b, s);
    add_width<2>(me, codes, scales, b, s);
    add_width<3>(me, codes, scales, b, s);
    add_width<4>(me, codes, scales, b, s);
    add_width<5>(me, codes, scales, b, s);
    add_width<6>(me, codes, scales, b, s);
    if (to >> 48 == 0) return;
#pragma unroll 1
    for (uint32_t width = 7; width <= 8; width++) add_wide(me, width, codes, scales, b, s);
  }
};

template <int U, int N>
struct KeysFor<Groups, U, N> {
  using Type = GroupKeys<U, N>;
};
template <int U, int N>
struct ScratchOf<GroupKeys<U, N>> {
  static constexpr uint32_t kBytes = GroupKeys<U, N>::kEntries * N * 128;
};

// ---- values: groups of whole units

struct GroupRows {
  UnitWidths widths;
  uint32_t starts;  // bit u: unit u is the first of a group
  uint32_t params, param_bytes;
  __device__ __forceinline__ void load(const TensorFormat &f) {
    widths.load(f);
    starts = 0;
    for (uint32_t r = 0; r < f.regions; r++) starts |= 1u << f.region[r].first / 16;
    starts = uniform(starts), params = uniform(f.params - f.codes), param_bytes = uniform(f.param_bytes);
  }
};

struct GroupValues : CodeTraits {
  static constexpr bool kScattered = true;
  using Rows = GroupRows;
};

template <int U, int N>
struct TileValues<GroupValues, U, N> : KeptProbabilities<U, N> {
  using KeptProbabilities<U, N>::p, KeptProbabilities<U, N>::hidden;
  const GroupRows &rows;
  const uint8_t *codes;

  __device__ __forceinline__ TileValues(const Lane &, const GroupRows &rows_of, const uint8_t *at) : rows(rows_of), codes(at) {}
  // Columns of B of a group; its book's scale goes into the units.
  __device__ __forceinline__ void weigh_group(const Lane &me, float scale, const uint8_t *at, uint32_t (&b)[N][4], float (&units)[N]) const {
    float h[8];
    load_scales(at, me.r, rows.param_bytes, h);
#pragma unroll
    for (int n = 0; n < N; n++) {
      float w[8];
#pragma unroll
      for (int x = 0; x < 8; x++) w[x] = hidden >> x & 1u ? 0 : p[n][x] * h[x];
      units[n] = spread_weights(w, b[n]) * scale;
    }
  }
  __device__ static __forceinline__ float book_scale(uint32_t width) {
    return width == 1 ? book_data::scale(1) : width == 2 ? book_data::scale(2) : width == 3 ? book_data::scale(3) : book_data::scale(4);
  }
  template <int W>
  __device__ __forceinline__ static void decode(const Lane &me, const uint8_t *at, uint32_t (&r)[8]) {
    Nibbles<W>::unit(at, me.lane, Nibbles<W>::levels(), r);
  }
  __device__ __forceinline__ static void decode_any(const Lane &me, uint32_t width, const uint8_t *at, uint32_t (&r)[8]) {
    if (width == 1)
      decode<1>(me, at, r);
    else if (width == 2)
      decode<2>(me, at, r);
    else if (width == 3)
      decode<3>(me, at, r);
    else
      decode<4>(me, at, r);
  }
  __device__ __forceinline__ static void add_unit(int m, const uint32_t (&r)[8], const uint32_t (&b)[N][4], const float (&units)[N], Soft<U> (&soft)[N]) {
#pragma unroll
    for (int n = 0; n < N; n++) {
      int acc[4] = {};
      multiply_weights<false>(acc, r[0], r[1], r[2], r[3], b[n][0], b[n][1]);
      multiply_weights<false>(acc, r[4], r[5], r[6], r[7], b[n][2], b[n][3]);
#pragma unroll
      for (int h = 0; h < 2; h++) soft[n].o[2 * m + h] = fmaf(float(acc[2 * h] * 256 + acc[2 * h + 1]), units[n], soft[n].o[2 * m + h]);
    }
  }
  // All units of W bits, or a first half of W and a second of V, with a scale of its own if they differ.
  template <int W, int V>
  __device__ __forceinline__ bool has_widths() const {
    constexpr uint64_t kOnes = 0x1111111111111111u >> (64 - 4 * U), kLow = kOnes >> 2 * U;
    return rows.widths.all == kLow * W + (kOnes - kLow) * V && rows.starts == (W == V ? 1u : 1u | 1u << U / 2);
  }
  template <int W, int V>
  __device__ __forceinline__ void add_tile(const Lane &me, Soft<U> (&soft)[N]) const {
    const uint8_t *scales = codes + rows.params;
    uint32_t b[N][4], r[8];
    float units[N];
    weigh_group(me, book_data::scale(W), scales, b, units);
#pragma unroll
    for (int m = 0; m < U / 2; m++) decode<W>(me, codes + m * W * 128, r), add_unit(m, r, b, units, soft);
    if (W != V) weigh_group(me, book_data::scale(V), scales + kTile * rows.param_bytes, b, units);
#pragma unroll
    for (int m = 0; m < U / 2; m++) decode<V>(me, codes + (U / 2 * W + m * V) * 128, r), add_unit(U / 2 + m, r, b, units, soft);
  }
  __device__ __forceinline__ void finish(const Lane &me, NoState &, Soft<U> (&soft)[N]) const {
    if (has_widths<2, 3>())
      add_tile<2, 3>(me, soft);
    else if (has_widths<2, 2>())
      add_tile<2, 2>(me, soft);
    else if (has_widths<3, 3>())
      add_tile<3, 3>(me, soft);
    else
      add_tile(me, soft);
  }
  // Any widths.
  __device__ __forceinline__ void add_tile(const Lane &me, Soft<U> (&soft)[N]) const {
    const uint8_t *at = codes, *scales = codes + rows.params;
    uint32_t b[N][4];
    float units[N];
#pragma unroll
    for (int m = 0; m < U; m++) {
      const uint32_t width = rows.widths.of(m);
      if (rows.starts >> m & 1u) {
        weigh_group(me, book_scale(width), scales, b, units);
        scales += kTile * rows.param_bytes;
      }
      uint32_t r[8];
      decode_any(me, width, at, r);
      add_unit(m, r, b, units, soft);
      at += width * 128;
    }
  }
};

}  // namespace kvq::cuda
