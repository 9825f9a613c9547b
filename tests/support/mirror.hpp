// A cache and its shadow, driven together.  Every call goes to both; lengths are compared after each, contents on request:
// sinks and tail exactly, packed tokens bit for bit as they were first seen and near enough to the truth to be the right token,
// attention against float64 over the library's own export (section 9).
#pragma once
#include <limits>
#include <map>
#include <memory>
#include <optional>

#include "oracle.hpp"
#include "shadow.hpp"

namespace kvq_test {

// How to attend.
struct Look {
  uint32_t window = 0;  // 0: the layer's own, UINT32_MAX: none
  float scale = 0, softcap = 0;
  bool sinks = false, lse = true;
  uint32_t out_dtype = KVQ_DTYPE_F32;
  Lay lay = Lay::packed;
  bool check = true;
  uint32_t flags = 0;  // of the step
};

// Results of a step, [layer].
struct Seen {
  std::vector<Floats> out, lse;
};

inline bool same_bits(const Floats &a, const Floats &b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}
inline bool same_bits(const Seen &a, const Seen &b) {
  if (a.out.size() != b.out.size()) return false;
  for (size_t i = 0; i < a.out.size(); ++i)
    if (!same_bits(a.out[i], b.out[i]) || !same_bits(a.lse[i], b.lse[i])) return false;
  return true;
}

class Mirror {
 public:
  const Setup setup;
  Preset preset;
  Cache cache;
  Text text;
  uint32_t dtype;
  Lay lay = Lay::packed;       // of the inputs
  bool layers_reversed = false;  // order of the layers in prefill
  bool near_truth;             // compare packed tokens with the truth: not with chanmix, whose 1-bit channels sit at the extremes

  explicit Mirror(const Setup &s, uint64_t stream = 1, uint32_t input_dtype = KVQ_DTYPE_F32)
      : setup(s), preset(promises(s.recipe)), cache(s), text(s.layers, stream, input_dtype), dtype(input_dtype), near_truth(s.recipe.find("chanmix") == s.recipe.npos) {}

  uint32_t layers() const { return uint32_t(setup.layers.size()); }
  uint32_t owner(uint32_t layer) const { return setup.layers[layer].kv_source ? setup.layers[layer].kv_source - 1 : layer; }
  const Shadow &shadow(kvq_seq seq) const { return tracks_.at(seq).shadow; }
  uint64_t total(kvq_seq seq) const { return shadow(seq).total(); }

  // ---- calls

  kvq_seq create() {
    kvq_seq seq = 0;
    ok(kvq_seq_create(cache, &seq));
    REQUIRE(seq != 0);
    tracks_[seq] = Track{Shadow(preset.rule), {}, 0};
    check_lengths(seq);
    return seq;
  }

  // One chunk of a prompt, in all layers.
  void chunk(kvq_seq seq, const Ids &list, bool final = false) {
    if (!list.empty())
      for (uint32_t i = 0; i < layers(); ++i)
        ok(prefill(seq, layers_reversed ? layers() - 1 - i : i, list, 0, i == 0));
    if (final) ok(finish(seq));
    Shadow &shadow = tracks_.at(seq).shadow;
    if (final) shadow.final_chunk(list);
    if (!final && !list.empty()) shadow.chunk(list);
    check_lengths(seq);
  }
  // A prompt cut in pieces of `cut` tokens (0: whole).
  void commit(kvq_seq seq, const Ids &list, size_t cut = 0) {
    if (cut == 0) cut = std::max<size_t>(list.size(), 1);
    for (size_t at = 0; at + cut < list.size(); at += cut) chunk(seq, part(list, at, at + cut));
    const size_t rest = list.empty() ? 0 : (list.size() - 1) / cut * cut;
    chunk(seq, part(list, rest, list.size()), true);
  }
  // The raw call for one layer.
  int32_t prefill(kvq_seq seq, uint32_t layer, const Ids &list, uint32_t flags, bool with_scores) {
    auto desc = sized<kvq_prefill>();
    if (owner(layer) != layer) return KVQ_OK;
    const Tensor k = tensor(layer, Text::K, list), v = tensor(layer, Text::V, list), q = tensor(layer, Text::Q, needed_queries(list));
    const Floats scores = text.scores(list);
    desc.layer = layer;
    desc.flags = flags;
    desc.n_tokens = list.size();
    desc.k = k.view();
    desc.v = v.view();
    desc.q = preset.needs_queries ? q.view() : nullptr;
    if (with_scores && preset.rule.semkv) desc.scores = scores.data(), desc.n_scores = uint32_t(list.size());
    return kvq_prefill_commit(cache, seq, &desc, nullptr);
  }
  int32_t finish(kvq_seq seq) {
    auto desc = sized<kvq_prefill>();
    desc.layer = KVQ_ALL_LAYERS;
    desc.flags = KVQ_PREFILL_FINAL;
    return kvq_prefill_commit(cache, seq, &desc, nullptr);
  }

