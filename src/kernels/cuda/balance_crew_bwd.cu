// Balancing 129 to 512 blocks with full columns and few iterations on Hopper: backward
// (balance_crew.cuh).
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
//
// dR is read three times; of 512 blocks it stays in the card's cache. Of 1024 it does not, and the
// strips, which read it twice, are faster (H200, 8 heads: 123 us against 147, on two cards).
#include "kernels/cuda/balance_crew_launch.cuh"

namespace sinkhorn::cuda::balance {
namespace {

template <class Shape>
using BackwardExchange = CrewExchange<Shape, 2 * Shape::kColumns>;

template <class Shape>
struct BackwardMemory {
  static constexpr int kSteps = kMostCrewSteps;
  typename BackwardExchange<Shape>::Memory exchange;
  typename Held<Shape>::Memory aside;
  alignas(16) float columns[kSteps + 1][Shape::kColumns];  // C^0 .. C^K
  alignas(16) float grads[kSteps + 1][Shape::kColumns];    // C^k v'k; v1 at 0
  alignas(16) float rows[kSteps + 1][Shape::kRows];        // A^1 .. A^K; u0 at 0
  alignas(16) float row_grads[kSteps + 1][Shape::kRows];   // w^1 .. w^K
};

// What forward kept, as factors.
template <class Shape>
__device__ __forceinline__ void load_factors(const CrewArgs& t, const CrewPlace<Shape>& at,
                                             int steps, BackwardMemory<Shape>& m) {
  constexpr int kSteps = kMostCrewSteps;
  const auto load = [&](int first, int i, float(&to)[kSteps + 1]) {  // every other term
#pragma unroll
    for (int k = 0; k <= kSteps; ++k) {
      const bool inside = i < at.n && first + 2 * k <= 2 * steps;
      to[k] = inside ? __ldcg(strip_terms(t.a.p, at.head, first + 2 * k) + i) : 0.0f;
    }
  };
  float terms[kSteps + 1];
  for (int c = threadIdx.x; c < Shape::kColumns; c += Shape::kThreads) {
    load(1, c, terms);
    m.grads[0][c] = terms[0];
    m.columns[0][c] = exp2f(terms[0]);
#pragma unroll
    for (int k = 1; k <= kSteps; ++k) m.columns[k][c] = exp2f(terms[0] - terms[k - 1]);
  }
  if (threadIdx.x < Shape::kRows) {
    const int own = threadIdx.x;
    load(0, at.rank * Shape::kRows + own, terms);
    m.rows[0][own] = terms[0];
#pragma unroll
    for (int k = 1; k <= kSteps; ++k) m.rows[k][own] = exp2f(terms[0] - terms[k - 1]);
  }
}

// dR of a group of columns, 0 where E is.
template <class Shape>
__device__ __forceinline__ void load_grad(const CrewArgs& t, const CrewPlace<Shape>& at, int g,
                                          const Four32 (&shares)[Shape::kOwn],
                                          Four32 (&to)[Shape::kOwn]) {
  load_group(at, Matrix<float>(t.a.p, t.a.p.grad, at.head), t.wide_grad, g, to);
#pragma unroll
  for (int i = 0; i < Shape::kOwn; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) to[i].x[e] = shares[i].x[e] == 0.0f ? 0.0f : to[i].x[e];
  }
}

// What a row's softmax leaves of its gradient.
template <class Shape>
struct RowFacts {
  float inverse[Shape::kOwn], dot[Shape::kOwn];  // r and d
};

// r and d of the warp's rows.
template <class Shape>
__device__ __forceinline__ RowFacts<Shape> take_row_facts(const CrewArgs& t,
                                                          const CrewPlace<Shape>& at,
                                                          const Held<Shape>& held, int steps,
                                                          const BackwardMemory<Shape>& m) {
  constexpr int kOwn = Shape::kOwn;
  float sums[2 * kOwn] = {};  // of the shares, and of them with dR
  held.each([&](int g, const Four32(&own)[kOwn]) {
    const Four32 c = load_kept(&m.columns[steps][at.column(g)]);
    Four32 change[kOwn];
    load_grad(t, at, g, own, change);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float share = own[i].x[e] * c.x[e];
        sums[i] += share;
        sums[kOwn + i] = fmaf(share, change[i].x[e], sums[kOwn + i]);
      }
    }
  });
  reduce_warp(sums, Add());
  RowFacts<Shape> facts;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    facts.inverse[i] = fast_reciprocal(sums[i]);
    facts.dot[i] = sums[kOwn + i] * facts.inverse[i];
  }
  return facts;
}

