// Numbers that break caches: zeros, constants, outliers, underflow, infinities, large products.  (Cases V1 to V10, V12 to V14.)
#include <limits>

#include "mirror.hpp"

using namespace kvq_test;

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// One layer whose K and V the test writes itself: [token][head][dim].
struct Raw {
  kvq_layer layer;
  Cache cache;
  kvq_seq seq = 0;
  uint64_t tokens = 0;

  Raw(const std::string &recipe, const kvq_layer &l) : layer(l), cache(Setup{.recipe = recipe, .layers = {l}}) {
    ok(kvq_seq_create(cache, &seq));
  }
  int32_t commit(const Floats &k, const Floats &v, uint32_t dtype = KVQ_DTYPE_F32) {
    const Tensor keys(k, layer.kv_heads, layer.dim_k, dtype), values(v, layer.kv_heads, dim_v(layer), dtype);
    auto desc = sized<kvq_prefill>();
    desc.flags = KVQ_PREFILL_FINAL;
    desc.n_tokens = k.size() / (layer.kv_heads * layer.dim_k);
    desc.k = keys.view(), desc.v = values.view();
    const int32_t status = kvq_prefill_commit(cache, seq, &desc, nullptr);
    if (status == KVQ_OK) tokens += desc.n_tokens;
    return status;
  }
  Floats values(uint32_t head, uint32_t tensor) const {
    return export_values(cache, seq, 0, head, tensor, tokens, dim_of(layer, tensor));
  }
  // Attention of n queries, checked against float64 over the export.
  Floats query(const Floats &q, const std::source_location where = std::source_location::current()) {
    const uint32_t n = uint32_t(q.size() / (layer.q_heads * layer.dim_k)), value_dim = dim_v(layer);
    const Tensor queries(q, layer.q_heads, layer.dim_k);
    Tensor out(n, layer.q_heads, value_dim, KVQ_DTYPE_F32, Lay::packed);
    Floats lse(n * layer.q_heads), entered = q, k, v;
    kvq_step step = 0;
    ok(kvq_step_begin(cache, &seq, &n, 1, KVQ_STEP_QUERY_ONLY, &step));
    ok(kvq_attend(cache, step, 0, queries.view(), out.view(), lse.data(), nullptr, nullptr));
    ok(kvq_step_end(cache, step, nullptr, nullptr));
    for (float &x : entered) x = entry(x);
    for (uint32_t head = 0; head < layer.kv_heads; ++head) {
      const Floats a = values(head, KVQ_TENSOR_K), b = values(head, KVQ_TENSOR_V);
      k.insert(k.end(), a.begin(), a.end()), v.insert(v.end(), b.begin(), b.end());
    }
    const Attended want = attend({tokens, n, layer.q_heads, layer.kv_heads, layer.dim_k, value_dim, entered.data(), k.data(),
                                  v.data(), 0, 0, 0, nullptr});
    double largest = 0;
    for (float x : v) largest = std::max(largest, std::fabs(double(x)));
    const Floats got = out.values();
    for (size_t row = 0; row < lse.size(); ++row) {
      const double error = attention_error(&got[row * value_dim], &want.out[row * value_dim], value_dim, want.variance[row], largest);
      const double lse_error = std::fabs(lse[row] - want.lse[row]) / (1e-3 * std::max(1.0, want.largest[row] / 16));
      if (!(error <= 1) || !(lse_error <= 1))
        FAIL(where.file_name() << ":" << where.line() << ": row " << row << ": " << error << " and lse " << lse_error
                               << " times the tolerance, seed " << seed());
    }
    return got;
  }
};

const char *const kColumn = "k=affine-channel(levels=16,group=32);v=affine-token(levels=16,group=32);block=32";

std::string keys_with(const std::string &codec) { return "k=" + codec + ";v=affine-token(levels=16,group=32);block=32"; }

