// Steps: beginning, appending and attending.  append and attend allocate nothing and take no lock.
#include <algorithm>

#include "engine/cache.h"

namespace kvq {

namespace {

constexpr uint64_t kMaxStepTokens = 1u << 20;

// Releases the sequences that a QUERY_ONLY call has looked up.
class LookedUp {
 public:
  explicit LookedUp(Step &step) : step_(step) {}
  ~LookedUp() {
    if (!step_.query_only) return;
    for (StepEntry &entry : step_.entries) entry.use.release(), entry.sequence = nullptr;
  }
  LookedUp(const LookedUp &) = delete;

 private:
  Step &step_;
};

// Take the sequence of entry `i`.  Twice the same one would look like BUSY.
Status take(Table<Sequence> &sequences, Step &step, size_t i) {
  StepEntry &entry = step.entries[i];
  const Status status = sequences.use(entry.id, &entry.use);
  if (status == KVQ_E_BUSY)
    for (size_t other = 0; other < i; other++)
      if (step.entries[other].id == entry.id) return fail(KVQ_E_INVALID, "seqs[%zu] is the same sequence as seqs[%zu]", i, other);
  if (status != KVQ_OK) return status;
  entry.sequence = &*entry.use;
  return entry.sequence->check_finite();
}

Status check_begin(const Cache &cache, const Sequence &sequence, size_t i, uint32_t tokens) {
  if (sequence.in_step) return fail(KVQ_E_STATE, "seqs[%zu]: a step is open on it", i);
  if (sequence.prompt.open) return fail(KVQ_E_STATE, "seqs[%zu]: a later prompt has begun and is not complete", i);
  if (sequence.prompt.complete > 0 || !sequence.uniform())
    return fail(KVQ_E_STATE, "seqs[%zu]: its prompt is not complete: layers differ", i);
  return cache.check_room(sequence.length(), tokens);
}

void reserve_rows(Cache &cache, StepEntry &entry) {
  const Sequence &sequence = *entry.sequence;
  entry.growth.reserve(sequence.layers.size());
  for (uint32_t l = 0; l < sequence.layers.size(); l++) {
    LayerGrowth &growth = entry.growth.emplace_back(&cache.memory);
    if (!cache.stores(l) || entry.tokens == 0) continue;
    const SequenceLayer &layer = sequence.layers[l];
    const uint64_t sinks = cache.recipe.sinks;
    const uint64_t to_sinks = sequence.committed ? std::min<uint64_t>(entry.tokens, sinks - std::min(sinks, layer.sinks.count)) : 0;
    growth.reserve(*cache.store, l, layer, to_sinks, entry.tokens - to_sinks);
  }
}

// Queries of uncommitted prompts are kept until it is known which tokens stay.
void reserve_queries(Cache &cache, Step &step) {
  if (!policy_needs_queries(cache.recipe.policy)) return;
  for (uint32_t l = 0; l < cache.shapes.size(); l++) {
    const bool wanted = std::any_of(step.entries.begin(), step.entries.end(), [&](const StepEntry &entry) {
      return !entry.sequence->committed && cache.policies->wants_statistics(l, entry.sequence->given);
    });
    if (wanted) step.queries[l].resize(size_t(step.tokens) * cache.shapes[l].q_heads * cache.shapes[l].dim_k);
  }
}

// A step whose sequences are held, as its backend plans it.
class Source final : public StepSource {
 public:
  Source(const Cache &cache, Step &step) : cache_(cache), step_(step) {}
  size_t sequences() const override { return step_.entries.size(); }
  uint32_t tokens(size_t sequence) const override { return step_.entries[sequence].tokens; }
  bool invariant() const override { return step_.invariant; }
  bool stores(uint32_t layer) const override { return !step_.query_only && cache_.stores(layer); }
  uint64_t length(size_t sequence, uint32_t layer) const override { return view(sequence, layer).length(); }
  PageList pages(size_t sequence, uint32_t layer) const override {
    const SequenceView &seen = view(sequence, layer);
    return seen.list();
  }
  std::shared_ptr<PageTable> &table(size_t sequence) const override { return step_.entries[sequence].sequence->table; }
  PageRows row(size_t sequence, uint32_t layer, uint32_t token) const override {
    const StepEntry &entry = step_.entries[sequence];
    const SequenceLayer &rows = entry.sequence->layers[layer];
    const LayerGrowth &growth = entry.growth[layer];
    const bool sink = token < growth.sinks.tokens;
    const Growth &added = sink ? growth.sinks : growth.tail;
    const RawRows &list = sink ? rows.sinks : rows.tail;
    const uint64_t at = list.first + list.count + (sink ? token : token - growth.sinks.tokens);
    const uint32_t size = cache_.store->raw_tokens;
    return {added.list(list)[size_t(at / size)]->memory.data(), uint32_t(at % size), 1};
  }

