// Products by a warpgroup on Hopper (sm_90a): C[64 x 64] += A[64 x 16] B[16 x 64], operands read
// from shared memory by the tensor cores themselves.
//
// A tile is 64 rows of 64 numbers, 128 bytes a row, 8 KB at a multiple of 1024 bytes. The eight
// 16-byte pieces of row r lie at piece ^ (r % 8): the layout the hardware calls 128-byte swizzle.
// Either way round a tile can be an operand: by rows along the sum ([m][k], [n][k]), or by rows
// across it ([k][m], [k][n]), which is called transposed here.
//
// C is held as sm_80's products hold it: warp w of the group has rows 16 w .. 16 w + 15.
#pragma once

#include "kernels/cuda/mma.cuh"

namespace sinkhorn::cuda {

constexpr int kPanel = 64 * 64;  // elements of a tile

// Where element (row, column) of a tile lies; columns of one piece of eight stay together.
__device__ __forceinline__ int swizzled(int row, int column) {
  return row * 64 + (((column >> 3) ^ (row & 7)) << 3) + (column & 7);
}

__device__ __forceinline__ uint64_t tile_descriptor(const void* tile) {
  constexpr uint64_t kGroupStride = uint64_t{1024 >> 4} << 32;  // between groups of eight rows
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  return kSwizzle128 | kGroupStride | (uint64_t{1} << 16) |
         ((shared_address(tile) & 0x3FFFFu) >> 4);
}
// Steps of 16 along the sum: within rows, or from rows to rows.
template <bool kTransposed>
__device__ __forceinline__ uint64_t step_of(uint64_t descriptor, int step) {
  return descriptor + static_cast<uint64_t>(step * (kTransposed ? 2048 : 32) >> 4);
}

// Other targets parse these functions too; their kernels are never launched there.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define SINKHORN_HOPPER 1
#else
#define SINKHORN_HOPPER 0
#endif

#define SINKHORN_ACCUMULATORS                                               \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define SINKHORN_ROW(n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#define SINKHORN_ROWS                                                                  \
  SINKHORN_ROW(0), SINKHORN_ROW(1), SINKHORN_ROW(2), SINKHORN_ROW(3), SINKHORN_ROW(4), \
      SINKHORN_ROW(5), SINKHORN_ROW(6), SINKHORN_ROW(7)
#define SINKHORN_WGMMA_SS(type)                                                             \
  asm volatile(                                                                             \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"                                          \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " " SINKHORN_ACCUMULATORS \
      ", %32, %33, p, 1, 1, %35, %36;\n}\n"                                                 \
      : SINKHORN_ROWS                                                                       \
      : "l"(a), "l"(b), "r"(add), "n"(kTransposedA), "n"(kTransposedB))
#define SINKHORN_WGMMA_RS(type)                                                             \
  asm volatile(                                                                             \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"                                          \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " " SINKHORN_ACCUMULATORS \
      ", {%32, %33, %34, %35}, %36, p, 1, 1, %38;\n}\n"                                     \
      : SINKHORN_ROWS                                                                       \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(kTransposedB))

// add = 0 begins anew. Both sides in shared memory.
template <class T, int kTransposedA, int kTransposedB>
__device__ __forceinline__ void group_mma(float (&c)[8][4], uint64_t a, uint64_t b, int add) {
#if SINKHORN_HOPPER
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    SINKHORN_WGMMA_SS("bf16");
  } else {
    SINKHORN_WGMMA_SS("f16");
  }
#endif
}
// The left side in registers, as products of sm_80 take it.
template <class T, int kTransposedB>
__device__ __forceinline__ void group_mma(float (&c)[8][4], const uint32_t (&a)[4], uint64_t b,
                                          int add) {
#if SINKHORN_HOPPER
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    SINKHORN_WGMMA_RS("bf16");
  } else {
    SINKHORN_WGMMA_RS("f16");
  }
#endif
}
#undef SINKHORN_ACCUMULATORS
#undef SINKHORN_ROW
#undef SINKHORN_ROWS
#undef SINKHORN_WGMMA_SS
#undef SINKHORN_WGMMA_RS

// The reverse of load_matrices: each lane says where eight numbers of a row go.
__device__ __forceinline__ void store_matrices(void* p, const uint32_t (&r)[4]) {
#if SINKHORN_HOPPER
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(p)),
      "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
      : "memory");
#endif
}

// Around a batch of products: registers written before are seen, and all of them are done after.
__device__ __forceinline__ void begin_products() {
#if SINKHORN_HOPPER
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void end_products() {
#if SINKHORN_HOPPER
  asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
#endif
}
// What this thread wrote to shared memory becomes visible to the tensor cores; then a barrier.
__device__ __forceinline__ void publish_writes() {
#if SINKHORN_HOPPER
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
// To be called when products are done: no use of the accumulators is moved before it.
template <int kTiles>
__device__ __forceinline__ void pin(float (&c)[kTiles][4]) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) asm volatile("" : "+f"(c[n][e])::"memory");
  }
}

}  // namespace sinkhorn::cuda
