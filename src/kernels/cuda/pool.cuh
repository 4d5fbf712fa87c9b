// What the kernels of pool share, and those that sum. x [B, L, E] -> pooled [B, N, E]:
//
//   plain    pooled[i] = sum of x[t] over real t in  i*b .. i*b + b - 1
//   recent                                           i*b - b + 1 .. i*b
//   causal                                           0 .. i*b, the running sum of the above
//
// divided by their number for mean and recent. Call tokens i*b - b + 1 .. i*b the range of pool i
// under a causal rule, tokens i*b .. i*b + b - 1 otherwise. Pools have the type of x or are
// float32, rounded to the type of x all the same; their gradients are of either type.
//
// Mapping. Sums of ranges: `share` warps to a pool and 32 * kWide neighbouring columns, whose parts
// are added up in shared memory; a lane loads kWide columns at once. Running sums: a thread to a
// column and 64 pools on end, which begins from the totals of the pools before; sums are
// compensated, so that they are exact to the last digits however long the sequence. Few blocks of
// few tokens run in the launch that sums them (pool_few.cuh).
//
// Backward (pool_spread.cuh): token t gets dy_i / n_i of the pool in whose range it lies, or under
// a running sum the sum of all these from pool i on. Nothing is recomputed but the numbers n_i.
// Masked tokens are never loaded forward, and get nothing.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

#include "kernels/common/params.h"

namespace sinkhorn::cuda::pool {

inline constexpr int kWarps = 8;  // to a CTA that sums or spreads ranges
inline constexpr int kAhead = 8;  // loads in flight a lane
inline constexpr int kRun = 64;   // pools that a thread runs over
inline constexpr int kRunThreads = 128;
inline constexpr int kCountThreads = 1024;

template <int kBytes>
struct WordOf {
  using Type = uint4;
};
template <>
struct WordOf<2> {
  using Type = unsigned short;
};
template <>
struct WordOf<4> {
  using Type = unsigned;
};

// kWide neighbours, in words of 16 bytes unless there is only one of them; the address is a
// multiple of a word. Stores are spelled out: a plain one of a word put together from parts may be
// taken apart again.
template <class T, int kWide>
struct Wide {
  using Word = typename WordOf<kWide == 1 ? sizeof(T) : 16>::Type;
  static constexpr int kWords = kWide * sizeof(T) / sizeof(Word);

  __device__ __forceinline__ void load(const T* from) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = reinterpret_cast<const Word*>(from)[i];
  }
  __device__ __forceinline__ void store(T* to) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) __stwb(reinterpret_cast<Word*>(to) + i, words[i]);
  }
  __device__ __forceinline__ float get(int w) const {
    T value;
    memcpy(&value, reinterpret_cast<const char*>(words) + w * sizeof(T), sizeof(T));
    return static_cast<float>(value);
  }
  __device__ __forceinline__ void set(int w, float x) {
    const T value = static_cast<T>(x);
    memcpy(reinterpret_cast<char*>(words) + w * sizeof(T), &value, sizeof(T));
  }
  __device__ __forceinline__ void fill(float x) {
#pragma unroll
    for (int w = 0; w < kWide; ++w) set(w, x);
  }

  Word words[kWords];
};

struct Args {
  PoolParams p;
  bool running;          // a causal sum or mean
  bool few;              // running sums in the launch that sums or spreads
  int share;             // warps to a pool: 1, 2, 4 or 8
  int tiles;             // of 32 * kWide columns; of pool_few, strips
  int64_t runs;          // of kRun pools
  float* sums;           // [B, N, E]: sums of ranges; in backward running sums from the end
  float *totals, *lost;  // [B, runs, E]: of whole runs, and what rounding lost of them
  int* counts;  // [B, N]: real tokens of each pool; null where they follow from the indices

