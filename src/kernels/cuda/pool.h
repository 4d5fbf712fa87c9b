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

// Writes `pooled`, in the type of x.
void launch_pool_fwd(const PoolParams& params, void* scratch, Stream stream);

// Writes the gradient of x, in the type of the incoming gradient.
void launch_pool_bwd(const PoolParams& params, void* scratch, Stream stream);

}  // namespace sinkhorn::cuda
