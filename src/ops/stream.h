// The CUDA stream that Torch's operations run on now, for kernels of our own.
#pragma once

#include <ATen/core/Tensor.h>

#include "kernels/cuda/stream.h"

namespace sinkhorn::ops {

// The current stream of the device of `x`, which must be a CUDA tensor.
cuda::Stream current_stream(const at::Tensor& x);

// Makes the CUDA device of `x`, if it lies on one, this thread's. A thread of autograd begins
// without one, and Torch warns where its first work is a product of the library.
void enter_device(const at::Tensor& x);

// Memory for a kernel to work in, on the device of `like`.
at::Tensor scratch_of(const at::Tensor& like, int64_t bytes);

}  // namespace sinkhorn::ops
