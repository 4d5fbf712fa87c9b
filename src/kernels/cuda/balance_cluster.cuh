// 129 to 512 blocks with full columns and few iterations on Hopper: what forward and backward
// share, in which one launch does all of it and a cluster of CTAs holds a head.
//
// A CTA has 64 rows of the head, a warp 4 of them from end to end: lane l has columns 4 l .. 4 l +
// 3 of every 128. It holds one power of 2 an element, E = exp2(x - U_i - V_j), made once; the
// matrix of any step is E times a factor of its row and one of its column. Sums along rows take
// shuffles alone. Sums down columns are added over the warps of a CTA in its shared memory; each
// CTA then has 64 columns of which the others send it their parts, adds these in the order of their
// ranks, and sends what follows from the sums to all. Nothing is written to global memory between
// the first step and the last: the barriers of the cluster would wait for it.
//
// Once columns sum to 1 a step changes a row's or column's potential by log2 N at most, 9. So what
// is 0 in E of step 1, below 2^-126, stays below 2^-45 in R of 5 steps; below 2^-25 where E is what
// the first row step left, of which a column's factor in step 1 may be 2^20.
#pragma once

#include "kernels/cuda/balance_launch.h"
#include "kernels/cuda/balance_strip_full_sums.cuh"

namespace sinkhorn::cuda::balance {

// Up to so many blocks.
template <int kBlocks>
struct ClusterShape {
  static constexpr int kColumns = kBlocks, kGroups = kColumns / 128;  // of 128 columns
  static constexpr int kRows = 64, kCtas = kColumns / kRows;
  static constexpr int kThreads = 512, kWarps = kThreads / 32;
  static constexpr int kOwn = kRows / kWarps;  // rows of a warp
};
static_assert(ClusterShape<512>::kColumns == kLargestCluster);

struct ClusterArgs {
  Args a;
  bool wide_logits, wide_noise, wide_grad, wide_result;  // four numbers at once
  bool masked;  // whether any place is not allowed, or beyond N
};

template <class Shape>
ClusterArgs make_cluster_args(const BalanceParams& p, Type result) {
  return {make_args(p),
          is_wide(p.logits, p.blocks),
          is_wide(p.noise, p.blocks),
          is_wide(p.grad, p.blocks),
          is_wide(square_view(p, p.result, result), p.blocks),
          p.live != nullptr || p.causal != Causal::kNone || p.blocks != Shape::kColumns};
}

// Calls body(ClusterShape()) for the number of blocks.
template <class Body>
void with_cluster_shape(const BalanceParams& p, const Body& body) {
  if (p.blocks <= ClusterShape<256>::kColumns) return body(ClusterShape<256>());
  body(ClusterShape<512>());
}

template <class Shape>
void launch_clusters(void (*kernel)(ClusterArgs), const ClusterArgs& t, size_t shared,
                     Stream stream) {
  allow_shared(kernel, static_cast<int>(shared), "balance");
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {Shape::kCtas, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(t.a.p.batch * t.a.p.heads) * Shape::kCtas);
  config.blockDim = dim3(Shape::kThreads);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, kernel, t), "balance");
}

// The same number, but unknown to the compiler, which would keep what follows from it in registers
// that the matrix needs.
__device__ __forceinline__ int anew(int i) {
  asm volatile("" : "+r"(i));
  return i;
}

// The rows and columns of this thread.
template <class Shape>
struct ClusterPlace {
  __device__ __forceinline__ explicit ClusterPlace(const ClusterArgs& t)
      : rank(static_cast<int>(blockIdx.x) % Shape::kCtas),
        lane(anew(threadIdx.x) % 32),
        own(anew(threadIdx.x) / 32 * Shape::kOwn),
        head(blockIdx.x / Shape::kCtas),
        n(static_cast<int>(t.a.p.blocks)) {}
  __device__ __forceinline__ int row(int i) const { return rank * Shape::kRows + own + i; }
  __device__ __forceinline__ int column(int g) const { return g * 128 + lane * 4; }

  const int rank, lane, own;  // own: the warp's first row in its CTA
  const int64_t head;
  const int n;
};

template <class Shape>
using Held = float[Shape::kOwn][Shape::kGroups][4];

// This thread's four numbers of a row; 0 beyond N.
template <class Shape, class T>
__device__ __forceinline__ Four<T> load_place(const ClusterPlace<Shape>& at, const Matrix<T>& m,
                                              bool wide, int i, int g) {
  const int r = anew(at.row(i)), c = at.column(g);
  Four<T> to{};
  if (r >= at.n || c >= at.n) return to;
  const T* from = m.data + r * m.row + c * m.column;
  if (wide) return load_four(from);
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    if (c + e < at.n) to.x[e] = from[e * m.column];
  }
  return to;
}

