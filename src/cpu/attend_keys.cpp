// Logits of a tile.
#include <algorithm>
#include <cstring>

#include "cpu/attend.h"
#include "cpu/decode.h"

namespace kvq::cpu {
namespace {

// The keys of a tile as words of four slots: [quad][token].
void decode_keys(const Run &run, const TensorLayout &layout, const Tile &tile) {
  const uint32_t tokens = layout.tile_tokens;
  for (const Region &region : layout.regions) {
    if (reads_planes(run, region, layout, tile)) continue;
    const uint32_t whole = region.count / 4, rest = region.count % 4;
    for (uint32_t high = 0; high < (region.table && region.table->wide ? 2u : 1u); high++) {
      uint8_t *codes = run.slice.codes + size_t(region.quad + high * (whole + (rest != 0))) * tokens * 4;
      decode_region(run, region, tile.k, tile.shared, high, codes);
      if (rest) widen_rest(codes + size_t(whole) * tokens * 4, tokens, rest);
    }
  }
}

// A product with tokens [first, end); with all of a vector's where the planes are read.
Dot place(const Run &run, const Product &product, const TensorLayout &layout, const Region &region, const Tile &tile, uint32_t first,
          uint32_t end) {
  Dot dot = product.dot;
  if (reads_planes(run, region, layout, tile)) {
    first = first / 64 * 64, end = (end + 63) / 64 * 64;
    dot.planes.at = tile.k + product.offset;
    dot.planes.shared = tile.shared;
    dot.planes.vector = first / 16;
  } else {
    dot.x = static_cast<const uint8_t *>(dot.x) + first * 4;
  }
  dot.lanes = end - first;
  dot.out += first;
  return dot;
}

constexpr float kOnes[kRows] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};

// `all`: what load_token_scalars() returned.
void doubt_rows(const Run &run, const RowWeights &weights, uint32_t segment, uint32_t segments, float all, const Tile &tile) {
  Slice &slice = run.slice;
  const bool only = segments == 1;
  float most[kRows];
  largest_scales(run, tile, all, most);
  for (uint32_t r = 0; r < run.rows; r += 4) {
    const Four before = segment ? four_of(slice.peak + r) : Four{}, scale = four_of(most + r);
    set_four(slice.peak + r, before + four_of(weights.doubt + r) * scale * scale);
  }
  slice.has_doubt = true;
  slice.doubt_factor = only ? weights.doubt : kOnes;
  slice.doubt_stride = only ? 0 : kLogitStride;
  run.kernels.add_squares(slice.scale + tile.from, tile.end - tile.from, only ? kOnes : weights.doubt, only ? 1 : run.rows, segment > 0,
                          slice.doubtful + tile.from, kLogitStride);
}

void logits_of_rows(const Run &run, const Domain &domain, const TensorLayout &layout, const Tile &tile) {
  decode_keys(run, layout, tile);
  const uint32_t segments = uint32_t(layout.segments.size());
  for (uint32_t i = 0; i < segments; i++) {
    const Segment &segment = layout.segments[i];
    const Region &region = layout.regions[segment.region];
    const RowWeights &weights = domain.segment[i];
    const float most = load_token_scalars(run, layout, region, tile.k_params, segment.param, tile);
    Dot dot = place(run, domain.keys[i], layout, region, tile, tile.from, tile.end);
    const size_t from = size_t(dot.out - run.slice.logit);
    dot.lane_scale = run.slice.scale + from;
    if (!region.table) dot.offset = weights.total, dot.lane_offset = run.slice.zero + from;
    dot.add = i > 0;
    const size_t array = size_t((region.count + 3) / 4) * dot.stride;
    dot_region(run, region, weights, {}, array, &dot);
    if (run.precise) dot_region(run, region, weights, {domain.fine + weight_place(0, 0, region.quad + (segment.first - region.first) / 4), 0}, array, &dot);
    doubt_rows(run, weights, i, segments, most, tile);
  }
}

// Weights of all rows for `count` slots from `quad` on.
void weigh_slots(const Run &run, Quantize *quantize, uint32_t quad, uint32_t count, RowWeights *weights) {
  quantize->n = count;
  quantize->rows = run.rows;
  quantize->w = run.slice.w + weight_place(0, 0, quad);
  if (run.precise) quantize->fine = run.slice.fine + weight_place(0, 0, quad);
  weigh(run, quantize, weights);
}

void weigh_regions(const Run &run, Domain &domain, const TensorLayout &layout, const uint8_t *params, float *totals) {
  Slice &slice = run.slice;
  load_slot_params(run, layout, params);
  line_up(layout, params, slice.scale, 4.0f, slice.line);
  for (uint32_t r = 0; r < run.rows; r++) {
    const float *query = domain.query + size_t(r) * run.dims.query();
    if (layout.boosted) line_up_upper(layout, params, query, domain.lined + size_t(r) * run.dims.weights());
    totals[r] = run.kernels.dot_product(query, slice.zero, layout.dim);
  }
  for (uint32_t i = 0; i < layout.regions.size(); i++) {
    const Region &region = layout.regions[i];
    Quantize quantize{};
    quantize.x = domain.lined + region.quad * 4;
    quantize.x_stride = run.dims.weights();
    quantize.s = slice.line + region.quad * 4;
    weigh_slots(run, &quantize, region.quad, region.count, &slice.weights[i]);
  }
}

// All regions at once: their slots lie in the order of the decoded tile, behind those without codes.
void weigh_line(const Run &run, const Domain &domain, const TensorLayout &layout, const uint8_t *params, float *totals) {
  Slice &slice = run.slice;
  RowWeights *weights = slice.weights;
  const uint32_t first = layout.regions.front().first;
  load_slots(run, layout, params);
  Quantize quantize{};
  quantize.x = domain.query + first;
  quantize.x_stride = run.dims.query();
  quantize.s = slice.scale + first;
  quantize.zero = slice.zero + first;
  quantize.ends = layout.ends.data();
  quantize.span_stride = sizeof(RowWeights) / sizeof(int32_t);
  weigh_slots(run, &quantize, 0, layout.ends.back(), weights);
  for (uint32_t r = 0; r < run.rows; r++) {
    totals[r] = first ? run.kernels.dot_product(domain.query + size_t(r) * run.dims.query(), slice.zero, first) : 0.0f;
    for (uint32_t i = 0; i < layout.regions.size(); i++) totals[r] += weights[i].offset[r] + float(layout.regions[i].bias) * weights[i].total[r];
  }
}

// Scales of a group's slots go into the query once per group, zeros into one number.
void weigh_group(const Run &run, Domain &domain, const TensorLayout &layout, const uint8_t *params, float *totals) {
  if (run.precise || layout.ends.empty()) return weigh_regions(run, domain, layout, params, totals);
  weigh_line(run, domain, layout, params, totals);
}

// Every group has weights of its own; the scales are in them.
void doubt_group(const Run &run, const TensorLayout &layout, uint32_t first, uint32_t end, const Tile &tile) {
  Slice &slice = run.slice;
  const bool only = first == tile.first && end == tile.end;
  for (uint32_t r = 0; r < run.rows; r++) {
    float sum = 0;
    for (uint32_t i = 0; i < layout.regions.size(); i++)
      sum += doubt_of(run, slice.weights[i].scale[r], layout.regions[i], layout.regions[i].count);
    slice.group_doubt[r] = only ? sum : 1.0f;
    if (!only || r == 0) std::fill_n(slice.doubtful + size_t(r) * kLogitStride + first, end - first, only ? 1.0f : sum);
    if (!slice.has_doubt) slice.peak[r] = 0;
    if (std::max(tile.low(r), first) < std::min(tile.high(r), end)) slice.peak[r] = std::max(slice.peak[r], sum);
  }
  slice.doubt_factor = slice.group_doubt;
  slice.doubt_stride = only ? 0 : kLogitStride;
  slice.has_doubt = true;
}

void logits_of_columns(const Run &run, Domain &domain, const TensorLayout &layout, const Tile &tile) {
  decode_keys(run, layout, tile);
  for_groups(layout, tile, [&](uint32_t group, uint32_t first, uint32_t end) {
    float totals[kRows];
    weigh_group(run, domain, layout, tile.k_params + group * layout.group_stride, totals);
    doubt_group(run, layout, first, end, tile);
    for (uint32_t r = 0; layout.regions.empty() && r < run.rows; r++)
      std::fill_n(run.slice.logit + size_t(r) * kLogitStride + first, end - first, totals[r]);
    for (uint32_t i = 0; i < layout.regions.size(); i++) {
      const Region &region = layout.regions[i];
      Dot dot = place(run, domain.keys[i], layout, region, tile, first, end);
      if (i == 0) dot.offset = totals;
      dot.add = i > 0;
      dot_region(run, region, run.slice.weights[i], {}, 0, &dot);
      if (run.precise) dot_region(run, region, run.slice.weights[i], {run.slice.fine + weight_place(0, 0, region.quad), 0}, 0, &dot);
    }
  });
}

void logits_of_values(const Run &run, const Domain &domain, const TensorLayout &layout, const Tile &tile) {
  decode_keys(run, layout, tile);
  decode_values(run, domain.format->k[run.head], layout, tile.k_params, tile);
  Dot dot{};
  dot.x = run.slice.values + tile.from;
  dot.stride = size_t(4) * layout.tile_tokens;
  dot.depth = layout.dim;
  dot.lanes = tile.end - tile.from;
  dot.rows = run.rows;
  dot.w = domain.query;
  dot.w_stride = run.dims.query();
  dot.out = run.slice.logit + tile.from;
  dot.out_stride = kLogitStride;
  dot.prefetch = &run.slice.prefetch;
  run.kernels.dot_floats(dot);
}

}  // namespace

