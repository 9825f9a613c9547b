// Dot products of codes that are still in planes (layout.h: regular regions): decoded in registers, two quads in a step, so that a block
// of rows and vectors reads every plane once and writes nothing but its results.  Included by kernels_impl.h only, inside its anonymous
// namespace.
#if KVQ_VECTOR_BYTES >= 32 && !defined(KVQ_NO_FUSED)
#define KVQ_FUSED 1

// A block: ROWS rows x kVectors vectors of 64 bytes, kParts registers of each at a time; its sums fill half of the registers.
template <uint32_t ROWS>
struct BlockOf {
#if KVQ_VECTOR_BYTES == 64
  static constexpr uint32_t kVectors = ROWS == 4 ? 2 : 4, kParts = 1;
#else
  static constexpr uint32_t kVectors = ROWS == 1 ? 2 : 1, kParts = ROWS == 4 ? kWordVectors : 2;
#endif
  static constexpr uint32_t kSteps = 64 / KVQ_VECTOR_BYTES / kParts;  // to do all of a vector
};

// fetch() without a branch where a loop is so long that places in it count more than instructions.
template <uint32_t LINES>
KVQ_INLINE void fetch_beside(Prefetch *lines) {
  if (KVQ_VECTOR_BYTES < 64) return fetch<LINES>(lines);
#pragma GCC unroll 8
  for (uint32_t i = 0; i < LINES; i++) __builtin_prefetch(lines->at + i * 64, 0, 3);
  const uint8_t *next = lines->at + LINES * 64;
  lines->at = next < lines->end ? next : lines->at;
}

// Bits of a field of a unit, with garbage above those of a direct one.
template <class S, uint32_t FIELD>
KVQ_INLINE VByte field_of(const uint8_t *planes) {
  constexpr uint32_t kDirect = S::kPlanes * S::kDirect;
  if constexpr (FIELD < kDirect) {
    return shift_right<FIELD % S::kDirect * S::kBits>(load<VByte>(planes + FIELD / S::kDirect * 64));
  } else {
    VByte x[S::kPlanes];
#pragma GCC unroll 8
    for (uint32_t p = 0; p < S::kPlanes; p++) x[p] = load<VByte>(planes + p * 64);
    return gather_spare<S, (FIELD - kDirect) * S::kBits, S::kBits>(x);
  }
}

#if KVQ_VECTOR_BYTES == 64
// An index of 64 entries takes the field and its neighbours: no mask, and shifts only of what lies above bit 5.
template <class S, uint32_t FIELD>
constexpr uint32_t kFieldBit = FIELD < S::kPlanes * S::kDirect ? FIELD % S::kDirect * S::kBits : 0;
template <class S, uint32_t FIELD>
constexpr uint32_t kShifted = kFieldBit<S, FIELD> + S::kBits > 6 ? kFieldBit<S, FIELD> + S::kBits - 6 : 0;

struct alignas(64) Entries {
  uint8_t of[64];
};
template <uint32_t BIT, uint32_t BITS>
constexpr Entries make_entries() {
  Entries entries{};
  for (uint32_t i = 0; i < 64; i++) entries.of[i] = uint8_t(i >> BIT & ((1u << BITS) - 1));
  return entries;
}
template <uint32_t BIT, uint32_t BITS>
constexpr Entries kEntries = make_entries<BIT, BITS>();

template <class S, uint32_t FIELD>
KVQ_INLINE Table field_table(const uint8_t *table) {
  const __m512i codes = _mm512_load_si512(&kEntries<kFieldBit<S, FIELD> - kShifted<S, FIELD>, S::kBits>);
  return {table ? _mm512_permutexvar_epi8(codes, _mm512_loadu_si512(table)) : codes};
}
template <class S, uint32_t FIELD>
KVQ_INLINE VByte code_of(const uint8_t *planes, const Table &table) {
  if constexpr (FIELD < S::kPlanes * S::kDirect)
    return look_up(table, shift_right<kShifted<S, FIELD>>(load<VByte>(planes + FIELD / S::kDirect * 64)));
  else
    return look_up(table, field_of<S, FIELD>(planes));
}
#else
template <class S, uint32_t FIELD>
KVQ_INLINE Table field_table(const uint8_t *table) {
  alignas(16) static constexpr uint8_t kCodes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return load_table(table ? table : kCodes);
}
template <class S, uint32_t FIELD>
KVQ_INLINE VByte code_of(const uint8_t *planes, const Table &table) {
  VByte code = field_of<S, FIELD>(planes);
  if constexpr (FIELD < S::kPlanes * S::kDirect) code = mask_low(code, S::kBits);
  if constexpr (S::kBits <= 4) return look_up(table, code);
  return code;
}
#endif

