#include "ops/stream.h"

namespace sinkhorn::ops {

cuda::Stream current_stream(const at::Tensor&) { return nullptr; }

}  // namespace sinkhorn::ops