  __device__ __forceinline__ int64_t begin(int64_t i) const {
    if (!p.causal) return i * p.block;
    return i == 0 ? 0 : i * p.block - p.block + 1;
  }
  __device__ __forceinline__ int64_t end(int64_t i) const {
    const int64_t end = p.causal ? i * p.block + 1 : (i + 1) * p.block;
    return end > p.length ? p.length : end;
  }
  __device__ __forceinline__ bool real(int64_t batch, int64_t t) const {
    return p.real == nullptr || p.real[batch * p.length + t] != 0;
  }
  // What pool i's sum is divided by: 0 for nothing to divide.
  __device__ __forceinline__ float divisor(int64_t batch, int64_t i) const {
    if (p.mode == PoolMode::kSum) return 1.0f;
    if (counts != nullptr) return static_cast<float>(counts[batch * p.blocks + i]);
    return static_cast<float>(end(i) - (running ? 0 : begin(i)));
  }
};

__device__ __forceinline__ float divided(float sum, float by) {
  return by == 1.0f ? sum : by > 0.0f ? sum / by : 0.0f;
}

// A running sum and what rounding has lost of it.
struct Compensated {
  float sum = 0.0f, lost = 0.0f;

  __device__ __forceinline__ void add(float x) {
    const float rest = x - lost, next = sum + rest;
    lost = (next - sum) - rest;
    sum = next;
  }
};

// kWide neighbours of `pooled`, from element `at` on, rounded to T.
template <class T, int kWide>
__device__ __forceinline__ void store_pooled(const View& v, int64_t at, const float (&x)[kWide]) {
  Wide<T, kWide> own;
#pragma unroll
  for (int w = 0; w < kWide; ++w) own.set(w, x[w]);
  if (v.type != Type::kFloat32) return own.store(static_cast<T*>(v.data) + at);
  Wide<float, kWide> wide;
#pragma unroll
  for (int w = 0; w < kWide; ++w) wide.set(w, own.get(w));
  wide.store(static_cast<float*>(v.data) + at);
}

// The gradient of pool i in a column.
template <class T>
__device__ __forceinline__ float pooled_gradient(const Args& a, int64_t batch, int64_t i,
                                                 int64_t column) {
  const View& v = a.p.pooled;
  const int64_t at = batch * v.stride[0] + i * v.stride[2] + column * v.stride[3];
  return v.type == Type::kFloat32 ? static_cast<const float*>(v.data)[at]
                                  : static_cast<float>(static_cast<const T*>(v.data)[at]);
}

// What it hands on of it.
template <class T>
__device__ __forceinline__ float pool_gradient(const Args& a, int64_t batch, int64_t i,
                                               int64_t column) {
  return divided(pooled_gradient<T>(a, batch, i, column), a.divisor(batch, i));
}

// The place of this warp among the pools and columns.
template <int kWide>
struct Place {
  __device__ __forceinline__ Place(const Args& a, int64_t pools)
      : warp(threadIdx.x / 32), lane(threadIdx.x % 32), part(warp % a.share) {
    const int each = kWarps / a.share;  // pools to a CTA
    const int64_t groups = (pools + each - 1) / each, index = blockIdx.x / a.tiles;
    batch = index / groups;
    pool = index % groups * each + warp / a.share;
    column = (static_cast<int64_t>(blockIdx.x % a.tiles) * 32 + lane) * kWide;
    inside = pool < pools && column < a.p.width;
  }

  const int warp, lane, part;  // part: this warp's number among those of its pool
  int64_t batch, pool, column;
  bool inside;
};

struct Tokens {
  int64_t first, end;
  int step;
};

