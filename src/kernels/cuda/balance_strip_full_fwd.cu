// Balancing 129 to 2048 blocks with full columns, with no column step, or not at all: forward.
//
// The equations are those of balance_head_full.cuh. A launch each, a CTA to a slab of rows, which
// it takes 8 at a time in registers (balance_strip_full.cuh):
//
//   start     u0_i = lse_j(x_ij);  each slab's part of lse_i(x_ij - u0_i)
//   step k    vk_j from the parts of all slabs, each CTA for itself;
//             E_ij = exp2(x_ij - u(k-1)_i - vk_j),  s_i = sum_j E_ij,  uk = u(k-1) + log2 s;
//             P_ij = E_ij / s_i is R behind the last step, else its column sums over the slab are
//             the parts of v(k+1) = vk + log2(sum_i P_ij)
//
// One exponential an element and step. Kept for backward: u0 v1 u1 ... vK uK, N numbers each. Where
// x is stored it lies in the result, where R takes its place in the end.
#include "kernels/cuda/balance_launch.h"
#include "kernels/cuda/balance_strip_full_sums.cuh"

namespace sinkhorn::cuda::balance {
namespace {

constexpr int kRows = kStripRows;  // of a strip

// Numbers [heads, slabs, columns]. A step reads what no other CTA of it writes.
struct Parts {
  float *tops, *first_sums;  // of the start
  float* odd;                // of odd steps; those of even ones lie where the tops were

  Parts(const BalanceParams& p, void* memory) {
    const int64_t part = SlabSizes(p).part();
    tops = static_cast<float*>(memory);
    first_sums = tops + part;
    odd = first_sums + part;
  }
  __device__ __forceinline__ float* of_step(int k) const { return k % 2 == 1 ? odd : tops; }
};

template <class Shape>
__device__ __forceinline__ float* slab_result(const SlabArgs& t, const Slab<Shape>& slab) {
  return static_cast<float*>(t.a.p.result) + slab.head * slab.n * slab.n;
}

// Adds rows of x - u to each column's log sum.
__device__ __forceinline__ void add_log_sums(const SlabTile<kRows>& x, const float (&u)[kRows],
                                             LogSum (&columns)[4]) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    float own[kRows], sum = 0.0f;
    LogSum& all = columns[e];
    const float before = all.top;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      own[i] = x[i][e] - u[i];
      all.top = fmaxf(all.top, own[i]);
    }
    const float base = all.base();
#pragma unroll
    for (int i = 0; i < kRows; ++i) sum += fast_exp2(own[i] - base);
    all.sum = fmaf(all.sum, fast_exp2(before - base), sum);
  }
}

// The parts of the start: the teams' log sums, merged.
template <class Shape>
__device__ __forceinline__ void put_first_parts(const SlabArgs& t, const Slab<Shape>& slab,
                                                const LogSum (&columns)[4],
                                                Stage<Shape> (&stage)[2], const Parts& parts) {
  float tops[4], sums[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    tops[e] = columns[e].top;
    sums[e] = columns[e].sum;
  }
  stage[0].put(slab, tops);
  stage[1].put(slab, sums);
  __syncthreads();
  if (slab.team != 0) return;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    LogSum all = columns[e];
#pragma unroll
    for (int team = 1; team < Shape::kTeams; ++team) {
      LogSum other;
      other.top = stage[0].get(slab, team).x[e];
      other.sum = stage[1].get(slab, team).x[e];
      all.merge(other);
    }
    tops[e] = all.top;
    sums[e] = all.sum;
  }
  store_four(slab.part(t, parts.tops, slab.index), tops);
  store_four(slab.part(t, parts.first_sums, slab.index), sums);
}

// v of step 1.
template <class Shape>
__device__ __forceinline__ void first_columns(const SlabArgs& t, const Slab<Shape>& slab,
                                              const Parts& parts, Stage<Shape> (&stage)[2],
                                              float (&v)[4]) {
  constexpr int kAhead = 4;  // loads of each kind in flight
  LogSum all[4];
  for (int base = slab.team; base < t.slabs; base += kAhead * Shape::kTeams) {
    Four32 tops[kAhead], sums[kAhead];
#pragma unroll
    for (int q = 0; q < kAhead; ++q) {
      const int of = base + q * Shape::kTeams;
      tops[q] = {{kNothing, kNothing, kNothing, kNothing}};
      sums[q] = Four32{};
      if (of >= t.slabs) continue;
      tops[q] = load_four(slab.part(t, parts.tops, of));
      sums[q] = load_four(slab.part(t, parts.first_sums, of));
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float before = all[e].top;
#pragma unroll
      for (int q = 0; q < kAhead; ++q) all[e].top = fmaxf(all[e].top, tops[q].x[e]);
      all[e].sum *= exp2f(before - all[e].base());
#pragma unroll
      for (int q = 0; q < kAhead; ++q) {
        all[e].sum = fmaf(sums[q].x[e], exp2f(tops[q].x[e] - all[e].base()), all[e].sum);
      }
    }
  }
  float tops[4], sums[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    tops[e] = all[e].top;
    sums[e] = all[e].sum;
  }
  stage[0].put(slab, tops);
  stage[1].put(slab, sums);
  __syncthreads();
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    LogSum whole;
#pragma unroll
    for (int team = 0; team < Shape::kTeams; ++team) {
      LogSum other;
      other.top = stage[0].get(slab, team).x[e];
      other.sum = stage[1].get(slab, team).x[e];
      whole.merge(other);
    }
    v[e] = whole.log();
  }
}

