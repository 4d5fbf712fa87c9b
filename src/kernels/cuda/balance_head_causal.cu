// Balancing up to 128 blocks with prefix or prior columns: all iterations of a head in one CTA.
//
// In base 2, with z^0 = X [N, N], -inf where not allowed, and for k = 1 .. K
//
//   x^k = z^k - u^k_i,  u^k_i = lse_j(z^k_ij)                                       the row step
//   prefix   z^k = x^(k-1) - C,  C_ij = log2 of the sum over i' <= i of exp2(x^(k-1)_i'j)
//   prior    z^k = x^(k-1) - C,  C_ij = log2(1 + the sum over i' < i of the same)
//
// R = softmax_j(z^K). Kept for backward: u^0 .. u^K, N numbers each.
//
// Mapping. In the column layout a thread holds kEach rows on end of one column; kParts such
// segments make a column. A column step sums each segment, passes the sums through shared memory,
// and scans each segment from the sum of those above. Then z goes to the tile, where the row layout
// reduces it. Three barriers an iteration. Row i reads nothing of later rows, segments included, so
// no bit of it depends on them.
//
// Backward replays z^1 .. z^K from u, a column scan each, into scratch; then, from the last step,
//   row step k       g <- g - exp2(x^k) sum_j g
//   column step k    with C = x^(k-1) - z^k, up the rows:
//     prefix   W <- g + W exp2(C - C of the row below),  g <- g - exp2(z^k) W
//     prior    g' = g - exp2(x^(k-1)) W,  W <- W + g exp2(-C),  g <- g'
// A thread reads back only what it wrote itself. docs/math.md has the derivation.
#include "kernels/cuda/balance_head.cuh"
#include "kernels/cuda/balance_launch.h"
#include "kernels/cuda/balance_segment.cuh"

namespace sinkhorn::cuda::balance {
namespace {

template <class Shape>
struct CausalMemory {
  float tile[Shape::kSize * Shape::kStride];
  LogSum totals[2][Shape::kParts][Shape::kSize];  // of a segment; by the parity of the step
  Suffix suffixes[Shape::kParts][Shape::kSize];
  float u[2][Shape::kSize], sums[Shape::kSize];
  bool live[Shape::kSize];
};

// The column layout, with x or z of this thread's rows.
template <class Shape, bool kPrefix>
struct ColumnSegment {
  using Totals = LogSum[Shape::kParts][Shape::kSize];

  __device__ __forceinline__ ColumnSegment()
      : column(threadIdx.x % Shape::kSize), segment(threadIdx.x / Shape::kSize) {}
  __device__ __forceinline__ int row(int e) const { return segment * Shape::kEach + e; }
  __device__ __forceinline__ int tile(int e) const { return row(e) * Shape::kStride + column; }

  __device__ __forceinline__ void put_total(Totals& totals) const {
    totals[segment][column] = segment_total<kPrefix>(x);
  }
  // Of the segments above.
  __device__ __forceinline__ LogSum carry(const Totals& totals) const {
    LogSum s;
#pragma unroll
    for (int above = 0; above < Shape::kParts - 1; ++above) {
      if (above >= segment) break;
      if constexpr (kPrefix) {
        s.merge(totals[above][column]);
      } else {
        s.sum += totals[above][column].sum;
      }
    }
    return s;
  }
  // z^k becomes x^k.
  __device__ __forceinline__ void row_step(const float* u) {
#pragma unroll
    for (int e = 0; e < Shape::kEach; ++e) x[e] -= u[row(e)];
  }

