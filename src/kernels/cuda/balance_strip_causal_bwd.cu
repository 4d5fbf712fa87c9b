// Balancing 129 to 2048 blocks with prefix or prior columns: backward.
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
// A launch undoes column step k + 1 and row step k on every strip of 8 rows, held in registers,
// then takes each column's W over the strip alone; a launch of its own turns these into the W below
// each strip. Matrices in scratch are packed: (K + 2) / 2 times N x N for K <= 7.
#include "kernels/cuda/balance_launch.h"
#include "kernels/cuda/balance_strip_causal.cuh"

namespace sinkhorn::cuda::balance {
namespace {

enum class Stage { kFirst, kMiddle, kLast };  // k = K, between, k = 0

// Row step k, and column step k + 1 before it.
struct UndoArgs {
  int k;
  bool totals;                 // whether W of column step k is taken, which needs z^(k-1)
  StripStore below, z, above;  // z^(k+1), z^k and z^(k-1)
  StripStore g;
  Suffix* suffixes;  // [heads, strips, N]
};

// One row of column step k on the way up: `z` is z^k, `x` is x^(k-1). Returns the new G.
template <bool kPrefix>
__device__ __forceinline__ float undo_column(float g, float z, float x, Suffix& s) {
  if (z == kNothing) return 0.0f;
  if constexpr (kPrefix) {
    const float c = x - z;
    s.weight = fmaf(s.weight, fast_exp2(fminf(c - s.level, 0.0f)), g);
    s.level = c;
    return g - fast_exp2(z) * s.weight;
  } else {
    const float weight = s.weight;
    s.weight += g * fast_exp2(z - x);
    return g - fast_exp2(x) * weight;
  }
}

// Column step k + 1 on the strip; z is z^k and u that of step k.
template <class Shape, bool kPrefix>
__device__ __forceinline__ void undo_columns(const StripArgs& t, const Strip& strip,
                                             const UndoArgs& undo, const Tile& z,
                                             const float (&u)[kStripRows], Tile& g) {
  Tile below;
  undo.below.load<Shape>(t, strip, below);
  const Suffix* carry = strip.part(t, undo.suffixes);
#pragma unroll
  for (int e = 0; e < kStripColumns; ++e) {
    const int c = strip_column<Shape>(e);
    Suffix s;
    if (c < strip.columns) s = carry[c];
#pragma unroll
    for (int i = kStripRows - 1; i >= 0; --i) {
      g[i][e] = undo_column<kPrefix>(g[i][e], below[i][e], z[i][e] - u[i], s);
    }
  }
}

// Each column's W of column step k over the strip alone; z is z^k.
template <class Shape, bool kPrefix>
__device__ __forceinline__ void put_suffixes(const StripArgs& t, const Strip& strip,
                                             const UndoArgs& undo, const Tile& z, const Tile& g) {
  float u[kStripRows];
  load_strip_rows(strip, strip_terms(t.a.p, strip.head, undo.k - 1), u);
  const float* above = undo.above.rows(t, strip) + threadIdx.x;
  const int64_t stride = undo.above.stride(strip);
  Suffix* to = strip.part(t, undo.suffixes) + threadIdx.x;
  // Two columns at a time: all four would not fit in registers beside z and G.
#pragma unroll
  for (int first = 0; first < kStripColumns; first += 2) {
    float x[kStripRows][2];
#pragma unroll
    for (int i = 0; i < kStripRows; ++i) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const bool inside = i < strip.count && strip_column<Shape>(first + e) < strip.columns;
        x[i][e] = inside ? above[i * stride + (first + e) * Shape::kThreads] - u[i] : kNothing;
      }
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      Suffix s;
#pragma unroll
      for (int i = kStripRows - 1; i >= 0; --i) {
        undo_column<kPrefix>(g[i][first + e], z[i][first + e], x[i][e], s);
      }
      if (strip_column<Shape>(first + e) < strip.columns) to[(first + e) * Shape::kThreads] = s;
    }
  }
}

