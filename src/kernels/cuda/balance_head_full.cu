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
// Elsewhere, and without column steps, everything stays a logarithm. There U and V
// grow as large as x, where the entries that count are near 0, and must be rounded by their own
// size and not by that of what they are the difference of: forward takes each term off the matrix
// itself, backward keeps U and V in two numbers each and makes x of y = logits + noise without
// rounding it.
//
// Mapping. A thread holds kEach elements of a row and kEach elements of a column, kParts lanes
// share a row or a column and reduce it by shuffles; u and v pass through shared memory, a barrier
// a step. Above 64 blocks the matrix stays in the tile in shared memory instead of registers.
//
// Backward holds y and G, the gradient with respect to the matrix after the step at hand, in the
// row layout. With Q = exp2(x - U(k-1) - Vk), whose columns sum to 1, and P = Q f_j, whose rows do,
// where f = exp2(vk) (f is a column sum of P, so f <= N), it begins with G = R (dR - sum_j R dR)
// and undoes for k = K .. 1
//   column step k:   G -= Q sum_i G      the sums by way of the tile, in the column layout
//   row step k-1:    G -= P sum_j G / sum_j P
// sum_j P is 1 but for rounding; dividing by it makes 0 what is 0 on paper: the sum of a row, the
// gradient of an only source.
#include "kernels/cuda/balance_head.cuh"
#include "kernels/cuda/balance_launch.h"

namespace sinkhorn::cuda::balance {
namespace {

// A sum of terms: what is rounded off the first number is kept in the second.
struct alignas(8) Potential {  // read at once
  float high = 0.0f, low = 0.0f;

  __device__ __forceinline__ void add(float term) {
    const float sum = high + term, kept = sum - high;
    low += (high - (sum - kept)) + (term - kept);
    high = sum;
  }
};

// x - U - V of y: the sums are added first and exactly, and their difference from x is what is
// rounded. -inf stays -inf.
__device__ __forceinline__ float entry(const Args& a, float y, const Potential& u,
                                       const Potential& v) {
  const float sum = u.high + v.high, kept = sum - u.high;
  const float rest = (u.high - (sum - kept)) + (v.high - kept);
  const float finite = fmaxf(y, -1e20f);  // -inf times a rest of 0 would be NaN
  return fmaf(y, a.scale, -sum) + fmaf(finite, a.scale_rest, -(rest + (u.low + v.low)));
}
// x - term of y, rounded at its own size.
__device__ __forceinline__ float first_less(const Args& a, float y, float term) {
  return fmaf(y, a.scale, -term) + fmaxf(y, -1e20f) * a.scale_rest;
}
// An entry's power of 2 where a row or column is normalised: at most 1, but for the rounding of
// huge ones.
__device__ __forceinline__ float share_of(float entry) { return exp2f(fminf(entry, 0.0f)); }

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

// Where u or v of a step lies: u0 v1 u1 v2 u2 ...
__device__ __forceinline__ float* full_terms(const BalanceParams& p, int64_t head, int64_t index) {
  const int64_t count = balance_terms(p.columns, p.iterations);
  return static_cast<float*>(p.terms) + (head * count + index) * p.blocks;
}

// 1 / x of a normal x, to the last bit or two.
__device__ __forceinline__ float fast_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Where factors stay, or logarithms take their place.
constexpr float kMostLog = 30.0f, kMostSum = 0x1p30f, kLeastSum = 0x1p-30f;

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
    for (int e = 0; e < Shape::kEach; ++e) y_[e] = m_.tile[at_.tile(e)];
  }

  __device__ __forceinline__ void run() {
    load_grad();
    if (a_.p.iterations == 0) {
#pragma unroll
      for (int e = 0; e < Shape::kEach; ++e) g_[e] *= expf(y_[e]);
    } else if (add_terms()) {
      undo<true>();
    } else {
      undo<false>();
    }
    store();
  }

 private:
  // dR where y is allowed, that is not -inf.
  __device__ __forceinline__ void load_grad() {
    const Matrix<float> grad(a_.p, a_.p.grad, head_);
#pragma unroll
    for (int e = 0; e < Shape::kEach; ++e) {
      g_[e] = y_[e] == kNothing ? 0.0f : grad.at(at_.row, at_.column(e));
    }
  }

