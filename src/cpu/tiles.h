// Dot products of codes in memory with many rows by the matrix unit (AMX): a tile holds 16 quads of 16 lanes, as they lie, another the
// bytes of the weights, and their product costs no more for eight rows than for one.  Included by kernels_impl.h only, inside its
// anonymous namespace.
#if defined(__AMX_INT8__)
#define KVQ_TILES 1
constexpr uint32_t kTileRows = 3;  // at least: fewer are faster by vectors
constexpr uint32_t kTileQuads = kDepth, kTileLanes = 16;

// High and low bytes of four or of eight rows.
KVQ_INLINE uint32_t weight_rows(uint32_t rows) { return rows > 4 ? 16 : 8; }

// What is at `p` lies in memory: GCC does not know that tile instructions read it.
KVQ_INLINE void settle(const void *p) { __asm__ volatile("" : : "r"(p) : "memory"); }

// Tiles 0 to 3 are sums [row][high, low][lane], 4 weights [row][high, low][quad], 5 and 6 codes [quad][lane].
void begin_tiles(uint32_t rows) {
  struct alignas(64) {
    uint8_t palette, unused[15];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  } shapes{};
  shapes.palette = 1;
  for (uint32_t i = 0; i < 7; i++) shapes.row_bytes[i] = 64, shapes.rows[i] = uint8_t(i < 5 ? weight_rows(rows) : kTileQuads);
  settle(&shapes);
  _tile_loadconfig(&shapes);
}
void end_tiles() { _tile_release(); }

struct alignas(64) WeightTile {
  uint8_t of[16][64];
};
// A tile of four rows from their place: [quad][byte of a row] to [byte of a row][quad], in words of four neighbours; zeros behind `quads`.
KVQ_INLINE void turn_weights(const int16_t *w, uint32_t quads, uint8_t (*out)[64]) {
  const __mmask16 used = (__mmask16)((1u << quads) - 1);
  const __m512i first = _mm512_setr_epi32(0, 8, 16, 24, 1, 9, 17, 25, 2, 10, 18, 26, 3, 11, 19, 27);
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(4));
  __m512i x[2][4];  // [half of the words][four quads], of which 128-bit lanes are words
#pragma GCC unroll 4
  for (uint32_t i = 0; i < 4; i++) {
    const __m512i a = _mm512_loadu_si512(w + i * 64), b = _mm512_loadu_si512(w + i * 64 + 32);
    x[0][i] = _mm512_permutex2var_epi32(a, first, b);
    x[1][i] = _mm512_permutex2var_epi32(a, second, b);
  }
#pragma GCC unroll 2
  for (uint32_t i = 0; i < 2; i++) {
    const __m512i a = _mm512_shuffle_i32x4(x[i][0], x[i][1], 0x44), b = _mm512_shuffle_i32x4(x[i][2], x[i][3], 0x44);
    const __m512i c = _mm512_shuffle_i32x4(x[i][0], x[i][1], 0xee), d = _mm512_shuffle_i32x4(x[i][2], x[i][3], 0xee);
    _mm512_store_si512(out[4 * i], _mm512_maskz_shuffle_i32x4(used, a, b, 0x88));
    _mm512_store_si512(out[4 * i + 1], _mm512_maskz_shuffle_i32x4(used, a, b, 0xdd));
    _mm512_store_si512(out[4 * i + 2], _mm512_maskz_shuffle_i32x4(used, c, d, 0x88));
    _mm512_store_si512(out[4 * i + 3], _mm512_maskz_shuffle_i32x4(used, c, d, 0xdd));
  }
}

struct alignas(64) SumTile {
  int32_t of[16][kTileLanes];
};

