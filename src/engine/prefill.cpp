// Prompts: chunks are staged raw, layer by layer; FINAL packs.
//
// A layer is packed when its FINAL arrives, so that only one layer of the prompt need be raw at a time.  SemKV waits for the last
// layer: its flags come from scores that exist only then, and are shared by all layers.
#include <algorithm>
#include <cmath>
#include <limits>
#include <mutex>

#include "engine/cache.h"
#include "engine/pack.h"

namespace kvq {

namespace {

class PrefillCall {
 public:
  PrefillCall(Cache &cache, Sequence &sequence, const PromptChunk &chunk)
      : cache_(cache), sequence_(sequence), chunk_(chunk), growth_(&cache.memory), scores_(&cache.memory), complete_(&cache.memory), plan_(&cache.memory, cache.recipe, *cache.store, *cache.policies) {}
  ~PrefillCall() {
    if (staged_) unstage();
  }
  PrefillCall(const PrefillCall &) = delete;

  Status run() {
    KVQ_TRY(check());
    ends_turn_ = cache_.chooses_tokens() && sequence_.committed && !sequence_.prompt.open && (chunk_.n_tokens > 0 || chunk_.final);
    start_ = sequence_.length();
    if (chunk_.n_tokens > 0) KVQ_TRY(stage());
    KVQ_TRY(find_complete());
    std::unique_lock<std::mutex> freezing;
    if (!complete_.empty() && !sequence_.committed) freezing = cache_.policies->lock_unfrozen();
    KVQ_TRY(pack());
    apply();
    cache_.count_saturated(saturated_);
    return KVQ_OK;
  }

 private:
  Status check() const;
  Status stage();
  LayerStatistics *begin_statistics();
  Status add_scores();
  void unstage() noexcept;
  Status find_complete();
  Status pack();
  void apply() noexcept;

