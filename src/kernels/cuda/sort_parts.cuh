// What the kernels for few blocks and for few rows share: where columns stand among tokens, the
// weights of rows, and sums over the lanes of a warp.
#pragma once

#include "kernels/cuda/sort.cuh"

namespace sinkhorn::cuda {

// Where the columns of a piece, c and on, of block j stand among the tokens of a head.
struct ColumnPlace {
  int offset, d;  // token within the block, column of it
  bool exists;
  __device__ __forceinline__ ColumnPlace(const AttentionCall& p, int c)
      : offset(c / p.width), d(c - offset * p.width), exists(c < p.block * p.width) {}
};

__device__ __forceinline__ bool token_there(const AttentionCall& p, const uint8_t* real, int j,
                                            const ColumnPlace& place) {
  const int t = j * p.block + place.offset;
  return place.exists && j < p.blocks && t < p.length && (real == nullptr || real[t] != 0);
}

// Makes the weight of row i, of which kSharers neighbouring lanes hold a part each. By all lanes;
// found: whether this one's part is not all zeros.
template <int kSharers>
__device__ __forceinline__ void weigh_row(const AttentionCall& p, float* weights, int i,
                                          bool found) {
  const unsigned all = __ballot_sync(0xFFFFFFFFu, found) >> (threadIdx.x % 32);
  if (threadIdx.x % kSharers != 0 || i >= p.rows) return;
  weights[i * 2] = row_weight(p, i, (all & ((1u << kSharers) - 1)) != 0);
}

// Sums over the lanes of kCount numbers (a power of 2) at once: lane l is left with number
// l / (32 / kCount), in x[0], or of more than 32 with as many from l * (kCount / 32) on.
template <int kCount, int kDistance = 16, int kSize>
__device__ __forceinline__ void scatter_sums(float (&x)[kSize], int lane) {
  constexpr int kHalf = kCount / 2;
  if constexpr (kHalf == 0) {
    x[0] += __shfl_xor_sync(0xFFFFFFFFu, x[0], kDistance);
  } else {
    const bool upper = (lane & kDistance) != 0;
#pragma unroll
    for (int v = 0; v < kHalf; ++v) {
      const float low = x[v], high = x[v + kHalf];
      x[v] = (upper ? high : low) + __shfl_xor_sync(0xFFFFFFFFu, upper ? low : high, kDistance);
    }
  }
  if constexpr (kDistance > 1) scatter_sums<kHalf, kDistance / 2>(x, lane);
}

}  // namespace sinkhorn::cuda
