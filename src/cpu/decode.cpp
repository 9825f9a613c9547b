#include "cpu/decode.h"

#include <cstring>

namespace kvq::cpu {
namespace {

// `n` stored parameters to floats, times a factor; up to the next multiple of 16 is read and written.  The largest of these.
float load_params(const Run &run, const TensorLayout &layout, const uint8_t *stored, uint32_t n, float factor, float *out) {
  if (layout.param_bytes == 2) {
    return run.kernels.halves_to_floats(reinterpret_cast<const uint16_t *>(stored), n, factor, out);
  }
  const float *table = layout.group ? run.tables.e4m3 : run.tables.e5m3;  // columns have e4m3, rows e5m3
  for (uint32_t i = 0; i < n; i++) out[i] = table[stored[i]] * factor;
  return n % 16 ? 0.0f : run.kernels.maximum(out, n);
}

}  // namespace

void decode_region(const Run &run, const Region &region, const uint8_t *planes, const uint8_t *shared, uint32_t high, uint8_t *codes) {
  const uint8_t *table = !region.table ? nullptr : high ? region.table->high
                                                        : region.table->low;
  run.kernels.unpack(region.packing, planes + region.offset, shared, table, codes);
}

Product make_product(const Run &run, const Domain &domain, const TensorLayout &layout, const Region &region, uint32_t slot, uint32_t slots) {
  Product product{};
  Dot &dot = product.dot;
  dot.rows = run.rows;
  dot.w_stride = run.dims.weights();
  dot.sum_stride = RowWeights::kSpans;
  dot.prefetch = &run.slice.prefetch;
  dot.out = layout.keys ? run.slice.logit : domain.out + region.first + slot;
  dot.out_stride = layout.keys ? kLogitStride : run.dims.output();
  dot.add = !layout.keys;
  product.offset = region.offset + (layout.keys ? planes_before(region, slot / 4) : 0);
  dot.planes = {nullptr, nullptr, region.table ? region.table->low : nullptr, &region.packing, region.across, layout.keys ? 0 : slot / 16};
  dot.stride = size_t(4) * (layout.keys ? layout.tile_tokens : region.count);
  dot.x = run.slice.codes + (layout.keys ? (region.quad + slot / 4) * dot.stride : region.byte + size_t(4) * slot);
  (layout.keys ? dot.depth : dot.lanes) = layout.keys ? (slots + 3) / 4 : slots;
  return product;
}

void widen_rest(uint8_t *codes, uint32_t tokens, uint32_t rest) {
  for (uint32_t t = tokens; t-- > 0;) {  // backwards: words never pass the codes that are still to be read
    uint8_t word[4] = {};
    for (uint32_t i = 0; i < rest; i++) word[kByte[i]] = codes[t * rest + i];
    std::memcpy(codes + t * 4, word, 4);
  }
}

void decode_value_codes(const Run &run, const TensorLayout &layout, const Tile &tile) {
  for (const Region &region : layout.regions) {
    if (reads_planes(run, region, layout, tile)) continue;
    uint8_t *codes = run.slice.codes + region.byte;
    decode_region(run, region, tile.v, tile.shared, 0, codes);
    if (region.table && region.table->wide) decode_region(run, region, tile.v, tile.shared, 1, codes + region.line);
  }
}

float load_token_params(const Run &run, const TensorLayout &layout, const uint8_t *params, uint32_t param, const Tile &tile,
                        float factor, float *out) {
  const size_t first = size_t(param) * layout.page_tokens + tile.start + tile.from;
  const float most = load_params(run, layout, params + first * layout.param_bytes, tile.end - tile.from, factor, out + tile.from);
  for (uint32_t t = tile.end; t % 16; t++) out[t] = 0.0f;
  return most;
}

float load_token_scalars(const Run &run, const TensorLayout &layout, const Region &region, const uint8_t *params, uint32_t param,
                         const Tile &tile) {
  float *scale = run.slice.scale, *zero = run.slice.zero;
  const float most = load_token_params(run, layout, params, param, tile, region.scale, scale);
  if (region.table) return most;
  load_token_params(run, layout, params, param + 1, tile, 1.0f, zero);
  run.kernels.add_scaled(scale + tile.from, tile.end - tile.from, float(bias_of(run, region)), zero + tile.from);
  return most;
}

void load_slots(const Run &run, const TensorLayout &layout, const uint8_t *params) {
  load_params(run, layout, params, layout.dim, 1.0f, run.slice.scale);
  load_params(run, layout, params + size_t(layout.dim) * layout.param_bytes, layout.dim, 1.0f, run.slice.zero);
}

void load_slot_params(const Run &run, const TensorLayout &layout, const uint8_t *params) {
  load_slots(run, layout, params);
  for (const Region &region : layout.regions) {
    float *zero = run.slice.zero + region.first;
    const float *scale = run.slice.scale + region.first, bias = float(bias_of(run, region));
    if (!region.upper) {
      run.kernels.add_scaled(scale, region.count, bias, zero);
      continue;
    }
    const uint16_t *channel = boosted_channels(layout, params);
    for (uint32_t i = 0; i < region.count; i++) zero[channel[i]] += 4.0f * bias * scale[channel[i]];
  }
  for (uint32_t c = layout.dim; c % 16; c++) run.slice.scale[c] = run.slice.zero[c] = 0.0f;
}

const uint16_t *boosted_channels(const TensorLayout &layout, const uint8_t *params) {
  return reinterpret_cast<const uint16_t *>(params + size_t(2) * layout.dim * layout.param_bytes);
}

void line_up_upper(const TensorLayout &layout, const uint8_t *params, const float *slots, float *line) {
  const Region &upper = layout.regions.back();
  const uint16_t *channel = boosted_channels(layout, params);
  for (uint32_t i = 0; i < upper.count; i++) line[upper.quad * 4 + i] = slots[channel[i]];
}

void line_up(const TensorLayout &layout, const uint8_t *params, const float *slots, float upper, float *line) {
  for (const Region &region : layout.regions) {
    float *to = line + region.quad * 4;
    if (region.upper && params) {
      line_up_upper(layout, params, slots, line);
      for (uint32_t i = 0; i < region.count; i++) to[i] *= upper;
    } else if (!region.upper) {
      std::copy_n(slots + region.first, region.count, to);
    }
  }
}

void weigh(const Run &run, Quantize *quantize, RowWeights *weights) {
  const uint32_t row = quantize->row;
  quantize->w_stride = run.dims.weights();
  quantize->sum = weights->sum[row];
  quantize->sum_stride = RowWeights::kSpans;
  quantize->fine_sum = weights->fine_sum[row % 4];
  quantize->scale = weights->scale + row;
  quantize->error = weights->error + row;
  quantize->power = weights->power + row;
  quantize->total = weights->total + row;
  quantize->zeros = weights->offset + row;
  run.kernels.quantize(*quantize);
}

float squares(const Run &run, const float *x, uint32_t n) {
  float sum = n >= 16 ? run.kernels.dot_product(x, x, n / 16 * 16) : 0.0f;
  for (uint32_t i = n / 16 * 16; i < n; i++) sum += x[i] * x[i];
  return sum;
}

float largest(const Run &run, const float *x, uint32_t n) {
  float most = n >= 16 ? run.kernels.maximum(x, n / 16 * 16) : 0.0f;
  for (uint32_t i = n / 16 * 16; i < n; i++) most = std::max(most, x[i]);
  return most;
}

void largest_scales(const Run &run, const Tile &tile, float all, float *most) {
  std::fill_n(most, kRows, all);
  for (uint32_t r = 0; r < run.rows && !sees_vectors(tile); r++) {
    const uint32_t low = tile.low(r), high = tile.high(r);
    if (r > 0 && low == tile.low(r - 1) && high == tile.high(r - 1))
      most[r] = most[r - 1];
    else
      most[r] = low < high ? largest(run, run.slice.scale + low, high - low) : 0.0f;
  }
}

static void dot_any(const Run &run, const Dot &dot) { dot.planes.at ? run.kernels.dot_planes(dot) : run.kernels.dot_codes(dot); }

void dot_weighted(const Run &run, const RowWeights &weights, float factor, Dot *dot) {
  float scale[kRows];
  for (uint32_t r = 0; factor != 1 && r < run.rows; r++) scale[r] = weights.scale[r] * factor;
  dot->scale = factor == 1 ? weights.scale : scale;
  dot->sum = weights.sum[0];
  dot_any(run, *dot);
}

void dot_fine(const Run &run, const RowWeights &weights, const Plane &plane, float factor, const Dot &all) {
  const uint32_t first = plane.row % 4;
  const float scale = weights.scale[plane.row] * factor / kFineSteps;
  Dot dot = all;
  dot.rows = 1;
  dot.w = plane.fine + weight_place(0, first, 0);
  dot.scale = &scale;
  dot.sum = weights.fine_sum[first];
  dot.out += plane.row * dot.out_stride;
  dot.offset = plane.offset;
  dot.add = true;
  dot_any(run, dot);
}

void dot_region(const Run &run, const Region &region, const RowWeights &weights, const Plane &plane, size_t array, Dot *dot) {
  const auto go = [&](float factor) {
    if (plane.fine)
      dot_fine(run, weights, plane, factor, *dot);
    else
      dot_weighted(run, weights, factor, dot);
  };
  const bool wide = region.table && region.table->wide;
  dot->bias = wide ? 0 : bias_of(run, region);
  go(1.0f);
  if (!wide) return;
  const void *low = dot->x;
  dot->x = static_cast<const uint8_t *>(low) + array;
  dot->bias = bias_of(run, region);
  dot->add = true;
  dot->offset = nullptr;
  go(256.0f);
  dot->x = low;
}

// ---- decoded values

namespace {

// Where the code of (slot, token) lies: word `word(slot, 0)` and on, in which byte.
struct Place {
  const uint8_t *words;
  uint32_t byte;
};

Place key_place(const Run &run, const TensorLayout &layout, const Region &region, uint32_t slot) {
  const uint32_t i = slot - region.first;
  return {run.slice.codes + size_t(region.quad + i / 4) * layout.tile_tokens * 4, kByte[i % 4]};
}

Place value_place(const Run &run, const Region &region, uint32_t token) {
  return {run.slice.codes + region.byte + size_t(token / 4) * region.count * 4, kByte[token % 4]};
}

// Polar: every slot of a group has its scale and zero.
void column_values(const Run &run, const TensorLayout &layout, const uint8_t *params, const Tile &tile) {
  Slice &slice = run.slice;
  for_groups(layout, tile, [&](uint32_t group, uint32_t first, uint32_t end) {
    load_slot_params(run, layout, params + group * layout.group_stride);
    for (const Region &region : layout.regions) {
      for (uint32_t slot = region.first; layout.keys && slot < region.first + region.count; slot++) {
        const Place at = key_place(run, layout, region, slot);
        float *out = slice.values + size_t(slot) * layout.tile_tokens + first;
        run.kernels.expand(at.words + first * 4, at.byte, end - first, slice.scale + slot, slice.zero + slot, 0, out);
      }
      for (uint32_t t = first; !layout.keys && t < end; t++) {
        const Place at = value_place(run, region, t);
        float *out = slice.values + size_t(t) * layout.dim + region.first;
        run.kernels.expand(at.words, at.byte, region.count, slice.scale + region.first, slice.zero + region.first, 1, out);
      }
    }
  });
}

void to_channels(const Run &run, const TensorLayout &layout, const Tile &tile) {
  const uint32_t pairs = layout.dim / 2, tokens = layout.tile_tokens;
  float *values = run.slice.values;
  for (uint32_t p = 0; layout.keys && p < pairs; p++)
    run.kernels.polar(values + size_t(p) * tokens + tile.first, values + size_t(pairs + p) * tokens + tile.first,
                      tile.end - tile.first);
  for (uint32_t t = tile.first; !layout.keys && t < tile.end; t++)
    run.kernels.polar(values + size_t(t) * layout.dim, values + size_t(t) * layout.dim + pairs, pairs);
}

// Affine rows of small groups: every token and group has its scale and zero.
void row_values(const Run &run, const HeadFormat &format, const TensorLayout &layout, const uint8_t *params, const Tile &tile) {
  Slice &slice = run.slice;
  const Region &region = layout.regions[0];
  const uint32_t group = format.codec.group;
  for (uint32_t first = 0; first < layout.dim; first += group) {
    const uint32_t param = first / group * 2;
    load_token_scalars(run, layout, region, params, param, tile);
    for (uint32_t slot = first; layout.keys && slot < first + group; slot++) {
      const Place at = key_place(run, layout, region, slot);
      run.kernels.expand(at.words + tile.first * 4, at.byte, tile.end - tile.first, slice.scale + tile.first,
                         slice.zero + tile.first, 1, slice.values + size_t(slot) * layout.tile_tokens + tile.first);
    }
    for (uint32_t t = tile.first; !layout.keys && t < tile.end; t++) {
      const Place at = value_place(run, region, t);
      run.kernels.expand(at.words + first * 4, at.byte, group, slice.scale + t, slice.zero + t, 0,
                         slice.values + size_t(t) * layout.dim + first);
    }
  }
}

}  // namespace

void decode_values(const Run &run, const HeadFormat &format, const TensorLayout &layout, const uint8_t *params, const Tile &tile) {
  if (layout.group == 0) return row_values(run, format, layout, params, tile);
  column_values(run, layout, params, tile);
  to_channels(run, layout, tile);
}

}  // namespace kvq::cpu
