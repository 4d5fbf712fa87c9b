// Backward of the residual sum, dropout and layer norm, in one pass over the rows.
//
// With n = (s - mean) rstd, g = dy weight, and dS the gradient that reaches s beside the norm's:
//   dx     = rstd (g - mean_E(g) - n mean_E(g n)) + dS
//   dpart  = dropout(dx), the forward's own draw
//   dweight = sum over rows of dy n,  dbias = sum over rows of dy
//   dy, dpart [rows, E] T; s, dS, dx [rows, E] float32
//
// Rows lie on warps as in forward. The grid is fixed, each warp takes every so many rows and keeps
// its share of dweight and dbias in registers; blocks add their warps' shares in order and leave
// them in partial [2, blocks, E], which column_sum.cuh sums. Nothing depends on who comes first.
#pragma once

#include "kernels/cuda/norm_fwd.cuh"

namespace sinkhorn::cuda {

// A block's sums over its warps, one [E] row of `to`. All threads call it.
template <int kWarps, int kChunks>
__device__ __forceinline__ void store_column_sums(const float (&sums)[kChunks][4], int chunks,
                                                  float* to) {
  if constexpr (kWarps == kNormThreads / 32) {  // every column is one thread's
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const int chunk = static_cast<int>(threadIdx.x) + i * kNormThreads;
      if (chunk < chunks) store_pack<4>(to + 4 * chunk, sums[i]);
    }
  } else {
    static_assert(kWarps == 1);
    constexpr int kRows = kNormThreads / 32;
    __shared__ float shared[kRows][32 * kChunks][4];
    __syncthreads();  // what the last call left has been read
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      float(&slot)[4] = shared[threadIdx.x / 32][threadIdx.x % 32 + 32 * i];
#pragma unroll
      for (int k = 0; k < 4; ++k) slot[k] = sums[i][k];
    }
    __syncthreads();
    for (int chunk = static_cast<int>(threadIdx.x); chunk < chunks; chunk += kNormThreads) {
      float total[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int k = 0; k < 4; ++k) total[k] += shared[r][chunk][k];
      }
      store_pack<4>(to + 4 * chunk, total);
    }
  }
}

template <class T, int kWarps, int kChunks>
__global__ void __launch_bounds__(kNormThreads, kChunks <= 4 ? 4 : 2)
    norm_bwd_kernel(const __grid_constant__ NormParams p) {
  begin_early();
  constexpr int kLanes = 32 * kWarps, kRows = kNormThreads / kLanes;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int64_t step = int64_t{gridDim.x} * kRows;
  const int chunks = static_cast<int>(p.width / 4);
  const float share = 1.0f / static_cast<float>(p.width);
  const ElementDropout dropout(p.dropout, p.rng);
  const T* grad_normed = static_cast<const T*>(p.grad_normed);

  float weight_sum[kChunks][4] = {}, bias_sum[kChunks][4] = {};
  // A warp leaves the loop with its last row; where warps share rows, all leave together.
  for (int64_t row = int64_t{blockIdx.x} * kRows + threadIdx.x / kLanes; row < p.rows;
       row += step) {
    const float mean = p.mean[row], rstd = p.rstd[row];
    // All loads at once: no branch between (a chunk behind the row reads the last again).
    float g[kChunks][4], n[kChunks][4];
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const int64_t at = row * p.width + 4 * min(lane + i * kLanes, chunks - 1);
      load_pack<4>(grad_normed + at, g[i]);
      load_pack<4>(p.sum + at, n[i]);
    }
    float g_sum = 0.0f, gn_sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const int chunk = lane + i * kLanes;
      float weight[4];
      load_pack<4>(p.weight + 4 * min(chunk, chunks - 1), weight);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (chunk >= chunks) g[i][k] = 0.0f;
        n[i][k] = (n[i][k] - mean) * rstd;
        weight_sum[i][k] += g[i][k] * n[i][k];
        bias_sum[i][k] += g[i][k];
        g[i][k] *= weight[k];
        g_sum += g[i][k];
        gn_sum += g[i][k] * n[i][k];
      }
    }
    g_sum = row_sum<kWarps>(g_sum) * share;
    gn_sum = row_sum<kWarps>(gn_sum) * share;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
#pragma unroll
      for (int k = 0; k < 4; ++k) g[i][k] = rstd * (g[i][k] - g_sum - n[i][k] * gn_sum);
    }
    if (p.grad_sum != nullptr) {
      float carried[kChunks][4];
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        const int64_t at = row * p.width + 4 * min(lane + i * kLanes, chunks - 1);
        load_pack<4>(p.grad_sum + at, carried[i]);
      }
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
#pragma unroll
        for (int k = 0; k < 4; ++k) g[i][k] += carried[i][k];
      }
    }
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const int chunk = lane + i * kLanes;
      if (chunk >= chunks) continue;
      const int64_t at = row * p.width + 4 * chunk;
      store_pack<4>(p.grad_x + at, g[i]);
      if (p.grad_part == nullptr) continue;
      dropout.apply(at, g[i]);
      store_pack<4>(static_cast<T*>(p.grad_part) + at, g[i]);
    }
  }
  float* weights = p.partial + blockIdx.x * p.width;
  store_column_sums<kWarps, kChunks>(weight_sum, chunks, weights);
  store_column_sums<kWarps, kChunks>(bias_sum, chunks, weights + gridDim.x * p.width);
}

// dpart = dropout(dS), four elements a thread.
template <class T>
__global__ void __launch_bounds__(256) residual_bwd_kernel(const __grid_constant__ NormParams p) {
  const int64_t at = 4 * (int64_t{blockIdx.x} * 256 + threadIdx.x);
  if (at >= p.rows * p.width) return;
  float grad[4];
  load_pack<4>(p.grad_sum + at, grad);
  ElementDropout(p.dropout, p.rng).apply(at, grad);
  store_pack<4>(static_cast<T*>(p.grad_part) + at, grad);
}

}  // namespace sinkhorn::cuda