  // A whole step of one or more sequences.  keep: tokens of each that stay (empty: all).
  Seen step(const std::vector<kvq_seq> &seqs, const std::vector<Ids> &news, const Look &look = {},
            const std::vector<uint32_t> &keep = {}) {
    const std::vector<History> before = look.check ? histories(seqs) : std::vector<History>(seqs.size());
    const std::vector<uint32_t> counts = sizes(news);
    kvq_step id = 0;
    ok(kvq_step_begin(cache, seqs.data(), counts.data(), uint32_t(seqs.size()), 0, &id));
    const Ids all = joined(news);
    for (uint32_t layer = 0; layer < layers(); ++layer) append_layer(id, layer, all);
    const Seen seen = look_all(id, news, look, look.check ? &before : nullptr, true);
    end(id, seqs, news, keep);
    return seen;
  }
  // The same without attention.
  void append(kvq_seq seq, const Ids &list) {
    const uint32_t count = uint32_t(list.size());
    kvq_step id = 0;
    ok(kvq_step_begin(cache, &seq, &count, 1, 0, &id));
    for (uint32_t layer = 0; layer < layers(); ++layer) append_layer(id, layer, list);
    end(id, {seq}, {list}, {});
  }
  void append(kvq_seq seq, const Ids &list, size_t cut) {
    for (size_t at = 0; at < list.size(); at += cut) append(seq, part(list, at, std::min(list.size(), at + cut)));
  }
  // A test has ended a step by itself: `list` is what the sequence took from it.
  void appended(kvq_seq seq, const Ids &list) {
    tracks_.at(seq).shadow.append(list);
    check_lengths(seq);
  }
  // Attention of the newest counts[i] tokens of each sequence, without a change.
  Seen query(const std::vector<kvq_seq> &seqs, const std::vector<uint32_t> &counts, const Look &look = {}) {
    const std::vector<History> before = look.check ? histories(seqs) : std::vector<History>(seqs.size());
    std::vector<Ids> asking;
    for (size_t i = 0; i < seqs.size(); ++i) {
      const Ids &tokens = shadow(seqs[i]).tokens;
      asking.push_back(tokens.empty() ? ids(0, counts[i]) : part(tokens, tokens.size() - counts[i], tokens.size()));
    }
    kvq_step id = 0;
    ok(kvq_step_begin(cache, seqs.data(), counts.data(), uint32_t(seqs.size()), KVQ_STEP_QUERY_ONLY | look.flags, &id));
    const Seen seen = look_all(id, asking, look, look.check ? &before : nullptr, false);
    ok(kvq_step_end(cache, id, nullptr, nullptr));
    for (kvq_seq seq : seqs) check_lengths(seq);
    return seen;
  }
  Seen query(kvq_seq seq, uint32_t count = 1, const Look &look = {}) {
    return query(std::vector<kvq_seq>{seq}, std::vector<uint32_t>{count}, look);
  }

  void truncate(kvq_seq seq, uint64_t length) {
    ok(kvq_seq_truncate(cache, seq, length));
    Track &track = tracks_.at(seq);
    track.shadow.truncate(length);
    track.known = std::min(track.known, track.shadow.frozen());
    check_lengths(seq);
  }
  kvq_seq fork(kvq_seq parent, uint64_t keep = UINT64_MAX) {
    kvq_seq child = 0;
    ok(kvq_seq_fork(cache, parent, keep, &child));
    Track &track = tracks_[child] = tracks_.at(parent);
    if (keep != UINT64_MAX) track.shadow.truncate(keep);
    track.known = std::min(track.known, track.shadow.frozen());
    check_lengths(child);
    check_lengths(parent);
    return child;
  }
  void remove(kvq_seq seq) {
    ok(kvq_seq_remove(cache, seq));
    tracks_.erase(seq);
  }
  void end_turn(kvq_seq seq) {
    ok(kvq_end_turn(cache, seq));
    tracks_.at(seq).shadow.end_turn();
    check_lengths(seq);
  }