// The gradient of the logits, 0 where there is no source.
template <class Shape>
__device__ __forceinline__ void finish_rows(const StripArgs& t, const Strip& strip, const Tile& z,
                                            const Tile& g) {
  const BalanceParams& p = t.a.p;
  const float inverse = 1.0f / t.a.temperature;
#pragma unroll
  for (int i = 0; i < kStripRows; ++i) {
#pragma unroll
    for (int e = 0; e < kStripColumns; ++e) {
      const int c = strip_column<Shape>(e);
      if (i >= strip.count || c >= strip.n) continue;
      store_as(p.result, p.logits.type, (strip.head * strip.n + strip.first + i) * strip.n + c,
               z[i][e] == kNothing ? 0.0f : g[i][e] * inverse);
    }
  }
}

template <class Shape, bool kPrefix, Stage kStage>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kFew)
    balance_strip_causal_bwd_kernel(const __grid_constant__ StripArgs t,
                                    const __grid_constant__ UndoArgs undo) {
  __shared__ float shared[Shape::kWarps][kStripRows];
  const Strip strip(t);
  Tile z, g;
  float u[kStripRows], sums[kStripRows];
  undo.z.load<Shape>(t, strip, z);
  load_strip_rows(strip, strip_terms(t.a.p, strip.head, undo.k), u);
  if constexpr (kStage == Stage::kFirst) {
    load_strip_grad<Shape>(t, strip, z, g);
#pragma unroll
    for (int i = 0; i < kStripRows; ++i) {
#pragma unroll
      for (int e = 0; e < kStripColumns; ++e) g[i][e] *= fast_exp2(z[i][e] - u[i]);
    }
  } else {
    undo.g.load<Shape>(t, strip, g);
    undo_columns<Shape, kPrefix>(t, strip, undo, z, u, g);
  }
#pragma unroll
  for (int i = 0; i < kStripRows; ++i) {
    sums[i] = 0.0f;
#pragma unroll
    for (int e = 0; e < kStripColumns; ++e) sums[i] += g[i][e];
  }
  reduce_rows<Shape>(sums, Add(), shared);
#pragma unroll
  for (int i = 0; i < kStripRows; ++i) {
#pragma unroll
    for (int e = 0; e < kStripColumns; ++e) {
      g[i][e] = z[i][e] == kNothing ? 0.0f : g[i][e] - fast_exp2(z[i][e] - u[i]) * sums[i];
    }
  }
  if constexpr (kStage == Stage::kLast) {
    finish_rows<Shape>(t, strip, z, g);
  } else {
    undo.g.store<Shape>(t, strip, g);
    if (undo.totals) put_suffixes<Shape, kPrefix>(t, strip, undo, z, g);
  }
}

// W of column step k over each strip alone, where z^(k-1) was not there yet when row step k was
// undone.
template <class Shape, bool kPrefix>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kFew)
    balance_strip_causal_suffix_kernel(const __grid_constant__ StripArgs t,
                                       const __grid_constant__ UndoArgs undo) {
  const Strip strip(t);
  Tile z, g;
  undo.z.load<Shape>(t, strip, z);
  undo.g.load<Shape>(t, strip, g);
  put_suffixes<Shape, kPrefix>(t, strip, undo, z, g);
}

// Rows above `below`, of which `total` is the W alone.
template <bool kPrefix>
__device__ __forceinline__ void add_total(Suffix& below, const Suffix& total) {
  if constexpr (kPrefix) {
    if (!total.empty()) below.add(total.weight, total.level);
  } else {
    below.weight += total.weight;
  }
}

// The strips' own W become the W below each strip.
template <bool kPrefix>
__global__ void __launch_bounds__(32 * kMergeParts)
    balance_strip_causal_below_kernel(const __grid_constant__ StripArgs t, Suffix* suffixes) {
  __shared__ float weights[kMergeParts][32], levels[kMergeParts][32];
  const ScanPlace at(t);
  Suffix* column = at.first(t, suffixes);
  Suffix own;
#pragma unroll 4
  for (int s = at.to - 1; s >= at.from; --s) {
    add_total<kPrefix>(own, column[static_cast<int64_t>(s) * at.n]);
  }
  weights[at.warp][at.lane] = own.weight;
  levels[at.warp][at.lane] = own.level;
  __syncthreads();
  Suffix below;
  for (int w = kMergeParts - 1; w > at.warp; --w) {
    Suffix other;
    other.weight = weights[w][at.lane];
    other.level = levels[w][at.lane];
    add_total<kPrefix>(below, other);
  }
  for (int base = at.to - 1; base >= at.from; base -= kScanAhead) {
    Suffix total[kScanAhead];
#pragma unroll
    for (int q = 0; q < kScanAhead; ++q) {
      if (base - q >= at.from) total[q] = column[static_cast<int64_t>(base - q) * at.n];
    }
#pragma unroll
    for (int q = 0; q < kScanAhead; ++q) {
      if (base - q < at.from) continue;
      column[static_cast<int64_t>(base - q) * at.n] = below;
      add_total<kPrefix>(below, total[q]);
    }
  }
}

