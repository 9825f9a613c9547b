// Truncation, forks, removal and windows against the shadow model.  (Cases R1 to R9, R11 to R18.)
#include <algorithm>

#include "mirror.hpp"

using namespace kvq_test;

namespace {

Setup rows_of(uint32_t block, const std::string &more = "") {
  return {.recipe = "k=lloyd(levels=16);v=affine-token(levels=16,group=16);block=" + std::to_string(block) + more,
          .layers = {layer_of(2, 2, 32), layer_of(2, 2, 32)}};
}
Setup columns(const std::string &more = "") {
  return {.recipe = "k=affine-channel(levels=16,group=32);v=lloyd(levels=8);block=32" + more,
          .layers = {layer_of(2, 2, 64), layer_of(2, 2, 64)}};
}

bool same_wire(const Mirror &a, kvq_seq s, const Mirror &b, kvq_seq t) { return a.picture(s).wire == b.picture(t).wire; }

void require_same(const Mirror &a, kvq_seq s, const Mirror &b, kvq_seq t) { REQUIRE((a.picture(s) == b.picture(t))); }

// A cache in which the same tokens arrived without detours.
struct Fresh {
  Mirror mirror;
  kvq_seq seq;
  Fresh(const Setup &setup, const Ids &tokens, size_t prompt) : mirror(setup), seq(mirror.create()) {
    mirror.commit(seq, part(tokens, 0, prompt));
    mirror.append(seq, part(tokens, prompt, tokens.size()));
  }
};

// Rows [0, count) of an export.
Floats first_rows(const Mirror &m, kvq_seq s, uint32_t layer, uint32_t head, uint32_t tensor, uint64_t count) {
  return export_values(m.cache, s, layer, head, tensor, count, dim_of(m.setup.layers[layer], tensor));
}

}  // namespace

TEST_CASE("truncation into a packed block keeps what is left of it and packs the new tokens apart") {  // R1
  Mirror m(rows_of(8));
  const kvq_seq s = m.create();
  m.commit(s, ids(0, 10));
  m.check(s);
  REQUIRE(lengths(m.cache, s).packed == 8);
  const Floats before = first_rows(m, s, 1, 1, KVQ_TENSOR_K, 4);
  m.truncate(s, 4);
  m.check(s);
  m.append(s, ids(100, 10));
  m.check(s);
  REQUIRE(same_bits(first_rows(m, s, 1, 1, KVQ_TENSOR_K, 4), before));
  const kvq_lengths now = lengths(m.cache, s);
  REQUIRE((now.total == 14 && now.packed == 12 && now.tail == 2));
  for (uint32_t tensor : {KVQ_TENSOR_K, KVQ_TENSOR_V}) {
    const auto blocks = export_wire(m.cache, s, 0, 1, tensor);
    REQUIRE(blocks.size() == 2);
    REQUIRE((blocks[0].tokens == 4 && blocks[1].tokens == 8));
    const Fresh only_new(rows_of(8), ids(100, 8), 8);
    REQUIRE((export_wire(only_new.mirror.cache, only_new.seq, 0, 1, tensor)[0] == blocks[1]));
    const Fresh only_old(rows_of(4), ids(0, 4), 4);  // the codes of removed tokens are gone from the wire of rows
    REQUIRE((export_wire(only_old.mirror.cache, only_old.seq, 0, 1, tensor)[0] == blocks[0]));
  }
  m.query(s, 5);
  m.step({s}, {ids(200, 3)});
}

