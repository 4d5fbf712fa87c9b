// Balancing 129 to 2048 blocks with full columns, with no column step, or not at all: backward.
//
// It goes through the potentials u and v that forward kept, and reads nothing but x [N, N] between
// its first launch and its last. As in balance_head_full_bwd.cu Q^k = exp2(x - u(k-1) - vk), whose
// columns sum to 1, and P^(k-1) = Q^k f_j, f = exp2(vk - v(k-1)), whose rows do; and Q^k = P^k h_i,
// h = exp2(uk - u(k-1)). Let u' = du / sum_j P and v' = dv / sum_i Q, in which the rounding of u
// and v is divided out.
//
//   start     r_i = 1 / sum_j P^K,  d_i = sum_j R dR;
//             parts of - dvK_j = sum_i R (dR - d_i), and of sum_i QK_ij
//   step k    v'k_j and fk_j from the parts of all slabs, each CTA for itself;
//             u'(k-1)_i = - sum_j v'k_j Qk_ij / sum_j Qk_ij fk_j;
//             parts of - dv(k-1)_j = sum_i u'(k-1)_i P(k-1)_ij, and of sum_i Q(k-1)_ij
//   in step 1 dx = R (dR - d_i) + sum_k Qk_ij (v'k_j + u'(k-1)_i fk_j) instead of the parts
//             (balance_strip_full_bwd_last.cu)
//
// One exponential an element and launch, and in step 1 two: Qk = Qm a_i b_j with a = exp2(u(m-1) -
// u(k-1)) and b = exp2(vm - vk), so the sum is one of products of a row's and a column's number,
// which step k keeps: a, a u', b v' and b f. A step changes u and v by log2 N at most, 11 each. So
// m is 1, 6, 11 ..: what is 0 in Qm is below 2^-38 in Q of the 5 steps from there.
//
// A CTA has a slab of rows, which it takes 8 at a time in registers, 4 where it holds dR as well
// (balance_strip_full.cuh). Where x is stored it lies where the result goes if that is float32,
// else in scratch.
#include "kernels/cuda/balance_launch.h"
#include "kernels/cuda/balance_strip_full_bwd.cuh"

