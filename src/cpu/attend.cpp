// One block of query rows: pages in turn, online softmax, output.
#include "cpu/attend.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "cpu/decode.h"
#include "cpu/parts.h"
#include "util/entry.h"
#include "util/fp.h"

namespace kvq::cpu {
namespace {

constexpr float kLog2e = 1.44269504f, kLn2 = 0.693147181f;
constexpr float kNothing = -std::numeric_limits<float>::infinity();

// Positions that the query of a row sees.
struct Sight {
  uint64_t low, high;
};

// A block of rows in progress.
struct Block {
  const RowBlock &rows;
  Run run;
  Sight sight[kRows];
  uint32_t ratio;
  Sight common{0, 0};  // what all rows see

  uint32_t query(uint32_t row) const { return (rows.first + row) / ratio; }
  uint32_t q_head(uint32_t row) const { return rows.head * ratio + (rows.first + row) % ratio; }
};

// ---- begin

void load_query(const Block &block, uint32_t row) {
  const AttendCall &call = block.rows.call;
  const uint32_t dim = call.shape->dim_k;
  const uint64_t token = block.rows.sequence.first_query + block.query(row);
  const void *x = tensor_row(*call.q, token, block.q_head(row), call.shape->q_heads, dim);
  const float scale = call.softcap > 0 ? call.scale : call.scale * kLog2e;
  float *query = block.run.slice.query + size_t(row) * block.run.dims.query();
  if (call.q->dtype == KVQ_DTYPE_F32) return block.run.kernels.enter_floats(static_cast<const float *>(x), dim, scale, query);
  uint16_t halves[1024 + 16];
  uint64_t ignored = 0;
  enter_row(x, call.q->dtype, dim, halves, &ignored);
  for (uint32_t c = 0; c < dim; c++) query[c] = half_to_float(halves[c]) * scale;
}

Sight sight_of(const Block &block, uint32_t row) {
  const AttendSequence &sequence = block.rows.sequence;
  const uint64_t behind = sequence.n_queries - 1 - block.query(row);
  const uint64_t high = sequence.length > behind ? sequence.length - behind : 0, window = block.rows.call.window;
  return {window && high > window ? high - window : 0, high};
}

void begin(Block *block, bool first) {
  Slice &slice = block->run.slice;
  slice.domains = slice.oldest = 0;
  slice.doubt = {};
  for (uint32_t r = 0; r < block->run.rows; r++) {
    load_query(*block, r);
    const Sight sight = block->sight[r] = sight_of(*block, r);
    block->common = r == 0 ? sight : Sight{std::max(block->common.low, sight.low), std::min(block->common.high, sight.high)};
    const float *sinks = block->rows.call.sinks;
    const float sink = sinks && first ? sinks[block->q_head(r)] * kLog2e : kNothing;
    slice.reference[r] = sink;
    slice.denominator[r] = sink == kNothing ? 0.0f : 1.0f;
  }
  std::fill_n(slice.out, size_t(block->run.rows) * block->run.dims.output(), 0.0f);
}

// ---- softmax

// Bring what a row has collected to a higher reference.
void raise(const Run &run, uint32_t row, float reference) {
  Slice &slice = run.slice;
  const float factor = std::exp2(slice.reference[row] - reference);
  raise_row(run.dims, collected(slice), row, reference);
  const size_t stride = run.dims.output();
  for (uint32_t d = 0; d < slice.domains; d++)
    for (uint32_t c = 0; c < stride; c++) slice.domain[d].out[row * stride + c] *= factor;
}

// Sums of a tile's logits by row.
struct Survey {
  float seen[kRows], sum[kRows + 3], squares[kRows + 3];
};

// Keep book of the logits.
void note(const Run &run, const Survey &survey) {
  Doubts &doubt = run.slice.doubt;
  for (uint32_t r = 0; r < run.rows; r += 4) {
    add_four(doubt.count + r, four_of(survey.seen + r));
    add_four(doubt.first + r, four_of(survey.sum + r) * run.unit);
    add_four(doubt.second + r, four_of(survey.squares + r) * (run.unit * run.unit));
    if (run.slice.has_doubt) set_four(doubt.worst + r, greater_of(four_of(doubt.worst + r), four_of(run.slice.peak + r)));
  }
}

// Raise the references of rows whose largest logits pass them.
void follow(const Run &run) {
  Slice &slice = run.slice;
  bool passed = false;
  for (uint32_t r = 0; r < run.rows; r += 4) {
    const Four most = four_of(slice.most + r), seen = most > kNothing ? most : Four{}, size = greater_of(seen, -seen) * run.unit;
    set_four(slice.doubt.largest + r, greater_of(four_of(slice.doubt.largest + r), size));
    const auto above = most > four_of(slice.reference + r) + kRaise;
    for (uint32_t i = 0; i < 4; i++) passed |= above[i] != 0;
  }
  for (uint32_t r = 0; passed && r < run.rows; r++)
    if (slice.most[r] > slice.reference[r] + kRaise) raise(run, r, slice.most[r]);
}

// A row that does not see all of a tile: logits of other tokens are -inf, and all 0 if it sees none.
void survey_row(const Block &block, const Tile &tile, uint32_t row, Survey *survey) {
  const Run &run = block.run;
  float *x = run.slice.logit + size_t(row) * kLogitStride, *most = run.slice.most + row;
  const uint32_t end = round16(tile.end), n = end - tile.from, low = std::min(tile.low(row), end), high = std::max(low, tile.high(row));
  std::fill(x + tile.from, x + low, 0.0f);
  std::fill(x + high, x + end, 0.0f);
  survey->seen[row] = float(high - low);
  run.kernels.survey(x + tile.from, kLogitStride, 1, n, most, survey->sum + row, survey->squares + row);
  *most = kNothing;
  if (low == high) return std::fill(x + tile.from, x + end, 0.0f);
  if (block.rows.call.softcap > 0) run.kernels.softcap(x + tile.from, n, block.rows.call.softcap);
  std::fill(x + tile.from, x + low, kNothing);
  std::fill(x + high, x + end, kNothing);
  *most = run.kernels.maximum(x + tile.from, n);
}

void survey_rows(const Block &block, const Tile &tile, Survey *survey) {
  const Run &run = block.run;
  float *x = run.slice.logit + tile.from, *most = run.slice.most;
  const uint32_t n = round16(tile.end) - tile.from;
  const float softcap = block.rows.call.softcap;
  std::fill_n(survey->seen, kRows, float(n));
  run.kernels.survey(x, kLogitStride, run.rows, n, most, survey->sum, survey->squares);
  for (uint32_t r = 0; softcap > 0 && r < run.rows; r++) {
    run.kernels.softcap(x + size_t(r) * kLogitStride, n, softcap);
    most[r] = run.kernels.maximum(x + size_t(r) * kLogitStride, n);
  }
}

// Logits of a tile become probabilities, 0 for tokens that a row does not see.  If they may be deferred and rows see all, that is left to
// whoever makes weights of them.
void soften(const Block &block, const Tile &tile, bool can_defer) {
  const Run &run = block.run;
  Slice &slice = run.slice;
  const uint32_t end = round16(tile.end), n = end - tile.from;
  bool all = true;
  for (uint32_t r = 0; r < (tile.low_rows ? run.rows : 1); r++) all = all && tile.low(r) == tile.from && tile.high(r) == end;
  Survey survey;
  if (all) survey_rows(block, tile, &survey);
  for (uint32_t r = 0; !all && r < run.rows; r++) survey_row(block, tile, r, &survey);
  note(run, survey);
  follow(run);
  slice.deferred = all && can_defer;
  if (slice.deferred) return;
  for (uint32_t r = 0; r < run.rows; r++) {
    float sum = 0;
    if (survey.seen[r] > 0)
      run.kernels.exponentials(slice.logit + size_t(r) * kLogitStride + tile.from, kLogitStride, 1, n, slice.reference + r, slice.most + r, &sum, slice.largest + r);
    slice.denominator[r] += sum;
  }
}

// ---- pages

// Tokens [low, high) of a view that positions `sight` cover, counted from its first row.
void see(const PageView &view, const Sight &sight, uint32_t *low, uint32_t *high) {
  if (view.positions) {
    const uint32_t *end = view.positions + view.count;
    *low = uint32_t(std::lower_bound(view.positions, end, sight.low) - view.positions);
    *high = uint32_t(std::lower_bound(view.positions, end, sight.high) - view.positions);
    return;
  }
  const auto row = [&](uint64_t position) { return position > view.position ? std::min<uint64_t>(position - view.position, view.count) : 0; };
  *low = uint32_t(row(sight.low));
  *high = uint32_t(row(sight.high));
}

// Page rows that the rows of a block see.
struct Seen {
  uint32_t low[kRows], high[kRows];
};

// What the rows see of a view: `seen` if it is not all of it for all of them; first and end for all of them.
void see_page(const Block &block, const PageView &view, Seen *seen, Tile *page) {
  page->first = view.first;
  page->end = view.first + view.count;
  if (view.count == 0) return;
  const uint64_t oldest = view.positions ? view.positions[0] : view.position;
  const uint64_t newest = view.positions ? view.positions[view.count - 1] : view.position + view.count - 1;
  if (oldest >= block.common.low && newest < block.common.high) return;
  page->first = UINT32_MAX;
  page->end = 0;
  page->low_rows = seen->low;
  page->high_rows = seen->high;
  for (uint32_t r = 0; r < block.run.rows; r++) {
    if (r > 0 && block.query(r) == block.query(r - 1)) {
      seen->low[r] = seen->low[r - 1], seen->high[r] = seen->high[r - 1];
      continue;
    }
    see(view, block.sight[r], &seen->low[r], &seen->high[r]);
    seen->low[r] += view.first;
    seen->high[r] += view.first;
    if (seen->low[r] >= seen->high[r]) continue;
    page->first = std::min(page->first, seen->low[r]);
    page->end = std::max(page->end, seen->high[r]);
  }
}

// The part of a page that is the tile of tokens [start, start + tokens).
Tile cut(const Tile &page, uint32_t start, uint32_t tokens) {
  Tile tile = page;
  tile.start = start;
  tile.tokens = tokens;
  tile.first = tile.clip(page.first);
  tile.end = tile.clip(page.end);
  tile.from = tile.first / 16 * 16;
  return tile;
}

void attend_raw(const Block &block, const PageView &view, const Tile &page) {
  const LayerShape &shape = *block.rows.call.shape;
  const Run &run = block.run;
  Tile tile = cut(page, 0, kRawTokens);
  tile.k = static_cast<const uint8_t *>(view.page) + run.head * raw_head_bytes(shape);
  tile.v = tile.k + raw_values_offset(shape);
  raw_logits(run, shape.dim_k, kRawTokens, run.slice.query, tile);
  run.slice.has_doubt = false;
  soften(block, tile, false);
  add_raw_values(run, shape.dim_v, run.slice.out, tile);
}

void attend_packed(const Block &block, const PageView &view, const Tile &page) {
  const Run &run = block.run;
  const CpuPageFormat &format = static_cast<const CpuPageFormat &>(*view.format);
  const TensorLayout &k = format.layout(run.head, KVQ_TENSOR_K), &v = format.layout(run.head, KVQ_TENSOR_V);
  Domain &domain = open_domain(run, format);
  const uint8_t *blob = format.blob(view.page, run.head);
  for (uint32_t i = 0; i < k.tiles; i++) {
    Tile tile = cut(page, i * k.tile_tokens, k.tile_tokens);
    if (tile.first >= tile.end) continue;
    tile.k = blob + k.tile_offset + i * k.tile_stride;
    tile.v = blob + v.tile_offset + i * v.tile_stride;
    tile.shared = blob + k.tail_offset + i * k.tile_stride;
    tile.k_params = blob + k.params;
    tile.v_params = blob + v.params;
    key_logits(run, domain, tile);
    soften(block, tile, v.family == Family::rows && !run.precise);
    add_values(run, domain, tile);
  }
}

// The part of a page that the block will read.
Prefetch prefetch_of(const Block &block, const PageView &view) {
  if (!view.page) return {};
  const uint32_t head = block.run.head;
  const uint8_t *blob = static_cast<const uint8_t *>(view.page);
  if (view.format) {
    const CpuPageFormat &format = static_cast<const CpuPageFormat &>(*view.format);
    return {format.blob(blob, head), format.blob(blob, head) + format.blob_bytes(head)};
  }
  const size_t bytes = raw_head_bytes(*block.rows.call.shape);
  return {blob + head * bytes, blob + (head + 1) * bytes};
}

void attend_pages(const Block &block, PartOf part) {
  const PageList &pages = block.rows.sequence.pages;
  const uint32_t layer = block.rows.call.layer;
  const size_t begin = pages.count * part.number / part.parts, end = pages.count * (part.number + 1) / part.parts;
  PageView view = begin < end ? pages.get(pages.self, layer, begin) : PageView{};
  for (size_t i = begin; i < end; i++) {
    const PageView next = i + 1 < end ? pages.get(pages.self, layer, i + 1) : PageView{};
    Tile page{};
    Seen seen;
    see_page(block, view, &seen, &page);
    block.run.slice.prefetch = prefetch_of(block, next);
    if (page.first < page.end) {
      if (view.format)
        attend_packed(block, view, page);
      else
        attend_raw(block, view, page);
    }
    view = next;
  }
}

// ---- end

uint16_t to_bfloat(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  return uint16_t((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

// x * factor in the caller's type.
void store_row(const float *x, float factor, uint32_t n, uint32_t dtype, void *out) {
  const auto store = [&](auto *to, auto convert) {
    for (uint32_t i = 0; i < n; i++) to[i] = convert(x[i] * factor);
  };
  switch (dtype) {
    case KVQ_DTYPE_F16:
      return store(static_cast<uint16_t *>(out), float_to_half);
    case KVQ_DTYPE_BF16:
      return store(static_cast<uint16_t *>(out), to_bfloat);
    case KVQ_DTYPE_F64:
      return store(static_cast<double *>(out), [](float v) { return double(v); });
    default:
      return store(static_cast<float *>(out), [](float v) { return v; });
  }
}

void finish_row(const Block &block, uint32_t row) {
  const AttendCall &call = block.rows.call;
  const LayerShape &shape = *call.shape;
  const Slice &slice = block.run.slice;
  const uint64_t token = block.rows.sequence.first_query + block.query(row);
  const uint32_t head = block.q_head(row);
  const float denominator = slice.denominator[row], inverse = denominator > 0 ? 1.0f / denominator : 0.0f;
  const float *sum = slice.out + size_t(row) * block.run.dims.output();
  void *out = const_cast<void *>(tensor_row(*call.out, token, head, shape.q_heads, shape.dim_v));
  store_row(sum, inverse, shape.dim_v, call.out->dtype, out);
  if (call.lse)
    call.lse[token * shape.q_heads + head] = denominator > 0 ? (slice.reference[row] + std::log2(denominator)) * kLn2 : kNothing;
}

bool is_certain_row(const Run &run, uint32_t dim, uint32_t row) {
  const float *out = run.slice.out + size_t(row) * run.dims.output();
  return run.precise || is_certain(run.slice.doubt, row, dim, run.kernels.dot_product(out, out, round16(dim)));
}

void collect(const Run &run, const RowBlock &rows, PartOf part) {
  const LayerShape &shape = *rows.call.shape;
  Block block{rows, run, {}, shape.q_heads / shape.kv_heads};
  if (run.kernels.begin) run.kernels.begin(run.rows);
  begin(&block, part.number == 0);
  attend_pages(block, part);
  close_domains(run);
  if (run.kernels.end) run.kernels.end();
}

// Finish the rows that are certain.
void finish(const Run &run, const RowBlock &rows, bool *certain) {
  const LayerShape &shape = *rows.call.shape;
  const Block block{rows, run, {}, shape.q_heads / shape.kv_heads};
  for (uint32_t r = 0; r < run.rows; r++) {
    certain[r] = is_certain_row(run, shape.dim_v, r);
    if (certain[r]) finish_row(block, r);
  }
}

float unit_of(const AttendCall &call) { return call.softcap > 0 ? 1.0f : kLn2; }

constexpr PartOf kAll{0, 1};

}  // namespace

void attend_rows(const Kernels &kernels, const Tables &tables, const Dims &dims, const RowBlock &rows, Slice &slice) {
  attend_part(kernels, tables, dims, rows, kAll, slice);
  finish_rows(kernels, tables, dims, rows, slice);
}

void attend_part(const Kernels &kernels, const Tables &tables, const Dims &dims, const RowBlock &rows, PartOf part, Slice &slice) {
  collect(Run{kernels, tables, dims, slice, rows.count, rows.head, unit_of(rows.call), false}, rows, part);
}

void finish_rows(const Kernels &kernels, const Tables &tables, const Dims &dims, const RowBlock &rows, Slice &slice) {
  bool certain[kRows];
  finish(Run{kernels, tables, dims, slice, rows.count, rows.head, unit_of(rows.call), false}, rows, certain);
  for (uint32_t r = 0; r < rows.count; r++) {
    if (certain[r]) continue;
    const RowBlock row{rows.call, rows.sequence, rows.head, rows.first + r, 1};
    const Run precise{kernels, tables, dims, slice, 1, rows.head, unit_of(rows.call), true};
    collect(precise, row, kAll);
    finish(precise, row, &certain[r]);
  }
}

}  // namespace kvq::cpu
