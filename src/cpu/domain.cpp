// Domains: the query in the terms of a packed format, and its output back in terms of channels.
#include <algorithm>
#include <bit>
#include <cmath>

#include "cpu/attend.h"
#include "cpu/decode.h"
#include "util/fp.h"

namespace kvq::cpu {
namespace {

// The channels that the slots of attention stand for.  Polar slots become the two channels of their pair (decode_values).
const uint32_t *slot_channels(const Run &run, const HeadFormat &format) {
  if (format.codec.kind != Kind::polar) return format.channel.data();
  const uint32_t pairs = format.shape.dim / 2;
  for (uint32_t p = 0; p < pairs; p++) {
    const Pair pair = pair_channels(format.shape, p);
    run.slice.map[p] = pair.u;
    run.slice.map[pairs + p] = pair.v;
  }
  return run.slice.map;
}

// Section 3 for rows of floats; here it needs no exact bits.
class Rotation {
 public:
  Rotation(const Run &run, const HeadFormat &format, const SlotClass &cls)
      : run_(run), first_(cls.first), width_(cls.count), power_(std::bit_floor(cls.count)) {
    for (uint32_t pass = 0; pass < passes(); pass++)
      for (uint32_t i = 0; i < width_; i++) {
        const uint64_t number = format.codec.seed ^ (uint64_t(format.shape.tensor) << 48 | uint64_t(pass) << 40 | uint64_t(cls.rotation) << 16 | i / 64);
        if (i % 64 == 0) word_ = splitmix64(number);
        signs(pass)[i] = word_ >> i % 64 & 1 ? -1.0f : 1.0f;
      }
  }

  // Rows spaced by `stride`; the class's slots change in place.
  void apply(float *rows, size_t stride) const {
    for (uint32_t r = 0; r < run_.rows; r++)
      for (uint32_t pass = 0; pass < passes(); pass++) {
        float *y = rows + r * stride + first_;
        for (uint32_t i = 0; i < width_; i++) y[i] *= signs(pass)[i];
        transform(pass, y);
      }
  }
  void undo(float *rows, size_t stride) const {
    for (uint32_t r = 0; r < run_.rows; r++)
      for (uint32_t pass = passes(); pass-- > 0;) {
        float *y = rows + r * stride + first_;
        transform(pass, y);
        for (uint32_t i = 0; i < width_; i++) y[i] *= signs(pass)[i];
      }
  }

 private:
  uint32_t passes() const { return power_ == width_ ? 1 : 2; }
  float *signs(uint32_t pass) const { return run_.slice.signs + pass * run_.dims.most(); }
  void transform(uint32_t pass, float *y) const {
    run_.kernels.hadamard(y + (pass ? width_ - power_ : 0), power_, 1.0f / std::sqrt(float(power_)));
  }

