// The forms of balance, each with full columns (or none) and with causal ones; balance.cu
// picks.
#pragma once

#include <cstdint>

#include "kernels/common/params.h"
#include "kernels/cuda/stream.h"

namespace sinkhorn::cuda::balance {

inline constexpr int64_t kLargestHead = 128;      // blocks that one CTA balances
inline constexpr int64_t kLargestCrewFwd = 1024;  // blocks that a crew of CTAs balances
inline constexpr int64_t kLargestCrewBwd = 512;
inline constexpr int kMostCrewSteps = 5;        // iterations that it does
inline constexpr int kMostCrewCtas = 16;        // CTAs that it has
inline constexpr int64_t kLargestStrip = 2048;  // blocks of which a CTA holds whole rows

void head_full_fwd(const BalanceParams& p, Stream stream);
void head_full_bwd(const BalanceParams& p, Stream stream);

// Prefix and prior columns, iterations >= 1, of so few blocks that a warp holds a head's matrix;
// backward for so few iterations that it keeps all of them at hand.
bool warp_causal_covers_fwd(const BalanceParams& p);
bool warp_causal_covers_bwd(const BalanceParams& p);
void warp_causal_fwd(const BalanceParams& p, Stream stream);
void warp_causal_bwd(const BalanceParams& p, Stream stream);

// Scratch in bytes; prefix and prior columns, iterations >= 1.
int64_t head_causal_bwd_scratch(const BalanceParams& p);
void head_causal_fwd(const BalanceParams& p, Stream stream);
void head_causal_bwd(const BalanceParams& p, void* scratch, Stream stream);

// Full columns, 1 to kMostCrewSteps iterations, on Hopper. Terms as the strips keep them.
int64_t crew_fwd_scratch(const BalanceParams& p);
int64_t crew_bwd_scratch(const BalanceParams& p);
void crew_fwd(const BalanceParams& p, void* scratch, Stream stream);
void crew_bwd(const BalanceParams& p, void* scratch, Stream stream);

int64_t strip_full_fwd_scratch(const BalanceParams& p);
int64_t strip_full_bwd_scratch(const BalanceParams& p);
void strip_full_fwd(const BalanceParams& p, void* scratch, Stream stream);
void strip_full_bwd(const BalanceParams& p, void* scratch, Stream stream);

int64_t strip_causal_fwd_scratch(const BalanceParams& p);
int64_t strip_causal_bwd_scratch(const BalanceParams& p);
void strip_causal_fwd(const BalanceParams& p, void* scratch, Stream stream);
void strip_causal_bwd(const BalanceParams& p, void* scratch, Stream stream);

int64_t tiled_full_fwd_scratch(const BalanceParams& p);
int64_t tiled_full_bwd_scratch(const BalanceParams& p);
void tiled_full_fwd(const BalanceParams& p, void* scratch, Stream stream);
void tiled_full_bwd(const BalanceParams& p, void* scratch, Stream stream);

int64_t tiled_causal_fwd_scratch(const BalanceParams& p);
int64_t tiled_causal_bwd_scratch(const BalanceParams& p);
void tiled_causal_fwd(const BalanceParams& p, void* scratch, Stream stream);
void tiled_causal_bwd(const BalanceParams& p, void* scratch, Stream stream);

}  // namespace sinkhorn::cuda::balance
