// Balancing up to 16 blocks with prefix or prior columns: all iterations of a head in one warp. The
// equations, and what is kept for backward, are those of balance_head_causal.cu.
//
// Mapping. The matrix is padded to kSize = 8 or 16 rows and columns, -inf outside. Eight lanes,
// each with every eighth column, share kEach rows on end; the four such groups are segments of the
// columns. Row steps reduce over the eight lanes and column steps pass the segments' sums on, all
// by shuffles, so that nothing waits at a barrier: at this size time is the latency of one step
// after another. Row i reads nothing of later rows, segments included, so no bit of it depends on
// them.
//
// Backward replays z^1 .. z^K from u into shared memory, where each lane reads back only what it
// wrote itself, and then undoes the steps from the last.
#include "kernels/cuda/balance_launch.h"
#include "kernels/cuda/balance_segment.cuh"
#include "kernels/cuda/check.cuh"
#include "kernels/cuda/early.cuh"

namespace sinkhorn::cuda::balance {
namespace {

constexpr int kHeads = 4;  // to a CTA, a warp each
constexpr int kLanes = 8;  // that share a row
constexpr int kSegments = 32 / kLanes;
constexpr int kMostBlocks = 16, kMostIterations = 7;  // the latter in backward
constexpr unsigned kAll = 0xFFFFFFFFu;

template <int kBlocks>
struct WarpShape {
  static constexpr int kSize = kBlocks;
  static constexpr int kColumns = kSize / kLanes;  // a lane's
  static constexpr int kEach = kSize / kSegments;  // rows of a segment
};

// A lane's part of one head's matrix: x or z.
template <class Shape, bool kPrefix>
struct WarpPart {
  static constexpr int kColumns = Shape::kColumns, kEach = Shape::kEach;

  __device__ __forceinline__ WarpPart()
      : lane(threadIdx.x % 32), segment(lane / kLanes), first(lane % kLanes) {}
  __device__ __forceinline__ int row(int e) const { return segment * kEach + e; }
  __device__ __forceinline__ int column(int c) const { return c * kLanes + first; }
  __device__ __forceinline__ bool leads() const { return first == 0; }

  template <class T>
  __device__ __forceinline__ void load_as(const Args& a, int64_t head) {
    const int n = static_cast<int>(a.p.blocks);
    const int64_t batch = head / a.p.heads;
    const Matrix<T> logits(a.p, a.p.logits, head);
    const Matrix<float> noise(a.p, a.p.noise, head);
    bool allowed[kColumns][kEach];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {  // all loads before the first of them is waited for
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        const int i = row(e), j = column(c);
        allowed[c][e] = i < n && j < n && j < source_end(a.p, i) && is_live(a.p, batch, i) &&
                        is_live(a.p, batch, j);
        x[c][e] = allowed[c][e] ? logits.at(i, j) : kNothing;
        if (noise.data != nullptr && allowed[c][e]) x[c][e] += noise.at(i, j);
      }
    }
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        if (allowed[c][e]) x[c][e] = scaled(a, x[c][e]);
      }
    }
  }
  __device__ __forceinline__ void load(const Args& a, int64_t head) {
    switch (a.p.logits.type) {
      case Type::kBFloat16: return load_as<__nv_bfloat16>(a, head);
      case Type::kFloat16: return load_as<__half>(a, head);
      default: return load_as<float>(a, head);
    }
  }

  // Over row e; all of its lanes get the same bits.
  __device__ __forceinline__ LogSum row_sum(int e) const {
    LogSum s;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) s.top = fmaxf(s.top, x[c][e]);
    s.top = lanes_max<kLanes>(s.top);
    const float base = s.base();
#pragma unroll
    for (int c = 0; c < kColumns; ++c) s.sum += exp2f(x[c][e] - base);
    s.sum = lanes_sum<kLanes>(s.sum);
    return s;
  }
  // z^k becomes x^k.
  __device__ __forceinline__ void row_step(int e, float u) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) x[c][e] -= u;
  }
  // x^(k-1) becomes z^k.
  __device__ __forceinline__ void column_step() {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      step_columns<kPrefix>(x[c], above(segment_total<kPrefix>(x[c])));
    }
  }

  const int lane, segment, first;
  float x[kColumns][kEach];

 private:
  // The sum of the segments above this one, from the total of each.
  __device__ __forceinline__ LogSum above(const LogSum& own) const {
    LogSum s, total[kSegments - 1];
#pragma unroll
    for (int i = 0; i < kSegments - 1; ++i) {
      total[i].top = __shfl_sync(kAll, own.top, i * kLanes + first);
      total[i].sum = __shfl_sync(kAll, own.sum, i * kLanes + first);
      if (i < segment) s.top = fmaxf(s.top, total[i].top);
    }
    const float base = s.base();
#pragma unroll
    for (int i = 0; i < kSegments - 1; ++i) {
      if (i >= segment) continue;
      s.sum += kPrefix ? total[i].sum * exp2f(total[i].top - base) : total[i].sum;
    }
    return s;
  }
};

