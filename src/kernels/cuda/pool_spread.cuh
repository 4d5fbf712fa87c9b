// The backward of pool: each token gets what the pools that hold it hand on of their gradients. Two
// pools of the same tokens may be spread at once, and added to a gradient that the tokens have
// already.
//
// Mapping: as for sums of ranges (pool.cuh), `share` warps to a block and 32 * kWide columns.
// Running sums from the end come from a launch before; of few blocks each CTA adds up its own, a
// thread to a column, in the same order.
#pragma once

#include "kernels/cuda/pool.cuh"

namespace sinkhorn::cuda::pool {

inline constexpr int64_t kFewSpread = 16;  // blocks whose running sums each CTA adds up itself

// One or two pools of the same tokens, whose gradients are spread in one pass.
struct Spread {
  Args pools[2];
  int count;
  View onto;  // [B, 1, L, E]: what they are added to; no data for nothing
};

// What the first token of each of a CTA's blocks gets, and what the others get.
template <int kWide>
struct SpreadSums {
  static constexpr int kColumns = 32 * kWide;
  float first[kWarps][kColumns], rest[kWarps][kColumns];
};

// The running sums of the pools that are `few`. All threads call this; the sums are whole when it
// returns.
template <class T, int kWide>
__device__ __forceinline__ void sum_few(const Spread& s, const Place<kWide>& at,
                                        SpreadSums<kWide>& sums) {
  constexpr int kColumns = SpreadSums<kWide>::kColumns;
  const int share = s.pools[0].share;
  const int64_t blocks = s.pools[0].p.blocks, width = s.pools[0].p.width;
  const int64_t pool = at.pool - at.warp / share, column = at.column - at.lane * kWide;
  for (int index = threadIdx.x; index < kWarps / share * kColumns; index += 32 * kWarps) {
    const int local = index / kColumns, c = index % kColumns;
    const int64_t own = pool + local;
    float first = 0.0f, rest = 0.0f;
    for (int k = 0; k < s.count && own < blocks && column + c < width; ++k) {
      if (!s.pools[k].few) continue;
      Compensated sum;
#pragma unroll 4
      for (int i = static_cast<int>(blocks) - 1; i > own; --i) {
        sum.add(pool_gradient<T>(s.pools[k], at.batch, i, column + c));
      }
      rest += sum.sum;
      sum.add(pool_gradient<T>(s.pools[k], at.batch, own, column + c));
      first += sum.sum;
    }
    sums.first[local][c] = first;
    sums.rest[local][c] = rest;
  }
  __syncthreads();
}

// Adds to `to` what every token of pool i gets of its gradient; pool N stands for the tokens in no
// causal pool.
template <class T, int kWide>
__device__ __forceinline__ void add_pool_gradient(const Args& a, const Place<kWide>& at, int64_t i,
                                                  float (&to)[kWide]) {
  if (a.few || i >= a.p.blocks) return;
  if (a.running) {
    Wide<float, kWide> sum;
    sum.load(a.sums + (at.batch * a.p.blocks + i) * a.p.width + at.column);
#pragma unroll
    for (int w = 0; w < kWide; ++w) to[w] += sum.get(w);
    return;
  }
#pragma unroll
  for (int w = 0; w < kWide; ++w) to[w] += pool_gradient<T>(a, at.batch, i, at.column + w);
}

// Each token's gradient from its pools'. The tokens of block i lie in pool i; under a causal rule
// only the first of them does, and the others in pool i + 1.
template <class T, int kWide>
__global__ void __launch_bounds__(32 * kWarps, 2)
    pool_spread_kernel(const __grid_constant__ Spread s) {
  __shared__ SpreadSums<kWide> sums;
  const Args& a = s.pools[0];
  const Place<kWide> at(a, a.p.blocks);
  const bool few = a.few || (s.count > 1 && s.pools[1].few);
  if (few) sum_few<T>(s, at, sums);
  if (!at.inside) return;
  float first[kWide] = {}, rest[kWide] = {};
  if (few) {
#pragma unroll
    for (int w = 0; w < kWide; ++w) {
      first[w] = sums.first[at.warp / a.share][at.lane * kWide + w];
      rest[w] = sums.rest[at.warp / a.share][at.lane * kWide + w];
    }
  }
  for (int k = 0; k < s.count; ++k) {
    add_pool_gradient<T>(s.pools[k], at, at.pool, first);
    add_pool_gradient<T>(s.pools[k], at, at.pool + s.pools[k].p.causal, rest);
  }
  const T* onto = static_cast<const T*>(s.onto.data);
  if (onto != nullptr) onto += at.batch * s.onto.stride[0] + at.column;
  T* dx = static_cast<T*>(a.p.x.data) + at.batch * a.p.x.stride[0] + at.column;
  const int64_t begin = at.pool * a.p.block;
  const int64_t end = begin + a.p.block < a.p.length ? begin + a.p.block : a.p.length;
  for (int64_t t = begin + at.part; t < end; t += a.share * kAhead) {
    Wide<T, kWide> own[kAhead];
#pragma unroll
    for (int q = 0; q < kAhead; ++q) {
      const int64_t token = t + q * a.share;
      own[q].fill(0.0f);
      if (onto != nullptr && token < end) own[q].load(onto + token * s.onto.stride[2]);
    }
#pragma unroll
    for (int q = 0; q < kAhead; ++q) {
      const int64_t token = t + q * a.share;
      if (token >= end) break;
      if (a.real(at.batch, token)) {
#pragma unroll
        for (int w = 0; w < kWide; ++w) {
          own[q].set(w, own[q].get(w) + (token == begin ? first[w] : rest[w]));
        }
      }
      own[q].store(dx + token * a.p.x.stride[2]);
    }
  }
}

}  // namespace sinkhorn::cuda::pool
