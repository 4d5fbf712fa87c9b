#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

#include "ops/stream.h"

namespace sinkhorn::ops {

cuda::Stream current_stream(const at::Tensor& x) {
  return c10::cuda::getCurrentCUDAStream(x.device().index()).stream();
}

void enter_device(const at::Tensor& x) {
  if (!x.is_cuda() || x.device().index() >= c10::cuda::device_count()) return;
  c10::cuda::set_device(x.device().index(), /*force=*/true);
}

}  // namespace sinkhorn::ops
