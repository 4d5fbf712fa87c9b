#include <c10/cuda/CUDAStream.h>

#include "ops/stream.h"

namespace sinkhorn::ops {

cuda::Stream current_stream(const at::Tensor& x) {
  return c10::cuda::getCurrentCUDAStream(x.device().index()).stream();
}

}  // namespace sinkhorn::ops
