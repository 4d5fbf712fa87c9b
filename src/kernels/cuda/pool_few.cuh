// Running pools of few blocks and few tokens, in one launch: pooled[i] = the sum of the ranges of
// pools 0 .. i, divided by n_i.
//
// A CTA takes kFewPieces * kWide columns of a sequence, whose range sums it holds. 32 / N warps
// share a pool; lane l of a warp reads piece l % kFewPieces of a row, and the lanes of a piece one
// token each. Then warp i adds the ranges of pools 0 .. i, each always in this order: no bit of a
// pool depends on later tokens.
#pragma once

#include "kernels/cuda/early.cuh"
#include "kernels/cuda/pool.cuh"

namespace sinkhorn::cuda::pool {

inline constexpr int kFewWarps = 32;  // and the most blocks

// Lanes along a row: two words of 16 bytes are as much as memory hands out at once.
template <int kWide>
inline constexpr int kFewPieces = kWide == 1 ? 4 : 2;

// Adds up the sums of all lanes of a piece. While a lane has several columns it hands half of them
// to another, so that each shuffle adds as many numbers as there are lanes; in the end it holds the
// total of column `at` of its piece, and writes it to the piece's columns `to`, once.
template <int kWide>
__device__ __forceinline__ void add_lanes(float (&sum)[kWide], int lane, float* to) {
  int at = 0;
  bool writes = true;
#pragma unroll
  for (int step = 16, half = kWide / 2; step >= kFewPieces<kWide>; step /= 2, half /= 2) {
    const bool upper = (lane & step) != 0;
    if (half == 0) {  // one column left
      sum[0] += __shfl_xor_sync(0xFFFFFFFFu, sum[0], step);
      writes = writes && !upper;
      continue;
    }
#pragma unroll
    for (int w = 0; w < half; ++w) {
      const float kept = upper ? sum[w + half] : sum[w], given = upper ? sum[w] : sum[w + half];
      sum[w] = kept + __shfl_xor_sync(0xFFFFFFFFu, given, step);
    }
    at += upper ? half : 0;
  }
  if (writes) to[at] = sum[0];
}

template <class T, int kWide>
__global__ void __launch_bounds__(32 * kFewWarps) pool_few_kernel(const __grid_constant__ Args a) {
  begin_early();
  constexpr int kPieces = kFewPieces<kWide>, kColumns = kPieces * kWide;
  constexpr int kRows = 32 / kPieces, kLoads = 4;
  __shared__ float parts[kFewWarps][kColumns], ranges[kFewWarps][kColumns];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, piece = lane % kPieces;
  const int blocks = static_cast<int>(a.p.blocks), each = kFewWarps / blocks;
  const int64_t batch = blockIdx.x / a.tiles;
  const int64_t tile = static_cast<int64_t>(blockIdx.x % a.tiles) * kColumns;
  const int64_t column = tile + piece * kWide;
  const int pool = warp / each;
  float sum[kWide] = {};
  if (pool < blocks && column < a.p.width) {
    const int64_t first = a.begin(pool) + warp % each * kRows + lane / kPieces;
    const T* x =
        static_cast<const T*>(a.p.x.data) + batch * a.p.x.stride[0] + column * a.p.x.stride[3];
    add_tokens<T, kWide, kLoads>(a, batch, x, {first, a.end(pool), each * kRows}, sum);
  }
  add_lanes(sum, lane, parts[warp] + piece * kWide);
  __syncthreads();
  if (warp < blocks && lane < kColumns) {
    float range = parts[warp * each][lane];
#pragma unroll 4
    for (int part = 1; part < each; ++part) range += parts[warp * each + part][lane];
    ranges[warp][lane] = range;
  }
  __syncthreads();
  if (warp >= blocks || lane >= kColumns || tile + lane >= a.p.width) return;
  Compensated total;
#pragma unroll 4
  for (int i = 0; i <= warp; ++i) total.add(ranges[i][lane]);
  const float pooled[1] = {divided(total.sum, a.divisor(batch, warp))};
  store_pooled<T>(a.p.pooled, (batch * blocks + warp) * a.p.width + tile + lane, pooled);
}

}  // namespace sinkhorn::cuda::pool
