// Who sees whom, tile by tile, and loading a tile.
//
// Positions a query may look at lie in two lists: the sorted positions of its block, and the tokens
// around it. In either list what a query sees is an interval; what is masked inside it has weight
// -1. Tiles are 64 positions of a list, and a block need not begin where a tile does.
#pragma once

#include "kernels/cuda/attention.h"
#include "kernels/cuda/mma.cuh"

namespace sinkhorn::cuda {

constexpr int kTile = 64;
constexpr int kThreads = 128;  // of a CTA of attention: four warps, a warpgroup

enum class List { kSorted, kLocal };

struct Interval {
  int begin, end;
};

// The plan of one head of one sequence.
struct Plan {
  int queries, length;  // of this sequence
  int block, rows, window;
  bool causal, inclusive, strict, sortcut;

  __device__ __forceinline__ Plan(const AttentionCall& p, int batch) {
    queries = p.queries;
    length = p.length;
    if (p.sequences.length != nullptr) {
      length = static_cast<int>(p.sequences.length[batch]);
      if (!p.sortcut) queries = length;
    }
    block = p.block;
    rows = p.rows;
    window = p.window;
    causal = p.causal != Causal::kNone;
    inclusive = p.causal == Causal::kInclusive;
    strict = p.causal == Causal::kStrict;
    sortcut = p.sortcut;
  }

  // What query t sees of a list.
  __device__ __forceinline__ Interval seen(List list, int t) const {
    if (t >= queries) return {0, 0};
    if (sortcut) return list == List::kSorted ? Interval{0, rows * block} : Interval{0, 0};
    const int i = t / block;
    if (list == List::kSorted) {
      if (rows == 0 || (strict && i <= window)) return {0, 0};  // no source
      return {i * block, inclusive ? t + 1 : (i + 1) * block};
    }
    return {max(0, (i - window) * block), causal ? t + 1 : min(length, (i + window + 1) * block)};
  }
  // What queries first .. last see between them, from a multiple of 16 on.
  __device__ __forceinline__ Interval seen(List list, int first, int last) const {
    last = min(last, queries - 1);
    const Interval a = seen(list, first), b = seen(list, last);
    if (b.begin >= b.end) return {0, 0};
    // The first queries of a strict list may see nothing.
    const int begin = a.begin >= a.end ? (window + 1) * block : a.begin;
    return {begin / 16 * 16, b.end};
  }
  // Which queries see a position between first and last of a list, from a multiple of 16 on; wider
  // than need be.
  __device__ __forceinline__ Interval seers(List list, int first, int last) const {
    if (sortcut) return {0, queries};
    const int i = first / block, j = last / block;
    if (list == List::kSorted) return {i * block / 16 * 16, min(queries, (j + 1) * block)};
    const int begin = causal ? first : max(0, (i - window) * block);
    return {begin / 16 * 16, min(queries, (j + window + 1) * block)};
  }
};

// Of a head's rows of the sort, [rows, 2], or null.
__device__ __forceinline__ float* row_weights_of(const AttentionCall& p, int64_t flat_head) {
  return p.row_weight == nullptr ? nullptr : p.row_weight + flat_head * p.rows * 2;
}
// Of row i, if it may read anything: whether something of it is not zero. What may read nothing
// lacks nothing.
__device__ __forceinline__ float row_weight(const AttentionCall& p, int i, bool found) {
  return found || (p.causal == Causal::kStrict && i <= p.window) ? 1.0f : -1.0f;
}

// Whether query t sees what is sorted into its block, or a row of zeros made it. In sortcut, where
// a query sees several rows, that is left to Weights.
__device__ __forceinline__ bool sees_sorted_row(const AttentionCall& p, int64_t flat_head, int t) {
  if (p.row_weight == nullptr || p.sortcut || t >= p.queries) return true;
  return p.row_weight[(flat_head * p.rows + t / p.block) * 2] > 0.0f;
}

// Where one of all tiles of so many tokens lies.
struct TilePlace {
  int first, head, batch;
  __device__ __forceinline__ TilePlace(const AttentionCall& p, int tile, int tokens) {
    const int across = (p.length + tokens - 1) / tokens;
    first = tile % across * tokens;
    head = tile / across % p.heads;
    batch = tile / across / p.heads;
  }
  __device__ __forceinline__ int64_t flat_head(const AttentionCall& p) const {
    return static_cast<int64_t>(batch) * p.heads + head;
  }
};

// Waits for the four warps of a group of a CTA.
__device__ __forceinline__ void sync_group(int group) {
  asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(kThreads) : "memory");
}

// Elements of a head's rows; starts where the sequence does.
template <class T>
__device__ __forceinline__ T* head_of(const Tokens& x, const Sequences& s, int batch, int head) {
  const int64_t first = s.start == nullptr ? 0 : s.start[batch];
  return static_cast<T*>(x.data) + batch * x.batch + head * x.head + first * x.token;
}

// Weights of a tile's positions: 1 or what the sort gives, -1 where invisible. Without a mask,
// without weights and without rows of zeros every position of an interval weighs 1 and nothing is
// loaded.
struct Weights {
  const float* sorted;  // this head's [rows, b + 1], in sortcut perhaps [rows, 2], or null
  const uint8_t* real;  // this sequence's [L], or null
  int block;
  bool by_position;  // those of a row differ

  __device__ __forceinline__ Weights(const AttentionCall& p, int batch, int head)
      : real(p.real == nullptr ? nullptr : p.real + static_cast<int64_t>(batch) * p.length),
        block(p.block),
        by_position(p.weight != nullptr) {
    const int64_t flat_head = static_cast<int64_t>(batch) * p.heads + head;
    sorted = by_position ? p.weight + flat_head * p.rows * (p.block + 1)
             : p.sortcut ? row_weights_of(p, flat_head)
                         : nullptr;
  }
  // By all threads of a CTA: forgets the weights of rows none of which is of zeros.
  __device__ __forceinline__ void look_at_rows(int rows) {
    if (by_position || sorted == nullptr) return;
    bool lacks = false;
    for (int i = threadIdx.x; i < rows; i += kThreads) lacks |= sorted[i * 2] < 0.0f;
    if (__syncthreads_or(lacks) == 0) sorted = nullptr;
  }
  __device__ __forceinline__ bool needed(List list) const {
    return list == List::kSorted ? sorted != nullptr : real != nullptr;
  }
  __device__ __forceinline__ float at(List list, int s, int limit) const {
    if (s < 0 || s >= limit) return -1.0f;
    if (list == List::kLocal) return real[s] != 0 ? 1.0f : -1.0f;
    const int64_t row = s / block;
    return by_position ? sorted[row * (block + 1) + s % block] : sorted[row * 2];
  }
};

// 2^x; 0 for -inf, denormals flushed.
__device__ __forceinline__ float power_of_2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Largest score and sum over the four lanes that share a row.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xFFFFFFFFu, x, 1);
  return x + __shfl_xor_sync(0xFFFFFFFFu, x, 2);
}

}  // namespace sinkhorn::cuda
