// Balancing 129 to 512 blocks with full columns and few iterations on Hopper: forward
// (balance_cluster.cuh).
//
//   E_ij = exp2(x_ij - top_i), the largest of the row, and row factors a with u0 = top - log2 a
//   step k    t_j = sum_i E_ij a_i,  b = 1 / t,  vk = log2 t
//             s_i = sum_j E_ij b_j,  a = 1 / s,  uk = top + log2 s
//   R = E a b
//
// Where a column sums to less than 2^-20 in step 1, E has not all of what counts in it. There v1 is
// taken from x as a sum with its largest element aside, and E = exp2(x - u0 - v1) from then on.
// Kept for backward: u0 v1 u1 ... vK uK, N numbers each.
#include "kernels/cuda/balance_cluster.cuh"

namespace sinkhorn::cuda::balance {
namespace {

constexpr float kMostFactor = 0x1p20f;

template <class Shape>
struct ForwardMemory {
  static constexpr int kSteps = kMostClusterSteps;
  typename ColumnExchange<Shape>::Memory exchange;
  alignas(16) float columns[kSteps][Shape::kColumns];    // b of a step
  alignas(16) float base[Shape::kColumns];               // vk = base - log2 b
  float first[Shape::kRows];                             // u0
  float tops[Shape::kRows], rows[kSteps][Shape::kRows];  // uk = top + log2 s
};

// The largest of the warp's rows, 0 of an empty one, and the sum relative to it. On exit x is
// exp2(x - top), or the same x if it is `kept`.
template <class Shape>
__device__ __forceinline__ void take_first_rows(bool kept, Held<Shape>& x,
                                                float (&tops)[Shape::kOwn],
                                                float (&sums)[Shape::kOwn]) {
#pragma unroll
  for (int i = 0; i < Shape::kOwn; ++i) {
    tops[i] = kNothing;
#pragma unroll
    for (int g = 0; g < Shape::kGroups; ++g) {
#pragma unroll
      for (int e = 0; e < 4; ++e) tops[i] = fmaxf(tops[i], x[i][g][e]);
    }
  }
  reduce_warp(tops, Larger());
#pragma unroll
  for (int i = 0; i < Shape::kOwn; ++i) {
    tops[i] = tops[i] == kNothing ? 0.0f : tops[i];
    sums[i] = 0.0f;
#pragma unroll
    for (int g = 0; g < Shape::kGroups; ++g) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float own = fast_exp2(x[i][g][e] - tops[i]);
        sums[i] += own;
        if (!kept) x[i][g][e] = own;
      }
    }
  }
  reduce_warp(sums, Add());
}

// The column step k.
template <class Shape>
__device__ __forceinline__ void take_columns(const ClusterPlace<Shape>& at, const Held<Shape>& held,
                                             const float (&a)[Shape::kOwn], int k,
                                             ColumnExchange<Shape>& exchange,
                                             ForwardMemory<Shape>& m) {
#pragma unroll
  for (int g = 0; g < Shape::kGroups; ++g) {
    float own[4] = {};
    add_down_columns<Shape>(held, g, a, own);
    exchange.put(at, 0, g, own);
  }
  exchange.template sum<1>(at, [&](int column, const float(&total)[1]) {
    store_at_all<Shape>(&m.columns[k - 1][column], fast_reciprocal(total[0]));
  });
}

// The column step 1 of x, however small a column's sum is.
template <class Shape>
__device__ __forceinline__ void take_log_columns(const ClusterPlace<Shape>& at,
                                                 const Held<Shape>& x,
                                                 const float (&u)[Shape::kOwn],
                                                 ColumnExchange<Shape>& exchange,
                                                 ForwardMemory<Shape>& m) {
#pragma unroll
  for (int g = 0; g < Shape::kGroups; ++g) {
    float tops[4], sums[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      LogSum all;
#pragma unroll
      for (int i = 0; i < Shape::kOwn; ++i) all.top = fmaxf(all.top, x[i][g][e] - u[i]);
#pragma unroll
      for (int i = 0; i < Shape::kOwn; ++i) all.sum += fast_exp2(x[i][g][e] - u[i] - all.base());
      tops[e] = all.top;
      sums[e] = all.sum;
    }
    exchange.put(at, 0, g, tops);
    exchange.put(at, 1, g, sums);
  }
  const auto log_sum = [](const float(&from)[2]) {
    LogSum sum;
    sum.top = from[0];
    sum.sum = from[1];
    return sum;
  };
  const auto add = [&](float(&all)[2], const float(&own)[2]) {
    LogSum sum = log_sum(all);
    sum.merge(log_sum(own));
    all[0] = sum.top;
    all[1] = sum.sum;
  };
  exchange.merge(at, {kNothing, 0.0f}, add, [&](int column, const float(&all)[2]) {
    store_at_all<Shape>(&m.base[column], log_sum(all).log());
    store_at_all<Shape>(&m.columns[0][column], 1.0f);
  });
}

