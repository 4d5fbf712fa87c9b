// The small matrix product every kernel is made of.
//
//   C[m, n] (+)= sum_k A(m, k) B[k, n],   A(m, k) = a[m * a_row + k * a_col]
//
// A is read element by element through two strides, so a transposed A costs nothing. Rows of B are
// contiguous and readable up to a whole number of vectors. C is written for exactly m x n. Each
// element is summed in the order of k whatever the shape around it: a row's bits never depend on
// which other rows share the call, which is what makes causality hold to the bit.
#pragma once

#include "kernels/cpu/simd.h"

namespace sinkhorn::cpu::SINKHORN_ISA {

#if defined(__AVX512F__)
constexpr int kRowsPerTile = 8;  // 8 x 2 accumulators of 32 registers
#elif defined(__AVX2__)
constexpr int kRowsPerTile = 6;  // 6 x 2 accumulators of 16 registers
#else
constexpr int kRowsPerTile = 4;
#endif
constexpr int kVectorsPerTile = 2;

// Sums longer than this are taken in parts where their rounding shows in the gradient of the sort.
// Without fused multiply-adds each product rounds too, and parts are shorter.
#if defined(__FMA__)
constexpr int64_t kSumDepth = 64;
#else
constexpr int64_t kSumDepth = 32;
#endif

template <class T>
struct Product {
  const T* a;
  int64_t a_row, a_col;
  const T* b;
  int64_t ldb;
  T* c;
  int64_t ldc;
  bool accumulate;
};

// One register tile: kRows x (kCols vectors), of which `width` columns are written.
template <class T, int kRows, int kCols>
SINKHORN_INLINE void gemm_tile(const Product<T>& g, int64_t row, int64_t col, int64_t width,
                               int64_t depth) {
  constexpr int kLane = kLanes<T>;
  Vec<T> acc[kRows][kCols] = {};
  const T* a = g.a + row * g.a_row;
  const T* b = g.b + col;
  for (int64_t k = 0; k < depth; ++k) {
    Vec<T> bk[kCols];
#pragma GCC unroll 4
    for (int v = 0; v < kCols; ++v) bk[v] = load(b + v * kLane);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Vec<T> ar = splat(a[r * g.a_row]);
#pragma GCC unroll 4
      for (int v = 0; v < kCols; ++v) acc[r][v] += ar * bk[v];
    }
    a += g.a_col;
    b += g.ldb;
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    T* c = g.c + (row + r) * g.ldc + col;
#pragma GCC unroll 4
    for (int v = 0; v < kCols; ++v) {
      const int64_t left = width - v * kLane;
      if (left >= kLane) {
        store(c + v * kLane, g.accumulate ? load(c + v * kLane) + acc[r][v] : acc[r][v]);
      } else {
        Vec<T> sum = acc[r][v];
        if (g.accumulate) sum += load_some(c + v * kLane, static_cast<int>(left), T(0));
        store_some(c + v * kLane, sum, static_cast<int>(left));
      }
    }
  }
}

template <class T, int kRows>
SINKHORN_INLINE void gemm_rows(const Product<T>& g, int64_t row, int64_t n, int64_t depth) {
  constexpr int64_t kWide = kVectorsPerTile * kLanes<T>;
  int64_t col = 0;
  for (; n - col > kLanes<T>; col += kWide) {
    gemm_tile<T, kRows, kVectorsPerTile>(g, row, col, min_of(n - col, kWide), depth);
  }
  if (col < n) gemm_tile<T, kRows, 1>(g, row, col, n - col, depth);
}

template <class T>
__attribute__((noinline)) static void gemm(int64_t m, int64_t n, int64_t depth,
                                           const Product<T>& g) {
  int64_t row = 0;
  for (; m - row >= kRowsPerTile; row += kRowsPerTile) gemm_rows<T, kRowsPerTile>(g, row, n, depth);
  if (m - row >= 4) {
    gemm_rows<T, 4>(g, row, n, depth);
    row += 4;
  }
  if (m - row >= 2) {
    gemm_rows<T, 2>(g, row, n, depth);
    row += 2;
  }
  if (m - row == 1) gemm_rows<T, 1>(g, row, n, depth);
}

}  // namespace sinkhorn::cpu::SINKHORN_ISA
