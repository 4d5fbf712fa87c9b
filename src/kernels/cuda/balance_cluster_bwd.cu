// Balancing 129 to 512 blocks with full columns and few iterations on Hopper: backward
// (balance_cluster.cuh).
//
// The equations are those of balance_strip_full_bwd.cu, with E = exp2(x - u0 - v1) once and
// A^k_i = exp2(u0 - u(k-1)), C^k_j = exp2(v1 - vk), v0 = 0: then
//
//   Q^k = E A^k_i C^k_j,   P^(k-1) = E A^k_i C^(k-1)_j,   R = E C^K_j r_i, r_i = 1 / sum_j E C^K
//
//   start     d_i = sum_j R dR,   v'K = - sum_i E r_i (dR - d_i) / sum_i E A^K_i
//   step k    w^k_i = A^k_i u'(k-1)_i = - A^k_i (sum_j E C^k v'k) / (sum_j E C^(k-1));
//             v'(k-1) = - sum_i E w^k_i / sum_i E A^(k-1)_i
//   last      dx = E (r_i C^K_j (dR - d_i) + sum_k A^k_i (C^k v'k)_j + w^k_i C^(k-1)_j)
#include "kernels/cuda/balance_cluster.cuh"
#include "kernels/cuda/mma.cuh"

namespace sinkhorn::cuda::balance {
namespace {

template <class Shape>
struct BackwardMemory {
  static constexpr int kSteps = kMostClusterSteps;
  using Exchange = typename ColumnExchange<Shape>::Memory;
  Exchange exchange;
  Four32 grad[Shape::kOwn * Shape::kGroups][Shape::kThreads];  // dR: a thread's for itself alone
  alignas(16) float columns[kSteps + 1][Shape::kColumns];      // C^0 .. C^K
  alignas(16) float grads[kSteps + 1][Shape::kColumns];        // C^k v'k; v1 at 0
  alignas(16) float rows[kSteps + 1][Shape::kRows];            // A^1 .. A^K; u0 at 0
  alignas(16) float row_grads[kSteps + 1][Shape::kRows];       // w^1 .. w^K
};

// What forward kept, as factors.
template <class Shape>
__device__ __forceinline__ void load_factors(const ClusterArgs& t, const ClusterPlace<Shape>& at,
                                             int steps, BackwardMemory<Shape>& m) {
  const BalanceParams& p = t.a.p;
  const auto term = [&](int index, int i) {
    return i < at.n ? strip_terms(p, at.head, index)[i] : 0.0f;
  };
  if (threadIdx.x < Shape::kColumns) {
    const int c = threadIdx.x;
    const float first = term(1, c);
    m.grads[0][c] = first;
    m.columns[0][c] = exp2f(first);
#pragma unroll
    for (int k = 1; k <= kMostClusterSteps; ++k) {
      if (k <= steps) m.columns[k][c] = exp2f(first - term(2 * k - 1, c));
    }
  }
  for (int j = threadIdx.x; j < (steps + 1) * Shape::kRows; j += Shape::kThreads) {
    const int k = j / Shape::kRows, own = j % Shape::kRows, i = at.rank * Shape::kRows + own;
    const float first = term(0, i);
    m.rows[k][own] = k == 0 ? first : exp2f(first - term(2 * k - 2, i));
  }
}

// The rows' numbers of this warp.
template <class Shape>
__device__ __forceinline__ Four32 of_rows(const ClusterPlace<Shape>& at,
                                          const float (&rows)[Shape::kRows]) {
  static_assert(Shape::kOwn == 4);
  return load_kept(&rows[at.own]);
}

// Begins to load dR.
template <class Shape>
__device__ __forceinline__ void load_grad(const ClusterArgs& t, BackwardMemory<Shape>& m) {
  const ClusterPlace<Shape> at(t);
  const Matrix<float> grad(t.a.p, t.a.p.grad, at.head);
#pragma unroll
  for (int i = 0; i < Shape::kOwn; ++i) {
    const int r = anew(at.row(i));
#pragma unroll
    for (int g = 0; g < Shape::kGroups; ++g) {
      const int c = at.column(g);
      Four32& to = m.grad[i * Shape::kGroups + g][threadIdx.x];
      if (t.wide_grad) {
        copy_async(&to, grad.data + r * grad.row + c * grad.column, r < at.n && c < at.n);
      } else {
        to = load_place(at, grad, false, i, g);
      }
    }
  }
  commit_copies();
}

// dR of a group of columns, 0 where E is.
template <class Shape>
__device__ __forceinline__ void take_grad(const BackwardMemory<Shape>& m, const Held<Shape>& held,
                                          int g, Four32 (&to)[Shape::kOwn]) {
#pragma unroll
  for (int i = 0; i < Shape::kOwn; ++i) {
    to[i] = m.grad[i * Shape::kGroups + g][threadIdx.x];
#pragma unroll
    for (int e = 0; e < 4; ++e) to[i].x[e] = held[i][g][e] == 0.0f ? 0.0f : to[i].x[e];
  }
}

// What a row's softmax leaves of its gradient.
template <class Shape>
struct RowFacts {
  float inverse[Shape::kOwn], dot[Shape::kOwn];  // r and d
};

// r and d of the warp's rows.
template <class Shape>
__device__ __forceinline__ RowFacts<Shape> take_row_facts(const ClusterPlace<Shape>& at,
                                                          const Held<Shape>& held, int steps,
                                                          const BackwardMemory<Shape>& m) {
  constexpr int kOwn = Shape::kOwn;
  float sums[2 * kOwn] = {};  // of the shares, and of them with dR
#pragma unroll
  for (int g = 0; g < Shape::kGroups; ++g) {
    const Four32 c = load_kept(&m.columns[steps][at.column(g)]);
    Four32 change[kOwn];
    take_grad(m, held, g, change);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float share = held[i][g][e] * c.x[e];
        sums[i] += share;
        sums[kOwn + i] = fmaf(share, change[i].x[e], sums[kOwn + i]);
      }
    }
  }
  reduce_warp(sums, Add());
  RowFacts<Shape> facts;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    facts.inverse[i] = fast_reciprocal(sums[i]);
    facts.dot[i] = sums[kOwn + i] * facts.inverse[i];
  }
  return facts;
}

