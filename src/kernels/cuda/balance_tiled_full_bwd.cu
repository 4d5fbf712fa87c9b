// Balancing more than 128 blocks with full columns, with no column step, or not at all: backward.
//
// It goes through the potentials u and v that forward kept, and reads nothing but x [N, N], loaded
// again, until its last launch. As in balance_head_full_bwd.cu Q^k = exp2(x - u(k-1) - vk), whose
// columns sum to 1, and P^(k-1) = Q^k f_j, f = exp2(vk - v(k-1)), whose rows do. Let u' = du /
// sum_j P and v' = dv / sum_i Q, in which the rounding of u and v is divided out.
//
//   start     loads x;  r_i = 1 / sum_j P^K,  d_i = sum_j R dR;
//             parts of dvK_j = - sum_i R (dR - d_i), and of sum_i QK_ij
//   merge     v'k_j and fk_j from the parts of all chunks
//   step k    u'(k-1)_i = - sum_j v'k_j Qk_ij / sum_j Qk_ij fk_j;
//             parts of dv(k-1)_j = - sum_i u'(k-1)_i P(k-1)_ij, and of sum_i Q(k-1)_ij
//   in step 1 dx = R (dR - d_i) + sum_k Qk_ij (v'k_j + u'(k-1)_i fk_j) instead of the parts
//
// x is kept where the result goes if that is float32, else in scratch.
#include "kernels/cuda/balance_launch.h"
#include "kernels/cuda/balance_tiled.cuh"

namespace sinkhorn::cuda::balance {
namespace {

// Scratch of one group of heads.
struct FullScratch {
  float* x;                  // [heads, N, N], or null where x lies in the result
  float *sums, *ones;        // [heads, chunks, N]: parts of - dv, and of sum_i Q
  float *dots, *inverses;    // [heads, N]: d and r
  float *du, *dv, *factors;  // [heads, K, N]: u' of steps 0 .. K-1, v' and f of steps 1 .. K

  FullScratch(const BalanceParams& p, void* memory) {
    const int64_t heads = group_heads(p), n = p.blocks, steps = column_steps(p);
    float* next = static_cast<float*>(memory);
    const auto take = [&](int64_t count) {
      float* from = next;
      next += count;
      return from;
    };
    x = p.logits.type == Type::kFloat32 ? nullptr : take(heads * n * n);
    sums = take(heads * chunk_count(p) * n);
    ones = take(heads * chunk_count(p) * n);
    dots = take(heads * n);
    inverses = take(heads * n);
    du = take(heads * steps * n);
    dv = take(heads * steps * n);
    factors = take(heads * steps * n);
    count = next - static_cast<float*>(memory);
  }
  // A step's numbers of one head; k counts from 0.
  __device__ __forceinline__ float* step(float* vectors, const TiledArgs& t, int local,
                                         int64_t k) const {
    return vectors + (local * column_steps(t.a.p) + k) * t.a.p.blocks;
  }
  __device__ __forceinline__ float* row(const TiledArgs& t, const Chunk& chunk, int r) const {
    if (x == nullptr) return result_row(t.a.p, chunk.head, r);
    return x + (static_cast<int64_t>(chunk.local) * chunk.n + r) * chunk.n;
  }

  int64_t count;
};

// What the column passes of a chunk need of its rows.
struct ChunkRows {
  float u[kChunk], above[kChunk];           // u of the step at hand, and of the one before
  float weights[kChunk], inverses[kChunk];  // u' or d, and r

