// Prefix and prior columns of more than 128 blocks: where matrices lie, and the launches of the
// column step, which forward takes and backward replays.
#pragma once

#include "kernels/cuda/balance_tiled.cuh"

namespace sinkhorn::cuda::balance {

// A matrix of each head of a group. Packed, chunk c has rows of (c + 1) * kChunk numbers: half the
// memory. Otherwise a row has N.
struct RowStore {
  float* data;
  bool packed;

  static int64_t packed_size(const BalanceParams& p) {
    return kChunk * kChunk / 2 * chunk_count(p) * (chunk_count(p) + 1);
  }
  __device__ __forceinline__ int stride(const Chunk& chunk) const {
    return packed ? min(chunk.n, chunk.first + kChunk) : chunk.n;
  }
  // The chunk's first row.
  __device__ __forceinline__ float* rows(const TiledArgs& t, const Chunk& chunk) const {
    const int64_t n = chunk.n, local = chunk.local, index = chunk.index, chunks = t.chunks;
    if (!packed) return data + (local * n + chunk.first) * n;
    return data + kChunk * kChunk / 2 * (local * chunks * (chunks + 1) + index * (index + 1));
  }
};

__device__ __forceinline__ float* causal_terms(const BalanceParams& p, int64_t head, int64_t k) {
  return static_cast<float*>(p.terms) + (head * (p.iterations + 1) + k) * p.blocks;
}

// u of step k on a chunk's rows, 0 beyond; all threads call this, and wait before they read it.
__device__ __forceinline__ void load_terms(const TiledArgs& t, const Chunk& chunk, int k,
                                           float* u) {
  const int i = threadIdx.x;
  if (i < kChunk) {
    u[i] = i < chunk.count ? causal_terms(t.a.p, chunk.head, k)[chunk.first + i] : 0.0f;
  }
}

// A chunk's numbers in [heads, chunks, N].
template <class T>
__device__ __forceinline__ T* chunk_totals(const TiledArgs& t, const Chunk& chunk, T* totals) {
  return totals + (static_cast<int64_t>(chunk.local) * t.chunks + chunk.index) * chunk.n;
}

// For kernels in which a thread takes a column of one head, over all chunks.
inline constexpr int kCarryThreads = 128;
inline dim3 carry_grid(const TiledArgs& t) {
  return dim3(static_cast<unsigned>((t.a.p.blocks + kCarryThreads - 1) / kCarryThreads),
              static_cast<unsigned>(t.heads));
}

// Kernels of balance_tiled_causal_fwd.cu, where the steps are described. totals: [heads, chunks,
// N].
//
// z^0 = X, u^0 and the totals of x^0. When replaying u is known.
void causal_start(const TiledArgs& t, bool replay, const RowStore& store, LogSum* totals,
                  Stream stream);
// The totals of x^k from z^k.
void causal_totals(const TiledArgs& t, int k, const RowStore& z, LogSum* totals, Stream stream);
// z^k from z^(k-1) and the totals of x^(k-1); u^k, unless replaying; and if there are more steps
// the totals of x^k, else, unless replaying, R in place of z^k. `in` and `out` are alike.
struct CausalStep {
  int k;
  bool replay, more;
  RowStore in, out;
  LogSum* totals;
};
void causal_step(const TiledArgs& t, const CausalStep& step, Stream stream);

}  // namespace sinkhorn::cuda::balance
