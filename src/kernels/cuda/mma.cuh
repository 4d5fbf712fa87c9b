// Products of small tiles on tensor cores, and copies into shared memory: the few instructions the
// attention and sort kernels are made of, for sm_80 and later.
//
// A product is C[16 x 8] += A[16 x 16] B[16 x 8] by one warp, in float32. Lane l holds of C the
// elements (l/4, 2(l%4) + {0, 1}) in c[0], c[1] and those eight rows below in c[2], c[3]. Tiles lie
// in shared memory in rows of kPitch elements; a pitch is the width plus 8, so that eight rows of
// 16 bytes never share a bank. float32 has its own products (mma_float.cuh), under the same names.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/mma_float.cuh"

namespace sinkhorn::cuda {

constexpr int kPad = 8;
// For tiles read along their rows.
template <class T>
constexpr int kRowPad = sizeof(T) == 4 ? 4 : kPad;

// Numbers in 16 bytes, the piece that copies and stores move.
template <class T>
constexpr int kPiece = 16 / static_cast<int>(sizeof(T));

// What a lane holds of A[16 x 16] or of B[16 x 16], as loaded; ready() gives what products take.
template <class T>
using Operand = std::conditional_t<std::is_same_v<T, float>, FloatOperand, uint32_t[4]>;
__device__ __forceinline__ const uint32_t (&ready(const uint32_t (&x)[4]))[4] { return x; }

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

// c += A B for columns 0 .. 7 of B, next += A B for the other eight.
template <class T>
__device__ __forceinline__ void mma_pair(float (&c)[4], float (&next)[4], const uint32_t (&a)[4],
                                         const uint32_t (&b)[4]) {
  mma<T>(c, a, b[0], b[1]);
  mma<T>(next, a, b[2], b[3]);
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
// The same for an A that was accumulators; float32 has an order of its own there.
template <int kPitch, class T>
__device__ __forceinline__ void load_b_gathered(uint32_t (&b)[4], const T* tile, int n, int k,
                                                int lane) {
  load_b_transposed<kPitch>(b, tile, n, k, lane);
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

// Two or four numbers side by side, on a multiple of as many.
template <class T>
__device__ __forceinline__ void store_pair(T* to, float low, float high) {
  if constexpr (sizeof(T) == 4) {
    *reinterpret_cast<float2*>(to) = make_float2(low, high);
  } else {
    *reinterpret_cast<uint32_t*>(to) = pack<T>(low, high);
  }
}
template <class T>
__device__ __forceinline__ void store_four(T* to, const float (&x)[4]) {
  if constexpr (sizeof(T) == 4) {
    *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
  } else {
    *reinterpret_cast<uint2*>(to) = make_uint2(pack<T>(x[0], x[1]), pack<T>(x[2], x[3]));
  }
}
template <class T>
__device__ __forceinline__ float2 load_pair(const T* from) {
  if constexpr (sizeof(T) == 4) {
    return *reinterpret_cast<const float2*>(from);
  } else {
    return unpack<T>(*reinterpret_cast<const uint32_t*>(from));
  }
}
// A piece and its numbers.
template <class T>
__device__ __forceinline__ void unpack_piece(float (&to)[kPiece<T>], const uint4& piece) {
  const uint32_t parts[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    if constexpr (sizeof(T) == 4) {
      to[e] = __uint_as_float(parts[e]);
    } else {
      const float2 pair = unpack<T>(parts[e]);
      to[2 * e] = pair.x;
      to[2 * e + 1] = pair.y;
    }
  }
}
template <class T>
__device__ __forceinline__ uint4 pack_piece(const float (&from)[kPiece<T>]) {
  uint32_t parts[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    if constexpr (sizeof(T) == 4) {
      parts[e] = __float_as_uint(from[e]);
    } else {
      parts[e] = pack<T>(from[2 * e], from[2 * e + 1]);
    }
  }
  return make_uint4(parts[0], parts[1], parts[2], parts[3]);
}
// total += the product of two pieces, number by number.
template <class T>
__device__ __forceinline__ void add_product(float& total, const uint4& left, const uint4& right) {
  const uint32_t a[4] = {left.x, left.y, left.z, left.w};
  const uint32_t b[4] = {right.x, right.y, right.z, right.w};
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    if constexpr (sizeof(T) == 4) {
      total += __uint_as_float(a[e]) * __uint_as_float(b[e]);
    } else {
      const float2 x = unpack<T>(a[e]), y = unpack<T>(b[e]);
      total += x.x * y.x + x.y * y.y;
    }
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