void raw_logits(const Run &run, uint32_t dim, uint32_t tokens, const float *query, const Tile &tile) {
  Dot dot{};
  dot.x = tile.k + 2 * tile.from;
  dot.stride = size_t(2) * tokens;
  dot.depth = dim;
  dot.lanes = tile.end - tile.from;
  dot.rows = run.rows;
  dot.w = query;
  dot.w_stride = run.dims.query();
  dot.out = run.slice.logit + tile.from;
  dot.out_stride = kLogitStride;
  dot.prefetch = &run.slice.prefetch;
  run.kernels.dot_halves(dot);
}

void key_logits(const Run &run, Domain &domain, const Tile &tile) {
  const TensorLayout &layout = domain.format->layout(run.head, KVQ_TENSOR_K);
  run.slice.has_doubt = false;
  switch (layout.family) {
    case Family::rows:
      logits_of_rows(run, domain, layout, tile);
      break;
    case Family::columns:
      logits_of_columns(run, domain, layout, tile);
      break;
    case Family::halves:
      raw_logits(run, layout.dim, layout.tile_tokens, domain.query, tile);
      break;
    case Family::values:
      logits_of_values(run, domain, layout, tile);
      break;
  }
  if (domain.format->k[run.head].mu.empty()) return;
  for (uint32_t r = 0; r < run.rows; r++)
    for (uint32_t t = tile.from; t < tile.end; t++) run.slice.logit[size_t(r) * kLogitStride + t] += domain.constant[r];
}

}  // namespace kvq::cpu
