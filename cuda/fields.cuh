// Affine codes of 2^w levels in the fused kernels, planes of two bits and one of one bit above them (layout.h): keys in rows, or in
// columns with groups of 32 tokens or more, also Kitty's, some of which have two bits more; values with a scale and a zero for every
// group of 32 channels or more.
#pragma once
#include "cuda/fused.cuh"

namespace kvq::cuda {

// Any of them.
struct Fields : CodeTraits {
  static constexpr uint32_t kWarps = 12;
  static constexpr bool kSplitsWeights = true;  // in two parts where 16 bits are too few (scale_weights)
  // How the codes of a class of pages lie in a tile.
  struct Rows {
    uint32_t crumbs, bit;  // planes of two bits, and of one
    uint32_t params;       // behind the codes
    uint32_t group_mask;   // values: pairs of units in a group, less one
    uint32_t pair_bytes;   // and bytes of their parameters for each pair
    __device__ __forceinline__ void load(const TensorFormat &f) {
      const uint32_t width = uniform(f.width[0]);
      crumbs = width / 2, bit = width % 2;
      params = uniform(f.params - f.codes);
      group_mask = uniform(f.channel_group / 32) - 1, pair_bytes = 4 * kTile / (group_mask + 1);
    }
  };
  // What keys are.
  struct Form {
    bool rows, halves;  // halves: a tile has two groups
    uint32_t lanes;     // of four slots each that have two bits more
    float middle;       // of the levels
    __device__ __forceinline__ void load(const TensorFormat &f) {
      middle = 0.5f * float((1u << uniform(f.width[0])) - 1);
      rows = uniform(f.group == 0), halves = uniform(f.group == kTile / 2), lanes = uniform(upper_lanes(f.boosted));
    }
  };
};
// Four levels in groups of 32 tokens and of 32 channels: all of that is known when this is compiled.
struct HalfFields : CodeTraits {
  static constexpr bool kSplitsWeights = false;  // its registers are full: that takes a fifth more time
  struct Rows {
    static constexpr uint32_t crumbs = 1, bit = 0, group_mask = 0, pair_bytes = 4 * kTile;
    uint32_t params;
    __device__ __forceinline__ void load(const TensorFormat &f) { params = uniform(f.params - f.codes); }
  };
  struct Form {
    static constexpr bool rows = false, halves = true;
    static constexpr uint32_t lanes = 0;
    static constexpr float middle = 1.5f;
    __device__ __forceinline__ void load(const TensorFormat &) {}
  };
};

// The planes of a tile of U units, from the highest one down, to sums that are 0.
template <int U, int N, class Rows, class Bits, class Crumbs>
__device__ __forceinline__ void add_planes(const Rows &rows, const uint8_t *codes, int (&acc)[N][2][4], Bits &&bits, Crumbs &&crumbs) {
  uint32_t left = rows.crumbs;
  if (rows.bit)
    bits(codes), codes += U * 128;
  else
    crumbs(codes), codes += U * 256, left--;
#pragma unroll 1
  for (; left; left--, codes += U * 256) {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int i = 0; i < 8; i++) acc[n][i / 4][i % 4] *= 4;
    crumbs(codes);
  }
}

// ---- keys

template <class Code, int U, int N>
struct FieldKeys {
  using Rows = typename Code::Rows;
  static constexpr bool kColumns = true;
  float unit[N], zero[N], center[N];  // zero: of columns, with what rounding leaves of the query, times the middle of the levels (as
                                      // ColumnKeys); rows: the sum of the query, as rounded (as RowKeys)
  uint32_t b[N][U], upper[N];         // upper: of the slots that have two bits more
  const float *query;
  const uint8_t *params;              // columns: of the tile's groups
  typename Code::Form form;

