// 129 to 1024 blocks with full columns and few iterations on Hopper: what forward and backward
// share, in which one launch does all of it and a crew of CTAs holds a head.
//
// A warp has a few rows of the head from end to end: lane l has columns 4 l .. 4 l + 3 of every
// 128. A thread holds one power of 2 an element, E = exp2(x - U_i - V_j), made once, of 512 columns
// in registers and of the others in shared memory; the matrix of any step is E times a factor of
// its row and one of its column. Sums along rows take shuffles alone, sums down columns the
// exchange of the crew (balance_crew_exchange.cuh).
//
// Once columns sum to 1 a step changes a row's or column's potential by log2 N at most, 9 up to 512
// blocks. So what is 0 in E of step 1, below 2^-126, stays below 2^-45 in R of 5 steps, 2^-36 of
// 1024 blocks; below 2^-25 where E is what the first row step left, of which a column's factor in
// step 1 may be 2^20, 2^11 of 1024 blocks.
#pragma once

#include "kernels/cuda/balance_launch.h"
#include "kernels/cuda/balance_strip_full_sums.cuh"

namespace sinkhorn::cuda::balance {

// Up to kBlocks blocks, kRowsOfCta rows a CTA.
template <int kBlocks, int kRowsOfCta>
struct CrewShape {
  static constexpr int kColumns = kBlocks, kGroups = kColumns / 128;  // of 128 columns
  static constexpr int kRows = kRowsOfCta, kCtas = kColumns / kRows;
  static constexpr int kThreads = 512, kWarps = kThreads / 32;
  static constexpr int kOwn = kRows / kWarps;              // rows of a warp
  static constexpr int kHeld = kGroups < 4 ? kGroups : 4;  // groups in registers
  static constexpr int kAside = kGroups - kHeld;           // groups in shared memory
  static constexpr float kMostFactor = kColumns > 512 ? 0x1p11f : 0x1p20f;  // of a column in step 1
};

struct CrewArgs {
  Args a;
  int64_t first_head;
  bool wide_logits, wide_noise, wide_grad, wide_result;  // four numbers at once
  bool masked;         // whether any place is not allowed, or beyond N
  float* parts;        // of sums: [crews of a launch, 2, 2, CTAs of a crew, columns]
  unsigned* arrivals;  // at the barriers of a crew: [heads], 0 at first
};

// The rows and columns of this thread.
template <class Shape>
struct CrewPlace {
  __device__ __forceinline__ explicit CrewPlace(const CrewArgs& t)
      : rank(static_cast<int>(blockIdx.x) % Shape::kCtas),
        crew(static_cast<int>(blockIdx.x) / Shape::kCtas),
        lane(threadIdx.x % 32),
        own(threadIdx.x / 32 * Shape::kOwn),
        head(t.first_head + crew),
        n(static_cast<int>(t.a.p.blocks)) {}
  __device__ __forceinline__ int row(int i) const { return rank * Shape::kRows + own + i; }
  __device__ __forceinline__ int column(int g) const { return g * 128 + lane * 4; }

  const int rank, crew;  // of the CTA in its crew, of the crew in its launch
  const int lane, own;   // own: the warp's first row in its CTA
  const int64_t head;
  const int n;
};

// What a thread holds of a matrix, four numbers for each of its rows and groups of columns: the
// first groups in registers, the others in shared memory, where each thread has places of its own.
template <class Shape>
class Held {
 public:
  using Rows = Four32[Shape::kOwn];
  struct Memory {
    Four32 places[Shape::kAside > 0 ? Shape::kAside : 1][Shape::kOwn]
                 [Shape::kAside > 0 ? Shape::kThreads : 1];
  };

  __device__ __forceinline__ explicit Held(Memory& aside) : aside_(aside) {}

