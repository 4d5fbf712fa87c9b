// 129 to 2048 blocks: what the kernels of prefix and prior columns share, in which a CTA holds a
// strip of 8 whole rows of one head in registers, so that a launch reads a matrix once; and the
// small things that full columns (balance_strip_full.cuh) take from here.
//
// Thread t of kThreads has columns t, t + kThreads, ... (4 of them) of all 8 rows. Along rows the
// CTA reduces by shuffles and one barrier; down the strip's columns a thread works alone. What it
// finds there is the strip's part of a whole column; a kernel of its own scans the parts, in their
// order. Heads go in groups small enough for the card's cache.
//
// No largest element is needed once a matrix is balanced: its rows sum to 1, so after a column step
// an element has shrunk at most N times and a row sums to 1/(N + 1) at least; and alike for columns
// after a row step. So exponents are taken relative to the potential before, or to 0.
#pragma once

#include <algorithm>

#include "kernels/cuda/balance_common.cuh"
#include "kernels/cuda/check.cuh"

namespace sinkhorn::cuda::balance {

inline constexpr int kStripRows = 8, kStripColumns = 4;  // a thread's
inline constexpr int kMergeColumns = 32, kMergeParts = 16;

inline int64_t strip_count(const BalanceParams& p) {
  return (p.blocks + kStripRows - 1) / kStripRows;
}
inline int64_t strip_group(const BalanceParams& p) {
  constexpr int64_t kElements = 1 << 23;  // 32 MB
  return std::min(p.batch * p.heads, std::max<int64_t>(1, kElements / (p.blocks * p.blocks)));
}

// CTA i has strip strips - 1 - i / heads of head first_head + i % heads; the last strips, the
// longest under a causal rule, begin first.
struct StripArgs {
  Args a;
  int64_t first_head;
  int heads, strips;

  unsigned ctas() const { return static_cast<unsigned>(heads) * static_cast<unsigned>(strips); }
  dim3 merge_grid() const {
    return dim3(static_cast<unsigned>((a.p.blocks + kMergeColumns - 1) / kMergeColumns),
                static_cast<unsigned>(heads));
  }
};

// Calls body(args) for one group of heads after the other.
template <class Body>
void for_each_strip_group(const BalanceParams& p, const Body& body) {
  const int64_t all = p.batch * p.heads, group = strip_group(p);
  for (int64_t first = 0; first < all; first += group) {
    body(StripArgs{make_args(p), first, static_cast<int>(std::min(group, all - first)),
                   static_cast<int>(strip_count(p))});
  }
}

template <int kThreadsOfCta>
struct StripShape {
  static constexpr int kThreads = kThreadsOfCta, kWarps = kThreads / 32;
  // CTAs of a multiprocessor, for 80 registers a thread, and for 128 or more.
  static constexpr int kMany = 768 / kThreads, kFew = kThreads == 128 ? 3 : 512 / kThreads;
};

// Calls body(StripShape()) for the number of blocks.
template <class Body>
void with_strip_shape(const BalanceParams& p, const Body& body) {
  if (p.blocks <= 128 * kStripColumns) return body(StripShape<128>());
  if (p.blocks <= 256 * kStripColumns) return body(StripShape<256>());
  body(StripShape<512>());
}

// Calls body(T()) for the type of the logits.
template <class Body>
void with_strip_type(const BalanceParams& p, const Body& body) {
  switch (p.logits.type) {
    case Type::kBFloat16: body(__nv_bfloat16()); break;
    case Type::kFloat16: body(__half()); break;
    default: body(float());
  }
}

// The rows of this CTA.
struct Strip {
  __device__ __forceinline__ explicit Strip(const StripArgs& t)
      : local(static_cast<int>(blockIdx.x) % t.heads),
        index(t.strips - 1 - static_cast<int>(blockIdx.x) / t.heads),
        head(t.first_head + local),
        n(static_cast<int>(t.a.p.blocks)),
        first(index * kStripRows),
        count(min(kStripRows, n - first)),
        columns(source_end(t.a.p, first + count - 1)) {}
  // Its numbers in [heads, strips, N].
  template <class T>
  __device__ __forceinline__ T* part(const StripArgs& t, T* parts) const {
    return parts + (static_cast<int64_t>(local) * t.strips + index) * n;
  }

