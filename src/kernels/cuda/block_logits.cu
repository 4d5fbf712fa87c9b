// A linear sort network on few blocks: rows r = (b, i) of pooled [B N, E], columns c = (h, j) of
// weight [H M, E], of which j < N are read:
//
//   logits[b, h, i, j] = pooled[r] . weight[c] + bias[c] - log(max(draw, 1e-30))
//
// The last term, if there are draws, is Gumbel noise: they are exponential. Backward, of g [B, H,
// N, N]: dpooled[r] = sum_c g[r, c] weight[c], dweight[c] = sum_r g[r, c] pooled[r], dbias[c] =
// sum_r g[r, c]; all in one launch, and nothing is recomputed. Columns that were not read get 0.
//
// Mapping. Forward: a warp to 4 rows and 4 columns, its lanes along E. Backward: a CTA to 128
// elements of a row of dpooled or of dweight, four threads to an element, each with a part of the
// terms; their g pass through shared memory. The matrices are so small that time is latency: all
// sums are float32 and every number is read from the cache as often as it is needed.
#include "kernels/cuda/block_logits.h"
#include "kernels/cuda/check.cuh"
#include "kernels/cuda/early.cuh"
#include "kernels/cuda/lanes.cuh"

namespace sinkhorn::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kSide = 4;    // rows and columns to a warp
constexpr int kAhead = 16;  // loads in flight a thread, backward
constexpr int kGroups = 4;  // of kThreads, backward, that share the terms of a sum
constexpr int kBackwardThreads = kGroups * kThreads;
constexpr int64_t kMostRows = 256, kMostColumns = 512, kMostProducts = int64_t{1} << 21;

int64_t divided_up(int64_t x, int64_t by) { return (x + by - 1) / by; }

// Gumbel noise is -log of an exponential draw; one of 0 counts as a very small one.
__device__ __forceinline__ float gumbel(float draw) { return -logf(fmaxf(draw, 1e-30f)); }

// Where things lie, as row r = (b, i) and column c = (h, j) of the N that are read.
struct Place {
  __device__ __forceinline__ explicit Place(const BlockLogitsParams& p)
      : blocks(static_cast<int>(p.blocks)),
        heads(static_cast<int>(p.heads)),
        columns(static_cast<int>(p.columns)),
        rows(static_cast<int>(p.batch * p.blocks)),
        read(static_cast<int>(p.heads * p.blocks)) {}

  __device__ __forceinline__ int logit(int r, int c) const {
    return ((r / blocks * heads + c / blocks) * blocks + r % blocks) * blocks + c % blocks;
  }
  // The row of weight.
  __device__ __forceinline__ int weight(int c) const { return c / blocks * columns + c % blocks; }

  const int blocks, heads, columns, rows, read;
};

__global__ void __launch_bounds__(kThreads)
    block_logits_fwd_kernel(const __grid_constant__ BlockLogitsParams p) {
  begin_early();
  const Place at(p);
  const int lane = threadIdx.x % 32, across = (at.read + kSide - 1) / kSide;
  const int tile = blockIdx.x * kWarps + threadIdx.x / 32;
  const int row = tile / across * kSide, column = tile % across * kSide;
  if (row >= at.rows) return;
  const float *x[kSide], *w[kSide];
#pragma unroll
  for (int i = 0; i < kSide; ++i) {  // the last ones stand in for those outside
    x[i] = p.pooled + min(row + i, at.rows - 1) * p.width;
    w[i] = p.weight + at.weight(min(column + i, at.read - 1)) * p.width;
  }
  const int r = row + lane / kSide, c = column + lane % kSide;  // what this lane writes
  const bool writes = lane < kSide * kSide && r < at.rows && c < at.read;
  const int to = at.logit(r, c);
  const float bias = writes ? p.bias[at.weight(c)] : 0.0f;
  const float draw = writes && p.draws != nullptr ? p.draws[to] : 0.0f;
  float sum[kSide][kSide] = {};
#pragma unroll 4
  for (int64_t e = lane; e < p.width; e += 32) {
    float own[kSide], other[kSide];
#pragma unroll
    for (int i = 0; i < kSide; ++i) own[i] = x[i][e];
#pragma unroll
    for (int j = 0; j < kSide; ++j) other[j] = w[j][e];
#pragma unroll
    for (int i = 0; i < kSide; ++i) {
#pragma unroll
      for (int j = 0; j < kSide; ++j) sum[i][j] = fmaf(own[i], other[j], sum[i][j]);
    }
  }
  float product = 0.0f;  // of r and c
#pragma unroll
  for (int i = 0; i < kSide * kSide; ++i) {
    const float total = warp_sum(sum[i / kSide][i % kSide]);
    if (lane == i) product = total;
  }
  if (!writes) return;
  const float logit = product + bias;
  p.logits[to] = p.draws == nullptr ? logit : logit + gumbel(draw);
}