// Puts the parts of v'K.
template <class Shape>
__device__ __forceinline__ void put_first(const ClusterPlace<Shape>& at, const Held<Shape>& held,
                                          const RowFacts<Shape>& facts, int steps,
                                          const BackwardMemory<Shape>& m,
                                          ColumnExchange<Shape>& exchange) {
  const Four32 a = of_rows(at, m.rows[steps]);
#pragma unroll
  for (int g = 0; g < Shape::kGroups; ++g) {
    Four32 change[Shape::kOwn];
    take_grad(m, held, g, change);
    float own[4] = {}, ones[4] = {};
#pragma unroll
    for (int i = 0; i < Shape::kOwn; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float part = facts.inverse[i] * (change[i].x[e] - facts.dot[i]);
        own[e] = fmaf(held[i][g][e], part, own[e]);
      }
    }
    add_down_columns<Shape>(held, g, a.x, ones);
    exchange.put(at, 0, g, own);
    exchange.put(at, 1, g, ones);
  }
}

// Step k: w of the warp's rows, and unless it is the last one the parts of v'(k-1).
template <class Shape>
__device__ __forceinline__ void take_step(const ClusterPlace<Shape>& at, const Held<Shape>& held,
                                          int k, BackwardMemory<Shape>& m,
                                          ColumnExchange<Shape>& exchange) {
  constexpr int kOwn = Shape::kOwn;
  float sums[2][kOwn] = {};
#pragma unroll
  for (int g = 0; g < Shape::kGroups; ++g) {
    add_along_rows<Shape>(held, g, load_kept(&m.grads[k][at.column(g)]), sums[0]);
    add_along_rows<Shape>(held, g, load_kept(&m.columns[k - 1][at.column(g)]), sums[1]);
  }
  reduce_warp(reinterpret_cast<float(&)[2 * kOwn]>(sums), Add());
  const Four32 a = of_rows(at, m.rows[k]);
  float w[kOwn];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    w[i] = -sums[0][i] * fast_reciprocal(sums[1][i]) * a.x[i];
    if (at.lane == i) m.row_grads[k][at.own + i] = w[i];
  }
  if (k == 1) return;
  const Four32 below = of_rows(at, m.rows[k - 1]);
