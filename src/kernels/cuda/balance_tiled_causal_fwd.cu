// Balancing more than 128 blocks with prefix or prior columns: forward, and what backward replays.
//
// The equations are those of balance_head_causal.cu. z^k [N, N] lies in the result, each in place
// of the one before, and R in place of the last. Kept for backward: u^0 .. u^K, N numbers each.
//
// A column step is two launches: `carry` turns the chunks' totals of a column into what lies above
// each chunk, and `step` scans each chunk from there. Its CTA owns whole rows, so it goes on to
// take the row step, and the totals for the next iteration:
//
//   z^k = x^(k-1) - C   down the columns of the chunk, from the carry
//   u^k = lse_j z^k     along its rows; when replaying, u is known
//   totals of x^k = z^k - u^k, each column over the chunk
//
// Only what the causal rule allows is stored or read: row i reads columns below source_end(i), and
// column c rows from first_reader(c) on. Which terms are added in which order depends on indices
// alone, and none on later rows.
#include "kernels/cuda/balance_launch.h"
#include "kernels/cuda/balance_tiled_causal.cuh"

namespace sinkhorn::cuda::balance {
namespace {

// The totals of x = z - u.
template <bool kPrefix>
__device__ __forceinline__ void put_totals(const TiledArgs& t, const Chunk& chunk,
                                           const RowStore& store, const float* u, LogSum* totals) {
  const float* z = store.rows(t, chunk);
  LogSum* to = chunk_totals(t, chunk, totals);
  const int stride = store.stride(chunk);
  for (int c = threadIdx.x; c < chunk.columns; c += kTileThreads) {
    const Column column(t.a.p, chunk, stride, c);
    LogSum s;
    for (int base = 0; base < chunk.count; base += kAhead) {
      float x[kAhead];
      column.load(z, base, x);
#pragma unroll
      for (int q = 0; q < kAhead; ++q) x[q] -= u[base + q];
      if constexpr (kPrefix) {
        s.add(x);
      } else {
#pragma unroll
        for (int q = 0; q < kAhead; ++q) s.sum += exp2f(x[q]);
      }
    }
    to[c] = s;
  }
}

template <bool kPrefix>
__global__ void __launch_bounds__(kTileThreads, 2)
    balance_tiled_causal_totals_kernel(const __grid_constant__ TiledArgs t, int k,
                                       const RowStore store, LogSum* totals) {
  __shared__ float u[kChunk];
  const Chunk chunk(t);
  load_terms(t, chunk, k, u);
  __syncthreads();
  put_totals<kPrefix>(t, chunk, store, u, totals);
}

// z^0 = X, u^0 (unless it is known), and the totals of x^0.
template <class T, bool kPrefix>
__global__ void __launch_bounds__(kTileThreads, 2)
    balance_tiled_causal_start_kernel(const __grid_constant__ TiledArgs t, bool replay,
                                      const RowStore store, LogSum* totals) {
  __shared__ float u[kChunk];
  const Chunk chunk(t);
  for (int i = warp_index(); i < kChunk; i += kTileWarps) {
    const int r = chunk.first + i;
    float term = 0.0f;
    if (i < chunk.count) {
      float* x = store.rows(t, chunk) + static_cast<int64_t>(i) * store.stride(chunk);
      term = load_row<T>(t.a, chunk.head, r, x).log();
      float* kept = causal_terms(t.a.p, chunk.head, 0) + r;
      if (replay) term = *kept;
      if (!replay && lane_index() == 0) *kept = term;
    }
    if (lane_index() == 0) u[i] = term;
  }
  __syncthreads();
  put_totals<kPrefix>(t, chunk, store, u, totals);
}

// Totals become what lies above each chunk. A thread takes a column of one head.
template <bool kPrefix>
__global__ void __launch_bounds__(kCarryThreads)
    balance_tiled_causal_carry_kernel(const __grid_constant__ TiledArgs t, LogSum* totals) {
  const int n = static_cast<int>(t.a.p.blocks), c = blockIdx.x * kCarryThreads + threadIdx.x;
  if (c >= n || first_reader(t.a.p, c) >= n) return;
  LogSum* column = totals + static_cast<int64_t>(blockIdx.y) * t.chunks * n + c;
  LogSum above;
  // The chunk of the first row that reads the column; what is before it holds nothing.
  for (int base = first_reader(t.a.p, c) / kChunk; base < t.chunks; base += kAhead) {
    LogSum total[kAhead];
#pragma unroll
    for (int q = 0; q < kAhead; ++q) {
      if (base + q < t.chunks) total[q] = column[static_cast<int64_t>(base + q) * n];
    }
#pragma unroll
    for (int q = 0; q < kAhead; ++q) {
      if (base + q >= t.chunks) continue;
      column[static_cast<int64_t>(base + q) * n] = above;
      if constexpr (kPrefix) {
        above.merge(total[q]);
      } else {
        above.sum += total[q].sum;
      }
    }
  }
}

// z^k from z^(k-1) on a chunk's columns; `above` is u of step k - 1.
template <bool kPrefix>
__device__ __forceinline__ void column_step(const TiledArgs& t, const Chunk& chunk,
                                            const CausalStep& step, const float* above) {
  const float* in = step.in.rows(t, chunk);
  float* out = step.out.rows(t, chunk);
  const LogSum* carry = chunk_totals(t, chunk, step.totals);
  const int stride = step.in.stride(chunk);
  for (int c = threadIdx.x; c < chunk.columns; c += kTileThreads) {
    const Column column(t.a.p, chunk, stride, c);
    LogSum s = carry[c];
    for (int base = 0; base < chunk.count; base += kAhead) {
      float x[kAhead];
      column.load(in, base, x);
#pragma unroll
      for (int q = 0; q < kAhead; ++q) {
        float z = x[q] - above[base + q];
        if constexpr (kPrefix) {
          s.add(z);
          if (z != kNothing) z = (z - s.top) - log2f(s.sum);
        } else {
          const float own = exp2f(z);
          z -= log2f(1.0f + s.sum);
          s.sum += own;
        }
        if (column.inside(base + q)) out[column.at(base + q)] = z;
      }
    }
  }
}

// Step k: the column step, the row step, and the totals for the next one or, behind the last, R in
// place of z.
template <bool kPrefix, bool kReplay>
__global__ void __launch_bounds__(kTileThreads, 2)
    balance_tiled_causal_step_kernel(const __grid_constant__ TiledArgs t,
                                     const __grid_constant__ CausalStep step) {
  __shared__ float above[kChunk], u[kChunk];
  const Chunk chunk(t);
  load_terms(t, chunk, step.k - 1, above);
  if constexpr (kReplay) load_terms(t, chunk, step.k, u);
  __syncthreads();
  column_step<kPrefix>(t, chunk, step, above);
  if constexpr (!kReplay) {
    __syncthreads();
    for (int i = warp_index(); i < kChunk; i += kTileWarps) {
      const int r = chunk.first + i;
      LogSum s;
      if (i < chunk.count) {
        float* z = step.out.rows(t, chunk) + static_cast<int64_t>(i) * step.out.stride(chunk);
        const auto value = [&](int c) { return z[c]; };
        s = row_log_sum(source_end(t.a.p, r), value);
        if (lane_index() == 0) causal_terms(t.a.p, chunk.head, step.k)[r] = s.log();
        if (!step.more) store_row(t.a, r, s, z, value);
      }
      if (lane_index() == 0) u[i] = s.log();
    }
    __syncthreads();
  }
  if (step.more) put_totals<kPrefix>(t, chunk, step.out, u, step.totals);
}

// Calls body with std::bool_constant of whether the columns are prefix sums.
template <class Body>
void with_columns(const TiledArgs& t, const Body& body) {
  t.a.p.columns == Columns::kPrefix ? body(std::true_type()) : body(std::false_type());
}

}  // namespace

void causal_start(const TiledArgs& t, bool replay, const RowStore& store, LogSum* totals,
                  Stream stream) {
  with_columns(t, [&](auto prefix) {
    with_logits_type(t.a.p, [&](auto type) {
      balance_tiled_causal_start_kernel<decltype(type), prefix.value>
          <<<t.ctas(), kTileThreads, 0, stream>>>(t, replay, store, totals);
    });
  });
  check_launch("balance start");
}

void causal_totals(const TiledArgs& t, int k, const RowStore& z, LogSum* totals, Stream stream) {
  with_columns(t, [&](auto prefix) {
    balance_tiled_causal_totals_kernel<prefix.value>
        <<<t.ctas(), kTileThreads, 0, stream>>>(t, k, z, totals);
  });
  check_launch("balance totals");
}

void causal_step(const TiledArgs& t, const CausalStep& step, Stream stream) {
  with_columns(t, [&](auto prefix) {
    balance_tiled_causal_carry_kernel<prefix.value>
        <<<carry_grid(t), kCarryThreads, 0, stream>>>(t, step.totals);
    const auto kernel = step.replay ? balance_tiled_causal_step_kernel<prefix.value, true>
                                    : balance_tiled_causal_step_kernel<prefix.value, false>;
    kernel<<<t.ctas(), kTileThreads, 0, stream>>>(t, step);
  });
  check_launch("balance step");
}

int64_t tiled_causal_fwd_scratch(const BalanceParams& p) {
  return group_heads(p) * chunk_count(p) * p.blocks * static_cast<int64_t>(sizeof(LogSum));
}

void tiled_causal_fwd(const BalanceParams& p, void* scratch, Stream stream) {
  LogSum* totals = static_cast<LogSum*>(scratch);
  const int steps = static_cast<int>(p.iterations);
  for_each_group(p, [&](const TiledArgs& t) {
    const int64_t first = t.first_head * p.blocks * p.blocks;
    const RowStore store{static_cast<float*>(p.result) + first, false};
    causal_start(t, false, store, totals, stream);
    for (int k = 1; k <= steps; ++k) {
      causal_step(t, {k, false, k < steps, store, store, totals}, stream);
    }
  });
}

}  // namespace sinkhorn::cuda::balance
