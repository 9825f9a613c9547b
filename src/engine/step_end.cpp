// The end of a step: kept tokens become part of their sequences, and what became due is packed, for all sequences or for none.
#include <algorithm>
#include <limits>

#include "engine/cache.h"
#include "engine/pack.h"

namespace kvq {

namespace {

// What the end of a step changes in one sequence.
struct Update {
  Update(Cache &cache, StepEntry &of)
      : entry(of), scores(&cache.memory), statistics(&cache.memory), plan(&cache.memory, cache.recipe, *cache.store, *cache.policies) {}
  StepEntry &entry;
  uint32_t keep = 0;
  Vector<float> scores;                                   // SemKV: with those of the kept tokens
  Vector<std::shared_ptr<LayerStatistics>> statistics;    // by layer, of uncommitted prompts
  PackPlan plan;
};

class StepEnd {
 public:
  StepEnd(Cache &cache, Step &step) : cache_(cache), step_(step), updates_(&cache.memory), fetched_(&cache.memory) {}
  ~StepEnd() { undo(); }
  StepEnd(const StepEnd &) = delete;

  Status prepare(const uint32_t *keep, const float *scores) {
    KVQ_TRY(read_keep(keep));
    KVQ_TRY(check_scores(&scores));
    for (Update &update : updates_) {
      if (update.keep > 0) KVQ_TRY(update_sequence(update, scores));
      if (scores) scores += update.keep;
    }
    return KVQ_OK;
  }
  void apply(std::span<const StepFinding> findings) noexcept;

 private:
  Status read_keep(const uint32_t *keep);
  Status check_scores(const float **scores);
  Status update_sequence(Update &update, const float *scores);
  void add_scores(Update &update, const float *scores);
  void add_statistics(Update &update);
  void undo() noexcept;