  __device__ __forceinline__ void begin_item(const Lane &me, const TensorFormat &f, const float *q, const float *centers, uint32_t *) {
    form.load(f);
    query = q;
#pragma unroll
    for (int n = 0; n < N; n++) center[n] = centers[4 * n + me.t];
    if (form.rows) fold(me, [](uint32_t, float (&s)[4], float (&z)[4]) {
#pragma unroll
        for (int j = 0; j < 4; j++) s[j] = z[j] = 1;
      });
  }
  template <class Load>
  __device__ __forceinline__ void fold(const Lane &me, Load &&load) {
#pragma unroll
    for (int n = 0; n < N; n++) {
      float sum = 0;
      const float times = form.rows ? -1.0f : form.middle;
      unit[n] = quantize_query<U>(me, [&](uint32_t slot, float (&x)[4]) {
        float s[4], z[4], v[4];
        load(slot, s, z);
        read_four(query + (4 * n + me.row) * query_stride(U) + slot, v);
#pragma unroll
        for (int j = 0; j < 4; j++) x[j] = v[j] * s[j], sum = fmaf(v[j], z[j], sum);
      }, b[n], [&](uint32_t, float rest) { sum = fmaf(rest, times, sum); });
      zero[n] = query_sum(me, sum);
    }
  }
  __device__ __forceinline__ void fold_group(const Lane &me, const uint8_t *at) {
    fold(me, [&](uint32_t slot, float (&s)[4], float (&z)[4]) {
      ColumnKeys<U, N>::read_halves(at + 2 * slot, s);
      ColumnKeys<U, N>::read_halves(at + 32 * U + 2 * slot, z);
    });
  }
  // Scales, zeros and, of Kitty, positions of all slots.
  __device__ __forceinline__ void begin_group(const Lane &me, const float *, const uint8_t *at, uint32_t) {
    if (form.rows) return;
    params = at;
    fold_group(me, at);
    if (form.lanes) find_upper(me, at + 64 * U);
  }
  // B of the slots with more bits, from that of all slots: four of them are a lane's.
  __device__ __forceinline__ void find_upper(const Lane &me, const uint8_t *positions) {
#pragma unroll
    for (int n = 0; n < N; n++) upper[n] = 0;
    uint32_t mine[U / 8 + 1];  // positions of slots 4 * (lane + 32 * i) and on
#pragma unroll
    for (int i = 0; i < U / 8 + 1; i++) mine[i] = me.lane + 32 * i < 4 * U ? *reinterpret_cast<const uint32_t *>(positions + 4 * me.lane + 128 * i) : ~0u;
#pragma unroll 1
    for (int k = 0; k < 4 * int(form.lanes); k++) {
      uint32_t slot = ~0u;
#pragma unroll
      for (int i = 0; i < U / 8 + 1; i++)
#pragma unroll
        for (int j = 0; j < 4; j++)
          if ((mine[i] >> 8 * j & 0xff) == k) slot = 4 * (me.lane + 32 * i) + j;
      slot = __reduce_min_sync(~0u, slot);
      if (slot == ~0u) break;
#pragma unroll
      for (int n = 0; n < N; n++) {
        uint32_t word = 0;
#pragma unroll
        for (int u = 0; u < U; u++) word |= b[n][u] & -uint32_t(slot / 16 == uint32_t(u));
        const uint32_t byte = __shfl_sync(~0u, word, (me.lane & ~3u) + slot % 16 / 4) >> slot % 4 * 8 & 0xff;
        if (k / 4 == me.t) upper[n] |= byte << k % 4 * 8;
      }
    }
  }
  // Half H of a tile, registers 4 * H and on: what is added to sums of pairs of registers.
  template <int H>
  __device__ __forceinline__ void add_upper(const Lane &me, const uint8_t *codes, int (&acc)[N][2][4]) const {
    constexpr uint32_t kCrumb = 0x03030303u;
    const uint32_t word = int(me.t) < int(form.lanes) ? *reinterpret_cast<const uint32_t *>(codes + 4 * upper_word(form.lanes, me.lane, H)) : 0;
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        int sum[4] = {};
        multiply_unit(sum, word & kCrumb << 4 * i, word & kCrumb << (4 * i + 2), upper[n]);
#pragma unroll
        for (int j = 0; j < 4; j++) acc[n][i][j] += 4 * sum[j];
      }
  }
  // A pair of units: registers 4 * h + x of word u and v, `field` wide.
  __device__ __forceinline__ void add_pair(int p, uint32_t u, uint32_t v, uint32_t field, int (&acc)[N][2][4]) const {
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int n = 0; n < N; n++)
        multiply_query<true>(acc[n][i], u & field << 4 * i, u & field << (4 * i + 2), v & field << 4 * i, v & field << (4 * i + 2), b[n][2 * p], b[n][2 * p + 1]);
  }
  template <int H>
  __device__ __forceinline__ void add_bits(const Lane &me, const uint8_t *codes, int (&acc)[N][2][4]) const {
#pragma unroll
    for (int p = 0; p < U / 2; p++) {
      const uint2 w = *reinterpret_cast<const uint2 *>(codes + p * 256 + me.lane * 8);
      add_pair(p, w.x >> H, w.y >> H, 0x01010101u, acc);
    }
  }
  template <int H>
  __device__ __forceinline__ void add_crumbs(const Lane &me, const uint8_t *codes, int (&acc)[N][2][4]) const {
#pragma unroll
    for (int p = 0; p < U / 2; p++) {
      const uint4 w = *reinterpret_cast<const uint4 *>(codes + p * 512 + me.lane * 16);
      add_pair(p, H ? w.y : w.x, H ? w.w : w.z, 0x03030303u, acc);
    }
  }
  template <int H>
  __device__ __forceinline__ void add_half(const Lane &me, const Rows &rows_of, const uint8_t *codes, int (&acc)[N][2][4]) const {
    add_planes<U>(rows_of, codes, acc, [&](const uint8_t *at) { add_bits<H>(me, at, acc); }, [&](const uint8_t *at) { add_crumbs<H>(me, at, acc); });
    if (form.lanes) add_upper<H>(me, codes + U * 256, acc);
  }
  template <int H>
  __device__ __forceinline__ void half_logits(const int (&acc)[N][2][4], const float (&from)[N], float (&s)[N][8]) const {
#pragma unroll
    for (int n = 0; n < N; n++) {
      const float base = form.rows ? 0.0f : zero[n] - from[n];
#pragma unroll
      for (int x = 0; x < 4; x++) {
        const int *c = &acc[n][x / 2][2 * (x & 1)];
        s[n][4 * H + x] = fmaf(fmaf(float(c[0]), 256.0f, float(c[1])), unit[n] * (1.0f / float(1 << 2 * x)), base);
      }
    }
  }
  // Columns with one plane of crumbs, without a branch: in groups of half a tile, or with upper bits.
  template <bool kHalves>
  __device__ __forceinline__ void quick_logits(const Lane &me, const uint8_t *codes, const float (&from)[N], float (&s)[N][8]) {
    uint4 w[U / 2];
#pragma unroll
    for (int p = 0; p < U / 2; p++) w[p] = *reinterpret_cast<const uint4 *>(codes + p * 512 + me.lane * 16);
    int first[N][2][4] = {}, second[N][2][4] = {};
#pragma unroll
    for (int p = 0; p < U / 2; p++) add_pair(p, w[p].x, w[p].z, 0x03030303u, first);
    if (!kHalves) add_upper<0>(me, codes + U * 256, first);
    half_logits<0>(first, from, s);
    if (kHalves) fold_group(me, params + 64 * U);
#pragma unroll
    for (int p = 0; p < U / 2; p++) add_pair(p, w[p].y, w[p].w, 0x03030303u, second);
    if (!kHalves) add_upper<1>(me, codes + U * 256, second);
    half_logits<1>(second, from, s);
  }
  template <class>
  __device__ __forceinline__ void logits(const Lane &me, const Rows &rows_of, const uint8_t *codes, const float (&from)[N], float (&s)[N][8]) {
    if (rows_of.bit == 0 && rows_of.crumbs == 1 && !form.rows && (form.halves || form.lanes)) {
      if (form.halves)
        quick_logits<true>(me, codes, from, s);
      else
        quick_logits<false>(me, codes, from, s);
      return;
    }
    int first[N][2][4] = {}, second[N][2][4] = {};
    add_half<0>(me, rows_of, codes, first);
    half_logits<0>(first, from, s);
    if (form.halves) fold_group(me, params + 64 * U);
    add_half<1>(me, rows_of, codes, second);
    half_logits<1>(second, from, s);
    if (!form.rows) return;
    float h[8], z[8];
    load_scales(codes + rows_of.params, me.r, 2, h), load_scales(codes + rows_of.params + 2 * kTile, me.r, 2, z);
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int x = 0; x < 8; x++) s[n][x] = fmaf(s[n][x], h[x], fmaf(z[x], zero[n], center[n] - from[n]));
  }
};

