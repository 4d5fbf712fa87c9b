// Balancing up to 128 blocks with full columns, with no column step (columns = none), or not at all
// (iterations 0): all iterations of a head in one CTA.
//
// In base 2 and with x [N, N], -inf where not allowed, the matrix is at all times x - u_i - v_j:
//
//   u0_i = lse_j(x_ij),   vk_j = lse_i(x_ij - u(k-1)_i),   uk_i = lse_j(x_ij - vk_j)
//
// and R is the softmax over j of x_ij - vK_j. Kept for backward: u0 v1 u1 ... vK uK, N numbers
// each.
//
// Mapping. A thread holds kEach elements of a row and kEach elements of a column, kParts lanes
// share a row or a column and reduce it by shuffles; u and v pass through shared memory, a barrier
// a step. Above 64 blocks x is read from the tile in shared memory instead of registers.
//
// Backward holds x and G, the gradient with respect to the matrix after the step at hand, in the
// row layout. With Q = exp2(x - u(k-1) - vk), whose columns sum to 1, and P = Q f_j, whose rows do,
// where f = exp2(vk - v(k-1)), v0 = 0 (f is a column sum of P, so f <= N), it begins with G = R (dR
// - sum_j R dR) and undoes for k = K .. 1
//   column step k:   G -= Q sum_i G      the sums by way of the tile, in the column layout
//   row step k-1:    G -= P sum_j G / sum_j P
// sum_j P is 1 but for the rounding of u; dividing by it makes 0 what is 0 on paper: the sum of a
// row, the gradient of an only source.
#include "kernels/cuda/balance_head.cuh"
#include "kernels/cuda/balance_launch.h"

namespace sinkhorn::cuda::balance {
namespace {

template <class Shape>
struct FullMemory {
  float tile[Shape::kSize * Shape::kStride];
  float u[3][Shape::kSize], v[3][Shape::kSize];  // of step k at k % 3; forward uses the first
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

// x of one layout: in registers, or where that would take too many, in the tile.
template <class Shape, class Place>
class Elements {
 public:
  __device__ __forceinline__ Elements(const Place& place, const float* tile)
      : place_(place), tile_(tile) {
    if constexpr (kKept) {
#pragma unroll
      for (int e = 0; e < Shape::kEach; ++e) x_[e] = tile[place.tile(e)];
    }
  }
  __device__ __forceinline__ float operator()(int e) const {
    if constexpr (kKept) {
      return x_[e];
    } else {
      return tile_[place_.tile(e)];
    }
  }

