// A ring of images in shared memory: one warp fills slots, eight warps use them up.
#pragma once
#include "cuda/fragments.cuh"
#include "cuda/prompt.cuh"

namespace kvq::cuda {

constexpr uint32_t kMaxSlots = 12, kUsers = 8;  // warps that read

// What a user must know of a tile before its images; tokens = 0: the item is over.
struct TileHead {
  uint32_t tokens, position, positions;  // as those of TilePart
  uint32_t flags;
  float key_scale;
  // Not every query sees every token; images that there are besides keys and values; tokens have zeros.
  static constexpr uint32_t kMasked = 1, kKeysLow = 2, kValuesLow = 4, kZeros = 8;
  __device__ __forceinline__ bool has(uint32_t flag) const { return flags & flag; }
};

struct RingBarriers {
  uint64_t full[kMaxSlots], empty[kMaxSlots];
};

__device__ __forceinline__ void open_barrier(const uint64_t *barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void arrive(const uint64_t *barrier) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void await(const uint64_t *barrier, uint32_t parity) {
#if __CUDA_ARCH__ >= 900 || !defined(__CUDA_ARCH__)
  await_page(shared_address(barrier), parity);
#else
  uint32_t done = 0;
  while (!done)
    asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
#endif
}
// Copies of a warp that complete on `full`, and the arrivals on it for every slot.
#if __CUDA_ARCH__ >= 900 || !defined(__CUDA_ARCH__)
constexpr uint32_t kFullArrivals = 1;
__device__ __forceinline__ void copy_image(uint32_t to, const uint8_t *from, uint32_t bytes, const uint64_t *full, uint32_t lane) {
  fetch_page(to, from, bytes, shared_address(full), lane);
}
__device__ __forceinline__ void copy_nothing(const uint64_t *full, uint32_t lane) {
  if (lane == 0) arrive(full);
}
#else
constexpr uint32_t kFullArrivals = 32;
__device__ __forceinline__ void copy_image(uint32_t to, const uint8_t *from, uint32_t bytes, const uint64_t *full, uint32_t lane) {
  __syncwarp();  // what lane 0 wrote comes before every lane's arrival
  for (uint32_t i = lane * 16; i < bytes; i += 512) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + i), "l"(from + i) : "memory");
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(full)) : "memory");
}
__device__ __forceinline__ void copy_nothing(const uint64_t *full, uint32_t) {
  __syncwarp();
  arrive(full);
}
#endif

// A place in the ring, of the warp that fills it or of one that reads.
struct Cursor {
  uint32_t slot = 0, round = 0;  // round: its parity
  __device__ __forceinline__ void next(uint32_t slots) {
    if (++slot == slots) slot = 0, round ^= 1;
  }
};

}  // namespace kvq::cuda