  Cache &cache_;
  Step &step_;
  uint64_t kept_ = 0;
  size_t grown_ = 0;  // updates whose tokens are part of their sequences for the time being
  Vector<Update> updates_;
  Vector<float> fetched_;  // scores that were in device memory
};

Status StepEnd::read_keep(const uint32_t *keep) {
  updates_.reserve(step_.entries.size());
  for (size_t i = 0; i < step_.entries.size(); i++) {
    StepEntry &entry = step_.entries[i];
    Update &update = updates_.emplace_back(cache_, entry);
    update.keep = keep ? keep[i] : entry.tokens;
    if (update.keep > entry.tokens)
      return fail(KVQ_E_INVALID, "keep[%zu]=%u is above its new tokens, %u", i, update.keep, entry.tokens);
    kept_ += update.keep;
  }
  for (uint32_t l = 0; l < cache_.shapes.size() && kept_ > 0; l++)
    if (cache_.stores(l) && !step_.has_append(*cache_.backend, l)) return fail(KVQ_E_STATE, "step: layer %u has had no append", l);
  return KVQ_OK;
}

Status StepEnd::check_scores(const float **scores) {
  if (!cache_.chooses_tokens() || kept_ == 0) return KVQ_OK;
  if (!*scores) return fail(KVQ_E_INVALID, "scores is NULL: the policy needs one for each of the %llu kept tokens", (unsigned long long)kept_);
  std::span<const float> given(*scores, size_t(kept_));
  KVQ_TRY(cache_.fetch_scores(step_.device_scores, &fetched_, &given));
  *scores = given.data();
  return Cache::check_scores(given);
}

Status StepEnd::update_sequence(Update &update, const float *scores) {
  Sequence &sequence = *update.entry.sequence;
  if (cache_.chooses_tokens()) add_scores(update, scores);
  for (const uint32_t l : sequence.storing) update.entry.growth[l].apply(&sequence.layers[l], update.keep);
  grown_++;
  if (!sequence.committed) return add_statistics(update), KVQ_OK;
  const Segment due = due_segment(cache_.recipe, sequence.layers[sequence.storing[0]].tail.count);
  return due.tokens == 0 ? KVQ_OK : update.plan.make(&sequence, std::span(&due, 1), sequence.storing, update.scores);
}

// Kept tokens that become sinks have no use for their score.
void StepEnd::add_scores(Update &update, const float *scores) {
  const Sequence &sequence = *update.entry.sequence;
  const uint32_t layer = sequence.storing[0];
  const size_t tail = size_t(sequence.layers[layer].tail.count);
  const size_t to_sinks = size_t(std::min<uint64_t>(update.keep, update.entry.growth[layer].sinks.tokens));
  update.scores.reserve(tail + update.keep - to_sinks);
  update.scores.assign(sequence.scores.begin(), sequence.scores.end());
  update.scores.resize(tail, std::numeric_limits<float>::quiet_NaN());
  update.scores.insert(update.scores.end(), scores + to_sinks, scores + update.keep);
}

void StepEnd::add_statistics(Update &update) {
  const Sequence &sequence = *update.entry.sequence;
  update.statistics.resize(sequence.layers.size());
  for (const uint32_t l : sequence.storing) {
    if (!cache_.policies->wants_statistics(l, sequence.given)) continue;
    const SequenceLayer &layer = sequence.layers[l];
    const LayerShape &shape = cache_.shapes[l];
    update.statistics[l] = layer.statistics ? cache_.policies->copy_statistics(*layer.statistics) : cache_.policies->new_statistics(l);
    Vector<PageRows> rows(&cache_.memory);
    gather(layer.tail.pages, cache_.store->raw_tokens, layer.tail.first, layer.tail.count - update.keep, update.keep, &rows);
    kvq_tensor q{};
    q.dtype = KVQ_DTYPE_F16;
    q.data = step_.queries[l].data();
    q.head_stride = shape.dim_k;
    q.token_stride = int64_t(shape.q_heads) * shape.dim_k;
    const bool with_queries = step_.with_queries[l] && !step_.queries[l].empty();
    cache_.backend->add_statistics(shape, rows, with_queries ? &q : nullptr, update.entry.first, update.statistics[l].get());
  }
}

void StepEnd::undo() noexcept {
  for (Update &update : updates_) {
    if (grown_ == 0) return;
    if (update.keep == 0) continue;
    Sequence &sequence = *update.entry.sequence;
    for (const uint32_t l : sequence.storing) update.entry.growth[l].undo(&sequence.layers[l], update.keep);
    grown_--;
  }
}

// A kept token that was not finite marks its sequence, and no other.
void mark(const Update &update, const StepFinding &finding) noexcept {
  if (!finding.found || finding.token - update.entry.first >= update.keep) return;
  Sequence &sequence = *update.entry.sequence;
  const uint64_t position = sequence.length() - update.keep + finding.token - update.entry.first;
  sequence.bad = BadToken{position, finding.head, finding.channel, finding.tensor};
}

void StepEnd::apply(std::span<const StepFinding> findings) noexcept {
  grown_ = 0;
  for (size_t i = 0; i < updates_.size(); i++) {
    Update &update = updates_[i];
    if (update.keep == 0) continue;
    Sequence &sequence = *update.entry.sequence;
    mark(update, findings[i]);
    if (cache_.chooses_tokens() && !update.plan.made()) sequence.scores.swap(update.scores);
    if (update.plan.made()) update.plan.apply();
    for (const uint32_t l : sequence.storing) {
      SequenceLayer &layer = sequence.layers[l];
      layer.sinks.truncate(cache_.store->raw_tokens, layer.sinks.count);  // pages of rejected tokens
      layer.tail.truncate(cache_.store->raw_tokens, layer.tail.count);
      if (!update.statistics.empty() && update.statistics[l]) layer.statistics = update.statistics[l];
    }
    cache_.recount(sequence);
    cache_.release_window(sequence);
  }
}

// Holds the sequences of a step while it ends; QUERY_ONLY steps have none.
class Held {
 public:
  explicit Held(Step &step) : step_(step) {}
  ~Held() {
    for (StepEntry &entry : step_.entries) entry.use.release();
  }
  Held(const Held &) = delete;
  Status take(Table<Sequence> &sequences) {
    for (StepEntry &entry : step_.entries)
      if (!step_.query_only) KVQ_TRY(sequences.use(entry.id, &entry.use));
    return KVQ_OK;
  }
  // The step is over for its sequences.
  void free() noexcept {
    for (StepEntry &entry : step_.entries)
      if (!step_.query_only) entry.sequence->in_step = false;
  }

 private:
  Step &step_;
};

}  // namespace

Status Cache::end_step(StepUse &use, const uint32_t *keep, const float *scores) {
  {
    Held held(*use);
    KVQ_TRY(held.take(sequences));
    StepEnd end(*this, *use);
    if (!use->query_only) {
      uint64_t saturated = 0;
      Vector<StepFinding> findings(use->entries.size(), &memory);
      KVQ_TRY(backend->finish_step(use->workspace.get(), findings, &saturated));
      KVQ_TRY(end.prepare(keep, scores));
      end.apply(findings);
      count_saturated(saturated);
    }
    held.free();
  }
  std::pmr::polymorphic_allocator<Step>(&memory).delete_object(steps.remove(use));
  return KVQ_OK;
}

Status Cache::abort_step(StepUse &use) {
  {
    Held held(*use);
    KVQ_TRY(held.take(sequences));
    held.free();
  }
  std::pmr::polymorphic_allocator<Step>(&memory).delete_object(steps.remove(use));
  return KVQ_OK;
}

}  // namespace kvq