// Scratch of one group of heads: slots for z and one for G, totals, and W.
struct CausalScratch {
  CausalScratch(const BalanceParams& p, void* memory)
      : kept(p.iterations), slot(strip_group(p) * StripStore::packed_size(p)) {
    const int64_t numbers = strip_group(p) * strip_count(p) * p.blocks;
    z = static_cast<float*>(memory);
    totals = reinterpret_cast<LogSum*>(z + (kept.slots + 1) * slot);
    suffixes = reinterpret_cast<Suffix*>(totals + numbers);
    bytes = reinterpret_cast<char*>(suffixes + numbers) - static_cast<char*>(memory);
  }
  StripStore matrix(int k) const { return {z + kept.slot(k) * slot, true}; }
  StripStore grad() const { return {z + kept.slots * slot, true}; }

  Replay kept;
  int64_t slot, bytes;
  float* z;
  LogSum* totals;
  Suffix* suffixes;
};

// z of steps from + 1 .. to; the totals of x^from are there.
void replay(const StripArgs& t, const CausalScratch& s, int from, int to, Stream stream) {
  for (int k = from + 1; k <= to; ++k) {
    strip_step(t, {k, true, k < to, s.matrix(k - 1), s.matrix(k), s.totals}, stream);
  }
}

template <class Shape, bool kPrefix>
void undo_step(const StripArgs& t, const CausalScratch& s, int k, Stream stream) {
  const int steps = s.kept.iterations;
  const bool missing = k > 0 && s.kept.missing_below(k);
  UndoArgs undo{k,           k > 0 && !missing,           s.matrix(k < steps ? k + 1 : k),
                s.matrix(k), s.matrix(k > 0 ? k - 1 : 0), s.grad(),
                s.suffixes};
  const auto kernel = k == steps ? balance_strip_causal_bwd_kernel<Shape, kPrefix, Stage::kFirst>
                      : k > 0    ? balance_strip_causal_bwd_kernel<Shape, kPrefix, Stage::kMiddle>
                                 : balance_strip_causal_bwd_kernel<Shape, kPrefix, Stage::kLast>;
  kernel<<<t.ctas(), Shape::kThreads, 0, stream>>>(t, undo);
  if (k == 0) return;
  if (missing) {
    const int from = k - s.kept.stride;
    strip_totals(t, from, s.matrix(from), s.totals, stream);
    replay(t, s, from, k - 1, stream);
    undo.totals = true;
    const auto suffix = balance_strip_causal_suffix_kernel<Shape, kPrefix>;
    suffix<<<t.ctas(), Shape::kThreads, 0, stream>>>(t, undo);
  }
  const auto below = balance_strip_causal_below_kernel<kPrefix>;
  below<<<t.merge_grid(), 32 * kMergeParts, 0, stream>>>(t, s.suffixes);
}

template <class Shape, bool kPrefix>
void run_bwd(const BalanceParams& p, void* scratch, Stream stream) {
  const CausalScratch s(p, scratch);
  const int steps = s.kept.iterations;
  for_each_strip_group(p, [&](const StripArgs& t) {
    strip_start(t, true, s.matrix(0), s.totals, stream);
    replay(t, s, 0, steps, stream);
    for (int k = steps; k >= 0; --k) undo_step<Shape, kPrefix>(t, s, k, stream);
    check_launch("balance_bwd");
  });
}

}  // namespace

int64_t strip_causal_bwd_scratch(const BalanceParams& p) { return CausalScratch(p, nullptr).bytes; }

void strip_causal_bwd(const BalanceParams& p, void* scratch, Stream stream) {
  with_strip_shape(p, [&](auto shape) {
    using Shape = decltype(shape);
    p.columns == Columns::kPrefix ? run_bwd<Shape, true>(p, scratch, stream)
                                  : run_bwd<Shape, false>(p, scratch, stream);
  });
}

}  // namespace sinkhorn::cuda::balance