const std::string kAnyKeys[] = {"affine-channel(levels=4,group=32)", "affine-channel(levels=16,group=32,midpoint=1)",
                                "affine-channel(levels=2,group=32,midpoint=1)", "lloyd(levels=4)", "lloyd(levels=8,scale=unbiased)",
                                "lloyd(levels=3,params=e5m3)", "polar(radius=4,angle=4,group=32)", "kitty(boost=1/32,group=32)",
                                "affine-token(levels=5,group=128,rotate=1)"};

float largest_error(const Floats &got, const Floats &k, size_t heads, size_t head, size_t dim, size_t channel) {
  float worst = 0;
  for (size_t t = 0; t * dim < got.size(); ++t)
    worst = std::max(worst, std::fabs(got[t * dim + channel] - k[(t * heads + head) * dim + channel]));
  return worst;
}

}  // namespace

TEST_CASE("zero channels, zero values and zero keys") {  // V1
  Random random(1);
  for (const std::string &codec : kAnyKeys) {
    INFO(codec);
    const kvq_layer layer = layer_of(2, 2, 128);
    Floats k = random.rows(70, 2, 128), v = random.rows(70, 2, 128);
    const Floats q = random.normals(4 * 128, 0.3);
    for (size_t t = 0; t < 140; ++t) v[t * 128 + 5] = 0, k[t * 128 + 5] = 0;
    Raw zero_channel(keys_with(codec), layer);
    ok(zero_channel.commit(k, v));
    zero_channel.query(q);
    const bool by_channel = codec.starts_with("affine-channel") || codec.starts_with("kitty");
    for (uint32_t head = 0; head < 2 && by_channel; ++head) {
      const Floats keys = zero_channel.values(head, KVQ_TENSOR_K);
      for (size_t t = 0; t < 70; ++t) REQUIRE(keys[t * 128 + 5] == 0.0f);
    }

    Raw zero_values(keys_with(codec), layer);
    ok(zero_values.commit(k, Floats(v.size(), 0.0f)));
    for (float x : zero_values.query(q)) REQUIRE(x == 0.0f);

    Raw zero_keys(keys_with(codec), layer);
    ok(zero_keys.commit(Floats(k.size(), 0.0f), v));
    for (float x : zero_keys.values(1, KVQ_TENSOR_K)) REQUIRE((x == 0.0f && !std::signbit(x)));
    const Floats out = zero_keys.query(q);
    for (size_t head = 0; head < 2; ++head) {
      const Floats values = zero_keys.values(uint32_t(head), KVQ_TENSOR_V);
      for (size_t c = 0; c < 128; ++c) {
        double mean = 0;
        for (size_t t = 0; t < 70; ++t) mean += values[t * 128 + c] / 70.0;
        REQUIRE(std::fabs(out[2 * head * 128 + c] - mean) <= 1e-3 * 30);
      }
    }
  }
}

TEST_CASE("a constant key group decodes to its constant") {  // V2, V4
  for (float c : {0.0f, 1e-8f, 0.01f, 1.0f, -3.25f, 100.0f, -100.0f, 6e4f})
    for (const char *codec : {"affine-channel(levels=2,group=32)", "affine-channel(levels=2,group=32,midpoint=1)",
                              "affine-channel(levels=4,group=32)", "affine-channel(levels=8,group=32,midpoint=1)",
                              "affine-channel(levels=16,group=32)"}) {
      INFO(codec << " " << c);
      Random random(2);
      Raw raw(keys_with(codec), layer_of(2, 1, 64));
      Floats k = random.rows(64, 2, 64);
      for (size_t row = 0; row < 128; ++row) k[row * 64 + 9] = c;
      Floats v(64 * 2 * 64, c);
      ok(raw.commit(k, v));
      for (uint32_t head = 0; head < 2; ++head) {
        const Floats keys = raw.values(head, KVQ_TENSOR_K), values = raw.values(head, KVQ_TENSOR_V);
        const bool middle = std::string_view(codec).find("midpoint") != std::string_view::npos;
        const double ulp = c == 0 ? 0 : std::fabs(entry(c)) * 0x1p-10 + 0x1p-24;  // of the stored zero
        for (size_t t = 0; t < 64; ++t) {
          REQUIRE(std::fabs(keys[t * 64 + 9] - double(entry(c))) <= (middle ? ulp : 0));
          REQUIRE(values[t * 64 + 9] == entry(c));
        }
      }
    }
}

