// Running pools of few blocks and few tokens, in one launch: pooled[i] = the sum of the ranges of
// pools 0 .. i, divided by n_i.
//
// A CTA takes 4 * kWide columns of a sequence, whose range sums it holds. 32 / N warps share a
// pool; lanes 0, 4, 8, .. of a warp read one piece of a row of eight tokens, and lane l the piece l
// % 4. Then warp i adds the ranges of pools 0 .. i, each always in this order: no bit of a pool
// depends on later tokens.
#pragma once

#include "kernels/cuda/pool.cuh"

namespace sinkhorn::cuda::pool {

inline constexpr int kFewWarps = 32;  // and the most blocks
inline constexpr int kFewPieces = 4;  // lanes along a row

template <class T, int kWide>
__global__ void __launch_bounds__(32 * kFewWarps) pool_few_kernel(const __grid_constant__ Args a) {
  constexpr int kColumns = kFewPieces * kWide, kRows = 32 / kFewPieces, kLoads = 4;
  __shared__ float parts[kFewWarps][kColumns];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int blocks = static_cast<int>(a.p.blocks), each = kFewWarps / blocks;
  const int64_t batch = blockIdx.x / a.tiles;
  const int64_t tile = static_cast<int64_t>(blockIdx.x % a.tiles) * kColumns;
  const int64_t column = tile + lane % kFewPieces * kWide;
  const int pool = warp / each;
  float sum[kWide] = {};
  if (pool < blocks && column < a.p.width) {
    const int64_t first = a.begin(pool) + warp % each * kRows + lane / kFewPieces;
    const T* x =
        static_cast<const T*>(a.p.x.data) + batch * a.p.x.stride[0] + column * a.p.x.stride[3];
    add_tokens<T, kWide, kLoads>(a, batch, x, {first, a.end(pool), each * kRows}, sum);
  }
#pragma unroll
  for (int w = 0; w < kWide; ++w) {
#pragma unroll
    for (int step = kFewPieces; step < 32; step *= 2) {
      sum[w] += __shfl_xor_sync(0xFFFFFFFFu, sum[w], step);
    }
    if (lane < kFewPieces) parts[warp][lane * kWide + w] = sum[w];
  }
  __syncthreads();
  if (warp >= blocks || lane >= kColumns || tile + lane >= a.p.width) return;
  Compensated total;
  for (int i = 0; i <= warp; ++i) {
    float range = parts[i * each][lane];
    for (int part = 1; part < each; ++part) range += parts[i * each + part][lane];
    total.add(range);
  }
  const float pooled[1] = {divided(total.sum, a.divisor(batch, warp))};
  store_pooled<T>(a.p.pooled, (batch * blocks + warp) * a.p.width + tile + lane, pooled);
}

}  // namespace sinkhorn::cuda::pool