template <class Shape, class T>
__device__ __forceinline__ void load_logits(const ClusterArgs& t, const ClusterPlace<Shape>& at,
                                            Held<Shape>& x) {
  const Matrix<T> logits(t.a.p, t.a.p.logits, at.head);
#pragma unroll
  for (int i = 0; i < Shape::kOwn; ++i) {
#pragma unroll
    for (int g = 0; g < Shape::kGroups; ++g) {
      const Four<T> four = load_place(at, logits, t.wide_logits, i, g);
#pragma unroll
      for (int e = 0; e < 4; ++e) x[i][g][e] = widen(four.x[e]);
    }
  }
}

// x of all elements of this thread, -inf where not allowed.
template <class Shape>
__device__ __forceinline__ void load_x(const ClusterArgs& t, Held<Shape>& x) {
  const BalanceParams& p = t.a.p;
  const ClusterPlace<Shape> at(t);  // not what is known of the other
  switch (p.logits.type) {
    case Type::kBFloat16: load_logits<Shape, __nv_bfloat16>(t, at, x); break;
    case Type::kFloat16: load_logits<Shape, __half>(t, at, x); break;
    default: load_logits<Shape, float>(t, at, x);
  }
  if (p.noise.data != nullptr) {
    const Matrix<float> noise(p, p.noise, at.head);
#pragma unroll
    for (int i = 0; i < Shape::kOwn; ++i) {
#pragma unroll
      for (int g = 0; g < Shape::kGroups; ++g) {
        const Four32 four = load_place(at, noise, t.wide_noise, i, g);
#pragma unroll
        for (int e = 0; e < 4; ++e) x[i][g][e] += four.x[e];
      }
    }
  }
  const int64_t batch = at.head / p.heads;
  unsigned alive = 0;  // which columns exist and are live
  if (t.masked) {
#pragma unroll
    for (int j = 0; j < 4 * Shape::kGroups; ++j) {
      const int c = at.column(j / 4) + j % 4;
      if (c < at.n && is_live(p, batch, c)) alive |= 1u << j;
    }
  }
#pragma unroll
  for (int i = 0; i < Shape::kOwn; ++i) {
    const int r = anew(at.row(i));
    const int end = r < at.n && is_live(p, batch, r) ? min(at.n, source_end(p, r)) : 0;
#pragma unroll
    for (int g = 0; g < Shape::kGroups; ++g) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& own = x[i][g][e];
        own = fmaf(own, t.a.scale, own * t.a.scale_rest);
        if (!t.masked) continue;
        if (at.column(g) + e >= end || (alive >> (4 * g + e) & 1u) == 0) own = kNothing;
      }
    }
  }
}

// Turns x into E = exp2(x - U - V), of which `v` has all columns and `u` the warp's rows. In this
// order V is no less than any x - U that it was made from, however large, and E no more than 1.
template <class Shape>
__device__ __forceinline__ void make_shares(const ClusterPlace<Shape>& at,
                                            const float (&v)[Shape::kColumns],
                                            const float (&u)[Shape::kOwn], Held<Shape>& x) {
#pragma unroll
  for (int g = 0; g < Shape::kGroups; ++g) {
    const Four32 base = load_kept(&v[at.column(g)]);
#pragma unroll
    for (int i = 0; i < Shape::kOwn; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) x[i][g][e] = fast_exp2(x[i][g][e] - u[i] - base.x[e]);
    }
  }
}

// Four numbers of a row of the result.
template <class T, class Shape>
__device__ __forceinline__ void store_place(const ClusterArgs& t, const ClusterPlace<Shape>& at,
                                            int i, int g, const float (&from)[4]) {
  const int r = at.row(i), c = at.column(g);
  if (r >= at.n || c >= at.n) return;
  T* to = static_cast<T*>(t.a.p.result) + (at.head * at.n + r) * at.n + c;
  Four<T> four;
#pragma unroll
  for (int e = 0; e < 4; ++e) four.x[e] = static_cast<T>(from[e]);
  if (t.wide_result) {
    *reinterpret_cast<Four<T>*>(to) = four;
    return;
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    if (c + e < at.n) to[e] = four.x[e];
  }
}

// Every lane gets x[i] over the warp.
template <int kCount, class Op>
__device__ __forceinline__ void reduce_warp(float (&x)[kCount], const Op& op) {
  constexpr int kLanes = 32 / kCount;  // that end up with the same number
  float own = halve_lanes<kCount>(x, op);
#pragma unroll
  for (int step = kLanes / 2; step >= 1; step /= 2) {
    own = op(own, __shfl_xor_sync(0xFFFFFFFFu, own, step));
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] = __shfl_sync(0xFFFFFFFFu, own, i * kLanes);
}

