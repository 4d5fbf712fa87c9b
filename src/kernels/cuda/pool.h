// pool on CUDA: x [B, L, E] to the blocks' sums or means [B, N, E], and the gradient of x.
#pragma once

#include <cstdint>

#include "kernels/common/params.h"
#include "kernels/cuda/stream.h"

namespace sinkhorn::cuda {

// Everything but float64.
bool covers_pool(const PoolParams& params);

// Bytes of scratch that a launch needs, 0 for none. They need no particular contents.
int64_t pool_scratch(const PoolParams& params);

// Writes `pooled`, rounded to the type of x, in that type or as float32.
void launch_pool_fwd(const PoolParams& params, void* scratch, Stream stream);

// Backward of one or two pools of the same x, block and mask. Of each, `pooled` is the incoming
// gradient, in the type of x or float32, and x the gradient of x, one tensor for both.
struct PoolGradients {
  PoolParams pools[2];
  void* scratch[2] = {nullptr, nullptr};  // pool_scratch of each
  int count = 1;
  View onto;  // [B, 1, L, E], added to the result, in its type; no data for nothing
};

// Writes the gradient of x. What is added is rounded once.
void launch_pool_bwd(const PoolGradients& call, Stream stream);

}  // namespace sinkhorn::cuda