// Adds the real ones of these tokens, kLoads at a time, to sum. x: of token 0.
template <class T, int kWide, int kLoads>
__device__ __forceinline__ void add_tokens(const Args& a, int64_t batch, const T* x,
                                           const Tokens& tokens, float (&sum)[kWide]) {
  for (int64_t t = tokens.first; t < tokens.end; t += tokens.step * kLoads) {
    Wide<T, kWide> own[kLoads];
#pragma unroll
    for (int q = 0; q < kLoads; ++q) {
      const int64_t token = t + q * tokens.step;
      own[q].fill(0.0f);
      if (token < tokens.end && a.real(batch, token)) own[q].load(x + token * a.p.x.stride[2]);
    }
#pragma unroll
    for (int w = 0; w < kWide; ++w) {
      float tree[kLoads];
#pragma unroll
      for (int q = 0; q < kLoads; ++q) tree[q] = own[q].get(w);
#pragma unroll
      for (int step = 1; step < kLoads; step *= 2) {
#pragma unroll
        for (int q = 0; q < kLoads; q += 2 * step) tree[q] += tree[q + step];
      }
      sum[w] += tree[0];
    }
  }
}

// Sums of ranges: into a.sums where they will run, else the result itself.
template <class T, int kWide>
__global__ void __launch_bounds__(32 * kWarps) pool_sum_kernel(const __grid_constant__ Args a) {
  __shared__ float parts[kWarps][32 * kWide];
  const Place<kWide> at(a, a.p.blocks);
  float sum[kWide] = {};
  if (at.inside) {
    const int64_t end = a.end(at.pool);
    const T* x = static_cast<const T*>(a.p.x.data) + at.batch * a.p.x.stride[0] +
                 at.column * a.p.x.stride[3];
    add_tokens<T, kWide, kAhead>(a, at.batch, x, {a.begin(at.pool) + at.part, end, a.share}, sum);
  }
  if (a.share > 1) {
#pragma unroll
    for (int w = 0; w < kWide; ++w) parts[at.warp][w * 32 + at.lane] = sum[w];
    __syncthreads();
    if (at.part > 0) return;
    for (int part = 1; part < a.share; ++part) {
#pragma unroll
      for (int w = 0; w < kWide; ++w) sum[w] += parts[at.warp + part][w * 32 + at.lane];
    }
  }
  if (!at.inside) return;
  const int64_t to = (at.batch * a.p.blocks + at.pool) * a.p.width + at.column;
  if (a.running) {
    Wide<float, kWide> out;
#pragma unroll
    for (int w = 0; w < kWide; ++w) out.set(w, sum[w]);
    out.store(a.sums + to);
  } else {
    const float by = a.divisor(at.batch, at.pool);
#pragma unroll
    for (int w = 0; w < kWide; ++w) sum[w] = divided(sum[w], by);
    store_pooled<T>(a.p.pooled, to, sum);
  }
}

// The place of a thread that runs over pools first .. last - 1 of one column.
struct Run {
  __device__ __forceinline__ explicit Run(const Args& a) {
    const int64_t columns = (a.p.width + kRunThreads - 1) / kRunThreads;
    column = blockIdx.x % columns * kRunThreads + threadIdx.x;
    index = blockIdx.x / columns % a.runs;
    batch = blockIdx.x / columns / a.runs;
    first = index * kRun;
    last = first + kRun < a.p.blocks ? first + kRun : a.p.blocks;
  }
  __device__ __forceinline__ int64_t total(const Args& a, int64_t run) const {
    return (batch * a.runs + run) * a.p.width + column;
  }
  __device__ __forceinline__ int64_t sum(const Args& a, int64_t i) const {
    return (batch * a.p.blocks + i) * a.p.width + column;
  }

  int64_t column, index, batch, first, last;
};

// What runs: sums of ranges forward, dy_i / n_i backward. T is the type of dy.
template <class T, bool kBackward>
__device__ __forceinline__ float run_term(const Args& a, const Run& run, int64_t i) {
  if constexpr (kBackward) {
    return pool_gradient<T>(a, run.batch, i, run.column);
  } else {
    return a.sums[run.sum(a, i)];
  }
}