TEST_CASE("one fp16 step above a constant stays within half a step") {  // V3
  Raw raw(kColumn, layer_of(2, 1, 32));
  Floats k(32 * 2 * 32, 100.0f);
  k[2 * 32 * 7 + 3] = 100.0625f;
  ok(raw.commit(k, k));
  const Floats got = raw.values(0, KVQ_TENSOR_K);
  REQUIRE(largest_error(got, k, 2, 0, 32, 3) <= 0.03125f);
  REQUIRE(got[7 * 32 + 3] > 100.0f);
  REQUIRE(got[6 * 32 + 3] == 100.0f);
}

TEST_CASE("codes do not depend on the scale of the data") {  // V5
  Random random(5);
  Floats base(32 * 64);
  for (float &x : base) x = float(int(random.below(2049)) - 1024) / 256;
  for (int levels : {4, 8, 16}) {
    const std::string text = "affine-channel(levels=" + std::to_string(levels) + ",group=32)";
    auto codec = sized<kvq_codec>();
    codec.text = text.c_str();
    codec.dim = 64;
    Bytes first;
    Floats first_values;
    for (int shift = 0; shift <= 12; ++shift) {
      Floats x = base, out(base.size());
      for (float &value : x) value = std::ldexp(value, -shift);
      const Tensor tensor(x, 1, 64);
      size_t size = 0;
      refused(kvq_codec_encode(&codec, tensor.view(), 32, nullptr, 0, &size), KVQ_E_SIZE);
      Bytes wire(size);
      ok(kvq_codec_encode(&codec, tensor.view(), 32, wire.data(), size, nullptr));
      ok(kvq_codec_decode(&codec, wire.data(), size, 32, out.data()));
      wire.resize(64 * 32 * size_t(std::bit_width(unsigned(levels - 1))) / 8);  // codes come first
      if (shift == 0) first = wire, first_values = out;
      INFO(text << " shift " << shift);
      REQUIRE(wire == first);
      // Ranges above 5 keep scale and zero above 2^-14 at every shift: they scale exactly, and no floor lifts them.
      for (size_t i = 0; i < out.size(); ++i) REQUIRE(std::ldexp(out[i], shift) == first_values[i]);
    }
  }
}

TEST_CASE("an outlier beyond fp16 saturates, is counted, and spoils only its own group") {  // V6
  for (uint32_t type : {KVQ_DTYPE_BF16, KVQ_DTYPE_F32}) {
    Random random(6);
    Floats k(2 * 128), v(2 * 128);
    for (float &x : k) x = round_to(float(random.normal()), type);
    for (float &x : v) x = round_to(float(-1 + 5 * random.uniform()), type);
    Raw calm(kColumn, layer_of(2, 1, 128)), wild(kColumn, layer_of(2, 1, 128));
    Floats outlier = v;
    outlier[128 + 70] = 125000;
    for (Raw *raw : {&calm, &wild}) {
      Floats keys, values;
      for (int t = 0; t < 32; ++t) {
        keys.insert(keys.end(), k.begin(), k.end());
        const Floats &row = raw == &wild && t == 0 ? outlier : v;
        values.insert(values.end(), row.begin(), row.end());
      }
      ok(raw->commit(keys, values, type));
    }
    REQUIRE(stats(calm.cache).saturated == 0);
    REQUIRE(stats(wild.cache).saturated == 1);
    const Floats a = calm.values(1, KVQ_TENSOR_V), b = wild.values(1, KVQ_TENSOR_V);
    const double step = (65504 + 1) / 15.0 * 1.001;
    for (size_t c = 0; c < 128; ++c) {
      REQUIRE(std::isfinite(b[c]));
      if (c < 64 || c >= 96)
        REQUIRE(a[c] == b[c]);
      else
        REQUIRE(std::fabs(b[c] - std::min(outlier[128 + c], 65504.0f)) <= step / 2 + 1);
    }
    wild.query(random.normals(256, 0.2));
  }
}

