// A cache-blocked matrix product for the sort and its gradients.
//
//   C[rows, cols] = sum over k in range(row) of A[row, k] B[k, cols]
//
// B is packed into panels two vectors wide, kDepth deep, and stays in the second-level cache while
// panels of A, kRowsPerTile high, run over it. `Pack` objects read the operands, so that types,
// strides, masks and transposes are theirs. A row's range may be cut (causal sorting is
// triangular): a panel runs over the union of its rows' ranges with zeros in A where a row's own
// range ends. If B holds NaN or inf those zeros would not be harmless, and panels become one row
// high.
#pragma once

#include "kernels/cpu/gemm.h"
#include "kernels/cpu/tiles.h"

namespace sinkhorn::cpu::SINKHORN_ISA {

constexpr int64_t kDepth = 256;

// A good number of columns for one call: panels of half a megabyte of float32.
constexpr int64_t good_columns(int64_t depth) {
  return 131072 / (depth < kDepth ? (depth < 32 ? 32 : depth) : kDepth);
}

template <class T>
constexpr int64_t kPanel = kVectorsPerTile * kLanes<T>;

// Elements of scratch a call with that many columns needs.
template <class T>
constexpr int64_t product_scratch(int64_t cols) {
  return kDepth * round_up(cols, kPanel<T>) + kDepth * kRowsPerTile;
}

struct Range {
  int64_t begin, end;
};

template <class T>
struct BlockedProduct {
  int64_t rows, cols, depth;
  T* c;
  int64_t ldc;
  bool accumulate;
};

// range(first, last) is the union of the ranges of rows first .. last.
// pack_a(row, count, k, depth, to) writes to[d * kRowsPerTile + r].
// pack_b(k, depth, to) writes panels to[(panel * depth + d) * kPanel + lane], and returns whether
// all of it is finite.
template <class T, class RangeOf, class PackA, class PackB>
void blocked_product(const BlockedProduct<T>& p, const RangeOf& range, const PackA& pack_a,
                     const PackB& pack_b, T* scratch) {
  T* b = scratch;
  T* a = scratch + kDepth * round_up(p.cols, kPanel<T>);
  for (int64_t k0 = 0; k0 < p.depth; k0 += kDepth) {
    const int64_t deep = min_of(kDepth, p.depth - k0);
    const bool finite = pack_b(k0, deep, b);
    const int64_t height = finite ? kRowsPerTile : 1;
    for (int64_t row = 0; row < p.rows; row += height) {
      const int64_t count = min_of(height, p.rows - row);
      const Range r = range(row, row + count - 1);
      T* c = p.c + row * p.ldc;
      if (r.begin >= r.end) {
        for (int64_t m = 0; k0 == 0 && !p.accumulate && m < count; ++m) {
          fill(c + m * p.ldc, p.cols, T(0));
        }
        continue;
      }
      const int64_t from = max_of(k0, r.begin), to = min_of(k0 + deep, r.end);
      if (from >= to) continue;
      pack_a(row, count, from, to - from, a);
      const bool accumulate = p.accumulate || from > r.begin;
      for (int64_t col = 0; col < p.cols; col += kPanel<T>) {
        const T* panel = b + (col * deep) + (from - k0) * kPanel<T>;
        gemm<T>(count, min_of(kPanel<T>, p.cols - col), to - from,
                {a, 1, kRowsPerTile, panel, kPanel<T>, c + col, p.ldc, accumulate});
      }
    }
  }
}

// Spreads one row of `cols` numbers over the panels at depth d.
template <class T>
SINKHORN_INLINE void put_in_panels(const T* row, int64_t cols, int64_t d, int64_t deep, T* panels,
                                   FiniteWatch<T>& watch) {
  int64_t col = 0;
  for (; col + kPanel<T> <= cols; col += kPanel<T>) {
    T* to = panels + col * deep + d * kPanel<T>;
#pragma GCC unroll 4
    for (int v = 0; v < kVectorsPerTile; ++v) {
      const Vec<T> x = load(row + col + v * kLanes<T>);
      watch.see(x);
      store(to + v * kLanes<T>, x);
    }
  }
  if (col < cols) {
    T* to = panels + col * deep + d * kPanel<T>;
    fill(to, kPanel<T>, T(0));
    for (int64_t c = col; c < cols; ++c) {
      watch.see(row[c]);
      to[c - col] = row[c];
    }
  }
}

}  // namespace sinkhorn::cpu::SINKHORN_ISA
