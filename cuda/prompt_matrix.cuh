// fp16 products of a warp group (four warps, 64 rows) with images: wgmma on sm_90a, mma.sync elsewhere.
//
// lane = 4 * r + t.  A warp has 16 rows; a lane has rows r and r + 8 of them.  Accumulators of 64 columns: c[4 * j + i] is row r + 8 * (i / 2),
// column 8 * j + 2 * t + i % 2.  A operands of 16 columns: {row r, columns 2 t and on}, {row r + 8, the same}, {row r, columns 8 + 2 t and
// on}, {row r + 8, the same}.  Products of wgmma are under way until await_products(): all but the newest n groups of them are done then.
#pragma once
#include "cuda/fragments.cuh"
#include "cuda/prompt.cuh"

namespace kvq::cuda {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr bool kGroupProducts = true;
#else
constexpr bool kGroupProducts = false;
#endif

// Rows of an A operand that lie in an image, to registers: step `s` of 16 channels, rows 16 * warp and on.
__device__ __forceinline__ void load_rows(uint32_t image, uint32_t warp, uint32_t s, uint32_t (&a)[4]) {
  const uint32_t lane = threadIdx.x % 32, row = 16 * warp + (lane / 8 % 2) * 8 + lane % 8;
  const uint32_t at = image + image_offset(row, 2 * s + lane / 16);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(at) : "memory");
}

#define KVQ_C32(c)                                                                                                                          \
  "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]),      \
      "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]),     \
      "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]),     \
      "+f"(c[31])

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Swizzled rows of 128 bytes, `offset` bytes into an image; groups of eight rows are 1024 bytes apart, panels 8192.
__device__ __forceinline__ uint64_t describe(uint32_t image, uint32_t offset) {
  return (uint64_t(image >> 4) | uint64_t(8192 >> 4) << 16 | uint64_t(1024 >> 4) << 32 | uint64_t(1) << 62) + (offset >> 4);
}
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kNewest>
__device__ __forceinline__ void await_products() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kNewest) : "memory"); }
// No use of an accumulator may move in front of the wait.
__device__ __forceinline__ void settle(float (&c)[32]) { asm volatile("" : KVQ_C32(c)::"memory"); }

#define KVQ_D32                                                                                                                     \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}"

// c (+)= A * B, A [64][16] in registers, B [16][64]: keys have their 16 channels in a row, values (kAcross) their 64.
template <bool kAcross>
__device__ __forceinline__ void multiply(float (&c)[32], const uint32_t (&a)[4], uint64_t b, uint32_t add) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 " KVQ_D32
      ", {%32,%33,%34,%35}, %36, p, 1, 1, %38; }"
      : KVQ_C32(c)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(int(kAcross)));
}
// The same with A in an image.
__device__ __forceinline__ void multiply_image(float (&c)[32], uint64_t a, uint64_t b, uint32_t add) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %34, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 " KVQ_D32 ", %32, %33, p, 1, 1, 0, 0; }"
      : KVQ_C32(c)
      : "l"(a), "l"(b), "r"(add));
}
#undef KVQ_D32
#define KVQ_D64                                                                                                                     \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"        \
  "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}"

// Columns 64 tokens: s (+)= Q * K^T, step `s` of 16 channels.
__device__ __forceinline__ void multiply_keys(float (&c)[32], const uint32_t (&q)[4], uint32_t image, uint32_t s, uint32_t add) {
  multiply<false>(c, q, describe(image, s / 4 * 8192 + s % 4 * 32), add);
}
__device__ __forceinline__ void multiply_keys(float (&c)[32], uint32_t q_image, uint32_t, uint32_t image, uint32_t s, uint32_t add) {
  const uint32_t offset = s / 4 * 8192 + s % 4 * 32;
  multiply_image(c, describe(q_image, offset), describe(image, offset), add);
}
// Columns 64 channels of a panel: o += P * V, step `s` of 16 tokens.
__device__ __forceinline__ void multiply_values(float (&c)[32], const uint32_t (&p)[4], uint32_t image, uint32_t panel, uint32_t s) {
  multiply<true>(c, p, describe(image, panel * 8192 + s * 2048), 1);
}
// The same for two panels at once.
__device__ __forceinline__ void multiply_values(float (&c)[32], float (&d)[32], const uint32_t (&p)[4], uint32_t image, uint32_t panel, uint32_t s) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 " KVQ_D64 ", {%64,%65,%66,%67}, %68, 1, 1, 1, 1;"
               : KVQ_C32(c), KVQ_C32(d)
               : "r"(p[0]), "r"(p[1]), "r"(p[2]), "r"(p[3]), "l"(describe(image, panel * 8192 + s * 2048)));
}
#undef KVQ_D64

#else

__device__ __forceinline__ void begin_products() {}
__device__ __forceinline__ void commit_products() {}
template <int>
__device__ __forceinline__ void await_products() {}
__device__ __forceinline__ void settle(float (&)[32]) {}

__device__ __forceinline__ void multiply_keys(float (&c)[32], const uint32_t (&q)[4], uint32_t image, uint32_t s, uint32_t add) {
  const uint32_t lane = threadIdx.x % 32;
  if (!add)
#pragma unroll
    for (int i = 0; i < 32; i++) c[i] = 0;
#pragma unroll
  for (uint32_t two = 0; two < 4; two++) {  // columns 16 * two and on
    uint32_t b[4];
    const uint32_t at = image + image_offset(16 * two + lane / 16 * 8 + lane % 8, 2 * s + lane / 8 % 2);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(at) : "memory");
    multiply_halves(c + 8 * two, q, b[0], b[1]), multiply_halves(c + 8 * two + 4, q, b[2], b[3]);
  }
}
__device__ __forceinline__ void multiply_keys(float (&c)[32], uint32_t q_image, uint32_t warp, uint32_t image, uint32_t s, uint32_t add) {
  uint32_t q[4];
  load_rows(q_image, warp, s, q);
  multiply_keys(c, q, image, s, add);
}
__device__ __forceinline__ void multiply_values(float (&c)[32], const uint32_t (&p)[4], uint32_t image, uint32_t panel, uint32_t s) {
  const uint32_t lane = threadIdx.x % 32;
#pragma unroll
  for (uint32_t two = 0; two < 4; two++) {
    uint32_t b[4];
    const uint32_t at = image + image_offset(16 * s + lane / 8 % 2 * 8 + lane % 8, 8 * panel + 2 * two + lane / 16);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(at) : "memory");
    multiply_halves(c + 8 * two, p, b[0], b[1]), multiply_halves(c + 8 * two + 4, p, b[2], b[3]);
  }
}
__device__ __forceinline__ void multiply_values(float (&c)[32], float (&d)[32], const uint32_t (&p)[4], uint32_t image, uint32_t panel, uint32_t s) {
  multiply_values(c, p, image, panel, s), multiply_values(d, p, image, panel + 1, s);
}

#endif
#undef KVQ_C32

}  // namespace kvq::cuda
