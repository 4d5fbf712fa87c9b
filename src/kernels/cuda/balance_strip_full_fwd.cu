// Balancing 129 to 2048 blocks with full columns, with no column step, or not at all: forward.
//
// The equations are those of balance_head_full.cu; x [N, N] lies in the result, where R takes its
// place in the end. A launch each, a CTA to a strip of 8 rows held in registers:
//
//   start     loads x;  u0_i = lse_j(x_ij);  each strip's part of lse_i(x_ij - u0_i)
//   merge     vk_j from the parts of all strips
//   step k    E_ij = exp2(x_ij - vk_j - u(k-1)_i),  s_i = sum_j E_ij,  uk = u(k-1) + log2 s;
//             P_ij = E_ij / s_i is R behind the last step, else its column sums over the strip are
//             the parts of v(k+1) = vk + log2(sum_i P_ij)
//
// One exponential an element and step. Kept for backward: u0 v1 u1 ... vK uK, N numbers each.
#include "kernels/cuda/balance_launch.h"
#include "kernels/cuda/balance_strip.cuh"

namespace sinkhorn::cuda::balance {
namespace {

__device__ __forceinline__ float* strip_result(const StripArgs& t, const Strip& strip) {
  return static_cast<float*>(t.a.p.result) + (strip.head * strip.n + strip.first) * strip.n;
}

template <class Shape, class T>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kFew)
    balance_strip_full_start_kernel(const __grid_constant__ StripArgs t, LogSum* parts) {
  __shared__ float tops[Shape::kWarps][kStripRows], sums[Shape::kWarps][kStripRows];
  const Strip strip(t);
  const BalanceParams& p = t.a.p;
  Tile x;
  load_strip_logits<Shape, T>(t, strip, x);
  LogSum rows[kStripRows];
  float u[kStripRows];
  reduce_log_sums<Shape>(x, rows, tops, sums);
#pragma unroll
  for (int i = 0; i < kStripRows; ++i) u[i] = rows[i].log();
  if (p.iterations > 0) store_strip_rows(strip, u, strip_terms(p, strip.head, 0));
  if (column_steps(p) > 0) {
    store_strip<Shape>(strip, x, strip.n, strip.n, strip_result(t, strip));
    put_log_sums<Shape>(x, u, strip.n, strip.part(t, parts));
    return;
  }
#pragma unroll
  for (int i = 0; i < kStripRows; ++i) {
#pragma unroll
    for (int e = 0; e < kStripColumns; ++e) {
      x[i][e] = p.iterations == 0
                    ? expf(x[i][e])
                    : fast_exp2(x[i][e] - rows[i].base()) * fast_reciprocal(rows[i].sum);
    }
  }
  store_strip<Shape>(strip, x, strip.n, strip.n, strip_result(t, strip));
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kMany)
    balance_strip_full_step_kernel(const __grid_constant__ StripArgs t, int k, float* parts) {
  __shared__ float shared[Shape::kWarps][kStripRows];
  const Strip strip(t);
  const BalanceParams& p = t.a.p;
  float* x = strip_result(t, strip);
  Tile own;
  float v[kStripColumns], u[kStripRows], sums[kStripRows];
  load_strip<Shape>(strip, x, strip.n, strip.n, own);
  load_strip_columns<Shape>(strip_terms(p, strip.head, 2 * k - 1), strip.n, v);
  load_strip_rows(strip, strip_terms(p, strip.head, 2 * k - 2), u);
#pragma unroll
  for (int i = 0; i < kStripRows; ++i) {
    sums[i] = 0.0f;
#pragma unroll
    for (int e = 0; e < kStripColumns; ++e) {
      own[i][e] = fast_exp2(own[i][e] - v[e] - u[i]);
      sums[i] += own[i][e];
    }
  }
  reduce_rows<Shape>(sums, Add(), shared);
  // u is read again, to free its registers.
  const float* before = strip_terms(p, strip.head, 2 * k - 2) + strip.first;
  store_strip_rows(strip, strip_terms(p, strip.head, 2 * k),
                   [&](int i) { return sums[i] > 0.0f ? before[i] + log2f(sums[i]) : before[i]; });
#pragma unroll
  for (int i = 0; i < kStripRows; ++i) sums[i] = fast_reciprocal(sums[i]);
  if (k == column_steps(p)) {
#pragma unroll
    for (int i = 0; i < kStripRows; ++i) {
#pragma unroll
      for (int e = 0; e < kStripColumns; ++e) own[i][e] *= sums[i];
    }
    store_strip<Shape>(strip, own, strip.n, strip.n, x);
    return;
  }
  float* to = strip.part(t, parts);
#pragma unroll
  for (int e = 0; e < kStripColumns; ++e) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kStripRows; ++i) sum = fmaf(own[i][e], sums[i], sum);
    if (strip_column<Shape>(e) < strip.n) to[strip_column<Shape>(e)] = sum;
  }
}

