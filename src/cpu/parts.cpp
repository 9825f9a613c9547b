#include "cpu/parts.h"

#include <algorithm>
#include <cmath>

namespace kvq::cpu {

uint32_t part_count(uint64_t tokens, size_t pages, uint32_t items) {
  const uint64_t wanted = (kPartItems + items - 1) / items, possible = std::min<uint64_t>(tokens / kPartTokens, pages);
  return uint32_t(std::clamp<uint64_t>(possible, 1, wanted));
}

size_t arrange_part(const Dims &dims, char *base, Collected *part) {
  const auto place = [&](size_t at) { return base + at; };
  const size_t out = 0, reference = sizeof(float) * kRows * dims.output(), denominator = reference + sizeof(float) * kRows;
  const size_t doubt = denominator + sizeof(float) * kRows;
  part->out = reinterpret_cast<float *>(place(out));
  part->reference = reinterpret_cast<float *>(place(reference));
  part->denominator = reinterpret_cast<float *>(place(denominator));
  part->doubt = reinterpret_cast<Doubts *>(place(doubt));
  return doubt + sizeof(Doubts);
}

Collected collected(Slice &slice) { return {slice.out, slice.reference, slice.denominator, &slice.doubt}; }

void copy_rows(const Dims &dims, uint32_t rows, const Collected &from, const Collected &to) {
  std::copy_n(from.out, size_t(rows) * dims.output(), to.out);
  std::copy_n(from.reference, rows, to.reference);
  std::copy_n(from.denominator, rows, to.denominator);
  *to.doubt = *from.doubt;
}

void raise_row(const Dims &dims, const Collected &part, uint32_t row, float reference) {
  const float factor = std::exp2(part.reference[row] - reference);
  part.reference[row] = reference;
  part.denominator[row] *= factor;
  part.doubt->sum[row] *= double(factor) * factor;
  part.doubt->power[row] *= factor * factor;
  part.doubt->tile[row] *= factor * factor;
  float *out = part.out + size_t(row) * dims.output();
  for (uint32_t c = 0; c < dims.output(); c++) out[c] *= factor;
}

void add_rows(const Dims &dims, uint32_t rows, const Collected &behind, const Collected &part) {
  for (uint32_t r = 0; r < rows; r++) {
    if (!(behind.denominator[r] > 0)) continue;  // it has seen nothing
    if (part.denominator[r] > 0 && behind.reference[r] < part.reference[r]) raise_row(dims, behind, r, part.reference[r]);
    if (!(part.denominator[r] > 0)) part.reference[r] = behind.reference[r];
    if (part.reference[r] < behind.reference[r]) raise_row(dims, part, r, behind.reference[r]);
    float *out = part.out + size_t(r) * dims.output();
    const float *more = behind.out + size_t(r) * dims.output();
    for (uint32_t c = 0; c < dims.output(); c++) out[c] += more[c];
    part.denominator[r] += behind.denominator[r];
    Doubts &sum = *part.doubt;
    const Doubts &other = *behind.doubt;
    sum.sum[r] += other.sum[r];
    sum.tile[r] = std::max(sum.tile[r], other.tile[r]);
    sum.worst[r] = std::max(sum.worst[r], other.worst[r]);
    sum.largest[r] = std::max(sum.largest[r], other.largest[r]);
    sum.count[r] += other.count[r], sum.first[r] += other.first[r], sum.second[r] += other.second[r];
  }
}

}  // namespace kvq::cpu
