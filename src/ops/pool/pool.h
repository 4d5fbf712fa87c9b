// pool: blocks of tokens to one vector each, x [B, L, E] -> [B, N, E].
#pragma once

#include "ops/common.h"

namespace sinkhorn::ops {

void check_pool(const Tensor& x, int64_t block, std::string_view mode, bool causal,
                const OptionalTensor& mask);

}  // namespace sinkhorn::ops
