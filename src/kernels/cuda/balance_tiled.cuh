// More than 128 blocks: what the kernels share in which a CTA owns a chunk of 32 rows of one head.
//
// Matrices lie in global memory, float32; a chunk is read again by the CTA that has just read it,
// so mostly from the caches. In a row pass a warp takes a row and its lanes take columns; in a
// column pass a thread takes a column of the chunk. What a column pass finds is the chunk's part of
// a whole column: a total for each chunk and column, merged over the chunks, in their order, by a
// kernel of its own. Heads go in groups large enough to fill the card and small enough for its
// cache.
#pragma once

#include <algorithm>

#include "kernels/cuda/balance_common.cuh"
#include "kernels/cuda/check.cuh"

namespace sinkhorn::cuda::balance {

inline constexpr int kChunk = 32, kTileThreads = 512, kTileWarps = kTileThreads / 32;
inline constexpr int kAhead = 8;        // loads in flight a thread
inline constexpr int kLoads = 4;        // and where each takes more registers
inline constexpr int kGroupCtas = 256;  // chunks of a group of heads: two CTAs a multiprocessor
inline constexpr int kMergeWarps = 8;

inline int64_t chunk_count(const BalanceParams& p) { return (p.blocks + kChunk - 1) / kChunk; }
inline int64_t group_heads(const BalanceParams& p) {
  return std::min(p.batch * p.heads, std::max<int64_t>(1, kGroupCtas / chunk_count(p)));
}

// What a kernel on chunks is told: CTA i has chunk chunks - 1 - i / heads of head first_head + i %
// heads; the last chunks, the longest under a causal rule, begin first.
struct TiledArgs {
  Args a;
  int64_t first_head;
  int heads, chunks;

  unsigned ctas() const { return static_cast<unsigned>(heads) * static_cast<unsigned>(chunks); }
};

// Calls body(args) for one group of heads after the other.
template <class Body>
void for_each_group(const BalanceParams& p, const Body& body) {
  const int64_t all = p.batch * p.heads, group = group_heads(p);
  for (int64_t first = 0; first < all; first += group) {
    body(TiledArgs{make_args(p), first, static_cast<int>(std::min(group, all - first)),
                   static_cast<int>(chunk_count(p))});
  }
}

// Calls body(T()) for the type of the logits.
template <class Body>
void with_logits_type(const BalanceParams& p, const Body& body) {
  switch (p.logits.type) {
    case Type::kBFloat16: body(__nv_bfloat16()); break;
    case Type::kFloat16: body(__half()); break;
    default: body(float());
  }
}

// For the kernels that merge chunks: 32 columns of one head a CTA.
inline dim3 merge_grid(const TiledArgs& t) {
  return dim3(static_cast<unsigned>((t.a.p.blocks + 31) / 32), static_cast<unsigned>(t.heads));
}

// The rows of this CTA.
struct Chunk {
  __device__ __forceinline__ explicit Chunk(const TiledArgs& t)
      : local(static_cast<int>(blockIdx.x) % t.heads),
        index(t.chunks - 1 - static_cast<int>(blockIdx.x) / t.heads),
        head(t.first_head + local),
        n(static_cast<int>(t.a.p.blocks)),
        first(index * kChunk),
        count(min(kChunk, n - first)),
        columns(source_end(t.a.p, first + count - 1)) {}