template <int U, int N>
struct KeysFor<Fields, U, N> {
  using Type = FieldKeys<Fields, U, N>;
};
template <int U, int N>
struct KeysFor<HalfFields, U, N> {
  using Type = FieldKeys<HalfFields, U, N>;
};

// ---- values

// Sums of p * zero for every pair of units, of those of the first of a group.
template <int U, int N>
struct FieldZeros {
  float zero[N][U / 2] = {};
  __device__ __forceinline__ void scale(int n, float by) {
#pragma unroll
    for (int p = 0; p < U / 2; p++) zero[n][p] *= by;
  }
  // To the outputs.
  template <class Rows>
  __device__ __forceinline__ void finish(const Rows &rows, Soft<U> (&soft)[N]) {
#pragma unroll
    for (int n = 0; n < N; n++) {
      float sum = 0;
#pragma unroll
      for (int p = 0; p < U / 2; p++) {
        if ((p & rows.group_mask) == 0) sum = lanes_sum(zero[n][p]);
#pragma unroll
        for (int y = 4 * p; y < 4 * p + 4; y++) soft[n].o[y] += sum;
      }
    }
  }
};
template <int U, int N>
struct StateFor<Fields, U, N> {
  using Type = FieldZeros<U, N>;
};
template <int U, int N>
struct StateFor<HalfFields, U, N> {
  using Type = FieldZeros<U, N>;
};

