// pool: blocks of tokens to one vector each, x [B, L, E] -> [B, N, E].
#pragma once

#include "ops/common.h"

namespace sinkhorn::ops {

void check_pool(const Tensor& x, int64_t block, std::string_view mode, bool causal,
                const OptionalTensor& mask);

// A kernel's parameters: x and the pooled rows, or their gradients.
PoolParams pool_params(const Tensor& x, const Tensor& pooled, int64_t block, std::string_view mode,
                       bool causal, const MaskBytes& mask);

}  // namespace sinkhorn::ops
