// Balancing 129 to 2048 blocks with prefix or prior columns: forward, and what backward replays.
//
// The equations are those of balance_head_causal.cu. z^k [N, N] lies in the result, each in place
// of the one before, and R in place of the last. Kept for backward: u^0 .. u^K, N numbers each.
//
// A column step is two launches: `carry` turns the strips' totals of a column into what lies above
// each strip, and `step` scans each strip from there. Its CTA holds 8 whole rows in registers, so
// it goes on to take the row step, and the totals for the next iteration:
//
//   z^k = x^(k-1) - C   down the columns of the strip, from the carry
//   u^k = lse_j z^k     along its rows; when replaying, u is known
//   totals of x^k = z^k - u^k, each column over the strip
//
// Columns that the strip's last row may not read are neither stored nor read, and down a column
// nothing is carried but what rows above have left. Which terms are added in which order depends on
// indices alone, and none on later rows.
#include "kernels/cuda/balance_launch.h"
#include "kernels/cuda/balance_strip_causal.cuh"

namespace sinkhorn::cuda::balance {
namespace {

// The totals of x = z - u. Prior columns have exponents of 0 at most and need no largest one.
template <class Shape, bool kPrefix>
__device__ __forceinline__ void put_totals(const StripArgs& t, const Strip& strip, const Tile& z,
                                           const float (&u)[kStripRows], LogSum* totals) {
  LogSum* to = strip.part(t, totals);
  if constexpr (kPrefix) {
    put_log_sums<Shape>(z, u, strip.columns, to);
  } else {
#pragma unroll
    for (int e = 0; e < kStripColumns; ++e) {
      if (strip_column<Shape>(e) >= strip.columns) continue;
      LogSum s;
#pragma unroll
      for (int i = 0; i < kStripRows; ++i) s.sum += fast_exp2(z[i][e] - u[i]);
      to[strip_column<Shape>(e)] = s;
    }
  }
}

template <class Shape, bool kPrefix>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kMany)
    balance_strip_causal_totals_kernel(const __grid_constant__ StripArgs t, int k,
                                       const StripStore store, LogSum* totals) {
  const Strip strip(t);
  Tile z;
  float u[kStripRows];
  store.load<Shape>(t, strip, z);
  load_strip_rows(strip, strip_terms(t.a.p, strip.head, k), u);
  put_totals<Shape, kPrefix>(t, strip, z, u, totals);
}

// z^0 = X, u^0 (unless it is known), and the totals of x^0.
template <class Shape, class T, bool kPrefix>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kFew)
    balance_strip_causal_start_kernel(const __grid_constant__ StripArgs t, bool replay,
                                      const StripStore store, LogSum* totals) {
  __shared__ float tops[Shape::kWarps][kStripRows], sums[Shape::kWarps][kStripRows];
  const Strip strip(t);
  float* kept = strip_terms(t.a.p, strip.head, 0);
  Tile z;
  float u[kStripRows];
  load_strip_logits<Shape, T>(t, strip, z);
  if (replay) {
    load_strip_rows(strip, kept, u);
  } else {
    LogSum rows[kStripRows];
    reduce_log_sums<Shape>(z, rows, tops, sums);
#pragma unroll
    for (int i = 0; i < kStripRows; ++i) u[i] = rows[i].log();
    store_strip_rows(strip, u, kept);
  }
  store.store<Shape>(t, strip, z);
  put_totals<Shape, kPrefix>(t, strip, z, u, totals);
}

template <bool kPrefix>
__device__ __forceinline__ void add_total(LogSum& above, const LogSum& total) {
  if constexpr (kPrefix) {
    above.merge(total);
  } else {
    above.sum += total.sum;
  }
}

// Totals become what lies above each strip.
template <bool kPrefix>
__global__ void __launch_bounds__(32 * kMergeParts)
    balance_strip_causal_carry_kernel(const __grid_constant__ StripArgs t, LogSum* totals) {
  __shared__ float tops[kMergeParts][32], sums[kMergeParts][32];
  const ScanPlace at(t);
  LogSum* column = at.first(t, totals);
  LogSum own;
#pragma unroll 4
  for (int s = at.from; s < at.to; ++s) {
    add_total<kPrefix>(own, column[static_cast<int64_t>(s) * at.n]);
  }
  tops[at.warp][at.lane] = own.top;
  sums[at.warp][at.lane] = own.sum;
  __syncthreads();
  LogSum above;
  for (int w = 0; w < at.warp; ++w) {
    LogSum other;
    other.top = tops[w][at.lane];
    other.sum = sums[w][at.lane];
    add_total<kPrefix>(above, other);
  }
  for (int base = at.from; base < at.to; base += kScanAhead) {
    LogSum total[kScanAhead];
#pragma unroll
    for (int q = 0; q < kScanAhead; ++q) {
      if (base + q < at.to) total[q] = column[static_cast<int64_t>(base + q) * at.n];
    }
#pragma unroll
    for (int q = 0; q < kScanAhead; ++q) {
      if (base + q >= at.to) continue;
      column[static_cast<int64_t>(base + q) * at.n] = above;
      add_total<kPrefix>(above, total[q]);
    }
  }
}

// One row of a column, on the way down: x becomes z.
template <bool kPrefix>
__device__ __forceinline__ float next_row(float x, LogSum& s) {
  if constexpr (kPrefix) {
    if (x == kNothing) return x;
    const float e = fast_exp2(-fabsf(x - s.top));
    s.sum = x > s.top ? fmaf(s.sum, e, 1.0f) : s.sum + e;
    s.top = fmaxf(s.top, x);
    return (x - s.top) - log2f(s.sum);
  } else {
    const float z = x - log2f(1.0f + s.sum);
    s.sum += fast_exp2(x);
    return z;
  }
}

