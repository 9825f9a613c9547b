// Exports: decoded values of positions, and packed blocks as wire bytes (section 5).
#include <algorithm>
#include <cstring>
#include <limits>

#include "engine/cache.h"
#include "util/fp.h"

namespace kvq {

namespace {

// Rows of packed pages of one class, gathered into a Block.
class BlockReader {
 public:
  BlockReader(Cache &cache, const Sequence &sequence, HeadChoice choice, uint32_t layer)
      : cache_(cache), sequence_(sequence), choice_(choice), layer_(layer) {}

  const HeadFormat &format(uint32_t cls) const {
    const PageFormat &format = *sequence_.layers[layer_].formats.of[cls];
    return choice_.tensor == KVQ_TENSOR_K ? format.k[choice_.head] : format.v[choice_.head];
  }
  // Append rows [first, first + count) of a page, up to the end of their last group.
  void read(uint32_t cls, const PackedPage &page, uint32_t first, uint32_t count, Block *block) const {
    const uint32_t group = group_tokens(format(cls).codec);
    cache_.backend->unpack(*sequence_.layers[layer_].formats.of[cls], page.layers[layer_].data(), first,
                           (count + group - 1) / group * group, choice_.head, choice_.tensor, block);
  }
  // Append the class's tokens at positions [from, to); returns how many.
  uint32_t read_positions(uint32_t cls, uint64_t from, uint64_t to, Block *block) const {
    uint32_t tokens = 0;
    for (const PackedRef &ref : sequence_.pages[cls]) {
      const uint32_t first = row_of(ref, from), end = row_of(ref, to);
      if (first == end) continue;
      read(cls, *ref.page, first, end - first, block);
      tokens += end - first;
    }
    return tokens;
  }
  // The first row of a page whose position is not below `position`.
  static uint32_t row_of(const PackedRef &ref, uint64_t position) {
    const Vector<uint32_t> &positions = ref.page->positions;
    if (positions.empty()) return uint32_t(std::clamp(position, ref.position, ref.position + ref.count) - ref.position);
    return uint32_t(std::lower_bound(positions.begin(), positions.begin() + ref.count, position) - positions.begin());
  }

 private:
  Cache &cache_;
  const Sequence &sequence_;
  HeadChoice choice_;
  uint32_t layer_;
};

// Codes of tokens that a truncation has removed count as 0.
void clear_codes(Block *block, uint32_t from, uint32_t dim) {
  const size_t first = size_t(from) * dim;
  if (first < block->codes.size()) std::fill(block->codes.begin() + ptrdiff_t(first), block->codes.end(), uint8_t(0));
}

// Values of one page's rows that lie in [first, first + count), written to their places in `out`.
class ValueWriter {
 public:
  ValueWriter(Cache &cache, const Sequence &sequence, HeadChoice choice, uint32_t layer, uint64_t first, uint64_t count, float *out)
      : cache_(cache), reader_(cache, sequence, choice, layer), choice_(choice), shape_(cache.shapes[layer]), dim_(shape_.head(choice.tensor).dim), first_(first), end_(first + count), out_(out), halves_(&cache.memory), floats_(&cache.memory) {}

  void raw(const PageView &view) {
    const uint64_t from = std::max(first_, view.position), to = std::min(end_, view.position + view.count);
    if (from >= to) return;
    const PageRows rows{const_cast<void *>(view.page), view.first + uint32_t(from - view.position), uint32_t(to - from)};
    halves_.resize(size_t(rows.count) * dim_);
    cache_.backend->load_rows(shape_, rows, choice_.head, choice_.tensor, halves_.data());
    for (size_t i = 0; i < halves_.size(); i++) out_[(from - first_) * dim_ + i] = half_to_float(halves_[i]);
  }

  void packed(const PageView &view, uint32_t cls, const PackedPage &page) {
    const auto position = [&](uint32_t row) { return view.positions ? view.positions[row] : view.position + row; };
    if (position(0) >= end_ || position(view.count - 1) < first_) return;
    Block block(&cache_.memory);
    reader_.read(cls, page, 0, view.count, &block);
    floats_.resize(size_t(block.tokens) * dim_);
    decode(reader_.format(cls), block, floats_.data());
    for (uint32_t row = 0; row < view.count; row++)
      if (position(row) >= first_ && position(row) < end_)
        std::memcpy(out_ + (position(row) - first_) * dim_, &floats_[size_t(row) * dim_], dim_ * sizeof(float));
  }

