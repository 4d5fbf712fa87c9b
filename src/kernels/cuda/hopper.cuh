// Products by a warpgroup on Hopper (sm_90a): C[64 x 64] += A[64 x 16] B[16 x 64], or 32 columns of
// them, operands read from shared memory by the tensor cores themselves.
//
// A tile is 64 rows of 64 numbers, 128 bytes a row, 8 KB at a multiple of 1024 bytes. The eight
// 16-byte pieces of row r lie at piece ^ (r % 8): the layout the hardware calls 128-byte swizzle.
// One of 64 rows of 32 numbers, 64 bytes a row, has the four pieces of row r at piece ^ (r / 2 %
// 4): 64-byte swizzle. Either way round a tile can be an operand: by rows along the sum ([m][k],
// [n][k]), or by rows across it ([k][m], [k][n]), which is called transposed here.
//
// C is held as sm_80's products hold it: warp w of the group has rows 16 w .. 16 w + 15.
#pragma once

#include "kernels/cuda/mma.cuh"

namespace sinkhorn::cuda {

constexpr int kPanel = 64 * 64;  // elements of a tile of 64 columns

// Where element (row, column) of a tile lies; columns of one piece of eight stay together.
template <int kColumns = 64>
__device__ __forceinline__ int swizzled(int row, int column) {
  static_assert(kColumns == 64 || kColumns == 32);
  const int turn = kColumns == 64 ? row & 7 : row >> 1 & 3;
  return row * kColumns + (((column >> 3) ^ turn) << 3) + (column & 7);
}

template <int kColumns = 64>
__device__ __forceinline__ uint64_t tile_descriptor(const void* tile) {
  constexpr uint64_t kGroupStride = uint64_t{kColumns * 16 >> 4} << 32;  // of groups of eight rows
  constexpr uint64_t kSwizzle = uint64_t{kColumns == 64 ? 1 : 2} << 62;
  return kSwizzle | kGroupStride | (uint64_t{1} << 16) | ((shared_address(tile) & 0x3FFFFu) >> 4);
}
// Steps of 16 along the sum: within rows, or from rows to rows.
template <bool kTransposed, int kColumns = 64>
__device__ __forceinline__ uint64_t step_of(uint64_t descriptor, int step) {
  return descriptor + static_cast<uint64_t>(step * (kTransposed ? kColumns * 32 : 32) >> 4);
}

// Other targets parse these functions too; their kernels are never launched there.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define SINKHORN_HOPPER 1
#else
#define SINKHORN_HOPPER 0
#endif

// By columns of C; what comes after the accumulators is numbered after them.
#define SINKHORN_ACCUMULATORS_32 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}"
#define SINKHORN_ACCUMULATORS_64                                            \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define SINKHORN_ROW(n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#define SINKHORN_ROWS_32 SINKHORN_ROW(0), SINKHORN_ROW(1), SINKHORN_ROW(2), SINKHORN_ROW(3)
#define SINKHORN_ROWS_64 \
  SINKHORN_ROWS_32, SINKHORN_ROW(4), SINKHORN_ROW(5), SINKHORN_ROW(6), SINKHORN_ROW(7)
#define SINKHORN_WGMMA(columns, type, which, operands, ...)                                \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " which                                   \
               ", 0;\nwgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type \
               " " SINKHORN_ACCUMULATORS_##columns ", " operands ";\n}\n"                  \
               : SINKHORN_ROWS_##columns                                                   \
               : __VA_ARGS__)
#define SINKHORN_SS(columns, type, which, operands)                                           \
  SINKHORN_WGMMA(columns, type, which, operands, "l"(a), "l"(b), "r"(add), "n"(kTransposedA), \
                 "n"(kTransposedB))
#define SINKHORN_SS_32(type) SINKHORN_SS(32, type, "%18", "%16, %17, p, 1, 1, %19, %20")
#define SINKHORN_SS_64(type) SINKHORN_SS(64, type, "%34", "%32, %33, p, 1, 1, %35, %36")
#define SINKHORN_RS(columns, type, which, operands)                                          \
  SINKHORN_WGMMA(columns, type, which, operands, "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), \
                 "l"(b), "r"(add), "n"(kTransposedB))
#define SINKHORN_RS_32(type) SINKHORN_RS(32, type, "%21", "{%16, %17, %18, %19}, %20, p, 1, 1, %22")
#define SINKHORN_RS_64(type) SINKHORN_RS(64, type, "%37", "{%32, %33, %34, %35}, %36, p, 1, 1, %38")
#define SINKHORN_BY_TYPE(wgmma)                     \
  if constexpr (std::is_same_v<T, __nv_bfloat16>) { \
    wgmma("bf16");                                  \
  } else {                                          \
    wgmma("f16");                                   \
  }

// add = 0 begins anew. Both sides in shared memory.
template <class T, int kTransposedA, int kTransposedB, int kTiles>
__device__ __forceinline__ void group_mma(float (&c)[kTiles][4], uint64_t a, uint64_t b, int add) {
  static_assert(kTiles == 8 || kTiles == 4);
#if SINKHORN_HOPPER
  if constexpr (kTiles == 8) {
    SINKHORN_BY_TYPE(SINKHORN_SS_64)
  } else {
    SINKHORN_BY_TYPE(SINKHORN_SS_32)
  }
#endif
}
// The left side in registers, as products of sm_80 take it.
template <class T, int kTransposedB, int kTiles>
__device__ __forceinline__ void group_mma(float (&c)[kTiles][4], const uint32_t (&a)[4], uint64_t b,
                                          int add) {
  static_assert(kTiles == 8 || kTiles == 4);
#if SINKHORN_HOPPER
  if constexpr (kTiles == 8) {
    SINKHORN_BY_TYPE(SINKHORN_RS_64)
  } else {
    SINKHORN_BY_TYPE(SINKHORN_RS_32)
  }
#endif
}
#undef SINKHORN_ACCUMULATORS_32
#undef SINKHORN_ACCUMULATORS_64
#undef SINKHORN_ROW
#undef SINKHORN_ROWS_32
#undef SINKHORN_ROWS_64
#undef SINKHORN_WGMMA
#undef SINKHORN_SS
#undef SINKHORN_SS_32
#undef SINKHORN_SS_64
#undef SINKHORN_RS
#undef SINKHORN_RS_32
#undef SINKHORN_RS_64
#undef SINKHORN_BY_TYPE

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
