// Planes to codes (layout.h).  Included by kernels_impl.h only, inside its anonymous namespace.

// A scheme's numbers as constants.
template <SchemeId S>
struct SchemeOf {
  static constexpr uint32_t kBits = kSchemeTable[S].bits, kDigits = kSchemeTable[S].digits, kBase = kSchemeTable[S].base;
  static constexpr uint32_t kDirect = kSchemeTable[S].direct, kSpare = kSchemeTable[S].spare;
  static constexpr uint32_t kPlanes = kSchemeTable[S].planes, kFields = kSchemeTable[S].fields;
};

template <uint32_t SHIFT>
KVQ_INLINE VByte shift_right(VByte x) {
  if (SHIFT == 0) return x;
  return (VByte)((VShort)x >> (int)SHIFT);  // bits of the neighbour come in: mask them
}

template <uint32_t SHIFT>
KVQ_INLINE VByte shift_left(VByte x) {
  if (SHIFT == 0) return x;
  return (VByte)((VShort)x << (int)SHIFT);
}

KVQ_INLINE VByte mask_low(VByte x, uint32_t bits) {
  const uint8_t mask = (uint8_t)((1u << bits) - 1);  // named: GCC 12 with -fsanitize=undefined takes the expression for an int
  return x & mask;
}

// Bits of MASK from a, others from b.
template <uint8_t MASK>
KVQ_INLINE VByte choose(VByte a, VByte b) {
#if KVQ_VECTOR_BYTES == 64
  return (VByte)_mm512_ternarylogic_epi32(_mm512_set1_epi8((char)MASK), (__m512i)a, (__m512i)b, 0xca);
#else
  return (a & MASK) | (b & (uint8_t)~MASK);
#endif
}

// A factor that the compiler does not take apart into shifts and additions, which keep more ports busy than a multiplication.
KVQ_INLINE VShort factor_of(uint32_t base) { return opaque(all_short((uint16_t)base)); }

// Where decoded vectors go: through the table if there is one.
template <bool MAP>
struct Sink {
  Table table;
  uint8_t *out;          // of single digits: the unit's
  uint32_t field, spread;  // of digits: the unit's first field; Packing::spread, a copy that no store through `out` can change
  VShort factor;  // the base of digits
#ifdef KVQ_DIGIT_TABLES
  Digits digits[3];  // of base 5
#endif
};

template <uint32_t BITS, bool MAP>
KVQ_INLINE void put(const Sink<MAP> &sink, uint32_t vector, uint32_t part, VByte x) {
  if (!(MAP && kLooseIndex && BITS <= 6)) x = mask_low(x, BITS);
  if (MAP) x = look_up(sink.table, x);
  store(sink.out + vector * 64 + part * KVQ_VECTOR_BYTES, x);
}

// Digits of a field of `bits` bits, first digit first: field / 2^bits is at least the mixed radix number and less than the next one, so
// as a fraction of 256 each multiplication by the base carries a digit over the point.
template <class S, bool MAP>
KVQ_INLINE void put_digits(const Sink<MAP> &sink, uint32_t field, uint32_t part, VByte x, uint32_t digits, uint32_t bits) {
  uint8_t *out = sink.out + size_t(vector_of(S::kDigits, sink.spread, sink.field + field, 0)) * 64 + part * KVQ_VECTOR_BYTES;
  const size_t step = size_t(64) << sink.spread;
#ifdef KVQ_DIGIT_TABLES
  if (S::kBase == 5 && digits == S::kDigits) {
#pragma GCC unroll 3
    for (uint32_t d = 0; d < S::kDigits; d++) store(out + d * step, look_up(sink.digits[d % 3], x));
    return;
  }
#endif
  const VShort fraction = (VShort)x << int(8 - bits);
  VShort even = fraction & (uint16_t)0xff, odd = fraction >> 8;
#pragma GCC unroll 5
  for (uint32_t d = 0; d < digits; d++) {
    even *= sink.factor;
    odd *= sink.factor;
    VByte code = (VByte)(even >> 8 | (odd & (uint16_t)0xff00));
    if (MAP) code = look_up(sink.table, code);
    store(out + d * step, code);
    even &= (uint16_t)0xff;
    odd &= (uint16_t)0xff;
  }
}

