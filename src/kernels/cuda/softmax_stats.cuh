// What forward keeps of each query's softmax, and backward reads: [B, H, softmaxes, numbers, Lq].
//
// For half types that is one number, log2 of the denominator: the only form in which backward uses
// it. float32 keeps the largest score (in powers of 2) and the sum below it, since the tensor is
// shaped alike on every device and the CPU reads those two.
//
// Beside it stands whether the query sees the positions sorted into its block, which it does not
// where the row of the sort is all zeros: in the lowest bit of the logarithm, or in float32 the
// sign of the sum. Backward then asks nothing else about it. In sortcut, where a query sees several
// rows, it says nothing.
#pragma once

#include "kernels/cuda/attention.h"

namespace sinkhorn::cuda {

template <class T>
constexpr int kStatNumbers = sizeof(T) == 2 ? 1 : 2;

// log2 of a query's denominator, +inf where it sees nothing.
__device__ __forceinline__ float log_sum_of(float largest, float sum) {
  return sum == 0.0f ? INFINITY : largest + log2f(sum);
}

// Where the numbers of one softmax of one head begin; softmax: its number among all.
template <class T>
__device__ __forceinline__ float* stats_of(const AttentionCall& p, int64_t softmax) {
  return p.stats + softmax * kStatNumbers<T> * p.queries;
}

constexpr uint32_t kSign = 1u << 31;  // of a float32

// Of query t; stats: as stats_of gives them.
template <class T>
__device__ __forceinline__ void store_log_sum(float* stats, int queries, int t, float largest,
                                              float sum, bool sees_sorted = true) {
  if constexpr (kStatNumbers<T> == 1) {
    const float x = log_sum_of(largest, sum);
    const uint32_t bits = __float_as_uint(x);
    const uint32_t mark = fabsf(x) < INFINITY ? 1u : 0u;  // +inf is to stay what it is
    stats[t] = __uint_as_float(sees_sorted ? bits & ~1u : bits | mark);
  } else {
    stats[t] = largest;
    stats[queries + t] = __uint_as_float(__float_as_uint(sum) | (sees_sorted ? 0u : kSign));
  }
}
template <class T>
__device__ __forceinline__ float load_log_sum(const float* stats, int queries, int t) {
  if constexpr (kStatNumbers<T> == 1) {
    return stats[t];
  } else {
    return log_sum_of(stats[t], fabsf(stats[queries + t]));
  }
}

// Whether the query of a half type's log-sum sees sorted positions; and the log-sum for those,
// beside which their shares are 0 if not.
__device__ __forceinline__ bool sees_sorted(float log_sum) {
  return (__float_as_uint(log_sum) & 1u) == 0;
}
__device__ __forceinline__ float sorted_log_sum(float log_sum) {
  return sees_sorted(log_sum) ? log_sum : INFINITY;
}
// Of query t, for any type.
template <class T>
__device__ __forceinline__ bool sees_sorted(const float* stats, int queries, int t) {
  if constexpr (kStatNumbers<T> == 1) {
    return sees_sorted(stats[t]);
  } else {
    return (__float_as_uint(stats[queries + t]) & kSign) == 0;
  }
}

}  // namespace sinkhorn::cuda
