// The second stage of sums over rows: out[m][c] = sum over r of in[m][r][c], in float32.
//
//   in [matrices, rows, width], out[m] [width]
//
// A block takes 32 columns of one matrix. Thread (x, y) sums rows y, y + 32, ... of column x, and
// the 32 sums of a column are added from the first to the last: the order never changes. There are
// few blocks and few rows, so that the time is latency: a thread asks for seventeen rows at once,
// its share of the 528 that a norm leaves.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace sinkhorn::cuda {

struct ColumnSumParams {
  int64_t rows, width;
  const float* in;
  float* out[2];  // one for each matrix
};

static __global__ void __launch_bounds__(1024)
    column_sum_kernel(const __grid_constant__ ColumnSumParams p) {
  __shared__ float sums[32][33];
  const int64_t column = int64_t{blockIdx.x} * 32 + threadIdx.x;
  const float* in = p.in + blockIdx.y * p.rows * p.width;
  float sum = 0.0f;
  if (column < p.width) {
    constexpr int kAhead = 17;
    const int64_t step = 32 * p.width;
    const float* from = in + threadIdx.y * p.width + column;
    int left = static_cast<int>((p.rows - threadIdx.y + 31) / 32);
    for (; left > 0; left -= kAhead, from += kAhead * step) {
      float x[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) x[i] = i < left ? from[i * step] : 0.0f;
#pragma unroll
      for (int i = 0; i < kAhead; ++i) sum += x[i];
    }
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= p.width) return;
  float total = 0.0f;
#pragma unroll
  for (int y = 0; y < 32; ++y) total += sums[y][threadIdx.x];
  (blockIdx.y == 0 ? p.out[0] : p.out[1])[column] = total;
}

// matrices: 1 or 2
inline void start_column_sum(const ColumnSumParams& p, unsigned matrices, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((p.width + 31) / 32), matrices);
  column_sum_kernel<<<grid, dim3(32, 32), 0, stream>>>(p);
}

}  // namespace sinkhorn::cuda
