// Mean cross-entropy with label smoothing, and its gradient in the same pass.
//
// For a row z [V] with target t, smoothing e, and n rows that count:
//   loss   = lse(z) - (1 - e) z_t - e mean(z),       the result is the sum over rows / n
//   dz_v   = (softmax(z)_v - (1 - e) [v = t] - e / V) / n
//   logits, dlogits [rows, V] T; everything else float32
//
// A block takes a row. It reads it once with a running maximum and sum, and a second time, out of
// the cache, to write the gradient: forward alone would have to be followed by a backward that
// reads all logits again. Backward then only multiplies by the gradient of the mean, which is 1
// where the mean is what training minimises. The logits are left as they are.
#pragma once

#include <limits>

#include "kernels/cuda/cross_entropy.h"
#include "kernels/cuda/lanes.cuh"

namespace sinkhorn::cuda {

constexpr int kCrossEntropyThreads = 512;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The fast exponential is within 2 ulp of float32 near 0 and 1e-6 at -20: enough for half types.
template <class T>
__device__ __forceinline__ float exp_of(float x) {
  return __expf(x);
}
template <>
__device__ __forceinline__ float exp_of<float>(float x) {
  return expf(x);
}

// Sum of exp(z - base) with base the largest z, 0 where that is -inf; and the sum of z.
struct RowSums {
  float largest, sum, total;

  __device__ __forceinline__ float base() const { return largest == -kInfinity ? 0.0f : largest; }
};

template <class T>
__device__ __forceinline__ void merge(RowSums& a, const RowSums& b) {
  RowSums both;
  both.largest = fmaxf(a.largest, b.largest);
  both.sum =
      a.sum * exp_of<T>(a.largest - both.base()) + b.sum * exp_of<T>(b.largest - both.base());
  both.total = a.total + b.total;
  a = both;
}

// Over the block, in a fixed order; every thread gets the result.
template <class T>
__device__ __forceinline__ RowSums merge_block(RowSums mine) {
  __shared__ RowSums shared[kCrossEntropyThreads / 32];
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    RowSums other;
    other.largest = __shfl_down_sync(0xFFFFFFFFu, mine.largest, distance);
    other.sum = __shfl_down_sync(0xFFFFFFFFu, mine.sum, distance);
    other.total = __shfl_down_sync(0xFFFFFFFFu, mine.total, distance);
    merge<T>(mine, other);  // of use in the lower lanes alone
  }
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = mine;
  __syncthreads();
  RowSums all = shared[0];
  for (unsigned w = 1; w < blockDim.x / 32; ++w) merge<T>(all, shared[w]);
  return all;
}

// kPack: logits a thread takes at a time, 16 bytes where rows begin at multiples of that, or 1.
template <class T, int kPack>
__global__ void __launch_bounds__(kCrossEntropyThreads)
    cross_entropy_fwd_kernel(const __grid_constant__ CrossEntropyParams p) {
  const int64_t row = blockIdx.x, target = p.targets[row];
  const int labels = static_cast<int>(p.labels), step = static_cast<int>(blockDim.x) * kPack;
  const int first = static_cast<int>(threadIdx.x) * kPack;
  const T* logits = static_cast<const T*>(p.logits) + row * p.labels;
  T* grad = p.grad_logits == nullptr ? nullptr : static_cast<T*>(p.grad_logits) + row * p.labels;
  if (target == p.ignored) {  // the same for the whole block
    if (threadIdx.x == 0) p.losses[row] = 0.0f;
    const float zeros[kPack] = {};
    for (int v = first; grad != nullptr && v < labels; v += step) {
      store_pack<kPack>(grad + v, zeros);
    }
    return;
  }

  RowSums mine{-kInfinity, 0.0f, 0.0f};
#pragma unroll 2
  for (int v = first; v < labels; v += step) {
    float z[kPack];
    load_pack<kPack>(logits + v, z);
    RowSums next;
    next.largest = mine.largest;
#pragma unroll
    for (int k = 0; k < kPack; ++k) next.largest = fmaxf(next.largest, z[k]);
    next.sum = mine.sum * exp_of<T>(mine.largest - next.base());
    next.total = mine.total;
#pragma unroll
    for (int k = 0; k < kPack; ++k) {
      next.sum += exp_of<T>(z[k] - next.base());
      next.total += z[k];
    }
    mine = next;
  }
  const RowSums all = merge_block<T>(mine);
  const float even = p.smoothing / static_cast<float>(labels);
  if (threadIdx.x == 0) {
    // A target that is no label is not read: the loss says so.
    const bool known = target >= 0 && target < p.labels;
    const float right =
        known ? static_cast<float>(logits[target]) : std::numeric_limits<float>::quiet_NaN();
    const float spread = p.smoothing > 0.0f ? even * all.total : 0.0f;
    p.losses[row] = (all.base() - (1.0f - p.smoothing) * right) + logf(all.sum) - spread;
  }
  if (grad == nullptr) return;
  const float share = 1.0f / *p.count, over = 1.0f / all.sum;
  for (int v = first; v < labels; v += step) {
    float z[kPack];
    load_pack<kPack>(logits + v, z);
#pragma unroll
    for (int k = 0; k < kPack; ++k) {
      const float wanted = v + k == target ? 1.0f - p.smoothing : 0.0f;
      z[k] = (exp_of<T>(z[k] - all.base()) * over - even - wanted) * share;
    }
    store_pack<kPack>(grad + v, z);
  }
}

// The sum over a block of 1,024, in a fixed order; thread 0 gets it.
__device__ __forceinline__ float block_sum(float x) {
  __shared__ float sums[32];
  x = warp_sum(x);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
  __syncthreads();
  float total = 0.0f;
#pragma unroll
  for (int w = 0; w < 32; ++w) total += sums[w];
  return total;
}

// How many rows count; one block of 1,024.
static __global__ void __launch_bounds__(1024)
    target_count_kernel(const __grid_constant__ CrossEntropyParams p) {
  float count = 0.0f;  // exact: a thread sees fewer than 2^24 rows
#pragma unroll 4
  for (int64_t r = threadIdx.x; r < p.rows; r += 1024) {
    count += p.targets[r] == p.ignored ? 0.0f : 1.0f;
  }
  count = block_sum(count);
  if (threadIdx.x == 0) *p.count = count;
}

// The mean of the losses; one block of 1,024.
static __global__ void __launch_bounds__(1024)
    mean_loss_kernel(const __grid_constant__ CrossEntropyParams p) {
  float sum = 0.0f;
#pragma unroll 4
  for (int64_t r = threadIdx.x; r < p.rows; r += 1024) sum += p.losses[r];
  sum = block_sum(sum);
  if (threadIdx.x == 0) *p.loss = sum / *p.count;
}

template <class T, int kPack>
__global__ void __launch_bounds__(256) scale_kernel(const __grid_constant__ ScaleParams p) {
  const float factor = *p.factor;
  if (factor == 1.0f) return;
  T* values = static_cast<T*>(p.values);
  const int64_t step = int64_t{gridDim.x} * 256 * kPack;
  for (int64_t i = (int64_t{blockIdx.x} * 256 + threadIdx.x) * kPack; i < p.count; i += step) {
    float x[kPack];
    load_own_pack<kPack>(values + i, x);
#pragma unroll
    for (int k = 0; k < kPack; ++k) x[k] *= factor;
    store_pack<kPack>(values + i, x);
  }
}

}  // namespace sinkhorn::cuda
