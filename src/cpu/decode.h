// Pieces that keys and values share: tiles to codes or floats, parameters to lanes, weighted dot products.
#pragma once
#include <algorithm>

#include "cpu/attend.h"

namespace kvq::cpu {

// The line of a region, as codes or as the low (high = 0) or high byte of its book's levels.
void decode_region(const Run &run, const Region &region, const uint8_t *planes, const uint8_t *shared, uint32_t high, uint8_t *codes);
// The last 1 to 3 slots of keys, [token][rest], to words with zeros, in place.
void widen_rest(uint8_t *codes, uint32_t tokens, uint32_t rest);
// Whether dot products read the planes of a region: not for so many rows that decoding it once costs less, and not from the middle of the
// fields that values of several tokens share.
inline bool reads_planes(const Run &run, const Region &region, const TensorLayout &layout, const Tile &tile) {
  if (!region.across || !run.kernels.dot_planes) return false;
  if (region.table && region.table->levels > run.kernels.mapped) return false;
  const uint32_t digits = kSchemeTable[region.packing.scheme].digits;
  if (digits == 1) return run.rows <= run.kernels.planes_rows;
  const uint32_t most = region.line <= kNearBytes ? run.kernels.near_rows : run.kernels.digits_rows;
  return run.rows <= most && (layout.keys || (tile.from == 0 && tile.end == layout.tile_tokens));
}
// Bytes of its planes before quad `quad`.
inline size_t planes_before(const Region &region, uint32_t quad) {
  const Scheme &scheme = kSchemeTable[region.packing.scheme];
  return size_t(quad) * region.across / scheme.fields * scheme.planes * 64;
}
// What dot products of `slots` slots of a region, the first of which is number `slot`, have in common in all tiles.
Product make_product(const Run &run, const Domain &domain, const TensorLayout &layout, const Region &region, uint32_t slot, uint32_t slots);
// The codes of the values of a tile that are not read from their planes: per region words of four tokens, [token / 4][slot].
void decode_value_codes(const Run &run, const TensorLayout &layout, const Tile &tile);
// slice.values from slice.codes: keys [slot][token], values [token][slot]; polar: by channel.
void decode_values(const Run &run, const HeadFormat &format, const TensorLayout &layout, const uint8_t *params, const Tile &tile);

// Parameter `param` of tokens [tile.from, round16(tile.end)), times `factor`; 0 from tile.end on.
float load_token_params(const Run &run, const TensorLayout &layout, const uint8_t *params, uint32_t param, const Tile &tile,
                        float factor, float *out);
// Scale and zero of tokens to slice.scale and slice.zero (books: no zero), the region's bias added to the zeros.  The largest scale, if
// all rows see all tokens of their vectors.
float load_token_scalars(const Run &run, const TensorLayout &layout, const Region &region, const uint8_t *params, uint32_t param,
                         const Tile &tile);
// Scales and zeros of a group of a column format, to slice.scale and slice.zero by slot.
void load_slots(const Run &run, const TensorLayout &layout, const uint8_t *params);
// The same, biases added to the zeros.
void load_slot_params(const Run &run, const TensorLayout &layout, const uint8_t *params);
// The boosted channels of a group (kitty).
const uint16_t *boosted_channels(const TensorLayout &layout, const uint8_t *params);

// By slot to by place in a decoded tile of keys; upper regions get `upper` times their channel's entry (nothing
// where params is null).
void line_up(const TensorLayout &layout, const uint8_t *params, const float *slots, float upper, float *line);
// The upper region's part alone.
void line_up_upper(const TensorLayout &layout, const uint8_t *params, const float *slots, float *line);

// f(group of the page, first, end) for the groups of a column format that [tile.first, tile.end) touches, cut to it.
template <class F>
void for_groups(const TensorLayout &layout, const Tile &tile, F &&f) {
  for (uint32_t t = tile.first; t < tile.end;) {
    const uint32_t group = (tile.start + t) / layout.group;
    const uint32_t end = std::min(tile.end, (group + 1) * layout.group - tile.start);
    f(group, t, end);
    t = end;
  }
}

// Quantize, with the results in the weights of its rows.
void weigh(const Run &run, Quantize *quantize, RowWeights *weights);
// Region::bias; none in precise runs, where small zeros must not hide in what is added to them for it.
inline int32_t bias_of(const Run &run, const Region &region) { return run.precise && !region.table ? 0 : region.bias; }
// The middle of codes from which that has been taken; 0 for books.
inline float middle_of(const Run &run, const Region &region) { return region.middle + float(region.bias - bias_of(run, region)); }
// Sum of squares, and largest, of n floats that are not followed by zeros.
float squares(const Run &run, const float *x, uint32_t n);
float largest(const Run &run, const float *x, uint32_t n);
// Whether all rows see all tokens of the tile's vectors.
inline bool sees_vectors(const Tile &tile) { return !tile.low_rows && tile.first % 16 == 0 && tile.end % 16 == 0; }
// The largest of slice.scale among the tokens that each row sees, [kRows]; `all`: what load_token_scalars() returned.
void largest_scales(const Run &run, const Tile &tile, float all, float *most);
// The weights of all rows, or, to be added, what rounding left of those of one.
struct Plane {
  const int16_t *fine = nullptr;  // of a group of four rows
  uint32_t row = 0;
  const float *offset = nullptr;  // what the row's results have besides
};
// dot_codes of all rows, and of a row's fine plane, with the weights' scales times `factor`.
void dot_weighted(const Run &run, const RowWeights &weights, float factor, Dot *dot);
void dot_fine(const Run &run, const RowWeights &weights, const Plane &plane, float factor, const Dot &dot);
// One of them for a region of a book or of plain codes; `array` bytes separate the low and high bytes of wide levels.
void dot_region(const Run &run, const Region &region, const RowWeights &weights, const Plane &plane, size_t array, Dot *dot);

}  // namespace kvq::cpu