// Adds E_ij b_j over a group of this thread's columns to the sums of the warp's rows.
template <class Shape>
__device__ __forceinline__ void add_along_rows(const Held<Shape>& held, int g, const Four32& b,
                                               float (&sums)[Shape::kOwn]) {
#pragma unroll
  for (int i = 0; i < Shape::kOwn; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) sums[i] = fmaf(held[i][g][e], b.x[e], sums[i]);
  }
}

// Adds E_ij a_i over the warp's rows to the sums of a group of this thread's columns.
template <class Shape>
__device__ __forceinline__ void add_down_columns(const Held<Shape>& held, int g,
                                                 const float (&a)[Shape::kOwn], float (&sums)[4]) {
#pragma unroll
  for (int i = 0; i < Shape::kOwn; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) sums[e] = fmaf(held[i][g][e], a[i], sums[e]);
  }
}

// The barrier of a cluster, in two halves: what was written or read before the one is done for all
// threads of the cluster behind the other. All threads call both, the same number of times.
__device__ __forceinline__ void arrive_at_cluster() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_cluster() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Writes x where CTA `rank` of the cluster has what this one has at `own`.
__device__ __forceinline__ void store_at_rank(const float* own, int rank, float x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  const unsigned here = static_cast<unsigned>(__cvta_generic_to_shared(own));
  unsigned there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(rank));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(x) : "memory");
#endif
}
template <class Shape>
__device__ __forceinline__ void store_at_all(const float* own, float x) {
#pragma unroll
  for (int rank = 0; rank < Shape::kCtas; ++rank) store_at_rank(own, rank, x);
}

// Up to two numbers a column, from all warps of a cluster to the thread that has the column.
template <class Shape>
struct ColumnExchange {
  static constexpr int kOwned = Shape::kColumns / Shape::kCtas;  // columns of a CTA
  struct alignas(16) Memory {
    float stage[2][Shape::kWarps][Shape::kColumns];
    float parts[2][Shape::kCtas][kOwned];
  };

  // Four columns of a warp.
  __device__ __forceinline__ void put(const ClusterPlace<Shape>& at, int a, int g,
                                      const float (&columns)[4]) {
    store_four(&memory.stage[a][threadIdx.x / 32][at.column(g)], columns);
  }

  // When all has been put: add(values, value) merges what the warps and then the CTAs found,
  // beginning with `none`; finish(column, values) is called once in the cluster for each column,
  // and what it sends is there for all behind this.
  template <int kCount, class Add, class Finish>
  __device__ __forceinline__ void merge(const ClusterPlace<Shape>& at, const float (&none)[kCount],
                                        const Add& add, const Finish& finish) {
    const int thread = threadIdx.x;
    float all[kCount], value[kCount];
    __syncthreads();
    if (thread < Shape::kColumns) {
#pragma unroll
      for (int a = 0; a < kCount; ++a) all[a] = none[a];
#pragma unroll 8
      for (int warp = 0; warp < Shape::kWarps; ++warp) {
#pragma unroll
        for (int a = 0; a < kCount; ++a) value[a] = memory.stage[a][warp][thread];
        add(all, value);
      }
#pragma unroll
      for (int a = 0; a < kCount; ++a) {
        store_at_rank(&memory.parts[a][at.rank][thread % kOwned], thread / kOwned, all[a]);
      }
    }
    arrive_at_cluster();
    wait_for_cluster();
    if (thread < kOwned) {
#pragma unroll
      for (int a = 0; a < kCount; ++a) all[a] = none[a];
#pragma unroll
      for (int rank = 0; rank < Shape::kCtas; ++rank) {
#pragma unroll
        for (int a = 0; a < kCount; ++a) value[a] = memory.parts[a][rank][thread];
        add(all, value);
      }
      finish(at.rank * kOwned + thread, all);
    }
    arrive_at_cluster();
    wait_for_cluster();
  }
  template <int kCount, class Finish>
  __device__ __forceinline__ void sum(const ClusterPlace<Shape>& at, const Finish& finish) {
    constexpr float kNone[kCount] = {};
    const auto add = [](float(&all)[kCount], const float(&own)[kCount]) {
#pragma unroll
      for (int a = 0; a < kCount; ++a) all[a] += own[a];
    };
    merge(at, kNone, add, finish);
  }

  Memory& memory;
};

}  // namespace sinkhorn::cuda::balance
