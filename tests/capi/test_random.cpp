// Long random lives of a cache against the shadow model, and its limits.  (Cases T6 to T8, T17 to T19.)
#include "mirror.hpp"

using namespace kvq_test;

namespace {

// One random life: calls of every kind on a few sequences.
class Life {
 public:
  Life(const std::string &recipe, uint64_t stream)
      : mirror_(Setup{.recipe = recipe, .layers = {layer_of(2, 2, 32), layer_of(2, 1, 32, 48)}}, stream), random_(stream) {}

  void run(size_t calls) {
    for (size_t i = 0; i < calls; ++i) {
      INFO("call " << i << " of recipe " << mirror_.setup.recipe << ", seed " << seed());
      one_call();
      if (i % 20 == 0 && !seqs_.empty()) mirror_.check(any());
      if (i % 100 == 0) look();
    }
    for (kvq_seq s : seqs_) mirror_.check(s);
    look();
    while (!seqs_.empty()) remove();
    const kvq_stats now = stats(mirror_.cache);
    REQUIRE((now.pages_raw == 0 && now.pages_packed == 0 && now.sequences == 0 && now.tokens == 0));
  }

 private:
  kvq_seq any() { return seqs_[random_.below(seqs_.size())]; }
  Ids news(size_t most) {
    const Ids result = ids(next_, 1 + random_.below(most));
    next_ = (next_ + uint32_t(result.size())) % 3000;
    return result;
  }
  void remove() {
    const size_t i = random_.below(seqs_.size());
    mirror_.remove(seqs_[i]);
    seqs_.erase(seqs_.begin() + long(i));
  }
  void look() {
    for (kvq_seq s : seqs_)
      if (mirror_.total(s)) mirror_.query(s, uint32_t(1 + random_.below(std::min<uint64_t>(mirror_.total(s), 3))));
  }

  void one_call() {
    if (seqs_.empty() || (seqs_.size() < 12 && random_.below(12) == 0)) {
      seqs_.push_back(mirror_.create());
      return;
    }
    const kvq_seq s = any();
    if (mirror_.total(s) > 400) return random_.below(4) ? mirror_.truncate(s, random_.below(150)) : remove();
    switch (random_.below(16)) {
      case 0:
        return prompt(s);
      case 1:
        return mirror_.truncate(s, mirror_.total(s) - random_.below(mirror_.total(s) + 1));
      case 2:
        return mirror_.truncate(s, mirror_.total(s) - random_.below(std::min<uint64_t>(mirror_.total(s), 6) + 1));
      case 3:
        return fork(s);
      case 4:
        return random_.below(3) ? void() : remove();
      case 5:
        return aborted(s);
      case 6:
        return mirror_.shadow(s).committed ? mirror_.end_turn(s) : refused(kvq_end_turn(mirror_.cache, s), KVQ_E_STATE);
      case 7:
        return batch();
      case 8:
        return drafts(s);
      case 9:
        return mirror_.append(s, news(70));
      default:
        return mirror_.append(s, news(3));
    }
  }
  void prompt(kvq_seq s) {
    mirror_.layers_reversed = random_.below(2);
    mirror_.commit(s, news(90), random_.below(3) ? 0 : 1 + random_.below(40));
  }
  void fork(kvq_seq s) {
    if (seqs_.size() < 12) seqs_.push_back(mirror_.fork(s, random_.below(3) ? UINT64_MAX : random_.below(mirror_.total(s) + 1)));
  }
  void aborted(kvq_seq s) {
    const uint32_t count = uint32_t(1 + random_.below(80));
    kvq_step step = 0;
    ok(kvq_step_begin(mirror_.cache, &s, &count, 1, 0, &step));
    if (random_.below(2)) {
      const Tensor k = mirror_.tensor(1, Text::K, ids(0, count)), v = mirror_.tensor(1, Text::V, ids(0, count));
      ok(kvq_append(mirror_.cache, step, 1, k.view(), v.view(), nullptr, nullptr));
    }
    ok(kvq_step_abort(mirror_.cache, step));
    mirror_.check_lengths(s);
  }
  void batch() {
    std::vector<kvq_seq> some;
    std::vector<Ids> tokens;
    std::vector<uint32_t> keep;
    for (kvq_seq s : seqs_)
      if (random_.below(2) && mirror_.total(s) < 400) {
        some.push_back(s);
        tokens.push_back(random_.below(5) ? news(9) : Ids{});
        keep.push_back(uint32_t(random_.below(tokens.back().size() + 1)));
      }
    if (some.empty()) return;
    mirror_.step(some, tokens, {.check = random_.below(8) == 0}, random_.below(2) ? keep : std::vector<uint32_t>{});
  }
  void drafts(kvq_seq s) {
    const Ids tokens = news(6);
    mirror_.step({s}, {tokens}, {.check = random_.below(8) == 0}, {uint32_t(random_.below(tokens.size() + 1))});
  }

