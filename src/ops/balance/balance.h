// balance: logits [B, H, N, N] to the relaxed permutation R of the same shape.
#pragma once

#include "ops/common.h"

namespace sinkhorn::ops {

void check_balance(const Tensor& logits, int64_t iterations, double temperature,
                   std::string_view causal, std::string_view columns, int64_t window,
                   const OptionalTensor& noise, const OptionalTensor& block_mask);

}  // namespace sinkhorn::ops