// v of step k: 32 columns of one head a CTA; warp w takes strips w, w + 16, ...
__global__ void __launch_bounds__(32 * kMergeParts)
    balance_strip_full_first_merge_kernel(const __grid_constant__ StripArgs t,
                                          const LogSum* parts) {
  __shared__ float tops[kMergeParts][32], sums[kMergeParts][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int n = static_cast<int>(t.a.p.blocks), c = blockIdx.x * 32 + lane;
  LogSum s;
  if (c < n) {
    const LogSum* from = parts + static_cast<int64_t>(blockIdx.y) * t.strips * n + c;
#pragma unroll 4
    for (int i = warp; i < t.strips; i += kMergeParts) s.merge(from[static_cast<int64_t>(i) * n]);
  }
  tops[warp][lane] = s.top;
  sums[warp][lane] = s.sum;
  __syncthreads();
  if (warp > 0 || c >= n) return;
  for (int w = 1; w < kMergeParts; ++w) {
    LogSum other;
    other.top = tops[w][lane];
    other.sum = sums[w][lane];
    s.merge(other);
  }
  strip_terms(t.a.p, t.first_head + blockIdx.y, 1)[c] = s.log();
}

// The same for k > 1, from sums relative to v of step k - 1.
__global__ void __launch_bounds__(32 * kMergeParts)
    balance_strip_full_merge_kernel(const __grid_constant__ StripArgs t, int k,
                                    const float* parts) {
  __shared__ float sums[kMergeParts][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int n = static_cast<int>(t.a.p.blocks), c = blockIdx.x * 32 + lane;
  const int64_t head = t.first_head + blockIdx.y;
  float sum = 0.0f;
  if (c < n) {
    const float* from = parts + static_cast<int64_t>(blockIdx.y) * t.strips * n + c;
#pragma unroll 8
    for (int i = warp; i < t.strips; i += kMergeParts) sum += from[static_cast<int64_t>(i) * n];
  }
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp > 0 || c >= n) return;
#pragma unroll
  for (int w = 1; w < kMergeParts; ++w) sum += sums[w][lane];
  const float before = strip_terms(t.a.p, head, 2 * k - 3)[c];
  strip_terms(t.a.p, head, 2 * k - 1)[c] = sum > 0.0f ? before + log2f(sum) : before;
}

}  // namespace

int64_t strip_full_fwd_scratch(const BalanceParams& p) {
  if (column_steps(p) == 0) return 0;
  return strip_group(p) * strip_count(p) * p.blocks * static_cast<int64_t>(sizeof(LogSum));
}

void strip_full_fwd(const BalanceParams& p, void* scratch, Stream stream) {
  LogSum* first_parts = static_cast<LogSum*>(scratch);
  float* parts = static_cast<float*>(scratch);
  const int steps = static_cast<int>(column_steps(p));
  for_each_strip_group(p, [&](const StripArgs& t) {
    with_strip_shape(p, [&](auto shape) {
      using Shape = decltype(shape);
      with_strip_type(p, [&](auto type) {
        const auto kernel = balance_strip_full_start_kernel<Shape, decltype(type)>;
        kernel<<<t.ctas(), Shape::kThreads, 0, stream>>>(t, first_parts);
      });
      for (int k = 1; k <= steps; ++k) {
        if (k == 1) {
          balance_strip_full_first_merge_kernel<<<t.merge_grid(), 32 * kMergeParts, 0, stream>>>(
              t, first_parts);
        } else {
          balance_strip_full_merge_kernel<<<t.merge_grid(), 32 * kMergeParts, 0, stream>>>(t, k,
                                                                                           parts);
        }
        const auto kernel = balance_strip_full_step_kernel<Shape>;
        kernel<<<t.ctas(), Shape::kThreads, 0, stream>>>(t, k, parts);
      }
    });
    check_launch("balance_fwd");
  });
}

}  // namespace sinkhorn::cuda::balance