// Tables and codes of vectors [FIRST, FIRST + N), counted from the first of a unit.
template <class S, uint32_t FIRST, uint32_t N, uint32_t I = 0>
KVQ_INLINE void load_tables(Table *tables, const uint8_t *table) {
  if constexpr (I < N) {
    tables[I] = field_table<S, (FIRST + I) % S::kFields>(table);
    load_tables<S, FIRST, N, I + 1>(tables, table);
  }
}
template <class S, uint32_t FIRST, uint32_t PARTS, uint32_t N, uint32_t I = 0>
KVQ_INLINE void load_codes(Words (&words)[N], const uint8_t *unit, const Table *tables) {
  if constexpr (I < N) {
    constexpr uint32_t kAt = FIRST + I / PARTS;
    const uint8_t *planes = unit + kAt / S::kFields * S::kPlanes * 64 + I % PARTS * KVQ_VECTOR_BYTES;
    words[I] = to_words(code_of<S, kAt % S::kFields>(planes, tables[I / PARTS]));
    load_codes<S, FIRST, PARTS, N, I + 1>(words, unit, tables);
  }
}

template <uint32_t ROWS, uint32_t N>
KVQ_INLINE void finish_sums(const Sums (&sums)[ROWS][N], const Batch &batch, uint32_t row, uint32_t rows, uint32_t lane) {
  VInt totals[ROWS][N];
#pragma GCC unroll 4
  for (uint32_t r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (uint32_t i = 0; i < N; i++) totals[r][i] = total(sums[r][i]);
  finish_totals(totals, batch, row, rows, lane);
}
template <uint32_t ROWS, uint32_t N>
KVQ_INLINE void start_sums(Sums (&sums)[ROWS][N], const Batch &batch, uint32_t row) {
#pragma GCC unroll 4
  for (uint32_t r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (uint32_t i = 0; i < N; i++) sums[r][i] = start_sums(batch.start[row + r]);
}

// Vectors from `vector` of a quad on, the first of which is field FIELD of its unit.  QUADS: of a unit, if it has more than one.
template <class S, uint32_t QUADS, uint32_t ROWS, uint32_t FIELD>
__attribute__((noinline)) void planes_block(const Dot &dot, Batch *batch, uint32_t row, uint32_t vector) {
  using Block = BlockOf<ROWS>;
  constexpr uint32_t kN = Block::kVectors, kWords = kN * Block::kParts;
  constexpr uint32_t kSecond = QUADS == 2 ? FIELD + S::kFields / 2 : FIELD;  // field of the second quad of a step
  const Planes &planes = dot.planes;
  const size_t unit = S::kPlanes * 64, quad = QUADS == 2 ? 0 : planes.across / S::kFields * unit;
  const uint32_t at = planes.vector + vector;
  const uint8_t *first = planes.at + at / S::kFields * unit;
  const int16_t *weights = (const int16_t *)dot.w + weight_place(dot.w_stride, row, 0), *last = weights + dot.depth * 16;
  Table tables[2][kN];
  load_tables<S, FIELD, kN>(tables[0], planes.table);
  load_tables<S, kSecond, kN>(tables[1], planes.table);
  Prefetch lines = batch->lines;
#pragma GCC unroll 1
  for (uint32_t part = 0; part < Block::kSteps; part++) {
    const uint8_t *x = first + part * KVQ_VECTOR_BYTES;
    Sums sums[ROWS][kWords];
    start_sums<ROWS, kWords>(sums, *batch, row);
#pragma GCC unroll 1
    for (const int16_t *w = weights; w < last; w += 32) {
      fetch_beside<kN>(&lines);
      Words words[kWords];
      load_codes<S, FIELD, Block::kParts>(words, x, tables[0]);
      add_words<ROWS, kWords>(sums, words, w);
      x += quad;
      load_codes<S, kSecond, Block::kParts>(words, x, tables[1]);
      add_words<ROWS, kWords>(sums, words, w + 16);
      x += QUADS == 2 ? unit : quad;
    }
    finish_sums(sums, *batch, row, dot.rows - row, vector * 16 + part * kLanes);
  }
  batch->lines = lines;
}

// ---- fields of several digits, which are neighbouring quads: with 16 registers it is faster to decode them to memory once
#if KVQ_VECTOR_BYTES == 64

// What is left of fields as fractions, even and odd bytes apart.
struct Fractions {
  VShort even, odd;
};
KVQ_INLINE Fractions to_fractions(VByte field, uint32_t bits) {
  const VShort fraction = (VShort)field << int(8 - bits);
  return {fraction & (uint16_t)0xff, fraction >> 8};
}
KVQ_INLINE VByte next_digit(Fractions *left, VShort base) {
  const VShort even = left->even * base, odd = left->odd * base;
  *left = {even & (uint16_t)0xff, odd & (uint16_t)0xff};
  return (VByte)(even >> 8 | (odd & (uint16_t)0xff00));
}

// Fields of a block, a digit at a time.
template <class S, uint32_t N>
struct DigitSource {
  Fractions left[N];
  Table table;
  VShort base = factor_of(S::kBase);
  KVQ_INLINE_MEMBER void start(uint32_t i, VByte field) { left[i] = to_fractions(S::kBits < 8 ? mask_low(field, S::kBits) : field, S::kBits); }
  KVQ_INLINE_MEMBER VByte next(uint32_t i, uint32_t) { return look_up(table, next_digit(&left[i], base)); }
  KVQ_INLINE_MEMBER void load(const uint8_t *map) { table = field_table<SchemeOf<kBits4>, 0>(map); }
};
#ifdef KVQ_DIGIT_TABLES
template <uint32_t N>
struct DigitSource<SchemeOf<kBase5>, N> {
  VByte field[N];
  Digits digits[3];
  KVQ_INLINE_MEMBER void start(uint32_t i, VByte x) { field[i] = x; }
  KVQ_INLINE_MEMBER VByte next(uint32_t i, uint32_t digit) { return look_up(digits[digit], field[i]); }
  KVQ_INLINE_MEMBER void load(const uint8_t *map) {
    for (uint32_t d = 0; d < 3; d++) digits[d] = map ? load_digits(d, load_table(map)) : load_digits(d);
  }
};
#endif

template <class S, uint32_t FIRST, uint32_t PARTS, uint32_t N, uint32_t I = 0>
KVQ_INLINE void load_fields(DigitSource<S, N> *source, const uint8_t *unit) {
  if constexpr (I < N) {
    constexpr uint32_t kAt = FIRST + I / PARTS;
    source->start(I, field_of<S, kAt % S::kFields>(unit + kAt / S::kFields * S::kPlanes * 64 + I % PARTS * KVQ_VECTOR_BYTES));
    load_fields<S, FIRST, PARTS, N, I + 1>(source, unit);
  }
}

template <class S, uint32_t FIRST, uint32_t PARTS, uint32_t ROWS, uint32_t N>
KVQ_INLINE void add_digits(Sums (&sums)[ROWS][N], DigitSource<S, N> *source, const uint8_t *unit, const int16_t *w) {
  load_fields<S, FIRST, PARTS>(source, unit);
#pragma GCC unroll 5
  for (uint32_t d = 0; d < S::kDigits; d++) {
    Words words[N];
#pragma GCC unroll 4
    for (uint32_t i = 0; i < N; i++) words[i] = to_words(source->next(i, d));
    add_words<ROWS, N>(sums, words, w + d * 16);
  }
}

// Group `group` of quads, which lies in shared planes; vector `at` of it and on.
template <class S, uint32_t PARTS, uint32_t ROWS, uint32_t N>
KVQ_INLINE void add_shared(Sums (&sums)[ROWS][N], const Dot &dot, uint32_t group, uint32_t at, const int16_t *w) {
  const Packing &packing = *dot.planes.packing;
  const uint32_t left = dot.depth - group * S::kDigits, digits = left < S::kDigits ? left : S::kDigits;
  const uint32_t whole = packing.tail_fields - packing.short_fields, before = (group * dot.planes.across + at) - packing.units * S::kFields;
  const uint32_t bits = digits < S::kDigits ? kShortBits[packing.scheme][digits] : S::kBits;
  const uint32_t first = packing.tail_bit + (before < whole ? before * S::kBits : whole * S::kBits + (before - whole) * bits);
  const Table table = field_table<SchemeOf<kBits4>, 0>(dot.planes.table);
  Fractions fractions[N];
  const VShort base = factor_of(S::kBase);
#pragma GCC unroll 4
  for (uint32_t i = 0; i < N; i++) {
    const VByte field = shared_field(dot.planes.shared + i % PARTS * KVQ_VECTOR_BYTES, first + i / PARTS * bits, bits);
    fractions[i] = to_fractions(mask_low(field, bits), bits);
  }
  for (uint32_t d = 0; d < digits; d++) {
    Words words[N];
#pragma GCC unroll 4
    for (uint32_t i = 0; i < N; i++) words[i] = to_words(look_up(table, next_digit(&fractions[i], base)));
    add_words<ROWS, N>(sums, words, w + d * 16);
  }
}

// As planes_block(); QUADS: groups of a unit, if it has more than one.
template <class S, uint32_t QUADS, uint32_t ROWS, uint32_t FIELD>
__attribute__((noinline)) void digits_block(const Dot &dot, Batch *batch, uint32_t row, uint32_t vector) {
  using Block = BlockOf<ROWS>;
  constexpr uint32_t kParts = Block::kParts, kWords = Block::kVectors * kParts, kStep = S::kDigits * 16;
  const Planes &planes = dot.planes;
  const uint32_t at = planes.vector + vector, groups = planes.packing->units * S::kFields / planes.across;
  const size_t step = (QUADS == 2 ? 1 : planes.across / S::kFields) * S::kPlanes * 64;
  const uint8_t *x = planes.at + at / S::kFields * S::kPlanes * 64;
  const int16_t *w = (const int16_t *)dot.w + weight_place(dot.w_stride, row, 0);
  DigitSource<S, kWords> source;
  source.load(planes.table);
  Sums sums[ROWS][kWords];
  start_sums<ROWS, kWords>(sums, *batch, row);
  Prefetch lines = batch->lines;
  uint32_t group = 0;
#pragma GCC unroll 1
  for (; group < groups; group += QUADS, x += step) {
    fetch_beside<3 * Block::kVectors / 2>(&lines);
    add_digits<S, FIELD, kParts, ROWS, kWords>(sums, &source, x, w);
    w += kStep;
    if constexpr (QUADS == 2) {
      add_digits<S, FIELD + S::kFields / 2, kParts, ROWS, kWords>(sums, &source, x, w);
      w += kStep;
    }
  }
  for (; group * S::kDigits < dot.depth; group++, w += kStep) add_shared<S, kParts, ROWS, kWords>(sums, dot, group, at, w);
  batch->lines = lines;
  finish_sums(sums, *batch, row, dot.rows - row, vector * 16);
}

#endif

// ---- any

// The block whose first field is `field`.
template <class S, uint32_t QUADS, uint32_t ROWS, uint32_t FIELD = 0>
KVQ_INLINE void planes_at(const Dot &dot, Batch *batch, uint32_t row, uint32_t vector, uint32_t field) {
  if constexpr (FIELD < S::kFields / QUADS) {
    if (field == FIELD) {
#if KVQ_VECTOR_BYTES == 64
      if constexpr (S::kDigits > 1) return digits_block<S, QUADS, ROWS, FIELD>(dot, batch, row, vector);
#endif
      if constexpr (S::kDigits == 1) return planes_block<S, QUADS, ROWS, FIELD>(dot, batch, row, vector);
    }
    planes_at<S, QUADS, ROWS, FIELD + BlockOf<ROWS>::kVectors>(dot, batch, row, vector, field);
  }
}

template <class S, uint32_t QUADS, uint32_t ROWS>
KVQ_INLINE void planes_rows(const Dot &dot, Batch *batch, uint32_t row) {
  using Block = BlockOf<ROWS>;
  for (uint32_t vector = 0; vector < dot.lanes / 16; vector += Block::kVectors)
    planes_at<S, QUADS, ROWS>(dot, batch, row, vector, (dot.planes.vector + vector) % S::kFields);
}

template <SchemeId ID, uint32_t QUADS>
void planes_scheme(const Dot &dot, Batch *batch) {
  using S = SchemeOf<ID>;
  uint32_t row = 0;
  for (; row + 4 <= dot.rows; row += 4) planes_rows<S, QUADS, 4>(dot, batch, row);
  switch (dot.rows - row) {
    case 3:  // a fourth row of no use costs less than another block
      return planes_rows<S, QUADS, 4>(dot, batch, row);
    case 2:
      return planes_rows<S, QUADS, 2>(dot, batch, row);
    case 1:
      return planes_rows<S, QUADS, 1>(dot, batch, row);
  }
}

KVQ_INLINE void planes_of_any(const Dot &dot, Batch *batch) {
  const SchemeId scheme = dot.planes.packing->scheme;
  const bool two = kSchemeTable[scheme].fields > dot.planes.across;
  switch (scheme) {
    case kBits1:
      return two ? planes_scheme<kBits1, 2>(dot, batch) : planes_scheme<kBits1, 1>(dot, batch);
    case kBits2:
      return planes_scheme<kBits2, 1>(dot, batch);
    case kBits3:
      return two ? planes_scheme<kBits3, 2>(dot, batch) : planes_scheme<kBits3, 1>(dot, batch);
    case kBits4:
      return planes_scheme<kBits4, 1>(dot, batch);
    case kBits5:
      return two ? planes_scheme<kBits5, 2>(dot, batch) : planes_scheme<kBits5, 1>(dot, batch);
    case kBits6:
      return planes_scheme<kBits6, 1>(dot, batch);
#if KVQ_VECTOR_BYTES == 64
    case kBase3:
      return planes_scheme<kBase3, 1>(dot, batch);
    case kBase5:
      return two ? planes_scheme<kBase5, 2>(dot, batch) : planes_scheme<kBase5, 1>(dot, batch);
    case kBase6:
      return planes_scheme<kBase6, 1>(dot, batch);
#endif
    default:
      return;
  }
}

void dot_planes(const Dot &dot) {
  Batch batch = batch_of(dot, 0);
  planes_of_any(dot, &batch);
  if (dot.prefetch) *dot.prefetch = batch.lines;
}
#endif
