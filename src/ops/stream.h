// The CUDA stream that Torch's operations run on now, for kernels of our own.
#pragma once

#include <ATen/core/Tensor.h>

#include "kernels/cuda/stream.h"

namespace sinkhorn::ops {

// The current stream of the device of `x`, which must be a CUDA tensor.
cuda::Stream current_stream(const at::Tensor& x);

}  // namespace sinkhorn::ops