// N tiles of lanes from `lane` on, `chunks` tiles of quads; x: the first word.
template <uint32_t N>
KVQ_INLINE void multiply_tiles(const WeightTile *weights, const uint8_t *x, size_t stride, uint32_t chunks, Prefetch *lines, SumTile *sums) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (uint32_t i = 0; i < chunks; i++, x += kTileQuads * stride) {
    _tile_loadd(4, weights[i].of, 64);
    fetch<8, 2>(lines);
    _tile_loadd(5, x, stride);
    _tile_dpbsud(0, 4, 5);
    if (N > 1) {
      fetch<8, 2>(lines);
      _tile_loadd(6, x + 64, stride);
      _tile_dpbsud(1, 4, 6);
    }
    if (N > 2) {
      fetch<8, 2>(lines);
      _tile_loadd(5, x + 128, stride);
      _tile_dpbsud(2, 4, 5);
    }
    if (N > 3) {
      fetch<8, 2>(lines);
      _tile_loadd(6, x + 192, stride);
      _tile_dpbsud(3, 4, 6);
    }
  }
  _tile_stored(0, sums[0].of, 64);
  if (N > 1) {
    _tile_stored(1, sums[1].of, 64);
  }
  if (N > 2) {
    _tile_stored(2, sums[2].of, 64);
  }
  if (N > 3) {
    _tile_stored(3, sums[3].of, 64);
  }
}

// What a block of tiles of lanes has become.
template <uint32_t N>
KVQ_INLINE void finish_tiles(const Batch &batch, const SumTile *sums, uint32_t row, uint32_t rows, uint32_t lane) {
#pragma GCC unroll 1
  for (uint32_t r = 0; r < rows; r++) {
    VInt totals[1][N];
#pragma GCC unroll 4
    for (uint32_t v = 0; v < N; v++) totals[0][v] = (load<VInt>(sums[v].of[2 * r]) << 8) + load<VInt>(sums[v].of[2 * r + 1]) + all_int(batch.start[row + r]);
    finish_totals(totals, batch, row + r, 1, lane);
  }
}

// All lanes of up to eight rows.  A block is finished behind the products of the next one: what is stored in tiles takes a while to come
// back in vectors.
KVQ_INLINE void tiles_rows(const Dot &dot, Batch *batch, const WeightTile *weights, uint32_t row, uint32_t rows, uint32_t first,
                           uint32_t chunks, uint32_t lanes) {
  constexpr uint32_t kStep = 4 * kTileLanes;
  const uint8_t *x = (const uint8_t *)dot.x + first * dot.stride;
  SumTile sums[2][4];
  uint32_t lane = 0;
  for (; lane + kStep <= lanes; lane += kStep) {
    multiply_tiles<4>(weights, x + lane * 4, dot.stride, chunks, &batch->lines, sums[lane / kStep % 2]);
    if (lane) finish_tiles<4>(*batch, sums[(lane / kStep + 1) % 2], row, rows, lane - kStep);
  }
  if (lane) finish_tiles<4>(*batch, sums[(lane / kStep + 1) % 2], row, rows, lane - kStep);
  for (; lane < lanes; lane += kTileLanes) {
    multiply_tiles<1>(weights, x + lane * 4, dot.stride, chunks, &batch->lines, sums[0]);
    finish_tiles<1>(*batch, sums[0], row, rows, lane);
  }
}

// Quads [first, end), which are at most kSumSpan weights, and whole tiles of `lanes`.
void dot_tiles(const Dot &dot, uint32_t first, uint32_t end, uint32_t lanes) {
  const uint32_t chunks = (end - first + kTileQuads - 1) / kTileQuads, group = weight_rows(dot.rows) / 2;
  Batch batch = batch_of(dot, first / (kSumSpan / 4));
  for (uint32_t row = 0; row < dot.rows; row += group) {
    WeightTile weights[kSumSpan / 4 / kTileQuads];
    for (uint32_t i = 0, quad = first; i < chunks; i++, quad += kTileQuads)
      for (uint32_t r = 0; r < group; r += 4)
        turn_weights((const int16_t *)dot.w + weight_place(dot.w_stride, row + r, quad), end - quad < kTileQuads ? end - quad : kTileQuads,
                     weights[i].of + 2 * r);
    settle(weights);
    tiles_rows(dot, &batch, weights, row, dot.rows - row < group ? dot.rows - row : group, first, chunks, lanes);
  }
  if (dot.prefetch) *dot.prefetch = batch.lines;
}
#endif