#pragma unroll
  for (int g = 0; g < Shape::kGroups; ++g) {
    float own[4] = {}, ones[4] = {};
    add_down_columns<Shape>(held, g, w, own);
    add_down_columns<Shape>(held, g, below.x, ones);
    exchange.put(at, 0, g, own);
    exchange.put(at, 1, g, ones);
  }
}

// dx of a group of columns, and with it the gradient of the logits.
template <class Shape>
__device__ __forceinline__ void store_gradient(const ClusterArgs& t, const ClusterPlace<Shape>& at,
                                               const Held<Shape>& held, int g,
                                               const RowFacts<Shape>& facts,
                                               const BackwardMemory<Shape>& m) {
  constexpr int kOwn = Shape::kOwn;
  const int steps = static_cast<int>(column_steps(t.a.p));
  const float unit = 1.0f / t.a.temperature;
  const Four32 c = load_kept(&m.columns[steps][at.column(g)]);
  Four32 change[kOwn];
  take_grad(m, held, g, change);
  float to[kOwn][4];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      to[i][e] = facts.inverse[i] * c.x[e] * (change[i].x[e] - facts.dot[i]);
    }
  }
  for (int k = 1; k <= steps; ++k) {
    const Four32 a = of_rows(at, m.rows[k]), w = of_rows(at, m.row_grads[k]);
    const Four32 v = load_kept(&m.grads[k][at.column(g)]);
    const Four32 above = load_kept(&m.columns[k - 1][at.column(g)]);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) to[i][e] += fmaf(w.x[i], above.x[e], a.x[i] * v.x[e]);
    }
  }
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float own = held[i][g][e];
      to[i][e] = own == 0.0f ? 0.0f : own * to[i][e] * unit;
    }
    switch (t.a.p.logits.type) {
      case Type::kBFloat16: store_place<__nv_bfloat16>(t, at, i, g, to[i]); break;
      case Type::kFloat16: store_place<__half>(t, at, i, g, to[i]); break;
      default: store_place<float>(t, at, i, g, to[i]);
    }
  }
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    balance_cluster_bwd_kernel(const __grid_constant__ ClusterArgs t) {
  extern __shared__ __align__(16) unsigned char shared[];
  BackwardMemory<Shape>& m = *reinterpret_cast<BackwardMemory<Shape>*>(shared);
  arrive_at_cluster();  // all of its CTAs have begun before one writes to another
  load_grad<Shape>(t, m);
  const ClusterPlace<Shape> at(t);
  ColumnExchange<Shape> exchange{m.exchange};
  const int steps = static_cast<int>(column_steps(t.a.p));

  Held<Shape> held;  // x, then E
  load_factors(t, at, steps, m);
  load_x<Shape>(t, held);
  __syncthreads();
  make_shares<Shape>(at, m.grads[0], of_rows(at, m.rows[0]).x, held);
  wait_copies<0>();
  const RowFacts<Shape> facts = take_row_facts<Shape>(at, held, steps, m);
  put_first<Shape>(at, held, facts, steps, m, exchange);
  wait_for_cluster();
  for (int k = steps; k >= 1; --k) {
    exchange.template sum<2>(at, [&](int column, const float(&totals)[2]) {
      const float dv = -totals[0] * fast_reciprocal(totals[1]);
      store_at_all<Shape>(&m.grads[k][column], dv * m.columns[k][column]);
    });
    take_step<Shape>(at, held, k, m, exchange);
  }
  __syncwarp();
#pragma unroll
  for (int g = 0; g < Shape::kGroups; ++g) store_gradient(t, at, held, g, facts, m);
}

}  // namespace

void cluster_bwd(const BalanceParams& p, Stream stream) {
  with_cluster_shape(p, [&](auto shape) {
    using Shape = decltype(shape);
    launch_clusters<Shape>(balance_cluster_bwd_kernel<Shape>,
                           make_cluster_args<Shape>(p, p.logits.type),
                           sizeof(BackwardMemory<Shape>), stream);
  });
}

}  // namespace sinkhorn::cuda::balance