// Calls body(i, term) for the pools of a run, from the first on, or in backward from the last.
template <class T, bool kBackward, class Body>
__device__ __forceinline__ void for_run(const Args& a, const Run& run, const Body& body) {
  const int64_t count = run.last - run.first;
  const auto pool = [&](int64_t j) { return kBackward ? run.last - 1 - j : run.first + j; };
  for (int64_t base = 0; base < count; base += kAhead) {
    float term[kAhead];
#pragma unroll
    for (int q = 0; q < kAhead; ++q) {
      term[q] = base + q < count ? run_term<T, kBackward>(a, run, pool(base + q)) : 0.0f;
    }
#pragma unroll
    for (int q = 0; q < kAhead; ++q) {
      if (base + q < count) body(pool(base + q), term[q]);
    }
  }
}

template <class T, bool kBackward>
__global__ void __launch_bounds__(kRunThreads) pool_total_kernel(const __grid_constant__ Args a) {
  const Run run(a);
  if (run.column >= a.p.width) return;
  Compensated sum;
  for_run<T, kBackward>(a, run, [&](int64_t, float term) { sum.add(term); });
  a.totals[run.total(a, run.index)] = sum.sum;
  a.lost[run.total(a, run.index)] = sum.lost;
}

// Running sums, from the totals of the runs before (backward: behind) this one. Forward writes the
// result, backward the sums, in place of which nothing else lies.
template <class T, bool kBackward>
__global__ void __launch_bounds__(kRunThreads) pool_run_kernel(const __grid_constant__ Args a) {
  const Run run(a);
  if (run.column >= a.p.width) return;
  Compensated sum;
  const int64_t before = kBackward ? a.runs - 1 - run.index : run.index;
#pragma unroll 4
  for (int64_t j = 0; j < before; ++j) {
    const int64_t at = run.total(a, kBackward ? a.runs - 1 - j : j);
    sum.add(a.totals[at]);
    sum.add(-a.lost[at]);
  }
  for_run<T, kBackward>(a, run, [&](int64_t i, float term) {
    sum.add(term);
    if constexpr (kBackward) {
      a.sums[run.sum(a, i)] = sum.sum;
    } else {
      const float pooled[1] = {divided(sum.sum, a.divisor(run.batch, i))};
      store_pooled<T>(a.p.pooled, run.sum(a, i), pooled);
    }
  });
}

// Real tokens in each pool's range, by a warp.
__global__ void __launch_bounds__(32 * kWarps) pool_count_kernel(const __grid_constant__ Args a) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (index >= a.p.batch * a.p.blocks) return;
  const int64_t batch = index / a.p.blocks, i = index % a.p.blocks, end = a.end(i);
  int count = 0;
  for (int64_t t = a.begin(i) + threadIdx.x % 32; t < end; t += 32) count += a.real(batch, t);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) count += __shfl_xor_sync(0xFFFFFFFFu, count, step);
  if (threadIdx.x % 32 == 0) a.counts[index] = count;
}

// Counts become those of pools 0 .. i, in place; a CTA to a sequence.
__global__ void __launch_bounds__(kCountThreads)
    pool_count_run_kernel(const __grid_constant__ Args a) {
  __shared__ int counts[kCountThreads];
  const int thread = threadIdx.x;
  int* row = a.counts + blockIdx.x * a.p.blocks;
  int before = 0;
  for (int64_t base = 0; base < a.p.blocks; base += kCountThreads) {
    const bool inside = base + thread < a.p.blocks;
    int count = inside ? row[base + thread] : 0;
    for (int step = 1; step < kCountThreads; step *= 2) {
      __syncthreads();
      counts[thread] = count;
      __syncthreads();
      if (thread >= step) count += counts[thread - step];
    }
    if (inside) row[base + thread] = before + count;
    __syncthreads();
    counts[thread] = count;
    __syncthreads();
    before += counts[kCountThreads - 1];
  }
}

}  // namespace sinkhorn::cuda::pool