__global__ void __launch_bounds__(kBackwardThreads)
    block_logits_bwd_kernel(const __grid_constant__ BlockLogitsParams p) {
  begin_early();
  __shared__ float factor[kBackwardThreads], parts[kGroups][kThreads];
  __shared__ float totals[kBackwardThreads / 32];
  __shared__ int from[kBackwardThreads];  // where the row that a factor multiplies begins
  const Place at(p);
  const bool of_pooled = static_cast<int>(blockIdx.x) < at.rows;
  const int row = of_pooled ? blockIdx.x : blockIdx.x - at.rows;  // of the result
  const int head = row / at.columns, source = row % at.columns;   // of a row of weight
  const int terms = of_pooled ? at.read : source < at.blocks ? at.rows : 0;
  const int thread = threadIdx.x, group = thread / kThreads, local = thread % kThreads;
  const int64_t e = int64_t{blockIdx.y} * kThreads + local;
  const float* matrix = (of_pooled ? p.weight : p.pooled) + (e < p.width ? e : 0);
  float sum = 0.0f, total = 0.0f, x[kAhead];
  const auto load = [&](int first, int last) {
#pragma unroll
    for (int q = 0; q < kAhead; ++q) {
      x[q] = first + q < last ? matrix[from[first + q]] : 0.0f;
    }
  };
  for (int base = 0; base < terms; base += kBackwardThreads) {
    const int count = min(kBackwardThreads, terms - base), each = (count + kGroups - 1) / kGroups;
    const int last = min(group * each + each, count);
    int i = min(group * each, count);
    float own = 0.0f;
    __syncthreads();  // all have read what is overwritten
    if (thread < count) {
      const int k = base + thread;
      own = p.grad[of_pooled ? at.logit(row, k) : at.logit(k, head * at.blocks + source)];
      from[thread] = (of_pooled ? at.weight(k) : k) * static_cast<int>(p.width);
    }
    __syncthreads();
    load(i, last);  // on their way together with the factors
    factor[thread] = own;
    total += own;
    __syncthreads();
    while (i < last) {
#pragma unroll
      for (int q = 0; q < kAhead; ++q) {
        if (i + q < last) sum = fmaf(factor[i + q], x[q], sum);
      }
      i += kAhead;
      if (i < last) load(i, last);
    }
  }
  total = warp_sum(total);
  if (thread % 32 == 0) totals[thread / 32] = total;
  parts[group][local] = sum;
  __syncthreads();
  if (group > 0 || e >= p.width) return;
#pragma unroll
  for (int g = 1; g < kGroups; ++g) sum += parts[g][local];
  (of_pooled ? p.grad_pooled : p.grad_weight)[row * p.width + e] = sum;
  if (of_pooled || e > 0) return;
#pragma unroll
  for (int w = 1; w < kBackwardThreads / 32; ++w) total += totals[w];
  p.grad_bias[row] = total;
}

__global__ void __launch_bounds__(kThreads)
    add_gumbel_kernel(const __grid_constant__ GumbelParams p, unsigned count) {
  const unsigned index = blockIdx.x * kThreads + threadIdx.x;
  if (index >= count) return;
  const unsigned sizes[4] = {0, static_cast<unsigned>(p.sizes[1]),
                             static_cast<unsigned>(p.sizes[2]), static_cast<unsigned>(p.sizes[3])};
  unsigned rest = index;
  int64_t from = 0;
#pragma unroll
  for (int d = 3; d > 0; --d) {
    from += rest % sizes[d] * p.logits.stride[d];
    rest /= sizes[d];
  }
  from += rest * p.logits.stride[0];
  p.result[index] = static_cast<const float*>(p.logits.data)[from] + gumbel(p.draws[index]);
}

}  // namespace

bool covers_block_logits(int64_t rows, int64_t columns, int64_t width) {
  return rows > 0 && rows <= kMostRows && width > 0 && columns <= kMostColumns &&
         rows * columns * width <= kMostProducts;
}

void launch_block_logits_fwd(const BlockLogitsParams& p, Stream stream) {
  const int64_t tiles =
      divided_up(p.batch * p.blocks, kSide) * divided_up(p.heads * p.blocks, kSide);
  const unsigned ctas = static_cast<unsigned>(divided_up(tiles, kWarps));
  launch_early(p.batch * p.blocks * p.width, "block_logits_fwd", block_logits_fwd_kernel, ctas,
               kThreads, 0, stream, p);
}

void launch_block_logits_bwd(const BlockLogitsParams& p, Stream stream) {
  const dim3 grid(static_cast<unsigned>(p.batch * p.blocks + p.heads * p.columns),
                  static_cast<unsigned>(divided_up(p.width, kThreads)));
  launch_early(p.batch * p.blocks * p.width, "block_logits_bwd", block_logits_bwd_kernel, grid,
               kBackwardThreads, 0, stream, p);
}

// Elements are counted in 32 bits: dividing by sizes is most of the work.
bool covers_add_gumbel(int64_t count) { return count < (int64_t{1} << 31); }

void launch_add_gumbel(const GumbelParams& p, Stream stream) {
  const int64_t count = p.sizes[0] * p.sizes[1] * p.sizes[2] * p.sizes[3];
  if (count == 0) return;
  const unsigned ctas = static_cast<unsigned>(divided_up(count, kThreads));
  add_gumbel_kernel<<<ctas, kThreads, 0, stream>>>(p, static_cast<unsigned>(count));
  check_launch("add_gumbel");
}

}  // namespace sinkhorn::cuda