  const int local, index;  // the head within its group, the strip within the head
  const int64_t head;
  const int n, first, count;
  const int columns;  // that its last row may read, and so any of its rows
};

using Tile = float[kStripRows][kStripColumns];  // what a thread holds of a matrix

template <class Shape>
__device__ __forceinline__ int strip_column(int e) {
  return static_cast<int>(threadIdx.x) + e * Shape::kThreads;
}

// Numbers of the strip's rows, 0 beyond the last.
__device__ __forceinline__ void load_strip_rows(const Strip& strip, const float* from,
                                                float (&to)[kStripRows]) {
#pragma unroll
  for (int i = 0; i < kStripRows; ++i) to[i] = i < strip.count ? from[strip.first + i] : 0.0f;
}

// A matrix of which `rows` is the strip's first row; -inf beyond `end` and the last row.
template <class Shape>
__device__ __forceinline__ void load_strip(const Strip& strip, const float* rows, int stride,
                                           int end, Tile& to) {
#pragma unroll
  for (int i = 0; i < kStripRows; ++i) {
    const float* from = rows + static_cast<int64_t>(i) * stride + threadIdx.x;
#pragma unroll
    for (int e = 0; e < kStripColumns; ++e) {
      const bool inside = i < strip.count && strip_column<Shape>(e) < end;
      to[i][e] = inside ? from[e * Shape::kThreads] : kNothing;
    }
  }
}

template <class Shape>
__device__ __forceinline__ void store_strip(const Strip& strip, const Tile& from, int stride,
                                            int end, float* rows) {
#pragma unroll
  for (int i = 0; i < kStripRows; ++i) {
    float* to = rows + static_cast<int64_t>(i) * stride + threadIdx.x;
#pragma unroll
    for (int e = 0; e < kStripColumns; ++e) {
      const bool inside = i < strip.count && strip_column<Shape>(e) < end;
      if (inside) to[e * Shape::kThreads] = from[i][e];
    }
  }
}

// dR, 0 where x is -inf; its loads do not wait for x.
template <class Shape>
__device__ __forceinline__ void load_strip_grad(const StripArgs& t, const Strip& strip,
                                                const Tile& x, Tile& to) {
  const Matrix<float> grad(t.a.p, t.a.p.grad, strip.head);
  const float* from = grad.data + strip.first * grad.row + threadIdx.x * grad.column;
  const int64_t ahead = Shape::kThreads * grad.column;
#pragma unroll
  for (int i = 0; i < kStripRows; ++i) {
#pragma unroll
    for (int e = 0; e < kStripColumns; ++e) {
      const bool inside = i < strip.count && strip_column<Shape>(e) < strip.columns;
      to[i][e] = inside ? from[e * ahead] : 0.0f;
    }
    from += grad.row;
  }
#pragma unroll
  for (int i = 0; i < kStripRows; ++i) {
#pragma unroll
    for (int e = 0; e < kStripColumns; ++e) to[i][e] = x[i][e] == kNothing ? 0.0f : to[i][e];
  }
}

// Of row i of the strip, this thread's columns that it may read, from a matrix whose `from` is the
// first of them; else -inf.
template <class Shape, class T>
__device__ __forceinline__ void load_allowed(const T* from, int64_t ahead, unsigned live, int end,
                                             float (&to)[kStripColumns]) {
#pragma unroll
  for (int e = 0; e < kStripColumns; ++e) {
    const bool inside = (live >> e & 1u) != 0 && strip_column<Shape>(e) < end;
    to[e] = inside ? widen(from[e * ahead]) : kNothing;
  }
}

// x from the logits, for iterations >= 1. Allowed ones are finite, so -inf marks what is not.
template <class Shape, class T>
__device__ __forceinline__ void load_strip_logits(const StripArgs& t, const Strip& strip,
                                                  Tile& to) {
  const BalanceParams& p = t.a.p;
  const int64_t batch = strip.head / p.heads;
  const Matrix<T> logits(p, p.logits, strip.head);
  const Matrix<float> noise(p, p.noise, strip.head);
  // Who may read whom comes first, so that all loads of numbers are on the way together.
  unsigned live = 0;
  int ends[kStripRows];
#pragma unroll
  for (int e = 0; e < kStripColumns; ++e) {
    const int c = strip_column<Shape>(e);
    if (c < strip.columns && is_live(p, batch, c)) live |= 1u << e;
  }
#pragma unroll
  for (int i = 0; i < kStripRows; ++i) {
    const int r = strip.first + i;
    ends[i] = i < strip.count && is_live(p, batch, r) ? source_end(p, r) : 0;
  }
  const T* from = logits.data + strip.first * logits.row + threadIdx.x * logits.column;
#pragma unroll
  for (int i = 0; i < kStripRows; ++i) {
    load_allowed<Shape>(from, Shape::kThreads * logits.column, live, ends[i], to[i]);
    from += logits.row;
  }
  if (noise.data != nullptr) {
    const float* more = noise.data + strip.first * noise.row + threadIdx.x * noise.column;
#pragma unroll
    for (int i = 0; i < kStripRows; ++i) {
      float own[kStripColumns];
      load_allowed<Shape>(more, Shape::kThreads * noise.column, live, ends[i], own);
      more += noise.row;
#pragma unroll
      for (int e = 0; e < kStripColumns; ++e) to[i][e] += own[e];
    }
  }
#pragma unroll
  for (int i = 0; i < kStripRows; ++i) {
#pragma unroll
    for (int e = 0; e < kStripColumns; ++e) {
      const float x = fmaf(to[i][e], t.a.scale, to[i][e] * t.a.scale_rest);
      to[i][e] = to[i][e] == kNothing ? kNothing : x;
    }
  }
}

struct Add {
  __device__ __forceinline__ float operator()(float a, float b) const { return a + b; }
};
struct Larger {
  __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

// Reduces x[i] over all threads of the CTA; every thread gets the same bits. All threads call this.
// `shared` is used by no other call of the kernel, which so needs but one barrier.
template <class Shape, class Op>
__device__ __forceinline__ void reduce_rows(float (&x)[kStripRows], const Op& op,
                                            float (&shared)[Shape::kWarps][kStripRows]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // Each step halves the rows a lane holds; in the end lanes 4 i .. 4 i + 3 hold row i.
  static_assert(kStripRows == 8);
#pragma unroll
  for (int half = 4; half >= 1; half /= 2) {
    const bool upper = (lane & (4 * half)) != 0;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float send = upper ? x[i] : x[i + half], keep = upper ? x[i + half] : x[i];
      x[i] = op(keep, __shfl_xor_sync(0xFFFFFFFFu, send, 4 * half));
    }
  }
  float own = op(x[0], __shfl_xor_sync(0xFFFFFFFFu, x[0], 2));
  own = op(own, __shfl_xor_sync(0xFFFFFFFFu, own, 1));
  if (lane % 4 == 0) shared[warp][lane / 4] = own;
  __syncthreads();
  static_assert(Shape::kWarps % 4 == 0);
  float all = shared[lane / 8][lane % 8];
#pragma unroll
  for (int w = 4; w < Shape::kWarps; w += 4) all = op(all, shared[w + lane / 8][lane % 8]);
  all = op(all, __shfl_xor_sync(0xFFFFFFFFu, all, 8));
  all = op(all, __shfl_xor_sync(0xFFFFFFFFu, all, 16));
#pragma unroll
  for (int i = 0; i < kStripRows; ++i) x[i] = __shfl_sync(0xFFFFFFFFu, all, i);
}

// The largest of each row, and the sum relative to it, of x as loaded.
template <class Shape>
__device__ __forceinline__ void reduce_log_sums(const Tile& x, LogSum (&rows)[kStripRows],
                                                float (&tops)[Shape::kWarps][kStripRows],
                                                float (&sums)[Shape::kWarps][kStripRows]) {
  float part[kStripRows];
#pragma unroll
  for (int i = 0; i < kStripRows; ++i) {
    part[i] = kNothing;
#pragma unroll
    for (int e = 0; e < kStripColumns; ++e) part[i] = fmaxf(part[i], x[i][e]);
  }
  reduce_rows<Shape>(part, Larger(), tops);
#pragma unroll
  for (int i = 0; i < kStripRows; ++i) {
    rows[i].top = part[i];
    part[i] = 0.0f;
#pragma unroll
    for (int e = 0; e < kStripColumns; ++e) part[i] += fast_exp2(x[i][e] - rows[i].base());
  }
  reduce_rows<Shape>(part, Add(), sums);
#pragma unroll
  for (int i = 0; i < kStripRows; ++i) rows[i].sum = part[i];
}

// Each column's log sum of x - u over the strip.
template <class Shape>
__device__ __forceinline__ void put_log_sums(const Tile& x, const float (&u)[kStripRows], int end,
                                             LogSum* to) {
#pragma unroll
  for (int e = 0; e < kStripColumns; ++e) {
    float column[kStripRows];
    LogSum s;
#pragma unroll
    for (int i = 0; i < kStripRows; ++i) {
      column[i] = x[i][e] - u[i];
      s.top = fmaxf(s.top, column[i]);
    }
    const float base = s.base();
#pragma unroll
    for (int i = 0; i < kStripRows; ++i) s.sum += fast_exp2(column[i] - base);
    if (strip_column<Shape>(e) < end) (to + threadIdx.x)[e * Shape::kThreads] = s;
  }
}

// What all threads know of the strip's rows; threads of different warps store it.
template <class Value>
__device__ __forceinline__ void store_strip_rows(const Strip& strip, float* to,
                                                 const Value& value) {
#pragma unroll
  for (int i = 0; i < kStripRows; ++i) {
    if (static_cast<int>(threadIdx.x) == 32 * (i % 4) && i < strip.count) {
      to[strip.first + i] = value(i);
    }
  }
}
__device__ __forceinline__ void store_strip_rows(const Strip& strip,
                                                 const float (&from)[kStripRows], float* to) {
  store_strip_rows(strip, to, [&](int i) { return from[i]; });
}

__device__ __forceinline__ float* strip_terms(const BalanceParams& p, int64_t head, int64_t index) {
  const int64_t count = balance_terms(p.columns, p.iterations);
  return static_cast<float*>(p.terms) + (head * count + index) * p.blocks;
}

}  // namespace sinkhorn::cuda::balance
