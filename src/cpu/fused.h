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

// Results of a row, which are whole vectors.
template <uint32_t N>
KVQ_INLINE void finish_row(const Sums (&sums)[N], const Dot &dot, uint32_t row, uint32_t lane) {
  const VFloat scale = all(dot.scale[row]), offset = dot.offset ? all(dot.offset[row]) : VFloat{};
  float *out = dot.out + row * dot.out_stride + lane;
#pragma GCC unroll 4
  for (uint32_t i = 0; i < N; i++) {
    VFloat sum = scale * to_float(total(sums[i]));
    if (dot.lane_scale) sum *= load<VFloat>(dot.lane_scale + lane + i * kLanes);
    sum += dot.lane_offset ? offset * load<VFloat>(dot.lane_offset + lane + i * kLanes) : offset;
    store(out + i * kLanes, dot.add ? sum + load<VFloat>(out + i * kLanes) : sum);
  }
}

// Vectors from `vector` of a quad on, the first of which is field FIELD of its unit.  QUADS: of a unit, if it has more than one.
template <class S, uint32_t QUADS, uint32_t ROWS, uint32_t FIELD>
__attribute__((noinline)) void planes_block(const Dot &dot, uint32_t row, uint32_t vector, uint32_t part) {
  using Block = BlockOf<ROWS>;
  constexpr uint32_t kN = Block::kVectors, kWords = kN * Block::kParts;
  constexpr uint32_t kSecond = QUADS == 2 ? FIELD + S::kFields / 2 : FIELD;  // field of the second quad of a step
  const Planes &planes = dot.planes;
  const size_t unit = S::kPlanes * 64, quad = QUADS == 2 ? 0 : planes.across / S::kFields * unit;
  const uint32_t at = planes.vector + vector;
  const uint8_t *x = planes.at + at / S::kFields * unit + part * KVQ_VECTOR_BYTES;
  const int16_t *w = (const int16_t *)dot.w + weight_place(dot.w_stride, row, 0);
  Table tables[2][kN];
  load_tables<S, FIELD, kN>(tables[0], planes.table);
  load_tables<S, kSecond, kN>(tables[1], planes.table);
  Sums sums[ROWS][kWords];
  start_block<ROWS, kWords>(sums, dot, row, 0);
  Prefetch lines = dot.prefetch ? *dot.prefetch : Prefetch{};
#pragma GCC unroll 1
  for (uint32_t q = 0; q < dot.depth; q += 2, w += 32) {
    fetch<KVQ_VECTOR_BYTES / 32>(&lines);
    Words words[kWords];
    load_codes<S, FIELD, Block::kParts>(words, x, tables[0]);
    add_words<ROWS, kWords>(sums, words, w);
    x += quad;
    load_codes<S, kSecond, Block::kParts>(words, x, tables[1]);
    add_words<ROWS, kWords>(sums, words, w + 16);
    x += QUADS == 2 ? unit : quad;
  }
  if (dot.prefetch) *dot.prefetch = lines;
#pragma GCC unroll 4
  for (uint32_t r = 0; r < ROWS; r++) finish_row<kWords>(sums[r], dot, row + r, vector * 16 + part * kLanes);
}

// The block whose first field is `field`.
template <class S, uint32_t QUADS, uint32_t ROWS, uint32_t FIELD = 0>
KVQ_INLINE void planes_at(const Dot &dot, uint32_t row, uint32_t vector, uint32_t part, uint32_t field) {
  if constexpr (FIELD < S::kFields / QUADS) {
    if (field == FIELD) return planes_block<S, QUADS, ROWS, FIELD>(dot, row, vector, part);
    planes_at<S, QUADS, ROWS, FIELD + BlockOf<ROWS>::kVectors>(dot, row, vector, part, field);
  }
}

template <class S, uint32_t QUADS, uint32_t ROWS>
KVQ_INLINE void planes_rows(const Dot &dot, uint32_t row) {
  using Block = BlockOf<ROWS>;
  for (uint32_t vector = 0; vector < dot.lanes / 16; vector += Block::kVectors)
    for (uint32_t step = 0; step < Block::kSteps; step++)
      planes_at<S, QUADS, ROWS>(dot, row, vector, step, (dot.planes.vector + vector) % S::kFields);
}

template <SchemeId ID, uint32_t QUADS>
void planes_scheme(const Dot &dot) {
  using S = SchemeOf<ID>;
  uint32_t row = 0;
  for (; row + 4 <= dot.rows; row += 4) planes_rows<S, QUADS, 4>(dot, row);
  if (dot.rows - row >= 2) planes_rows<S, QUADS, 2>(dot, row), row += 2;
  if (row < dot.rows) planes_rows<S, QUADS, 1>(dot, row);
}

void dot_planes(const Dot &dot) {
  const bool two = kSchemeTable[dot.planes.scheme].fields > dot.planes.across;
  switch (dot.planes.scheme) {
    case kBits1:
      return two ? planes_scheme<kBits1, 2>(dot) : planes_scheme<kBits1, 1>(dot);
    case kBits2:
      return planes_scheme<kBits2, 1>(dot);
    case kBits3:
      return two ? planes_scheme<kBits3, 2>(dot) : planes_scheme<kBits3, 1>(dot);
    case kBits4:
      return planes_scheme<kBits4, 1>(dot);
    case kBits5:
      return two ? planes_scheme<kBits5, 2>(dot) : planes_scheme<kBits5, 1>(dot);
    case kBits6:
      return planes_scheme<kBits6, 1>(dot);
    default:
      return;
  }
}
#endif