  // ---- comparisons

  void check_lengths(kvq_seq seq) const {
    const kvq_lengths got = lengths(cache, seq);
    const Shadow &want = shadow(seq);
    if (got.total == want.total() && got.sinks == want.sinks && got.packed == want.packed() && got.tail == want.tail &&
        got.committed == uint32_t(want.committed))
      return;
    FAIL("lengths of " << setup.recipe << ": total " << got.total << " sinks " << got.sinks << " packed " << got.packed << " tail "
                       << got.tail << " committed " << got.committed << " instead of " << want.total() << " " << want.sinks << " "
                       << want.packed() << " " << want.tail << " " << want.committed);
  }

  // The contents of a sequence in every layer, head and tensor.
  void check(kvq_seq seq) {
    check_lengths(seq);
    Track &track = tracks_.at(seq);
    const uint64_t count = track.shadow.total(), frozen = track.shadow.frozen();
    std::vector<Floats> now;
    for (uint32_t layer = 0; layer < layers(); ++layer)
      for (uint32_t tensor : {KVQ_TENSOR_K, KVQ_TENSOR_V})
        for (uint32_t head = 0; head < setup.layers[layer].kv_heads; ++head) {
          const uint32_t dim = dim_of(setup.layers[layer], tensor);
          now.push_back(owner(layer) == layer ? export_values(cache, seq, layer, head, tensor, count, dim) : Floats{});
          if (now.back().empty()) continue;
          check_rows(track, now.back(), layer, head, tensor);
          if (now.size() > track.seen.size() || preset.shrinks) continue;
          if (std::memcmp(track.seen[now.size() - 1].data(), now.back().data(), track.known * dim * sizeof(float)) != 0)
            FAIL(setup.recipe << ": packed tokens changed: layer " << layer << " head " << head << " tensor " << tensor);
        }
    track.seen = std::move(now);
    track.known = frozen;
  }

  // Everything that a policy-free reader can see of a sequence, to compare two ways to the same contents.
  struct Picture {
    std::vector<std::vector<WireBlock>> wire;
    std::vector<Floats> values;
    Bytes policy;
    bool operator==(const Picture &other) const {
      if (wire != other.wire || policy != other.policy || values.size() != other.values.size()) return false;
      for (size_t i = 0; i < values.size(); ++i)
        if (!same_bits(values[i], other.values[i])) return false;
      return true;
    }
  };
  Picture picture(kvq_seq seq) const {
    Picture result;
    result.policy = policy_blob(cache, seq);
    for (uint32_t layer = 0; layer < layers(); ++layer)
      for (uint32_t tensor : {KVQ_TENSOR_K, KVQ_TENSOR_V})
        for (uint32_t head = 0; head < setup.layers[layer].kv_heads && owner(layer) == layer; ++head) {
          result.wire.push_back(export_wire(cache, seq, layer, head, tensor));
          result.values.push_back(
              export_values(cache, seq, layer, head, tensor, total(seq), dim_of(setup.layers[layer], tensor)));
        }
    return result;
  }

  Tensor tensor(uint32_t layer, Text::Kind kind, const Ids &list) {
    return Tensor(text.rows(layer, kind, list), text.heads(layer, kind), text.dim(layer, kind), dtype, lay);
  }

 private:
  struct Track {
    Shadow shadow;
    std::vector<Floats> seen;  // exports at the last check
    uint64_t known = 0;        // of which so many positions must stay
  };
  // Exports of a sequence before a step: [layer][K, V][kv head][token][dim].
  struct History {
    uint64_t tokens = 0;
    std::vector<Floats> k, v;
  };

  Ids needed_queries(const Ids &list) const { return preset.needs_queries ? list : Ids{}; }

  static std::vector<uint32_t> sizes(const std::vector<Ids> &lists) {
    std::vector<uint32_t> result;
    for (const Ids &list : lists) result.push_back(uint32_t(list.size()));
    return result;
  }
  static Ids joined(const std::vector<Ids> &lists) {
    Ids result;
    for (const Ids &list : lists) result.insert(result.end(), list.begin(), list.end());
    return result;
  }

