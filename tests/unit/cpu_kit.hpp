// What the tests of the CPU backend share: a layer whose tokens lie in raw and packed pages, and its attention.
#pragma once
#include <algorithm>
#include <catch2/catch_test_macros.hpp>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "codec_kit.hpp"
#include "cpu/cpu_backend.h"
#include "oracle.hpp"
#include "random.hpp"

namespace kvq_test {

using kvq::LayerShape;
using kvq::PageView;

inline kvq_tensor tensor_of(const void *data, uint32_t heads, uint32_t dim, uint32_t dtype = KVQ_DTYPE_F32) {
  kvq_tensor tensor{};
  tensor.struct_size = sizeof tensor;
  tensor.dtype = dtype;
  tensor.data = const_cast<void *>(data);
  tensor.token_stride = int64_t(heads) * dim;
  tensor.head_stride = dim;
  return tensor;
}

inline LayerShape layer_of(uint32_t kv_heads, uint32_t ratio, uint32_t dim_k, uint32_t dim_v) {
  return {kv_heads, kv_heads * ratio, dim_k, dim_v, KVQ_ROPE_HALF, dim_k, 0, 0, 0};
}

// Options of an attention call.
struct Options {
  uint32_t queries = 1, window = 0;
  float softcap = 0;
  const float *sinks = nullptr;
};

struct Outputs {
  std::vector<float> out, lse;
  bool operator==(const Outputs &) const = default;
};

// One sequence in one layer, with the values that attention must see.
class Cache {
 public:
  explicit Cache(const LayerShape &layer, uint32_t threads = 1, kvq::Memory *memory = nullptr)
      : shape(layer), backend(kvq::make_cpu_backend(memory ? memory : &own_, threads)), k_(layer.kv_heads), v_(layer.kv_heads) {}
  ~Cache() {
    for (const Owned &page : pages_) backend->release_page(page.data, page.bytes);
  }

  std::shared_ptr<const kvq::PageFormat> format(const std::string &k, const std::string &v, uint32_t page_tokens, bool center = false,
                                                Random *random = nullptr) {
    std::pmr::vector<HeadFormat> keys, vals;
    for (uint32_t h = 0; h < shape.kv_heads; h++) {
      std::vector<uint16_t> mu;
      if (center) mu = halves(random->normals(shape.dim_k));
      keys.push_back(format_of(k, shape.head(KVQ_TENSOR_K), mu));
      vals.push_back(format_of(v, shape.head(KVQ_TENSOR_V)));
    }
    formats_.push_back(backend->make_format(shape, page_tokens, std::move(keys), std::move(vals)));
    return formats_.back();
  }

  // Append tokens k [tokens][kv_heads][dim_k] as raw pages, or packed into pages of a format.
  void append(const std::vector<float> &k, const std::vector<float> &v, const kvq::PageFormat *format = nullptr) {
    const uint32_t tokens = uint32_t(k.size() / (shape.kv_heads * shape.dim_k));
    std::vector<kvq::PageRows> raw = store(k, v, tokens);
    if (!format) {
      for (const kvq::PageRows &rows : raw) list(rows, nullptr);
      expect_raw(k, v, tokens);
      return;
    }
    std::vector<kvq::PageRows> packed;
    for (uint32_t t = 0; t < tokens; t += format->page_tokens)
      packed.push_back({allocate(format->bytes), 0, std::min(format->page_tokens, tokens - t)});
    backend->pack(shape, *format, raw, packed);
    for (const kvq::PageRows &rows : packed) list(rows, format);
    expect_packed(*format, packed);
  }

  void *allocate(size_t bytes) {
    pages_.push_back({backend->allocate_page(bytes), bytes});
    return pages_.back().data;
  }

  Outputs attend(const std::vector<float> &q, const Options &options = {}) const {
    Outputs outputs;
    REQUIRE(attend_into(q, options, &outputs) == KVQ_OK);
    return outputs;
  }

  kvq::Status attend_into(const std::vector<float> &q, const Options &options, Outputs *outputs) const {
    outputs->out.assign(size_t(options.queries) * shape.q_heads * shape.dim_v, -7.0f);
    outputs->lse.assign(size_t(options.queries) * shape.q_heads, -7.0f);
    const kvq_tensor query = tensor_of(q.data(), shape.q_heads, shape.dim_k);
    const kvq_tensor out = tensor_of(outputs->out.data(), shape.q_heads, shape.dim_v);
    const kvq::AttendSequence sequence{page_list(), tokens(), 0, options.queries};
    const kvq::AttendCall call{0, &shape, &query, &out, outputs->lse.data(), scale(), options.softcap, options.window, options.sinks, {&sequence, 1}};
    return backend->attend(call, workspace().get());
  }

  // Let the oracle see value order[i] at position i, where pages of token classes list their own positions.
  void reorder(const std::vector<uint32_t> &order) {
    for (auto *tensor : {&k_, &v_})
      for (std::vector<float> &head : *tensor) {
        const size_t dim = head.size() / order.size();
        std::vector<float> sorted;
        for (const uint32_t from : order) sorted.insert(sorted.end(), head.begin() + from * dim, head.begin() + (from + 1) * dim);
        head = sorted;
      }
  }

