// Steps: beginning, appending and attending.  append and attend allocate nothing and take no lock.
#include <algorithm>

#include "engine/cache.h"
#include "util/entry.h"

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
  if (status == KVQ_OK) entry.sequence = &*entry.use;
  return status;
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

}  // namespace

Status Cache::begin_step(std::span<const uint64_t> ids, const uint32_t *new_tokens, bool query_only, uint64_t *id) {
  uint64_t total = 0;
  for (size_t i = 0; i < ids.size(); i++) total += new_tokens[i];
  if (total > kMaxStepTokens)
    return fail(KVQ_E_INVALID, "new_tokens: %llu in all, above %llu", (unsigned long long)total, (unsigned long long)kMaxStepTokens);
  Pending<Step> step(&memory, &memory, shapes.size());
  step->query_only = query_only;
  step->entries.reserve(ids.size());
  step->attention.reserve(ids.size());
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
  step->workspace = backend->make_workspace(shapes);
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

namespace {

// Rule 1.4 on the queries of a layer, into the step's own copy; they are finite.
void enter_queries(const LayerShape &shape, const kvq_tensor &q, uint32_t tokens, uint16_t *out) {
  uint64_t saturated = 0;  // counted by the check before
  const char *data = static_cast<const char *>(q.data);
  const int64_t size = dtype_bytes(q.dtype);
  for (uint32_t t = 0; t < tokens; t++)
    for (uint32_t h = 0; h < shape.q_heads; h++, out += shape.dim_k)
      enter_row(data + (t * q.token_stride + h * q.head_stride) * size, q.dtype, shape.dim_k, out, &saturated);
}

}  // namespace

Status Cache::append(Step &step, uint32_t layer, const kvq_tensor &k, const kvq_tensor &v, const kvq_tensor *q) {
  const LayerShape &shape = shapes[layer];
  if (step.query_only) return fail(KVQ_E_STATE, "step: it is QUERY_ONLY and appends nothing");
  if (!stores(layer)) return fail(KVQ_E_INVALID, "layer=%u reads the cache of layer %u and takes no tokens", layer, shape.source);
  if (step.appended[layer]) return fail(KVQ_E_STATE, "layer=%u has had its append in this step", layer);
  uint64_t saturated = 0;
  for (StepEntry &entry : step.entries)
    KVQ_TRY(store_rows(layer, entry.sequence->layers[layer], entry.growth[layer], k, v, entry.first, &saturated));
  if (q) {
    KVQ_TRY(backend->check_rows(*q, 0, step.tokens, shape.q_heads, shape.dim_k, "q", &saturated));
    if (!step.queries[layer].empty()) enter_queries(shape, *q, step.tokens, step.queries[layer].data());
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

Status Cache::attend(Step &step, const AttendInput &input) {
  const LayerShape &shape = shapes[input.layer];
  const uint32_t window = input.window == UINT32_MAX ? 0 : input.window ? input.window
                                                                        : shape.window;
  if (!step.query_only && !step.appended[shape.source] && step.tokens > 0)
    return fail(KVQ_E_STATE, "layer=%u: the append of layer %u is missing", input.layer, shape.source);
  const LookedUp guard(step);
  step.attention.clear();
  for (size_t i = 0; i < step.entries.size(); i++) {
    StepEntry &entry = step.entries[i];
    if (step.query_only) KVQ_TRY(take(sequences, step, i));
    if (entry.tokens == 0) continue;
    entry.view = SequenceView(*entry.sequence, shape.source, *store, step.query_only ? nullptr : &entry.growth[shape.source]);
    const uint64_t length = entry.view.length();
    if (length > 0 && entry.tokens > length)
      return fail(KVQ_E_INVALID, "seqs[%zu]: %u queries, but layer %u has %llu tokens", i, entry.tokens, input.layer,
                  (unsigned long long)length);
    KVQ_TRY(check_released(entry, length, window));
    step.attention.push_back({{&entry.view, entry.view.count(), SequenceView::get}, length, entry.first, entry.tokens});
  }
  if (step.tokens == 0) return KVQ_OK;
  uint64_t saturated = 0;
  KVQ_TRY(backend->check_rows(*input.q, 0, step.tokens, shape.q_heads, shape.dim_k, "q", &saturated));
  AttendCall call{};
  call.layer = input.layer;
  call.shape = &shape;
  call.q = input.q, call.out = input.out, call.lse = input.lse;
  call.scale = input.scale, call.softcap = input.softcap;
  call.window = window;
  call.sinks = input.sinks;
  call.sequences = step.attention;
  KVQ_TRY(backend->attend(call, step.workspace.get()));
  count_saturated(saturated);
  return KVQ_OK;
}

}  // namespace kvq
