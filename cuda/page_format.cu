#include "cuda/page_format.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <iterator>
#include <span>

#include "codec/bits.h"
#include "codec/books.h"
#include "codec/descriptor.h"
#include "cuda/attend_fast.h"
#include "cuda/check.h"

namespace kvq::cuda {

// ---- books

namespace {

constexpr std::array<uint32_t, 12> kBookLevels = {2, 3, 4, 5, 6, 7, 8, 16, 32, 64, 128, 256};

uint32_t align16(uint32_t n) { return (n + 15) / 16 * 16; }

void fill_guess(const Book &book, BookGuess *guess) {
  std::fill(std::begin(guess->threshold), std::end(guess->threshold), INFINITY);
  std::copy(book.threshold.begin(), book.threshold.end(), guess->threshold);
  for (size_t i = 0; i < book.level.size(); i++) guess->magnitude[i] = uint8_t(std::abs(book.level[i]));
  guess->scale = book.scale;
  for (uint32_t b = 0; b < BookGuess::kBuckets; b++)
    guess->first[b] = uint8_t(std::count_if(book.threshold.begin(), book.threshold.end(), [b](float t) {
      return t * BookGuess::kPerSigma + BookGuess::kBuckets / 2 < float(b) - BookGuess::kSlack;
    }));
}

}  // namespace

Status Books::upload() {
  std::array<DeviceBook, kBookLevels.size()> books{};
  for (size_t i = 0; i < kBookLevels.size(); i++) {
    const Book &book = find_book(kBookLevels[i]);
    if (kBookLevels[i] <= BookGuess::kLevels) fill_guess(book, &books[i].guess);
    books[i].scale = book.scale;
    books[i].levels = kBookLevels[i];
    std::copy(book.level.begin(), book.level.end(), books[i].level);
    std::copy(book.threshold.begin(), book.threshold.end(), books[i].threshold);
  }
  buffer_.reserve(sizeof books);
  KVQ_CUDA(cudaMemcpy(buffer_.data(), books.data(), sizeof books, cudaMemcpyHostToDevice));
  return KVQ_OK;
}

const DeviceBook *Books::find(uint32_t levels) const {
  for (size_t i = 0; i < kBookLevels.size(); i++)
    if (kBookLevels[i] == levels) return buffer_.as<const DeviceBook>() + i;
  return nullptr;
}

// ---- formats

namespace {

bool is_raw(const Codec &codec) { return codec.kind == Kind::raw || (codec.kind == Kind::progressive && codec.levels == 0); }

Family family_of(const HeadFormat &head) {
  switch (head.codec.kind) {
    case Kind::raw:
      return Family::raw;
    case Kind::affine_token:
      return Family::rows_affine;
    case Kind::progressive:
      return is_raw(head.codec) ? Family::raw : Family::rows_affine;
    case Kind::lloyd:
    case Kind::width_groups:
    case Kind::channel_split:
      return Family::rows_book;
    case Kind::polar:
      return Family::polar;
    default:
      return Family::columns;
  }
}

uint32_t width_of(uint32_t levels) { return uint32_t(std::bit_width(levels - 1)); }

Code book_code(uint32_t levels) {
  switch (levels) {
    case 3:
      return Code::levels3;
    case 4:
      return Code::book2;
    case 5:
      return Code::levels5;
    case 6:
      return Code::levels6;
    case 7:
    case 8:
      return Code::book3;
    case 16:
      return Code::book4;
    default:
      return Code::none;
  }
}

// Ways to read a tensor's codes, the better one first.
using Codes = std::array<Code, 2>;

Codes row_codes(const Codec &codec, const HeadShape &shape) {
  const bool whole = codec.group == shape.dim;
  if (whole && codec.levels == 5) return {Code::rows5};
  if (whole && codec.levels == 6) return {Code::rows6};
  const bool pairs = shape.tensor == KVQ_TENSOR_K ? whole : codec.group % 32 == 0 && std::has_single_bit(codec.group);
  if (!pairs || !std::has_single_bit(codec.levels)) return {};
  if (codec.levels != 4 || shape.tensor == KVQ_TENSOR_K) return {Code::fields};
  return {whole ? Code::crumbs : codec.group == 32 ? Code::halves : Code::none, Code::fields};
}

uint32_t boosted_channels(const Codec &codec, const HeadShape &shape) {
  return uint32_t((unsigned __int128)(codec.boost.p) * shape.dim / codec.boost.q);
}

// Columns: of keys, in groups of whole tiles or halves of one.
Codes column_codes(const Codec &codec, const HeadShape &shape) {
  if (shape.tensor == KVQ_TENSOR_V || !std::has_single_bit(codec.group) || codec.group < kTile / 2) return {};
  const bool whole = codec.group >= kTile;
  if (codec.kind == Kind::kitty) return whole && boosted_channels(codec, shape) <= 16 ? Codes{Code::fields} : Codes{};
  if (codec.kind != Kind::affine_channel) return whole ? Codes{Code::planes} : Codes{};
  if (!std::has_single_bit(codec.levels)) return {};
  return {whole && codec.levels <= 64 ? Code::planes : !whole && codec.levels == 4 ? Code::halves : Code::none, Code::fields};
}

// Groups of channels with a book each: of up to 8 bits, values 4.
bool has_groups(uint32_t levels, const HeadShape &shape) {
  return std::has_single_bit(levels) && levels <= (shape.tensor == KVQ_TENSOR_K ? 256 : 16);
}

// How fused kernels would read a tensor's codes, if the tables of its heads allow it.
Codes codes_of(const Codec &codec, const HeadShape &shape, uint32_t page_tokens) {
  if (page_tokens % kTile) return {};
  switch (codec.kind) {
    case Kind::lloyd:
      return {book_code(codec.levels), has_groups(codec.levels, shape) ? Code::groups : Code::none};
    case Kind::affine_token:
    case Kind::progressive:
      return row_codes(codec, shape);
    case Kind::polar:
      return {codec.levels == 4 && codec.high == 4 && codec.group % kTile == 0 && std::has_single_bit(codec.group) ? Code::polar : Code::none};
    case Kind::channel_split:
      return {codec.low < codec.high && has_groups(codec.low, shape) && has_groups(codec.high, shape) ? Code::groups : Code::none};
    case Kind::width_groups:
      return {shape.tensor == KVQ_TENSOR_K ? Code::groups : Code::none};
    case Kind::affine_channel:
    case Kind::channel_widths:
    case Kind::pair_mix:
    case Kind::kitty:
      return column_codes(codec, shape);
    default:
      return {};
  }
}

// Columns of any widths: up to 6 bits; values in groups: whole units of each.
bool tables_allow(const HeadFormat &head, Code code) {
  return std::all_of(head.classes.begin(), head.classes.end(), [&](const SlotClass &cls) {
    if (code == Code::planes) return cls.levels <= 64;
    return code != Code::groups || head.shape.tensor == KVQ_TENSOR_K || (cls.first % 16 == 0 && cls.count % 16 == 0);
  });
}

// The way to read pages for which there is a kernel.  A chain (PM-KVQ) is fused where keys and values are one.
PagePath choose_path(const HeadShape &key, const Codec &k, const HeadShape &value, const Codec &v, uint32_t page_tokens) {
  if (key.dim != value.dim || (k.kind == Kind::progressive) != (v.kind == Kind::progressive)) return {};
  for (const Code of_keys : codes_of(k, key, page_tokens))
    for (const Code of_values : codes_of(v, value, page_tokens))
      if (of_keys != Code::none && of_values != Code::none && has_fused(key.dim, {of_keys, of_values})) return {of_keys, of_values};
  return {};
}

PagePath path_of(const HeadFormat &key, const HeadFormat &value, uint32_t page_tokens) {
  const PagePath path = choose_path(key.shape, key.codec, value.shape, value.codec, page_tokens);
  return tables_allow(key, path.keys) && tables_allow(value, path.values) ? path : PagePath{};
}

}  // namespace

bool reads_fused(const LayerShape &shape, const Codec &k, const Codec &v, uint32_t page_tokens, uint32_t bmax) {
  if (shape.dim_k != shape.dim_v) return false;
  if (is_raw(k) && is_raw(v)) {
    const bool narrows = k.kind == Kind::progressive;  // to 8, 4 and 2 bits, all of which are fields
    return page_tokens == kRawTokens && find_fused(shape.dim_k, {}, {}, 1) && (!narrows || has_fused(shape.dim_k, {Code::fields, Code::fields}));
  }
  if (k.kind == Kind::channel_widths && bmax > 6) return false;
  return choose_path(shape.head(KVQ_TENSOR_K), k, shape.head(KVQ_TENSOR_V), v, page_tokens) != PagePath{};
}

CudaPageFormat::CudaPageFormat(std::pmr::memory_resource *memory, Arena &arena, const Books &books, uint32_t tokens,
                               std::pmr::vector<HeadFormat> &&key_formats, std::pmr::vector<HeadFormat> &&value_formats)
    : PageFormat(memory), device{}, tensors(memory), books_(books), tables_(memory), buffer_(arena) {
  k = std::move(key_formats);
  v = std::move(value_formats);
  page_tokens = tokens;
  const uint32_t heads = uint32_t(k.size());
  for (uint32_t h = 0; h < heads; h++) {
    const PagePath mine = path_of(k[h], v[h], tokens);
    path = h == 0 || mine == path ? mine : PagePath{};
  }
  raw = is_raw(k[0].codec) && is_raw(v[0].codec) && tokens == kRawTokens;
  const bool fragments = path != PagePath{};
  tensors.resize(size_t(heads) * 2);
  uint32_t offset = 0;
  for (uint32_t h = 0; h < heads; h++) {
    TensorFormat *key = &tensors[2 * h], *value = key + 1;
    describe(k[h], fragments, key);
    describe(v[h], fragments, value);
    uint32_t at = 0;
    if (fragments) {
      lay_out_fragments(key, value, &at);
    } else {
      lay_out_streams(key, &at);
      lay_out_streams(value, &at);
    }
    key->blob = value->blob = offset;
    offset += align16(at);
  }
  bytes = offset;
  if (k[0].codec.kind == Kind::progressive && v[0].codec.kind == Kind::progressive) keep_chain();
}

// A chain (PM-KVQ) narrows under a captured graph, which keeps its kernel and stages: all its widths have one kernel, and 16 bits stages
// for the 8 to come.
void CudaPageFormat::keep_chain() {
  const uint32_t dim = k[0].shape.dim;
  constexpr PagePath kFields{Code::fields, Code::fields};
  if (dim != v[0].shape.dim || !has_fused(dim, kFields)) return;
  path = kFields;
  if (raw) stage_bytes = 2 * kTile * (dim + 2 * uint32_t(sizeof(uint16_t)));
}

void CudaPageFormat::describe(const HeadFormat &head, bool fragments, TensorFormat *f) {
  const Codec &codec = head.codec;
  *f = TensorFormat{};
  f->family = family_of(head);
  f->layout = fragments ? Layout::fragments : Layout::streams;
  f->tensor = uint8_t(head.shape.tensor);
  f->kind = uint8_t(codec.kind);
  f->param_type = uint8_t(codec.params);
  f->param_bytes = codec.params == ParamType::fp16 ? 2 : 1;
  f->scale_rule = uint8_t(codec.scale);
  f->rotate = codec.rotate;
  f->midpoint = codec.midpoint;
  f->high_plain = codec.kind == Kind::pair_mix;
  f->dim = head.shape.dim;
  f->page_tokens = page_tokens;
  f->seed = codec.seed;
  if (f->family == Family::columns || f->family == Family::polar) f->group = codec.group, f->groups = page_tokens / codec.group;
  if (f->family == Family::rows_affine) f->channel_group = codec.kind == Kind::progressive ? f->dim : codec.group;
  if (f->family == Family::rows_affine) f->row_params = 2 * (f->dim / f->channel_group);
  if (f->family == Family::rows_book) f->row_params = head.token_params;
  if (codec.kind == Kind::progressive) f->progressive = codec.levels;
  for (const SlotClass &cls : head.classes) {
    Region &region = f->region[f->regions++];
    const Radix radix = find_radix(cls.levels);
    region = {cls.levels, radix.digits, radix.bits, cls.first, cls.count, cls.rotation, 0, nullptr};
    if (f->family == Family::rows_book) region.book = books_.find(cls.levels);
  }
  if (codec.kind == Kind::kitty) {
    f->boosted = boosted_channels(codec, head.shape);
    f->region[0].levels = 4, f->region[0].bits = 2;
    f->region[f->regions++] = {4, 1, 2, f->dim, 0, 0, 0, nullptr};
  }
  add_tables(head, f);
}

// Slots' channels (polar: u and v of every pair) and the centre; as offsets + 1 until upload.
void CudaPageFormat::add_tables(const HeadFormat &head, TensorFormat *f) {
  f->channel = reinterpret_cast<const uint16_t *>(tables_.size() + 1);
  for (uint32_t slot = 0; slot < f->dim; slot++) {
    const Pair pair = f->family == Family::polar ? pair_channels(head.shape, slot / 2) : Pair{head.channel[slot], head.channel[slot]};
    tables_.push_back(uint16_t(slot % 2 ? pair.v : pair.u));
  }
  if (head.mu.empty()) return;
  f->mu = reinterpret_cast<const uint16_t *>(tables_.size() + 1);
  tables_.insert(tables_.end(), head.mu.begin(), head.mu.end());
}

void CudaPageFormat::lay_out_streams(TensorFormat *f, uint32_t *at) {
  f->codes = *at;
  uint32_t codes = 0;
  for (uint32_t r = 0; r < f->regions && f->family != Family::raw; r++) {
    Region &region = f->region[r];
    const bool upper = f->boosted > 0 && r == 1;
    const uint32_t n = upper ? f->boosted * f->page_tokens : region.count * f->page_tokens;
    region.offset = codes;
    if (region.levels > 1) codes += (n + 8 * region.digits - 1) / (8 * region.digits) * region.bits;
  }
  *at += codes;
  if (Kind(f->kind) == Kind::kitty) {
    f->positions = *at;
    *at += f->groups * f->dim;
  }
  *at = (*at + 1) / 2 * 2;
  f->params = *at;
  const uint32_t n = f->family == Family::raw ? f->page_tokens * f->dim
                     : f->row_params          ? f->page_tokens * f->row_params
                                              : f->groups * f->dim * 2;
  *at += (n * f->param_bytes + 3) / 4 * 4;
}

void CudaPageFormat::lay_out_units(TensorFormat *f, Code code) {
  for (uint32_t u = 0; u < f->dim / 16; u++)
    for (uint32_t r = 0; r < f->regions; r++) {  // the widest member's
      const Region &region = f->region[r];
      if (region.first < (u + 1) * 16 && region.first + region.count > u * 16 && region.levels > 1)
        f->width[u] = std::max(f->width[u], uint8_t(width_of(region.levels)));
    }
  if (f->family == Family::rows_book) std::replace(std::begin(f->width), std::end(f->width), uint8_t(7), uint8_t(8));
  for (uint32_t u = 1; u < kMaxUnits; u++) f->unit_word[u] = uint8_t(f->unit_word[u - 1] + f->width[u - 1]);
  const uint32_t levels = f->region[0].levels;
  constexpr Code kRadix[] = {Code::levels3, Code::levels5, Code::levels6, Code::rows5, Code::rows6};
  const bool radix = std::find(std::begin(kRadix), std::end(kRadix), code) != std::end(kRadix);
  f->coding = code == Code::planes || code == Code::polar ? Coding::planes
              : code == Code::crumbs ? Coding::crumbs
              : code == Code::fields || code == Code::halves ? (f->tensor ? Coding::fields : Coding::planes)
              : radix                ? Coding::radix
                                     : Coding::nibbles;
  f->mixed = f->coding == Coding::nibbles && std::any_of(f->region, f->region + f->regions, [](const Region &region) { return region.first % 16 || region.levels > 64; });
  for (uint32_t p = 0; p < kPlanes && f->coding == Coding::planes; p++)
    for (uint32_t u = 0; u < f->dim / 16; u++) f->pairs[p] |= std::clamp<int>(f->width[u] - 2 * int(p), 0, 2) << 2 * u;
  if (f->family != Family::rows_book) return;
  const Book &book = find_book(levels);
  f->swizzled = radix && levels != 3;
  f->loose = radix && levels != 5 && path.keys == Code::planes && f->dim != 64;
  f->book_scale = levels == 3 ? book.scale * float(book.level[2]) : book.scale;
  for (uint32_t i = 0; i < 8; i++)
    f->table[i / 4] |= uint32_t(book.level[levels == 16 ? 8 + i : i % book.level.size()] & 0xff) << 8 * (i % 4);
}

// Per group of columns: their parameters, and Kitty's positions; and per tile: codes of K, parameters of its rows, codes of V, parameters of its rows.
void CudaPageFormat::lay_out_fragments(TensorFormat *key, TensorFormat *value, uint32_t *at) {
  lay_out_units(key, path.keys);
  lay_out_units(value, path.values);
  const uint32_t key_codes = code_bytes(*key) + upper_lanes(key->boosted) * 64, value_codes = code_bytes(*value);
  const uint32_t key_rows = align16(kTile * key->row_params * key->param_bytes);
  const uint32_t value_rows = align16(kTile * value->row_params * value->param_bytes);
  const uint32_t params = key->group ? align16(tile_groups(*key) * key->dim * 2 * key->param_bytes) : 0;
  const uint32_t columns = params + (Kind(key->kind) == Kind::kitty ? align16(key->dim) : 0);
  const uint32_t tile = key_codes + key_rows + value_codes + value_rows, group_tiles = (key->group ? std::max(key->group, kTile) : page_tokens) / kTile;
  key->codes = *at + columns;
  key->params = key->group ? *at : key->codes + key_codes;
  if (Kind(key->kind) == Kind::kitty) key->positions = key->params + params;
  value->codes = key->codes + key_codes + key_rows;
  value->params = value->codes + value_codes;
  for (TensorFormat *f : {key, value}) f->tile_stride = tile, f->group_tiles = group_tiles, f->group_shift = uint32_t(std::countr_zero(group_tiles)), f->group_stride = columns + group_tiles * tile;
  stage_bytes = std::max(stage_bytes, columns + tile);
  *at += page_tokens / kTile / group_tiles * key->group_stride;
}

Status CudaPageFormat::upload(cudaStream_t stream) {
  const size_t formats = tensors.size() * sizeof(TensorFormat);
  buffer_.reserve(formats + tables_.size() * sizeof(uint16_t));
  char *base = buffer_.as<char>();
  const uint16_t *tables = reinterpret_cast<const uint16_t *>(base + formats);
  for (TensorFormat &f : tensors) {
    f.channel = tables + (reinterpret_cast<uintptr_t>(f.channel) - 1);
    if (f.mu) f.mu = tables + (reinterpret_cast<uintptr_t>(f.mu) - 1);
  }
  Vector<char> host(formats + tables_.size() * sizeof(uint16_t), tensors.get_allocator().resource());
  std::memcpy(host.data(), tensors.data(), formats);
  std::memcpy(host.data() + formats, tables_.data(), tables_.size() * sizeof(uint16_t));
  KVQ_CUDA(cudaMemcpyAsync(base, host.data(), host.size(), cudaMemcpyHostToDevice, stream));
  device = {reinterpret_cast<const TensorFormat *>(base), uint32_t(k.size()), page_tokens};
  return KVQ_OK;
}

}  // namespace kvq::cuda
