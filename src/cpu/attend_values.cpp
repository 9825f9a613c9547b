// What the probabilities of a tile collect from its values.
#include <algorithm>
#include <cstring>

#include "cpu/attend.h"
#include "cpu/decode.h"

namespace kvq::cpu {
namespace {

const float *probabilities(const Run &run, uint32_t row) { return run.slice.logit + size_t(row) * kLogitStride; }

// The sum of (p * x)^2 * d^2 over tokens [first, end) of a row (doubt.h), x null standing for 1.
float power(const Run &run, uint32_t row, const float *x, uint32_t first, uint32_t end) {
  if (!run.slice.has_doubt) return 0;
  const float *doubtful = run.slice.doubtful + size_t(row) * kLogitStride;
  return run.kernels.power(probabilities(run, row) + first, x ? x + first : nullptr, doubtful + first, end - first);
}

// How many tokens of [first, end) a row sees.
float visible(const Tile &tile, uint32_t row, uint32_t first, uint32_t end) {
  const uint32_t low = std::max(tile.low[row], first), high = std::min(tile.high[row], end);
  return high > low ? float(high - low) : 0.0f;
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

// Squares of a tile's codes in the terms of a row's output, per square of the weights' errors (doubt.h).
struct Share {
  float usual, most;
};

// Whether the errors of a row's weights could show in what it has collected.
bool shows(const Run &run, const Domain &domain, uint32_t row, const RowWeights &weights, float tokens, const Share &share) {
  if (run.precise) return true;
  Doubt &doubt = run.slice.doubt[row];
  const float step = weights.scale[row], each = step * step * tokens / 12.0f;
  const float square = (each + weights.error[row] * weights.error[row]) * share.most;
  if (square > kTileShare * doubt.power) {
    const float *out = domain.out + size_t(row) * run.dims.output();
    doubt.power = run.kernels.dot_product(out, out, round16(domain.format->v[run.head].shape.dim));
  }
  if (square > kTileShare * doubt.power) return true;
  doubt.sum += double(each) * share.usual;
  doubt.tile = std::max(doubt.tile, square);
  return false;
}

// Token scalars go into the probabilities, zeros into one number per row.
void weigh_segment(const Run &run, const TensorLayout &layout, const Segment &segment, const Tile &tile, RowWeights *weights) {
  Slice &slice = run.slice;
  const Region &region = layout.regions[segment.region];
  const float slots = float(segment.count), middle = float(region.levels - 1) / 2;
  const uint32_t tokens = tile.end - tile.from;
  load_token_scalars(run, layout, region, tile.v_params, segment.param, tile);
  const float from_zero = middle - float(bias_of(run, region));
  for (uint32_t t = tile.from; !region.table && t < round16(tile.end); t++) slice.middle[t] = slice.zero[t] + slice.scale[t] * from_zero;
  for (uint32_t r = 0; r < run.rows; r++) {
    const float *p = probabilities(run, r) + tile.from;
    weigh(run, r, p, slice.scale + tile.from, tokens, slice.w + size_t(r) * run.dims.weights(), nullptr, weights);
    slice.doubt[r].sum += power(run, r, slice.scale, tile.from, tile.end) * region.spread.usual * slots;
    if (region.table) continue;
    weights->total[r] = run.kernels.dot_product(p, slice.zero + tile.from, tokens);
    slice.doubt[r].sum += (power(run, r, slice.middle, tile.from, tile.end) + kZeroShare * weights->total[r] * weights->total[r]) * slots;
  }
}

void add_rows(const Run &run, Domain &domain, const TensorLayout &layout, const Tile &tile) {
  Slice &slice = run.slice;
  RowWeights &weights = *slice.weights;
  decode_value_codes(run, layout, tile);
  for (const Segment &segment : layout.segments) {
    const Region &region = layout.regions[segment.region];
    weigh_segment(run, layout, segment, tile, &weights);
    Dot dot = value_dot(run, domain, region, tile.from, tile.end);
    dot.x = static_cast<const uint8_t *>(dot.x) + size_t(4) * (segment.first - region.first);
    dot.lanes = segment.count;
    dot.out = domain.out + segment.first;
    if (!region.table) dot.offset = weights.total;
    dot_region(run, region, weights, {}, region.line, dot);
    const Share share{region.spread.usual * float(segment.count), region.spread.most * float(segment.count)};
    for (uint32_t r = 0; r < run.rows; r++) {
      if (!shows(run, domain, r, weights, visible(tile, r, tile.from, tile.end), share)) continue;
      int16_t *w = slice.w + size_t(r) * run.dims.weights();
      weigh(run, r, probabilities(run, r) + tile.from, slice.scale + tile.from, tile.end - tile.from, w, slice.fine, &weights);
      dot_region(run, region, weights, {slice.fine, r}, region.line, dot);
    }
  }
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
  if (plane.fine) std::fill_n(slice.part + first * dot.out_stride, dot.lanes, 0.0f);
  dot_weighted(run, *slice.weights, plane, 4.0f, dot);
  for (uint32_t r = first; r < end; r++)
    for (uint32_t i = 0; i < dot.lanes; i++)
      domain.out[size_t(r) * run.dims.output() + channel[i]] += slice.scale[channel[i]] * slice.part[r * dot.out_stride + i];
}

// The probabilities of tokens [first, end) alone, from the word of `first` on, as weights of a row.
void weigh_tokens(const Run &run, uint32_t row, uint32_t first, uint32_t end, int16_t *fine) {
  const uint32_t from = first / 4 * 4;
  float *line = run.slice.line;
  std::fill_n(line, 4, 0.0f);
  std::copy(probabilities(run, row) + first, probabilities(run, row) + end, line + (first - from));
  weigh(run, row, line, nullptr, end - from, run.slice.w + size_t(row) * run.dims.weights(), fine, run.slice.weights);
  float total = 0;
  for (uint32_t t = first - from; t < end - from; t++) total += line[t];
  run.slice.weights->total[row] = total;
}

// The scales of a group multiply errors as they multiply codes.
Share doubt_group(const Run &run, const TensorLayout &layout, const uint8_t *params, uint32_t first, uint32_t end) {
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
  const float values = share.usual + squares(run, slice.middle, layout.dim);
  const float zeros = kZeroShare * squares(run, slice.zero, layout.dim);
  for (uint32_t r = 0; r < run.rows; r++) {
    const float total = slice.weights->total[r];
    slice.doubt[r].sum += power(run, r, nullptr, first, end) * values + zeros * total * total;
  }
  return share;
}

// Scales of slots multiply what a group's tokens collected.
void add_group(const Run &run, Domain &domain, const TensorLayout &layout, const uint8_t *params, uint32_t first, uint32_t end,
               const Plane &plane) {
  for (const Region &region : layout.regions) {
    Dot dot = value_dot(run, domain, region, first / 4 * 4, end);
    if (region.upper) {
      add_upper(run, domain, layout, region, params, plane, dot);
      continue;
    }
    dot.lane_scale = run.slice.scale + region.first;
    dot.lane_offset = run.slice.zero + region.first;
    dot.offset = run.slice.weights->total;
    dot_region(run, region, *run.slice.weights, plane, 0, dot);
  }
}

void add_columns(const Run &run, Domain &domain, const TensorLayout &layout, const Tile &tile) {
  Slice &slice = run.slice;
  decode_value_codes(run, layout, tile);
  for_groups(layout, tile, [&](uint32_t group, uint32_t first, uint32_t end) {
    const uint8_t *params = tile.v_params + group * layout.group_stride;
    load_slot_params(run, layout, params);
    for (uint32_t r = 0; r < run.rows; r++) weigh_tokens(run, r, first, end, nullptr);
    const Share share = doubt_group(run, layout, params, first, end);
    add_zeros(run, domain, layout, *slice.weights);
    add_group(run, domain, layout, params, first, end, {});
    for (uint32_t r = 0; r < run.rows; r++) {
      if (!shows(run, domain, r, *slice.weights, visible(tile, r, first, end), share)) continue;
      weigh_tokens(run, r, first, end, slice.fine);
      add_group(run, domain, layout, params, first, end, {slice.fine, r});
    }
  });
}

// Values that were not quantized here carry the errors of their logits only.
void doubt_values(const Run &run, uint32_t token, float power) {
  for (uint32_t r = 0; r < run.rows; r++) {
    const float p = probabilities(run, r)[token];
    run.slice.doubt[r].sum += p * p * power * run.slice.doubtful[size_t(r) * kLogitStride + token];
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