 private:
  static constexpr bool kKept = Shape::kSize <= 64;
  const Place place_;
  const float* tile_;
  float x_[kKept ? Shape::kEach : 1];
};

// Where u or v of a step lies: u0 v1 u1 v2 u2 ...
__device__ __forceinline__ float* full_terms(const BalanceParams& p, int64_t head, int64_t index) {
  const int64_t count = balance_terms(p.columns, p.iterations);
  return static_cast<float*>(p.terms) + (head * count + index) * p.blocks;
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads)
    balance_head_full_fwd_kernel(const __grid_constant__ Args a) {
  auto& m = shared_memory<FullMemory<Shape>>();
  const int64_t head = blockIdx.x;
  const int n = static_cast<int>(a.p.blocks), steps = static_cast<int>(column_steps(a.p));
  load_tile<Shape>(a, head, m.live, m.tile);
  const RowPlace<Shape> at_row;
  const ColumnPlace<Shape> at_column;
  const Elements<Shape, RowPlace<Shape>> row_x(at_row, m.tile);
  const Elements<Shape, ColumnPlace<Shape>> column_x(at_column, m.tile);
  float *u = m.u[0], *v = m.v[0];

  float t[Shape::kEach];
  LogSum sum;
  for (int k = 0; k <= steps && a.p.iterations > 0; ++k) {
    if (k > 0) {
#pragma unroll
      for (int e = 0; e < Shape::kEach; ++e) t[e] = column_x(e) - u[at_column.row(e)];
      const float term = row_log_sum<Shape>(t).log();
      if (at_column.leads()) {
        v[at_column.column] = term;
        if (at_column.column < n) full_terms(a.p, head, 2 * k - 1)[at_column.column] = term;
      }
      __syncthreads();
    }
#pragma unroll
    for (int e = 0; e < Shape::kEach; ++e) {
      t[e] = k > 0 ? row_x(e) - v[at_row.column(e)] : row_x(e);
    }
    sum = row_log_sum<Shape>(t);
    const float term = sum.log();
    if (at_row.leads()) {
      u[at_row.row] = term;
      if (at_row.row < n) full_terms(a.p, head, 2 * k)[at_row.row] = term;
    }
    __syncthreads();
  }

  // The last row step, as a softmax with a sum of its own.
  const float base = sum.base(), total = sum.empty() ? 1.0f : sum.sum;
  __syncthreads();  // others have read their columns from the tile
#pragma unroll
  for (int e = 0; e < Shape::kEach; ++e) {
    m.tile[at_row.tile(e)] = a.p.iterations == 0 ? expf(row_x(e)) : exp2f(t[e] - base) / total;
  }
  __syncthreads();
  store_tile<Shape>(a, head, m.tile);
}

template <class Shape>
class FullBackward {
 public:
  __device__ __forceinline__ FullBackward(const Args& a, int64_t head, FullMemory<Shape>& memory)
      : a_(a),
        head_(head),
        n_(static_cast<int>(a.p.blocks)),
        steps_(static_cast<int>(column_steps(a.p))),
        m_(memory) {
#pragma unroll
    for (int e = 0; e < Shape::kEach; ++e) x_[e] = m_.tile[at_.tile(e)];
  }

  __device__ __forceinline__ void run() {
    load_grad();
    if (a_.p.iterations == 0) {
#pragma unroll
      for (int e = 0; e < Shape::kEach; ++e) g_[e] *= expf(x_[e]);
    } else {
      fetch(steps_);
      put(steps_);
      fetch(steps_ - 1);
      put(steps_ - 1);
      fetch(steps_ - 2);
      __syncthreads();
      undo_softmax();
      for (int k = steps_; k >= 1; --k) undo_iteration(k);
    }
    store();
  }

 private:
  // dR where x is allowed, that is not -inf.
  __device__ __forceinline__ void load_grad() {
    const Matrix<float> grad(a_.p, a_.p.grad, head_);
#pragma unroll
    for (int e = 0; e < Shape::kEach; ++e) {
      g_[e] = x_[e] == kNothing ? 0.0f : grad.at(at_.row, at_.column(e));
    }
  }

  // u and v of step k pass from global to shared memory by a register, a step before their use.
  __device__ __forceinline__ void fetch(int k) {
    const int i = threadIdx.x;
    next_u_ = next_v_ = 0.0f;
    if (k < 0 || i >= n_) return;
    next_u_ = full_terms(a_.p, head_, 2 * k)[i];
    if (k > 0) next_v_ = full_terms(a_.p, head_, 2 * k - 1)[i];
  }
  __device__ __forceinline__ void put(int k) {
    const int i = threadIdx.x;
    if (k < 0 || i >= Shape::kSize) return;
    m_.u[k % 3][i] = next_u_;
    m_.v[k % 3][i] = next_v_;
  }

  __device__ __forceinline__ void undo_softmax() {
    const float *u = m_.u[steps_ % 3], *v = m_.v[steps_ % 3];
    float share[Shape::kEach], whole = 0.0f, dot = 0.0f;
#pragma unroll
    for (int e = 0; e < Shape::kEach; ++e) {
      share[e] = exp2f(x_[e] - v[at_.column(e)] - u[at_.row]);
      whole += share[e];
      dot += share[e] * g_[e];
    }
    const float inverse = reciprocal(lanes_sum<Shape::kParts>(whole));
    dot = lanes_sum<Shape::kParts>(dot) * inverse;
#pragma unroll
    for (int e = 0; e < Shape::kEach; ++e) g_[e] = share[e] * inverse * (g_[e] - dot);
  }

