// Balancing up to 128 blocks with full columns, with no column step (columns = none), or not at all
// (iterations 0): all iterations of a head in one CTA.
//
// In base 2 and with x [N, N], -inf where not allowed, the matrix is at all times x - U_i - V_j
// with the sums U and V of the terms so far:
//
//   u0_i = lse_j(x_ij),   vk_j = lse_i(x_ij - U_i - V_j),   uk_i = lse_j(x_ij - U_i - V_j)
//
// and R = exp2(x - U - V). Kept for backward: u0 v1 u1 ... vK uK, N numbers each. The last row step
// is a softmax with a sum of its own.
//
// Both ways there are two forms. Where no U - u0 or V leaves -30 .. 30, which is 21 temperatures,
// powers are taken once: K = exp2(x - u0), and a step multiplies by factors of rows and columns.
// Elsewhere, and forward without column steps, everything stays a logarithm. There U and V grow as
// large as x, where the entries that count are near 0, and must be rounded by their own size and
// not by that of what they are the difference of: forward takes each term off the matrix itself,
// backward keeps U and V in two numbers each and makes x of y = logits + noise without rounding it.
//
// Mapping. A thread holds kEach elements of a row and kEach elements of a column, kParts lanes
// share a row or a column and reduce it by shuffles; u and v pass through shared memory, a barrier
// a step. Above 64 blocks the matrix stays in the tile in shared memory instead of registers.
#pragma once

#include "kernels/cuda/balance_head.cuh"

namespace sinkhorn::cuda::balance {

// A sum of terms: what is rounded off the first number is kept in the second.
struct alignas(8) Potential {  // read at once
  float high = 0.0f, low = 0.0f;

  __device__ __forceinline__ void add(float term) {
    const float sum = high + term, kept = sum - high;
    low += (high - (sum - kept)) + (term - kept);
    high = sum;
  }
};

// x - term of y, rounded at its own size.
__device__ __forceinline__ float first_less(const Args& a, float y, float term) {
  return fmaf(y, a.scale, -term) + fmaxf(y, -1e20f) * a.scale_rest;
}

// For a tile of y; without iterations that is x as it is.
__device__ __forceinline__ Args unscaled(const Args& a) {
  Args plain = a;
  plain.scale = 1.0f;
  plain.scale_rest = 0.0f;
  return plain;
}

template <class Shape>
struct FullMemory {
  float tile[Shape::kSize * Shape::kStride];
  Potential u[Shape::kSize], v[Shape::kSize];
  float sums[Shape::kSize], factors[Shape::kSize];
  bool live[Shape::kSize];
};

// This thread's column, in the column layout: rows in pairs, so that the tile's banks differ.
template <class Shape>
struct ColumnPlace {
  __device__ __forceinline__ ColumnPlace()
      : column(threadIdx.x / Shape::kParts), part(threadIdx.x % Shape::kParts) {}
  __device__ __forceinline__ int row(int e) const {
    return (e / 2 * Shape::kParts + part) * 2 + e % 2;
  }
  __device__ __forceinline__ int tile(int e) const { return row(e) * Shape::kStride + column; }
  __device__ __forceinline__ bool leads() const { return part == 0; }

  const int column, part;
};

// Where u or v of a step lies: u0 v1 u1 v2 u2 ...
__device__ __forceinline__ float* full_terms(const BalanceParams& p, int64_t head, int64_t index) {
  const int64_t count = balance_terms(p.columns, p.iterations);
  return static_cast<float*>(p.terms) + (head * count + index) * p.blocks;
}

// Where factors stay, or logarithms take their place.
constexpr float kMostLog = 30.0f, kMostSum = 0x1p30f, kLeastSum = 0x1p-30f;

}  // namespace sinkhorn::cuda::balance
