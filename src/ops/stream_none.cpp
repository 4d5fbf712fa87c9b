#include "ops/stream.h"

namespace sinkhorn::ops {

cuda::Stream current_stream(const at::Tensor&) { return nullptr; }

void enter_device(const at::Tensor&) {}

}  // namespace sinkhorn::ops