  std::vector<History> histories(const std::vector<kvq_seq> &seqs) const {
    std::vector<History> result(seqs.size());
    for (size_t i = 0; i < seqs.size(); ++i) {
      result[i].tokens = total(seqs[i]);
      for (uint32_t layer = 0; layer < layers(); ++layer)
        for (uint32_t which : {KVQ_TENSOR_K, KVQ_TENSOR_V}) {
          Floats all;
          for (uint32_t head = 0; head < setup.layers[layer].kv_heads; ++head) {
            const Floats one = export_values(cache, seqs[i], owner(layer), head, which, result[i].tokens,
                                             dim_of(setup.layers[layer], which));
            all.insert(all.end(), one.begin(), one.end());
          }
          (which == KVQ_TENSOR_K ? result[i].k : result[i].v).push_back(std::move(all));
        }
    }
    return result;
  }

  void append_layer(kvq_step id, uint32_t layer, const Ids &all) {
    if (owner(layer) != layer) return;
    const Tensor k = tensor(layer, Text::K, all), v = tensor(layer, Text::V, all), q = tensor(layer, Text::Q, needed_queries(all));
    ok(kvq_append(cache, id, layer, k.view(), v.view(), preset.needs_queries ? q.view() : nullptr, nullptr));
  }

  void end(kvq_step id, const std::vector<kvq_seq> &seqs, const std::vector<Ids> &news, const std::vector<uint32_t> &keep) {
    for (kvq_seq seq : seqs) check_lengths(seq);  // nothing counts before the end
    Floats scores;
    std::vector<Ids> kept;
    for (size_t i = 0; i < seqs.size(); ++i) {
      kept.push_back(keep.empty() ? news[i] : part(news[i], 0, keep[i]));
      const Floats more = text.scores(kept.back());
      scores.insert(scores.end(), more.begin(), more.end());
    }
    ok(kvq_step_end(cache, id, keep.empty() ? nullptr : keep.data(), preset.rule.semkv ? scores.data() : nullptr));
    for (size_t i = 0; i < seqs.size(); ++i) {
      tracks_.at(seqs[i]).shadow.append(kept[i]);
      check_lengths(seqs[i]);
    }
  }

  Seen look_all(kvq_step id, const std::vector<Ids> &asking, const Look &look, const std::vector<History> *before, bool appended) {
    Seen seen;
    const Ids all = joined(asking);
    for (uint32_t layer = 0; layer < layers(); ++layer) {
      const kvq_layer &shape = setup.layers[layer];
      const Tensor q = tensor(layer, Text::Q, all);
      Tensor out(all.size(), shape.q_heads, dim_v(shape), look.out_dtype, look.lay);
      Floats lse(all.size() * shape.q_heads, std::numeric_limits<float>::quiet_NaN());
      Floats learned(shape.q_heads);
      for (uint32_t h = 0; h < shape.q_heads; ++h) learned[h] = 0.5f * float(h) - 1;
      auto options = sized<kvq_attend_options>();
      options.window = look.window, options.scale = look.scale, options.softcap = look.softcap;
      options.sinks = look.sinks ? learned.data() : nullptr;
      ok(kvq_attend(cache, id, layer, q.view(), out.view(), look.lse ? lse.data() : nullptr, &options, nullptr));
      REQUIRE(out.gaps_untouched());
      seen.out.push_back(out.values());
      seen.lse.push_back(look.lse ? lse : Floats{});
      size_t first = 0;
      for (size_t i = 0; i < asking.size() && before; ++i) {
        check_attention((*before)[i], layer, asking[i], appended, look, learned, seen, first);
        first += asking[i].size();
      }
    }
    return seen;
  }