template <class Shape, bool kPrefix>
__global__ void __launch_bounds__(32 * kHeads)
    balance_warp_causal_fwd_kernel(const __grid_constant__ Args a) {
  begin_early();
  const int64_t head = int64_t{blockIdx.x} * kHeads + threadIdx.x / 32;
  if (head >= a.p.batch * a.p.heads) return;
  const int n = static_cast<int>(a.p.blocks), steps = static_cast<int>(a.p.iterations);
  WarpPart<Shape, kPrefix> own;
  own.load(a, head);
  for (int k = 0;; ++k) {
    LogSum sum[Shape::kEach];
#pragma unroll
    for (int e = 0; e < Shape::kEach; ++e) sum[e] = own.row_sum(e);
    float* terms = causal_terms(a.p, head, k);
#pragma unroll
    for (int e = 0; e < Shape::kEach; ++e) {
      if (own.leads() && own.row(e) < n) terms[own.row(e)] = sum[e].log();
    }
    if (k == steps) {  // as a softmax with a sum of its own
      float* result = static_cast<float*>(a.p.result) + head * n * n;
#pragma unroll
      for (int e = 0; e < Shape::kEach; ++e) {
        const float base = sum[e].base(), total = sum[e].empty() ? 1.0f : sum[e].sum;
#pragma unroll
        for (int c = 0; c < Shape::kColumns; ++c) {
          const int i = own.row(e), j = own.column(c);
          if (i < n && j < n) result[i * n + j] = exp2f(own.x[c][e] - base) / total;
        }
      }
      return;
    }
#pragma unroll
    for (int e = 0; e < Shape::kEach; ++e) own.row_step(e, sum[e].log());
    own.column_step();
  }
}

template <class Shape>
struct WarpMemory {
  float z[kMostIterations + 1][Shape::kColumns][Shape::kEach][32];  // by lane
  float u[kMostIterations + 1][Shape::kSize];
};

template <class Shape, bool kPrefix>
class WarpBackward {
 public:
  __device__ __forceinline__ WarpBackward(const Args& a, int64_t head, WarpMemory<Shape>& memory)
      : a_(a), head_(head), n_(static_cast<int>(a.p.blocks)), m_(memory) {}

  __device__ __forceinline__ void run() {
    const int steps = static_cast<int>(a_.p.iterations);
    load_gradient();
    const float* terms = causal_terms(a_.p, head_, 0);  // those of all steps on end
    const int count = (steps + 1) * n_;
    float term[kMostTerms];
#pragma unroll
    for (int q = 0; q < kMostTerms; ++q) {
      const int i = q * 32 + own_.lane;
      term[q] = i < count ? terms[i] : 0.0f;
    }
    own_.load(a_, head_);
#pragma unroll
    for (int q = 0; q < kMostTerms; ++q) {
      const int i = q * 32 + own_.lane;
      if (i < count) m_.u[i / n_][i % n_] = term[q];
    }
    __syncwarp();
    keep(0);
    for (int k = 1; k <= steps; ++k) {
      own_.column_step();
      keep(k);
    }
    begin();
    for (int k = steps; k >= 1; --k) {
      undo_row_step(k);
      undo_column_step(k);
    }
    undo_row_step(0);
    store();
  }

 private:
  static constexpr int kColumns = Shape::kColumns, kEach = Shape::kEach;
  static constexpr int kMostTerms = (kMostIterations + 1) * Shape::kSize / 32;  // u a lane loads

  __device__ __forceinline__ float z(int k, int c, int e) const { return m_.z[k][c][e][own_.lane]; }
  // u of a row of this lane: 0 outside the matrix.
  __device__ __forceinline__ float u(int k, int e) const {
    return own_.row(e) < n_ ? m_.u[k][own_.row(e)] : 0.0f;
  }

