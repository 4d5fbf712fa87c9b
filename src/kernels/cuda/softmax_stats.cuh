// What forward keeps of each query's softmax, and backward reads: [B, H, softmaxes, numbers, Lq].
//
// For half types that is one number, log2 of the denominator: the only form in which backward uses
// it. float32 keeps the largest score (in powers of 2) and the sum below it, since the tensor is
// shaped alike on every device and the CPU reads those two.
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

// Of query t; stats: as stats_of gives them.
template <class T>
__device__ __forceinline__ void store_log_sum(float* stats, int queries, int t, float largest,
                                              float sum) {
  if constexpr (kStatNumbers<T> == 1) {
    stats[t] = log_sum_of(largest, sum);
  } else {
    stats[t] = largest;
    stats[queries + t] = sum;
  }
}
template <class T>
__device__ __forceinline__ float load_log_sum(const float* stats, int queries, int t) {
  if constexpr (kStatNumbers<T> == 1) {
    return stats[t];
  } else {
    return log_sum_of(stats[t], stats[queries + t]);
  }
}

}  // namespace sinkhorn::cuda