 private:
  Cache &cache_;
  BlockReader reader_;
  HeadChoice choice_;
  const LayerShape &shape_;
  uint32_t dim_;
  uint64_t first_, end_;
  float *out_;
  Vector<uint16_t> halves_;
  Vector<float> floats_;
};

Status check_choice(const Cache &cache, HeadChoice choice) {
  KVQ_TRY(cache.check_layer(choice.layer));
  if (choice.head >= cache.shapes[choice.layer].kv_heads)
    return fail(KVQ_E_INVALID, "head=%u: layer %u has %u KV heads", choice.head, choice.layer, cache.shapes[choice.layer].kv_heads);
  if (choice.tensor > KVQ_TENSOR_V) return fail(KVQ_E_INVALID, "tensor=%u is neither KVQ_TENSOR_K nor KVQ_TENSOR_V", choice.tensor);
  return KVQ_OK;
}

}  // namespace

Status Cache::export_values(const Sequence &sequence, HeadChoice choice, uint64_t first, uint64_t count, float *out) {
  KVQ_TRY(sequence.check_finite());
  KVQ_TRY(check_choice(*this, choice));
  const uint32_t layer = shapes[choice.layer].source;
  const SequenceView view(sequence, layer, *store, nullptr);
  if (first > view.length() || count > view.length() - first)
    return fail(KVQ_E_INVALID, "first=%llu, count=%llu: layer %u has %llu tokens", (unsigned long long)first,
                (unsigned long long)count, choice.layer, (unsigned long long)view.length());
  if (count > 0 && first < sequence.released && first + count > recipe.sinks)
    return fail(KVQ_E_INVALID, "first=%llu: tokens before %llu have left every window and are gone", (unsigned long long)first,
                (unsigned long long)sequence.released);
  if (count > 0 && !out) return fail(KVQ_E_INVALID, "out is NULL");
  if (recipe.drops()) std::fill_n(out, count * shapes[layer].head(choice.tensor).dim, std::numeric_limits<float>::quiet_NaN());
  ValueWriter writer(*this, sequence, choice, layer, first, count, out);
  for (size_t i = 0; i < view.count() && count > 0; i++) {
    const PageView page = view.page(i);
    if (page.format)
      writer.packed(page, view.class_of(i), view.packed_of(i));
    else
      writer.raw(page);
  }
  return KVQ_OK;
}

namespace {

// One class of a block: its tokens at positions [from, to) as wire bytes behind what `wire` holds.
void append_class(const BlockReader &reader, uint32_t cls, uint64_t from, uint64_t to, Vector<uint8_t> *wire) {
  const HeadFormat &format = reader.format(cls);
  Block block(wire->get_allocator().resource());
  const uint32_t tokens = reader.read_positions(cls, from, to, &block);
  if (tokens == 0) return;
  clear_codes(&block, tokens, format.shape.dim);
  const size_t begin = wire->size();
  wire->resize(begin + wire_size(format, block.tokens));
  write_wire(format, block, wire->data() + begin);
}

// SemKV: a bit per token, 1 for the high class.
void append_flags(const Sequence &sequence, uint64_t from, uint64_t to, Vector<uint8_t> *wire) {
  wire->resize(wire->size() + size_t(to - from + 7) / 8, 0);
  for (const PackedRef &ref : sequence.pages[1])
    for (uint32_t row = BlockReader::row_of(ref, from), end = BlockReader::row_of(ref, to); row < end; row++) {
      const uint64_t bit = ref.page->positions[row] - from;
      (*wire)[size_t(bit / 8)] |= uint8_t(1u << bit % 8);
    }
}

}  // namespace

Status Cache::export_wire(const Sequence &sequence, HeadChoice choice, uint64_t block, Vector<uint8_t> *wire, uint64_t *tokens) {
  KVQ_TRY(sequence.check_finite());
  KVQ_TRY(check_choice(*this, choice));
  const uint32_t layer = shapes[choice.layer].source;
  const uint64_t packed_end = sequence.layers[layer].sinks.count + sequence.layers[layer].packed;
  uint64_t left = block, blocks = 0;
  for (const BlockRun &run : sequence.blocks) {
    blocks += run.blocks();
    if (left >= run.blocks()) {
      left -= run.blocks();
      continue;
    }
    const uint64_t from = run.position + left * run.size, to = std::min(from + run.size, run.position + run.tokens);
    if (to > packed_end) break;
    if (from < sequence.released)
      return fail(KVQ_E_INVALID, "block=%llu: its tokens have left every window and are gone", (unsigned long long)block);
    wire->clear();
    if (chooses_tokens()) append_flags(sequence, from, to, wire);
    const BlockReader reader(*this, sequence, choice, layer);
    for (uint32_t c = 0; c < recipe.classes; c++) append_class(reader, c, from, to, wire);
    *tokens = to - from;
    return KVQ_OK;
  }
  return fail(KVQ_E_INVALID, "block=%llu: layer %u has %llu packed blocks", (unsigned long long)block, choice.layer,
              (unsigned long long)blocks);
}

}  // namespace kvq
