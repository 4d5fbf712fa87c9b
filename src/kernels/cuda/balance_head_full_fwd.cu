// Balancing up to 128 blocks with full columns, with no column step, or not at all: forward. The
// forms are those of balance_head_full.cuh.
#include "kernels/cuda/balance_head_full.cuh"
#include "kernels/cuda/balance_launch.h"

namespace sinkhorn::cuda::balance {
namespace {

// The matrix in one layout: in registers, or where that would take too many, in the tile, which
// both layouts then share.
template <class Shape, class Place>
class Elements {
 public:
  static constexpr bool kKept = Shape::kSize <= 64;

  __device__ __forceinline__ Elements(const Place& place, float* tile)
      : place_(place), tile_(tile) {
    if constexpr (kKept) {
#pragma unroll
      for (int e = 0; e < Shape::kEach; ++e) x_[e] = tile[place.tile(e)];
    }
  }
  __device__ __forceinline__ float& operator[](int e) {
    if constexpr (kKept) {
      return x_[e];
    } else {
      return tile_[place_.tile(e)];
    }
  }

 private:
  const Place place_;
  float* const tile_;
  float x_[kKept ? Shape::kEach : 1];
};

// A row's or column's factor and the sum that it is 1 over, 0 of an empty one.
struct Factor {
  float value = 1.0f, sum = 0.0f;
  float step = 0.0f;  // what the last step divided by, 0 of an empty one

  // Whether it stays where it may.
  __device__ __forceinline__ bool set(float total) {
    sum = total;
    if (total == 0.0f) return true;
    step = total * value;
    value = fast_reciprocal(total);
    return total > kLeastSum && total < kMostSum;
  }
};

// The terms of a row or column for backward. Each of the lanes that share it keeps what every
// kLanes-th step divided by, so that they take logarithms and store them at the same time.
template <int kLanes>
struct KeptTerms {
  float* to;      // of step 1; null where there is no such row
  int64_t apart;  // from step to step
  int lane;
  float kept = 0.0f;

