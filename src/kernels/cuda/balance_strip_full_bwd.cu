// Balancing 129 to 2048 blocks with full columns, with no column step, or not at all: backward.
//
// It goes through the potentials u and v that forward kept, and reads nothing but x [N, N], loaded
// again, until its last launch. As in balance_head_full.cu Q^k = exp2(x - u(k-1) - vk), whose
// columns sum to 1, and P^(k-1) = Q^k f_j, f = exp2(vk - v(k-1)), whose rows do; and Q^k = P^k h_i,
// h = exp2(uk - u(k-1)). Let u' = du / sum_j P and v' = dv / sum_i Q, in which the rounding of u
// and v is divided out.
//
//   start     loads x;  r_i = 1 / sum_j P^K,  d_i = sum_j R dR;
//             parts of dvK_j = - sum_i R (dR - d_i), and of sum_i QK_ij
//   merge     v'k_j and fk_j from the parts of all strips
//   step k    u'(k-1)_i = - sum_j v'k_j Qk_ij / sum_j Qk_ij fk_j;
//             parts of dv(k-1)_j = - sum_i u'(k-1)_i P(k-1)_ij, and of sum_i Q(k-1)_ij
//   in step 1 dx = R (dR - d_i) + sum_k Qk_ij (v'k_j + u'(k-1)_i fk_j) instead of the parts
//
// A CTA holds a strip of 8 rows of x in registers; one exponential an element, but K + 2 in step 1.
// x is kept where the result goes if that is float32, else in scratch.
#include "kernels/cuda/balance_launch.h"
#include "kernels/cuda/balance_strip.cuh"

namespace sinkhorn::cuda::balance {
namespace {

// Scratch of one group of heads.
struct FullScratch {
  float* x;                  // [heads, N, N], or null where x lies in the result
  float *sums, *ones;        // [heads, strips, N]: parts of - dv, and of sum_i Q
  float *dots, *inverses;    // [heads, N]: d and r
  float *du, *dv, *factors;  // [heads, K, N]: u' of steps 0 .. K-1, v' and f of steps 1 .. K

  FullScratch(const BalanceParams& p, void* memory) {
    const int64_t heads = strip_group(p), n = p.blocks, steps = column_steps(p);
    float* next = static_cast<float*>(memory);
    const auto take = [&](int64_t count) {
      float* from = next;
      next += count;
      return from;
    };
    x = p.logits.type == Type::kFloat32 ? nullptr : take(heads * n * n);
    sums = take(heads * strip_count(p) * n);
    ones = take(heads * strip_count(p) * n);
    dots = take(heads * n);
    inverses = take(heads * n);
    du = take(heads * steps * n);
    dv = take(heads * steps * n);
    factors = take(heads * steps * n);
    count = next - static_cast<float*>(memory);
  }
  // A step's numbers of one head; k counts from 0.
  __device__ __forceinline__ float* step(float* vectors, const StripArgs& t, int local,
                                         int64_t k) const {
    return vectors + (local * column_steps(t.a.p) + k) * t.a.p.blocks;
  }
  __device__ __forceinline__ float* rows(const StripArgs& t, const Strip& strip) const {
    const int64_t n = strip.n;
    if (x != nullptr) return x + (strip.local * n + strip.first) * n;
    return static_cast<float*>(t.a.p.result) + (strip.head * n + strip.first) * n;
  }