// v of step k > 1, from sums relative to v of step k - 1.
template <class Shape>
__device__ __forceinline__ void next_columns(const SlabArgs& t, const Slab<Shape>& slab, int k,
                                             const Parts& parts, Stage<Shape> (&stage)[1],
                                             float (&v)[4]) {
  float sums[1][4];
  load_columns(slab, strip_terms(t.a.p, slab.head, 2 * k - 3), v);
  add_parts<1>(t, slab, {parts.of_step(k - 1)}, stage, sums);
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    if (sums[0][e] > 0.0f) v[e] += log2f(sums[0][e]);
  }
}

// Without iterations: R = exp(x).
template <class Shape, class T>
__global__ void __launch_bounds__(Shape::kCta, 1)
    balance_strip_full_plain_kernel(const __grid_constant__ SlabArgs t) {
  const Slab<Shape> slab(t);
  const Matrix<T> logits(t.a.p, t.a.p.logits, slab.head);
  wait_for_previous_launch();
  for (int r = slab.first + slab.team * kRows; r < slab.end; r += Shape::kTeams * kRows) {
    Four<T> loaded[kRows];
    SlabTile<kRows> x;
    load_rows<kRows>(t, slab, r, logits, t.wide_logits, loaded);
    make_first_x<true, kRows>(t, slab, r, loaded, x);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) x[i][e] = expf(x[i][e]);
    }
    store_rows<kRows>(slab, r, t.wide_result, x, slab_result(t, slab));
  }
}

template <class Shape, class T>
__global__ void __launch_bounds__(Shape::kCta, 1)
    balance_strip_full_start_kernel(const __grid_constant__ SlabArgs t, const Parts parts) {
  __shared__ Stage<Shape> stage[2];
  __shared__ typename TeamReducer<Shape, kRows>::Memory memory;
  release_next_launch();
  const Slab<Shape> slab(t);
  const BalanceParams& p = t.a.p;
  const Matrix<T> logits(p, p.logits, slab.head);
  TeamReducer<Shape, kRows> reduce{memory};
  Four<T> loaded[kRows];
  LogSum columns[4];
  int r = slab.first + slab.team * kRows;
  if (r < slab.end) load_rows<kRows>(t, slab, r, logits, t.wide_logits, loaded);
  wait_for_previous_launch();
  for (; r < slab.end; r += Shape::kTeams * kRows) {
    SlabTile<kRows> x;
    make_first_x<false, kRows>(t, slab, r, loaded, x);
    const int next = r + Shape::kTeams * kRows;
    if (next < slab.end) load_rows<kRows>(t, slab, next, logits, t.wide_logits, loaded);
    if (t.stored) store_rows<kRows>(slab, r, t.wide_result, x, slab_result(t, slab));
    float tops[kRows], sums[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      tops[i] = fmaxf(fmaxf(x[i][0], x[i][1]), fmaxf(x[i][2], x[i][3]));
    }
    LogSum row;  // of lane i, row i
    row.top = reduce(slab, tops, Larger());
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      tops[i] = tops[i] == kNothing ? 0.0f : tops[i];
      sums[i] = 0.0f;
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[i] += fast_exp2(x[i][e] - tops[i]);
    }
    row.sum = reduce(slab, sums, Add());
    const float own = row.log();
    if (slab.thread < kRows && r + slab.thread < slab.n) {
      strip_terms(p, slab.head, 0)[r + slab.thread] = own;
    }
    if (column_steps(p) > 0) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) tops[i] = __shfl_sync(0xFFFFFFFFu, own, i);
      add_log_sums(x, tops, columns);
      continue;
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      sums[i] = fast_reciprocal(sums[i]);
#pragma unroll
      for (int e = 0; e < 4; ++e) x[i][e] = fast_exp2(x[i][e] - tops[i]) * sums[i];
    }
    store_rows<kRows>(slab, r, t.wide_result, x, slab_result(t, slab));
  }
  if (column_steps(p) > 0) put_first_parts(t, slab, columns, stage, parts);
}