  __device__ __forceinline__ void add(int k, int steps, float step) {
    if ((k - 1) % kLanes == lane) kept = step;
    if (k % kLanes != 0 && k != steps) return;
    const int own = (k - 1) / kLanes * kLanes + lane;
    if (to != nullptr && own < k) to[own * apart] = kept == 0.0f ? 0.0f : log2f(kept);
  }
};

// All steps behind the first as products: the matrix is a_i K_ij c_j with factors a of rows and c
// of columns, and a step sets c = 1 / (K' a) or a = 1 / (K c). An element of K below the normal
// numbers counts as the smallest of them: while no factor leaves 2^-30 .. 2^30 that is nothing
// beside the sum of its row or column. False, and no R, where one does.
template <class Shape>
__device__ __forceinline__ bool balance_by_factors(const Args& a, int64_t head,
                                                   FullMemory<Shape>& m) {
  constexpr float kSmallest = 0x1p-126f;
  constexpr int kLook = 8;  // steps between looks at the factors
  const int n = static_cast<int>(a.p.blocks), steps = static_cast<int>(column_steps(a.p));
  float *const row_factors = m.sums, *const column_factors = m.factors;
  const RowPlace<Shape> at_row;
  const ColumnPlace<Shape> at_column;

  float t[Shape::kEach];
#pragma unroll
  for (int e = 0; e < Shape::kEach; ++e) t[e] = first_less(a, m.tile[at_row.tile(e)], 0.0f);
  const float first = row_log_sum<Shape>(t).log();
#pragma unroll
  for (int e = 0; e < Shape::kEach; ++e) {
    float& at = m.tile[at_row.tile(e)];
    at = at == kNothing ? 0.0f : fmaxf(fast_exp2(first_less(a, at, first)), kSmallest);
  }
  if (at_row.leads()) {
    row_factors[at_row.row] = 1.0f;
    column_factors[at_row.row] = 1.0f;
    if (at_row.row < n) full_terms(a.p, head, 0)[at_row.row] = first;
  }
  __syncthreads();
  Elements<Shape, RowPlace<Shape>> rows(at_row, m.tile);
  Elements<Shape, ColumnPlace<Shape>> columns(at_column, m.tile);
  const auto row_sum = [&] {
    float sum = 0.0f;
#pragma unroll
    for (int e = 0; e < Shape::kEach; ++e) sum += rows[e] * column_factors[at_row.column(e)];
    return lanes_sum<Shape::kParts>(sum);
  };

  Factor of_row, of_column;
  const auto terms = [&](int index, int i, int lane) {
    return KeptTerms<Shape::kParts>{i < n ? full_terms(a.p, head, index) + i : nullptr,
                                    2 * a.p.blocks, lane};
  };
  KeptTerms<Shape::kParts> column_terms = terms(1, at_column.column, at_column.part);
  KeptTerms<Shape::kParts> row_terms = terms(2, at_row.row, at_row.part);
  bool fine = true;
  for (int k = 1; k <= steps; ++k) {
    float sum = 0.0f;
#pragma unroll
    for (int e = 0; e < Shape::kEach; ++e) sum += columns[e] * row_factors[at_column.row(e)];
    fine &= of_column.set(lanes_sum<Shape::kParts>(sum));
    if (at_column.leads()) column_factors[at_column.column] = of_column.value;
    __syncthreads();
    column_terms.add(k, steps, of_column.step);
    fine &= of_row.set(row_sum());
    if (at_row.leads()) row_factors[at_row.row] = of_row.value;
    if (k % kLook != 0) {
      __syncthreads();
    } else if (__syncthreads_and(fine) == 0) {
      return false;
    }
    row_terms.add(k, steps, of_row.step);
  }
  // The last row step, as a softmax with a sum of its own.
  const float inverse = reciprocal(of_row.sum);
  float r[Shape::kEach];
#pragma unroll
  for (int e = 0; e < Shape::kEach; ++e) {
    r[e] = rows[e] * column_factors[at_row.column(e)] * inverse;
  }
  if (__syncthreads_and(fine) == 0) return false;
#pragma unroll
  for (int e = 0; e < Shape::kEach; ++e) m.tile[at_row.tile(e)] = r[e];
  return true;
}

// The same with logarithms, however large; and R without iterations. Each step takes its terms
// off the matrix itself. The first finds it as y and rounds an entry once, at its size after the
// step; those behind it only change it by little.
template <class Shape>
__device__ __forceinline__ void balance_by_logs(const Args& a, int64_t head, FullMemory<Shape>& m) {
  const int n = static_cast<int>(a.p.blocks), steps = static_cast<int>(column_steps(a.p));
  float *const u = m.sums, *const v = m.factors;  // terms of the last row and column step
  const RowPlace<Shape> at_row;
  const ColumnPlace<Shape> at_column;
  Elements<Shape, RowPlace<Shape>> rows(at_row, m.tile);
  Elements<Shape, ColumnPlace<Shape>> columns(at_column, m.tile);
  constexpr bool kApart = Elements<Shape, RowPlace<Shape>>::kKept;  // a layout misses the other's

  float t[Shape::kEach];
  LogSum sum;
  for (int k = 0; k <= steps && a.p.iterations > 0; ++k) {
    if (k > 0) {
#pragma unroll
      for (int e = 0; e < Shape::kEach; ++e) {
        t[e] = columns[e];
        if constexpr (kApart) {
          const float term = u[at_column.row(e)];
          t[e] = k == 1 ? first_less(a, t[e], term) : t[e] - term;
        }
      }
      const float term = row_log_sum<Shape>(t).log();
#pragma unroll
      for (int e = 0; e < Shape::kEach; ++e) columns[e] = t[e] - term;
      if (at_column.leads()) {
        v[at_column.column] = term;
        if (at_column.column < n) full_terms(a.p, head, 2 * k - 1)[at_column.column] = term;
      }
      __syncthreads();
    }
#pragma unroll
    for (int e = 0; e < Shape::kEach; ++e) {
      t[e] = k == 0 ? first_less(a, rows[e], 0.0f) : rows[e];
      if constexpr (kApart) t[e] -= k == 0 ? 0.0f : v[at_row.column(e)];
    }
    sum = row_log_sum<Shape>(t);
    const float term = sum.log();
#pragma unroll
    for (int e = 0; e < Shape::kEach; ++e) {
      rows[e] = k == 0 ? first_less(a, rows[e], term) : t[e] - term;
    }
    if (at_row.leads()) {
      u[at_row.row] = term;
      if (at_row.row < n) full_terms(a.p, head, 2 * k)[at_row.row] = term;
    }
    __syncthreads();
  }

  // The last row step, as a softmax with a sum of its own.
  const float base = sum.base(), total = sum.empty() ? 1.0f : sum.sum;
  float r[Shape::kEach];
#pragma unroll
  for (int e = 0; e < Shape::kEach; ++e) {
    r[e] = a.p.iterations == 0 ? expf(rows[e]) : exp2f(t[e] - base) / total;
  }
  __syncthreads();  // others have read their columns from the tile
#pragma unroll
  for (int e = 0; e < Shape::kEach; ++e) m.tile[at_row.tile(e)] = r[e];
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads)
    balance_head_full_fwd_kernel(const __grid_constant__ Args a) {
  auto& m = shared_memory<FullMemory<Shape>>();
  const int64_t head = blockIdx.x;
  load_tile<Shape>(unscaled(a), head, m.live, m.tile);
  // Without column steps rows know nothing of one another, not even which form the others need.
  const bool coupled = column_steps(a.p) > 0;
  if (!coupled || !balance_by_factors<Shape>(a, head, m)) {
    if (coupled) load_tile<Shape>(unscaled(a), head, m.live, m.tile);
    balance_by_logs<Shape>(a, head, m);
  }
  __syncthreads();
  store_tile<Shape>(a, head, m.tile);
}

}  // namespace

void head_full_fwd(const BalanceParams& p, Stream stream) {
  with_head_shape(p.blocks, [&](auto shape) {
    using Shape = decltype(shape);
    launch_heads<Shape>("balance_fwd", balance_head_full_fwd_kernel<Shape>, p,
                        sizeof(FullMemory<Shape>), stream, make_args(p));
  });
}

}  // namespace sinkhorn::cuda::balance
