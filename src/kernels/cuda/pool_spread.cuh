// The backward of pool: each token gets what the pools that hold it hand on of their gradients. Two
// pools of the same tokens may be spread at once, and added to a gradient that the tokens have
// already.
//
// Mapping: as for sums of ranges (pool.cuh), `share` warps to a block and 32 * kWide columns.
// Running sums from the end come from a launch before; of few blocks each CTA adds up its own, a
// thread to a column, in the same order.
#pragma once

#include "kernels/cuda/early.cuh"
#include "kernels/cuda/pool.cuh"

namespace sinkhorn::cuda::pool {

inline constexpr int kFewSpread = 16;  // blocks whose running sums each CTA adds up itself

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
  float divisors[2][kFewSpread];  // of all blocks: worth making once, not in each thread
};

// The same for one column.
struct ColumnSums {
  float first = 0.0f, rest = 0.0f;
};

// Adds the running sum of a column, from the last pool to those behind block `own`, to to.rest, and
// with that block's to to.first. Loads come before the sums that wait for them.
template <class T>
__device__ __forceinline__ void run_down(const Args& a, const float* divisors, int64_t batch,
                                         int own, int64_t column, ColumnSums& to) {
  Compensated sum;
  for (int last = static_cast<int>(a.p.blocks) - 1; last >= own; last -= kAhead) {
    float term[kAhead];
#pragma unroll
    for (int q = 0; q < kAhead; ++q) {
      term[q] = pooled_gradient<T>(a, batch, max(last - q, own), column);
    }
#pragma unroll
    for (int q = 0; q < kAhead; ++q) {
      const int i = last - q;
      if (i < own) break;
      if (i == own) to.rest += sum.sum;
      sum.add(divided(term[q], divisors[i]));
    }
  }
  to.first += sum.sum;
}

// The running sums of the pools that are `few`. All threads call this; the sums are whole when it
// returns.
template <class T, int kWide>
__device__ __forceinline__ void sum_few(const Spread& s, const Place<kWide>& at,
                                        SpreadSums<kWide>& sums) {
  constexpr int kColumns = SpreadSums<kWide>::kColumns;
  const int share = s.pools[0].share;
  const int64_t blocks = s.pools[0].p.blocks, width = s.pools[0].p.width;
  const int64_t pool = at.pool - at.warp / share, column = at.column - at.lane * kWide;
  const int which = threadIdx.x / kFewSpread, block = threadIdx.x % kFewSpread;
  if (which < s.count && block < blocks) {
    sums.divisors[which][block] = s.pools[which].divisor(at.batch, block);
  }
  __syncthreads();
  for (int index = threadIdx.x; index < kWarps / share * kColumns; index += 32 * kWarps) {
    const int local = index / kColumns, c = index % kColumns;
    const int64_t own = pool + local;
    ColumnSums to;
    for (int k = 0; k < s.count && own < blocks && column + c < width; ++k) {
      if (!s.pools[k].few) continue;
      run_down<T>(s.pools[k], sums.divisors[k], at.batch, static_cast<int>(own), column + c, to);
    }
    sums.first[local][c] = to.first;
    sums.rest[local][c] = to.rest;
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

// A lane's kAhead tokens at a time, from its warp's first on.
template <class T, int kWide>
struct SpreadTokens {
  __device__ __forceinline__ SpreadTokens(const Spread& s, const Place<kWide>& at)
      : step(s.pools[0].share),
        begin(at.pool * s.pools[0].p.block),
        end(min(begin + s.pools[0].p.block, s.pools[0].p.length)),
        onto(static_cast<const T*>(s.onto.data)),
        stride(s.onto.stride[2]) {
    if (onto != nullptr) onto += at.batch * s.onto.stride[0] + at.column;
  }

  // What the tokens from t on are added to.
  __device__ __forceinline__ void load(int64_t t) {
#pragma unroll
    for (int q = 0; q < kAhead; ++q) {
      const int64_t token = t + q * step;
      own[q].fill(0.0f);
      if (onto != nullptr && token < end) own[q].load(onto + token * stride);
    }
  }

  const int step;
  const int64_t begin, end;  // of the block
  const T* onto;
  const int64_t stride;
  Wide<T, kWide> own[kAhead];
};

// Each token's gradient from its pools'. The tokens of block i lie in pool i; under a causal rule
// only the first of them does, and the others in pool i + 1.
template <class T, int kWide>
__global__ void __launch_bounds__(32 * kWarps, 2)
    pool_spread_kernel(const __grid_constant__ Spread s) {
  begin_early();
  __shared__ SpreadSums<kWide> sums;
  const Args& a = s.pools[0];
  const Place<kWide> at(a, a.p.blocks);
  SpreadTokens<T, kWide> tokens(s, at);
  int64_t t = tokens.begin + at.part;
  if (at.inside) tokens.load(t);  // on its way while the running sums are made
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
  T* dx = static_cast<T*>(a.p.x.data) + at.batch * a.p.x.stride[0] + at.column;
  while (t < tokens.end) {
#pragma unroll
    for (int q = 0; q < kAhead; ++q) {
      const int64_t token = t + q * tokens.step;
      if (token >= tokens.end) break;
      Wide<T, kWide>& own = tokens.own[q];
      if (a.real(at.batch, token)) {
#pragma unroll
        for (int w = 0; w < kWide; ++w) {
          own.set(w, own.get(w) + (token == tokens.begin ? first[w] : rest[w]));
        }
      }
      own.store(dx + token * a.p.x.stride[2]);
    }
    t += tokens.step * kAhead;
    if (t < tokens.end) tokens.load(t);
  }
}

}  // namespace sinkhorn::cuda::pool
