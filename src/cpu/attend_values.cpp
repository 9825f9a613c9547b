// What the probabilities of a tile collect from its values.
#include <cstring>

#include "cpu/attend.h"
#include "cpu/decode.h"

namespace kvq::cpu {
namespace {

const float *probabilities(const Run &run, uint32_t row) { return run.slice.logit + size_t(row) * kLogitStride; }

// Where 16 bits are always too few for the weights: columns, since a token may be large where its probability is small, and values
// of few channels, which can cancel in all of them at once.  Elsewhere they are too few where one weight dominates (kernels.h).
bool needs_refinement(const TensorLayout &layout) { return layout.family == Family::columns || layout.dim <= 16; }

// n equal weights that are rounded alike, by half a step of 1/32767 of the largest, are 2.4e-4 of the whole output at most if the
// largest scale is within 4 times the mean, and the largest probability within 4 / n of all probabilities so far.
constexpr float kEven = 4.0f;
bool even_scales(const Run &run, const float *scale, uint32_t n) {
  return run.kernels.maximum(scale, n) * float(n) <= kEven * run.kernels.sum(scale, n);
}
bool even_probabilities(const Run &run, uint32_t row, const float *p, uint32_t n) {
  return run.kernels.maximum(p, n) * float(n) <= kEven * run.slice.denominator[row];
}

// One row's probabilities from a token that is a multiple of 4, times token scales, as integers.  even: the scales are.
void weigh_row(const Run &run, const TensorLayout &layout, uint32_t row, const float *p, const float *scale, bool even, uint32_t count,
               RowWeights *weights) {
  const size_t at = size_t(row) * run.dims.weights();
  const bool always = needs_refinement(layout), never = !always && even && even_probabilities(run, row, p, count);
  weigh(run, row, p, scale, count, run.slice.w + at, never ? nullptr : run.slice.fine + at, always, weights);
}

Dot value_dot(const Run &run, const Domain &domain, const Region &region, uint32_t first, uint32_t end) {
  Dot dot{};
  dot.stride = size_t(4) * region.count;
  dot.x = run.slice.codes + region.byte + first / 4 * dot.stride;
  dot.depth = (end - first + 3) / 4;
  dot.lanes = region.count;
  dot.w = run.slice.w;
  dot.w_stride = run.dims.weights();
  dot.out = domain.out + region.first;
  dot.out_stride = run.dims.output();
  dot.add = true;
  return dot;
}

// Token scalars go into the probabilities, zeros into one number per row.
void add_rows(const Run &run, Domain &domain, const TensorLayout &layout, const Tile &tile) {
  Slice &slice = run.slice;
  RowWeights &weights = *slice.weights;
  decode_value_codes(run, layout, tile);
  for (const Segment &segment : layout.segments) {
    const Region &region = layout.regions[segment.region];
    load_token_scalars(run, layout, region, tile.v_params, segment.param, tile);
    const bool even = even_scales(run, slice.scale + tile.from, tile.end - tile.from);
    for (uint32_t r = 0; r < run.rows; r++) {
      const float *p = probabilities(run, r) + tile.from;
      weigh_row(run, layout, r, p, slice.scale + tile.from, even, tile.end - tile.from, &weights);
      if (!region.table) weights.total[r] = run.kernels.dot_product(p, slice.zero + tile.from, tile.end - tile.from);
    }
    Dot dot = value_dot(run, domain, region, tile.from, tile.end);
    dot.x = static_cast<const uint8_t *>(dot.x) + size_t(4) * (segment.first - region.first);
    dot.lanes = segment.count;
    dot.out = domain.out + segment.first;
    if (!region.table) dot.offset = weights.total;
    dot_region(run, region, weights, slice.fine, region.line, dot);
  }
}

// Slots without codes (width 0) are their zeros.
void add_zeros(const Run &run, Domain &domain, const TensorLayout &layout, const RowWeights &weights) {
  const uint32_t coded = layout.regions.empty() ? layout.dim : layout.regions.front().first;
  for (uint32_t r = 0; r < run.rows; r++)
    for (uint32_t c = 0; c < coded; c++) domain.out[size_t(r) * run.dims.output() + c] += weights.total[r] * run.slice.zero[c];
}

// Kitty's upper two bits: four times the scale of their channels.
void add_upper(const Run &run, Domain &domain, const TensorLayout &layout, const Region &region, const uint8_t *params, Dot dot) {
  Slice &slice = run.slice;
  const uint16_t *channel = boosted_channels(layout, params);
  dot.out = slice.part;
  dot.out_stride = 256 + 16;
  dot.add = false;
  dot.bias = region.bias;
  dot_weighted(run, *slice.weights, slice.fine, 4.0f, dot);
  for (uint32_t r = 0; r < run.rows; r++)
    for (uint32_t i = 0; i < dot.lanes; i++)
      domain.out[size_t(r) * run.dims.output() + channel[i]] += slice.scale[channel[i]] * slice.part[r * dot.out_stride + i];
}

// The probabilities of tokens [first, end) alone, from the word of `first` on, as weights of all rows.
void weigh_group(const Run &run, const TensorLayout &layout, uint32_t first, uint32_t end) {
  const uint32_t from = first / 4 * 4;
  float *line = run.slice.line;
  for (uint32_t r = 0; r < run.rows; r++) {
    std::fill_n(line, 4, 0.0f);
    std::copy(probabilities(run, r) + first, probabilities(run, r) + end, line + (first - from));
    weigh_row(run, layout, r, line, nullptr, false, end - from, run.slice.weights);
    float total = 0;
    for (uint32_t t = first - from; t < end - from; t++) total += line[t];
    run.slice.weights->total[r] = total;
  }
}

// Scales and zeros of slots multiply what a group's tokens collected.
void add_columns(const Run &run, Domain &domain, const TensorLayout &layout, const Tile &tile) {
  Slice &slice = run.slice;
  decode_value_codes(run, layout, tile);
  for_groups(layout, tile, [&](uint32_t group, uint32_t first, uint32_t end) {
    const uint8_t *params = tile.v_params + group * layout.group_stride;
    load_slot_params(run, layout, params);
    weigh_group(run, layout, first, end);
    add_zeros(run, domain, layout, *slice.weights);
    for (const Region &region : layout.regions) {
      Dot dot = value_dot(run, domain, region, first / 4 * 4, end);
      if (region.upper) {
        add_upper(run, domain, layout, region, params, dot);
        continue;
      }
      dot.lane_scale = slice.scale + region.first;
      dot.lane_offset = slice.zero + region.first;
      dot.offset = slice.weights->total;
      dot_region(run, region, *slice.weights, slice.fine, 0, dot);
    }
  });
}

void add_decoded(const Run &run, Domain &domain, const TensorLayout &layout, const Tile &tile) {
  decode_value_codes(run, layout, tile);
  decode_values(run, domain.format->v[run.head], layout, tile.v_params, tile);
  Dot dot{};
  dot.x = run.slice.values + size_t(tile.first) * layout.dim;
  dot.stride = size_t(4) * layout.dim;
  dot.depth = tile.end - tile.first;
  dot.lanes = layout.dim;
  dot.rows = run.rows;
  dot.w = run.slice.logit + tile.first;
  dot.w_stride = kLogitStride;
  dot.out = domain.out;
  dot.out_stride = run.dims.output();
  dot.add = true;
  dot.prefetch = &run.slice.prefetch;
  run.kernels.dot_floats(dot);
}

}  // namespace

void add_raw_values(const Run &run, uint32_t dim, float *out, const Tile &tile) {
  Dot dot{};
  dot.x = tile.v + size_t(2) * dim * tile.first;
  dot.stride = size_t(2) * dim;
  dot.depth = tile.end - tile.first;
  dot.lanes = dim;
  dot.rows = run.rows;
  dot.w = run.slice.logit + tile.first;
  dot.w_stride = kLogitStride;
  dot.out = out;
  dot.out_stride = run.dims.output();
  dot.add = true;
  dot.prefetch = &run.slice.prefetch;
  run.kernels.dot_halves(dot);
}

void add_values(const Run &run, Domain &domain, const Tile &tile) {
  const TensorLayout &layout = domain.format->layout(run.head, KVQ_TENSOR_V);
  switch (layout.family) {
    case Family::rows:
      return add_rows(run, domain, layout, tile);
    case Family::columns:
      return add_columns(run, domain, layout, tile);
    case Family::halves:
      return add_raw_values(run, layout.dim, domain.out, tile);
    case Family::values:
      return add_decoded(run, domain, layout, tile);
  }
}

}  // namespace kvq::cpu