namespace sinkhorn::cuda::balance {
namespace {

// The slab's rows of exp2(above - below), 0 beyond N; there after the next barrier of the CTA.
template <class Shape>
__device__ __forceinline__ void share_factors(const Slab<Shape>& slab, const float* above,
                                              const float* below, float (&to)[Shape::kRows]) {
  const int i = threadIdx.x, r = slab.first + i;
  if (i >= Shape::kRows) return;
  to[i] = r < slab.n ? exp2f(__ldcg(above + r) - __ldcg(below + r)) : 0.0f;
}

// The columns' sums of the start, unless the gradient is all there is to do.
template <class Shape, class T, bool kNatural>
__global__ void __launch_bounds__(Shape::kCta, 1)
    balance_strip_full_bwd_start_kernel(const __grid_constant__ SlabArgs t,
                                        const __grid_constant__ FullScratch scratch) {
  __shared__ Stage<Shape> stage[2];
  __shared__ typename TeamReducer<Shape, 2 * kShort>::Memory memory;
  alignas(16) __shared__ float last[Shape::kRows], h[Shape::kRows];
  release_next_launch();
  const Slab<Shape> slab(t);
  const BalanceParams& p = t.a.p;
  const int steps = static_cast<int>(column_steps(p));
  const Matrix<T> logits(p, p.logits, slab.head);
  const Matrix<float> grad(p, p.grad, slab.head);
  TeamReducer<Shape, 2 * kShort> reduce{memory};
  Four<T> loaded[kShort];
  Four32 loaded_grad[kShort];
  int r = slab.first + slab.team * kShort;
  if (r < slab.end) {
    load_rows<kShort>(t, slab, r, logits, t.wide_logits, loaded);
    load_rows<kShort>(t, slab, r, grad, t.wide_grad, loaded_grad);
  }
  wait_for_previous_launch();
  float v[4] = {}, columns[2][4] = {};
  if (!kNatural) share_rows(slab, strip_terms(p, slab.head, 2 * steps), last);
  if (steps > 0) {
    load_columns(slab, strip_terms(p, slab.head, 2 * steps - 1), v);
    share_factors(slab, strip_terms(p, slab.head, 2 * steps),
                  strip_terms(p, slab.head, 2 * steps - 2), h);
  }
  __syncthreads();
  for (; r < slab.end; r += Shape::kTeams * kShort) {
    SlabTile<kShort> x, g, share;
    make_first_x<kNatural, kShort>(t, slab, r, loaded, x);
#pragma unroll
    for (int i = 0; i < kShort; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) g[i][e] = x[i][e] == kNothing ? 0.0f : loaded_grad[i].x[e];
    }
    const int next = r + Shape::kTeams * kShort, at = r - slab.first;
    if (next < slab.end) {
      load_rows<kShort>(t, slab, next, logits, t.wide_logits, loaded);
      load_rows<kShort>(t, slab, next, grad, t.wide_grad, loaded_grad);
    }
    if (t.stored) {
      float* to = static_cast<float*>(t.x.data) +
                  (slab.head - t.x_first) * slab.n * static_cast<int64_t>(slab.n);
      store_rows<kShort>(slab, r, t.wide_x, x, to);
    }
    float sums[2 * kShort] = {};  // of the shares, and of them with dR
#pragma unroll
    for (int i = 0; i < kShort; ++i) {
      const float u = kNatural ? 0.0f : last[at + i];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        share[i][e] = kNatural ? expf(x[i][e]) : fast_exp2(x[i][e] - u - v[e]);
        sums[i] += share[i][e];
        sums[kShort + i] += share[i][e] * g[i][e];
      }
    }
    const float own = reduce(slab, sums, Add());
    const float own_dot = __shfl_down_sync(0xFFFFFFFFu, own, kShort);
    if (steps > 0 && slab.thread < kShort) {
      const float inverse = fast_reciprocal(own);
      scratch.vector(scratch.inverses, slab)[r + slab.thread] = inverse;
      scratch.vector(scratch.dots, slab)[r + slab.thread] = own_dot * inverse;
    }
#pragma unroll
    for (int i = 0; i < kShort; ++i) {
      const float inverse = kNatural ? 1.0f : fast_reciprocal(sums[i]);
      const float dot = kNatural ? 0.0f : sums[kShort + i] * inverse;
#pragma unroll
      for (int e = 0; e < 4; ++e) g[i][e] = share[i][e] * inverse * (g[i][e] - dot);
    }
    if (steps == 0) {
      store_gradient(t, slab, r, nothing_bits(x), g);
      continue;
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float sum = 0.0f, one = 0.0f;
#pragma unroll
      for (int i = 0; i < kShort; ++i) {
        sum += g[i][e];
        one = fmaf(share[i][e], h[at + i], one);
      }
      columns[0][e] += sum;
      columns[1][e] += one;
    }
  }
  if (steps == 0) return;
  const int to = steps % 2;
  put_parts<2>(t, slab, columns, stage, {scratch.sums[to], scratch.ones[to]});
}