  const Run &run_;
  const uint32_t first_, width_, power_;
  uint64_t word_ = 0;
};

void weigh_segments(const Run &run, const TensorLayout &layout, Domain *domain) {
  for (uint32_t i = 0; i < layout.segments.size(); i++) {
    const Segment &segment = layout.segments[i];
    const Region &region = layout.regions[segment.region];
    const uint32_t quad = region.quad + (segment.first - region.first) / 4;
    RowWeights &weights = domain->segment[i];
    Quantize quantize{};
    quantize.x = domain->query + segment.first;
    quantize.x_stride = run.dims.query();
    quantize.n = segment.count;
    quantize.rows = run.rows;
    quantize.w = domain->w + weight_place(0, 0, quad);
    if (run.precise) quantize.fine = domain->fine + weight_place(0, 0, quad);
    weigh(run, &quantize, &weights);
    for (uint32_t r = 0; r < run.rows; r++) weights.doubt[r] = doubt_of(run, weights.scale[r], region, segment.count);
  }
}

void make_products(const Run &run, const CpuPageFormat &page, Domain *domain) {
  const TensorLayout &k = page.layout(run.head, KVQ_TENSOR_K), &v = page.layout(run.head, KVQ_TENSOR_V);
  const auto key = [&](uint32_t i, const Region &region, uint32_t slot, uint32_t slots, const int16_t *w) {
    domain->keys[i] = make_product(run, *domain, k, region, slot, slots);
    domain->keys[i].dot.w = w + weight_place(0, 0, region.quad + slot / 4);
  };
  for (uint32_t i = 0; i < k.segments.size(); i++) {
    const Region &region = k.regions[k.segments[i].region];
    key(i, region, k.segments[i].first - region.first, k.segments[i].count, domain->w);
  }
  for (uint32_t i = 0; k.family == Family::columns && i < k.regions.size(); i++) key(i, k.regions[i], 0, k.regions[i].count, run.slice.w);
  for (uint32_t i = 0; i < v.segments.size(); i++) {
    const Region &region = v.regions[v.segments[i].region];
    domain->values[i] = make_product(run, *domain, v, region, v.segments[i].first - region.first, v.segments[i].count);
    domain->values[i].dot.w = run.slice.w;
  }
}

void set_query(const Run &run, const CpuPageFormat &page, Domain *domain) {
  const HeadFormat &format = page.k[run.head];
  const TensorLayout &layout = page.layout(run.head, KVQ_TENSOR_K);
  const uint32_t dim = format.shape.dim;
  const uint32_t *map = slot_channels(run, format);
  for (uint32_t r = 0; r < run.rows; r++) {
    const float *channels = run.slice.query + size_t(r) * run.dims.query();
    float *slots = domain->query + size_t(r) * run.dims.query();
    for (uint32_t slot = 0; slot < dim; slot++) slots[slot] = channels[map[slot]];
    std::fill(slots + dim, slots + run.dims.query(), 0.0f);
    domain->constant[r] = 0;
    for (uint32_t c = 0; c < format.mu.size(); c++) domain->constant[r] += channels[c] * half_to_float(format.mu[c]);
    if (layout.family == Family::columns && layout.quads)
      line_up(layout, nullptr, slots, 0.0f, domain->lined + size_t(r) * run.dims.weights());
  }
  if (is_rotated(format))
    for (const SlotClass &cls : format.classes) Rotation(run, format, cls).apply(domain->query, run.dims.query());
  weigh_segments(run, layout, domain);
  make_products(run, page, domain);
}

// Undo the rotation of what the domain collected and add it to the channels.
void close_domain(const Run &run, const Domain &domain) {
  const HeadFormat &format = domain.format->v[run.head];
  const uint32_t *map = slot_channels(run, format);
  if (is_rotated(format))
    for (const SlotClass &cls : format.classes) Rotation(run, format, cls).undo(domain.out, run.dims.output());
  for (uint32_t r = 0; r < run.rows; r++) {
    const float *slots = domain.out + size_t(r) * run.dims.output();
    float *channels = run.slice.out + size_t(r) * run.dims.output();
    for (uint32_t slot = 0; slot < format.shape.dim; slot++) channels[map[slot]] += slots[slot];
  }
}

}  // namespace

Domain &open_domain(const Run &run, const CpuPageFormat &format) {
  Slice &slice = run.slice;
  for (uint32_t i = 0; i < slice.domains; i++)
    if (slice.domain[i].format == &format) return slice.domain[i];
  if (slice.domains == kDomains) close_domain(run, slice.domain[slice.oldest]);
  Domain &domain = slice.domain[slice.domains < kDomains ? slice.domains++ : slice.oldest];
  if (slice.domains == kDomains) slice.oldest = (slice.oldest + 1) % kDomains;
  domain.format = &format;
  set_query(run, format, &domain);
  std::fill_n(domain.out, size_t(run.rows) * run.dims.output(), 0.0f);
  return domain;
}

void close_domains(const Run &run) {
  for (uint32_t i = 0; i < run.slice.domains; i++) close_domain(run, run.slice.domain[i]);
  run.slice.domains = 0;
}

}  // namespace kvq::cpu