  Cache &cache_;
  Sequence &sequence_;
  const PromptChunk &chunk_;
  bool ends_turn_ = false;   // SemKV: a later prompt begins
  uint64_t start_ = 0;       // length before
  uint64_t tail_ = 0;        // tail tokens of a committed sequence before
  bool staged_ = false;      // the chunk is part of its layer for the time being
  LayerGrowth growth_;
  uint64_t saturated_ = 0;
  std::shared_ptr<LayerStatistics> statistics_;  // with the chunk; after staging: without it
  Vector<float> scores_;     // likewise
  Vector<uint32_t> complete_;  // layers that this call completes
  PackPlan plan_;
};

Status PrefillCall::check() const {
  KVQ_TRY(sequence_.check_finite());
  if (sequence_.in_step) return fail(KVQ_E_STATE, "seq: a step is open on it");
  if (chunk_.layer == KVQ_ALL_LAYERS) return KVQ_OK;
  const SequenceLayer &layer = sequence_.layers[chunk_.layer];
  if (layer.complete && (chunk_.n_tokens > 0 || chunk_.final))
    return fail(KVQ_E_STATE, "layer=%u: its prompt is complete, but not yet that of all layers", chunk_.layer);
  return cache_.check_room(layer.length(), chunk_.n_tokens);
}

// Write the chunk behind the layer's rows, and make it part of them until apply() or unstage().
Status PrefillCall::stage() {
  SequenceLayer &layer = sequence_.layers[chunk_.layer];
  tail_ = sequence_.layers[chunk_.layer].tail.count;
  const uint64_t room = sequence_.committed ? cache_.recipe.sinks - std::min(cache_.recipe.sinks, layer.sinks.count) : 0;
  const uint64_t to_sinks = std::min(room, chunk_.n_tokens);
  growth_.reserve(*cache_.store, chunk_.layer, layer, to_sinks, chunk_.n_tokens - to_sinks);
  Vector<PageRows> pieces(&cache_.memory);
  gather(growth_.sinks.list(layer.sinks), cache_.store->raw_tokens, layer.sinks.first, layer.sinks.count, to_sinks, &pieces);
  gather(growth_.tail.list(layer.tail), cache_.store->raw_tokens, layer.tail.first, layer.tail.count, chunk_.n_tokens - to_sinks, &pieces);
  KVQ_TRY(cache_.backend->store_chunk(cache_.shapes[chunk_.layer], {*chunk_.k, *chunk_.v, chunk_.q, 0}, pieces, begin_statistics(), &saturated_));
  if (cache_.chooses_tokens()) KVQ_TRY(add_scores());
  growth_.apply(&layer, chunk_.n_tokens);
  layer.statistics.swap(statistics_);
  staged_ = true;
  return KVQ_OK;
}

void PrefillCall::unstage() noexcept {
  SequenceLayer &layer = sequence_.layers[chunk_.layer];
  growth_.undo(&layer, chunk_.n_tokens);
  layer.statistics.swap(statistics_);
}

// What the layer's statistics become, or nullptr: they stay as they are.
LayerStatistics *PrefillCall::begin_statistics() {
  const SequenceLayer &layer = sequence_.layers[chunk_.layer];
  if (sequence_.committed || !cache_.policies->wants_statistics(chunk_.layer, sequence_.given)) {
    statistics_ = layer.statistics;
    return nullptr;
  }
  statistics_ = layer.statistics ? cache_.policies->copy_statistics(*layer.statistics) : cache_.policies->new_statistics(chunk_.layer);
  return statistics_.get();
}

// Scores are taken once per token, with whichever layer brings them first.
Status PrefillCall::add_scores() {
  scores_.assign(sequence_.scores.begin(), sequence_.scores.end());
  if (chunk_.scores.empty()) return KVQ_OK;
  Vector<float> room(&cache_.memory);
  std::span<const float> scores = chunk_.scores;
  KVQ_TRY(cache_.fetch_scores(chunk_.device_scores, &room, &scores));
  KVQ_TRY(Cache::check_scores(scores));
  scores = scores.subspan(size_t(growth_.sinks.tokens));
  const size_t first = size_t(sequence_.layers[chunk_.layer].tail.count);
  if (scores_.size() < first + scores.size()) scores_.resize(first + scores.size(), std::numeric_limits<float>::quiet_NaN());
  for (size_t i = 0; i < scores.size(); i++)
    if (std::isnan(scores_[first + i])) scores_[first + i] = scores[i];
  return KVQ_OK;
}

// Which layers this call completes; they must agree on the number of tokens.
Status PrefillCall::find_complete() {
  if (!chunk_.final) return KVQ_OK;
  for (const uint32_t l : sequence_.storing)
    if (!sequence_.layers[l].complete && (chunk_.layer == KVQ_ALL_LAYERS || chunk_.layer == l)) complete_.push_back(l);
  uint64_t length = sequence_.prompt.complete ? sequence_.prompt.length : sequence_.layers[complete_[0]].length();
  for (const uint32_t l : complete_)
    if (sequence_.layers[l].length() != length)
      return fail(KVQ_E_STATE, "layer %u has %llu tokens, other layers of the prompt %llu", l,
                  (unsigned long long)sequence_.layers[l].length(), (unsigned long long)length);
  return KVQ_OK;
}

Status PrefillCall::pack() {
  const bool last = !complete_.empty() && sequence_.prompt.complete + complete_.size() == sequence_.storing.size();
  if (!cache_.chooses_tokens()) {
    if (complete_.empty()) return KVQ_OK;
    const SequenceLayer &layer = sequence_.layers[complete_[0]];
    const uint64_t sinks = sequence_.committed ? 0 : std::min(layer.tail.count, cache_.recipe.sinks);
    const Segment due = due_segment(cache_.recipe, layer.tail.count - sinks);
    if (due.tokens == 0 && sequence_.committed) return KVQ_OK;
    return plan_.make(&sequence_, std::span(&due, 1), complete_, {});
  }
  // SemKV: what is left of the turn, then the prompt.
  Segment segments[2];
  const SequenceLayer &layer = sequence_.layers[sequence_.storing[0]];
  if (ends_turn_) segments[0].tokens = segments[0].size = chunk_.n_tokens > 0 ? tail_ : layer.tail.count;
  if (last) {
    const uint64_t sinks = sequence_.committed ? 0 : std::min(layer.tail.count, cache_.recipe.sinks);
    segments[1].tokens = segments[1].size = layer.tail.count - sinks - segments[0].tokens;
    segments[1].rounding = Rounding::floor;
  }
  const bool first = last && !sequence_.committed;
  if (segments[0].tokens + segments[1].tokens == 0 && !first) return KVQ_OK;
  return plan_.make(&sequence_, segments, sequence_.storing, staged_ ? scores_ : sequence_.scores);
}

void PrefillCall::apply() noexcept {
  if (staged_ && cache_.chooses_tokens()) sequence_.scores.swap(scores_);
  staged_ = false;
  if (plan_.made()) plan_.apply();
  Prompt &prompt = sequence_.prompt;
  if (sequence_.committed && !prompt.open && (chunk_.n_tokens > 0 || !complete_.empty())) prompt.open = true, prompt.start = start_;
  for (const uint32_t l : complete_) {
    sequence_.layers[l].complete = true;
    prompt.length = sequence_.layers[l].length();
    prompt.complete++;
  }
  if (prompt.complete == sequence_.storing.size()) {
    sequence_.committed = true;
    prompt = Prompt();
    for (SequenceLayer &layer : sequence_.layers) layer.complete = false;
  }
  cache_.recount(sequence_);
  cache_.release_window(sequence_);
}

}  // namespace

Status Cache::prefill(Sequence &sequence, const PromptChunk &chunk) {
  if (chunk.layer != KVQ_ALL_LAYERS && !stores(chunk.layer)) {
    if (chunk.n_tokens == 0) return KVQ_OK;
    return fail(KVQ_E_INVALID, "layer=%u reads the cache of layer %u and takes no tokens", chunk.layer, shapes[chunk.layer].source);
  }
  PrefillCall call(*this, sequence, chunk);
  return call.run();
}

Status Cache::end_turn(Sequence &sequence) {
  KVQ_TRY(sequence.check_finite());
  if (sequence.in_step) return fail(KVQ_E_STATE, "seq: a step is open on it");
  if (!sequence.committed) return fail(KVQ_E_STATE, "seq: its prompt is not committed");
  if (sequence.prompt.open) return fail(KVQ_E_STATE, "seq: a later prompt has begun and is not complete");
  const uint64_t tail = sequence.layers[sequence.storing[0]].tail.count;
  if (!chooses_tokens() || tail == 0) return KVQ_OK;
  PackPlan plan(&memory, recipe, *store, *policies);
  const Segment rest{tail, tail, Rounding::half_even};
  KVQ_TRY(plan.make(&sequence, std::span(&rest, 1), sequence.storing, sequence.scores));
  plan.apply();
  recount(sequence);
  release_window(sequence);
  return KVQ_OK;
}

}  // namespace kvq