  const int column, segment;
  float x[Shape::kEach];
};

template <class Shape, bool kPrefix>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    balance_head_causal_fwd_kernel(const __grid_constant__ Args a) {
  auto& m = shared_memory<CausalMemory<Shape>>();
  const int64_t head = blockIdx.x;
  const int n = static_cast<int>(a.p.blocks), steps = static_cast<int>(a.p.iterations);
  load_tile<Shape>(a, head, m.live, m.tile);
  const RowPlace<Shape> at_row;
  ColumnSegment<Shape, kPrefix> own;
#pragma unroll
  for (int e = 0; e < Shape::kEach; ++e) own.x[e] = m.tile[own.tile(e)];

  for (int k = 0;; ++k) {
    float t[Shape::kEach];
#pragma unroll
    for (int e = 0; e < Shape::kEach; ++e) t[e] = m.tile[at_row.tile(e)];
    const LogSum sum = row_log_sum<Shape>(t);
    if (at_row.leads()) {
      m.u[0][at_row.row] = sum.log();
      if (at_row.row < n) causal_terms(a.p, head, k)[at_row.row] = sum.log();
    }
    if (k == steps) {  // as a softmax with a sum of its own
      const float base = sum.base(), total = sum.empty() ? 1.0f : sum.sum;
#pragma unroll
      for (int e = 0; e < Shape::kEach; ++e) {
        m.tile[at_row.tile(e)] = exp2f(t[e] - base) / total;
      }
      break;
    }
    __syncthreads();
    own.row_step(m.u[0]);
    own.put_total(m.totals[0]);
    __syncthreads();
    step_columns<kPrefix>(own.x, own.carry(m.totals[0]));
#pragma unroll
    for (int e = 0; e < Shape::kEach; ++e) m.tile[own.tile(e)] = own.x[e];
    __syncthreads();
  }
  __syncthreads();
  store_tile<Shape>(a, head, m.tile);
}

template <class Shape, bool kPrefix>
class CausalBackward {
 public:
  __device__ __forceinline__ CausalBackward(const Args& a, const Replay& kept, float* scratch,
                                            CausalMemory<Shape>& memory)
      : a_(a),
        kept_(kept),
        head_(blockIdx.x),
        n_(static_cast<int>(a.p.blocks)),
        scratch_(scratch + head_ * kept.slots * kSlot + threadIdx.x % Shape::kSize +
                 threadIdx.x / Shape::kSize * (Shape::kEach * Shape::kSize)),
        m_(memory) {}

  __device__ __forceinline__ void run() {
    const int steps = kept_.iterations;
#pragma unroll
    for (int e = 0; e < Shape::kEach; ++e) own_.x[e] = m_.tile[own_.tile(e)];
    keep(0);
    replay(0, steps);
    const Matrix<float> grad(a_.p, a_.p.grad, head_);
#pragma unroll
    for (int e = 0; e < Shape::kEach; ++e) {
      g_[e] = own_.x[e] == kNothing ? 0.0f : grad.at(own_.row(e), own_.column);
    }
#pragma unroll
    for (int e = 0; e < Shape::kEach; ++e) g_[e] *= exp2f(own_.x[e]);
    for (int k = steps; k >= 1; --k) {
      undo_row_step(k);
      if (kept_.missing_below(k)) replay(k - kept_.stride, k - 1);
      undo_column_step(k);
    }
    undo_row_step(0);
    store();
  }

 private:
  static constexpr int64_t kSlot = Shape::kSize * Shape::kSize;

  __device__ __forceinline__ float* place(int k) const { return scratch_ + kept_.slot(k) * kSlot; }
  __device__ __forceinline__ void keep(int k) {
    float* to = place(k);
#pragma unroll
    for (int e = 0; e < Shape::kEach; ++e) to[e * Shape::kSize] = own_.x[e];
  }
  __device__ __forceinline__ void recall(int k, float (&z)[Shape::kEach]) const {
    const float* from = place(k);
#pragma unroll
    for (int e = 0; e < Shape::kEach; ++e) z[e] = from[e * Shape::kSize];
  }
  __device__ __forceinline__ float fetch_u(int k) const {
    const int i = threadIdx.x;
    return i < n_ ? causal_terms(a_.p, head_, k)[i] : 0.0f;
  }
  __device__ __forceinline__ void put_u(int k, float u) {
    if (threadIdx.x < Shape::kSize) m_.u[k & 1][threadIdx.x] = u;
  }

  // z of steps from + 1 .. to into scratch, and x of step `to` into own_; u of `to` stays in m_.u.
  __device__ __forceinline__ void replay(int from, int to) {
    __syncthreads();  // all have read the u that is overwritten
    put_u(from, fetch_u(from));
    recall(from, own_.x);
    __syncthreads();
    own_.row_step(m_.u[from & 1]);
    for (int k = from + 1; k <= to; ++k) {
      const float u = fetch_u(k);
      own_.put_total(m_.totals[k & 1]);
      put_u(k, u);
      __syncthreads();
      step_columns<kPrefix>(own_.x, own_.carry(m_.totals[k & 1]));
      keep(k);
      own_.row_step(m_.u[k & 1]);
    }
  }

