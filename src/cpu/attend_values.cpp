// What the probabilities of a tile collect from its values.
#include <algorithm>
#include <cstring>

#include "cpu/attend.h"
#include "cpu/decode.h"

namespace kvq::cpu {
namespace {

float *probabilities(const Run &run, uint32_t row) { return run.slice.logit + size_t(row) * kLogitStride; }

// d^2 of a row's logits (doubt.h) less its factor, if they have any.
const float *doubtful(const Run &run, uint32_t row) {
  return run.slice.has_doubt ? run.slice.doubtful + size_t(row) * run.slice.doubt_stride : nullptr;
}

// The probabilities of tokens [first, end) of rows that are to become weights, none of which is above its bound.
Quantize probabilities_of(const Run &run, uint32_t row, uint32_t rows, const float *bound, uint32_t first, uint32_t end) {
  Quantize quantize{};
  quantize.x = probabilities(run, row) + first;
  quantize.x_stride = kLogitStride;
  quantize.doubt_stride = run.slice.doubt_stride;
  quantize.n = end - first;
  quantize.row = row;
  quantize.rows = rows;
  quantize.w = run.slice.w;
  quantize.bound = run.precise ? nullptr : bound;
  if (run.slice.has_doubt) quantize.doubt = doubtful(run, row) + first;
  return quantize;
}

// The same, and logits to probabilities; bounds are then those of s.
void weigh_deferred(const Run &run, Quantize *quantize, RowWeights *weights) {
  Slice &slice = run.slice;
  float sums[kRows];
  quantize->reference = slice.reference;
  quantize->most = slice.most;
  quantize->exponentials = sums;
  quantize->largest = slice.largest;
  weigh(run, quantize, weights);
  for (uint32_t r = 0; r < quantize->rows; r += 4) set_four(slice.denominator + r, four_of(slice.denominator + r) + four_of(sums + r));
  slice.deferred = false;
}

// How many tokens of [first, end) a row sees.
float visible(const Tile &tile, uint32_t row, uint32_t first, uint32_t end) {
  const uint32_t low = std::max(tile.low(row), first), high = std::min(tile.high(row), end);
  return high > low ? float(high - low) : 0.0f;
}

// A product with tokens [first, end).
Dot place(const Run &run, const Product &product, const TensorLayout &layout, const Region &region, const Tile &tile, uint32_t first,
          uint32_t end) {
  Dot dot = product.dot;
  dot.depth = (end - first + 3) / 4;
  if (reads_planes(run, region, layout, tile)) {
    dot.depth += dot.depth % 2;  // weights are zeros up to a whole vector
    dot.planes.at = tile.v + product.offset + planes_before(region, first / 4);
    dot.planes.shared = tile.shared;
  } else {
    dot.x = static_cast<const uint8_t *>(dot.x) + first / 4 * dot.stride;
  }
  return dot;
}

// Squares of a tile's codes in the terms of a row's output, per square of the weights' errors (doubt.h).
struct Share {
  float usual, most;
  // Of independent errors whose squares add up to `each`, and of errors whose sum is `error`; F: float, or Four.
  template <class F>
  F square(F each, F error) const {
    return each * std::min(kCodes * usual, most) + error * error * most;
  }
};

// Whether the errors of a row's weights could show in what it has collected.
inline bool shows(const Run &run, const Domain &domain, uint32_t row, const RowWeights &weights, float tokens, const Share &share) {
  if (run.precise) return true;
  Doubts &doubt = run.slice.doubt;
  const float step = weights.scale[row], each = step * step * (tokens / 12.0f);
  const float square = share.square(each, weights.error[row]);
  if (square > kTileShare * doubt.power[row]) {
    const float *out = domain.out + size_t(row) * run.dims.output();
    doubt.power[row] = run.kernels.dot_product(out, out, round16(domain.format->v[run.head].shape.dim));
  }
  if (square > kTileShare * doubt.power[row]) {
    doubt.sum[row] += double(each) * share.most / (kFineSteps * kFineSteps);
    return true;
  }
  doubt.sum[row] += double(each) * share.usual;
  doubt.tile[row] = std::max(doubt.tile[row], square);
  return false;
}

// The same for all rows, which see all of the tile: whether they show in any of them; if not, that is in the books.
bool any_shows(const Run &run, const RowWeights &weights, float tokens, const Share &share) {
  Doubts &doubt = run.slice.doubt;
  Four each[kRows / 4], square[kRows / 4];
  bool any = run.precise;
  for (uint32_t r = 0; r < run.rows; r += 4) {
    const Four step = four_of(weights.scale + r), error = four_of(weights.error + r);
    each[r / 4] = step * step * (tokens / 12.0f);
    square[r / 4] = share.square(each[r / 4], error);
    const auto shows = square[r / 4] > kTileShare * four_of(doubt.power + r);
    for (uint32_t i = 0; i < 4; i++) any |= shows[i] && r + i < run.rows;
  }
  for (uint32_t r = 0; !any && r < run.rows; r += 4) {
    add_four(doubt.sum + r, each[r / 4] * share.usual);
    set_four(doubt.tile + r, greater_of(four_of(doubt.tile + r), square[r / 4]));
  }
  return any;
}

// The probabilities of a tile as weights: token scalars, the largest of which is given, go into them, zeros into one number per row, and
// the sum of what rounding left times the middle code, so that only what is not alike in all tokens remains.
void weigh_segment(const Run &run, const Region &region, float slots, const Tile &tile, const float *most) {
  Slice &slice = run.slice;
  RowWeights &weights = *slice.weights;
  const uint32_t tokens = tile.end - tile.from;
  const float middle = middle_of(run, region);
  float bounds[kRows];
  for (uint32_t r = 0; r < run.rows; r += 4) set_four(bounds + r, slice.deferred ? four_of(most + r) : four_of(most + r) * four_of(slice.largest + r));
  Quantize quantize = probabilities_of(run, 0, run.rows, bounds, tile.from, tile.end);
  quantize.s = slice.scale + tile.from;
  if (!region.table) quantize.zero = slice.zero + tile.from;
  if (slice.has_doubt && quantize.zero) {
    const bool shared = slice.doubt_stride == 0;  // by all rows
    run.kernels.shares(quantize.s, quantize.zero, region.spread.usual, middle, shared ? quantize.doubt : nullptr, tokens, slice.middle);
    quantize.share = slice.middle;
    if (shared) quantize.doubt = nullptr;
  }
  slice.deferred ? weigh_deferred(run, &quantize, &weights) : weigh(run, &quantize, &weights);
  const float each = quantize.share ? 1.0f : region.spread.usual;
  for (uint32_t r = 0; r < run.rows; r += 4) {
    if (quantize.zero) set_four(weights.offset + r, four_of(weights.offset + r) + four_of(weights.error + r) * middle);
    const Four power = slice.has_doubt ? four_of(weights.power + r) * four_of(slice.doubt_factor + r) * each : Four{};
    const Four offset = quantize.zero ? four_of(weights.offset + r) : Four{};
    add_four(slice.doubt.sum + r, (power + kZeroShare * offset * offset) * slots);
  }
}

// What rounding leaves of a row's weights, to its place in a group of four.
void weigh_fine(const Run &run, Quantize *quantize) {
  quantize->fine = run.slice.fine + weight_place(0, quantize->row % 4, 0);
  weigh(run, quantize, run.slice.weights);
}

// Add what rounding left of the weights of rows where it shows: few of them, so one after the other.
void add_left(const Run &run, Domain &domain, const Region &region, const Tile &tile, const float *most, const Share &share, Dot *dot) {
  Slice &slice = run.slice;
  for (uint32_t r = 0; r < run.rows; r++) {
    if (!shows(run, domain, r, *slice.weights, visible(tile, r, tile.from, tile.end), share)) continue;
    const float bound = most[r] * slice.largest[r], middle = -slice.weights->error[r] * middle_of(run, region);
    Quantize quantize = probabilities_of(run, r, 1, &bound, tile.from, tile.end);
    quantize.s = slice.scale + tile.from;
    quantize.doubt = nullptr;
    weigh_fine(run, &quantize);
    dot_region(run, region, *slice.weights, {slice.fine, r, &middle}, region.line, dot);
  }
}

void add_segment(const Run &run, Domain &domain, const TensorLayout &layout, uint32_t number, const Tile &tile) {
  Slice &slice = run.slice;
  const Segment &segment = layout.segments[number];
  const Region &region = layout.regions[segment.region];
  const float slots = float(segment.count);
  float most[kRows];
  const bool whole = sees_vectors(tile);
  largest_scales(run, tile, load_token_scalars(run, layout, region, tile.v_params, segment.param, tile), most);
  weigh_segment(run, region, slots, tile, most);
  Dot dot = place(run, domain.values[number], layout, region, tile, tile.from, tile.end);
  if (!region.table) dot.offset = slice.weights->offset;
  dot_region(run, region, *slice.weights, {}, region.line, &dot);
  const Share share{region.spread.usual * slots, region.spread.most * slots};
  if (!whole || any_shows(run, *slice.weights, float(tile.end - tile.from), share)) add_left(run, domain, region, tile, most, share, &dot);
}

void add_rows(const Run &run, Domain &domain, const TensorLayout &layout, const Tile &tile) {
  decode_value_codes(run, layout, tile);
  for (uint32_t i = 0; i < layout.segments.size(); i++) add_segment(run, domain, layout, i, tile);
}

// Slots without codes (width 0) are their zeros.
void add_zeros(const Run &run, Domain &domain, const TensorLayout &layout, const RowWeights &weights) {
  const uint32_t coded = layout.regions.empty() ? layout.dim : layout.regions.front().first;
  for (uint32_t r = 0; r < run.rows; r++)
    for (uint32_t c = 0; c < coded; c++) domain.out[size_t(r) * run.dims.output() + c] += weights.total[r] * run.slice.zero[c];
}

// Kitty's upper two bits: four times the scale of their channels.
void add_upper(const Run &run, Domain &domain, const TensorLayout &layout, const Region &region, const uint8_t *params,
               const Plane &plane, Dot dot) {
  Slice &slice = run.slice;
  const uint16_t *channel = boosted_channels(layout, params);
  const uint32_t first = plane.fine ? plane.row : 0, end = plane.fine ? first + 1 : run.rows;
  dot.out = slice.part;
  dot.out_stride = 256 + 16;
  dot.add = false;
  dot.bias = bias_of(run, region);
  if (plane.fine) {
    std::fill_n(slice.part + first * dot.out_stride, dot.lanes, 0.0f);
    dot_fine(run, *slice.weights, plane, 4.0f, dot);
  } else {
    dot_weighted(run, *slice.weights, 4.0f, &dot);
  }
  for (uint32_t r = first; r < end; r++)
    for (uint32_t i = 0; i < dot.lanes; i++)
      domain.out[size_t(r) * run.dims.output() + channel[i]] += slice.scale[channel[i]] * slice.part[r * dot.out_stride + i];
}

// The probabilities of tokens [first, end) alone, from the word of `first` on, as weights of rows.
void weigh_tokens(const Run &run, uint32_t row, uint32_t rows, uint32_t first, uint32_t end, bool fine) {
  const uint32_t from = first / 4 * 4, before = first - from;
  float *p = run.slice.logit + size_t(row) * kLogitStride + from, kept[kRows][4];
  for (uint32_t r = 0; r < rows; r++) {
    std::copy_n(p + r * kLogitStride, before, kept[r]);
    std::fill_n(p + r * kLogitStride, before, 0.0f);
  }
  Quantize quantize = probabilities_of(run, row, rows, run.slice.largest + row, from, end);
  RowWeights &weights = *run.slice.weights;
  fine ? weigh_fine(run, &quantize) : weigh(run, &quantize, &weights);
  for (uint32_t r = row; r < row + rows; r++) weights.power[r] = quantize.doubt ? weights.power[r] * run.slice.doubt_factor[r] : 0.0f;
  for (uint32_t r = 0; r < rows; r++) std::copy_n(kept[r], before, p + r * kLogitStride);
}

// The scales of a group multiply errors as they multiply codes.
Share doubt_group(const Run &run, const TensorLayout &layout, const uint8_t *params) {
  Slice &slice = run.slice;
  Share share{0, 0};
  std::copy_n(slice.zero, layout.dim, slice.middle);
  for (const Region &region : layout.regions) {
    const uint16_t *channel = region.upper ? boosted_channels(layout, params) : nullptr;
    const float factor = region.upper ? 4.0f : 1.0f, from_zero = factor * middle_of(run, region);
    float scales = 0;
    for (uint32_t i = 0; i < region.count; i++) {
      const uint32_t slot = channel ? channel[i] : region.first + i;
      slice.middle[slot] += slice.scale[slot] * from_zero;
      scales += slice.scale[slot] * slice.scale[slot];
    }
    share.usual += region.spread.usual * factor * factor * scales;
    share.most += region.spread.most * factor * factor * scales;
  }
  // One token may be far from all others, with codes at the end of their range.
  const float values = share.most + squares(run, slice.middle, layout.dim);
  const float zeros = kZeroShare * squares(run, slice.zero, layout.dim);
  for (uint32_t r = 0; r < run.rows; r++) {
    const float total = slice.weights->total[r];
    slice.doubt.sum[r] += slice.weights->power[r] * values + zeros * total * total;
  }
  return share;
}

// Scales of slots multiply what a group's tokens collected.
void add_group(const Run &run, Domain &domain, const TensorLayout &layout, const Tile &tile, const uint8_t *params, uint32_t first, uint32_t end,
               const Plane &plane) {
  for (const Region &region : layout.regions) {
    Product product = make_product(run, domain, layout, region, 0, region.count);
    product.dot.w = run.slice.w;
    Dot dot = place(run, product, layout, region, tile, first / 4 * 4, end);
    if (region.upper) {
      add_upper(run, domain, layout, region, params, plane, dot);
      continue;
    }
    dot.lane_scale = run.slice.scale + region.first;
    dot.lane_offset = run.slice.zero + region.first;
    dot.offset = run.slice.weights->total;
    dot_region(run, region, *run.slice.weights, plane, 0, &dot);
  }
}

void add_columns(const Run &run, Domain &domain, const TensorLayout &layout, const Tile &tile) {
  Slice &slice = run.slice;
  decode_value_codes(run, layout, tile);
  for_groups(layout, tile, [&](uint32_t group, uint32_t first, uint32_t end) {
    const uint8_t *params = tile.v_params + group * layout.group_stride;
    load_slot_params(run, layout, params);
    weigh_tokens(run, 0, run.rows, first, end, false);
    const Share share = doubt_group(run, layout, params);
    add_zeros(run, domain, layout, *slice.weights);
    add_group(run, domain, layout, tile, params, first, end, {});
    for (uint32_t r = 0; r < run.rows; r++) {
      if (!shows(run, domain, r, *slice.weights, visible(tile, r, first, end), share)) continue;
      weigh_tokens(run, r, 1, first, end, true);
      add_group(run, domain, layout, tile, params, first, end, {slice.fine, r});
    }
  });
}

// Values that were not quantized here carry the errors of their logits only.
void doubt_values(const Run &run, uint32_t token, float power) {
  for (uint32_t r = 0; r < run.rows; r++) {
    const float p = probabilities(run, r)[token];
    run.slice.doubt.sum[r] += p * p * power * doubtful(run, r)[token] * run.slice.doubt_factor[r];
  }
}

void add_decoded(const Run &run, Domain &domain, const TensorLayout &layout, const Tile &tile) {
  decode_value_codes(run, layout, tile);
  decode_values(run, domain.format->v[run.head], layout, tile.v_params, tile);
  for (uint32_t t = tile.first; run.slice.has_doubt && t < tile.end; t++)
    doubt_values(run, t, squares(run, run.slice.values + size_t(t) * layout.dim, layout.dim));
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
  for (uint32_t t = tile.first; run.slice.has_doubt && t < tile.end; t++) {
    run.kernels.halves_to_floats(reinterpret_cast<const uint16_t *>(tile.v) + size_t(t) * dim, dim, 1.0f, run.slice.values);
    doubt_values(run, t, squares(run, run.slice.values, dim));
  }
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