// Step k > 1.
template <class Shape, class T, bool kStored>
__global__ void __launch_bounds__(Shape::kCta, 1)
    balance_strip_full_bwd_step_kernel(const __grid_constant__ SlabArgs t, int k,
                                       const __grid_constant__ FullScratch scratch) {
  __shared__ Stage<Shape> stage[2];
  __shared__ typename TeamReducer<Shape, 2 * kTall>::Memory memory;
  alignas(16) __shared__ float before[Shape::kRows], h[Shape::kRows], a[Shape::kRows];
  release_next_launch();
  const Slab<Shape> slab(t);
  const BalanceParams& p = t.a.p;
  const Matrix<T> source(p, t.x, slab.head - t.x_first);
  TeamReducer<Shape, 2 * kTall> reduce{memory};
  Four<T> loaded[kTall];
  int r = slab.first + slab.team * kTall;
  if (!kStored && r < slab.end) load_rows<kTall>(t, slab, r, source, t.wide_x, loaded);
  wait_for_previous_launch();
  if (kStored && r < slab.end) load_rows<kTall>(t, slab, r, source, t.wide_x, loaded);
  const float* u = strip_terms(p, slab.head, 2 * k - 2);
  share_rows(slab, u, before);
  share_factors(slab, u, strip_terms(p, slab.head, 2 * k - 4), h);
  share_factors(slab, strip_terms(p, slab.head, 2 * anchor(k) - 2), u, a);
  float v[4], dv[4], f[4], columns[2][4] = {};
  load_columns(slab, strip_terms(p, slab.head, 2 * k - 1), v);
  take_columns(t, slab, k, scratch, stage, v, dv, f);
  if (slab.keeps_columns()) {
    float b[4], grads[4];
    load_columns(slab, strip_terms(p, slab.head, 2 * anchor(k) - 1), b);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float own = exp2f(b[e] - v[e]);
      b[e] = own * f[e];
      grads[e] = own * dv[e];
    }
    store_four(scratch.step(scratch.column_factors, t, slab, k) + slab.column, b);
    store_four(scratch.step(scratch.column_grads, t, slab, k) + slab.column, grads);
  }
  for (; r < slab.end; r += Shape::kTeams * kTall) {
    SlabTile<kTall> x;
    make_x<kStored, kTall>(t, slab, r, loaded, x);
    const int next = r + Shape::kTeams * kTall, at = r - slab.first;
    if (next < slab.end) load_rows<kTall>(t, slab, next, source, t.wide_x, loaded);
    float du[kTall];
    const float own = take_rows<kTall>(slab, at, v, dv, f, before, reduce, x, x, du);
    if (slab.thread < kTall) {
      const float factor = a[at + slab.thread];
      scratch.step(scratch.rows, t, slab, k)[r + slab.thread] = factor;
      scratch.step(scratch.row_grads, t, slab, k)[r + slab.thread] = factor * own;
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float sum = 0.0f, one = 0.0f;
#pragma unroll
      for (int i = 0; i < kTall; ++i) {
        sum = fmaf(du[i], x[i][e], sum);
        one = fmaf(h[at + i], x[i][e], one);
      }
      columns[0][e] += sum;
      columns[1][e] += one;
    }
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    columns[0][e] *= f[e];
    columns[1][e] *= f[e];
  }
  const int to = (k - 1) % 2;
  put_parts<2>(t, slab, columns, stage, {scratch.sums[to], scratch.ones[to]});
}

}  // namespace

int64_t strip_full_bwd_scratch(const BalanceParams& p) {
  return FullScratch(p, nullptr).count * static_cast<int64_t>(sizeof(float));
}

void strip_full_bwd(const BalanceParams& p, void* scratch, Stream stream) {
  const FullScratch s(p, scratch);
  const int steps = static_cast<int>(column_steps(p));
  with_slab_shape(p, [&](auto shape) {
    using Shape = decltype(shape);
    SlabLauncher launch(balance_strip_full_bwd_start_kernel<Shape, float, false>, stream);
    float* x = s.x != nullptr ? s.x : static_cast<float*>(p.result);
    for_each_slab_group(p, x, s.x != nullptr, p.logits.type, [&](const SlabArgs& t) {
      with_strip_type(p, [&](auto type) {
        using T = decltype(type);
        p.iterations == 0 ? launch(balance_strip_full_bwd_start_kernel<Shape, T, true>, t, s)
                          : launch(balance_strip_full_bwd_start_kernel<Shape, T, false>, t, s);
      });
      if (steps == 0) return;
      with_slab_source(t, [&](auto type, auto stored) {
        using T = decltype(type);
        for (int k = steps; k > 1; --k) {
          launch(balance_strip_full_bwd_step_kernel<Shape, T, stored.value>, t, k, s);
        }
      });
      launch_full_bwd_last(launch, t, s);
    });
  });
}

}  // namespace sinkhorn::cuda::balance
