// Balancing up to 128 blocks with full columns, with no column step, or not at all: backward. The
// forms are those of balance_head_full.cuh.
//
// Backward holds y and G, the gradient with respect to the matrix after the step at hand, in the
// row layout. With Q = exp2(x - U(k-1) - Vk), whose columns sum to 1, and P = Q f_j, whose rows do,
// where f = exp2(vk) (f is a column sum of P, so f <= N), it begins with G = R (dR - sum_j R dR)
// and undoes for k = K .. 1
//   column step k:   G -= Q sum_i G      the sums by way of the tile, in the column layout
//   row step k-1:    G -= P sum_j G / sum_j P
// sum_j P is 1 but for rounding; dividing by it makes 0 what is 0 on paper: the sum of a row, the
// gradient of an only source.
#include "kernels/cuda/balance_head_full.cuh"
#include "kernels/cuda/balance_launch.h"

namespace sinkhorn::cuda::balance {
namespace {

// x - U - V of y: the sums are added first and exactly, and their difference from x is what is
// rounded. -inf stays -inf.
__device__ __forceinline__ float entry(const Args& a, float y, const Potential& u,
                                       const Potential& v) {
  const float sum = u.high + v.high, kept = sum - u.high;
  const float rest = (u.high - (sum - kept)) + (v.high - kept);
  const float finite = fmaxf(y, -1e20f);  // -inf times a rest of 0 would be NaN
  return fmaf(y, a.scale, -sum) + fmaf(finite, a.scale_rest, -(rest + (u.low + v.low)));
}
// An entry's power of 2 where a row or column is normalised: at most 1, but for the rounding of
// huge ones.
__device__ __forceinline__ float share_of(float entry) { return exp2f(fminf(entry, 0.0f)); }

template <class Shape>
class FullBackward {
 public:
  __device__ __forceinline__ FullBackward(const Args& a, int64_t head, FullMemory<Shape>& memory)
      : a_(a),
        head_(head),
        n_(static_cast<int>(a.p.blocks)),
        steps_(static_cast<int>(column_steps(a.p))),
        m_(memory) {
#pragma unroll
    for (int e = 0; e < Shape::kEach; ++e) y_[e] = m_.tile[at_.tile(e)];
  }

  __device__ __forceinline__ void run() {
    load_grad();
    if (a_.p.iterations == 0) {
#pragma unroll
      for (int e = 0; e < Shape::kEach; ++e) g_[e] *= expf(y_[e]);
    } else if (add_terms()) {
      undo<true>();
    } else {
      undo<false>();
    }
    store();
  }

 private:
  // dR where y is allowed, that is not -inf.
  __device__ __forceinline__ void load_grad() {
    const Matrix<float> grad(a_.p, a_.p.grad, head_);
#pragma unroll
    for (int e = 0; e < Shape::kEach; ++e) {
      g_[e] = y_[e] == kNothing ? 0.0f : grad.at(at_.row, at_.column(e));
    }
  }

  // Thread i keeps the potentials of row and column i, without u0. Here those after the last step;
  // each step backward takes its terms off again. Whether all stay where factors do.
  __device__ __forceinline__ bool add_terms() {
    constexpr int kAhead = 6;  // steps whose loads are in flight
    const int i = threadIdx.x;
    bool fine = true;
    fetch(steps_);
    for (int first = 0; first <= steps_; first += kAhead) {
      float u[kAhead], v[kAhead];
#pragma unroll
      for (int q = 0; q < kAhead; ++q) {
        const int k = first + q;
        const bool there = i < n_ && k <= steps_;
        u[q] = there ? full_terms(a_.p, head_, 2 * k)[i] : 0.0f;
        v[q] = there && k > 0 ? full_terms(a_.p, head_, 2 * k - 1)[i] : 0.0f;
      }
      if (first == 0) {
        first_ = u[0];
        u[0] = 0.0f;
      }
#pragma unroll
      for (int q = 0; q < kAhead; ++q) {
        u_.add(u[q]);
        v_.add(v[q]);
        fine &= fabsf(u_.high) < kMostLog && fabsf(v_.high) < kMostLog;
      }
    }
    if (i < Shape::kSize) m_.sums[i] = first_;
    return __syncthreads_and(fine) != 0;
  }
  // y becomes K, or u0 one of the potentials; then every step.
  template <bool kByFactors>
  __device__ __forceinline__ void undo() {
    if constexpr (kByFactors) {
      const float first = m_.sums[at_.row];
#pragma unroll
      for (int e = 0; e < Shape::kEach; ++e) {
        y_[e] = y_[e] == kNothing ? 0.0f : fast_exp2(first_less(a_, y_[e], first));
      }
    } else {
      u_.add(first_);
    }
    put<kByFactors>();
    __syncthreads();
    undo_softmax<kByFactors>();
    for (int k = steps_; k >= 1; --k) undo_iteration<kByFactors>(k);
  }
  // The terms of step k, an iteration before their use.
  __device__ __forceinline__ void fetch(int k) {
    const int i = threadIdx.x;
    term_u_ = term_v_ = 0.0f;
    if (i >= n_) return;
    term_u_ = full_terms(a_.p, head_, 2 * k)[i];
    if (k > 0) term_v_ = full_terms(a_.p, head_, 2 * k - 1)[i];
  }
  // The potentials, or in their place the factors.
  template <bool kByFactors>
  __device__ __forceinline__ void put() {
    if (threadIdx.x >= Shape::kSize) return;
    if constexpr (kByFactors) {
      m_.u[threadIdx.x].high = exp2f(-(u_.high + u_.low));
      m_.v[threadIdx.x].high = exp2f(-(v_.high + v_.low));
    } else {
      m_.u[threadIdx.x] = u_;
      m_.v[threadIdx.x] = v_;
    }
  }
  // Uk and Vk become U(k-1) and Vk where others read them, and V(k-1) here.
  template <bool kByFactors>
  __device__ __forceinline__ void step_back(int k) {
    u_.add(-term_u_);
    put<kByFactors>();
    // At most N, but for the rounding of huge terms.
    if (threadIdx.x < Shape::kSize) m_.factors[threadIdx.x] = exp2f(fminf(term_v_, 8.0f));
    v_.add(-term_v_);
    fetch(k - 1);
  }