  // Calls use(g, rows) for groups kFirst .. kLast - 1.
  template <int kFirst = 0, int kLast = Shape::kGroups, class Use>
  __device__ __forceinline__ void each(const Use& use) const {
#pragma unroll
    for (int g = kFirst; g < kLast && g < Shape::kHeld; ++g) use(g, held_[g]);
#pragma unroll 2
    for (int g = kFirst < Shape::kHeld ? Shape::kHeld : kFirst; g < kLast; ++g) {
      Rows rows;
      get(g, rows);
      use(g, rows);
    }
  }
  // The same where use changes the rows.
  template <class Use>
  __device__ __forceinline__ void change(const Use& use) {
#pragma unroll
    for (int g = 0; g < Shape::kHeld; ++g) use(g, held_[g]);
#pragma unroll 2
    for (int g = Shape::kHeld; g < Shape::kGroups; ++g) {
      Rows rows;
      get(g, rows);
      use(g, rows);
      put(g, rows);
    }
  }
  // Fills it with make(g, raw, rows) of what fetch(g, raw) loads, Raw each, of several groups at a
  // time.
  template <class Raw, class Fetch, class Make>
  __device__ __forceinline__ void fill(const Fetch& fetch, const Make& make) {
    // Those for shared memory first, while registers are free.
    constexpr int kTogether = 2;
    static_assert(Shape::kAside % kTogether == 0);
#pragma unroll 1
    for (int g = Shape::kHeld; g < Shape::kGroups; g += kTogether) {
      Raw raw[kTogether];
#pragma unroll
      for (int q = 0; q < kTogether; ++q) fetch(g + q, raw[q]);
#pragma unroll
      for (int q = 0; q < kTogether; ++q) {
        Rows rows;
        make(g + q, raw[q], rows);
        put(g + q, rows);
      }
    }
    Raw raw[Shape::kHeld];
#pragma unroll
    for (int g = 0; g < Shape::kHeld; ++g) fetch(g, raw[g]);
#pragma unroll
    for (int g = 0; g < Shape::kHeld; ++g) make(g, raw[g], held_[g]);
  }

 private:
  __device__ __forceinline__ void get(int g, Rows& rows) const {
#pragma unroll
    for (int i = 0; i < Shape::kOwn; ++i) rows[i] = aside_.places[g - Shape::kHeld][i][threadIdx.x];
  }
  __device__ __forceinline__ void put(int g, const Rows& rows) {
#pragma unroll
    for (int i = 0; i < Shape::kOwn; ++i) aside_.places[g - Shape::kHeld][i][threadIdx.x] = rows[i];
  }

  Rows held_[Shape::kHeld];
  Memory& aside_;
};

// Four numbers that no kernel writes while this one runs, and that need not be kept near.
template <class T>
__device__ __forceinline__ Four<T> load_input(const T* from) {
  Four<T> to;
  if constexpr (sizeof(T) == 4) {
    uint4 word;
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
        : "l"(from));
    memcpy(&to, &word, sizeof(to));
  } else {
    uint2 word;
    asm("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
        : "=r"(word.x), "=r"(word.y)
        : "l"(from));
    memcpy(&to, &word, sizeof(to));
  }
  return to;
}

// This thread's numbers of a group of columns; 0 beyond N.
template <class Shape, class T>
__device__ __forceinline__ void load_group(const CrewPlace<Shape>& at, const Matrix<T>& m,
                                           bool wide, int g, Four<T> (&to)[Shape::kOwn]) {
  const int c = at.column(g);
  const T* from = m.data + at.row(0) * m.row + c * m.column;
  if (wide) {
#pragma unroll
    for (int i = 0; i < Shape::kOwn; ++i) {
      to[i] = Four<T>{};
      if (at.row(i) < at.n && c < at.n) to[i] = load_input(from + i * m.row);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < Shape::kOwn; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const bool inside = at.row(i) < at.n && c + e < at.n;
      to[i].x[e] = inside ? from[i * m.row + e * m.column] : static_cast<T>(0.0f);
    }
  }
}