template <class Shape>
__device__ __forceinline__ void store_terms(const ClusterArgs& t, const ClusterPlace<Shape>& at,
                                            int steps, const ForwardMemory<Shape>& m) {
  const auto log_of = [](float sum) { return sum > 0.0f ? log2f(sum) : 0.0f; };
  for (int j = threadIdx.x; j < (2 * steps + 1) * Shape::kRows; j += Shape::kThreads) {
    const int index = j / Shape::kRows, own = j % Shape::kRows, i = at.rank * Shape::kRows + own;
    if (i >= at.n) continue;
    const float term = index == 0       ? m.first[own]
                       : index % 2 == 0 ? m.tops[own] + log_of(m.rows[index / 2 - 1][own])
                                        : m.base[i] - log_of(m.columns[index / 2][i]);
    strip_terms(t.a.p, at.head, index)[i] = term;
  }
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    balance_cluster_fwd_kernel(const __grid_constant__ ClusterArgs t) {
  extern __shared__ __align__(16) unsigned char shared[];
  ForwardMemory<Shape>& m = *reinterpret_cast<ForwardMemory<Shape>*>(shared);
  constexpr int kOwn = Shape::kOwn, kGroups = Shape::kGroups;
  if (threadIdx.x < Shape::kColumns) m.base[threadIdx.x] = 0.0f;
  arrive_at_cluster();  // all of its CTAs have begun before one writes to another
  const ClusterPlace<Shape> at(t);
  ColumnExchange<Shape> exchange{m.exchange};
  const int steps = static_cast<int>(column_steps(t.a.p));

  Held<Shape> held;  // x, then E
  float tops[kOwn], a[kOwn];
  // All CTAs of a cluster find the same factors, and go through this equally often.
  for (bool careful = false;; careful = true) {
    load_x<Shape>(t, held);
    float sums[kOwn];
    take_first_rows<Shape>(careful, held, tops, sums);
    if (careful) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        if (sums[i] > 0.0f) tops[i] += log2f(sums[i]);
      }
      take_log_columns<Shape>(at, held, tops, exchange, m);
      make_shares<Shape>(at, m.base, tops, held);
      break;
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      a[i] = fast_reciprocal(sums[i]);
      if (at.lane == i) m.first[at.own + i] = sums[i] > 0.0f ? tops[i] + log2f(sums[i]) : tops[i];
    }
    wait_for_cluster();
    take_columns<Shape>(at, held, a, 1, exchange, m);
    const int column = threadIdx.x;
    bool fine = true;
    if (column < at.n) fine = m.columns[0][column] > 0.0f && m.columns[0][column] < kMostFactor;
    if (__syncthreads_and(fine) != 0) break;
  }
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    if (at.lane == i) m.tops[at.own + i] = tops[i];
  }
  for (int k = 1;; ++k) {
    float sums[kOwn] = {};
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      add_along_rows<Shape>(held, g, load_kept(&m.columns[k - 1][at.column(g)]), sums);
    }
    reduce_warp(sums, Add());
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      a[i] = fast_reciprocal(sums[i]);
      if (at.lane == i) m.rows[k - 1][at.own + i] = sums[i];
    }
    if (k == steps) break;
    take_columns<Shape>(at, held, a, k + 1, exchange, m);
  }
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const Four32 b = load_kept(&m.columns[steps - 1][at.column(g)]);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      float own[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) own[e] = held[i][g][e] * b.x[e] * a[i];
      store_place<float>(t, at, i, g, own);
    }
  }
  __syncthreads();
  store_terms(t, at, steps, m);
}

}  // namespace

void cluster_fwd(const BalanceParams& p, Stream stream) {
  with_cluster_shape(p, [&](auto shape) {
    using Shape = decltype(shape);
    launch_clusters<Shape>(balance_cluster_fwd_kernel<Shape>,
                           make_cluster_args<Shape>(p, Type::kFloat32),
                           sizeof(ForwardMemory<Shape>), stream);
  });
}

}  // namespace sinkhorn::cuda::balance
