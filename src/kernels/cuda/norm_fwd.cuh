// Residual sum, dropout and layer norm in one pass over the rows.
//
//   s = x + dropout(part),  mean = sum(s) / E,  rstd = 1 / sqrt(sum((s - mean)^2) / E + epsilon)
//   y = (s - mean) rstd weight + bias
//   x, s [rows, E] float32; part, y [rows, E] T; mean, rstd [rows]; weight, bias [E] float32
//
// A row belongs to kWarps warps of a block of four, and is held in registers between its two sums:
// a lane has kChunks times four neighbours, so that x is loaded 16 bytes at a time. Dropout is a
// function of an element's number (lanes.cuh). Backward reads s, mean and rstd, draws the dropout
// again and keeps nothing else.
#pragma once

#include "kernels/cuda/early.cuh"
#include "kernels/cuda/lanes.cuh"
#include "kernels/cuda/norm.h"

namespace sinkhorn::cuda {

constexpr int kNormThreads = 128;

// The sum over the warps of a row. Where several share a row, all threads of the block call it.
template <int kWarps>
__device__ __forceinline__ float row_sum(float x) {
  x = warp_sum(x);
  if constexpr (kWarps > 1) {
    __shared__ float sums[kWarps];
    __syncthreads();  // what the last sum left has been read
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
    __syncthreads();
    x = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) x += sums[w];
  }
  return x;
}

template <class T, int kWarps, int kChunks>
__global__ void __launch_bounds__(kNormThreads)
    norm_fwd_kernel(const __grid_constant__ NormParams p) {
  begin_early();
  constexpr int kLanes = 32 * kWarps, kRows = kNormThreads / kLanes;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int64_t row = int64_t{blockIdx.x} * kRows + threadIdx.x / kLanes;
  if (row >= p.rows) return;  // whole warps, and with several to a row never: the grid is exact
  const int chunks = static_cast<int>(p.width / 4);
  const float share = 1.0f / static_cast<float>(p.width);
  const ElementDropout dropout(p.dropout, p.rng);
  const T* part = static_cast<const T*>(p.part);

  // All loads at once: no branch (a chunk behind the row reads the last again) and no store
  // between.
  float s[kChunks][4], add[kChunks][4] = {};
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    load_pack<4>(p.x + row * p.width + 4 * min(lane + i * kLanes, chunks - 1), s[i]);
  }
  if (part != nullptr) {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      load_pack<4>(part + row * p.width + 4 * min(lane + i * kLanes, chunks - 1), add[i]);
    }
  }
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const int chunk = lane + i * kLanes;
    if (chunk >= chunks) continue;
    if (part != nullptr) {
      const int64_t at = row * p.width + 4 * chunk;
      dropout.apply(at, add[i]);
#pragma unroll
      for (int k = 0; k < 4; ++k) s[i][k] += add[i][k];
      store_pack<4>(p.sum + at, s[i]);
    }
    total += (s[i][0] + s[i][1]) + (s[i][2] + s[i][3]);
  }
  const float mean = row_sum<kWarps>(total) * share;
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    if (lane + i * kLanes >= chunks) continue;
#pragma unroll
    for (int k = 0; k < 4; ++k) squares += (s[i][k] - mean) * (s[i][k] - mean);
  }
  const float rstd = rsqrtf(row_sum<kWarps>(squares) * share + p.epsilon);
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    float weight[4], bias[4];
    load_pack<4>(p.weight + 4 * min(lane + i * kLanes, chunks - 1), weight);
    load_pack<4>(p.bias + 4 * min(lane + i * kLanes, chunks - 1), bias);
#pragma unroll
    for (int k = 0; k < 4; ++k) s[i][k] = (s[i][k] - mean) * rstd * weight[k] + bias[k];
  }
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const int chunk = lane + i * kLanes;
    if (chunk < chunks) {
      store_pack<4>(static_cast<T*>(p.normed) + row * p.width + 4 * chunk, s[i]);
    }
  }
  if (lane == 0) {
    p.mean[row] = mean;
    p.rstd[row] = rstd;
  }
}

// s = x + dropout(part), four elements a thread.
template <class T>
__global__ void __launch_bounds__(256) residual_fwd_kernel(const __grid_constant__ NormParams p) {
  const int64_t at = 4 * (int64_t{blockIdx.x} * 256 + threadIdx.x);
  if (at >= p.rows * p.width) return;
  float s[4], add[4];
  load_pack<4>(p.x + at, s);
  load_pack<4>(static_cast<const T*>(p.part) + at, add);
  ElementDropout(p.dropout, p.rng).apply(at, add);
#pragma unroll
  for (int k = 0; k < 4; ++k) s[k] += add[k];
  store_pack<4>(p.sum + at, s);
}

}  // namespace sinkhorn::cuda
