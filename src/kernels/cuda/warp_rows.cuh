// The rows that a warp holds after a product, from registers to memory.
#pragma once

#include "kernels/cuda/mma.cuh"

namespace sinkhorn::cuda {

// Number i of lane j of four goes to lane i, as its number j.
__device__ __forceinline__ void transpose_quad(uint32_t (&a)[4], int lane) {
#pragma unroll
  for (int apart = 1; apart <= 2; apart *= 2) {
    const bool upper = (lane & apart) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & apart) continue;
      const uint32_t got = __shfl_xor_sync(0xFFFFFFFFu, upper ? a[i] : a[i + apart], apart);
      (upper ? a[i] : a[i + apart]) = got;
    }
  }
}

// 16 bytes to memory at once; of a plain assignment the compiler may make four.
__device__ __forceinline__ void store_piece(void* to, const uint32_t (&a)[4]) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)),
               "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])
               : "memory");
}

// Where 16 rows that a warp holds go.
template <class T>
struct WarpRows {
  T* rows;
  int64_t stride;
  int first, limit;
};

// 16 rows of a warp to memory; the four lanes of a row exchange what they hold of it, so
// that each writes 16 bytes at a time.
template <class T, int kTiles>
__device__ __forceinline__ void store_warp_rows(const float (&x)[kTiles][4], float factor,
                                                const WarpRows<T>& to, int width, int row,
                                                int lane) {
#pragma unroll
  for (int low = 0; low < 2; ++low) {
    const int r = row + lane / 4 + 8 * low;
    T* const at = to.rows + (to.first + r) * to.stride;
#pragma unroll
    for (int part = 0; part < kTiles / 4; ++part) {
      uint32_t a[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float(&from)[4] = x[part * 4 + i];
        a[i] = pack<T>(from[2 * low] * factor, from[2 * low + 1] * factor);
      }
      transpose_quad(a, lane);
      const int c = part * 32 + lane % 4 * 8;
      if (to.first + r < to.limit && c < width) store_piece(at + c, a);
    }
  }
}

}  // namespace sinkhorn::cuda
