// Balancing more than 128 blocks with prefix or prior columns: backward.
//
// z^0 .. z^K are replayed from the logits and the kept row terms, by the launches of forward less
// its row sums, into scratch: every one of them up to 7 iterations, else a few at a time (Replay).
// Then the steps are undone from the last one on. G [N, N] is the gradient with respect to the
// matrix after the step at hand; with x^k = z^k - u^k and C = x^(k-1) - z^k,
//
//   at first         G = dR exp2(x^K)
//   row step k       G <- G - exp2(x^k) sum_j G
//   column step k    up the columns
//     prefix   W <- G + W exp2(C - C of the row below),  G <- G - exp2(z^k) W
//     prior    G' = G - exp2(x^(k-1)) W,  W <- W + G exp2(-C),  G <- G'
//
// A launch undoes column step k + 1 and row step k on every chunk, then takes each column's W over
// the chunk alone; a launch of its own turns these into the W below each chunk. Matrices in scratch
// are packed: (K + 2) / 2 times N x N for K <= 7.
#include "kernels/cuda/balance_launch.h"
#include "kernels/cuda/balance_tiled_causal.cuh"

namespace sinkhorn::cuda::balance {
namespace {

enum class Stage { kFirst, kMiddle, kLast };  // k = K, between, k = 0

// Row step k, and column step k + 1 before it.
struct UndoArgs {
  int k;
  bool totals;               // whether W of column step k is taken, for which z^(k-1) must be there
  RowStore below, z, above;  // z^(k+1), z^k and z^(k-1)
  RowStore g;
  Suffix* suffixes;  // [heads, chunks, N]
};

// One row of column step k on the way up: `z` is z^k, `x` is x^(k-1). Returns the new G.
template <bool kPrefix>
__device__ __forceinline__ float undo_column(float g, float z, float x, Suffix& s) {
  if (z == kNothing) return 0.0f;
  if constexpr (kPrefix) {
    s.add(g, x - z);
    return g - exp2f(z) * s.weight;
  } else {
    const float weight = s.weight;
    s.weight += g * exp2f(z - x);
    return g - exp2f(x) * weight;
  }
}

// Column step k + 1 on the chunk; u is that of step k.
template <bool kPrefix>
__device__ __forceinline__ void undo_columns(const TiledArgs& t, const Chunk& chunk,
                                             const UndoArgs& undo, const float* u) {
  const float *below = undo.below.rows(t, chunk), *above = undo.z.rows(t, chunk);
  float* g_rows = undo.g.rows(t, chunk);
  const Suffix* carry = chunk_totals(t, chunk, undo.suffixes);
  const int stride = undo.g.stride(chunk);
  for (int c = threadIdx.x; c < chunk.columns; c += kTileThreads) {
    const Column column(t.a.p, chunk, stride, c);
    Suffix s = carry[c];
    for (int base = kChunk - kLoads; base >= 0; base -= kLoads) {
      float z[kLoads], x[kLoads], g[kLoads];
      column.load(below, base, z);
      column.load(above, base, x);
      column.load(g_rows, base, g);
#pragma unroll
      for (int q = kLoads - 1; q >= 0; --q) {
        const int i = base + q;
        const float next = undo_column<kPrefix>(g[q], z[q], x[q] - u[i], s);
        if (column.inside(i)) g_rows[column.at(i)] = next;
      }
    }
  }
}

// G = dR exp2(x^K) on the chunk.
__device__ __forceinline__ void start_columns(const TiledArgs& t, const Chunk& chunk,
                                              const UndoArgs& undo, const float* u) {
  const Matrix<float> grad(t.a.p, t.a.p.grad, chunk.head);
  const float* z_rows = undo.z.rows(t, chunk);
  float* g_rows = undo.g.rows(t, chunk);
  const int stride = undo.g.stride(chunk);
  for (int c = threadIdx.x; c < chunk.columns; c += kTileThreads) {
    const Column column(t.a.p, chunk, stride, c);
    for (int base = 0; base < chunk.count; base += kAhead) {
      float z[kAhead], dr[kAhead];
      column.load(z_rows, base, z);
#pragma unroll
      for (int q = 0; q < kAhead; ++q) {
        dr[q] = z[q] == kNothing ? 0.0f : grad.at(chunk.first + base + q, c);
      }
#pragma unroll
      for (int q = 0; q < kAhead; ++q) {
        const int i = base + q;
        if (column.inside(i)) g_rows[column.at(i)] = dr[q] * exp2f(z[q] - u[i]);
      }
    }
  }
}

__device__ __forceinline__ void sum_rows(const TiledArgs& t, const Chunk& chunk,
                                         const UndoArgs& undo, float* sums) {
  for (int i = warp_index(); i < kChunk; i += kTileWarps) {
    float sum = 0.0f;
    if (i < chunk.count) {
      const float* g = undo.g.rows(t, chunk) + static_cast<int64_t>(i) * undo.g.stride(chunk);
      const int end = source_end(t.a.p, chunk.first + i);
#pragma unroll 8
      for (int c = lane_index(); c < end; c += 32) sum += g[c];
    }
    sum = lanes_sum<32>(sum);
    if (lane_index() == 0) sums[i] = sum;
  }
}

// Row step k, and each column's W of column step k over the chunk alone. `above` is u of step
// k - 1. With kKnown the row step has been undone, and u and sums are not read.
template <bool kPrefix, bool kKnown>
__device__ __forceinline__ void undo_rows(const TiledArgs& t, const Chunk& chunk,
                                          const UndoArgs& undo, const float* u, const float* above,
                                          const float* sums) {
  const float *z_rows = undo.z.rows(t, chunk), *x_rows = undo.above.rows(t, chunk);
  float* g_rows = undo.g.rows(t, chunk);
  Suffix* to = chunk_totals(t, chunk, undo.suffixes);
  const int stride = undo.g.stride(chunk);
  for (int c = threadIdx.x; c < chunk.columns; c += kTileThreads) {
    const Column column(t.a.p, chunk, stride, c);
    Suffix s;
    for (int base = kChunk - kLoads; base >= 0; base -= kLoads) {
      float z[kLoads], x[kLoads], g[kLoads];
      column.load(z_rows, base, z);
      column.load(g_rows, base, g);
      if (undo.totals) column.load(x_rows, base, x);
#pragma unroll
      for (int q = kLoads - 1; q >= 0; --q) {
        const int i = base + q;
        if (z[q] == kNothing) g[q] = 0.0f;
        if constexpr (!kKnown) {
          g[q] -= exp2f(z[q] - u[i]) * sums[i];
          if (column.inside(i)) g_rows[column.at(i)] = g[q];
        }
        if (undo.totals) undo_column<kPrefix>(g[q], z[q], x[q] - above[i], s);
      }
    }
    if (undo.totals) to[c] = s;
  }
}

// The gradient of the logits: row step 0, divided by the temperature, and 0 where there is no
// source.
__device__ __forceinline__ void finish_rows(const TiledArgs& t, const Chunk& chunk,
                                            const UndoArgs& undo, const float* u,
                                            const float* sums) {
  const BalanceParams& p = t.a.p;
  const float* z_rows = undo.z.rows(t, chunk);
  const float* g_rows = undo.g.rows(t, chunk);
  const int stride = undo.g.stride(chunk);
  for (int c = threadIdx.x; c < chunk.n; c += kTileThreads) {
    const Column column(p, chunk, stride, c);
    for (int base = 0; base < chunk.count; base += kAhead) {
      float z[kAhead], g[kAhead];
      column.load(z_rows, base, z);
      column.load(g_rows, base, g);
#pragma unroll
      for (int q = 0; q < kAhead; ++q) {
        const int i = base + q;
        if (i >= chunk.count) continue;
        const float x = z[q] == kNothing ? 0.0f : g[q] - exp2f(z[q] - u[i]) * sums[i];
        store_as(p.result, p.logits.type, (chunk.head * chunk.n + chunk.first + i) * chunk.n + c,
                 x / t.a.temperature);
      }
    }
  }
}

template <bool kPrefix, Stage kStage>
__global__ void __launch_bounds__(kTileThreads, 2)
    balance_tiled_causal_bwd_kernel(const __grid_constant__ TiledArgs t,
                                    const __grid_constant__ UndoArgs undo) {
  __shared__ float u[kChunk], above[kChunk], sums[kChunk];
  const Chunk chunk(t);
  load_terms(t, chunk, undo.k, u);
  if constexpr (kStage != Stage::kLast) load_terms(t, chunk, undo.k - 1, above);
  __syncthreads();
  if constexpr (kStage == Stage::kFirst) {
    start_columns(t, chunk, undo, u);
  } else {
    undo_columns<kPrefix>(t, chunk, undo, u);
  }
  __syncthreads();
  sum_rows(t, chunk, undo, sums);
  __syncthreads();
  if constexpr (kStage == Stage::kLast) {
    finish_rows(t, chunk, undo, u, sums);
  } else {
    undo_rows<kPrefix, false>(t, chunk, undo, u, above, sums);
  }
}

// W of column step k over each chunk alone, where z^(k-1) was not there yet when row step k was
// undone.
template <bool kPrefix>
__global__ void __launch_bounds__(kTileThreads, 2)
    balance_tiled_causal_suffix_kernel(const __grid_constant__ TiledArgs t,
                                       const __grid_constant__ UndoArgs undo) {
  __shared__ float above[kChunk];
  const Chunk chunk(t);
  load_terms(t, chunk, undo.k - 1, above);
  __syncthreads();
  undo_rows<kPrefix, true>(t, chunk, undo, nullptr, above, nullptr);
}

// The chunks' own W become the W below each chunk. A thread takes a column of one head.
template <bool kPrefix>
__global__ void __launch_bounds__(kCarryThreads)
    balance_tiled_causal_below_kernel(const __grid_constant__ TiledArgs t, Suffix* suffixes) {
  const int n = static_cast<int>(t.a.p.blocks), c = blockIdx.x * kCarryThreads + threadIdx.x;
  if (c >= n || first_reader(t.a.p, c) >= n) return;
  Suffix* column = suffixes + static_cast<int64_t>(blockIdx.y) * t.chunks * n + c;
  const int first = first_reader(t.a.p, c) / kChunk;
  Suffix below;
  for (int base = t.chunks - 1; base >= first; base -= kAhead) {
    Suffix total[kAhead];
#pragma unroll
    for (int q = 0; q < kAhead; ++q) {
      if (base - q >= first) total[q] = column[static_cast<int64_t>(base - q) * n];
    }
#pragma unroll
    for (int q = 0; q < kAhead; ++q) {
      if (base - q < first) continue;
      column[static_cast<int64_t>(base - q) * n] = below;
      if constexpr (kPrefix) {
        if (!total[q].empty()) below.add(total[q].weight, total[q].level);
      } else {
        below.weight += total[q].weight;
      }
    }
  }
}

// Scratch of one group of heads: slots for z and one for G, totals, and W.
struct CausalScratch {
  CausalScratch(const BalanceParams& p, void* memory)
      : kept(p.iterations), slot(group_heads(p) * RowStore::packed_size(p)) {
    const int64_t numbers = group_heads(p) * chunk_count(p) * p.blocks;
    z = static_cast<float*>(memory);
    totals = reinterpret_cast<LogSum*>(z + (kept.slots + 1) * slot);
    suffixes = reinterpret_cast<Suffix*>(totals + numbers);
    bytes = reinterpret_cast<char*>(suffixes + numbers) - static_cast<char*>(memory);
  }
  RowStore matrix(int k) const { return {z + kept.slot(k) * slot, true}; }
  RowStore grad() const { return {z + kept.slots * slot, true}; }