 private:
  const SequenceView &view(size_t sequence, uint32_t layer) const {
    StepEntry &entry = step_.entries[sequence];
    entry.view = SequenceView(*entry.sequence, layer, *cache_.store, step_.query_only ? nullptr : &entry.growth[layer]);
    return entry.view;
  }
  const Cache &cache_;
  Step &step_;
};

}  // namespace

Status Cache::plan_step(Step &step) {
  KVQ_TRY(backend->plan_step(Source(*this, step), shapes, step.workspace.get()));
  for (StepEntry &entry : step.entries) entry.version = entry.sequence->version;
  return KVQ_OK;
}

Status Cache::begin_step(std::span<const uint64_t> ids, const uint32_t *new_tokens, uint32_t flags, uint64_t *id) {
  const bool query_only = flags & KVQ_STEP_QUERY_ONLY;
  uint64_t total = 0;
  for (size_t i = 0; i < ids.size(); i++) total += new_tokens[i];
  if (total > kMaxStepTokens)
    return fail(KVQ_E_INVALID, "new_tokens: %llu in all, above %llu", (unsigned long long)total, (unsigned long long)kMaxStepTokens);
  Pending<Step> step(&memory, &memory, shapes.size(), *workspaces, callers_, ids.size());
  step->query_only = query_only, step->invariant = flags & KVQ_STEP_INVARIANT;
  step->device_scores = flags & KVQ_STEP_DEVICE_SCORES;
  step->entries.reserve(ids.size());
  for (size_t i = 0; i < ids.size(); i++) {
    StepEntry &entry = step->entries.emplace_back(&memory);
    entry.id = ids[i];
    entry.first = step->tokens;
    entry.tokens = new_tokens[i];
    step->tokens += new_tokens[i];
    KVQ_TRY(take(sequences, *step, i));
    if (query_only) continue;
    KVQ_TRY(check_begin(*this, *entry.sequence, i, entry.tokens));
    reserve_rows(*this, entry);
  }
  if (!query_only) reserve_queries(*this, *step);
  if (backend->plans_steps()) KVQ_TRY(plan_step(*step));
  KVQ_TRY(steps.insert(&*step, "max_sequences", id));
  for (StepEntry &entry : step->entries) {
    if (!query_only) entry.sequence->in_step = true;
    entry.use.release();
    if (query_only) entry.sequence = nullptr;
  }
  step.release();
  return KVQ_OK;
}

// ---- append

Status Cache::append(Step &step, uint32_t layer, const kvq_tensor &k, const kvq_tensor &v, const kvq_tensor *q) {
  const LayerShape &shape = shapes[layer];
  if (step.query_only) return fail(KVQ_E_STATE, "step: it is QUERY_ONLY and appends nothing");
  if (!stores(layer)) return fail(KVQ_E_INVALID, "layer=%u reads the cache of layer %u and takes no tokens", layer, shape.source);
  if (step.appended[layer]) return fail(KVQ_E_STATE, "layer=%u has had its append in this step", layer);
  uint64_t saturated = 0;
  if (backend->plans_steps()) KVQ_TRY(backend->append(layer, shape, k, v, step.workspace.get()));
  for (StepEntry &entry : step.entries)
    if (!backend->plans_steps()) KVQ_TRY(store_rows(layer, entry.sequence->layers[layer], entry.growth[layer], k, v, entry.first, &saturated));
  // On a device only what statistics need is looked at: reading a result waits for it.
  if (q && (!backend->plans_steps() || !step.queries[layer].empty() || q->memory == KVQ_MEMORY_HOST)) {
    KVQ_TRY(backend->check_rows(*q, 0, step.tokens, shape.q_heads, shape.dim_k, "q", &saturated));
    if (!step.queries[layer].empty()) backend->enter_rows(*q, step.tokens, shape.q_heads, shape.dim_k, step.queries[layer].data());
    step.with_queries[layer] = 1;
  }
  step.appended[layer] = 1;
  count_saturated(saturated);
  return KVQ_OK;
}

// ---- attend

namespace {

// Positions that the entry's oldest query sees must not have left every window.
Status check_released(const StepEntry &entry, uint64_t length, uint32_t window) {
  const uint64_t released = entry.sequence->released;
  if (released == 0) return KVQ_OK;
  const uint64_t newest = length - entry.tokens + 1;  // tokens that the oldest query could see
  if (window != 0 && newest >= released + window) return KVQ_OK;
  return fail(KVQ_E_INVALID, "window=%u: tokens before position %llu have left every layer's window and are gone", window,
              (unsigned long long)released);
}

}  // namespace

// What the step's sequences show of a layer, in one caller's part of the room.
Status Cache::look_up(Step &step, const AttendInput &input, uint32_t window, uint32_t caller, std::span<const AttendSequence> *out) {
  const LayerShape &shape = shapes[input.layer];
  SequenceView *views = step.room.views.data() + caller * step.room.entries;
  AttendSequence *list = step.room.sequences.data() + caller * step.room.entries;
  size_t count = 0;
  for (size_t i = 0; i < step.entries.size(); i++) {
    StepEntry &entry = step.entries[i];
    if (step.query_only) KVQ_TRY(take(sequences, step, i));
    if (entry.tokens == 0) continue;
    views[i] = SequenceView(*entry.sequence, shape.source, *store, step.query_only ? nullptr : &entry.growth[shape.source]);
    const uint64_t length = views[i].length();
    if (length > 0 && entry.tokens > length)
      return fail(KVQ_E_INVALID, "seqs[%zu]: %u queries, but layer %u has %llu tokens", i, entry.tokens, input.layer,
                  (unsigned long long)length);
    KVQ_TRY(check_released(entry, length, window));
    list[count++] = {views[i].list(), length, entry.first, entry.tokens};
  }
  *out = {list, count};
  return KVQ_OK;
}

Status Cache::attend_as(Step &step, const AttendInput &input, uint32_t caller) {
  const LayerShape &shape = shapes[input.layer];
  const uint32_t window = input.window == UINT32_MAX ? 0 : input.window ? input.window
                                                                        : shape.window;
  if (!step.query_only && !step.has_append(*backend, shape.source) && step.tokens > 0)
    return fail(KVQ_E_STATE, "layer=%u: the append of layer %u is missing", input.layer, shape.source);
  const LookedUp guard(step);
  uint64_t saturated = 0;
  AttendCall call{};
  KVQ_TRY(look_up(step, input, window, caller, &call.sequences));
  if (step.tokens == 0) return KVQ_OK;
  const auto is_old = [](const StepEntry &entry) { return entry.version != entry.sequence->version; };
  if (backend->plans_steps() && step.query_only && std::any_of(step.entries.begin(), step.entries.end(), is_old)) KVQ_TRY(plan_step(step));
  call.layer = input.layer;
  call.shape = &shape;
  call.q = input.q, call.out = input.out, call.lse = input.lse;
  call.scale = input.scale, call.softcap = input.softcap;
  call.window = window;
  call.sinks = input.sinks;
  call.head_first = input.head_first, call.head_count = input.head_count;
  call.caller = caller, call.saturated = &saturated;
  KVQ_TRY(backend->attend(call, step.workspace.get()));
  count_saturated(saturated);
  return KVQ_OK;
}

Status Cache::attend(Step &step, const AttendInput &input) { return attend_as(step, input, 0); }

Status Cache::attend_heads(Step &step, const AttendInput &input) {
  const uint32_t caller = step.room.take();
  if (caller == kMostCallers)
    return fail(KVQ_E_BUSY, "step: as many calls over head ranges run in it as n_callers allows, %u", callers_);
  const Status status = attend_as(step, input, caller);
  step.room.give_back(caller);
  return status;
}

}  // namespace kvq