TEST_CASE("truncation of keys per channel keeps the scale of the whole group") {  // R1
  Mirror m(columns());
  const kvq_seq s = m.create();
  m.commit(s, ids(0, 70));
  const auto whole = export_wire(m.cache, s, 0, 1, KVQ_TENSOR_K);
  m.check(s);
  for (uint64_t length : {60, 41, 33, 32, 9}) {
    m.truncate(s, length);
    m.check(s);
    m.query(s, 3);
    const auto cut = export_wire(m.cache, s, 0, 1, KVQ_TENSOR_K);
    const size_t last = (length - 1) / 32;
    REQUIRE(cut.size() == last + 1);
    REQUIRE(cut[last].tokens == length - 32 * last);
    REQUIRE(cut[last].bytes.size() == whole[last].bytes.size());  // the group is exported whole
    const size_t codes = 64 * 32 / 2;
    REQUIRE(std::equal(cut[last].bytes.begin() + codes, cut[last].bytes.end(), whole[last].bytes.begin() + codes));
    for (size_t i = 0; i < codes * 2; ++i) {  // 4 bits: code i of the stream is of channel i / 32, token i % 32
      const auto code = [&](const Bytes &bytes) { return bytes[i / 2] >> (i % 2 * 4) & 15; };
      REQUIRE(code(cut[last].bytes) == (i % 32 < cut[last].tokens ? code(whole[last].bytes) : 0));
    }
  }
  m.append(s, ids(500, 80));
  m.check(s);
  REQUIRE(lengths(m.cache, s).packed == 9 + 64);
}

TEST_CASE("truncate means just this length, and refuses more") {  // R2
  Mirror m(columns(";sinks=4;recent=20"));
  const kvq_seq s = m.create();
  m.commit(s, ids(0, 150));
  const auto before = m.picture(s);
  m.truncate(s, 150);
  REQUIRE((m.picture(s) == before));
  for (uint64_t more : {uint64_t{151}, uint64_t{1} << 40, UINT64_MAX}) {
    refused(kvq_seq_truncate(m.cache, s, more), KVQ_E_INVALID);
    REQUIRE(detail().find("150") != std::string::npos);
    m.check_lengths(s);
  }
  REQUIRE((m.picture(s) == before));
}

TEST_CASE("truncation to every depth, then growth") {  // R3
  for (const std::string more : {";recent=128", ";recent=128;sinks=4", ";sinks=40"})
    for (uint64_t length : {150, 110, 70, 40, 10, 3, 0}) {
      Mirror m(columns(more));
      const kvq_seq s = m.create();
      m.commit(s, ids(0, 200));
      m.check(s);
      m.truncate(s, length);
      m.check(s);
      m.query(s, std::min<uint32_t>(2, uint32_t(length)));
      m.append(s, ids(300, 3), 1);
      m.check(s);
      m.query(s, 3);
      m.append(s, ids(400, 150), 31);
      m.check(s);
    }
}

TEST_CASE("a draft loop leaves the blocks of the accepted tokens") {  // R4
  for (const bool by_truncation : {true, false})
    for (const char *recent : {";recent=8", ";recent=0"}) {
      Mirror m(columns(recent));
      const kvq_seq s = m.create();
      m.commit(s, ids(0, 50));
      Ids accepted = ids(0, 50);
      Random random(4);
      const uint32_t rounds = 500 / kSlow;
      for (uint32_t i = 0; i < rounds; ++i) {
        const Ids draft = ids(100 + 4 * (i % 400), 4);
        const Look look{.check = i % 25 == 0};
        const uint32_t keep = by_truncation ? 1 : uint32_t(random.below(5));
        if (by_truncation) {
          m.step({s}, {draft}, look);
          m.truncate(s, m.total(s) - 3);
        } else {
          m.step({s}, {draft}, look, {keep});
        }
        accepted.insert(accepted.end(), draft.begin(), draft.begin() + keep);
        if (i % 50 == 0) m.check(s);
      }
      m.check(s);
      REQUIRE(m.shadow(s).tokens == accepted);
      const Fresh fresh(m.setup, accepted, 50);
      if (!by_truncation) {  // a rejected draft of a step never reaches a block
        require_same(m, s, fresh.mirror, fresh.seq);
      } else if (std::string(recent) == ";recent=8") {
        // What is truncated lay in the tail: the blocks hold accepted tokens alone.  Drafts may have made one due a little earlier.
        const auto got = m.picture(s).wire, want = fresh.mirror.picture(fresh.seq).wire;
        for (size_t i = 0; i < got.size(); ++i) {
          REQUIRE((got[i].size() >= want[i].size() && got[i].size() <= want[i].size() + 1));
          REQUIRE(std::equal(want[i].begin(), want[i].end(), got[i].begin()));
        }
      }
    }
}