  int64_t count;
};

// Which elements of a thread are allowed, a bit each.
__device__ __forceinline__ unsigned allowed_bits(const Tile& x) {
  static_assert(kStripRows * kStripColumns <= 32);
  unsigned bits = 0;
#pragma unroll
  for (int i = 0; i < kStripRows; ++i) {
#pragma unroll
    for (int e = 0; e < kStripColumns; ++e) {
      if (x[i][e] != kNothing) bits |= 1u << (i * kStripColumns + e);
    }
  }
  return bits;
}

// Writes the gradient of the logits, 0 where not allowed.
template <class Shape>
__device__ __forceinline__ void store_gradient(const StripArgs& t, const Strip& strip,
                                               unsigned allowed, const Tile& g) {
  const BalanceParams& p = t.a.p;
  const float inverse = 1.0f / t.a.temperature;
#pragma unroll
  for (int i = 0; i < kStripRows; ++i) {
#pragma unroll
    for (int e = 0; e < kStripColumns; ++e) {
      const int c = strip_column<Shape>(e);
      if (i >= strip.count || c >= strip.n) continue;
      store_as(p.result, p.logits.type, (strip.head * strip.n + strip.first + i) * strip.n + c,
               (allowed >> (i * kStripColumns + e) & 1u) == 0 ? 0.0f : g[i][e] * inverse);
    }
  }
}

// Turns g, which is dR, into R (dR - d_i).
__device__ __forceinline__ void weigh_gradient(const Tile& share,
                                               const float (&inverses)[kStripRows],
                                               const float (&dots)[kStripRows], Tile& g) {
#pragma unroll
  for (int i = 0; i < kStripRows; ++i) {
#pragma unroll
    for (int e = 0; e < kStripColumns; ++e) {
      g[i][e] = share[i][e] * inverses[i] * (g[i][e] - dots[i]);
    }
  }
}

// exp2(x - v - u).
template <class Shape>
__device__ __forceinline__ void take_shares(const Tile& x, const float (&v)[kStripColumns],
                                            const float (&u)[kStripRows], Tile& to) {
#pragma unroll
  for (int i = 0; i < kStripRows; ++i) {
#pragma unroll
    for (int e = 0; e < kStripColumns; ++e) to[i][e] = fast_exp2(x[i][e] - v[e] - u[i]);
  }
}

template <class Shape, class T>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kFew)
    balance_strip_full_bwd_start_kernel(const __grid_constant__ StripArgs t,
                                        const __grid_constant__ FullScratch scratch) {
  __shared__ float shared[2][Shape::kWarps][kStripRows];
  const Strip strip(t);
  const BalanceParams& p = t.a.p;
  const int steps = static_cast<int>(column_steps(p));
  Tile x, g;
  load_strip_logits<Shape, T>(t, strip, x);
  load_strip_grad<Shape>(t, strip, x, g);
  const unsigned allowed = allowed_bits(x);
  float v[kStripColumns] = {}, u[kStripRows] = {}, inverses[kStripRows], dots[kStripRows];
  if (steps > 0) {
    load_strip_columns<Shape>(strip_terms(p, strip.head, 2 * steps - 1), strip.n, v);
    store_strip<Shape>(strip, x, strip.n, strip.n, scratch.rows(t, strip));
  }
  if (p.iterations > 0) load_strip_rows(strip, strip_terms(p, strip.head, 2 * steps), u);
#pragma unroll
  for (int i = 0; i < kStripRows; ++i) {
    inverses[i] = dots[i] = 0.0f;
#pragma unroll
    for (int e = 0; e < kStripColumns; ++e) {
      const float share = p.iterations == 0 ? expf(x[i][e]) : fast_exp2(x[i][e] - v[e] - u[i]);
      inverses[i] += share;
      dots[i] += share * g[i][e];
      x[i][e] = share;
    }
  }
  reduce_rows<Shape>(inverses, Add(), shared[0]);
  reduce_rows<Shape>(dots, Add(), shared[1]);
#pragma unroll
  for (int i = 0; i < kStripRows; ++i) {
    inverses[i] = p.iterations == 0 ? 1.0f : fast_reciprocal(inverses[i]);
    dots[i] = p.iterations == 0 ? 0.0f : dots[i] * inverses[i];
  }
  weigh_gradient(x, inverses, dots, g);
  if (steps == 0) return store_gradient<Shape>(t, strip, allowed, g);
  store_strip_rows(strip, dots, scratch.dots + static_cast<int64_t>(strip.local) * strip.n);
  store_strip_rows(strip, inverses, scratch.inverses + static_cast<int64_t>(strip.local) * strip.n);
  float before[kStripRows];
  load_strip_rows(strip, strip_terms(p, strip.head, 2 * steps - 2), before);
#pragma unroll
  for (int i = 0; i < kStripRows; ++i) before[i] = fast_exp2(u[i] - before[i]);
#pragma unroll
  for (int e = 0; e < kStripColumns; ++e) {
    float sum = 0.0f, one = 0.0f;
#pragma unroll
    for (int i = 0; i < kStripRows; ++i) {
      sum += g[i][e];
      one = fmaf(x[i][e], before[i], one);
    }
    const int c = strip_column<Shape>(e);
    if (c >= strip.n) continue;
    strip.part(t, scratch.sums)[c] = sum;
    strip.part(t, scratch.ones)[c] = one;
  }
}

// v' and f of column step k (1 .. K). 32 columns of one head a CTA; warp w takes strips w, w + 16,
// ...
__global__ void __launch_bounds__(32 * kMergeParts)
    balance_strip_full_bwd_merge_kernel(const __grid_constant__ StripArgs t, int k,
                                        const __grid_constant__ FullScratch scratch) {
  __shared__ float sums[kMergeParts][32], ones[kMergeParts][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int n = static_cast<int>(t.a.p.blocks), c = blockIdx.x * 32 + lane;
  const int local = blockIdx.y;
  float sum = 0.0f, one = 0.0f;
  if (c < n) {
    const int64_t at = static_cast<int64_t>(local) * t.strips * n + c;
#pragma unroll 4
    for (int i = warp; i < t.strips; i += kMergeParts) {
      sum += scratch.sums[at + static_cast<int64_t>(i) * n];
      one += scratch.ones[at + static_cast<int64_t>(i) * n];
    }
  }
  sums[warp][lane] = sum;
  ones[warp][lane] = one;
  __syncthreads();
  if (warp > 0 || c >= n) return;
#pragma unroll
  for (int w = 1; w < kMergeParts; ++w) {
    sum += sums[w][lane];
    one += ones[w][lane];
  }
  const int64_t head = t.first_head + local;
  const float above = k > 1 ? strip_terms(t.a.p, head, 2 * k - 3)[c] : 0.0f;
  scratch.step(scratch.dv, t, local, k - 1)[c] = -sum * reciprocal(one);
  scratch.step(scratch.factors, t, local, k - 1)[c] =
      exp2f(strip_terms(t.a.p, head, 2 * k - 1)[c] - above);
}

// The gradient of the logits on this strip, when all u' and v' are known; first_du is u' of step 0,
// which this launch has found.
template <class Shape>
__device__ __forceinline__ void put_gradient(const StripArgs& t, const Strip& strip,
                                             const FullScratch& scratch, const Tile& x,
                                             const float (&first_du)[kStripRows]) {
  const BalanceParams& p = t.a.p;
  const int steps = static_cast<int>(column_steps(p));
  const int64_t at = static_cast<int64_t>(strip.local) * strip.n;
  Tile g;
  load_strip_grad<Shape>(t, strip, x, g);
  {
    float v[kStripColumns], u[kStripRows], dots[kStripRows], inverses[kStripRows];
    load_strip_columns<Shape>(strip_terms(p, strip.head, 2 * steps - 1), strip.n, v);
    load_strip_rows(strip, strip_terms(p, strip.head, 2 * steps), u);
    load_strip_rows(strip, scratch.dots + at, dots);
    load_strip_rows(strip, scratch.inverses + at, inverses);
#pragma unroll
    for (int i = 0; i < kStripRows; ++i) {
#pragma unroll
      for (int e = 0; e < kStripColumns; ++e) {
        g[i][e] = fast_exp2(x[i][e] - v[e] - u[i]) * inverses[i] * (g[i][e] - dots[i]);
      }
    }
  }
  for (int k = steps; k >= 1; --k) {
    float v[kStripColumns], dv[kStripColumns], f[kStripColumns], u[kStripRows], du[kStripRows];
    load_strip_columns<Shape>(strip_terms(p, strip.head, 2 * k - 1), strip.n, v);
    load_strip_columns<Shape>(scratch.step(scratch.dv, t, strip.local, k - 1), strip.n, dv);
    load_strip_columns<Shape>(scratch.step(scratch.factors, t, strip.local, k - 1), strip.n, f);
    load_strip_rows(strip, strip_terms(p, strip.head, 2 * k - 2), u);
    if (k > 1) {
      load_strip_rows(strip, scratch.step(scratch.du, t, strip.local, k - 1), du);
    } else {
#pragma unroll
      for (int i = 0; i < kStripRows; ++i) du[i] = first_du[i];
    }
#pragma unroll
    for (int i = 0; i < kStripRows; ++i) {
#pragma unroll
      for (int e = 0; e < kStripColumns; ++e) {
        g[i][e] = fmaf(fast_exp2(x[i][e] - v[e] - u[i]), fmaf(du[i], f[e], dv[e]), g[i][e]);
      }
    }
  }
  store_gradient<Shape>(t, strip, allowed_bits(x), g);
}

// u' of row step k - 1, then the parts of column step k - 1, or behind step 1 the result.
template <class Shape, bool kLast>
__global__ void __launch_bounds__(Shape::kThreads, kLast ? Shape::kFew : Shape::kMany)
    balance_strip_full_bwd_step_kernel(const __grid_constant__ StripArgs t, int k,
                                       const __grid_constant__ FullScratch scratch) {
  __shared__ float shared[2][Shape::kWarps][kStripRows];
  const Strip strip(t);
  const BalanceParams& p = t.a.p;
  Tile x, q;
  float v[kStripColumns], dv[kStripColumns], f[kStripColumns], u[kStripRows];
  load_strip<Shape>(strip, scratch.rows(t, strip), strip.n, strip.n, x);
  load_strip_columns<Shape>(strip_terms(p, strip.head, 2 * k - 1), strip.n, v);
  load_strip_columns<Shape>(scratch.step(scratch.dv, t, strip.local, k - 1), strip.n, dv);
  load_strip_columns<Shape>(scratch.step(scratch.factors, t, strip.local, k - 1), strip.n, f);
  load_strip_rows(strip, strip_terms(p, strip.head, 2 * k - 2), u);
  take_shares<Shape>(x, v, u, q);
  float du[kStripRows], whole[kStripRows];
#pragma unroll
  for (int i = 0; i < kStripRows; ++i) {
    du[i] = whole[i] = 0.0f;
#pragma unroll
    for (int e = 0; e < kStripColumns; ++e) {
      du[i] = fmaf(dv[e], q[i][e], du[i]);
      whole[i] = fmaf(f[e], q[i][e], whole[i]);
    }
  }
  reduce_rows<Shape>(du, Add(), shared[0]);
  reduce_rows<Shape>(whole, Add(), shared[1]);
#pragma unroll
  for (int i = 0; i < kStripRows; ++i) du[i] *= -fast_reciprocal(whole[i]);
  if constexpr (kLast) {
    put_gradient<Shape>(t, strip, scratch, x, du);
  } else {
    store_strip_rows(strip, du, scratch.step(scratch.du, t, strip.local, k - 1));
    float rows[kStripRows];  // h
    load_strip_rows(strip, strip_terms(p, strip.head, 2 * k - 4), rows);
#pragma unroll
    for (int i = 0; i < kStripRows; ++i) rows[i] = fast_exp2(u[i] - rows[i]);
#pragma unroll
    for (int e = 0; e < kStripColumns; ++e) {
      float sum = 0.0f, one = 0.0f;
#pragma unroll
      for (int i = 0; i < kStripRows; ++i) {
        sum = fmaf(du[i], q[i][e], sum);
        one = fmaf(rows[i], q[i][e], one);
      }
      const int c = strip_column<Shape>(e);
      if (c >= strip.n) continue;
      strip.part(t, scratch.sums)[c] = f[e] * sum;
      strip.part(t, scratch.ones)[c] = f[e] * one;
    }
  }
}

}  // namespace

int64_t strip_full_bwd_scratch(const BalanceParams& p) {
  return FullScratch(p, nullptr).count * static_cast<int64_t>(sizeof(float));
}

void strip_full_bwd(const BalanceParams& p, void* scratch, Stream stream) {
  const FullScratch s(p, scratch);
  const int steps = static_cast<int>(column_steps(p));
  for_each_strip_group(p, [&](const StripArgs& t) {
    with_strip_shape(p, [&](auto shape) {
      using Shape = decltype(shape);
      with_strip_type(p, [&](auto type) {
        const auto kernel = balance_strip_full_bwd_start_kernel<Shape, decltype(type)>;
        kernel<<<t.ctas(), Shape::kThreads, 0, stream>>>(t, s);
      });
      for (int k = steps; k >= 1; --k) {
        balance_strip_full_bwd_merge_kernel<<<t.merge_grid(), 32 * kMergeParts, 0, stream>>>(t, k,
                                                                                             s);
        const auto kernel = k == 1 ? balance_strip_full_bwd_step_kernel<Shape, true>
                                   : balance_strip_full_bwd_step_kernel<Shape, false>;
        kernel<<<t.ctas(), Shape::kThreads, 0, stream>>>(t, k, s);
      }
    });
    check_launch("balance_bwd");
  });
}

}  // namespace sinkhorn::cuda::balance
