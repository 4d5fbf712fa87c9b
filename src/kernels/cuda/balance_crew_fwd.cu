// Balancing 129 to 1024 blocks with full columns and few iterations on Hopper: forward
// (balance_crew.cuh).
//
//   E_ij = exp2(x_ij - top_i), the largest of the row, and row factors a with u0 = top - log2 a
//   step k    t_j = sum_i E_ij a_i,  b = 1 / t,  vk = log2 t
//             s_i = sum_j E_ij b_j,  a = 1 / s,  uk = top + log2 s
//   R = E a b
//
// Where a column sums to less than 1 / kMostFactor in step 1, E has not all of what counts in it.
// There v1 is taken from x as a sum with its largest element aside, and E = exp2(x - u0 - v1) from
// then on; so it is, a little slower, where nobody may read a column. Kept for backward: u0 v1 u1
// ... vK uK, N numbers each.
#include "kernels/cuda/balance_crew_launch.cuh"

namespace sinkhorn::cuda::balance {
namespace {

template <class Shape>
using ForwardExchange = CrewExchange<Shape, std::min(2 * Shape::kColumns, 1024)>;

template <class Shape>
struct ForwardMemory {
  static constexpr int kSteps = kMostCrewSteps;
  typename ForwardExchange<Shape>::Memory exchange;
  typename Held<Shape>::Memory aside;
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
  for (int i = 0; i < Shape::kOwn; ++i) tops[i] = kNothing;
  x.each([&](int, const Four32(&own)[Shape::kOwn]) {
#pragma unroll
    for (int i = 0; i < Shape::kOwn; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) tops[i] = fmaxf(tops[i], own[i].x[e]);
    }
  });
  reduce_warp(tops, Larger());
#pragma unroll
  for (int i = 0; i < Shape::kOwn; ++i) {
    tops[i] = tops[i] == kNothing ? 0.0f : tops[i];
    sums[i] = 0.0f;
  }
  x.change([&](int, Four32(&own)[Shape::kOwn]) {
#pragma unroll
    for (int i = 0; i < Shape::kOwn; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float share = fast_exp2(own[i].x[e] - tops[i]);
        sums[i] += share;
        if (!kept) own[i].x[e] = share;
      }
    }
  });
  reduce_warp(sums, Add());
}

// The column step k.
template <class Shape>
__device__ __forceinline__ void take_columns(const Held<Shape>& held, const float (&a)[Shape::kOwn],
                                             int k, ForwardExchange<Shape>& exchange,
                                             ForwardMemory<Shape>& m) {
  const auto make = [&](int, const Four32(&own)[Shape::kOwn], float(&to)[1][4]) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      to[0][e] = 0.0f;
#pragma unroll
      for (int i = 0; i < Shape::kOwn; ++i) to[0][e] = fmaf(own[i].x[e], a[i], to[0][e]);
    }
  };
  exchange.template sum<1>(held, make, [&](int column, const float(&total)[1]) {
    m.columns[k - 1][column] = fast_reciprocal(total[0]);
  });
}

// The column step 1 of x, however small a column's sum is.
template <class Shape>
__device__ __forceinline__ void take_log_columns(const Held<Shape>& x,
                                                 const float (&u)[Shape::kOwn],
                                                 ForwardExchange<Shape>& exchange,
                                                 ForwardMemory<Shape>& m) {
  const auto make = [&](int, const Four32(&own)[Shape::kOwn], float(&to)[2][4]) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      LogSum all;
#pragma unroll
      for (int i = 0; i < Shape::kOwn; ++i) all.top = fmaxf(all.top, own[i].x[e] - u[i]);
#pragma unroll
      for (int i = 0; i < Shape::kOwn; ++i) all.sum += fast_exp2(own[i].x[e] - u[i] - all.base());
      to[0][e] = all.top;
      to[1][e] = all.sum;
    }
  };
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
  exchange.merge(x, {kNothing, 0.0f}, make, add, [&](int column, const float(&all)[2]) {
    m.base[column] = log_sum(all).log();
    m.columns[0][column] = 1.0f;
  });
}

template <class Shape>
__device__ __forceinline__ void store_terms(const CrewArgs& t, const CrewPlace<Shape>& at,
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
    balance_crew_fwd_kernel(const __grid_constant__ CrewArgs t) {
  extern __shared__ __align__(16) unsigned char shared[];
  ForwardMemory<Shape>& m = *reinterpret_cast<ForwardMemory<Shape>*>(shared);
  constexpr int kOwn = Shape::kOwn;
  const CrewPlace<Shape> at(t);
  ForwardExchange<Shape> exchange(t, at, m.exchange);
  for (int c = threadIdx.x; c < Shape::kColumns; c += Shape::kThreads) m.base[c] = 0.0f;
  const int steps = static_cast<int>(column_steps(t.a.p));

  Held<Shape> held(m.aside);  // x, then E
  float tops[kOwn], a[kOwn];
  // All CTAs of a crew find the same factors, and go through this equally often.
  for (bool careful = false;; careful = true) {
    load_x(t, at, held);
    float sums[kOwn];
    take_first_rows(careful, held, tops, sums);
    if (careful) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        if (sums[i] > 0.0f) tops[i] += log2f(sums[i]);
      }
      take_log_columns(held, tops, exchange, m);
      make_shares(at, m.base, tops, held);
      break;
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      a[i] = fast_reciprocal(sums[i]);
      if (at.lane == i) m.first[at.own + i] = sums[i] > 0.0f ? tops[i] + log2f(sums[i]) : tops[i];
    }
    take_columns(held, a, 1, exchange, m);
    bool fine = true;
    for (int c = threadIdx.x; c < at.n; c += Shape::kThreads) {
      fine = fine && m.columns[0][c] > 0.0f && m.columns[0][c] < Shape::kMostFactor;
    }
    if (__syncthreads_and(fine) != 0) break;
  }
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    if (at.lane == i) m.tops[at.own + i] = tops[i];
  }
  for (int k = 1;; ++k) {
    float sums[kOwn] = {};
    held.each([&](int g, const Four32(&own)[kOwn]) {
      const Four32 b = load_kept(&m.columns[k - 1][at.column(g)]);
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[i] = fmaf(own[i].x[e], b.x[e], sums[i]);
      }
    });
    reduce_warp(sums, Add());
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      a[i] = fast_reciprocal(sums[i]);
      if (at.lane == i) m.rows[k - 1][at.own + i] = sums[i];
    }
    if (k == steps) break;
    take_columns(held, a, k + 1, exchange, m);
  }
  held.each([&](int g, const Four32(&own)[kOwn]) {
    const Four32 b = load_kept(&m.columns[steps - 1][at.column(g)]);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      float to[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) to[e] = own[i].x[e] * b.x[e] * a[i];
      store_place<float>(t, at, i, g, to);
    }
  });
  __syncthreads();
  store_terms(t, at, steps, m);
}

}  // namespace

int64_t crew_fwd_scratch(const BalanceParams& p) { return crew_scratch<kLargestCrewFwd>(p); }

void crew_fwd(const BalanceParams& p, void* scratch, Stream stream) {
  with_crew_shape<kLargestCrewFwd>(p, [&](auto shape) {
    using Shape = decltype(shape);
    launch_crews<Shape>(balance_crew_fwd_kernel<Shape>, p, Type::kFloat32,
                        sizeof(ForwardMemory<Shape>), scratch, stream);
  });
}

}  // namespace sinkhorn::cuda::balance