  // For rows beyond the last.
  __device__ __forceinline__ void clear() {
    const int i = threadIdx.x;
    if (i < kChunk) u[i] = above[i] = weights[i] = inverses[i] = 0.0f;
    __syncthreads();
  }
};

// The parts of column step k (1 .. K). Row i's term of the sum that is - dv is term(i, c, x, y),
// with y = load(i, c).
template <class Load, class Term>
__device__ __forceinline__ void put_parts(const TiledArgs& t, const Chunk& chunk,
                                          const FullScratch& scratch, int k, const float* above,
                                          const Load& load, const Term& term) {
  const int64_t at = (static_cast<int64_t>(chunk.local) * t.chunks + chunk.index) * chunk.n;
  const float* v = full_terms(t.a.p, chunk.head, 2 * k - 1);
  const float* x = scratch.row(t, chunk, chunk.first);
  for (int c = threadIdx.x; c < chunk.n; c += kTileThreads) {
    const Column column(t.a.p, chunk, chunk.n, c);
    const float own = v[c];
    float sum = 0.0f, one = 0.0f;
    for (int base = 0; base < chunk.count && column.from < chunk.count; base += kAhead) {
      float part[kAhead], y[kAhead];
      column.load(x, base, part);
#pragma unroll
      for (int q = 0; q < kAhead; ++q) {
        y[q] = part[q] == kNothing ? 0.0f : load(base + q, c);
      }
#pragma unroll
      for (int q = 0; q < kAhead; ++q) {
        sum += term(base + q, c, part[q], y[q]);
        one += exp2f(part[q] - own - above[base + q]);
      }
    }
    scratch.sums[at + c] = sum;
    scratch.ones[at + c] = one;
  }
}

// x and dR of row r.
struct RowPair {
  // Columns base, base + 32, ...; -inf and 0 where not allowed.
  __device__ __forceinline__ void load(int base, float (&own)[kLoads], float (&dr)[kLoads]) const {
#pragma unroll
    for (int q = 0; q < kLoads; ++q) own[q] = base + 32 * q < end ? x[base + 32 * q] : kNothing;
#pragma unroll
    for (int q = 0; q < kLoads; ++q) {
      dr[q] = own[q] == kNothing ? 0.0f : grad.at(r, base + 32 * q);
    }
  }

