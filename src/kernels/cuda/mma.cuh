// Products of small tiles on tensor cores, and copies into shared memory: the few instructions the
// attention and sort kernels are made of, for sm_80 and later.
//
// A product is C[16 x 8] += A[16 x 16] B[16 x 8] by one warp, in float32. Lane l holds of C the
// elements (l/4, 2(l%4) + {0, 1}) in c[0], c[1] and those eight rows below in c[2], c[3]. Tiles lie
// in shared memory in rows of kPitch elements; a pitch is the width plus 8, so that eight rows of
// 16 bytes never share a bank.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace sinkhorn::cuda {

constexpr int kPad = 8;

template <class T>
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                    uint32_t b1) {
  if constexpr (sizeof(T) == 2 && std::is_same_v<T, __nv_bfloat16>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], const void* p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(p))
               : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], const void* p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(p))
               : "memory");
}

// A[m .. m+15, k .. k+15] of a tile that stores A by rows, [m][k].
template <int kPitch, class T>
__device__ __forceinline__ void load_a(uint32_t (&a)[4], const T* tile, int m, int k, int lane) {
  load_matrices(a, tile + (m + (lane & 15)) * kPitch + k + (lane >> 4) * 8);
}
// The same of a tile that stores A by columns, [k][m].
template <int kPitch, class T>
__device__ __forceinline__ void load_a_transposed(uint32_t (&a)[4], const T* tile, int m, int k,
                                                  int lane) {
  const int group = lane >> 3;
  load_matrices_transposed(
      a, tile + (k + (lane & 7) + (group >> 1) * 8) * kPitch + m + (group & 1) * 8);
}
// B[k .. k+15, n .. n+15] of a tile that stores B by columns, [n][k]: {b[0], b[1]} serve columns
// n .. n+7, {b[2], b[3]} the next eight.
template <int kPitch, class T>
__device__ __forceinline__ void load_b(uint32_t (&b)[4], const T* tile, int n, int k, int lane) {
  const int group = lane >> 3;
  load_matrices(b, tile + (n + (lane & 7) + (group >> 1) * 8) * kPitch + k + (group & 1) * 8);
}
// The same of a tile that stores B by rows, [k][n].
template <int kPitch, class T>
__device__ __forceinline__ void load_b_transposed(uint32_t (&b)[4], const T* tile, int n, int k,
                                                  int lane) {
  const int group = lane >> 3;
  load_matrices_transposed(
      b, tile + (k + (lane & 7) + (group & 1) * 8) * kPitch + n + (group >> 1) * 8);
}

template <class T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    const __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&v);
  } else {
    const __half2 v = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&v);
  }
}
template <class T>
__device__ __forceinline__ float2 unpack(uint32_t v) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&v));
  } else {
    return __half22float2(*reinterpret_cast<const __half2*>(&v));
  }
}
template <class T>
__device__ __forceinline__ float to_float(T x) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __bfloat162float(x);
  } else if constexpr (std::is_same_v<T, __half>) {
    return __half2float(x);
  } else {
    return x;
  }
}
template <class T>
__device__ __forceinline__ T from_float(float x) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16_rn(x);
  } else if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(x);
  } else {
    return x;
  }
}

// The product's C becomes the next product's A: columns 16 step .. of C, held by eights.
template <class T>
__device__ __forceinline__ void accumulators_to_a(uint32_t (&a)[4], const float (&left)[4],
                                                  const float (&right)[4]) {
  a[0] = pack<T>(left[0], left[1]);
  a[1] = pack<T>(left[2], left[3]);
  a[2] = pack<T>(right[0], right[1]);
  a[3] = pack<T>(right[2], right[3]);
}

// 16 bytes into shared memory in the background; zeros where `valid` is false.
__device__ __forceinline__ void copy_async(void* to, const void* from, bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until at most kLeft of the committed groups are under way.
template <int kLeft>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

}  // namespace sinkhorn::cuda