  // See only tokens [first, end): views and oracle alike.
  void cut(uint32_t first, uint32_t end) {
    first_ = first, end_ = end;
    std::vector<PageView> kept;
    uint32_t at = 0;
    for (PageView view : views) {
      const uint32_t count = view.count, begin = std::max(at, first), stop = std::min(at + count, end);
      if (begin < stop) {
        view.first += begin - at, view.count = stop - begin, view.position = begin - first;
        kept.push_back(view);
      }
      at += count;
    }
    views = kept;
  }
  void uncut() { first_ = 0, end_ = UINT64_MAX; }

  float scale() const { return float(1.0 / std::sqrt(double(shape.dim_k))); }
  std::shared_ptr<kvq::Workspace> workspace() const { return backend->make_workspace({&shape, 1}); }
  kvq::PageList page_list() const {
    return {this, views.size(), [](const void *self, uint32_t, size_t i) { return static_cast<const Cache *>(self)->views[i]; }};
  }
  uint64_t tokens() const { return std::min<uint64_t>(end_, k_[0].size() / shape.dim_k) - first_; }

  // The same in float64.
  Attended exact(const std::vector<float> &q, const Options &options = {}) const {
    std::vector<float> entered, k, v;
    for (const float x : q) entered.push_back(entry(x));
    for (const auto &head : k_) k.insert(k.end(), head.begin() + first_ * shape.dim_k, head.begin() + (first_ + tokens()) * shape.dim_k);
    for (const auto &head : v_) v.insert(v.end(), head.begin() + first_ * shape.dim_v, head.begin() + (first_ + tokens()) * shape.dim_v);
    Attention attention{tokens(), options.queries, shape.q_heads, shape.kv_heads, shape.dim_k, shape.dim_v, entered.data(), k.data(), v.data()};
    attention.scale = scale();
    attention.softcap = options.softcap;
    attention.window = options.window;
    attention.sinks = options.sinks;
    return kvq_test::attend(attention);
  }

  // Section 9: NMSE, largest error and LSE of every query and head.
  void check(const std::vector<float> &q, const Options &options = {}) const {
    const Outputs outputs = attend(q, options);
    const Attended expected = exact(q, options);
    double largest = 0;
    for (const auto &head : v_)
      for (const float x : head) largest = std::max(largest, std::fabs(double(x)));
    for (size_t row = 0; row < outputs.lse.size(); row++) {
      double error = 0, power = 0, worst = 0;
      for (size_t c = 0; c < shape.dim_v; c++) {
        const double want = expected.out[row * shape.dim_v + c], difference = outputs.out[row * shape.dim_v + c] - want;
        error += difference * difference, power += want * want, worst = std::max(worst, std::fabs(difference));
      }
      INFO("row " << row << " error " << error << " power " << power);
      CHECK(error <= 1e-7 * std::max(1.0, expected.variance[row]) * power);
      CHECK(worst <= 1e-3 * largest);
      if (std::isinf(expected.lse[row])) {
        CHECK(outputs.lse[row] == expected.lse[row]);
      } else {
        CHECK(std::fabs(outputs.lse[row] - expected.lse[row]) <= 1e-3 * std::max(1.0, expected.largest[row] / 16));
      }
      worst_nmse = std::max(worst_nmse, power > 0 ? error / power / std::max(1.0, expected.variance[row]) : 0);
    }
  }

  const LayerShape shape;
  std::vector<PageView> views;
  std::deque<std::vector<uint32_t>> positions;
  mutable double worst_nmse = 0;

 private:
  struct Owned {
    void *data;
    size_t bytes;
  };
  kvq::Memory own_;

 public:
  std::shared_ptr<kvq::Backend> backend;

 private:
  std::vector<kvq::PageRows> store(const std::vector<float> &k, const std::vector<float> &v, uint32_t tokens) {
    const kvq_tensor keys = tensor_of(k.data(), shape.kv_heads, shape.dim_k), vals = tensor_of(v.data(), shape.kv_heads, shape.dim_v);
    std::vector<kvq::PageRows> rows;
    uint64_t saturated = 0;
    for (uint32_t t = 0; t < tokens; t += backend->raw_page_tokens()) {
      rows.push_back({allocate(backend->raw_page_bytes(shape)), 0, std::min(backend->raw_page_tokens(), tokens - t)});
      REQUIRE(backend->store_rows(shape, keys, vals, t, rows.back(), &saturated) == KVQ_OK);
    }
    return rows;
  }

  void list(const kvq::PageRows &rows, const kvq::PageFormat *format) {
    PageView view;
    view.page = rows.page, view.format = format, view.first = rows.first, view.count = rows.count, view.position = listed_;
    views.push_back(view);
    listed_ += rows.count;
  }