// Step k: the column step, the row step, and the totals for the next one or, behind the last, R in
// place of z.
template <class Shape, bool kPrefix, bool kReplay>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kMany)
    balance_strip_causal_step_kernel(const __grid_constant__ StripArgs t,
                                     const __grid_constant__ StripStep step) {
  __shared__ float shared[Shape::kWarps][kStripRows];
  const Strip strip(t);
  const BalanceParams& p = t.a.p;
  Tile z;
  float u[kStripRows];
  step.in.load<Shape>(t, strip, z);
  load_strip_rows(strip, strip_terms(p, strip.head, step.k - 1), u);
  const LogSum* carry = strip.part(t, step.totals);
#pragma unroll
  for (int e = 0; e < kStripColumns; ++e) {
    if (strip_column<Shape>(e) >= strip.columns) continue;
    LogSum s = carry[strip_column<Shape>(e)];
#pragma unroll
    for (int i = 0; i < kStripRows; ++i) z[i][e] = next_row<kPrefix>(z[i][e] - u[i], s);
  }
  if (kReplay || step.more) step.out.store<Shape>(t, strip, z);
  if constexpr (kReplay) {
    if (!step.more) return;
    load_strip_rows(strip, strip_terms(p, strip.head, step.k), u);
  } else {
    float sums[kStripRows];
#pragma unroll
    for (int i = 0; i < kStripRows; ++i) {
      sums[i] = 0.0f;
#pragma unroll
      for (int e = 0; e < kStripColumns; ++e) sums[i] += fast_exp2(z[i][e]);
    }
    reduce_rows<Shape>(sums, Add(), shared);
#pragma unroll
    for (int i = 0; i < kStripRows; ++i) u[i] = sums[i] > 0.0f ? log2f(sums[i]) : 0.0f;
    store_strip_rows(strip, u, strip_terms(p, strip.head, step.k));
    if (!step.more) {
#pragma unroll
      for (int i = 0; i < kStripRows; ++i) {
#pragma unroll
        for (int e = 0; e < kStripColumns; ++e) {
          z[i][e] = fast_exp2(z[i][e]) * fast_reciprocal(sums[i]);
        }
      }
      store_strip<Shape>(strip, z, strip.n, strip.n, step.out.rows(t, strip));
      return;
    }
  }
  put_totals<Shape, kPrefix>(t, strip, z, u, step.totals);
}

// Calls body with std::bool_constant of whether the columns are prefix sums, and the shape.
template <class Body>
void with_columns(const StripArgs& t, const Body& body) {
  with_strip_shape(t.a.p, [&](auto shape) {
    t.a.p.columns == Columns::kPrefix ? body(shape, std::true_type())
                                      : body(shape, std::false_type());
  });
}

}  // namespace

void strip_start(const StripArgs& t, bool replay, const StripStore& store, LogSum* totals,
                 Stream stream) {
  with_columns(t, [&](auto shape, auto prefix) {
    using Shape = decltype(shape);
    with_strip_type(t.a.p, [&](auto type) {
      const auto kernel = balance_strip_causal_start_kernel<Shape, decltype(type), prefix.value>;
      kernel<<<t.ctas(), Shape::kThreads, 0, stream>>>(t, replay, store, totals);
    });
  });
  check_launch("balance start");
}

void strip_totals(const StripArgs& t, int k, const StripStore& z, LogSum* totals, Stream stream) {
  with_columns(t, [&](auto shape, auto prefix) {
    using Shape = decltype(shape);
    const auto kernel = balance_strip_causal_totals_kernel<Shape, prefix.value>;
    kernel<<<t.ctas(), Shape::kThreads, 0, stream>>>(t, k, z, totals);
  });
  check_launch("balance totals");
}

void strip_step(const StripArgs& t, const StripStep& step, Stream stream) {
  with_columns(t, [&](auto shape, auto prefix) {
    using Shape = decltype(shape);
    const auto carry = balance_strip_causal_carry_kernel<prefix.value>;
    carry<<<t.merge_grid(), 32 * kMergeParts, 0, stream>>>(t, step.totals);
    const auto kernel = step.replay ? balance_strip_causal_step_kernel<Shape, prefix.value, true>
                                    : balance_strip_causal_step_kernel<Shape, prefix.value, false>;
    kernel<<<t.ctas(), Shape::kThreads, 0, stream>>>(t, step);
  });
  check_launch("balance step");
}

int64_t strip_causal_fwd_scratch(const BalanceParams& p) {
  return strip_group(p) * strip_count(p) * p.blocks * static_cast<int64_t>(sizeof(LogSum));
}

void strip_causal_fwd(const BalanceParams& p, void* scratch, Stream stream) {
  LogSum* totals = static_cast<LogSum*>(scratch);
  const int steps = static_cast<int>(p.iterations);
  for_each_strip_group(p, [&](const StripArgs& t) {
    const int64_t first = t.first_head * p.blocks * p.blocks;
    const StripStore store{static_cast<float*>(p.result) + first, false};
    strip_start(t, false, store, totals, stream);
    for (int k = 1; k <= steps; ++k) {
      strip_step(t, {k, false, k < steps, store, store, totals}, stream);
    }
  });
}

}  // namespace sinkhorn::cuda::balance