  // Thread i keeps the potentials of row and column i, without u0. Here those after the last step;
  // each step backward takes its terms off again. Whether all stay where factors do.
  __device__ __forceinline__ bool add_terms() {
    constexpr int kAhead = 6;  // steps whose loads are in flight
    const int i = threadIdx.x;
    bool fine = true;
    fetch(steps_);
    for (int first = 0; first <= steps_; first += kAhead) {
      float u[kAhead], v[kAhead];
#pragma unroll
      for (int q = 0; q < kAhead; ++q) {
        const int k = first + q;
        const bool there = i < n_ && k <= steps_;
        u[q] = there ? full_terms(a_.p, head_, 2 * k)[i] : 0.0f;
        v[q] = there && k > 0 ? full_terms(a_.p, head_, 2 * k - 1)[i] : 0.0f;
      }
      if (first == 0) {
        first_ = u[0];
        u[0] = 0.0f;
      }
#pragma unroll
      for (int q = 0; q < kAhead; ++q) {
        u_.add(u[q]);
        v_.add(v[q]);
        fine &= fabsf(u_.high) < kMostLog && fabsf(v_.high) < kMostLog;
      }
    }
    if (i < Shape::kSize) m_.sums[i] = first_;
    return __syncthreads_and(fine) != 0;
  }
  // y becomes K, or u0 one of the potentials; then every step.
  template <bool kByFactors>
  __device__ __forceinline__ void undo() {
    if constexpr (kByFactors) {
      const float first = m_.sums[at_.row];
#pragma unroll
      for (int e = 0; e < Shape::kEach; ++e) {
        y_[e] = y_[e] == kNothing ? 0.0f : fast_exp2(first_less(a_, y_[e], first));
      }
    } else {
      u_.add(first_);
    }
    put<kByFactors>();
    __syncthreads();
    undo_softmax<kByFactors>();
    for (int k = steps_; k >= 1; --k) undo_iteration<kByFactors>(k);
  }
  // The terms of step k, an iteration before their use.
  __device__ __forceinline__ void fetch(int k) {
    const int i = threadIdx.x;
    term_u_ = term_v_ = 0.0f;
    if (i >= n_) return;
    term_u_ = full_terms(a_.p, head_, 2 * k)[i];
    if (k > 0) term_v_ = full_terms(a_.p, head_, 2 * k - 1)[i];
  }
  // The potentials, or in their place the factors.
  template <bool kByFactors>
  __device__ __forceinline__ void put() {
    if (threadIdx.x >= Shape::kSize) return;
    if constexpr (kByFactors) {
      m_.u[threadIdx.x].high = exp2f(-(u_.high + u_.low));
      m_.v[threadIdx.x].high = exp2f(-(v_.high + v_.low));
    } else {
      m_.u[threadIdx.x] = u_;
      m_.v[threadIdx.x] = v_;
    }
  }
  // Uk and Vk become U(k-1) and Vk where others read them, and V(k-1) here.
  template <bool kByFactors>
  __device__ __forceinline__ void step_back(int k) {
    u_.add(-term_u_);
    put<kByFactors>();
    // At most N, but for the rounding of huge terms.
    if (threadIdx.x < Shape::kSize) m_.factors[threadIdx.x] = exp2f(fminf(term_v_, 8.0f));
    v_.add(-term_v_);
    fetch(k - 1);
  }

  template <bool kByFactors>
  __device__ __forceinline__ float share(int e, const Potential& u) const {
    const Potential& v = m_.v[at_.column(e)];
    if constexpr (kByFactors) {
      return fminf(y_[e] * u.high * v.high, 1.0f);
    } else {
      return share_of(entry(a_, y_[e], u, v));
    }
  }

  template <bool kByFactors>
  __device__ __forceinline__ void undo_softmax() {
    const Potential u = m_.u[at_.row];
    float shares[kKept ? Shape::kEach : 1], whole = 0.0f, dot = 0.0f;
#pragma unroll
    for (int e = 0; e < Shape::kEach; ++e) {
      const float own = share<kByFactors>(e, u);
      if constexpr (kKept) shares[e] = own;
      whole += own;
      dot += own * g_[e];
    }
    const float inverse = reciprocal(lanes_sum<Shape::kParts>(whole));
    dot = lanes_sum<Shape::kParts>(dot) * inverse;
#pragma unroll
    for (int e = 0; e < Shape::kEach; ++e) {
      if constexpr (kKept) {
        g_[e] = shares[e] * inverse * (g_[e] - dot);
      } else {
        g_[e] = share<kByFactors>(e, u) * inverse * (g_[e] - dot);
      }
    }
  }

  // Column step k, then row step k - 1.
  template <bool kByFactors>
  __device__ __forceinline__ void undo_iteration(int k) {
    sum_columns<kByFactors>(k);
    const Potential u = m_.u[at_.row];
    float sum = 0.0f, whole = 0.0f;
    float shares[kKept ? Shape::kEach : 1];
#pragma unroll
    for (int e = 0; e < Shape::kEach; ++e) {
      const int c = at_.column(e);
      const float q = share<kByFactors>(e, u), p = q * m_.factors[c];
      if constexpr (kKept) shares[e] = p;
      g_[e] -= q * m_.sums[c];
      sum += g_[e];
      whole += p;
    }
    sum = lanes_sum<Shape::kParts>(sum) * reciprocal(lanes_sum<Shape::kParts>(whole));
#pragma unroll
    for (int e = 0; e < Shape::kEach; ++e) {
      const int c = at_.column(e);
      if constexpr (kKept) {
        g_[e] -= shares[e] * sum;
      } else {
        g_[e] -= share<kByFactors>(e, u) * m_.factors[c] * sum;
      }
    }
  }

  // Sums of the columns of G, and the potentials and factors of Q^k and P^(k-1).
  template <bool kByFactors>
  __device__ __forceinline__ void sum_columns(int k) {
    const ColumnPlace<Shape> at;
#pragma unroll
    for (int e = 0; e < Shape::kEach; ++e) m_.tile[at_.tile(e)] = g_[e];
    __syncthreads();  // and the potentials of the step before have been read
    step_back<kByFactors>(k);
    float sum = 0.0f;
#pragma unroll
    for (int e = 0; e < Shape::kEach; ++e) sum += m_.tile[at.tile(e)];
    sum = lanes_sum<Shape::kParts>(sum);
    if (at.leads()) m_.sums[at.column] = sum;
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
  float y_[Shape::kEach], g_[Shape::kEach];
  Potential u_, v_;
  float first_ = 0.0f;  // u0
  float term_u_ = 0.0f, term_v_ = 0.0f;
};

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads)
    balance_head_full_bwd_kernel(const __grid_constant__ Args a) {
  auto& m = shared_memory<FullMemory<Shape>>();
  load_tile<Shape>(unscaled(a), blockIdx.x, m.live, m.tile);
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