TEST_CASE("forks go their own ways from the middle of a group") {  // R6
  const Setup setup = columns();
  Mirror m(setup);
  const kvq_seq a = m.create();
  m.commit(a, ids(0, 3));
  const kvq_seq b = m.fork(a), c = m.fork(a, 2);
  m.append(a, ids(10, 2), 1), m.append(b, ids(20, 1)), m.append(c, ids(30, 70));
  for (kvq_seq s : {a, b, c}) {
    m.check(s);
    m.query(s, 2);
    const Ids &tokens = m.shadow(s).tokens;
    const Fresh fresh(setup, tokens, 2);
    require_same(m, s, fresh.mirror, fresh.seq);
  }
  m.remove(a);
  m.append(b, ids(40, 90), 7);
  m.check(b);
  const Fresh fresh(setup, m.shadow(b).tokens, 3);
  require_same(m, b, fresh.mirror, fresh.seq);
}

TEST_CASE("a chain of forks, freed in random order, gives its memory back") {  // R7
  Mirror m(columns());
  m.remove(m.create());
  const kvq_stats baseline = stats(m.cache);
  std::vector<kvq_seq> chain = {m.create()};
  m.commit(chain[0], ids(0, 40));
  for (uint32_t i = 1; i < 50; ++i) {
    chain.push_back(m.fork(chain.back()));
    m.append(chain.back(), ids(100 + i, 1));
  }
  Random random(7);
  while (!chain.empty()) {
    const size_t i = random.below(chain.size());
    m.remove(chain[i]);
    chain.erase(chain.begin() + long(i));
    if (chain.size() % 10 == 5)
      for (kvq_seq s : chain) {
        m.check(s);
        const Fresh fresh(m.setup, m.shadow(s).tokens, 40);
        require_same(m, s, fresh.mirror, fresh.seq);
      }
  }
  const kvq_stats now = stats(m.cache);
  REQUIRE((now.pages_raw == 0 && now.pages_packed == 0 && now.sequences == 0 && now.tokens == 0));
  REQUIRE(now.bytes_used <= baseline.bytes_used + 65536);  // the table of sequences has grown
}

TEST_CASE("a child never sees what becomes of its parent") {  // R8
  for (const std::string &recipe : {columns().recipe, std::string("kvq-3;sinks=4"), std::string("semkv-tq;block=16"), std::string("tq-2c")}) {
    Mirror m(Setup{.recipe = recipe, .layers = columns().layers});
    const kvq_seq parent = m.create();
    m.commit(parent, ids(0, 300));
    m.append(parent, ids(300, 70));
    const kvq_seq child = m.fork(parent, 196), twin = m.fork(parent);
    const auto picture = m.picture(child), twin_picture = m.picture(twin);
    const Seen seen = m.query(child, 3);
    const auto unchanged = [&] {
      m.check(child), m.check(twin);
      REQUIRE((m.picture(child) == picture));
      REQUIRE((m.picture(twin) == twin_picture));
      REQUIRE(same_bits(m.query(child, 3), seen));
    };
    m.truncate(parent, 150), unchanged();
    m.append(parent, ids(500, 200), 33), unchanged();
    m.truncate(parent, 0), unchanged();
    m.remove(parent), unchanged();
    m.append(child, ids(600, 100), 9);
    m.check(child), m.check(twin);
  }
}

TEST_CASE("the same query a hundred times gives the same bits") {  // R9
  Mirror m(columns());
  const kvq_seq parent = m.create();
  m.commit(parent, ids(0, 200));
  const kvq_seq child = m.fork(parent, 150);
  const Seen first = m.query(child, 2);
  for (int i = 0; i < 200; ++i) REQUIRE(same_bits(m.query(child, 2, {.check = false}), first));
}

