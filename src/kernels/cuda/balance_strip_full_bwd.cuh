// Backward of 129 to 2048 blocks with full columns: what its launches share. The equations are in
// balance_strip_full_bwd.cu.
#pragma once

#include "kernels/cuda/balance_strip_full_sums.cuh"

namespace sinkhorn::cuda::balance {

inline constexpr int kTall = kStripRows, kShort = 4;  // rows of a strip

// The step whose Q stands in for Qk in step 1: m of k.
inline constexpr int kAnchored = 5;
__host__ __device__ constexpr int anchor(int k) { return k - (k - 1) % kAnchored; }

// Scratch of one group of heads.
struct FullScratch {
  float* x;                              // [heads, N, N], or null
  float *sums[2], *ones[2];              // [heads, slabs, columns]: parts of step k at k % 2
  float *dots, *inverses;                // [heads, columns]: d and r
  float *rows, *row_grads;               // [heads, K, columns]: a and a u'(k-1) of step k
  float *column_factors, *column_grads;  // b f and b v'

  FullScratch(const BalanceParams& p, void* memory) {
    const SlabSizes sizes(p);
    const int64_t vectors = sizes.heads * sizes.columns;
    float* next = static_cast<float*>(memory);
    const auto take = [&](int64_t numbers) {
      float* from = next;
      next += numbers;
      return from;
    };
    for (int i = 0; i < 2; ++i) {
      sums[i] = take(sizes.part());
      ones[i] = take(sizes.part());
    }
    dots = take(vectors);
    inverses = take(vectors);
    for (float** kept : {&rows, &row_grads, &column_factors, &column_grads}) {
      *kept = take(vectors * column_steps(p));
    }
    x = nullptr;
    if (stores_x(p) && p.logits.type != Type::kFloat32) {
      x = take(sizes.heads * p.blocks * p.blocks);
    }
    count = next - static_cast<float*>(memory);
  }
  template <class Shape>
  __device__ __forceinline__ float* vector(float* vectors, const Slab<Shape>& slab) const {
    return vectors + static_cast<int64_t>(slab.local) * Shape::kColumns;
  }
  template <class Shape>
  __device__ __forceinline__ float* step(float* vectors, const SlabArgs& t, const Slab<Shape>& slab,
                                         int k) const {
    return vectors + (slab.local * column_steps(t.a.p) + k - 1) * Shape::kColumns;
  }

  int64_t count;
};

template <class T, class Shape>
__device__ __forceinline__ void store_gradient_as(const SlabArgs& t, const Slab<Shape>& slab, int r,
                                                  const SlabTile<kShort>& g) {
  T* to = static_cast<T*>(t.a.p.result) + (slab.head * slab.n + r) * slab.n + slab.column;
#pragma unroll
  for (int i = 0; i < kShort; ++i) {
    if (r + i >= slab.n) continue;
    Four<T> row;
#pragma unroll
    for (int e = 0; e < 4; ++e) row.x[e] = static_cast<T>(g[i][e]);
    if (t.wide_result) {
      if (slab.column < slab.n) *reinterpret_cast<Four<T>*>(to) = row;
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (slab.column + e < slab.n) to[e] = row.x[e];
      }
    }
    to += slab.n;
  }
}

// Where x is -inf, a bit each.
__device__ __forceinline__ unsigned nothing_bits(const SlabTile<kShort>& x) {
  unsigned bits = 0;
#pragma unroll
  for (int i = 0; i < kShort; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) bits |= x[i][e] == kNothing ? 1u << (4 * i + e) : 0u;
  }
  return bits;
}

// Writes the gradient of the logits, 0 where there is nothing.
template <class Shape>
__device__ __forceinline__ void store_gradient(const SlabArgs& t, const Slab<Shape>& slab, int r,
                                               unsigned nothing, SlabTile<kShort>& g) {
  const float inverse = 1.0f / t.a.temperature;
#pragma unroll
  for (int i = 0; i < kShort; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      g[i][e] = (nothing >> (4 * i + e) & 1u) != 0 ? 0.0f : g[i][e] * inverse;
    }
  }
  switch (t.a.p.logits.type) {
    case Type::kBFloat16: return store_gradient_as<__nv_bfloat16>(t, slab, r, g);
    case Type::kFloat16: return store_gradient_as<__half>(t, slab, r, g);
    default: store_gradient_as<float>(t, slab, r, g);
  }
}

// v' and f of step k, from its parts. All threads of the CTA call this.
template <class Shape>
__device__ __forceinline__ void take_columns(const SlabArgs& t, const Slab<Shape>& slab, int k,
                                             const FullScratch& scratch, Stage<Shape> (&stage)[2],
                                             const float (&v)[4], float (&dv)[4], float (&f)[4]) {
  float sums[2][4], above[4] = {};
  if (k > 1) load_columns(slab, strip_terms(t.a.p, slab.head, 2 * k - 3), above);
  add_parts<2>(t, slab, {scratch.sums[k % 2], scratch.ones[k % 2]}, stage, sums);
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    dv[e] = -sums[0][e] * reciprocal(sums[1][e]);
    f[e] = exp2f(v[e] - above[e]);
  }
}

// Qk of a strip, of which x is given and which begins with row `at` of the slab; and u'(k-1), which
// lane i returns for row i.
template <int kRows, class Shape>
__device__ __forceinline__ float take_rows(const Slab<Shape>& slab, int at, const float (&v)[4],
                                           const float (&dv)[4], const float (&f)[4],
                                           const float (&u)[Shape::kRows],
                                           TeamReducer<Shape, 2 * kRows>& reduce,
                                           const SlabTile<kRows>& x, SlabTile<kRows>& q,
                                           float (&du)[kRows]) {
  float sums[2 * kRows] = {};
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const float before = u[at + i];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      q[i][e] = fast_exp2(x[i][e] - before - v[e]);
      sums[i] = fmaf(dv[e], q[i][e], sums[i]);
      sums[kRows + i] = fmaf(f[e], q[i][e], sums[kRows + i]);
    }
  }
  const float own = reduce(slab, sums, Add());
#pragma unroll
  for (int i = 0; i < kRows; ++i) du[i] = -sums[i] * fast_reciprocal(sums[kRows + i]);
  return -own * fast_reciprocal(__shfl_down_sync(0xFFFFFFFFu, own, kRows));
}

// Step 1, and the gradient.
void launch_full_bwd_last(SlabLauncher& launch, const SlabArgs& t, const FullScratch& scratch);

}  // namespace sinkhorn::cuda::balance