TEST_CASE("ranges beyond fp16 stay finite and within half a step") {  // V7
  for (uint32_t levels : {2u, 4u, 8u, 16u})
    for (bool middle : {false, true}) {
      const std::string codec =
          "affine-channel(levels=" + std::to_string(levels) + ",group=32" + (middle ? ",midpoint=1)" : ")");
      INFO(codec);
      Random random(7);
      Raw raw(keys_with(codec), layer_of(2, 1, 64));
      Floats k = random.rows(32, 2, 64);
      for (size_t t = 0; t < 32; ++t) k[(2 * t + 1) * 64 + 11] = t % 2 ? -6e4f : 6e4f;
      ok(raw.commit(k, random.rows(32, 2, 64), KVQ_DTYPE_F16));
      const Floats got = raw.values(1, KVQ_TENSOR_K);
      for (float x : got) REQUIRE(std::isfinite(x));
      for (float &x : k) x = entry(x);
      REQUIRE(largest_error(got, k, 2, 1, 64, 11) <= 0.51 * 120000.0 / (middle ? levels : levels - 1));
      raw.query(random.normals(128, 0.01));
    }
}

TEST_CASE("spreads below fp16 count as constant") {  // V8
  Random random(8);
  Raw raw(kColumn, layer_of(2, 1, 64));
  Floats k = random.rows(32, 2, 64);
  for (size_t t = 0; t < 32; ++t) {
    k[2 * t * 64 + 1] = 1 + float(t) * 1e-8f;
    k[2 * t * 64 + 2] = float(1e-8 * random.normal());
  }
  ok(raw.commit(k, k));
  const Floats got = raw.values(0, KVQ_TENSOR_K);
  for (float x : got) REQUIRE(std::isfinite(x));
  REQUIRE(largest_error(got, k, 2, 0, 64, 1) <= 1e-6f);
  REQUIRE(largest_error(got, k, 2, 0, 64, 2) <= 2e-7f);
}

TEST_CASE("keys far from zero lose what fp16 cannot hold, and no more") {  // V9
  for (double offset : {921.0, 0.0}) {
    Random random(9);
    Raw raw(kColumn, layer_of(2, 1, 64));
    Floats k = random.normals(32 * 2 * 64, 0.05, offset);
    ok(raw.commit(k, k));
    const Floats got = raw.values(1, KVQ_TENSOR_K);
    for (size_t c = 0; c < 64; ++c) {
      float lo = kInfinity, hi = -kInfinity;
      for (size_t t = 0; t < 32; ++t) {
        const float x = entry(k[(2 * t + 1) * 64 + c]);
        lo = std::min(lo, x), hi = std::max(hi, x);
      }
      const double range = hi - lo, entry_rounding = offset != 0 ? 0.2501 : 0x1p-14;
      REQUIRE(largest_error(got, k, 2, 1, 64, c) <= range / 30 + 0x1p-11 * range + entry_rounding);  // and that of the scale
    }
  }
}

TEST_CASE("dot products beyond fp16") {  // V10
  Random random(10);
  for (const std::string &codec : {std::string("raw"), kAnyKeys[1], std::string("lloyd(levels=16)")}) {
    Raw raw(keys_with(codec), layer_of(2, 1, 128));
    Floats direction = random.normals(128);
    double norm = 0;
    for (float x : direction) norm += double(x) * x;
    Floats k, q;
    for (int t = 0; t < 64; ++t)
      for (float x : direction) k.push_back(float(x * 316 / std::sqrt(norm) * (t % 64 < 32 ? 1 : 0.99)));
    for (int head = 0; head < 2; ++head)
      for (float x : direction) q.push_back(float(x * 316 / std::sqrt(norm)));
    Floats both;
    for (int t = 0; t < 32; ++t)
      for (int head = 0; head < 2; ++head) both.insert(both.end(), k.begin() + (t + 32 * head) * 128, k.begin() + (t + 32 * head + 1) * 128);
    ok(raw.commit(both, random.rows(32, 2, 128), KVQ_DTYPE_F16));
    for (float x : raw.query(q)) REQUIRE(std::isfinite(x));
  }
}