  // Rows [first, first + news) of a layer's result against float64.
  void check_attention(const History &before, uint32_t layer, const Ids &news, bool appended, const Look &look,
                       const Floats &learned, const Seen &seen, size_t first) {
    const kvq_layer &shape = setup.layers[layer];
    const size_t value_dim = dim_v(shape), n = news.size();
    Floats q = text.rows(layer, Text::Q, news);
    for (float &x : q) x = entry(x);
    const Floats k = extended(before.k[layer], before.tokens, layer, Text::K, appended ? news : Ids{});
    const Floats v = extended(before.v[layer], before.tokens, layer, Text::V, appended ? news : Ids{});
    const uint32_t window = look.window == 0 ? shape.window : look.window == UINT32_MAX ? 0
                                                                                        : look.window;
    const size_t tokens = before.tokens + (appended ? n : 0);
    if (tokens == 0) return check_empty(layer, seen, first, n, look, learned);
    const Attended want = attend({tokens, n, shape.q_heads, shape.kv_heads, shape.dim_k, value_dim, q.data(), k.data(), v.data(),
                                  look.scale, look.softcap, window, look.sinks ? learned.data() : nullptr});
    double largest = 0;
    for (float x : v) largest = std::max(largest, std::fabs(double(x)));
    const double rounding = look.out_dtype == KVQ_DTYPE_F32 ? 0 : look.out_dtype == KVQ_DTYPE_F16 ? 0x1p-11
                                                                                                  : 0x1p-8;
    for (size_t row = 0; row < n * shape.q_heads; ++row) {
      const float *got = &seen.out[layer][(first * shape.q_heads + row) * value_dim];
      const double *expected = &want.out[row * value_dim];
      double worst = 0;
      if (rounding == 0) {
        worst = attention_error(got, expected, value_dim, want.variance[row], largest);
      } else {  // the tolerance, and half a step of the type
        for (size_t c = 0; c < value_dim; ++c)
          worst = std::max(worst, std::fabs(got[c] - expected[c]) / (1e-3 * largest + rounding * std::fabs(expected[c]) + 1e-7));
      }
      const double lse_error = look.lse ? std::fabs(seen.lse[layer][first * shape.q_heads + row] - want.lse[row]) /
                                              (1e-3 * std::max(1.0, want.largest[row] / 16))
                                        : 0;
      if (!(worst <= 1) || !(lse_error <= 1))
        FAIL("attention of " << setup.recipe << " layer " << layer << " query " << row / shape.q_heads << " head "
                             << row % shape.q_heads << " of " << tokens << " tokens: " << worst << " and lse " << lse_error
                             << " times the tolerance (seed " << seed() << ")");
    }
  }
  void check_empty(uint32_t layer, const Seen &seen, size_t first, size_t n, const Look &look, const Floats &learned) const {
    const uint32_t heads = setup.layers[layer].q_heads, value_dim = dim_v(setup.layers[layer]);
    for (size_t row = first * heads; row < (first + n) * heads; ++row) {
      for (size_t c = 0; c < value_dim; ++c) REQUIRE(seen.out[layer][row * value_dim + c] == 0.0f);
      if (look.lse)
        REQUIRE(seen.lse[layer][row] == (look.sinks ? learned[row % heads] : -std::numeric_limits<float>::infinity()));
    }
  }

  // [kv head][token][dim] of history, with the entered rows of new tokens at each head's end.
  Floats extended(const Floats &history, uint64_t tokens, uint32_t layer, Text::Kind kind, const Ids &news) {
    if (news.empty()) return history;
    const size_t heads = text.heads(layer, kind), dim = text.dim(layer, kind);
    Floats result;
    result.reserve(heads * (tokens + news.size()) * dim);
    for (size_t h = 0; h < heads; ++h) {
      result.insert(result.end(), history.begin() + long(h * tokens * dim), history.begin() + long((h + 1) * tokens * dim));
      for (uint32_t id : news)
        for (size_t c = 0; c < dim; ++c) result.push_back(entry(text.row(owner(layer), kind, id)[h * dim + c]));
    }
    return result;
  }

  void check_rows(const Track &track, const Floats &rows, uint32_t layer, uint32_t head, uint32_t tensor) {
    const Shadow &shadow = track.shadow;
    const Text::Kind kind = tensor == KVQ_TENSOR_K ? Text::K : Text::V;
    const size_t dim = text.dim(layer, kind);
    for (uint64_t t = 0; t < shadow.total(); ++t) {
      const float *truth = &text.row(layer, kind, shadow.tokens[t])[head * dim], *got = &rows[t * dim];
      const bool packed = t >= shadow.sinks && t < shadow.frozen();
      double error = 0, power = 0;
      for (size_t c = 0; c < dim; ++c) {
        const double raw = entry(truth[c]), difference = got[c] - raw;
        error += difference * difference, power += raw * raw;
      }
      // In energy another token would be wrong by 2 on average, one or two bits per number by less than 1.3 in any row.
      const bool good = packed ? std::isfinite(error) && (!near_truth || error <= 1.5 * power) : error == 0;
      if (!good)
        FAIL(setup.recipe << ": token " << t << " of " << shadow.total() << (packed ? " (packed)" : " (raw)") << " layer " << layer
                          << " head " << head << " tensor " << tensor << " is off by " << std::sqrt(error / power));
    }
  }

  std::map<kvq_seq, Track> tracks_;
};

}  // namespace kvq_test
