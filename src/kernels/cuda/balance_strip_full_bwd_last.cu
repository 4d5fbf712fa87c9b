// The last launch of backward for 129 to 2048 blocks with full columns: step 1, and
//
//   dx = R (dR - d_i) + sum_k Qk_ij (v'k_j + u'(k-1)_i fk_j)
//
// from the products of rows' and columns' numbers that the steps before it kept. The equations are
// in balance_strip_full_bwd.cu. A CTA takes its slab 4 rows at a time: x and dR in registers, and
// beside them Q, the sum over k and the next rows of x.
#include "kernels/cuda/balance_strip_full_bwd.cuh"

namespace sinkhorn::cuda::balance {
namespace {

// Adds the products of a row's and a column's numbers of step k.
template <class Shape>
__device__ __forceinline__ void add_products(const SlabArgs& t, const Slab<Shape>& slab, int r,
                                             int k, const FullScratch& scratch,
                                             SlabTile<kShort>& to) {
  const Four32 row = load_kept(scratch.step(scratch.rows, t, slab, k) + r);
  const Four32 row_grad = load_kept(scratch.step(scratch.row_grads, t, slab, k) + r);
  const Four32 factor = load_kept(scratch.step(scratch.column_factors, t, slab, k) + slab.column);
  const Four32 grad = load_kept(scratch.step(scratch.column_grads, t, slab, k) + slab.column);
#pragma unroll
  for (int i = 0; i < kShort; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      to[i][e] += fmaf(row_grad.x[i], factor.x[e], row.x[i] * grad.x[e]);
    }
  }
}

// Goes on from Qm to that of the next m: adds what its steps gave to g.
template <class Shape>
__device__ __forceinline__ void next_anchor(const SlabArgs& t, const Slab<Shape>& slab, int r,
                                            int m, const SlabTile<kShort>& x, SlabTile<kShort>& q,
                                            SlabTile<kShort>& weights, SlabTile<kShort>& g) {
  float column[4];
  load_columns(slab, strip_terms(t.a.p, slab.head, 2 * m - 1), column);
#pragma unroll
  for (int i = 0; i < kShort; ++i) {
    const float row = r + i < slab.n ? strip_terms(t.a.p, slab.head, 2 * m - 2)[r + i] : 0.0f;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      g[i][e] = fmaf(q[i][e], weights[i][e], g[i][e]);
      q[i][e] = fast_exp2(x[i][e] - row - column[e]);
      weights[i][e] = 0.0f;
    }
  }
}

// Step 1, and the gradient.
template <class Shape, class T, bool kStored>
__global__ void __launch_bounds__(Shape::kCta, 1)
    balance_strip_full_bwd_last_kernel(const __grid_constant__ SlabArgs t,
                                       const __grid_constant__ FullScratch scratch) {
  // Behind the first barriers the stages and these hold numbers of the columns, to free registers.
  __shared__ Stage<Shape> stage[2], last_columns;
  __shared__ typename TeamReducer<Shape, 2 * kShort>::Memory memory;
  alignas(16) __shared__ float before[Shape::kRows], last[Shape::kRows];
  alignas(16) __shared__ float dots[Shape::kRows], inverses[Shape::kRows];
  release_next_launch();
  const Slab<Shape> slab(t);
  const BalanceParams& p = t.a.p;
  const int steps = static_cast<int>(column_steps(p));
  const Matrix<T> source(p, t.x, slab.head - t.x_first);
  const Matrix<float> grad(p, p.grad, slab.head);
  TeamReducer<Shape, 2 * kShort> reduce{memory};
  Four<T> loaded[kShort];
  int r = slab.first + slab.team * kShort;
  if (!kStored && r < slab.end) load_rows<kShort>(t, slab, r, source, t.wide_x, loaded);
  wait_for_previous_launch();
  if (kStored && r < slab.end) load_rows<kShort>(t, slab, r, source, t.wide_x, loaded);
  share_rows(slab, strip_terms(p, slab.head, 0), before);
  share_rows(slab, strip_terms(p, slab.head, 2 * steps), last);
  share_rows(slab, scratch.vector(scratch.dots, slab), dots);
  share_rows(slab, scratch.vector(scratch.inverses, slab), inverses);
  float v[4];
  load_columns(slab, strip_terms(p, slab.head, 1), v);
  {
    float dv[4], f[4], last_v[4];
    load_columns(slab, strip_terms(p, slab.head, 2 * steps - 1), last_v);
    take_columns(t, slab, 1, scratch, stage, v, dv, f);
    last_columns.put(slab, last_v);
    __syncthreads();  // all have read what is overwritten
    stage[0].put(slab, dv);
    stage[1].put(slab, f);
  }
  for (; r < slab.end; r += Shape::kTeams * kShort) {
    Four32 loaded_grad[kShort];
    load_rows<kShort>(t, slab, r, grad, t.wide_grad, loaded_grad);
    SlabTile<kShort> x, q, weights, g;
    make_x<kStored, kShort>(t, slab, r, loaded, x);
    const unsigned nothing = t.masked ? nothing_bits(x) : 0;
    const int next = r + Shape::kTeams * kShort, at = r - slab.first;
    if (next < slab.end) load_rows<kShort>(t, slab, next, source, t.wide_x, loaded);
    const Four32 dv = stage[0].get(slab, slab.team), f = stage[1].get(slab, slab.team);
    float du[kShort];
    take_rows<kShort>(slab, at, v, dv.x, f.x, before, reduce, x, q, du);
#pragma unroll
    for (int i = 0; i < kShort; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        weights[i][e] = fmaf(du[i], f.x[e], dv.x[e]);
        g[i][e] = 0.0f;
      }
    }
    for (int k = 2; k <= steps; ++k) {
      if (k == anchor(k)) next_anchor(t, slab, r, k, x, q, weights, g);
      add_products(t, slab, r, k, scratch, weights);
    }
    const Four32 last_v = last_columns.get(slab, slab.team);
#pragma unroll
    for (int i = 0; i < kShort; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        // The very R that d was taken from: then it sums to 0 over a row.
        const float share = fast_exp2(x[i][e] - last[at + i] - last_v.x[e]) * inverses[at + i];
        g[i][e] = fmaf(q[i][e], weights[i][e], g[i][e]);
        g[i][e] = fmaf(share, loaded_grad[i].x[e] - dots[at + i], g[i][e]);
      }
    }
    store_gradient(t, slab, r, nothing, g);
  }
}

}  // namespace

void launch_full_bwd_last(SlabLauncher& launch, const SlabArgs& t, const FullScratch& scratch) {
  with_slab_shape(t.a.p, [&](auto shape) {
    with_slab_source(t, [&](auto type, auto stored) {
      launch(balance_strip_full_bwd_last_kernel<decltype(shape), decltype(type), stored.value>, t,
             scratch);
    });
  });
}

}  // namespace sinkhorn::cuda::balance
