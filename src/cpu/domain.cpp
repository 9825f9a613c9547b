// Domains: the query in the terms of a packed format, and its output back in terms of channels.
#include <algorithm>

#include "cpu/attend.h"
#include "cpu/decode.h"
#include "util/fp.h"

namespace kvq::cpu {
namespace {

// The channel that a slot of attention stands for.  Polar slots become the two channels of their pair (decode_values).
uint32_t slot_channel(const HeadFormat &format, uint32_t slot) {
  if (format.codec.kind != Kind::polar) return format.channel[slot];
  const uint32_t pairs = format.shape.dim / 2;
  const Pair pair = pair_channels(format.shape, slot % pairs);
  return slot < pairs ? pair.u : pair.v;
}

template <class F>
void for_rotations(const HeadFormat &format, F &&f) {
  if (!is_rotated(format)) return;
  for (const SlotClass &cls : format.classes) f(cls);
}

void weigh_segments(const Run &run, const TensorLayout &layout, Domain *domain) {
  for (uint32_t i = 0; i < layout.segments.size(); i++) {
    const Segment &segment = layout.segments[i];
    const Region &region = layout.regions[segment.region];
    const size_t place = size_t(region.quad) * 4 + (segment.first - region.first);
    RowWeights &weights = domain->segment[i];
    for (uint32_t r = 0; r < run.rows; r++) {
      const float *query = domain->query + size_t(r) * run.dims.query() + segment.first;
      const size_t at = size_t(r) * run.dims.weights() + place;
      weigh(run, r, query, nullptr, segment.count, domain->w + at, domain->fine + at, &weights);
      weights.total[r] = 0;
      for (uint32_t c = 0; c < segment.count; c++) weights.total[r] += query[c];
    }
  }
}

void set_query(const Run &run, const CpuPageFormat &page, Domain *domain) {
  const HeadFormat &format = page.k[run.head];
  const TensorLayout &layout = page.layout(run.head, KVQ_TENSOR_K);
  const uint32_t dim = format.shape.dim;
  for (uint32_t r = 0; r < run.rows; r++) {
    const float *channels = run.slice.query + size_t(r) * run.dims.query();
    float *slots = domain->query + size_t(r) * run.dims.query();
    for (uint32_t slot = 0; slot < dim; slot++) slots[slot] = channels[slot_channel(format, slot)];
    std::fill(slots + dim, slots + run.dims.query(), 0.0f);
    for_rotations(format, [&](const SlotClass &cls) {
      rotate(slots + cls.first, cls.count, format.codec.seed, KVQ_TENSOR_K, cls.rotation);
    });
    domain->constant[r] = 0;
    for (uint32_t c = 0; c < format.mu.size(); c++) domain->constant[r] += channels[c] * half_to_float(format.mu[c]);
    if (layout.family == Family::columns && layout.quads)
      line_up(layout, nullptr, slots, 0.0f, domain->lined + size_t(r) * run.dims.weights());
  }
  weigh_segments(run, layout, domain);
}

// Undo the rotation of what the domain collected and add it to the channels.
void close_domain(const Run &run, const Domain &domain) {
  const HeadFormat &format = domain.format->v[run.head];
  for (uint32_t r = 0; r < run.rows; r++) {
    float *slots = domain.out + size_t(r) * run.dims.output(), *channels = run.slice.out + size_t(r) * run.dims.output();
    for_rotations(format, [&](const SlotClass &cls) {
      unrotate(slots + cls.first, cls.count, format.codec.seed, KVQ_TENSOR_V, cls.rotation);
    });
    for (uint32_t slot = 0; slot < format.shape.dim; slot++) channels[slot_channel(format, slot)] += slots[slot];
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