  // Column step k, then row step k - 1.
  __device__ __forceinline__ void undo_iteration(int k) {
    sum_columns(k);
    const float *u = m_.u[(k - 1) % 3], *v = m_.v[k % 3];
    float sum = 0.0f, whole = 0.0f;
    float share[kKept ? Shape::kEach : 1];
#pragma unroll
    for (int e = 0; e < Shape::kEach; ++e) {
      const int c = at_.column(e);
      const float q = exp2f(x_[e] - v[c] - u[at_.row]), p = q * m_.factors[c];
      if constexpr (kKept) share[e] = p;
      g_[e] -= q * m_.sums[c];
      sum += g_[e];
      whole += p;
    }
    sum = lanes_sum<Shape::kParts>(sum) * reciprocal(lanes_sum<Shape::kParts>(whole));
#pragma unroll
    for (int e = 0; e < Shape::kEach; ++e) {
      const int c = at_.column(e);
      if constexpr (kKept) {
        g_[e] -= share[e] * sum;
      } else {
        g_[e] -= exp2f(x_[e] - v[c] - u[at_.row]) * m_.factors[c] * sum;
      }
    }
    put(k - 2);  // in place of step k + 1
    fetch(k - 3);
  }

  // Sums of the columns of G, and the factors f of P^(k-1).
  __device__ __forceinline__ void sum_columns(int k) {
    const ColumnPlace<Shape> at;
#pragma unroll
    for (int e = 0; e < Shape::kEach; ++e) m_.tile[at_.tile(e)] = g_[e];
    __syncthreads();
    float sum = 0.0f;
#pragma unroll
    for (int e = 0; e < Shape::kEach; ++e) sum += m_.tile[at.tile(e)];
    sum = lanes_sum<Shape::kParts>(sum);
    if (at.leads()) {
      m_.sums[at.column] = sum;
      m_.factors[at.column] = exp2f(m_.v[k % 3][at.column] - m_.v[(k - 1) % 3][at.column]);
    }
    __syncthreads();
  }

  __device__ __forceinline__ void store() {
#pragma unroll
    for (int e = 0; e < Shape::kEach; ++e) m_.tile[at_.tile(e)] = g_[e];
    __syncthreads();
    const int c = threadIdx.x % Shape::kSize, first = threadIdx.x / Shape::kSize;
#pragma unroll
    for (int e = 0; e < Shape::kEach; ++e) {
      const int r = first + e * Shape::kParts;
      if (r >= n_ || c >= n_) continue;
      store_as(a_.p.result, a_.p.logits.type, (head_ * n_ + r) * n_ + c,
               m_.tile[r * Shape::kStride + c] / a_.temperature);
    }
  }

  static constexpr bool kKept = Shape::kSize <= 64;  // P in registers, or computed again

  const Args& a_;
  const int64_t head_;
  const int n_, steps_;
  FullMemory<Shape>& m_;
  const RowPlace<Shape> at_;
  float x_[Shape::kEach], g_[Shape::kEach];
  float next_u_ = 0.0f, next_v_ = 0.0f;
};

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads)
    balance_head_full_bwd_kernel(const __grid_constant__ Args a) {
  auto& m = shared_memory<FullMemory<Shape>>();
  load_tile<Shape>(a, blockIdx.x, m.live, m.tile);
  FullBackward<Shape>(a, blockIdx.x, m).run();
}

}  // namespace

void head_full_fwd(const BalanceParams& p, Stream stream) {
  with_head_shape(p.blocks, [&](auto shape) {
    using Shape = decltype(shape);
    launch_heads<Shape>("balance_fwd", balance_head_full_fwd_kernel<Shape>, p,
                        sizeof(FullMemory<Shape>), stream, make_args(p));
  });
}

void head_full_bwd(const BalanceParams& p, Stream stream) {
  with_head_shape(p.blocks, [&](auto shape) {
    using Shape = decltype(shape);
    launch_heads<Shape>("balance_bwd", balance_head_full_bwd_kernel<Shape>, p,
                        sizeof(FullMemory<Shape>), stream, make_args(p));
  });
}

}  // namespace sinkhorn::cuda::balance