TEST_CASE("one bad element is refused, named, and changes nothing") {  // V13
  const Setup setup{.recipe = "kvq-3;sinks=4", .layers = {layer_of(2, 2, 64), layer_of(2, 2, 64)}};
  for (float bad : {kNaN, kInfinity, -kInfinity})
    for (int where = 0; where < 3; ++where) {
      Mirror m(setup);
      const kvq_seq s = m.create();
      m.commit(s, ids(0, 300));
      const auto before = m.picture(s);
      const Seen seen = m.query(s, 2);
      const uint64_t used = stats(m.cache).bytes_used;
      Floats k = m.text.rows(1, Text::K, ids(300, 20)), v = m.text.rows(1, Text::V, ids(300, 20)), q = m.text.rows(1, Text::Q, ids(300, 20));
      (where == 0 ? k : v)[(17 * 2 + 1) * 64 + (where == 0 ? 3 : 9)] = bad;
      const Tensor keys(k, 2, 64), values(v, 2, 64), queries(q, 4, 64);
      const auto words = [&](int32_t status) {
        refused(status, KVQ_E_NONFINITE);
        const std::string text = detail();
        INFO(text);
        for (const char *word : {"layer 1", "head 1"}) REQUIRE(text.find(word) != text.npos);
        REQUIRE((text.find("token 17") != text.npos || text.find("token 317") != text.npos));  // of the call or of the sequence
        REQUIRE(text.find(where == 0 ? "channel 3" : "channel 9") != text.npos);
      };
      if (where < 2) {
        auto desc = sized<kvq_prefill>();
        desc.layer = 1, desc.n_tokens = 20, desc.k = keys.view(), desc.v = values.view(), desc.q = queries.view();
        words(kvq_prefill_commit(m.cache, s, &desc, nullptr));
      } else {
        const uint32_t count = 20;
        kvq_step step = 0;
        ok(kvq_step_begin(m.cache, &s, &count, 1, 0, &step));
        words(kvq_append(m.cache, step, 1, keys.view(), values.view(), nullptr, nullptr));
        ok(kvq_step_abort(m.cache, step));
      }
      REQUIRE((m.picture(s) == before));
      REQUIRE(same_bits(m.query(s, 2), seen));
      REQUIRE(stats(m.cache).bytes_used <= used + 65536);
      m.append(s, ids(300, 20));
      m.check(s);
    }
}

TEST_CASE("no scale is dropped: keys a thousand times as large") {  // V14
  Random random(14);
  for (const char *codec : {"affine-channel(levels=4,group=32)", "affine-channel(levels=8,group=32,midpoint=1)", "lloyd(levels=8)",
                            "affine-token(levels=6,group=64,rotate=1)"}) {
    const Floats k = random.normals(64 * 2 * 64, 0.5), v = random.rows(64, 2, 64);
    Floats entered = k, large = k;
    for (size_t i = 0; i < k.size(); ++i) entered[i] = entry(k[i]), large[i] = entered[i] * 1024;
    Raw one(keys_with(codec), layer_of(2, 2, 64)), thousand(keys_with(codec), layer_of(2, 2, 64));
    ok(one.commit(entered, v, KVQ_DTYPE_F16)), ok(thousand.commit(large, v, KVQ_DTYPE_F16));
    for (uint32_t head = 0; head < 2; ++head) {
      const Floats a = one.values(head, KVQ_TENSOR_K), b = thousand.values(head, KVQ_TENSOR_K);
      for (size_t i = 0; i < a.size(); ++i) REQUIRE(b[i] == 1024 * a[i]);
    }
    const Floats q = random.normals(2 * 4 * 64, 0.3);
    one.query(q), thousand.query(q);
  }
}