  const int local, index;  // the head within its group, the chunk within the head
  const int64_t head;
  const int n, first, count;
  const int columns;  // that its last row may read, and so any of its rows
};

__device__ __forceinline__ int warp_index() { return static_cast<int>(threadIdx.x) / 32; }
__device__ __forceinline__ int lane_index() { return static_cast<int>(threadIdx.x) % 32; }

// Where u or v of a step lies, for full columns: u0 v1 u1 v2 u2 ...
__device__ __forceinline__ float* full_terms(const BalanceParams& p, int64_t head, int64_t index) {
  const int64_t count = balance_terms(p.columns, p.iterations);
  return static_cast<float*>(p.terms) + (head * count + index) * p.blocks;
}

// A row of a float32 result.
__device__ __forceinline__ float* result_row(const BalanceParams& p, int64_t head, int r) {
  return static_cast<float*>(p.result) + (head * p.blocks + r) * p.blocks;
}

// The log sum over the first `end` columns of value(c), by one warp.
template <class Value>
__device__ __forceinline__ LogSum row_log_sum(int end, const Value& value) {
  LogSum s;
  for (int base = lane_index(); base < end + lane_index(); base += 32 * kAhead) {
    float x[kAhead];
#pragma unroll
    for (int q = 0; q < kAhead; ++q) x[q] = base + 32 * q < end ? value(base + 32 * q) : kNothing;
    s.add(x);
  }
  return lanes_log_sum<32>(s);
}

// Row r of x into `to`, up to its last source; its log sum. By one warp.
template <class T>
__device__ __forceinline__ LogSum load_row(const Args& a, int64_t head, int r, float* to) {
  const int end = source_end(a.p, r);
  const int64_t batch = head / a.p.heads;
  const Matrix<T> logits(a.p, a.p.logits, head);
  const Matrix<float> noise(a.p, a.p.noise, head);
  const bool live = is_live(a.p, batch, r);
  LogSum s;
  for (int base = lane_index(); base < end + lane_index(); base += 32 * kLoads) {
    float x[kLoads];
    bool allowed[kLoads];
#pragma unroll
    for (int q = 0; q < kLoads; ++q) {
      const int c = base + 32 * q;
      allowed[q] = live && c < end && is_live(a.p, batch, c);
      x[q] = allowed[q] ? logits.at(r, c) : 0.0f;
    }
    if (noise.data != nullptr) {
#pragma unroll
      for (int q = 0; q < kLoads; ++q) {
        if (allowed[q]) x[q] += noise.at(r, base + 32 * q);
      }
    }
#pragma unroll
    for (int q = 0; q < kLoads; ++q) {
      x[q] = allowed[q] ? scaled(a, x[q]) : kNothing;
      if (base + 32 * q < end) to[base + 32 * q] = x[q];
    }
    s.add(x);
  }
  return lanes_log_sum<32>(s);
}

// Writes row r of R: the softmax of value(c), with the sum given, and 0 where there is no source.
// The exponential itself without iterations. By one warp.
template <class Value>
__device__ __forceinline__ void store_row(const Args& a, int r, const LogSum& s, float* to,
                                          const Value& value) {
  const int end = source_end(a.p, r), n = static_cast<int>(a.p.blocks);
  const float base = s.base(), total = s.empty() ? 1.0f : s.sum;
  for (int first = lane_index(); first < n; first += 32 * kLoads) {
    float x[kLoads];
#pragma unroll
    for (int q = 0; q < kLoads; ++q) {
      x[q] = first + 32 * q < end ? value(first + 32 * q) : kNothing;
    }
#pragma unroll
    for (int q = 0; q < kLoads; ++q) {
      const float share = a.p.iterations == 0 ? expf(x[q]) : exp2f(x[q] - base) / total;
      if (first + 32 * q < n) to[first + 32 * q] = share;
    }
  }
}

// A column of a chunk, in matrices whose rows are `stride` apart; pointers are to the chunk's first
// row.
struct Column {
  __device__ __forceinline__ Column(const BalanceParams& p, const Chunk& chunk, int stride, int c)
      : stride(stride), c(c), from(first_reader(p, c) - chunk.first), count(chunk.count) {}

  // Whether row i may read the column; no row may if `from` is beyond the chunk.
  __device__ __forceinline__ bool inside(int i) const { return i >= from && i < count; }
  __device__ __forceinline__ int at(int i) const { return i * stride + c; }
  // Rows base, base + 1, ...; -inf for those that may not read it.
  template <int kRows>
  __device__ __forceinline__ void load(const float* rows, int base, float (&to)[kRows]) const {
#pragma unroll
    for (int q = 0; q < kRows; ++q) to[q] = inside(base + q) ? rows[at(base + q)] : kNothing;
  }

  const int stride, c, from, count;
};

}  // namespace sinkhorn::cuda::balance
