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

// The probabilities of tokens [first, end) of rows as weights, none of which is above its bound (of deferred ones: of s).
void weigh_probabilities(const Run &run, uint32_t row, uint32_t rows, const float *s, const float *bound, uint32_t first, uint32_t end,
                         int16_t *fine, RowWeights *weights) {
  Quantize quantize{};
  quantize.x = probabilities(run, row) + first;
  quantize.x_stride = kLogitStride;
  quantize.doubt_stride = run.slice.doubt_stride;
  quantize.s = s;
  quantize.n = end - first;
  quantize.row = row;
  quantize.rows = rows;
  quantize.w = run.slice.w;
  quantize.fine = fine;
  quantize.bound = run.precise ? nullptr : bound;
  if (run.slice.has_doubt) quantize.doubt = doubtful(run, row) + first;
  float sums[kRows];
  if (run.slice.deferred) {
    quantize.reference = run.slice.reference;
    quantize.most = run.slice.most;
    quantize.exponentials = sums;
    quantize.largest = run.slice.largest;
  }
  weigh(run, &quantize, weights);
  for (uint32_t r = row; run.slice.has_doubt && r < row + rows; r++) weights->power[r] *= run.slice.doubt_factor[r];
  for (uint32_t r = 0; run.slice.deferred && r < rows; r++) run.slice.denominator[r] += sums[r];
  run.slice.deferred = false;
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
};

// Whether the errors of a row's weights could show in what it has collected.
inline bool shows(const Run &run, const Domain &domain, uint32_t row, const RowWeights &weights, float tokens, const Share &share) {
  if (run.precise) return true;
  Doubt &doubt = run.slice.doubt[row];
  const float step = weights.scale[row], each = step * step * tokens / 12.0f;
  const float square = (each + weights.error[row] * weights.error[row]) * share.most;
  if (square > kTileShare * doubt.power) {
    const float *out = domain.out + size_t(row) * run.dims.output();
    doubt.power = run.kernels.dot_product(out, out, round16(domain.format->v[run.head].shape.dim));
  }
  if (square > kTileShare * doubt.power) {
    doubt.sum += double(each) * share.most / (kFineSteps * kFineSteps);
    return true;
  }
  doubt.sum += double(each) * share.usual;
  doubt.tile = std::max(doubt.tile, square);
  return false;
}

// Token scalars go into the probabilities, zeros into one number per row.
void weigh_zeros(const Run &run, const Region &region, float slots, const Tile &tile, RowWeights *weights) {
  Slice &slice = run.slice;
  const float middle = float(region.levels - 1) / 2 - float(bias_of(run, region));
  const uint32_t tokens = tile.end - tile.from;
  for (uint32_t t = tile.from; t < round16(tile.end); t++) slice.middle[t] = slice.zero[t] + slice.scale[t] * middle;
  for (uint32_t r = 0; r < run.rows; r++) {
    const float *p = probabilities(run, r) + tile.from;
    const float total = run.kernels.dot_product(p, slice.zero + tile.from, tokens);
    weights->offset[r] = total;
    slice.doubt[r].sum += kZeroShare * total * total * slots;
    if (slice.has_doubt)
      slice.doubt[r].sum += run.kernels.power(p, slice.middle + tile.from, doubtful(run, r) + tile.from, tokens) * slots * slice.doubt_factor[r];
  }
}

void add_segment(const Run &run, Domain &domain, const TensorLayout &layout, uint32_t number, const Tile &tile) {
  Slice &slice = run.slice;
  RowWeights &weights = *slice.weights;
  const Segment &segment = layout.segments[number];
  const Region &region = layout.regions[segment.region];
  const float slots = float(segment.count), *scale = slice.scale + tile.from;
  float bound[kRows], most = load_token_scalars(run, layout, region, tile.v_params, segment.param, tile);
  const bool deferred = slice.deferred;
  for (uint32_t r = 0; r < run.rows; r++) {
    if (!sees_vectors(tile)) most = largest_scale(run, tile, r, most);
    bound[r] = deferred ? most : most * slice.largest[r];
  }
  weigh_probabilities(run, 0, run.rows, scale, bound, tile.from, tile.end, nullptr, &weights);
  for (uint32_t r = 0; deferred && r < run.rows; r++) bound[r] *= slice.largest[r];
  if (!region.table) weigh_zeros(run, region, slots, tile, &weights);
  Dot dot = place(run, domain.values[number], layout, region, tile, tile.from, tile.end);
  if (!region.table) dot.offset = weights.offset;
  dot_region(run, region, weights, {}, region.line, &dot);
  const Share share{region.spread.usual * slots, region.spread.most * slots};
  for (uint32_t r = 0; r < run.rows; r++) {
    slice.doubt[r].sum += weights.power[r] * region.spread.usual * slots;
    if (!shows(run, domain, r, weights, visible(tile, r, tile.from, tile.end), share)) continue;
    weigh_probabilities(run, r, 1, scale, bound + r, tile.from, tile.end, slice.fine, &weights);
    dot_region(run, region, weights, {slice.fine, r}, region.line, &dot);
  }
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
void weigh_tokens(const Run &run, uint32_t row, uint32_t rows, uint32_t first, uint32_t end, int16_t *fine) {
  const uint32_t from = first / 4 * 4, before = first - from;
  float *p = run.slice.logit + size_t(row) * kLogitStride + from, kept[kRows][4];
  for (uint32_t r = 0; r < rows; r++) {
    std::copy_n(p + r * kLogitStride, before, kept[r]);
    std::fill_n(p + r * kLogitStride, before, 0.0f);
  }
  weigh_probabilities(run, row, rows, nullptr, run.slice.largest + row, from, end, fine, run.slice.weights);
  for (uint32_t r = 0; r < rows; r++) std::copy_n(kept[r], before, p + r * kLogitStride);
}

// The scales of a group multiply errors as they multiply codes.
Share doubt_group(const Run &run, const TensorLayout &layout, const uint8_t *params) {
  Slice &slice = run.slice;
  Share share{0, 0};
  std::copy_n(slice.zero, layout.dim, slice.middle);
  for (const Region &region : layout.regions) {
    const uint16_t *channel = region.upper ? boosted_channels(layout, params) : nullptr;
    const float factor = region.upper ? 4.0f : 1.0f, from_zero = factor * (float(region.levels - 1) / 2 - float(bias_of(run, region)));
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
    slice.doubt[r].sum += slice.weights->power[r] * values + zeros * total * total;
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
    weigh_tokens(run, 0, run.rows, first, end, nullptr);
    const Share share = doubt_group(run, layout, params);
    add_zeros(run, domain, layout, *slice.weights);
    add_group(run, domain, layout, tile, params, first, end, {});
    for (uint32_t r = 0; r < run.rows; r++) {
      if (!shows(run, domain, r, *slice.weights, visible(tile, r, first, end), share)) continue;
      weigh_tokens(run, r, 1, first, end, slice.fine);
      add_group(run, domain, layout, tile, params, first, end, {slice.fine, r});
    }
  });
}

// Values that were not quantized here carry the errors of their logits only.
void doubt_values(const Run &run, uint32_t token, float power) {
  for (uint32_t r = 0; r < run.rows; r++) {
    const float p = probabilities(run, r)[token];
    run.slice.doubt[r].sum += p * p * power * doubtful(run, r)[token] * run.slice.doubt_factor[r];
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
