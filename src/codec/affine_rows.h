// Affine rows: a scale and a zero per token and group of channels (KIVI's values, SemKV's rows, PM-KVQ's chain).
#pragma once
#include "codec/codec.h"

namespace kvq::affine_rows {

// One class of format->codec.levels levels.
void arrange(HeadFormat *format);
// Rule 2.1 with `levels` levels, whatever the format has.
void encode_levels(const HeadFormat &format, uint32_t levels, const HalfRows &rows, Block *block);
void encode(const HeadFormat &format, const HalfRows &rows, Block *block);
void decode(const HeadFormat &format, const Block &block, float *out);
size_t wire_size(const HeadFormat &format, uint32_t tokens);
void write(const HeadFormat &format, const Block &block, uint8_t *wire);
Status read(const HeadFormat &format, const uint8_t *wire, Block *block);

}  // namespace kvq::affine_rows
