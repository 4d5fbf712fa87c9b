// balance on CUDA: logits [B, H, N, N] to R of the same shape, and the gradient of the logits.
//
// Four forms. Up to 128 blocks one launch does all iterations of all heads, a CTA to a head
// (balance_head_*.cu). So it does with full columns and few iterations on Hopper, forward up to
// 1024 and backward up to 512, a crew of CTAs to a head (balance_crew_*.cu). Up to 2048 a CTA holds
// 8 whole rows at a time in registers, with a launch a step for full columns and two for others
// (balance_strip_*.cu). More blocks are cut into chunks of 32 rows, which a CTA reads again and
// again (balance_tiled_*.cu).
#pragma once

#include <cstdint>

#include "kernels/common/params.h"
#include "kernels/cuda/stream.h"

namespace sinkhorn::cuda {

// Everything but float64; noise must be float32.
bool covers_balance(const BalanceParams& params);

// Bytes of scratch that a launch needs, 0 for none. They need no particular contents.
int64_t balance_fwd_scratch(const BalanceParams& params);
int64_t balance_bwd_scratch(const BalanceParams& params);

// Writes R, float32, and the terms. The terms are in base 2 and only for launch_balance_bwd.
void launch_balance_fwd(const BalanceParams& params, void* scratch, Stream stream);

// Writes the gradient of the logits, in the type of the logits; the incoming gradient is float32.
void launch_balance_bwd(const BalanceParams& params, void* scratch, Stream stream);

}  // namespace sinkhorn::cuda
