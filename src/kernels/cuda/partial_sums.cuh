// The last step of a pair of results whose terms were added up in parts: the parts are added in
// their order, in float32, and rounded once.
//
//   key[i] = sum_s partial[s, 0, i],  value[i] = sum_s partial[s, 1, i]       i < size
#pragma once

#include "kernels/cuda/attention_launch.cuh"

namespace sinkhorn::cuda {

constexpr int kSumThreads = 256;

// A thread a number of the result.
template <class T>
__global__ void __launch_bounds__(kSumThreads)
    partial_sums_kernel(const float* partial, int splits, int64_t size, T* key, T* value) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kSumThreads + threadIdx.x;
  if (i >= 2 * size) return;
  float total = 0.0f;
#pragma unroll 8
  for (int split = 0; split < splits; ++split) total += partial[split * 2 * size + i];
  if (i < size) {
    key[i] = from_float<T>(total);
  } else {
    value[i - size] = from_float<T>(total);
  }
}

template <class T>
void launch_partial_sums(const char* name, const float* partial, int splits, int64_t size,
                         void* key, void* value, Stream stream) {
  const dim3 grid(static_cast<unsigned>((2 * size + kSumThreads - 1) / kSumThreads));
  launch(name, partial_sums_kernel<T>, grid, kSumThreads, 0, stream, partial, splits, size,
         static_cast<T*>(key), static_cast<T*>(value));
}

}  // namespace sinkhorn::cuda