  Mirror mirror_;
  Random random_;
  std::vector<kvq_seq> seqs_;
  uint32_t next_ = 0;
};

const char *const kLives[] = {
    "k=affine-channel(levels=16,group=32);v=affine-token(levels=16,group=16);block=32;sinks=4;recent=5",
    "k=lloyd(levels=8);v=lloyd(levels=5);block=8",
    "k=channel-widths(group=16,midpoint=1);v=lloyd(levels=3,params=e5m3);block=16;sinks=3;recent=7;"
    "policy=pair-widths(avg=3,bmin=1,bmax=6,score=q-var)",
    "k=pair-mix(low=1,high=3,group=16,midpoint=1);v=affine-token(levels=4,group=16);block=32;sinks=6;policy=pnmix(r=1/2)",
    "semkv-tq;block=16",
    "semkv;block=24;sinks=5",
    "tq-3c;block=16;recent=9",
    "blockgtq-k3v3;block=20;sinks=1",
    "k=kitty(boost=1/8,group=16);v=affine-token(levels=4,group=8);block=16;sinks=2",
    "fp16;block=40;recent=11",
};

}  // namespace

TEST_CASE("ten thousand random calls agree with the shadow model") {  // T18, T19
  for (uint64_t i = 0; i < std::size(kLives); ++i) Life(kLives[i], 1000 + i).run(1000 / kSlow);
}

TEST_CASE("five turns of a prompt and single steps, for every pair of widths") {  // T17
  uint32_t number = 0;
  for (uint32_t dim : {128u, 256u})
    for (int k : {4, 8, 16})
      for (int v : {4, 8, 16}) {
        if (++number % (kSlow > 1 ? 6 : 1)) continue;
        Mirror m(Setup{.recipe = "k=affine-channel(levels=" + std::to_string(k) + ",group=32);v=affine-token(levels=" +
                                 std::to_string(v) + ",group=32);block=32",
                       .layers = {layer_of(2, 1, dim)}});
        const kvq_seq s = m.create();
        for (uint32_t turn = 0; turn < 5; ++turn) {
          m.commit(s, ids(500 * turn, 300));
          for (uint32_t i = 0; i < 200; ++i) {
            if (i % 50 == 49)
              m.step({s}, {ids(500 * turn + 300 + i, 1)});
            else
              m.append(s, ids(500 * turn + 300 + i, 1));
          }
        }
        m.check(s);
      }
}

TEST_CASE("the tail stays between recent and recent + block, and memory grows along the packed slope") {  // T6
  Mirror m(Setup{.recipe = "k=affine-channel(levels=16,group=32);v=affine-token(levels=16,group=32);block=32;recent=128",
                 .layers = {layer_of(2, 1, 64)}});
  const kvq_seq s = m.create();
  m.commit(s, ids(0, 1));
  const uint32_t steps = 10000 / kSlow;
  uint64_t at_quarter = 0, at_half = 0;
  for (uint32_t i = 1; i < steps; ++i) {
    m.append(s, {i % 1000});
    const kvq_lengths now = lengths(m.cache, s);
    if (i > 200) REQUIRE((now.tail >= 128 && now.tail < 160));
    if (i == steps / 4) at_quarter = stats(m.cache).bytes_used;
    if (i == steps / 2) at_half = stats(m.cache).bytes_used;
  }
  const uint64_t at_end = stats(m.cache).bytes_used;
  // K: 4 bits and 32 bits per 32 tokens; V: 4 bits and 32 bits per 32 channels: 5 bits each, 2 heads of 64 channels.
  const double slope = 2 * 2 * 64 * 5 / 8.0, page = 64 * slope;
  REQUIRE(double(at_half - at_quarter) <= slope * 1.06 * (steps / 4) + 2 * page + 4096);
  REQUIRE(double(at_end - at_half) <= slope * 1.06 * (steps / 2) + 2 * page + 16384);  // and the sequence's page list
  REQUIRE(double(at_end - at_half) >= slope * (steps / 2) - 2 * page);
}

TEST_CASE("a full sequence refuses more, and all or nothing") {  // T7, T8
  Mirror m(Setup{.recipe = kK4V4, .layers = {layer_of(2, 2, 64), layer_of(2, 2, 64)}, .max_tokens = 100});
  const kvq_seq s = m.create(), other = m.create();
  m.commit(s, ids(0, 60)), m.commit(other, ids(0, 10));
  m.append(s, ids(60, 37));
  const auto full = [&](const std::vector<kvq_seq> &seqs, const std::vector<uint32_t> &counts) {
    const auto picture = m.picture(s);
    const Seen seen = m.query(s, 2);
    const uint64_t used = stats(m.cache).bytes_used;
    kvq_step step = 0;
    refused(kvq_step_begin(m.cache, seqs.data(), counts.data(), uint32_t(seqs.size()), 0, &step), KVQ_E_FULL);
    REQUIRE(detail().find("100") != std::string::npos);
    REQUIRE(step == 0);
    for (kvq_seq q : {s, other}) m.check_lengths(q);
    REQUIRE((m.picture(s) == picture));
    REQUIRE(same_bits(m.query(s, 2), seen));
    REQUIRE(stats(m.cache).bytes_used == used);
  };
  full({s}, {5});
  full({other, s}, {1, 4});  // not one of a batch
  full({s}, {1000});
  kvq_step huge = 0;
  const uint32_t most = UINT32_MAX;
  REQUIRE(kvq_step_begin(m.cache, &s, &most, 1, 0, &huge) < 0);
  refused(m.prefill(s, 0, ids(200, 4), 0, true), KVQ_E_FULL);
  m.append(s, ids(97, 3), 1);
  full({s}, {1});
  m.truncate(s, 90);
  m.append(s, ids(300, 10));
  m.check(s), m.check(other);
}