// w of step k of the warp's rows.
template <class Shape>
__device__ __forceinline__ void take_rows(const CrewPlace<Shape>& at, const Held<Shape>& held,
                                          int k, BackwardMemory<Shape>& m,
                                          float (&w)[Shape::kOwn]) {
  constexpr int kOwn = Shape::kOwn;
  float sums[2 * kOwn] = {}, a[kOwn];
  held.each([&](int g, const Four32(&own)[kOwn]) {
    const Four32 grads = load_kept(&m.grads[k][at.column(g)]);
    const Four32 columns = load_kept(&m.columns[k - 1][at.column(g)]);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        sums[i] = fmaf(own[i].x[e], grads.x[e], sums[i]);
        sums[kOwn + i] = fmaf(own[i].x[e], columns.x[e], sums[kOwn + i]);
      }
    }
  });
  reduce_warp(sums, Add());
  get_rows(at, m.rows[k], a);
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    w[i] = -sums[i] * fast_reciprocal(sums[kOwn + i]) * a[i];
    if (at.lane == i) m.row_grads[k][at.own + i] = w[i];
  }
}

// Writes dx of a group of columns as the gradient of the logits.
template <class Shape>
__device__ __forceinline__ void store_gradient(const CrewArgs& t, const CrewPlace<Shape>& at, int g,
                                               const Four32 (&own)[Shape::kOwn],
                                               const RowFacts<Shape>& facts, int steps,
                                               const BackwardMemory<Shape>& m) {
  constexpr int kOwn = Shape::kOwn;
  const float unit = 1.0f / t.a.temperature;
  const Four32 c = load_kept(&m.columns[steps][at.column(g)]);
  Four32 change[kOwn];
  load_grad(t, at, g, own, change);
  float to[kOwn][4];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) to[i][e] = 0.0f;
  }
#pragma unroll 1
  for (int k = 1; k <= steps; ++k) {
    const Four32 v = load_kept(&m.grads[k][at.column(g)]);
    const Four32 above = load_kept(&m.columns[k - 1][at.column(g)]);
    float a[kOwn], w[kOwn];
    get_rows(at, m.rows[k], a);
    get_rows(at, m.row_grads[k], w);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        to[i][e] = fmaf(w[i], above.x[e], fmaf(a[i], v.x[e], to[i][e]));
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float share = own[i].x[e];
      to[i][e] = fmaf(facts.inverse[i] * c.x[e], change[i].x[e] - facts.dot[i], to[i][e]);
      to[i][e] = share == 0.0f ? 0.0f : share * to[i][e] * unit;
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
    balance_crew_bwd_kernel(const __grid_constant__ CrewArgs t) {
  extern __shared__ __align__(16) unsigned char shared[];
  BackwardMemory<Shape>& m = *reinterpret_cast<BackwardMemory<Shape>*>(shared);
  constexpr int kOwn = Shape::kOwn;
  using Rows = Four32[kOwn];
  const CrewPlace<Shape> at(t);
  BackwardExchange<Shape> exchange(t, at, m.exchange);
  const int steps = static_cast<int>(column_steps(t.a.p));

  Held<Shape> held(m.aside);  // x, then E
  load_factors(t, at, steps, m);
  load_x(t, at, held);
  __syncthreads();
  float first[kOwn];
  get_rows(at, m.rows[0], first);
  make_shares(at, m.grads[0], first, held);
  const RowFacts<Shape> facts = take_row_facts(t, at, held, steps, m);

  float w[kOwn], below[kOwn];  // w^k, and A of the step whose columns are summed
  const auto finish = [&](int k) {
    return [&, k](int column, const float(&totals)[2]) {
      const float dv = -totals[0] * fast_reciprocal(totals[1]);
      m.grads[k][column] = dv * m.columns[k][column];
    };
  };
  get_rows(at, m.rows[steps], below);
  const auto start = [&](int g, const Rows& own, float(&to)[2][4]) {
    Four32 change[kOwn];
    load_grad(t, at, g, own, change);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      to[0][e] = to[1][e] = 0.0f;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const float part = facts.inverse[i] * (change[i].x[e] - facts.dot[i]);
        to[0][e] = fmaf(own[i].x[e], part, to[0][e]);
        to[1][e] = fmaf(own[i].x[e], below[i], to[1][e]);
      }
    }
  };
  exchange.template sum<2>(held, start, finish(steps));
  for (int k = steps;; --k) {
    take_rows(at, held, k, m, w);
    if (k == 1) break;
    get_rows(at, m.rows[k - 1], below);
    const auto step = [&](int, const Rows& own, float(&to)[2][4]) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        to[0][e] = to[1][e] = 0.0f;
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
          to[0][e] = fmaf(own[i].x[e], w[i], to[0][e]);
          to[1][e] = fmaf(own[i].x[e], below[i], to[1][e]);
        }
      }
    };
    exchange.template sum<2>(held, step, finish(k - 1));
  }
  __syncwarp();
  held.each([&](int g, const Rows& own) { store_gradient(t, at, g, own, facts, steps, m); });
}

}  // namespace

int64_t crew_bwd_scratch(const BalanceParams& p) { return crew_scratch<kLargestCrewBwd>(p); }

void crew_bwd(const BalanceParams& p, void* scratch, Stream stream) {
  with_crew_shape<kLargestCrewBwd>(p, [&](auto shape) {
    using Shape = decltype(shape);
    launch_crews<Shape>(balance_crew_bwd_kernel<Shape>, p, p.logits.type,
                        sizeof(BackwardMemory<Shape>), scratch, stream);
  });
}

}  // namespace sinkhorn::cuda::balance
