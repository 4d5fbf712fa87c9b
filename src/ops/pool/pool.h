// pool: blocks of tokens to one vector each, x [B, L, E] -> [B, N, E].
#pragma once

#include <ATen/core/List.h>

#include "ops/common.h"

namespace sinkhorn::ops {

void check_pool(const Tensor& x, int64_t block, std::string_view mode, bool causal,
                const OptionalTensor& mask);

// A kernel's parameters: x and the pooled rows, or their gradients.
PoolParams pool_params(const Tensor& x, const Tensor& pooled, int64_t block, std::string_view mode,
                       bool causal, const MaskBytes& mask);

// pool_wide: pool_fwd, its rounded result in the type that sums run in.
//
// pool_spread: onto [B, L, E] plus the gradients of x from those of one or two pools of it, [B, N,
// E], in the type of onto or the one that its sums run in. The plain form calls pool_bwd and adds.
void check_pool_spread(const Tensor& onto, at::TensorList grads, const OptionalTensor& mask,
                       int64_t block, const c10::List<std::string>& modes,
                       const c10::List<bool>& causal);
Tensor pool_spread_plain(const Tensor& onto, at::TensorList grads, const OptionalTensor& mask,
                         int64_t block, const c10::List<std::string>& modes,
                         const c10::List<bool>& causal);

}  // namespace sinkhorn::ops
