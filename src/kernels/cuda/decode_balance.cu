// Balancing the row of a block that begins. n sources, x = logits / temperature:
//
//   x <- x - logsumexp(x), then for k = 1 .. K:  x <- x - C_k,  x <- x - logsumexp(x);  R = exp(x)
//   prefix  C = logaddexp(S_k, x), and S_k becomes it;  prior  C = log1p(S_k), S_k += exp(x)
//
// S [B, H, K, N]: the running sums of the rows above. With a bilinear network the logits are made
// here, a warp to a few sources at a time: x_j = (a . c_j) / sqrt(D) / temperature.
//
// Mapping: a CTA to a slot and head; those whose slot begins no block return at once. A thread has
// every kThreads-th column and keeps its x in `row`, so that N has no limit; a normalisation is
// one sum over the CTA, subtracted when x is read next.
#include "kernels/cuda/check.cuh"
#include "kernels/cuda/decode_common.cuh"

namespace sinkhorn::cuda {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kMostWidth = 256;

// The logarithm of a sum of exponentials, in two parts.
struct LogSum {
  float most = -INFINITY, sum = 0.0f;  // sum of exp(x - most)

  __device__ __forceinline__ void add(const LogSum& other) {
    const float m = fmaxf(most, other.most);
    if (m == -INFINITY) return;
    sum = sum * expf(most - m) + other.sum * expf(other.most - m);
    most = m;
  }
  __device__ __forceinline__ void add(float x) { add(LogSum{x, 1.0f}); }
  __device__ __forceinline__ float logarithm() const { return most + logf(sum); }
};

// Every thread gets the sum over the CTA, and the same bits.
__device__ float over_cta(LogSum x, LogSum* parts) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    x.add(LogSum{__shfl_xor_sync(0xFFFFFFFFu, x.most, distance),
                 __shfl_xor_sync(0xFFFFFFFFu, x.sum, distance)});
  }
  __syncthreads();  // what the last sum left has been read
  if (lane == 0) parts[warp] = x;
  __syncthreads();
  LogSum all;
  for (int w = 0; w < kWarps; ++w) all.add(parts[w]);
  return all.logarithm();
}

// Takes in the newest source and leaves the logits in row [N].
__device__ void bilinear_logits(const DecodeBalanceParams& p, int head_index, int64_t block,
                                int64_t n, float* row) {
  constexpr int kTogether = 4;
  __shared__ float a[kMostWidth];
  const int width = p.state.width;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  float* const sources = p.sources + head_index * p.blocks * width;
  const int64_t newest = p.own_sources ? block - 1 : block;
  for (int d = static_cast<int>(threadIdx.x); d < width; d += kThreads) {
    a[d] = p.destination[int64_t{head_index} * width + d];
    if (newest >= 0) sources[newest * width + d] = p.source[int64_t{head_index} * width + d];
  }
  __syncthreads();
  const float root = sqrtf(static_cast<float>(width));
  for (int64_t first = warp * kTogether; first < n; first += kWarps * kTogether) {
    float product[kTogether] = {};
    for (int d = lane; d < width; d += 32) {
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
        if (first + u < n) product[u] += a[d] * sources[(first + u) * width + d];
      }
    }
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      const float logit = warp_sum(product[u]) / root;
      if (lane == 0 && first + u < n) row[first + u] = logit / p.temperature;
    }
  }
  __syncthreads();  // other threads go on with the columns
}

// One column step on x_j; returns C.
__device__ __forceinline__ float column_term(Columns columns, float* sum, float x) {
  const float above = *sum;
  if (columns == Columns::kPrior) {
    *sum = above + expf(x);
    return log1pf(above);
  }
  const float most = fmaxf(above, x);
  const float term = most == -INFINITY ? most : most + log1pf(expf(-fabsf(above - x)));
  *sum = term;
  return term;
}

// Grid: heads, slots.
__global__ void __launch_bounds__(kThreads)
    decode_balance_kernel(const __grid_constant__ DecodeBalanceParams p) {
  __shared__ LogSum parts[kWarps];
  const DecodeState& s = p.state;
  const int head = static_cast<int>(blockIdx.x), slot = static_cast<int>(blockIdx.y);
  const DecodePlace place(s, slot);
  if (!place.begins) return;
  const int head_index = slot * s.heads + head;
  const int64_t n = decode_sources(s, place.block);
  float* const row = p.row + head_index * p.blocks;
  const int first = static_cast<int>(threadIdx.x);

  if (p.logits.data == nullptr) {
    bilinear_logits(p, head_index, place.block, n, row);
  } else {
    const float* const logits = vector_of<const float>(p.logits, slot, head);
    for (int64_t j = first; j < n; j += kThreads) row[j] = logits[j] / p.temperature;
  }
  float shift = 0.0f;  // to be subtracted from what row holds
  if (p.iterations > 0 && n > 0) {
    LogSum all;
    for (int64_t j = first; j < n; j += kThreads) all.add(row[j]);
    shift = over_cta(all, parts);
  }
  const int steps = p.columns == Columns::kNone || n == 0 ? 0 : p.iterations;
  for (int k = 0; k < steps; ++k) {
    float* const sums = p.sums + (int64_t{head_index} * p.iterations + k) * p.blocks;
    LogSum all;
    for (int64_t j = first; j < n; j += kThreads) {
      const float x = row[j] - shift;
      const float balanced = x - column_term(p.columns, sums + j, x);
      row[j] = balanced;
      all.add(balanced);
    }
    shift = over_cta(all, parts);
  }
  bool some = false;
  for (int64_t j = first; j < n; j += kThreads) {
    const float share = expf(row[j] - shift);
    row[j] = share;
    some = some || share != 0.0f;
    if (s.inclusive && j == place.block) s.own_share[head_index] = share;
  }
  const bool live = __syncthreads_or(some) != 0;
  if (first == 0) s.live[head_index] = live;
}

}  // namespace

void launch_decode_balance(const DecodeBalanceParams& p, Stream stream) {
  const dim3 grid(static_cast<unsigned>(p.state.heads), static_cast<unsigned>(p.state.batch));
  decode_balance_kernel<<<grid, kThreads, 0, stream>>>(p);
  check_launch("decode_balance");
}

}  // namespace sinkhorn::cuda
