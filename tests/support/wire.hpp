// Wire bytes of a block by the stateless codecs, from tokens of a Text: another way to the bytes that a cache exports.
#pragma once
#include <string>

#include "mirror.hpp"

namespace kvq_test {

inline Bytes encoded(Mirror &m, uint32_t layer, uint32_t head, uint32_t tensor, const std::string &text, const Ids &tokens) {
  const Text::Kind kind = tensor == KVQ_TENSOR_K ? Text::K : Text::V;
  const size_t heads = m.text.heads(layer, kind), dim = m.text.dim(layer, kind);
  const Floats all = m.text.rows(layer, kind, tokens);
  Floats rows;
  for (size_t t = 0; t < tokens.size(); ++t)
    rows.insert(rows.end(), all.begin() + long((t * heads + head) * dim), all.begin() + long((t * heads + head + 1) * dim));
  const Tensor x(rows, 1, dim);
  auto codec = sized<kvq_codec>();
  codec.tensor = tensor, codec.text = text.c_str(), codec.dim = uint32_t(dim);
  Bytes wire(rows.size() * 8 + 64);
  size_t needed = 0;
  ok(kvq_codec_encode(&codec, x.view(), tokens.size(), wire.data(), wire.size(), &needed));
  wire.resize(needed);
  return wire;
}

}  // namespace kvq_test