TEST_CASE("removing every second sequence leaves the others") {  // R11
  Mirror m(columns(";sinks=2;recent=9"));
  std::vector<kvq_seq> all;
  std::vector<Mirror::Picture> pictures;
  for (uint32_t i = 0; i < 16; ++i) {
    all.push_back(m.create());
    m.commit(all[i], ids(200 * i, 50 + 11 * i));
    pictures.push_back(m.picture(all[i]));
  }
  for (size_t i = 0; i < 16; i += 2) m.remove(all[i]);
  const kvq_seq extra = m.create();
  m.commit(extra, ids(5000, 222));
  for (size_t i = 1; i < 16; i += 2) {
    REQUIRE((m.picture(all[i]) == pictures[i]));
    m.query(all[i], 2);
  }
}

TEST_CASE("windows, with rollback across the window's edge") {  // R13
  Setup setup = columns(";sinks=4");
  setup.layers[0].window = 64;
  Mirror m(setup);
  const kvq_seq s = m.create();
  m.commit(s, ids(0, 200));
  m.truncate(s, 197);
  m.step({s}, {ids(200, 5)});
  m.check(s);
  m.append(s, ids(300, 1000), 100);
  m.step({s}, {ids(1300, 3)});
  m.truncate(s, 1100);
  m.step({s}, {ids(1400, 70)});
  m.check(s);
}

TEST_CASE("where every layer has a window memory is bounded, and what a query can reach is right") {  // R12
  Setup narrow = columns(";sinks=4");
  const Setup wide = narrow;
  narrow.layers[0].window = 100, narrow.layers[1].window = 64;
  Mirror m(narrow), all(wide);  // `all` keeps everything and looks through the same window
  const kvq_seq s = m.create(), t = all.create();
  m.commit(s, ids(0, 200)), all.commit(t, ids(0, 200));
  uint64_t most = 0;  // before 1000 tokens: pages come and go
  for (uint32_t at = 200; at < 3000; at += 70) {
    m.append(s, ids(at, 67)), all.append(t, ids(at, 67));
    for (uint32_t window : {64u, 100u}) {
      const Seen want = all.query(t, 3, {.window = window}), own = m.query(s, 3, {.check = false}), got = m.query(s, 3, {.window = window, .check = false});
      const uint32_t layer = window == 100 ? 0 : 1;
      for (const Floats *out : {&own.out[layer], &got.out[layer]}) {
        double error = 0, power = 0;
        for (size_t i = 0; i < out->size(); ++i) {
          const double difference = (*out)[i] - want.out[layer][i];
          error += difference * difference, power += want.out[layer][i] * want.out[layer][i];
        }
        REQUIRE(error <= 1e-6 * power);
      }
    }
    m.append(s, ids(at + 67, 3)), all.append(t, ids(at + 67, 3));
    const uint64_t used = stats(m.cache).bytes_used;
    if (at < 1000)
      most = std::max(most, used);
    else
      REQUIRE(used <= most + 4096);
  }
  // What is gone is refused, never read as something else.
  const Seen before = m.query(s, 2, {.check = false});
  refused(kvq_seq_truncate(m.cache, s, 500), KVQ_E_INVALID);
  kvq_seq child = 0;
  refused(kvq_seq_fork(m.cache, s, 500, &child), KVQ_E_INVALID);
  Floats row(64);
  refused(kvq_export_values(m.cache, s, 0, 0, 0, 300, 1, row.data()), KVQ_E_INVALID);
  const uint32_t one = 1;
  kvq_step step = 0;
  ok(kvq_step_begin(m.cache, &s, &one, 1, KVQ_STEP_QUERY_ONLY, &step));
  const Tensor q = m.tensor(0, Text::Q, ids(0, 1));
  Tensor out(1, 4, 64, KVQ_DTYPE_F32, Lay::packed);
  auto options = sized<kvq_attend_options>();
  options.window = UINT32_MAX;
  refused(kvq_attend(m.cache, step, 0, q.view(), out.view(), nullptr, &options, nullptr), KVQ_E_INVALID);
  ok(kvq_step_abort(m.cache, step));
  m.check_lengths(s);
  REQUIRE(same_bits(m.query(s, 2, {.check = false}), before));
  const uint64_t total = m.total(s);
  m.truncate(s, total - 3), all.truncate(t, total - 3);
  m.append(s, ids(100, 40)), all.append(t, ids(100, 40));
  for (uint32_t head = 0; head < 2; ++head)
    for (uint32_t tensor : {KVQ_TENSOR_K, KVQ_TENSOR_V}) {
      Floats a(100 * 64), b(100 * 64);
      ok(kvq_export_values(m.cache, s, 0, head, tensor, m.total(s) - 100, 100, a.data()));
      ok(kvq_export_values(all.cache, t, 0, head, tensor, m.total(s) - 100, 100, b.data()));
      REQUIRE(same_bits(a, b));
    }
}

