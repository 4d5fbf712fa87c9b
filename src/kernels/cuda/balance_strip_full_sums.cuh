// Sums of the kernels for 129 to 2048 blocks with full columns: along rows over a team, down the
// columns over the teams of a CTA and then over the slabs of a head. The order of every sum is
// fixed by N.
#pragma once

#include "kernels/cuda/balance_strip_full.cuh"

namespace sinkhorn::cuda::balance {

template <class Shape>
__device__ __forceinline__ void team_barrier(const Slab<Shape>& slab) {
  if constexpr (Shape::kTeams == 1) {
    __syncthreads();
  } else {
    asm volatile("bar.sync %0, %1;" ::"r"(slab.team + 1), "n"(Shape::kThreads) : "memory");
  }
}

// Halves the numbers a lane holds, until it is one, x[lane / (32 / kCount)] of some lanes, which it
// returns. A loop over kHalf would not be unrolled.
template <int kCount, int kHalf = kCount / 2, class Op>
__device__ __forceinline__ float halve_lanes(float (&x)[kCount], const Op& op) {
  constexpr int kDistance = 32 / kCount * kHalf;
  const bool upper = (threadIdx.x & kDistance) != 0;
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float send = upper ? x[i] : x[i + kHalf], keep = upper ? x[i + kHalf] : x[i];
    x[i] = op(keep, __shfl_xor_sync(0xFFFFFFFFu, send, kDistance));
  }
  if constexpr (kHalf > 1) {
    return halve_lanes<kCount, kHalf / 2>(x, op);
  } else {
    return x[0];
  }
}

// Reduces over a team. One barrier a call; two sets of numbers, in turn.
template <class Shape, int kCount>
struct TeamReducer {
  using Memory = float[2][Shape::kTeams][Shape::kWarps][kCount];

  // Every thread gets x[i] over the team, and lane i returns what it got of x[i % kCount].
  template <class Op>
  __device__ __forceinline__ float operator()(const Slab<Shape>& slab, float (&x)[kCount],
                                              const Op& op) {
    constexpr int kLanes = 32 / kCount;  // that end up with the same number
    const int lane = threadIdx.x % 32, warp = slab.thread / 32;
    float own = halve_lanes<kCount>(x, op);
#pragma unroll
    for (int step = kLanes / 2; step >= 1; step /= 2) {
      own = op(own, __shfl_xor_sync(0xFFFFFFFFu, own, step));
    }
    float(&shared)[Shape::kWarps][kCount] = memory[turn][slab.team];
    turn ^= 1;
    if (lane % kLanes == 0) shared[warp][lane / kLanes] = own;
    team_barrier(slab);
    static_assert(Shape::kWarps % kLanes == 0);
    float all = shared[lane / kCount][lane % kCount];
#pragma unroll
    for (int w = kLanes; w < Shape::kWarps; w += kLanes) {
      all = op(all, shared[w + lane / kCount][lane % kCount]);
    }
#pragma unroll
    for (int step = kCount; step < 32; step *= 2) {
      all = op(all, __shfl_xor_sync(0xFFFFFFFFu, all, step));
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = __shfl_sync(0xFFFFFFFFu, all, i);
    return all;
  }

  Memory& memory;
  int turn = 0;
};

// Numbers of this CTA's columns, a set for each team.
template <class Shape>
struct alignas(16) Stage {
  __device__ __forceinline__ void put(const Slab<Shape>& slab, const float (&from)[4]) {
    store_four(&values[slab.team][slab.column], from);
  }
  __device__ __forceinline__ Four32 get(const Slab<Shape>& slab, int team) const {
    return *reinterpret_cast<const Four32*>(&values[team][slab.column]);
  }
  __device__ __forceinline__ void sum(const Slab<Shape>& slab, float (&to)[4]) const {
#pragma unroll
    for (int e = 0; e < 4; ++e) to[e] = 0.0f;
#pragma unroll
    for (int team = 0; team < Shape::kTeams; ++team) {
      const Four32 own = get(slab, team);
#pragma unroll
      for (int e = 0; e < 4; ++e) to[e] += own.x[e];
    }
  }

  float values[Shape::kTeams][Shape::kColumns];
};

// Writes the slab's parts, kCount sums of each column. All threads of the CTA call this.
template <int kCount, class Shape>
__device__ __forceinline__ void put_parts(const SlabArgs& t, const Slab<Shape>& slab,
                                          const float (&sums)[kCount][4],
                                          Stage<Shape> (&stage)[kCount],
                                          float* const (&parts)[kCount]) {
  __syncthreads();  // what was read from the stage before
#pragma unroll
  for (int a = 0; a < kCount; ++a) stage[a].put(slab, sums[a]);
  __syncthreads();
  if (slab.team != 0) return;
#pragma unroll
  for (int a = 0; a < kCount; ++a) {
    float all[4];
    stage[a].sum(slab, all);
    store_four(slab.part(t, parts[a], slab.index), all);
  }
}

// Adds the parts of all slabs; a team takes every kTeams-th one. All threads of the CTA call this.
template <int kCount, class Shape>
__device__ __forceinline__ void add_parts(const SlabArgs& t, const Slab<Shape>& slab,
                                          const float* const (&parts)[kCount],
                                          Stage<Shape> (&stage)[kCount], float (&sums)[kCount][4]) {
  constexpr int kAhead = 8;  // loads in flight
#pragma unroll
  for (int a = 0; a < kCount; ++a) {
#pragma unroll
    for (int e = 0; e < 4; ++e) sums[a][e] = 0.0f;
  }
  for (int base = slab.team; base < t.slabs; base += kAhead * Shape::kTeams) {
    Four32 own[kCount][kAhead];
#pragma unroll
    for (int q = 0; q < kAhead; ++q) {
      const int of = base + q * Shape::kTeams;
#pragma unroll
      for (int a = 0; a < kCount; ++a) {
        own[a][q] = Four32{};
        if (of < t.slabs) own[a][q] = load_four(slab.part(t, parts[a], of));
      }
    }
#pragma unroll
    for (int q = 0; q < kAhead; ++q) {
#pragma unroll
      for (int a = 0; a < kCount; ++a) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[a][e] += own[a][q].x[e];
      }
    }
  }
#pragma unroll
  for (int a = 0; a < kCount; ++a) stage[a].put(slab, sums[a]);
  __syncthreads();
#pragma unroll
  for (int a = 0; a < kCount; ++a) stage[a].sum(slab, sums[a]);
}

}  // namespace sinkhorn::cuda::balance
