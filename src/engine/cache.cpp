// Creation and end of caches and sequences; counters.
#include "engine/cache.h"

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdio>

namespace kvq {

namespace {

constexpr uint32_t kDefaultSequences = 4096;
// Windows: tokens that stay behind the largest window, so that truncation has room.
constexpr uint64_t kWindowSlack = 256;

uint32_t table_slots(const CacheConfig &config) { return config.max_sequences ? config.max_sequences : kDefaultSequences; }

}  // namespace

// ---- creation

Cache::Cache(const Memory &counted, const CacheConfig &config)
    : memory(counted), shapes(config.shapes.begin(), config.shapes.end(), &memory), recipe(&memory), sequences("seq", table_slots(config), &memory), steps("step", table_slots(config), &memory), max_tokens_(config.max_tokens), log_user_(config.log_user), log_(config.log) {}

Cache::~Cache() {
  steps.for_each([this](Step *step) { std::pmr::polymorphic_allocator<Step>(&memory).delete_object(step); });
  sequences.for_each([this](Sequence *sequence) { std::pmr::polymorphic_allocator<Sequence>(&memory).delete_object(sequence); });
}

// A layer that reads another's pages must fit them.
Status Cache::check_sources(std::span<const LayerShape> shapes) {
  for (size_t l = 0; l < shapes.size(); l++) {
    const LayerShape &shape = shapes[l], &source = shapes[shape.source];
    if (source.source != shape.source)
      return fail(KVQ_E_INVALID, "layer %zu: kv_source names layer %u, which stores nothing itself", l, shape.source);
    if (shape.kv_heads != source.kv_heads || shape.dim_k != source.dim_k || shape.dim_v != source.dim_v)
      return fail(KVQ_E_INVALID, "layer %zu: kv_heads, dim_k and dim_v must be those of layer %u, whose cache it reads", l, shape.source);
  }
  return KVQ_OK;
}

Status Cache::check(const CacheConfig &config) {
  KVQ_TRY(check_sources(config.shapes));
  if (config.max_sequences > Table<Sequence>::kMaxSlots)
    return fail(KVQ_E_INVALID, "max_sequences=%u is above %u", config.max_sequences, Table<Sequence>::kMaxSlots);
  Memory scratch;
  Recipe recipe(&scratch);
  KVQ_TRY(parse_recipe(config.recipe, config.shapes, &recipe));
  return apply_data(config.data, config.shapes, &recipe);
}

Status Cache::prepare(const CacheConfig &config) {
  KVQ_TRY(parse_recipe(config.recipe, shapes, &recipe));
  KVQ_TRY(apply_data(config.data, shapes, &recipe));
  backend = config.make_backend(&memory, config.backend_number, config.path);
  store.emplace(&memory, *backend, shapes, backend->page_tokens(recipe.page_tokens), chooses_tokens());
  policies.emplace(&memory, recipe, shapes, *backend);
  KVQ_TRY(policies->prepare());
  callers_ = config.callers;
  backend->expect_callers(callers_);
  workspaces.emplace(*backend, shapes);
  const bool all = std::all_of(shapes.begin(), shapes.end(), [](const LayerShape &shape) { return shape.window > 0; });
  for (const LayerShape &shape : shapes) window_ = all ? std::max(window_, shape.window) : 0;
  log(KVQ_LOG_INFO, "cache of %zu layers, recipe %s", shapes.size(), recipe.text.c_str());
  return KVQ_OK;
}

Status Cache::create(const CacheConfig &config, Cache **out) {
  KVQ_TRY(check(config));
  Memory counted(config.allocator, config.max_bytes);
  void *place = counted.allocate(sizeof(Cache), alignof(Cache));
  Cache *cache = nullptr;
  Status status;
  try {
    cache = new (place) Cache(counted, config);
    status = cache->prepare(config);
  } catch (...) {
    if (cache) cache->~Cache();
    counted.deallocate(place, sizeof(Cache), alignof(Cache));
    throw;
  }
  if (status != KVQ_OK) return destroy(cache), status;
  *out = cache;
  return KVQ_OK;
}

void Cache::destroy(Cache *cache) noexcept {
  if (!cache) return;
  Memory last(cache->memory);
  cache->~Cache();
  last.deallocate(cache, sizeof(Cache), alignof(Cache));
}

// ---- sequences

Status Cache::create_sequence(uint64_t *id) {
  Pending<Sequence> made(&memory, &memory, shapes.size());
  for (uint32_t l = 0; l < shapes.size(); l++)
    if (stores(l)) made->storing.push_back(l);
  KVQ_TRY(sequences.insert(&*made, "max_sequences", id));
  made.release();
  return KVQ_OK;
}

Status Cache::fork(const Sequence &parent, uint64_t keep, uint64_t *id) {
  if (parent.in_step) return fail(KVQ_E_STATE, "parent: a step is open on it");
  if (parent.prompt.complete > 0 || !parent.uniform())
    return fail(KVQ_E_STATE, "parent: its prompt is not complete: layers differ");
  const uint64_t length = parent.length();
  if (keep == UINT64_MAX) keep = length;
  if (keep > length)
    return fail(KVQ_E_INVALID, "keep=%llu is above the length, %llu", (unsigned long long)keep, (unsigned long long)length);
  KVQ_TRY(parent.check_finite(keep));
  Pending<Sequence> made(&memory, parent, &memory, *policies);
  KVQ_TRY(check_cut(*made, keep));
  made->truncate(keep, recipe.sinks, store->raw_tokens);
  KVQ_TRY(sequences.insert(&*made, "max_sequences", id));
  recount(*made.release());
  return KVQ_OK;
}

// Is everything that attention at this length can reach still there?
Status Cache::check_cut(const Sequence &sequence, uint64_t length) const {
  const uint64_t least = sequence.released + window_;
  if (sequence.released == 0 || length >= least || length <= recipe.sinks || length == sequence.length()) return KVQ_OK;
  return fail(KVQ_E_INVALID, "length %llu: tokens before %llu have left every window, so only lengths from %llu on can be kept",
              (unsigned long long)length, (unsigned long long)sequence.released, (unsigned long long)least);
}

Status Cache::truncate(Sequence &sequence, uint64_t length) {
  if (sequence.in_step) return fail(KVQ_E_STATE, "seq: a step is open on it");
  if (sequence.prompt.complete > 0) return fail(KVQ_E_STATE, "seq: its prompt is not complete: some layers are FINAL");
  const uint64_t now = sequence.length();
  if (length > now)
    return fail(KVQ_E_INVALID, "length=%llu is above the length, %llu", (unsigned long long)length, (unsigned long long)now);
  KVQ_TRY(sequence.check_finite(length));
  KVQ_TRY(check_cut(sequence, length));
  sequence.truncate(length, recipe.sinks, store->raw_tokens);
  recount(sequence);
  return KVQ_OK;
}

Status Cache::remove(SequenceUse &use) {
  if (use->in_step) return fail(KVQ_E_STATE, "seq: a step is open on it");
  tokens_.fetch_sub(use->counted, std::memory_order_relaxed);
  std::pmr::polymorphic_allocator<Sequence>(&memory).delete_object(sequences.remove(use));
  return KVQ_OK;
}

void Cache::lengths(const Sequence &sequence, kvq_lengths *out) const {
  out->committed = sequence.committed;
  out->total = sequence.length();
  out->sinks = std::min(out->total, recipe.sinks);
  out->packed = sequence.packed();
  out->tail = out->total - out->sinks - out->packed;
}

// Where every layer has a window, packed pages that no query can reach any more are given back.
void Cache::release_window(Sequence &sequence) noexcept {
  const uint64_t length = sequence.length();
  if (window_ == 0 || sequence.prompt.complete > 0 || length < window_ + kWindowSlack) return;
  const uint64_t bound = length - window_ - kWindowSlack;
  for (uint32_t cls = 0; cls < 2; cls++) {
    Vector<PackedRef> &list = sequence.pages[cls];
    size_t gone = 0;
    while (gone < list.size() && list[gone].end() <= bound) sequence.released = std::max(sequence.released, list[gone++].end());
    list.erase(list.begin(), list.begin() + ptrdiff_t(gone));
    if (gone > 0) sequence.pages_changed(cls, 0);
  }
}

// ---- policies

Status Cache::set_policy(Sequence &sequence, const void *blob, size_t size) {
  if (sequence.in_step) return fail(KVQ_E_STATE, "seq: a step is open on it");
  const bool empty = std::all_of(sequence.layers.begin(), sequence.layers.end(),
                                 [](const SequenceLayer &layer) { return layer.length() == 0 && !layer.complete; });
  if (sequence.committed || !empty) return fail(KVQ_E_STATE, "seq: a policy can be set before the first token only");
  KVQ_TRY(policies->read(blob, size, &sequence.given));
  for (SequenceLayer &layer : sequence.layers) layer.statistics.reset();
  return KVQ_OK;
}

Status Cache::get_policy(const Sequence &sequence, Vector<uint8_t> *blob) {
  KVQ_TRY(sequence.check_finite());
  if (!sequence.committed) return fail(KVQ_E_STATE, "seq: its policy is frozen by its first commit");
  Vector<LayerFormats> formats(&memory);
  formats.reserve(sequence.layers.size());
  for (const SequenceLayer &layer : sequence.layers) formats.push_back(layer.formats);
  return policies->write(formats, blob);
}

// ---- checks and counters

Status Cache::check_layer(uint32_t layer) const {
  if (layer < shapes.size()) return KVQ_OK;
  return fail(KVQ_E_INVALID, "layer=%u: there are %zu layers", layer, shapes.size());
}

Status Cache::check_room(uint64_t length, uint64_t more) const {
  const uint64_t limit = max_tokens_ ? std::min<uint64_t>(max_tokens_, UINT32_MAX) : UINT32_MAX;  // positions are 32 bits
  if (more <= limit && length <= limit - more) return KVQ_OK;
  return fail(KVQ_E_FULL, "%llu tokens and %llu more are above the limit of a sequence, %llu (max_tokens)",
              (unsigned long long)length, (unsigned long long)more, (unsigned long long)limit);
}

Status Cache::fetch_scores(bool on_device, Vector<float> *room, std::span<const float> *scores) const {
  if (!on_device || scores->empty()) return KVQ_OK;
  room->resize(scores->size());
  KVQ_TRY(backend->fetch_scores(scores->data(), scores->size(), room->data()));
  *scores = *room;
  return KVQ_OK;
}

Status Cache::check_scores(std::span<const float> scores) {
  for (size_t i = 0; i < scores.size(); i++)
    if (std::isnan(scores[i])) return fail(KVQ_E_INVALID, "scores[%zu] is NaN", i);
  return KVQ_OK;
}

Status Cache::store_rows(uint32_t layer, const SequenceLayer &rows, const LayerGrowth &growth, const kvq_tensor &k,
                         const kvq_tensor &v, uint64_t first, uint64_t *saturated) {
  Status status = KVQ_OK;
  const auto store_into = [&](const RawRows &list, const Growth &added) {
    for_rows(added.list(list), store->raw_tokens, list.first, list.count, added.tokens, [&](const PageRows &piece) {
      if (status == KVQ_OK) status = backend->store_rows(shapes[layer], k, v, first, piece, saturated);
      first += piece.count;
    });
  };
  store_into(rows.sinks, growth.sinks);
  store_into(rows.tail, growth.tail);
  return status;
}

void Cache::count_saturated(uint64_t elements) {
  if (elements == 0) return;
  if (saturated_.fetch_add(elements, std::memory_order_relaxed) == 0)
    log(KVQ_LOG_WARNING, "input beyond +-65504 is saturated (logged once, see kvq_stats.saturated)");
}

void Cache::recount(Sequence &sequence) noexcept {
  const uint64_t now = sequence.length();
  tokens_.fetch_add(now - sequence.counted, std::memory_order_relaxed);
  sequence.counted = now;
  sequence.version++;
}

void Cache::stats(kvq_stats *out) const {
  out->sequences = sequences.count();
  out->bytes_used = memory.used();
  out->bytes_peak = memory.peak();
  out->page_bytes_raw = store->bytes_raw.load(std::memory_order_relaxed);
  out->page_bytes_packed = store->bytes_packed.load(std::memory_order_relaxed);
  out->pages_raw = store->pages_raw.load(std::memory_order_relaxed);
  out->pages_packed = store->pages_packed.load(std::memory_order_relaxed);
  out->tokens = tokens_.load(std::memory_order_relaxed);
  out->saturated = saturated_.load(std::memory_order_relaxed);
  out->workspace_bytes = workspaces->bytes();
}

void Cache::log(int32_t level, const char *format, ...) const noexcept {
  if (!log_) return;
  char message[1024];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(message, sizeof message, format, arguments);
  va_end(arguments);
  try {
    log_(log_user_, level, message);
  } catch (...) {  // a callback's exception is its own affair
  }
}

}  // namespace kvq
