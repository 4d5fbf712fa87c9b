// The products of mma.cuh for float32, in tensor cores that multiply TF32 numbers of 11 bits.
//
// A number is split, x = high + low, both rounded to TF32; A B is low high' + high low' + high
// high', which leaves out low low', 2^-24 of a product at most. The tensor cores cut a sum off
// where they should round it, so a step of 16 is added up by itself, small products first, and then
// to the result in float32: errors stay those of float32, however long the sum.
//
// A step of 16 is two products C[16 x 8] += A[16 x 8] B[8 x 8]. Of A lane l = 4 g + t holds columns
// t and t + 4 of rows g and g + 8, of B rows t and t + 4 of column g. Which number of the sum
// stands in which of the eight places does not matter as long as both sides agree. They stand in
// their order, except where C becomes the next A: of C a lane has columns 2 t and 2 t + 1, which
// take places t and t + 4, and load_b_gathered puts B's rows there too.
//
// No loads of a warp share a bank if rows lie 4 more than a multiple of 32 numbers apart, read
// along the sum or gathered, or 8 more, read across it.
#pragma once

#include <cstdint>

namespace sinkhorn::cuda {

// What a lane holds of A[16 x 16]: of each step {(g, t), (g + 8, t), (g, t + 4), (g + 8, t + 4)};
// or of B[16 x 16]: of columns g and g + 8, of each step {t, t + 4}.
struct FloatOperand {
  float x[8];
};
struct SplitOperand {
  uint32_t high[8], low[8];
};

__device__ __forceinline__ uint32_t round_to_tf32(float x) {
  uint32_t y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ SplitOperand ready(const FloatOperand& from) {
  SplitOperand to;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    to.high[i] = round_to_tf32(from.x[i]);
    to.low[i] = round_to_tf32(from.x[i] - __uint_as_float(to.high[i]));
  }
  return to;
}

__device__ __forceinline__ void mma_tf32(float (&c)[4], const uint32_t* a, const uint32_t* b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// c += A B for columns 0 .. 7 of B, next += A B for the other eight.
template <class T>
__device__ __forceinline__ void mma_pair(float (&c)[4], float (&next)[4], const SplitOperand& a,
                                         const SplitOperand& b) {
  float sum[2][4] = {};
#pragma unroll
  for (int step = 0; step < 2; ++step) {
#pragma unroll
    for (int n = 0; n < 2; ++n) mma_tf32(sum[n], a.low + 4 * step, b.high + 4 * n + 2 * step);
#pragma unroll
    for (int n = 0; n < 2; ++n) mma_tf32(sum[n], a.high + 4 * step, b.low + 4 * n + 2 * step);
  }
#pragma unroll
  for (int step = 0; step < 2; ++step) {
#pragma unroll
    for (int n = 0; n < 2; ++n) mma_tf32(sum[n], a.high + 4 * step, b.high + 4 * n + 2 * step);
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    c[e] += sum[0][e];
    next[e] += sum[1][e];
  }
}

// A[m .. m+15, k .. k+15]; as for half types, from rows [m][k] or [k][m].
template <int kPitch>
__device__ __forceinline__ void load_a(FloatOperand& a, const float* tile, int m, int k, int lane) {
  const float* const from = tile + (m + lane / 4) * kPitch + k + lane % 4;
#pragma unroll
  for (int i = 0; i < 8; ++i) a.x[i] = from[i % 2 * 8 * kPitch + i / 2 * 4];
}
template <int kPitch>
__device__ __forceinline__ void load_a_transposed(FloatOperand& a, const float* tile, int m, int k,
                                                  int lane) {
  const float* const from = tile + (k + lane % 4) * kPitch + m + lane / 4;
#pragma unroll
  for (int i = 0; i < 8; ++i) a.x[i] = from[i / 2 * 4 * kPitch + i % 2 * 8];
}
// B[k .. k+15, n .. n+15], from rows [n][k] or [k][n].
template <int kPitch>
__device__ __forceinline__ void load_b(FloatOperand& b, const float* tile, int n, int k, int lane) {
  const float* const from = tile + (n + lane / 4) * kPitch + k + lane % 4;
#pragma unroll
  for (int i = 0; i < 8; ++i) b.x[i] = from[i / 4 * 8 * kPitch + i % 4 * 4];
}
template <int kPitch>
__device__ __forceinline__ void load_b_transposed(FloatOperand& b, const float* tile, int n, int k,
                                                  int lane) {
  const float* const from = tile + (k + lane % 4) * kPitch + n + lane / 4;
#pragma unroll
  for (int i = 0; i < 8; ++i) b.x[i] = from[i % 4 * 4 * kPitch + i / 4 * 8];
}
// From rows [k][n], in the order of accumulators_to_a: a lane's rows are 2 t, 2 t + 1 of each
// eight.
template <int kPitch>
__device__ __forceinline__ void load_b_gathered(FloatOperand& b, const float* tile, int n, int k,
                                                int lane) {
  const float* const from = tile + (k + lane % 4 * 2) * kPitch + n + lane / 4;
#pragma unroll
  for (int i = 0; i < 8; ++i) b.x[i] = from[(i % 4 / 2 * 8 + i % 2) * kPitch + i / 4 * 8];
}
template <class T>
__device__ __forceinline__ void accumulators_to_a(FloatOperand& a, const float (&left)[4],
                                                  const float (&right)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    a.x[i] = left[i % 2 * 2 + i / 2];
    a.x[4 + i] = right[i % 2 * 2 + i / 2];
  }
}

}  // namespace sinkhorn::cuda
