// raw: fp16 as it entered.  progressive(bits=16) stores the same.
#pragma once
#include "codec/codec.h"

namespace kvq::raw {

void arrange(HeadFormat *format);
void encode(const HeadFormat &format, const HalfRows &rows, Block *block);
void decode(const HeadFormat &format, const Block &block, float *out);
size_t wire_size(const HeadFormat &format, uint32_t tokens);
void write(const HeadFormat &format, const Block &block, uint8_t *wire);
Status read(const HeadFormat &format, const uint8_t *wire, Block *block);

}  // namespace kvq::raw