// The values of a tile: probabilities are weighed once for every group, against the largest weight of all groups.
template <class Code, int U, int N>
struct FieldValues : KeptProbabilities<U, N> {
  using KeptProbabilities<U, N>::p, KeptProbabilities<U, N>::hidden;
  static constexpr float kInteger = 8388608.0f;  // what is added to it becomes the bits of an integer
  enum class Part { all, whole, fraction };      // of weights: rounded; rounded down, and what that leaves
  using Rows = typename Code::Rows;
  const Rows &rows;
  const uint8_t *codes;
  float q[N][8];  // probabilities in units of the weights

  __device__ __forceinline__ FieldValues(const Lane &, const Rows &rows_of, const uint8_t *at) : rows(rows_of), codes(at) {}
  __device__ __forceinline__ void hide_in(float (&s)[8]) const {
#pragma unroll
    for (int x = 0; x < 8; x++)
      if (hidden >> x & 1u) s[x] = 0;
  }
  // The largest scale of each token, of all groups.  kPlain: groups are pairs of units, and no token is hidden.
  template <bool kPlain>
  __device__ __forceinline__ void load_largest(const Lane &me, float (&s)[8]) const {
    __half2 most[4] = {};
#pragma unroll
    for (int g = 0; g < U / 2; g++) {
      if (!kPlain && g & rows.group_mask) continue;
      const uint4 v = *reinterpret_cast<const uint4 *>(codes + rows.params + g * (kPlain ? 4 * kTile : rows.pair_bytes) + me.r * 16);
      const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int i = 0; i < 4; i++) most[i] = __hmax2(most[i], *reinterpret_cast<const __half2 *>(&w[i]));
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float2 pair = __half22float2(most[i]);
      s[2 * i] = pair.x, s[2 * i + 1] = pair.y;
    }
    if (!kPlain) hide_in(s);
  }
  // Columns of B of the group that begins with pair g; its zeros lie behind its scales.
  template <bool kPlain, Part kPart>
  __device__ __forceinline__ void weigh_group(const Lane &me, int g, uint32_t (&b)[N][4], FieldZeros<U, N> &zeros) const {
    const uint8_t *at = codes + rows.params + g * (kPlain ? 4 * kTile : rows.pair_bytes);
    float s[8], z[8];
    load_scales(at, me.r, 2, s), load_scales(at + 2 * kTile, me.r, 2, z);
    if (!kPlain) hide_in(s), hide_in(z);
#pragma unroll
    for (int n = 0; n < N; n++) {
      uint32_t v[8];
#pragma unroll
      for (int x = 0; x < 8; x++) {
        if constexpr (kPart == Part::all) {
          v[x] = __float_as_uint(__fadd_rz(fmaf(q[n][x], s[x], rounding(x)), kInteger));  // scales may be too large for round_weight
        } else {
          const float whole = floorf(q[n][x] * s[x]), rest = fmaxf(fmaf(q[n][x], s[x], -whole), 0.0f);
          v[x] = __float_as_uint((kPart == Part::whole ? whole : rest * kMostWeight) + kInteger);
        }
        if constexpr (kPart != Part::fraction) zeros.zero[n][g] = fmaf(p[n][x], z[x], zeros.zero[n][g]);
      }
      trade_weights<0>(v, b[n]);
    }
  }
  __device__ __forceinline__ void add_words(const uint32_t (&w)[4], uint32_t field, const uint32_t (&b)[N][4], int (&acc)[N][2][4]) const {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      uint32_t r[8];
#pragma unroll
      for (int i = 0; i < 8; i++) r[i] = w[i / 2] & field << (4 * h + 2 * (i & 1));
#pragma unroll
      for (int n = 0; n < N; n++) {
        multiply_weights<true>(acc[n][h], r[0], r[1], r[2], r[3], b[n][0], b[n][1]);
        multiply_weights<true>(acc[n][h], r[4], r[5], r[6], r[7], b[n][2], b[n][3]);
      }
    }
  }
  // Units 2 * p and 2 * p + 1.  kPlanes: of crumbs alone; 0: any.
  template <int P, int kPlanes>
  __device__ __forceinline__ void add_pair(const Lane &me, const uint32_t (&b)[N][4], const float (&units)[N], Soft<U> (&soft)[N]) const {
    int acc[N][2][4] = {};
    const auto add = [&](const uint8_t *at, uint32_t shift, uint32_t field) {
      const uint4 v = *reinterpret_cast<const uint4 *>(at + me.lane * 16);
      const uint32_t w[4] = {v.x >> shift, v.y >> shift, v.z >> shift, v.w >> shift};
      add_words(w, field, b, acc);
    };
    if constexpr (kPlanes > 0) {
#pragma unroll
      for (int i = 0; i < kPlanes; i++) {
#pragma unroll
        for (int n = 0; n < N && i > 0; n++)
#pragma unroll
          for (int j = 0; j < 8; j++) acc[n][j / 4][j % 4] *= 4;
        add(codes + i * U * 256 + P * 512, 0, 0x03030303u);
      }
    } else {
      add_planes<U>(rows, codes, acc, [&](const uint8_t *at) { add(at + P / 2 * 512, P % 2, 0x01010101u); },
                    [&](const uint8_t *at) { add(at + P * 512, 0, 0x03030303u); });
    }
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int y = 0; y < 4; y++) {
        const int *c = &acc[n][y / 2][2 * (y & 1)];
        float &o = soft[n].o[4 * P + y];
        o = fmaf(fmaf(float(c[0]), 256.0f, float(c[1])), units[n] * (1.0f / float(1 << 2 * y)), o);
      }
  }
  template <int kPlanes, Part kPart, int... P>
  __device__ __forceinline__ void add_pairs(const Lane &me, const float (&units)[N], FieldZeros<U, N> &zeros, Soft<U> (&soft)[N], std::integer_sequence<int, P...>) const {
    uint32_t b[N][4];
    ((kPlanes == 0 && P & rows.group_mask ? void() : weigh_group<(kPlanes > 0), kPart>(me, P, b, zeros), add_pair<P, kPlanes>(me, b, units, soft)), ...);
  }
  template <int kPlanes, Part kPart = Part::all>
  __device__ __forceinline__ void add_tile(const Lane &me, const float (&units)[N], FieldZeros<U, N> &zeros, Soft<U> (&soft)[N]) const {
    add_pairs<kPlanes, kPart>(me, units, zeros, soft, std::make_integer_sequence<int, U / 2>());
  }
  __device__ __forceinline__ void finish(const Lane &me, FieldZeros<U, N> &zeros, Soft<U> (&soft)[N]) {
    const bool plain = rows.group_mask == 0 && rows.bit == 0 && !__any_sync(~0u, hidden != 0);
    float units[N];
    if (plain ? scale_weights<true>(me, units) : scale_weights<false>(me, units)) {
      add_tile<0, Part::whole>(me, units, zeros, soft);
#pragma unroll
      for (int n = 0; n < N; n++) units[n] *= 1.0f / kMostWeight;
      add_tile<0, Part::fraction>(me, units, zeros, soft);
    } else if (plain && rows.crumbs == 1) {
      add_tile<1>(me, units, zeros, soft);
    } else if (plain && rows.crumbs == 2) {
      add_tile<2>(me, units, zeros, soft);
    } else {
      add_tile<0>(me, units, zeros, soft);
    }
  }
  // Probabilities in units of the largest weight.  Are weights to be split?  Where a token has more than half of a row's weight 16 bits
  // are too few: beside an outlier's scale the other groups' weights are small integers, and their roundings, all alike, add up.
  template <bool kPlain>
  __device__ __forceinline__ bool scale_weights(const Lane &me, float (&units)[N]) {
    float s[8];
    load_largest<kPlain>(me, s);
    bool sharp = false;
#pragma unroll
    for (int n = 0; n < N; n++) {
      float top = 1e-30f, sum = 0;
#pragma unroll
      for (int x = 0; x < 8; x++) top = fmaxf(top, p[n][x] * s[x]), sum = fmaf(p[n][x], s[x], sum);
      top = lanes_max(top);
      if constexpr (Code::kSplitsWeights) sum = lanes_sum(sum), sharp |= sum > 0 && top > 0.5f * sum;
      const float inverse = kMostWeight * reciprocal(top);
#pragma unroll
      for (int x = 0; x < 8; x++) q[n][x] = p[n][x] * inverse;
      units[n] = top * (1.0f / kMostWeight);
    }
    return Code::kSplitsWeights && __any_sync(~0u, sharp);
  }
};

template <int U, int N>
struct TileValues<Fields, U, N> : FieldValues<Fields, U, N> {
  using FieldValues<Fields, U, N>::FieldValues;
};
template <int U, int N>
struct TileValues<HalfFields, U, N> : FieldValues<HalfFields, U, N> {
  using FieldValues<HalfFields, U, N>::FieldValues;
};

}  // namespace kvq::cuda
