// Balancing more than 128 blocks with full columns, with no column step, or not at all: forward.
//
// The equations are those of balance_head_full.cuh; x [N, N] lies in the result, where R takes its
// place in the end. A launch each:
//
//   start     loads x;  u0_i = lse_j(x_ij);     each chunk's part of lse_i(x_ij - u0_i)
//   merge     vk_j from the parts of all chunks
//   step k    uk_i = lse_j(x_ij - vk_j);        each chunk's part of lse_i(x_ij - uk_i), or R
//
// So x is read from memory once an iteration, and once more from the caches. Kept for backward:
// u0 v1 u1 ... vK uK, N numbers each.
#include "kernels/cuda/balance_launch.h"
#include "kernels/cuda/balance_tiled.cuh"

namespace sinkhorn::cuda::balance {
namespace {

// Each column's log sum of x - u over the chunk. totals: [heads, chunks, N]
__device__ __forceinline__ void put_totals(const TiledArgs& t, const Chunk& chunk, const float* u,
                                           LogSum* totals) {
  LogSum* to = totals + (static_cast<int64_t>(chunk.local) * t.chunks + chunk.index) * chunk.n;
  const float* x = result_row(t.a.p, chunk.head, chunk.first);
  for (int c = threadIdx.x; c < chunk.n; c += kTileThreads) {
    LogSum s;
    const Column column(t.a.p, chunk, chunk.n, c);
    for (int base = 0; base < chunk.count && column.from < chunk.count; base += kAhead) {
      float part[kAhead];
      column.load(x, base, part);
#pragma unroll
      for (int q = 0; q < kAhead; ++q) part[q] -= u[base + q];
      s.add(part);
    }
    to[c] = s;
  }
}

template <class T>
__global__ void __launch_bounds__(kTileThreads, 2)
    balance_tiled_full_start_kernel(const __grid_constant__ TiledArgs t, LogSum* totals) {
  __shared__ float u[kChunk];
  if (threadIdx.x < kChunk) u[threadIdx.x] = 0.0f;  // for rows beyond the last
  __syncthreads();
  const Chunk chunk(t);
  const bool last = column_steps(t.a.p) == 0;
  for (int i = warp_index(); i < chunk.count; i += kTileWarps) {
    const int r = chunk.first + i;
    float* x = result_row(t.a.p, chunk.head, r);
    const LogSum s = load_row<T>(t.a, chunk.head, r, x);
    if (lane_index() == 0 && t.a.p.iterations > 0) {
      full_terms(t.a.p, chunk.head, 0)[r] = u[i] = s.log();
    }
    if (last) store_row(t.a, r, s, x, [&](int c) { return x[c]; });
  }
  if (last) return;
  __syncthreads();
  put_totals(t, chunk, u, totals);
}

__global__ void __launch_bounds__(kTileThreads, 2)
    balance_tiled_full_step_kernel(const __grid_constant__ TiledArgs t, int k, LogSum* totals) {
  __shared__ float u[kChunk];
  if (threadIdx.x < kChunk) u[threadIdx.x] = 0.0f;  // for rows beyond the last
  __syncthreads();
  const Chunk chunk(t);
  const bool last = k == column_steps(t.a.p);
  const float* v = full_terms(t.a.p, chunk.head, 2 * k - 1);
  for (int i = warp_index(); i < chunk.count; i += kTileWarps) {
    const int r = chunk.first + i;
    float* x = result_row(t.a.p, chunk.head, r);
    const auto value = [&](int c) { return x[c] - v[c]; };
    const LogSum s = row_log_sum(source_end(t.a.p, r), value);
    if (lane_index() == 0) full_terms(t.a.p, chunk.head, 2 * k)[r] = u[i] = s.log();
    if (last) store_row(t.a, r, s, x, value);
  }
  if (last) return;
  __syncthreads();
  put_totals(t, chunk, u, totals);
}

// v of step k. 32 columns of one head a CTA; warp w takes chunks w, w + 8, ...
__global__ void __launch_bounds__(32 * kMergeWarps)
    balance_tiled_full_merge_kernel(const __grid_constant__ TiledArgs t, int k,
                                    const LogSum* totals) {
  __shared__ float tops[kMergeWarps][32], sums[kMergeWarps][32];
  const int n = static_cast<int>(t.a.p.blocks), c = blockIdx.x * 32 + lane_index();
  LogSum s;
  if (c < n) {
    const LogSum* from = totals + static_cast<int64_t>(blockIdx.y) * t.chunks * n + c;
    for (int i = warp_index(); i < t.chunks; i += kMergeWarps) {
      s.merge(from[static_cast<int64_t>(i) * n]);
    }
  }
  tops[warp_index()][lane_index()] = s.top;
  sums[warp_index()][lane_index()] = s.sum;
  __syncthreads();
  if (warp_index() > 0 || c >= n) return;
  for (int w = 1; w < kMergeWarps; ++w) {
    LogSum other;
    other.top = tops[w][lane_index()];
    other.sum = sums[w][lane_index()];
    s.merge(other);
  }
  full_terms(t.a.p, t.first_head + blockIdx.y, 2 * k - 1)[c] = s.log();
}

}  // namespace

int64_t tiled_full_fwd_scratch(const BalanceParams& p) {
  if (column_steps(p) == 0) return 0;
  return group_heads(p) * chunk_count(p) * p.blocks * static_cast<int64_t>(sizeof(LogSum));
}

void tiled_full_fwd(const BalanceParams& p, void* scratch, Stream stream) {
  LogSum* totals = static_cast<LogSum*>(scratch);
  const int steps = static_cast<int>(column_steps(p));
  for_each_group(p, [&](const TiledArgs& t) {
    with_logits_type(p, [&](auto type) {
      balance_tiled_full_start_kernel<decltype(type)>
          <<<t.ctas(), kTileThreads, 0, stream>>>(t, totals);
    });
    for (int k = 1; k <= steps; ++k) {
      balance_tiled_full_merge_kernel<<<merge_grid(t), 32 * kMergeWarps, 0, stream>>>(t, k, totals);
      balance_tiled_full_step_kernel<<<t.ctas(), kTileThreads, 0, stream>>>(t, k, totals);
    }
    check_launch("balance_fwd");
  });
}

}  // namespace sinkhorn::cuda::balance
