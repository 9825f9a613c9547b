// Plans of packing.
#include "engine/pack.h"

#include <algorithm>
#include <numeric>

namespace kvq {

Segment due_segment(const Recipe &recipe, uint64_t tail) {
  const uint64_t free = tail - std::min(tail, recipe.recent);
  return {free / recipe.block * recipe.block, recipe.block, Rounding::half_even};
}

PackPlan::PackPlan(std::pmr::memory_resource *memory, const Recipe &recipe, PageStore &store, Policies &policies)
    : memory_(memory), recipe_(recipe), store_(store), policies_(policies), classes_(memory), extension_{Extension(memory), Extension(memory)}, blocks_(memory), scores_(memory), layers_(memory) {}

Status PackPlan::make(Sequence *sequence, std::span<const Segment> segments, std::span<const uint32_t> layers,
                      std::span<const float> scores) {
  sequence_ = sequence;
  const SequenceLayer &one = sequence->layers[layers[0]];
  first_commit_ = !sequence->committed;
  extends_ = sequence->prompt.complete == 0 || recipe_.classes == 2;
  skip_ = first_commit_ ? std::min(one.tail.count, recipe_.sinks) : 0;
  position_ = one.sinks.count + skip_ + one.packed;
  for (const Segment &segment : segments) tokens_ += segment.tokens;
  if (recipe_.classes == 2) {
    KVQ_TRY(select(segments, scores.subspan(std::min(size_t(skip_), scores.size()))));
    scores_.assign(scores.begin() + ptrdiff_t(skip_ + tokens_), scores.end());
  }
  layers_.reserve(layers.size());
  for (const uint32_t l : layers) KVQ_TRY(plan_layer(l));
  narrow_pages();
  if (extends_) add_blocks(segments);
  for (uint32_t c = recipe_.drops() ? 1 : 0; c < recipe_.classes; c++) {
    if (extends_)
      extend(c, layers);
    else
      find_targets(c, position_);
  }
  for (LayerPlan &plan : layers_) encode(&plan, sequence->layers[plan.layer]);
  return KVQ_OK;
}

// Which class each token goes to.
Status PackPlan::select(std::span<const Segment> segments, std::span<const float> scores) {
  if (scores.size() < tokens_)
    return fail(KVQ_E_INVALID, "scores: %zu tokens of the %llu to be packed have one", scores.size(), (unsigned long long)tokens_);
  classes_.resize(size_t(tokens_));
  size_t done = 0;
  for (const Segment &segment : segments)
    for (uint64_t left = segment.tokens; left > 0;) {
      const size_t n = size_t(std::min(left, segment.size));
      KVQ_TRY(select_tokens(recipe_.policy.r, segment.rounding, scores.subspan(done, n), std::span(classes_).subspan(done, n)));
      done += n, left -= n;
    }
  return KVQ_OK;
}

void PackPlan::add_blocks(std::span<const Segment> segments) {
  blocks_.assign(sequence_->blocks.begin(), sequence_->blocks.end());
  uint64_t position = position_;
  for (const Segment &segment : segments) {
    if (segment.tokens == 0) continue;
    if (!blocks_.empty() && blocks_.back().size == segment.size && blocks_.back().tokens % segment.size == 0)
      blocks_.back().tokens += segment.tokens;
    else
      blocks_.push_back({position, segment.size, segment.tokens});
    position += segment.tokens;
  }
}

// ---- pages

// Tokens that codecs pack together, in K or in V: a page can be continued where a group ends.
static uint32_t common_group(const LayerCodecs &codecs) { return std::lcm(group_tokens(codecs.k[0]), group_tokens(codecs.v[0])); }

void PackPlan::add_rows(uint32_t cls, uint64_t position, const Ref<PackedPage> &page, uint32_t row, uint32_t count) {
  Extension &extension = extension_[cls];
  extension.targets.push_back({&*page, row, count});
  if (row == 0) extension.fresh.push_back({page, position, count});
}

// Page i of the sequence's list, or the copy that replaces it.
const Ref<PackedPage> &PackPlan::page_at(uint32_t cls, size_t i) const {
  const Vector<Ref<PackedPage>> &copies = extension_[cls].copies;
  return i < copies.size() && copies[i] ? copies[i] : sequence_->pages[cls][i].page;
}

void PackPlan::copy_page(uint32_t cls, size_t i) {
  const PackedRef &ref = sequence_->pages[cls][i];
  Ref<PackedPage> mine = Ref<PackedPage>::make(store_);
  mine->positions = ref.page->positions;
  for (const uint32_t l : sequence_->storing) {
    if (!ref.page->layers[l].data()) continue;
    const auto plan = std::find_if(layers_.begin(), layers_.end(), [l](const LayerPlan &p) { return p.layer == l && p.narrows; });
    if (plan != layers_.end()) {
      mine->layers[l] = narrowed(ref, *plan);
      continue;
    }
    const PageFormat &format = *sequence_->layers[l].formats.of[cls];
    mine->layers[l] = PageMemory(store_, format.bytes, &PageStore::bytes_packed);
    store_.backend.copy_packed(format, ref.page->layers[l].data(), mine->layers[l].data());
  }
  extension_[cls].copies.resize(sequence_->pages[cls].size());
  extension_[cls].copies[i] = std::move(mine);
}

// ---- PM-KVQ

// A page of the sequence in the layer's new formats.  Other layers of the prompt may have laid out rows behind this one's.
PageMemory PackPlan::narrowed(const PackedRef &ref, const LayerPlan &plan) {
  const PageFormat &from = *sequence_->layers[plan.layer].formats.of[0], &to = *plan.formats.of[0];
  PageMemory memory(store_, to.bytes, &PageStore::bytes_packed);
  store_.backend.narrow_packed(from, ref.page->layers[plan.layer].data(), to, memory.data(),
                               uint32_t(std::min<uint64_t>(ref.count, position_ - ref.position)));
  return memory;
}

void PackPlan::narrow_pages() {
  const Vector<PackedRef> &list = sequence_->pages[0];
  if (std::none_of(layers_.begin(), layers_.end(), [](const LayerPlan &plan) { return plan.narrows; })) return;
  for (size_t i = 0; i < list.size() && list[i].position < position_; i++) {
    if (!list[i].page.unique()) {
      copy_page(0, i);
      continue;
    }
    for (LayerPlan &plan : layers_)
      if (plan.narrows) plan.memory.emplace_back(&*list[i].page, narrowed(list[i], plan));
  }
}

// ---- rows

// Lay out the tokens of a class behind what its pages hold.
void PackPlan::extend(uint32_t cls, std::span<const uint32_t> layers) {
  Extension &extension = extension_[cls];
  const Vector<PackedRef> &list = sequence_->pages[cls];
  const uint32_t group = common_group(recipe_.layers[layers[0]]);
  Ref<PackedPage> page;
  uint32_t row = store_.page_tokens;
  uint64_t next = 0;  // token in order, when tokens have classes
  for (uint64_t left = classes_.empty() ? tokens_ : uint64_t(std::count(classes_.begin(), classes_.end(), cls)); left > 0;) {
    if (!page && !list.empty() && list.back().count < store_.page_tokens && list.back().count % group == 0) {
      if (!page_at(cls, list.size() - 1).unique()) copy_page(cls, list.size() - 1);
      page = page_at(cls, list.size() - 1);
      row = list.back().count;
    } else {
      page = Ref<PackedPage>::make(store_);
      row = 0;
    }
    const uint32_t n = uint32_t(std::min<uint64_t>(left, store_.page_tokens - row));
    uint64_t first = position_ + tokens_ - left;
    for (uint32_t i = 0; i < n && !classes_.empty(); i++, next++) {
      while (classes_[size_t(next)] != cls) next++;
      page->positions[row + i] = uint32_t(position_ + next);
    }
    if (!classes_.empty()) first = page->positions[row];
    if (row > 0) extension.added = n;
    add_rows(cls, first, page, row, n);
    left -= n;
  }
  if (!extension.fresh.empty()) extension.list.reserve(list.size() + extension.fresh.size());
}

// The rows from position `from` on, in pages that the sequence has already: an earlier layer of the prompt laid them out.
void PackPlan::find_targets(uint32_t cls, uint64_t from) {
  const uint64_t end = from + tokens_;
  for (size_t i = 0; i < sequence_->pages[cls].size(); i++) {
    const PackedRef &ref = sequence_->pages[cls][i];
    if (ref.position + ref.count <= from || ref.position >= end) continue;
    const uint32_t row = uint32_t(from - std::min(from, ref.position));
    extension_[cls].targets.push_back({&*page_at(cls, i), row, uint32_t(std::min<uint64_t>(ref.count, end - ref.position)) - row});
  }
}

// ---- layers

RawRows PackPlan::part(const RawRows &rows, uint64_t from, uint64_t count) const {
  RawRows out(memory_);
  if (count == 0) return out;
  const uint64_t begin = rows.first + from, end = begin + count, tokens = store_.raw_tokens;
  out.pages.assign(rows.pages.begin() + ptrdiff_t(begin / tokens), rows.pages.begin() + ptrdiff_t((end + tokens - 1) / tokens));
  out.first = uint32_t(begin % tokens);
  out.count = count;
  return out;
}

// What a layer has afterwards, apart from packed pages.
Status PackPlan::plan_layer(uint32_t layer) {
  const SequenceLayer &rows = sequence_->layers[layer];
  LayerPlan &plan = layers_.emplace_back(memory_);
  plan.layer = layer;
  plan.formats = rows.formats;
  if (first_commit_) {
    Vector<PageRows> kept(memory_);
    gather(rows.tail.pages, store_.raw_tokens, rows.tail.first, skip_, rows.tail.count - skip_, &kept);
    KVQ_TRY(policies_.choose(layer, sequence_->given, rows.statistics.get(), kept, &plan.formats, &plan.to_freeze));
    RawRows sinks = part(rows.tail, 0, skip_);
    plan.sinks.swap(sinks);
  }
  policies_.fit_budget(layer, rows.packed + tokens_, &plan.formats);
  plan.narrows = rows.packed > 0 && plan.formats.of[0] != rows.formats.of[0];
  RawRows tail = part(rows.tail, skip_ + tokens_, rows.tail.count - skip_ - tokens_);
  plan.tail.swap(tail);
  return KVQ_OK;
}

// Fresh pages are told their memory when the backend has begun: a device packs while the host walks through them.
void PackPlan::encode(LayerPlan *plan, const SequenceLayer &rows) {
  for (uint32_t c = 0; c < recipe_.classes; c++) {
    const Vector<Target> &targets = extension_[c].targets;
    if (targets.empty()) continue;
    const PageFormat &format = *plan->formats.of[c];
    const size_t fresh = size_t(std::count_if(targets.begin(), targets.end(), [](const Target &target) { return target.fresh(); }));
    PageBatch batch(store_, format.bytes, fresh, &PageStore::bytes_packed);
    Vector<PageRows> from(memory_), to(memory_);
    sources(rows, c, &from);
    to.reserve(targets.size());
    for (size_t t = 0, next = 0; t < targets.size(); t++)
      to.push_back({targets[t].fresh() ? batch.pages()[next++] : written(*plan, targets[t]), targets[t].row, targets[t].count});
    plan->memory.reserve(plan->memory.size() + fresh);
    store_.backend.pack(store_.shapes[plan->layer], format, from, to);
    for (const Target &target : targets)
      if (target.fresh()) plan->memory.emplace_back(target.page, batch.take());
  }
}

// The raw rows of a class's tokens.
void PackPlan::sources(const SequenceLayer &rows, uint32_t cls, Vector<PageRows> *from) const {
  if (classes_.empty()) return gather(rows.tail.pages, store_.raw_tokens, rows.tail.first, skip_, tokens_, from);
  for (size_t t = 0; t < classes_.size();) {
    size_t end = t;
    while (end < classes_.size() && classes_[end] == classes_[t]) end++;
    if (classes_[t] == cls) gather(rows.tail.pages, store_.raw_tokens, rows.tail.first, skip_ + t, end - t, from);
    t = end;
  }
}

// The memory of a page that rows are added to: what it was narrowed to, or its own.
void *PackPlan::written(const LayerPlan &plan, const Target &target) const {
  const auto own = std::find_if(plan.memory.begin(), plan.memory.end(), [&](const auto &entry) { return entry.first == target.page; });
  return own != plan.memory.end() ? own->second.data() : target.page->layers[plan.layer].data();
}

// ---- apply

// The first page of a class that will not be what it was.
size_t PackPlan::first_changed(uint32_t cls) const {
  const Vector<PackedRef> &list = sequence_->pages[cls];
  const Extension &extension = extension_[cls];
  if (std::any_of(layers_.begin(), layers_.end(), [](const LayerPlan &plan) { return plan.narrows; })) return 0;
  size_t first = list.size() - (extension.added ? 1 : 0);
  while (!extends_ && first > 0 && list[first - 1].end() > position_) first--;
  for (size_t i = 0; i < std::min(first, extension.copies.size()); i++)
    if (extension.copies[i]) first = i;
  return first;
}

void PackPlan::apply() noexcept {
  for (uint32_t c = 0; c < 2; c++) {
    Extension &extension = extension_[c];
    Vector<PackedRef> &list = sequence_->pages[c];
    sequence_->pages_changed(c, first_changed(c));
    for (size_t i = 0; i < extension.copies.size(); i++)
      if (extension.copies[i]) list[i].page = std::move(extension.copies[i]);
    if (extension.added) list.back().count += extension.added;
    if (extension.fresh.empty()) continue;
    for (PackedRef &ref : list) extension.list.push_back(std::move(ref));
    for (PackedRef &ref : extension.fresh) extension.list.push_back(std::move(ref));
    list.swap(extension.list);
  }
  if (extends_) sequence_->blocks.swap(blocks_);
  if (recipe_.classes == 2) sequence_->scores.swap(scores_);
  for (LayerPlan &plan : layers_) {
    SequenceLayer &layer = sequence_->layers[plan.layer];
    if (first_commit_) layer.sinks.swap(plan.sinks);
    layer.tail.swap(plan.tail);
    layer.packed += tokens_;
    layer.formats = plan.formats;
    layer.statistics.reset();
    for (auto &[page, memory] : plan.memory) page->layers[plan.layer] = std::move(memory);
    if (plan.to_freeze) policies_.freeze(plan.layer, std::move(plan.to_freeze), layer.formats);
  }
}

}  // namespace kvq