template <class Shape, class T>
__device__ __forceinline__ void load_x_of(const CrewArgs& t, const CrewPlace<Shape>& at,
                                          Held<Shape>& x) {
  struct Raw {
    Four<T> rows[Shape::kOwn];
  };
  const BalanceParams& p = t.a.p;
  const int64_t batch = at.head / p.heads;
  const Matrix<T> logits(p, p.logits, at.head);
  const Matrix<float> noise(p, p.noise, at.head);
  const auto fetch = [&](int g, Raw& raw) { load_group(at, logits, t.wide_logits, g, raw.rows); };
  x.template fill<Raw>(fetch, [&](int g, const Raw& raw, typename Held<Shape>::Rows& to) {
#pragma unroll
    for (int i = 0; i < Shape::kOwn; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) to[i].x[e] = widen(raw.rows[i].x[e]);
    }
    if (noise.data != nullptr) {
      Four32 more[Shape::kOwn];
      load_group(at, noise, t.wide_noise, g, more);
#pragma unroll
      for (int i = 0; i < Shape::kOwn; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) to[i].x[e] += more[i].x[e];
      }
    }
#pragma unroll
    for (int i = 0; i < Shape::kOwn; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        to[i].x[e] = fmaf(to[i].x[e], t.a.scale, to[i].x[e] * t.a.scale_rest);
      }
    }
    if (!t.masked) return;
    const int c = at.column(g);
    unsigned alive = 0;  // which columns exist and are live
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (c + e < at.n && is_live(p, batch, c + e)) alive |= 1u << e;
    }
#pragma unroll
    for (int i = 0; i < Shape::kOwn; ++i) {
      const int r = at.row(i);
      const int end = r < at.n && is_live(p, batch, r) ? min(at.n, source_end(p, r)) : 0;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (c + e >= end || (alive >> e & 1u) == 0) to[i].x[e] = kNothing;
      }
    }
  });
}

// x of all elements of this thread, -inf where not allowed.
template <class Shape>
__device__ __forceinline__ void load_x(const CrewArgs& t, const CrewPlace<Shape>& at,
                                       Held<Shape>& x) {
  switch (t.a.p.logits.type) {
    case Type::kBFloat16: load_x_of<Shape, __nv_bfloat16>(t, at, x); break;
    case Type::kFloat16: load_x_of<Shape, __half>(t, at, x); break;
    default: load_x_of<Shape, float>(t, at, x);
  }
}

// Turns x into E = exp2(x - U - V), of which `v` has all columns and `u` the warp's rows. In this
// order what is rounded at the size of x is x - U alone: E is 1 at most but for the rounding of V,
// and finite however large x is.
template <class Shape>
__device__ __forceinline__ void make_shares(const CrewPlace<Shape>& at,
                                            const float (&v)[Shape::kColumns],
                                            const float (&u)[Shape::kOwn], Held<Shape>& x) {
  x.change([&](int g, Four32(&own)[Shape::kOwn]) {
    const Four32 base = load_kept(&v[at.column(g)]);
#pragma unroll
    for (int i = 0; i < Shape::kOwn; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) own[i].x[e] = fast_exp2(own[i].x[e] - u[i] - base.x[e]);
    }
  });
}

// Four numbers of a row of the result.
template <class T, class Shape>
__device__ __forceinline__ void store_place(const CrewArgs& t, const CrewPlace<Shape>& at, int i,
                                            int g, const float (&from)[4]) {
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

// The numbers of the warp's rows.
template <class Shape>
__device__ __forceinline__ void get_rows(const CrewPlace<Shape>& at,
                                         const float (&rows)[Shape::kRows],
                                         float (&to)[Shape::kOwn]) {
#pragma unroll
  for (int i = 0; i < Shape::kOwn; ++i) to[i] = rows[at.own + i];
}

}  // namespace sinkhorn::cuda::balance