template <class Shape, class T, bool kStored, bool kFirst>
__global__ void __launch_bounds__(Shape::kCta, 1)
    balance_strip_full_step_kernel(const __grid_constant__ SlabArgs t, int k, const Parts parts) {
  __shared__ Stage<Shape> stage[kFirst ? 2 : 1];
  __shared__ typename TeamReducer<Shape, kRows>::Memory memory;
  alignas(16) __shared__ float before[Shape::kRows];
  release_next_launch();
  const Slab<Shape> slab(t);
  const BalanceParams& p = t.a.p;
  const Matrix<T> source(p, t.x, slab.head - t.x_first);
  TeamReducer<Shape, kRows> reduce{memory};
  Four<T> loaded[kRows];
  int r = slab.first + slab.team * kRows;
  if (!kStored && r < slab.end) load_rows<kRows>(t, slab, r, source, t.wide_x, loaded);
  wait_for_previous_launch();
  if (kStored && r < slab.end) load_rows<kRows>(t, slab, r, source, t.wide_x, loaded);
  share_rows(slab, strip_terms(p, slab.head, 2 * k - 2), before);
  float v[4], columns[1][4] = {};
  if constexpr (kFirst) {
    first_columns(t, slab, parts, stage, v);
  } else {
    next_columns(t, slab, k, parts, stage, v);
  }
  if (slab.keeps_columns()) store_columns(slab, v, strip_terms(p, slab.head, 2 * k - 1));
  for (; r < slab.end; r += Shape::kTeams * kRows) {
    SlabTile<kRows> x;
    make_x<kStored, kRows>(t, slab, r, loaded, x);
    const int next = r + Shape::kTeams * kRows;
    if (next < slab.end) load_rows<kRows>(t, slab, next, source, t.wide_x, loaded);
    float sums[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float u = before[r - slab.first + i];
      sums[i] = 0.0f;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        x[i][e] = fast_exp2(x[i][e] - u - v[e]);
        sums[i] += x[i][e];
      }
    }
    const float own = reduce(slab, sums, Add());
    if (slab.thread < kRows && r + slab.thread < slab.n) {
      const float u = before[r - slab.first + slab.thread];
      strip_terms(p, slab.head, 2 * k)[r + slab.thread] = own > 0.0f ? u + log2f(own) : u;
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) sums[i] = fast_reciprocal(sums[i]);
    if (k == column_steps(p)) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) x[i][e] *= sums[i];
      }
      store_rows<kRows>(slab, r, t.wide_result, x, slab_result(t, slab));
      continue;
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kRows; ++i) sum = fmaf(x[i][e], sums[i], sum);
      columns[0][e] += sum;
    }
  }
  if (k == column_steps(p)) return;
  if constexpr (kFirst) {
    put_parts<1>(t, slab, columns, reinterpret_cast<Stage<Shape>(&)[1]>(stage), {parts.of_step(k)});
  } else {
    put_parts<1>(t, slab, columns, stage, {parts.of_step(k)});
  }
}

}  // namespace

int64_t strip_full_fwd_scratch(const BalanceParams& p) {
  if (column_steps(p) == 0) return 0;
  return 3 * SlabSizes(p).part() * static_cast<int64_t>(sizeof(float));
}

void strip_full_fwd(const BalanceParams& p, void* scratch, Stream stream) {
  const Parts parts(p, scratch);
  const int steps = static_cast<int>(column_steps(p));
  with_slab_shape(p, [&](auto shape) {
    using Shape = decltype(shape);
    SlabLauncher launch(balance_strip_full_start_kernel<Shape, float>, stream);
    float* x = static_cast<float*>(p.result);
    for_each_slab_group(p, x, false, Type::kFloat32, [&](const SlabArgs& t) {
      with_strip_type(p, [&](auto type) {
        using T = decltype(type);
        p.iterations == 0 ? launch(balance_strip_full_plain_kernel<Shape, T>, t)
                          : launch(balance_strip_full_start_kernel<Shape, T>, t, parts);
      });
      with_slab_source(t, [&](auto type, auto stored) {
        using T = decltype(type);
        for (int k = 1; k <= steps; ++k) {
          k == 1
              ? launch(balance_strip_full_step_kernel<Shape, T, stored.value, true>, t, k, parts)
              : launch(balance_strip_full_step_kernel<Shape, T, stored.value, false>, t, k, parts);
        }
      });
    });
  });
}

}  // namespace sinkhorn::cuda::balance