template <class S, bool MAP>
KVQ_INLINE void put_field(const Sink<MAP> &sink, uint32_t field, uint32_t part, VByte x) {
  if (S::kDigits == 1)
    put<S::kBits, MAP>(sink, field, part, x);
  else
    put_digits<S, MAP>(sink, field, part, S::kBits < 8 ? mask_low(x, S::kBits) : x, S::kDigits, S::kBits);
}

template <uint32_t SHIFT, class S, bool MAP>
KVQ_INLINE void put_direct(const Sink<MAP> &sink, uint32_t plane, uint32_t part, VByte x) {
  if constexpr (SHIFT < S::kDirect) {
    put_field<S, MAP>(sink, plane * S::kDirect + SHIFT, part, shift_right<SHIFT * S::kBits>(x));
    put_direct<SHIFT + 1, S, MAP>(sink, plane, part, x);
  }
}

// Bits BIT to BITS of a field whose bit 0 is bit FIRST of the spare bits of a unit's planes, which follow each other from plane 0 on.
// Its other bits are 0, or garbage where indices may have some.
template <class S, uint32_t FIRST, uint32_t BITS, uint32_t BIT = 0>
KVQ_INLINE VByte gather_spare(const VByte *x) {
  constexpr uint32_t kAt = (FIRST + BIT) % S::kSpare;  // bits [kAt, kAt + kCount) of what a plane has spare
  constexpr uint32_t kCount = S::kSpare - kAt < BITS - BIT ? S::kSpare - kAt : BITS - BIT;
  constexpr uint32_t kFrom = S::kDirect * S::kBits + kAt;
  constexpr uint32_t kRight = kFrom > BIT ? kFrom - BIT : 0, kLeft = BIT > kFrom ? BIT - kFrom : 0;
  constexpr uint8_t kMask = uint8_t(((1u << kCount) - 1) << BIT);
  const VByte bits = shift_left<kLeft>(shift_right<kRight>(x[(FIRST + BIT) / S::kSpare]));
  if constexpr (BIT + kCount == BITS) {
    return kLooseIndex ? bits : bits & kMask;
  } else {
    const VByte rest = gather_spare<S, FIRST, BITS, BIT + kCount>(x);
    return kLooseIndex ? choose<uint8_t((1u << (BIT + kCount)) - 1)>(bits, rest) : (bits & kMask) | rest;
  }
}

template <uint32_t I, class S, bool MAP>
KVQ_INLINE void put_spares(const Sink<MAP> &sink, uint32_t part, const VByte *x) {
  if constexpr (S::kPlanes * S::kDirect + I < S::kFields) {
    put_field<S, MAP>(sink, S::kPlanes * S::kDirect + I, part, gather_spare<S, I * S::kBits, S::kBits>(x));
    put_spares<I + 1, S, MAP>(sink, part, x);
  }
}

template <class S, bool MAP>
KVQ_INLINE void unpack_unit(const uint8_t *planes, const Sink<MAP> &sink) {
#pragma GCC unroll 4
  for (uint32_t part = 0; part < 64 / KVQ_VECTOR_BYTES; part++) {
    VByte x[S::kPlanes];
#pragma GCC unroll 8
    for (uint32_t p = 0; p < S::kPlanes; p++) {
      x[p] = load<VByte>(planes + p * 64 + part * KVQ_VECTOR_BYTES);
      put_direct<0, S, MAP>(sink, p, part, x[p]);
    }
    if constexpr (S::kSpare != 0) put_spares<0, S, MAP>(sink, part, x);
  }
}

// `bits` bits from bit `first` of the shared planes; bits above are garbage.
KVQ_INLINE VByte shared_field(const uint8_t *planes, uint32_t first, uint32_t bits) {
  const uint32_t shift = first % 8;
  VShort field = load<VShort>(planes + first / 8 * 64) >> int(shift);
  if (shift + bits <= 8) return (VByte)field;
  const VShort rest = load<VShort>(planes + first / 8 * 64 + 64) << int(8 - shift);
  const uint16_t low = (uint16_t)(0x0101 * ((1u << (8 - shift)) - 1));
  return (VByte)((field & low) | (rest & (uint16_t)~low));
}

