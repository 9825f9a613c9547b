// Codecs: the quantizers of FORMATS (conformance/SPEC.md) sections 2 to 5, for one tensor of one KV head.
//
//   text --parse_codec--> Codec --make_format (+ table of a policy)--> HeadFormat
//   fp16 rows --encode--> Block --write_wire--> bytes            (and a backend's own page layout, see backend/)
//   bytes --read_wire--> Block --decode--> float32 rows
//
// A Block holds codes one per byte and parameters as stored bit patterns, so numerics, wire bytes and page layouts know nothing
// of each other.  Everything here is bit-exact by the rules of section 1: fp32, no contraction.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "util/loops.h"
#include "util/memory.h"
#include "util/status.h"

namespace kvq {

enum class Kind : uint8_t {
  raw,
  affine_channel,
  affine_token,
  lloyd,
  pair_mix,
  width_groups,
  channel_split,
  kitty,
  channel_widths,
  polar,
  progressive
};
enum class ScaleRule : uint8_t {
  matched,
  plain,
  ls,
  unbiased
};
enum class ParamType : uint8_t {
  fp16,
  e4m3,
  e5m3
};

struct Ratio {
  uint64_t p = 0, q = 1;
};

// A codec text, parsed.  Fields that a kind does not use stay at their defaults.
struct Codec {
  Kind kind = Kind::raw;
  uint32_t levels = 0;       // affine-*, lloyd; polar: radius; progressive: 2^bits (0: 16 bits, raw)
  uint32_t low = 0, high = 0;  // pair-mix: bits; channel-split: levels; polar: high = angle levels
  uint32_t group = 0;        // G tokens (column codecs) or g channels (affine-token); kGroupIsDim until resolved
  bool midpoint = false, rotate = false, center = false, by_channel = false;
  ScaleRule scale = ScaleRule::matched;
  ParamType params = ParamType::fp16;
  uint64_t seed = kDefaultSeed;
  Ratio boost{};              // kitty
  bool has_table = false;    // mask= or bits= was given
  std::pmr::vector<uint8_t> table;  // one byte per unit: width, or 0/1 of a mask
  static constexpr uint32_t kGroupIsDim = UINT32_MAX;
  static constexpr uint64_t kDefaultSeed = 0x6B76715F73656564u;
};

// Which channels form pairs (section 5, "Pairs"), and which tensor it is (rotation signs).
struct HeadShape {
  uint32_t dim = 0;
  uint32_t tensor = KVQ_TENSOR_K;
  uint32_t rope_layout = KVQ_ROPE_HALF;
  uint32_t rotary_dim = 0, rotary_first = 0;  // resolved: rotary_dim is never 0
};

// Column codecs have a scale and zero per channel and group of tokens; row codecs have scalars per token.
bool is_row(Kind kind);
// Does the codec need a mask or width list, and how many entries for this shape (0: none)?
uint32_t table_entries(const Codec &codec, const HeadShape &shape);
// Tokens that must be packed together: G for column codecs, 1 for row codecs.
uint32_t group_tokens(const Codec &codec);

// Parse the text of section 5.  group=D is accepted where `allow_group_dim`.  INVALID names the key.
// A missing mask=/bits= is legal here (has_table = false); make_format refuses it if no table is given either.
Status parse_codec(std::string_view text, bool allow_group_dim, Codec *codec);
// The canonical text, with its table if it has one.
std::string print_codec(const Codec &codec);
// Resolve group=D and check everything that depends on the shape (g divides dim, table sizes, ...).
Status resolve_codec(Codec *codec, const HeadShape &shape);

// Slots [first, first + count) share a level count; for codebook rows also a rotation and a scalar.
struct SlotClass {
  uint32_t levels = 0;   // 1: no codes (width 0)
  uint32_t first = 0, count = 0;
  uint32_t rotation = 0;  // group index k of section 3
};

// A codec with its tables resolved for one head.  A slot is a stored column: slot j holds channel channel[j] (for rotated classes
// the j-th rotated value of the class; the channels are those that enter its rotation, in order).
struct HeadFormat {
  explicit HeadFormat(std::pmr::memory_resource *memory) : codec{}, channel(memory), classes(memory), table(memory), mu(memory) {}
  Codec codec;                            // its own table is empty; see `table`
  HeadShape shape;
  std::pmr::vector<uint32_t> channel;     // [dim] slot -> channel.  polar: the slot; radii, then angles, of pair j % (dim/2)
  std::pmr::vector<SlotClass> classes;    // ascending slots, none empty; pair-mix: low, high.  kitty: one class of 16 levels
  std::pmr::vector<uint8_t> table;        // as given
  std::pmr::vector<uint16_t> mu;          // fp16 [dim] with center=1, else empty
  const Loops *loops = &loops_portable;   // what encodes it on the host; make_format asks the processor
  uint32_t token_params = 0;              // of row codecs.  affine-token: [group]{s, z}; codebook rows: [class] h
};

// Build the format of one head.  table: as Codec::table, empty where table_entries is 0; mu: fp16 [dim] if codec.center.
Status make_format(const Codec &codec, const HeadShape &shape, std::span<const uint8_t> table, std::span<const uint16_t> mu,
                   HeadFormat *format);

// Tokens of one head and tensor, unpacked.  Parameters are stored bit patterns: fp16 in 16 bits, e4m3 and e5m3 in the low 8.
struct Block {
  explicit Block(std::pmr::memory_resource *memory) : codes(memory), params(memory), boosted(memory) {}
  uint32_t tokens = 0;
  std::pmr::vector<uint8_t> codes;    // [tokens][dim] by slot; empty for raw
  std::pmr::vector<uint16_t> params;  // row: [tokens][token_params]; column: [groups][dim slots]{s, z}; raw: [tokens][dim] fp16
  std::pmr::vector<uint8_t> boosted;  // kitty: [groups][dim] position byte of section 5; else empty
};

// Parameters of `tokens` tokens in Block::params.
size_t block_params(const HeadFormat &format, uint32_t tokens);

// Entered rows (fp16, no NaN, no infinity, no -0): x[token * token_stride + channel * channel_stride], one of the strides 1.
struct HalfRows {
  const uint16_t *x;
  size_t token_stride, channel_stride = 1;
  HalfRows from(size_t token) const { return {x + token * token_stride, token_stride, channel_stride}; }
};

// Encode rows.  Column codecs take whole groups.
void encode(const HeadFormat &format, const HalfRows &rows, uint32_t tokens, Block *block);
// Decode to float32 [tokens][dim], by channel.  A trailing partial group is allowed (ragged blocks).
void decode(const HeadFormat &format, const Block &block, float *out);

// progressive: the block of `from` at the narrower width of `to`, by the steps of section 2.5 (from 16 bits: from the rows).
void narrow(const HeadFormat &from, const Block &block, const HeadFormat &to, Block *out);

// Wire form of section 5.
size_t wire_size(const HeadFormat &format, uint32_t tokens);
void write_wire(const HeadFormat &format, const Block &block, uint8_t *wire);
// INVALID: tokens is no whole group; CORRUPT: what "Decoding refuses" lists.
Status read_wire(const HeadFormat &format, const uint8_t *wire, size_t size, uint32_t tokens, Block *block);

// Rule 2.1-2.2 pieces that attention needs to fold scales.
float param_value(const HeadFormat &format, uint16_t bits);       // stored parameter -> float32
std::span<const int16_t> book_levels(uint32_t levels);             // codebook levels m (section 2.3)
float book_scale(uint32_t levels);                                 // codebook scale a
// Section 3 on `width` contiguous values, in place; k is the group index, tensor 0 keys, 1 values.
void rotate(float *y, uint32_t width, uint64_t seed, uint32_t tensor, uint32_t k);
void unrotate(float *y, uint32_t width, uint64_t seed, uint32_t tensor, uint32_t k);
// Is the class of this format stored rotated?
bool is_rotated(const HeadFormat &format);

// Channels of pair number p, in section 5's order.
struct Pair {
  uint32_t u, v;
};
Pair pair_channels(const HeadShape &shape, uint32_t p);
Status check_shape(const HeadShape &shape);

}  // namespace kvq
