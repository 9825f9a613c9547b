// The layout of packed pages in host memory, and the way between it and codec/codec.h's Block.
//
// A page is one blob per KV head, and a blob is
//   tile 0: codes of K, codes of V, shared planes | tile 1: ... | parameters of K | parameters of V
// A *tile* is up to kTileTokens tokens, T of them (a multiple of 4); most pages are one tile.  The codes of a tensor are *regions*,
// one per class of slots that share a level count (kitty has a second region for the upper two bits of its boosted channels).
//
// The codes of a region with n slots are first put in a line of bytes, one code each:
//   keys    [slot / 4][token][4 slots], then the last n mod 4 slots as [token][n mod 4]
//   values  [token / 4][slot][4 tokens]
// where four neighbours share a 32-bit word, number k of them in byte {0, 2, 1, 3}[k].  So a word is four slots of one token (keys)
// or four tokens of one slot (values), neighbouring words are the lanes of a dot product, results need no horizontal sum, and even
// and odd bytes of a word are pairs of 16-bit factors whose weights lie in natural order.
//
// The line is cut into vectors of 64 bytes, and vectors are packed byte by byte into *planes* of 64 bytes, so that byte i of a plane
// holds bits of byte i of several vectors and any vector width decodes it alike.  A *field* is `bits` bits that hold `digits` codes:
//   levels     2  4  8  16  32  64  128  256   3   5   6   7
//   bits       1  2  3   4   5   6    7    8   8   7   8   3
//   digits     1  1  1   1   1   1    1    1   5   3   3   1
// Field f is vector f (of several digits: vectors digits * f and on, or in a regular region the same lanes of that many quads).  Fields fill the planes from bit 0 up, floor(8 / bits) per plane; the
// spare bits of a unit's planes, read in order as one number, hold the fields that are left: 8 fields of 3 bits lie in 3 planes, of 5
// in 5, of 7 in 7, and 4 of 6 bits in 3.  Fields that make no whole unit, of all regions of K and then of V, follow each other bit by
// bit in the tile's shared planes; a last field of fewer digits takes only the bits that it needs.
// Digits d0, d1, ... are stored as ceil(number * 2^bits / L^digits), number = (d0 * L + d1) * L + ...: multiplying by L yields them
// one after the other.
//
// A region is *regular* if the vectors of a quad are a multiple of four and fill whole units, or two quads fill one (of several digits:
// groups of quads): attention need not decode it to memory first (kernels.h: Planes).
//
// Raw tensors (fp16) are keys [slot][token], values [token][slot].
// Parameters: rows [parameter][token]; columns [group of tokens]{s [slot], z [slot]}, for kitty also the boosted channels, ascending.
// A group may be spread over tiles.
#pragma once
#include <cstdint>
#include <span>

#include "backend/backend.h"
#include "cpu/kernels.h"

