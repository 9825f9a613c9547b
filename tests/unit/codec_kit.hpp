// What the tests of codecs share: formats from texts, blocks from numbers, and wire bytes as hex.
#pragma once
#include <catch2/catch_test_macros.hpp>
#include <initializer_list>
#include <span>
#include <string>
#include <vector>

#include "codec/codec.h"
#include "half.hpp"
#include "random.hpp"

namespace kvq_test {

using kvq::Block;
using kvq::Codec;
using kvq::HeadFormat;
using kvq::HeadShape;

inline HeadShape keys(uint32_t dim, uint32_t layout = KVQ_ROPE_HALF) { return {dim, KVQ_TENSOR_K, layout, dim, 0}; }
inline HeadShape values(uint32_t dim) { return {dim, KVQ_TENSOR_V, KVQ_ROPE_HALF, dim, 0}; }

inline HeadFormat format_of(const std::string &text, const HeadShape &shape, std::span<const uint16_t> mu = {}) {
  Codec codec;
  HeadFormat format(std::pmr::get_default_resource());
  INFO(text);
  REQUIRE(kvq::parse_codec(text, false, &codec) == KVQ_OK);
  REQUIRE(kvq::make_format(codec, shape, {}, mu, &format) == KVQ_OK);
  return format;
}

inline std::vector<uint16_t> halves(std::span<const float> x) {
  std::vector<uint16_t> result;
  for (const float value : x) result.push_back(half_bits(value + 0.0f));
  return result;
}

inline std::vector<double> doubles(std::span<const uint16_t> x) {
  std::vector<double> result;
  for (const uint16_t bits : x) result.push_back(half_value(bits));
  return result;
}

// Rows [tokens][dim] as a block.
inline Block encoded(const HeadFormat &format, std::span<const uint16_t> x) {
  Block block(std::pmr::get_default_resource());
  const uint32_t dim = format.shape.dim;
  kvq::encode(format, {x.data(), dim}, uint32_t(x.size() / dim), &block);
  return block;
}
inline Block encoded(const HeadFormat &format, std::span<const float> x) { return encoded(format, halves(x)); }

inline std::vector<float> decoded(const HeadFormat &format, const Block &block) {
  std::vector<float> out(size_t(block.tokens) * format.shape.dim);
  kvq::decode(format, block, out.data());
  return out;
}

inline std::vector<uint8_t> wire_of(const HeadFormat &format, const Block &block) {
  std::vector<uint8_t> wire(kvq::wire_size(format, block.tokens));
  kvq::write_wire(format, block, wire.data());
  return wire;
}

// "0a ff": lower case, a space between bytes.
inline std::string hex(std::span<const uint8_t> bytes) {
  std::string text;
  for (const uint8_t byte : bytes) {
    if (!text.empty()) text += ' ';
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

inline std::string wire_hex(const HeadFormat &format, std::initializer_list<float> x) {
  return hex(wire_of(format, encoded(format, std::span<const float>(x.begin(), x.size()))));
}

inline kvq::Status read_back(const HeadFormat &format, std::span<const uint8_t> wire, uint32_t tokens, Block *block) {
  return kvq::read_wire(format, wire.data(), wire.size(), tokens, block);
}

// Sum of squared errors over the sum of squares.
inline double relative_energy(std::span<const uint16_t> x, std::span<const float> decoded) {
  double error = 0, power = 0;
  for (size_t i = 0; i < x.size(); i++) {
    const double value = half_value(x[i]);
    error += (value - decoded[i]) * (value - decoded[i]);
    power += value * value;
  }
  return error / power;
}

}  // namespace kvq_test
