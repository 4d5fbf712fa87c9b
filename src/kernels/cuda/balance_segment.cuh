// Prefix and prior columns where a thread holds rows on end of a column, a segment of it: what the
// forms that keep a head's matrix on one chip share. The equations are in balance_head_causal.cu.
#pragma once

#include "kernels/cuda/balance_common.cuh"

namespace sinkhorn::cuda::balance {

// The u of step k that a causal forward keeps for backward: N numbers.
__device__ __forceinline__ float* causal_terms(const BalanceParams& p, int64_t head, int64_t k) {
  return static_cast<float*>(p.terms) + (head * (p.iterations + 1) + k) * p.blocks;
}

// What a segment adds to the rows below. Of prior columns the sum alone counts, relative to
// nothing.
template <bool kPrefix, int kRows>
__device__ __forceinline__ LogSum segment_total(const float (&x)[kRows]) {
  LogSum s;
  if constexpr (kPrefix) {
    s.add(x);
  } else {
#pragma unroll
    for (int e = 0; e < kRows; ++e) s.sum += exp2f(x[e]);
  }
  return s;
}
// x^(k-1) becomes z^k, given the sum of the rows above.
template <bool kPrefix, int kRows>
__device__ __forceinline__ void step_columns(float (&x)[kRows], LogSum s) {
#pragma unroll
  for (int e = 0; e < kRows; ++e) {
    if constexpr (kPrefix) {
      s.add(x[e]);
      if (x[e] != kNothing) x[e] = (x[e] - s.top) - log2f(s.sum);
    } else {
      const float own = exp2f(x[e]);
      x[e] -= log2f(1.0f + s.sum);
      s.sum += own;
    }
  }
}
// The same undone for one allowed element, z^k and x^(k-1), with the running W of the rows below; g
// is changed if kApply.
template <bool kPrefix, bool kApply>
__device__ __forceinline__ void undo_column(float z, float x, float& g, Suffix& s) {
  const float before = g;
  if constexpr (kPrefix) {
    s.add(before, x - z);
    if constexpr (kApply) g = before - exp2f(z) * s.weight;
  } else {
    if constexpr (kApply) g = before - exp2f(x) * s.weight;
    s.weight += before * exp2f(z - x);
  }
}
// Adds the total of a whole segment below.
template <bool kPrefix>
__device__ __forceinline__ void add_segment(Suffix& s, const Suffix& total) {
  if constexpr (kPrefix) {
    if (!total.empty()) s.add(total.weight, total.level);
  } else {
    s.weight += total.weight;
  }
}

}  // namespace sinkhorn::cuda::balance