  void expect_raw(const std::vector<float> &k, const std::vector<float> &v, uint32_t tokens) {
    for (uint32_t t = 0; t < tokens; t++)
      for (uint32_t h = 0; h < shape.kv_heads; h++) {
        for (uint32_t c = 0; c < shape.dim_k; c++) k_[h].push_back(entry(k[(size_t(t) * shape.kv_heads + h) * shape.dim_k + c]));
        for (uint32_t c = 0; c < shape.dim_v; c++) v_[h].push_back(entry(v[(size_t(t) * shape.kv_heads + h) * shape.dim_v + c]));
      }
  }

  void expect_packed(const kvq::PageFormat &format, const std::vector<kvq::PageRows> &packed) {
    for (uint32_t h = 0; h < shape.kv_heads; h++)
      for (uint32_t tensor : {KVQ_TENSOR_K, KVQ_TENSOR_V}) {
        const HeadFormat &head = tensor == KVQ_TENSOR_K ? format.k[h] : format.v[h];
        for (const kvq::PageRows &rows : packed) {
          Block block(std::pmr::get_default_resource());
          backend->unpack(format, rows.page, rows.first, rows.count, h, tensor, &block);
          const std::vector<float> values = decoded(head, block);
          auto &to = tensor == KVQ_TENSOR_K ? k_[h] : v_[h];
          to.insert(to.end(), values.begin(), values.end());
        }
      }
  }

  std::vector<std::vector<float>> k_, v_;  // [kv_heads][tokens][dim]
  std::deque<Owned> pages_;
  std::vector<std::shared_ptr<const kvq::PageFormat>> formats_;
  uint64_t listed_ = 0, first_ = 0, end_ = UINT64_MAX;
};

// Texts of codecs for a head dimension: every kind, and what their options change.
struct CodecCase {
  std::string text;
  uint32_t group;  // tokens that are packed together
};

inline std::string hex_mask(uint32_t bits, uint32_t every) {
  std::string text;
  for (uint32_t byte = 0; byte < (bits + 7) / 8; byte++) {
    uint32_t value = 0;
    for (uint32_t i = byte * 8; i < std::min(bits, byte * 8 + 8); i++) value |= uint32_t(i % every == 0) << i % 8;
    text += "0123456789abcdef"[value >> 4];
    text += "0123456789abcdef"[value & 15];
  }
  return text;
}

inline std::string digits(uint32_t n, const std::string &cycle) {
  std::string text;
  for (uint32_t i = 0; i < n; i++) text += cycle[i * 7 % cycle.size()];
  return text;
}

inline std::vector<CodecCase> codec_cases(uint32_t dim) {
  std::vector<CodecCase> cases = {{"raw", 1}, {"progressive(bits=16)", 1}, {"progressive(bits=8)", 1}, {"progressive(bits=4)", 1}, {"progressive(bits=2)", 1}};
  const std::string d = std::to_string(dim), half = std::to_string(dim / 2);
  for (const int levels : {2, 3, 4, 5, 6, 7, 8, 16, 32, 64, 128, 256}) {
    const std::string l = std::to_string(levels);
    cases.push_back({"affine-channel(levels=" + l + ",group=32)", 32});
    cases.push_back({"affine-token(levels=" + l + ",group=" + d + ")", 1});
    cases.push_back({"affine-token(levels=" + l + ",group=" + d + ",rotate=1)", 1});
    cases.push_back({"lloyd(levels=" + l + ")", 1});
  }
  cases.push_back({"affine-token(levels=4,group=" + half + ")", 1});
  cases.push_back({"affine-token(levels=8,group=2)", 1});
  cases.push_back({"lloyd(levels=6,params=e5m3,scale=ls)", 1});
  cases.push_back({"lloyd(levels=8,rotate=0)", 1});
  cases.push_back({"pair-mix(low=1,high=3,group=64,midpoint=1,mask=" + hex_mask(dim / 2, 3) + ")", 64});
  cases.push_back({"pair-mix(low=1,high=3,group=16,unit=channel,mask=" + hex_mask(dim, 3) + ")", 16});
  cases.push_back({"width-groups(bits=" + digits(dim / 2, "12345678") + ")", 1});
  cases.push_back({"width-groups(params=e5m3,bits=" + digits(dim / 2, "243") + ")", 1});
  cases.push_back({"channel-split(high=8,low=4,mask=" + hex_mask(dim, 2) + ")", 1});
  cases.push_back({"channel-split(high=16,low=3,mask=" + hex_mask(dim, 3) + ")", 1});
  cases.push_back({"kitty(boost=1/8,group=32)", 32});
  cases.push_back({"channel-widths(group=64,midpoint=1,bits=" + digits(dim / 2, "0123") + ")", 64});
  cases.push_back({"channel-widths(group=32,params=e4m3,unit=channel,bits=" + digits(dim, "012345678") + ")", 32});
  cases.push_back({"polar(radius=4,angle=4,group=64)", 64});
  cases.push_back({"polar(radius=8,angle=16,group=32)", 32});
  return cases;
}

}  // namespace kvq_test