  Replay kept;
  int64_t slot, bytes;
  float* z;
  LogSum* totals;
  Suffix* suffixes;
};

// z of steps from + 1 .. to; the totals of x^from are there.
void replay(const TiledArgs& t, const CausalScratch& s, int from, int to, Stream stream) {
  for (int k = from + 1; k <= to; ++k) {
    causal_step(t, {k, true, k < to, s.matrix(k - 1), s.matrix(k), s.totals}, stream);
  }
}

template <bool kPrefix>
void undo_step(const TiledArgs& t, const CausalScratch& s, int k, Stream stream) {
  const int steps = s.kept.iterations;
  const bool missing = k > 0 && s.kept.missing_below(k);
  UndoArgs undo{k,           k > 0 && !missing,           s.matrix(k < steps ? k + 1 : k),
                s.matrix(k), s.matrix(k > 0 ? k - 1 : 0), s.grad(),
                s.suffixes};
  const auto kernel = k == steps ? balance_tiled_causal_bwd_kernel<kPrefix, Stage::kFirst>
                      : k > 0    ? balance_tiled_causal_bwd_kernel<kPrefix, Stage::kMiddle>
                                 : balance_tiled_causal_bwd_kernel<kPrefix, Stage::kLast>;
  kernel<<<t.ctas(), kTileThreads, 0, stream>>>(t, undo);
  if (k == 0) return;
  if (missing) {
    const int from = k - s.kept.stride;
    causal_totals(t, from, s.matrix(from), s.totals, stream);
    replay(t, s, from, k - 1, stream);
    undo.totals = true;
    balance_tiled_causal_suffix_kernel<kPrefix><<<t.ctas(), kTileThreads, 0, stream>>>(t, undo);
  }
  balance_tiled_causal_below_kernel<kPrefix>
      <<<carry_grid(t), kCarryThreads, 0, stream>>>(t, s.suffixes);
}

template <bool kPrefix>
void run_bwd(const BalanceParams& p, void* scratch, Stream stream) {
  const CausalScratch s(p, scratch);
  const int steps = s.kept.iterations;
  for_each_group(p, [&](const TiledArgs& t) {
    causal_start(t, true, s.matrix(0), s.totals, stream);
    replay(t, s, 0, steps, stream);
    for (int k = steps; k >= 0; --k) undo_step<kPrefix>(t, s, k, stream);
    check_launch("balance_bwd");
  });
}

}  // namespace

int64_t tiled_causal_bwd_scratch(const BalanceParams& p) { return CausalScratch(p, nullptr).bytes; }

void tiled_causal_bwd(const BalanceParams& p, void* scratch, Stream stream) {
  p.columns == Columns::kPrefix ? run_bwd<true>(p, scratch, stream)
                                : run_bwd<false>(p, scratch, stream);
}

}  // namespace sinkhorn::cuda::balance