  // Keeps z^k, which becomes x^k.
  __device__ __forceinline__ void keep(int k) {
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) m_.z[k][c][e][own_.lane] = own_.x[c][e];
      own_.row_step(e, u(k, e));
    }
  }

  // The gradient of R, which is needed only after the replay: its loads take as long.
  __device__ __forceinline__ void load_gradient() {
    const Matrix<float> grad(a_.p, a_.p.grad, head_);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        const int i = own_.row(e), j = own_.column(c);
        g_[c][e] = i < n_ && j < n_ ? grad.at(i, j) : 0.0f;
      }
    }
  }

  // It becomes that of x^K, which own_ holds: that of R times R.
  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        const float x = own_.x[c][e];
        g_[c][e] = x == kNothing ? 0.0f : g_[c][e] * exp2f(x);
      }
    }
  }

  __device__ __forceinline__ void undo_row_step(int k) {
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      float sum = 0.0f;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) sum += g_[c][e];
      sum = lanes_sum<kLanes>(sum);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) g_[c][e] -= exp2f(z(k, c, e) - u(k, e)) * sum;
    }
  }

  __device__ __forceinline__ void undo_column_step(int k) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      Suffix own, s;
      sweep_up<false>(k, c, own);
#pragma unroll
      for (int below = kSegments - 1; below > 0; --below) {
        Suffix total;
        total.weight = __shfl_sync(kAll, own.weight, below * kLanes + own_.first);
        total.level = __shfl_sync(kAll, own.level, below * kLanes + own_.first);
        if (below > own_.segment) add_segment<kPrefix>(s, total);
      }
      sweep_up<true>(k, c, s);
    }
  }

  // Up this lane's rows of a column with the running W; the second time g is changed by it.
  template <bool kApply>
  __device__ __forceinline__ void sweep_up(int k, int c, Suffix& s) {
#pragma unroll
    for (int e = kEach - 1; e >= 0; --e) {
      const float below = z(k, c, e), x = z(k - 1, c, e) - u(k - 1, e);
      if (below != kNothing) undo_column<kPrefix, kApply>(below, x, g_[c][e], s);
    }
  }

  __device__ __forceinline__ void store() const {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        const int i = own_.row(e), j = own_.column(c);
        if (i >= n_ || j >= n_) continue;
        store_as(a_.p.result, a_.p.logits.type, (head_ * n_ + i) * n_ + j,
                 g_[c][e] / a_.temperature);
      }
    }
  }

  const Args& a_;
  const int64_t head_;
  const int n_;
  WarpMemory<Shape>& m_;
  WarpPart<Shape, kPrefix> own_;
  float g_[kColumns][kEach];
};

template <class Shape, bool kPrefix>
__global__ void __launch_bounds__(32 * kHeads)
    balance_warp_causal_bwd_kernel(const __grid_constant__ Args a) {
  begin_early();
  __shared__ WarpMemory<Shape> memory[kHeads];
  const int64_t head = int64_t{blockIdx.x} * kHeads + threadIdx.x / 32;
  if (head >= a.p.batch * a.p.heads) return;
  WarpBackward<Shape, kPrefix>(a, head, memory[threadIdx.x / 32]).run();
}

// Launches kernel_of.operator()<Shape, kPrefix>(), for the size and the columns of p.
template <class KernelOf>
void launch(const char* name, const BalanceParams& p, Stream stream, const KernelOf& kernel_of) {
  const unsigned ctas = static_cast<unsigned>((p.batch * p.heads + kHeads - 1) / kHeads);
  const bool prefix = p.columns == Columns::kPrefix, small = p.blocks <= 8;
  const auto kernel = small    ? prefix ? kernel_of.template operator()<WarpShape<8>, true>()
                                        : kernel_of.template operator()<WarpShape<8>, false>()
                         : prefix ? kernel_of.template operator()<WarpShape<16>, true>()
                               : kernel_of.template operator()<WarpShape<16>, false>();
  launch_early(p.batch * p.heads * p.blocks * p.blocks, name, kernel, ctas, 32 * kHeads, 0, stream,
               make_args(p));
}

}  // namespace

bool warp_causal_covers_fwd(const BalanceParams& p) { return p.blocks <= kMostBlocks; }
bool warp_causal_covers_bwd(const BalanceParams& p) {
  return p.blocks <= kMostBlocks && p.iterations <= kMostIterations;
}

void warp_causal_fwd(const BalanceParams& p, Stream stream) {
  launch("balance_fwd", p, stream, [&]<class Shape, bool kPrefix>() {
    return balance_warp_causal_fwd_kernel<Shape, kPrefix>;
  });
}

void warp_causal_bwd(const BalanceParams& p, Stream stream) {
  launch("balance_bwd", p, stream, [&]<class Shape, bool kPrefix>() {
    return balance_warp_causal_bwd_kernel<Shape, kPrefix>;
  });
}

}  // namespace sinkhorn::cuda::balance