TEST_CASE("sinks stay exact through packing, truncation and forks") {  // R14
  Mirror m(columns(";sinks=4"));
  const kvq_seq s = m.create();
  m.commit(s, ids(0, 200));
  m.check(s);
  const kvq_seq child = m.fork(s, 10);
  m.truncate(s, 10);
  for (kvq_seq q : {s, child}) {
    m.check(q);
    m.append(q, ids(q == s ? 300 : 400, 70), 9);
    m.check(q);
    m.query(q, 4);
  }
  m.truncate(s, 2);
  m.append(s, ids(500, 40), 1);
  m.check(s);
  REQUIRE(lengths(m.cache, s).sinks == 4);
  const kvq_seq third = m.fork(child, 3);
  m.append(third, ids(600, 50));
  m.check(third);
}

TEST_CASE("truncated to nothing and refilled") {  // R16
  for (const std::string &recipe : {columns().recipe, std::string("kivi-2-g32"), std::string("tq-1.585"), std::string("kitty;sinks=4")}) {
    const Setup setup{.recipe = recipe, .layers = columns().layers};
    Mirror m(setup);
    const kvq_seq s = m.create();
    m.commit(s, ids(0, 300));
    m.truncate(s, 0);
    REQUIRE(lengths(m.cache, s).committed == 1);
    m.query(s, 2);
    m.append(s, ids(400, 300), 37);
    m.check(s);
    const Fresh fresh(setup, ids(400, 300), 1);
    require_same(m, s, fresh.mirror, fresh.seq);
  }
  for (const char *recipe : {"kvq-3", "pnmix", "tq-2c", "semkv-tq", "blockgtq-k3v3"}) {  // the policy stays as it was frozen
    Mirror m(Setup{.recipe = recipe, .layers = columns().layers});
    const kvq_seq s = m.create();
    m.commit(s, ids(0, 300));
    const Bytes policy = policy_blob(m.cache, s);
    m.truncate(s, 0);
    m.append(s, ids(400, 300), 37);
    m.check(s);
    m.query(s, 2);
    REQUIRE(policy_blob(m.cache, s) == policy);
  }
}

TEST_CASE("SemKV selects among the tokens that are still pending") {  // R17
  const Setup setup{.recipe = "semkv-tq;block=16", .layers = columns().layers};
  Mirror m(setup);
  const kvq_seq s = m.create();
  m.commit(s, ids(0, 30));
  m.append(s, ids(100, 9), 4);
  m.truncate(s, 34);
  m.append(s, ids(200, 12), 5);
  REQUIRE(lengths(m.cache, s).packed == 46);
  m.check(s);
  Ids kept = ids(0, 30);
  for (uint32_t id : {100, 101, 102, 103}) kept.push_back(id);
  for (uint32_t id : ids(200, 12)) kept.push_back(id);
  const Fresh fresh(setup, kept, 30);
  require_same(m, s, fresh.mirror, fresh.seq);
}

TEST_CASE("SemKV truncated inside prompts and blocks goes on in new ones") {
  for (uint64_t length : {1, 17, 30, 31, 45, 46, 50}) {
    Mirror m(Setup{.recipe = "semkv-tq;block=16", .layers = columns().layers});
    const kvq_seq s = m.create();
    m.commit(s, ids(0, 30));
    m.append(s, ids(100, 20), 3);
    m.end_turn(s);
    m.check(s);
    m.truncate(s, length);
    m.check(s);
    m.query(s, 1);
    m.append(s, ids(200, 40), 7);
    m.check(s);
    m.commit(s, ids(300, 25), 10);
    m.check(s);
    m.query(s, 3);
  }
}