template <class S, bool MAP>
KVQ_INLINE void unpack_tail(const Packing &packing, const uint8_t *shared, const Sink<MAP> &sink) {
  for (uint32_t part = 0; part < 64 / KVQ_VECTOR_BYTES; part++, shared += KVQ_VECTOR_BYTES) {
    uint32_t bit = packing.tail_bit, f = 0;
    for (; f + packing.short_fields < packing.tail_fields; f++, bit += S::kBits)
      put_field<S, MAP>(sink, f, part, shared_field(shared, bit, S::kBits));
    const uint32_t bits = packing.short_fields ? kShortBits[packing.scheme][packing.last_digits] : 0;
    for (; f < packing.tail_fields; f++, bit += bits)
      put_digits<S, MAP>(sink, f, part, mask_low(shared_field(shared, bit, bits), bits), packing.last_digits, bits);
  }
}

template <SchemeId ID, bool MAP>
void unpack_scheme(const Packing &packing, const uint8_t *planes, const uint8_t *shared, const uint8_t *table, uint8_t *codes) {
  using S = SchemeOf<ID>;
  Sink<MAP> sink{};
  if (MAP) sink.table = load_table(table);
  sink.out = codes;
  sink.spread = packing.spread;
  sink.factor = factor_of(S::kBase);
#ifdef KVQ_DIGIT_TABLES
  for (uint32_t d = 0; ID == kBase5 && d < 3; d++) sink.digits[d] = MAP ? load_digits(d, sink.table) : load_digits(d);
#endif
  for (uint32_t u = 0; u < packing.units; u++) {
    unpack_unit<S, MAP>(planes, sink);
    planes += S::kPlanes * 64;
    if (S::kDigits == 1)
      sink.out += S::kFields * 64;
    else
      sink.field += S::kFields;
  }
  unpack_tail<S, MAP>(packing, shared, sink);
}

// codes = table[codes] where the vector look-up does not reach: small tables by comparisons, others one byte at a time.
void map_codes(uint8_t *codes, uint32_t n, const uint8_t *table, uint32_t levels) {
  if (levels > 16) {
    for (uint32_t i = 0; i < n; i++) codes[i] = table[codes[i]];
    return;
  }
  typedef int8_t VSigned __attribute__((vector_size(KVQ_VECTOR_BYTES)));
  VByte step[16];  // from level k - 1 to level k
  for (uint32_t k = 1; k < levels; k++) step[k] = (uint8_t)(table[k] - table[k - 1]) - VByte{};
  for (uint32_t i = 0; i < n; i += KVQ_VECTOR_BYTES) {
    VSigned x = load<VSigned>(codes + i);
    VByte y = table[0] - VByte{};
    for (uint32_t k = 1; k < levels; k++, x -= (int8_t)1) y += (VByte)(x > (int8_t)0) & step[k];
    store(codes + i, y);
  }
}

using Unpack = void (*)(const Packing &, const uint8_t *, const uint8_t *, const uint8_t *, uint8_t *);
template <bool MAP>
constexpr Unpack kUnpack[kSchemes] = {
    unpack_scheme<kBits1, MAP>, unpack_scheme<kBits2, MAP>, unpack_scheme<kBits3, MAP>, unpack_scheme<kBits4, MAP>,
    unpack_scheme<kBits5, MAP>, unpack_scheme<kBits6, MAP>, unpack_scheme<kBits7, MAP>, unpack_scheme<kBits8, MAP>,
    unpack_scheme<kBase3, MAP>, unpack_scheme<kBase5, MAP>, unpack_scheme<kBase6, MAP>};

void unpack(const Packing &packing, const uint8_t *planes, const uint8_t *shared, const uint8_t *table, uint8_t *codes) {
  const uint32_t levels = kSchemeTable[packing.scheme].base;
  if (table && levels <= kTableEntries) return kUnpack<true>[packing.scheme](packing, planes, shared, table, codes);
  kUnpack<false>[packing.scheme](packing, planes, shared, nullptr, codes);
  if (table) map_codes(codes, packing.vectors * 64, table, levels);
}