  const float* x;
  const Matrix<float>& grad;
  int r, end;
};

template <class T>
__global__ void __launch_bounds__(kTileThreads, 2)
    balance_tiled_full_bwd_start_kernel(const __grid_constant__ TiledArgs t,
                                        const __grid_constant__ FullScratch scratch) {
  __shared__ ChunkRows rows;
  rows.clear();
  const Chunk chunk(t);
  const BalanceParams& p = t.a.p;
  const int steps = static_cast<int>(column_steps(p));
  const Matrix<float> grad(p, p.grad, chunk.head);
  const float* v = steps > 0 ? full_terms(p, chunk.head, 2 * steps - 1) : nullptr;
  for (int i = warp_index(); i < chunk.count; i += kTileWarps) {
    const int r = chunk.first + i, end = source_end(p, r);
    float* x = scratch.row(t, chunk, r);
    load_row<T>(t.a, chunk.head, r, x);
    const RowPair pair{x, grad, r, end};
    const float u = p.iterations > 0 ? full_terms(p, chunk.head, 2 * steps)[r] : 0.0f;
    const auto share = [&](float x, int c) {
      if (p.iterations == 0) return expf(x);
      return exp2f(v == nullptr || c >= end ? x - u : x - v[c] - u);
    };
    float whole = 0.0f, dot = 0.0f;
    for (int base = lane_index(); base < end; base += 32 * kLoads) {
      float own[kLoads], dr[kLoads];
      pair.load(base, own, dr);
#pragma unroll
      for (int q = 0; q < kLoads; ++q) {
        const float e = share(own[q], base + 32 * q);
        whole += e;
        dot += e * dr[q];
      }
    }
    whole = lanes_sum<32>(whole);
    dot = lanes_sum<32>(dot);
    const float inverse = p.iterations == 0 ? 1.0f : reciprocal(whole);
    dot = p.iterations == 0 ? 0.0f : dot * inverse;
    if (steps == 0) {
      for (int base = lane_index(); base < chunk.n; base += 32 * kLoads) {
        float own[kLoads], dr[kLoads];
        pair.load(base, own, dr);
#pragma unroll
        for (int q = 0; q < kLoads; ++q) {
          const int c = base + 32 * q;
          const float g = share(own[q], c) * inverse * (dr[q] - dot) / t.a.temperature;
          if (c < chunk.n) {
            store_as(p.result, p.logits.type, (chunk.head * chunk.n + r) * chunk.n + c,
                     own[q] == kNothing ? 0.0f : g);
          }
        }
      }
    } else if (lane_index() == 0) {
      rows.u[i] = u;
      rows.above[i] = full_terms(p, chunk.head, 2 * steps - 2)[r];
      scratch.dots[static_cast<int64_t>(chunk.local) * chunk.n + r] = rows.weights[i] = dot;
      scratch.inverses[static_cast<int64_t>(chunk.local) * chunk.n + r] = rows.inverses[i] =
          inverse;
    }
  }
  if (steps == 0) return;
  __syncthreads();
  put_parts(
      t, chunk, scratch, steps, rows.above,
      [&](int i, int c) { return grad.at(chunk.first + i, c); },
      [&](int i, int c, float x, float dr) {
        return exp2f(x - v[c] - rows.u[i]) * rows.inverses[i] * (dr - rows.weights[i]);
      });
}

// v' and f of column step k (1 .. K).
__global__ void __launch_bounds__(32 * kMergeWarps)
    balance_tiled_full_bwd_merge_kernel(const __grid_constant__ TiledArgs t, int k,
                                        const __grid_constant__ FullScratch scratch) {
  __shared__ float sums[kMergeWarps][32], ones[kMergeWarps][32];
  const int n = static_cast<int>(t.a.p.blocks), c = blockIdx.x * 32 + lane_index();
  const int local = blockIdx.y;
  float sum = 0.0f, one = 0.0f;
  if (c < n) {
    const int64_t at = static_cast<int64_t>(local) * t.chunks * n + c;
    for (int i = warp_index(); i < t.chunks; i += kMergeWarps) {
      sum += scratch.sums[at + static_cast<int64_t>(i) * n];
      one += scratch.ones[at + static_cast<int64_t>(i) * n];
    }
  }
  sums[warp_index()][lane_index()] = sum;
  ones[warp_index()][lane_index()] = one;
  __syncthreads();
  if (warp_index() > 0 || c >= n) return;
  for (int w = 1; w < kMergeWarps; ++w) {
    sum += sums[w][lane_index()];
    one += ones[w][lane_index()];
  }
  const int64_t head = t.first_head + local;
  const float above = k > 1 ? full_terms(t.a.p, head, 2 * k - 3)[c] : 0.0f;
  scratch.step(scratch.dv, t, local, k - 1)[c] = -sum * reciprocal(one);
  scratch.step(scratch.factors, t, local, k - 1)[c] =
      exp2f(full_terms(t.a.p, head, 2 * k - 1)[c] - above);
}

// The gradient of the logits on this chunk, when all u' and v' are known.
__device__ __forceinline__ void put_gradient(const TiledArgs& t, const Chunk& chunk,
                                             const FullScratch& scratch, const ChunkRows& rows) {
  const BalanceParams& p = t.a.p;
  const int steps = static_cast<int>(column_steps(p)), n = chunk.n;
  const Matrix<float> grad(p, p.grad, chunk.head);
  const float* v = full_terms(p, chunk.head, 2 * steps - 1);
  const float* x = scratch.row(t, chunk, chunk.first);
  for (int c = threadIdx.x; c < n; c += kTileThreads) {
    const Column column(p, chunk, n, c);
    for (int base = 0; base < chunk.count; base += kAhead) {
      float own[kAhead], g[kAhead];
      column.load(x, base, own);
#pragma unroll
      for (int q = 0; q < kAhead; ++q) {
        g[q] = own[q] == kNothing ? 0.0f : grad.at(chunk.first + base + q, c);
      }
#pragma unroll
      for (int q = 0; q < kAhead; ++q) {
        const int i = base + q;
        g[q] = exp2f(own[q] - v[c] - rows.u[i]) * rows.inverses[i] * (g[q] - rows.weights[i]);
      }
      for (int k = steps; k >= 1; --k) {
        const float term = full_terms(p, chunk.head, 2 * k - 1)[c];
        const float dv = scratch.step(scratch.dv, t, chunk.local, k - 1)[c];
        const float factor = scratch.step(scratch.factors, t, chunk.local, k - 1)[c];
        const float* u = full_terms(p, chunk.head, 2 * k - 2) + chunk.first;
        const float* du = scratch.step(scratch.du, t, chunk.local, k - 1) + chunk.first;
#pragma unroll
        for (int q = 0; q < kAhead; ++q) {
          const int i = min(base + q, chunk.count - 1);
          g[q] += exp2f(own[q] - term - u[i]) * (dv + du[i] * factor);
        }
      }
#pragma unroll
      for (int q = 0; q < kAhead; ++q) {
        if (base + q >= chunk.count) continue;
        store_as(p.result, p.logits.type, (chunk.head * n + chunk.first + base + q) * n + c,
                 own[q] == kNothing ? 0.0f : g[q] / t.a.temperature);
      }
    }
  }
}

// u' of row step k - 1, then the parts of column step k - 1, or behind step 1 the result.
template <bool kLast>
__global__ void __launch_bounds__(kTileThreads, 2)
    balance_tiled_full_bwd_step_kernel(const __grid_constant__ TiledArgs t, int k,
                                       const __grid_constant__ FullScratch scratch) {
  __shared__ ChunkRows rows;
  rows.clear();
  const Chunk chunk(t);
  const BalanceParams& p = t.a.p;
  const float* v = full_terms(p, chunk.head, 2 * k - 1);
  const float* dv = scratch.step(scratch.dv, t, chunk.local, k - 1);
  const float* factors = scratch.step(scratch.factors, t, chunk.local, k - 1);
  for (int i = warp_index(); i < chunk.count; i += kTileWarps) {
    const int r = chunk.first + i, end = source_end(p, r);
    const float* x = scratch.row(t, chunk, r);
    const float u = full_terms(p, chunk.head, 2 * k - 2)[r];
    float sum = 0.0f, whole = 0.0f;
#pragma unroll 4
    for (int c = lane_index(); c < end; c += 32) {
      const float share = exp2f(x[c] - v[c] - u);
      sum += dv[c] * share;
      whole += share * factors[c];
    }
    const float du = -lanes_sum<32>(sum) * reciprocal(lanes_sum<32>(whole));
    if (lane_index() > 0) continue;
    scratch.step(scratch.du, t, chunk.local, k - 1)[r] = du;
    const int64_t at = static_cast<int64_t>(chunk.local) * chunk.n + r;
    if constexpr (!kLast) {
      rows.u[i] = u;
      rows.above[i] = full_terms(p, chunk.head, 2 * k - 4)[r];
      rows.weights[i] = du;
    } else {
      rows.u[i] = full_terms(p, chunk.head, 2 * column_steps(p))[r];
      rows.weights[i] = scratch.dots[at];
      rows.inverses[i] = scratch.inverses[at];
    }
  }
  __syncthreads();
  if constexpr (kLast) {
    put_gradient(t, chunk, scratch, rows);
  } else {
    put_parts(
        t, chunk, scratch, k - 1, rows.above, [](int, int) { return 0.0f; },
        [&](int i, int c, float x, float) {
          return rows.weights[i] * (exp2f(x - v[c] - rows.u[i]) * factors[c]);
        });
  }
}

}  // namespace

int64_t tiled_full_bwd_scratch(const BalanceParams& p) {
  return FullScratch(p, nullptr).count * static_cast<int64_t>(sizeof(float));
}

void tiled_full_bwd(const BalanceParams& p, void* scratch, Stream stream) {
  const FullScratch s(p, scratch);
  const int steps = static_cast<int>(column_steps(p));
  for_each_group(p, [&](const TiledArgs& t) {
    with_logits_type(p, [&](auto type) {
      balance_tiled_full_bwd_start_kernel<decltype(type)>
          <<<t.ctas(), kTileThreads, 0, stream>>>(t, s);
    });
    for (int k = steps; k >= 1; --k) {
      balance_tiled_full_bwd_merge_kernel<<<merge_grid(t), 32 * kMergeWarps, 0, stream>>>(t, k, s);
      const auto kernel = k == 1 ? balance_tiled_full_bwd_step_kernel<true>
                                 : balance_tiled_full_bwd_step_kernel<false>;
      kernel<<<t.ctas(), kTileThreads, 0, stream>>>(t, k, s);
    }
    check_launch("balance_bwd");
  });
}

}  // namespace sinkhorn::cuda::balance