namespace kvq::cpu {

// How attention reads a tensor: parameters per token, per channel and group, fp16 values, or decoded values (what has no scales to
// fold, and rows of many small groups).
enum class Family : uint8_t {
  rows,
  columns,
  halves,
  values
};

// What the codes of a book stand for: level = low - 128, or 256 * high + low - 32768 where levels need 16 bits.
struct CodeTable {
  uint32_t levels;
  bool wide;
  uint8_t low[256], high[256];  // period: the next power of two
};

// Tables that all formats of a backend share.
struct Tables {
  Tables();
  const CodeTable *book(uint32_t levels) const;  // nullptr: no such book
  CodeTable books[12];
  float e4m3[256], e5m3[256];  // parameters of one byte
};

// Mean square of a level, or of a code's distance from the middle one: as rows usually are, and if all codes are as frequent; and the
// largest square of what multiplies errors of weights (doubt.h).
struct Spread {
  float usual, even, most;
};

struct Region {
  uint32_t first, count, levels;  // slots; count of a kitty's upper region: boosted channels
  bool upper;                     // kitty: codes >> 2 of the boosted channels
  Packing packing;
  size_t offset;                  // of the planes in a tile
  uint32_t line;                  // bytes of the line
  uint32_t across;                // regular: vectors of a quad; else 0
  uint32_t quad, byte;            // place in the decoded tile: keys first quad, values first byte
  const CodeTable *table;         // nullptr: the code itself
  float scale;                    // of the book: multiplies h
  int32_t bias;                   // what is taken from a byte: small factors keep the rounding of their weights small
  float middle;                   // of codes, less the bias; books: 0
  Spread spread;
};

// Slots whose codes share their scalars in one token.  (Columns: none; every slot has its own.)
struct Segment {
  uint32_t region, first, count;  // slots of the tensor
  uint32_t param;                 // first parameter of the token: h, or s and z
};

struct TensorLayout {
  explicit TensorLayout(std::pmr::memory_resource *memory) : regions(memory), segments(memory), ends(memory) {}
  Family family = Family::rows;
  bool keys = true;
  uint32_t dim = 0, page_tokens = 0, tile_tokens = 0, tiles = 0;
  uint32_t group = 0, groups = 0;  // tokens of a group, groups of a page (columns)
  uint32_t boosted = 0;            // kitty
  uint32_t param_bytes = 2;        // 1: params=
  size_t tile_offset = 0, tile_stride = 0, codes = 0;  // of tile 0 in the blob, between tiles, of a tile without shared planes
  size_t tail_offset = 0;          // of the shared planes in a tile
  uint32_t tail = 0;               // their bits, with those of the tensor before
  size_t params = 0, group_stride = 0, params_size = 0;  // of the parameters in the blob, bytes of a group (columns), all
  uint32_t quads = 0, decoded = 0; // of a decoded tile: quads of slots (keys), bytes
  std::pmr::vector<Region> regions;
  std::pmr::vector<Segment> segments;
  std::pmr::vector<uint32_t> ends;  // of regions, in slots of a decoded tile of keys, if one call can weigh them all (columns); else empty
};

class CpuPageFormat final : public PageFormat {
 public:
  // `tables` outlives the format.
  CpuPageFormat(std::pmr::memory_resource *memory, const Tables &tables, uint32_t tokens, std::pmr::vector<HeadFormat> &&keys,
                std::pmr::vector<HeadFormat> &&values);

  const HeadFormat &head_format(uint32_t head, uint32_t tensor) const { return tensor == KVQ_TENSOR_K ? k[head] : v[head]; }
  const TensorLayout &layout(uint32_t head, uint32_t tensor) const { return layouts[2 * head + tensor]; }
  const uint8_t *blob(const void *page, uint32_t head) const { return static_cast<const uint8_t *>(page) + offsets[head]; }
  size_t blob_bytes(uint32_t head) const { return (head + 1 < offsets.size() ? offsets[head + 1] : bytes) - offsets[head]; }
  uint8_t *blob(void *page, uint32_t head) const { return static_cast<uint8_t *>(page) + offsets[head]; }

  std::pmr::vector<TensorLayout> layouts;  // [kv_heads][K, V]
  std::pmr::vector<size_t> offsets;        // [kv_heads] of a page's blobs
};

// Bytes that the codes of a decoded tile of `dim` channels may need, whatever the codec.
size_t code_bytes(uint32_t dim);

// The byte of each of the four neighbours in a word.
inline constexpr uint32_t kByte[4] = {0, 2, 1, 3};

// Bits of shared planes that a packing takes.
uint32_t tail_bits(const Packing &packing);

// Write a block into rows [first, first + block.tokens) of one tensor of a page (columns: whole groups), or append rows to it.
void write_rows(const CpuPageFormat &format, void *page, uint32_t head, uint32_t tensor, uint32_t first, const Block &block);
void read_rows(const CpuPageFormat &format, const void *page, uint32_t head, uint32_t tensor, uint32_t first, uint32_t count,
               Block *block);

}  // namespace kvq::cpu
