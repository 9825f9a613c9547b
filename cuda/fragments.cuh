// Units of codes (layout.h) to operands of mma.m16n8k32: eight registers of four int8 levels.
//
// A permute instruction looks up four codes of a nibble each in a table of eight bytes; bit 3 of a nibble must be 0.  Codes are
// packed so that masks and shifts are all that stands between a stored word and its selectors.
#pragma once
#include <cstdint>

namespace kvq::cuda {

__device__ __forceinline__ uint32_t permute(uint32_t low, uint32_t high, uint32_t selector) {
  uint32_t out;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(low), "r"(high), "r"(selector));
  return out;
}

// A lane's words of a unit (lane_word in layout.h).
template <int W>
__device__ __forceinline__ void load_unit(const uint8_t *unit, uint32_t lane, uint32_t (&words)[W]) {
  int i = 0;
  if constexpr (W >= 4) {
    const uint4 v = *reinterpret_cast<const uint4 *>(unit + lane * 16);
    words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
    i = 4;
  }
  if constexpr (W % 4 >= 2) {
    const uint2 v = *reinterpret_cast<const uint2 *>(unit + i * 128 + lane * 8);
    words[i] = v.x, words[i + 1] = v.y;
  }
  if constexpr (W % 2) words[W - 1] = *reinterpret_cast<const uint32_t *>(unit + (W - 1) * 128 + lane * 4);
}

// Levels of codes 0..7 in the bytes of a table; fewer codes repeat.
struct LevelTable {
  uint32_t low, high;
};

template <int W>
__device__ __forceinline__ void look_up(const uint32_t (&w)[W], LevelTable table, uint32_t (&r)[8]) {
  if constexpr (W == 1) {
#pragma unroll
    for (int b = 0; b < 4; b++) {
      const uint32_t x = w[0] >> b & 0x11111111u;
      r[2 * b] = permute(table.low, table.low, x);
      r[2 * b + 1] = permute(table.low, table.low, x >> 16);
    }
  } else if constexpr (W == 2) {
#pragma unroll
    for (int k = 0; k < 2; k++) {
      const uint32_t x = w[k] & 0x77777777u, y = w[k] >> 2 & 0x77777777u;  // bit 2 of a selector does not matter
      r[4 * k] = permute(table.low, table.low, x);
      r[4 * k + 1] = permute(table.low, table.low, x >> 16);
      r[4 * k + 2] = permute(table.low, table.low, y);
      r[4 * k + 3] = permute(table.low, table.low, y >> 16);
    }
  } else {
    static_assert(W == 3);
#pragma unroll
    for (int k = 0; k < 3; k++) {
      const uint32_t x = w[k] & 0x77777777u;
      r[2 * k] = permute(table.low, table.high, x);
      r[2 * k + 1] = permute(table.low, table.high, x >> 16);
    }
    const uint32_t last = (w[0] >> 3 & 0x11111111u) | (w[1] >> 2 & 0x22222222u) | (w[2] >> 1 & 0x44444444u);
    r[6] = permute(table.low, table.high, last);
    r[7] = permute(table.low, table.high, last >> 16);
  }
}

// 16 antisymmetric levels: the table has the eight magnitudes; signs are spread over bytes, and -m is ~m + 1.
__device__ __forceinline__ void look_up_signed(const uint32_t (&w)[4], LevelTable table, uint32_t (&r)[8]) {
#pragma unroll
  for (int k = 0; k < 4; k++) {
    const uint32_t x = w[k] & 0x77777777u, shifted = w[k] << 4;
    const uint32_t even = permute(w[k], w[k], 0xba98u), odd = permute(shifted, shifted, 0xba98u);
    r[2 * k] = (permute(table.low, table.high, x) ^ even) + (even & 0x01010101u);
    r[2 * k + 1] = (permute(table.low, table.high, x >> 16) ^ odd) + (odd & 0x01010101u);
  }
}

// Codes themselves, of 4 to 6 bits.
template <int W>
__device__ __forceinline__ void plain_codes(const uint32_t (&w)[W], uint32_t (&r)[8]) {
#pragma unroll
  for (int k = 0; k < 8; k++) {
    r[k] = w[k / 2] >> (4 * (k & 1)) & 0x0f0f0f0fu;
    if constexpr (W == 5) r[k] |= (w[4] >> k & 0x01010101u) << 4;
    if constexpr (W == 6) r[k] |= (w[4 + k / 4] >> (2 * (k % 4)) & 0x03030303u) << 4;
  }
}

// c += A * B with A of signed levels (keys, values) and B of bytes: signed digits of a query, unsigned ones of probabilities.
__device__ __forceinline__ void multiply_query(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void multiply_weights(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Bytes 0, or bytes 1, of four registers.
__device__ __forceinline__ uint32_t gather_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d, uint32_t selector) {
  return permute(permute(a, b, selector), permute(c, d, selector), 0x5410u);
}

// ---- a ring of pages in shared memory

__device__ __forceinline__ uint32_t shared_address(const void *p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

#if __CUDA_ARCH__ >= 900 || !defined(__CUDA_ARCH__)
__device__ __forceinline__ void open_barrier(uint32_t barrier) { asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier)); }
__device__ __forceinline__ void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// Plain stores to the ring come before copies to it.
__device__ __forceinline__ void open_ring() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void fetch_page(uint32_t to, const uint8_t *from, uint32_t bytes, uint32_t barrier, uint32_t lane) {
  if (lane != 0) return;
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void await_page(uint32_t barrier, uint32_t phase) {
  uint32_t done = 0;
  while (!done)
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(barrier), "r"(phase)
                 : "memory");
}
#else
// Before sm_90 the warp copies a page itself.
__device__ __forceinline__ void open_barrier(uint32_t) {}
__device__ __forceinline__ void publish_barriers() {}
__device__ __forceinline__ void open_ring() {}
__device__ __forceinline__ void fetch_page(uint32_t to, const uint8_t *from, uint32_t bytes, uint32_t, uint32_t lane) {
  for (uint32_t i = lane * 16; i < bytes; i += 512)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + i), "l"(from + i) : "memory");
  asm volatile("cp.async.commit_group;" ::: "memory");
}
__device__ __forceinline__ void await_page(uint32_t, uint32_t) {
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncwarp();
}
#endif

}  // namespace kvq::cuda