  template <bool kByFactors>
  __device__ __forceinline__ float share(int e, const Potential& u) const {
    const Potential& v = m_.v[at_.column(e)];
    if constexpr (kByFactors) {
      return fminf(y_[e] * u.high * v.high, 1.0f);
    } else {
      return share_of(entry(a_, y_[e], u, v));
    }
  }

  template <bool kByFactors>
  __device__ __forceinline__ void undo_softmax() {
    const Potential u = m_.u[at_.row];
    float shares[kKept ? Shape::kEach : 1], whole = 0.0f, dot = 0.0f;
#pragma unroll
    for (int e = 0; e < Shape::kEach; ++e) {
      const float own = share<kByFactors>(e, u);
      if constexpr (kKept) shares[e] = own;
      whole += own;
      dot += own * g_[e];
    }
    const float inverse = reciprocal(lanes_sum<Shape::kParts>(whole));
    dot = lanes_sum<Shape::kParts>(dot) * inverse;
#pragma unroll
    for (int e = 0; e < Shape::kEach; ++e) {
      if constexpr (kKept) {
        g_[e] = shares[e] * inverse * (g_[e] - dot);
      } else {
        g_[e] = share<kByFactors>(e, u) * inverse * (g_[e] - dot);
      }
    }
  }

  // Column step k, then row step k - 1.
  template <bool kByFactors>
  __device__ __forceinline__ void undo_iteration(int k) {
    sum_columns<kByFactors>(k);
    const Potential u = m_.u[at_.row];
    float sum = 0.0f, whole = 0.0f;
    float shares[kKept ? Shape::kEach : 1];
#pragma unroll
    for (int e = 0; e < Shape::kEach; ++e) {
      const int c = at_.column(e);
      const float q = share<kByFactors>(e, u), p = q * m_.factors[c];
      if constexpr (kKept) shares[e] = p;
      g_[e] -= q * m_.sums[c];
      sum += g_[e];
      whole += p;
    }
    sum = lanes_sum<Shape::kParts>(sum) * reciprocal(lanes_sum<Shape::kParts>(whole));
#pragma unroll
    for (int e = 0; e < Shape::kEach; ++e) {
      const int c = at_.column(e);
      if constexpr (kKept) {
        g_[e] -= shares[e] * sum;
      } else {
        g_[e] -= share<kByFactors>(e, u) * m_.factors[c] * sum;
      }
    }
  }

  // Sums of the columns of G, and the potentials and factors of Q^k and P^(k-1).
  template <bool kByFactors>
  __device__ __forceinline__ void sum_columns(int k) {
    const ColumnPlace<Shape> at;
#pragma unroll
    for (int e = 0; e < Shape::kEach; ++e) m_.tile[at_.tile(e)] = g_[e];
    __syncthreads();  // and the potentials of the step before have been read
    step_back<kByFactors>(k);
    float sum = 0.0f;
#pragma unroll
    for (int e = 0; e < Shape::kEach; ++e) sum += m_.tile[at.tile(e)];
    sum = lanes_sum<Shape::kParts>(sum);
    if (at.leads()) m_.sums[at.column] = sum;
    __syncthreads();
  }

  __device__ __forceinline__ void store() {
#pragma unroll
    for (int e = 0; e < Shape::kEach; ++e) m_.tile[at_.tile(e)] = g_[e];
    __syncthreads();
    const int c = threadIdx.x % Shape::kSize, first = threadIdx.x / Shape::kSize;
#pragma unroll
    for (int e = 0; e < Shape::kEach; ++e) {
      const int r = first + e * Shape::kParts;
      if (r >= n_ || c >= n_) continue;
      store_as(a_.p.result, a_.p.logits.type, (head_ * n_ + r) * n_ + c,
               m_.tile[r * Shape::kStride + c] / a_.temperature);
    }
  }

  static constexpr bool kKept = Shape::kSize <= 64;  // P in registers, or computed again

  const Args& a_;
  const int64_t head_;
  const int n_, steps_;
  FullMemory<Shape>& m_;
  const RowPlace<Shape> at_;
  float y_[Shape::kEach], g_[Shape::kEach];
  Potential u_, v_;
  float first_ = 0.0f;  // u0
  float term_u_ = 0.0f, term_v_ = 0.0f;
};

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads)
    balance_head_full_bwd_kernel(const __grid_constant__ Args a) {
  auto& m = shared_memory<FullMemory<Shape>>();
  load_tile<Shape>(unscaled(a), blockIdx.x, m.live, m.tile);
  FullBackward<Shape>(a, blockIdx.x, m).run();
}

}  // namespace

void head_full_bwd(const BalanceParams& p, Stream stream) {
  with_head_shape(p.blocks, [&](auto shape) {
    using Shape = decltype(shape);
    launch_heads<Shape>("balance_bwd", balance_head_full_bwd_kernel<Shape>, p,
                        sizeof(FullMemory<Shape>), stream, make_args(p));
  });
}

}  // namespace sinkhorn::cuda::balance