  // Leaves u of step k - 1 in m_.u.
  __device__ __forceinline__ void undo_row_step(int k) {
    const float u = k > 0 ? fetch_u(k - 1) : 0.0f;
#pragma unroll
    for (int e = 0; e < Shape::kEach; ++e) m_.tile[own_.tile(e)] = g_[e];
    if (k > 0) put_u(k - 1, u);
    __syncthreads();
    float z[Shape::kEach];
    recall(k, z);
    const RowPlace<Shape> at_row;
    float sum = 0.0f;
#pragma unroll
    for (int e = 0; e < Shape::kEach; ++e) sum += m_.tile[at_row.tile(e)];
    sum = lanes_sum<Shape::kParts>(sum);
    if (at_row.leads()) m_.sums[at_row.row] = sum;
    __syncthreads();
#pragma unroll
    for (int e = 0; e < Shape::kEach; ++e) {
      const int r = own_.row(e);
      g_[e] -= exp2f(z[e] - m_.u[k & 1][r]) * m_.sums[r];
    }
  }

  __device__ __forceinline__ void undo_column_step(int k) {
    Suffix s;
    sweep_up<false>(k, s);
    m_.suffixes[own_.segment][own_.column] = s;
    __syncthreads();
    s = Suffix();
#pragma unroll
    for (int below = Shape::kParts - 1; below > 0; --below) {
      if (below <= own_.segment) break;
      add_segment<kPrefix>(s, m_.suffixes[below][own_.column]);
    }
    sweep_up<true>(k, s);
  }

  // Up this thread's rows with the running W; the second time g is changed by it.
  template <bool kApply>
  __device__ __forceinline__ void sweep_up(int k, Suffix& s) {
    const float *z_from = place(k), *x_from = place(k - 1), *u = m_.u[(k - 1) & 1];
#pragma unroll
    for (int e = Shape::kEach - 1; e >= 0; --e) {
      const float z = z_from[e * Shape::kSize], x = x_from[e * Shape::kSize] - u[own_.row(e)];
      if (z != kNothing) undo_column<kPrefix, kApply>(z, x, g_[e], s);
    }
  }

  __device__ __forceinline__ void store() const {
#pragma unroll
    for (int e = 0; e < Shape::kEach; ++e) {
      if (own_.row(e) >= n_ || own_.column >= n_) continue;
      store_as(a_.p.result, a_.p.logits.type, (head_ * n_ + own_.row(e)) * n_ + own_.column,
               g_[e] / a_.temperature);
    }
  }

  const Args& a_;
  const Replay kept_;
  const int64_t head_;
  const int n_;
  float* const scratch_;  // this thread's place in [slots, kSize, kSize]: z of the steps kept
  CausalMemory<Shape>& m_;
  ColumnSegment<Shape, kPrefix> own_;
  float g_[Shape::kEach];
};

template <class Shape, bool kPrefix>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    balance_head_causal_bwd_kernel(const __grid_constant__ Args a, const Replay kept,
                                   float* scratch) {
  auto& m = shared_memory<CausalMemory<Shape>>();
  load_tile<Shape>(a, blockIdx.x, m.live, m.tile);
  CausalBackward<Shape, kPrefix>(a, kept, scratch, m).run();
}

template <class Shape, bool kPrefix>
void launch_fwd(const BalanceParams& p, Stream stream) {
  launch_heads<Shape>("balance_fwd", balance_head_causal_fwd_kernel<Shape, kPrefix>, p,
                      sizeof(CausalMemory<Shape>), stream, make_args(p));
}

template <class Shape, bool kPrefix>
void launch_bwd(const BalanceParams& p, void* scratch, Stream stream) {
  launch_heads<Shape>("balance_bwd", balance_head_causal_bwd_kernel<Shape, kPrefix>, p,
                      sizeof(CausalMemory<Shape>), stream, make_args(p), Replay(p.iterations),
                      static_cast<float*>(scratch));
}

}  // namespace

int64_t head_causal_bwd_scratch(const BalanceParams& p) {
  int64_t slot = 0;
  with_head_shape(p.blocks, [&](auto shape) { slot = decltype(shape)::kSize; });
  slot *= slot * static_cast<int64_t>(sizeof(float));
  return p.batch * p.heads * Replay(p.iterations).slots * slot;
}

void head_causal_fwd(const BalanceParams& p, Stream stream) {
  with_head_shape(p.blocks, [&](auto shape) {
    using Shape = decltype(shape);
    p.columns == Columns::kPrefix ? launch_fwd<Shape, true>(p, stream)
                                  : launch_fwd<Shape, false>(p, stream);
  });
}

void head_causal_bwd(const BalanceParams& p, void* scratch, Stream stream) {
  with_head_shape(p.blocks, [&](auto shape) {
    using Shape = decltype(shape);
    p.columns == Columns::kPrefix ? launch_bwd<Shape, true>(p, scratch, stream)
                                  : launch_bwd<Shape, false>(p, scratch, stream);
  });
}

}  // namespace sinkhorn::cuda::balance