TEST_CASE("an id that has ended, or of another cache, is stale and never another sequence") {  // R18
  Mirror m(columns()), other(columns());
  const kvq_seq s = m.create(), foreign = other.create();
  m.commit(s, ids(0, 50)), other.commit(foreign, ids(0, 60));
  const kvq_seq gone = m.create();
  m.remove(gone);
  const kvq_seq reused = m.create();
  m.commit(reused, ids(0, 33));
  auto length = sized<kvq_lengths>();
  float row[64];
  for (kvq_seq bad : {gone, foreign, kvq_seq{0}, ~kvq_seq{0}, s + (kvq_seq{1} << 32), s ^ (kvq_seq{1} << 63)}) {
    if (bad == s || bad == reused) continue;
    INFO("id " << std::hex << bad);
    const uint32_t one = 1;
    kvq_step step = 0;
    kvq_seq child = 0;
    refused(kvq_seq_length(m.cache, bad, &length), KVQ_E_STALE);
    refused(kvq_seq_truncate(m.cache, bad, 0), KVQ_E_STALE);
    refused(kvq_seq_fork(m.cache, bad, 0, &child), KVQ_E_STALE);
    refused(kvq_end_turn(m.cache, bad), KVQ_E_STALE);
    refused(kvq_step_begin(m.cache, &bad, &one, 1, 0, &step), KVQ_E_STALE);
    refused(m.prefill(bad, 0, ids(0, 1), 0, true), KVQ_E_STALE);
    refused(kvq_export_values(m.cache, bad, 0, 0, 0, 0, 1, row), KVQ_E_STALE);
    refused(kvq_seq_remove(m.cache, bad), KVQ_E_STALE);
  }
  m.check(s), m.check(reused), other.check(foreign);
}

TEST_CASE("a sequence in an open step refuses other changes") {
  Mirror m(columns());
  const kvq_seq s = m.create(), other = m.create();
  m.commit(s, ids(0, 50)), m.commit(other, ids(0, 20));
  const auto before = m.picture(s);
  const uint32_t count = 3;
  kvq_step step = 0, second = 0;
  kvq_seq child = 0;
  ok(kvq_step_begin(m.cache, &s, &count, 1, 0, &step));
  refused(kvq_seq_truncate(m.cache, s, 10), KVQ_E_STATE);
  refused(kvq_seq_remove(m.cache, s), KVQ_E_STATE);
  refused(kvq_seq_fork(m.cache, s, 10, &child), KVQ_E_STATE);
  refused(kvq_step_begin(m.cache, &s, &count, 1, 0, &second), KVQ_E_STATE);
  refused(m.prefill(s, 0, ids(50, 3), 0, true), KVQ_E_STATE);
  refused(m.finish(s), KVQ_E_STATE);
  m.append(other, ids(20, 30));  // others go on
  m.check(other);
  ok(kvq_step_abort(m.cache, step));
  refused(kvq_step_end(m.cache, step, nullptr, nullptr), KVQ_E_STALE);
  REQUIRE((m.picture(s) == before));
  m.append(s, ids(50, 40));
  m.check(s);
}

TEST_CASE("an uncommitted prompt is cut in all layers alike") {
  Mirror m(columns(";sinks=4"));
  const kvq_seq s = m.create();
  m.chunk(s, ids(0, 60));
  ok(m.prefill(s, 0, ids(60, 20), 0, true));  // layer 0 is ahead
  m.check_lengths(s);
  kvq_seq child = 0;
  refused(kvq_seq_fork(m.cache, s, 10, &child), KVQ_E_STATE);
  refused(m.finish(s), KVQ_E_STATE);
  m.truncate(s, 50);
  m.chunk(s, ids(100, 30));
  const kvq_seq twin = m.fork(s, 70);
  m.chunk(s, {}, true), m.chunk(twin, ids(100, 5), true);
  for (kvq_seq q : {s, twin}) {
    m.check(q);
    m.query(q, 2);
    const Fresh fresh(m.setup, m.shadow(q).tokens, m.total(q));
    REQUIRE(same_wire(m, q, fresh.mirror, fresh.seq));
  }
}
