// Picks the form of balance: by the number of blocks, and by what the columns need.
//
// The borders: up to 16 blocks a warp holds the matrix of a head with causal columns, and no
// barrier stands between the short steps of so small a one. At 128 blocks a CTA holds a head's
// matrix in shared memory, 81 KB with what a causal backward needs beside it, which every supported
// card has. The next size would be 256 KB. At 1024 blocks with full columns 16 CTAs, which only
// Hopper has room for, hold a head's matrix in their shared memory and registers; backward is
// faster in strips beyond 512. At 2048 blocks a CTA of 512 threads holds 8 rows in registers.
#include "kernels/cuda/attention_launch.cuh"
#include "kernels/cuda/balance.h"
#include "kernels/cuda/balance_launch.h"

namespace sinkhorn::cuda {
namespace {

// Prefix and prior columns; the others are potentials.
bool scans_columns(const BalanceParams& p) {
  return p.iterations > 0 && (p.columns == Columns::kPrefix || p.columns == Columns::kPrior);
}

bool fits_a_warp_fwd(const BalanceParams& p) {
  return scans_columns(p) && balance::warp_causal_covers_fwd(p);
}
bool fits_a_warp_bwd(const BalanceParams& p) {
  return scans_columns(p) && balance::warp_causal_covers_bwd(p);
}
bool fits_a_head(const BalanceParams& p) { return p.blocks <= balance::kLargestHead; }
bool fits_a_crew(const BalanceParams& p, int64_t largest) {
  return p.blocks <= largest && p.columns == Columns::kFull && p.iterations > 0 &&
         p.iterations <= balance::kMostCrewSteps && on_hopper() &&
         multiprocessors() >= balance::kMostCrewCtas;
}
bool fits_a_crew_fwd(const BalanceParams& p) { return fits_a_crew(p, balance::kLargestCrewFwd); }
bool fits_a_crew_bwd(const BalanceParams& p) { return fits_a_crew(p, balance::kLargestCrewBwd); }
bool fits_strips(const BalanceParams& p) { return p.blocks <= balance::kLargestStrip; }

}  // namespace

bool covers_balance(const BalanceParams& params) {
  return !params.compute64 && params.blocks <= (int64_t{1} << 24) &&
         params.iterations <= (int64_t{1} << 24) &&
         (params.noise.data == nullptr || params.noise.type == Type::kFloat32);
}

int64_t balance_fwd_scratch(const BalanceParams& params) {
  if (fits_a_head(params)) return 0;
  if (fits_a_crew_fwd(params)) return balance::crew_fwd_scratch(params);
  if (fits_strips(params)) {
    return scans_columns(params) ? balance::strip_causal_fwd_scratch(params)
                                 : balance::strip_full_fwd_scratch(params);
  }
  return scans_columns(params) ? balance::tiled_causal_fwd_scratch(params)
                               : balance::tiled_full_fwd_scratch(params);
}

int64_t balance_bwd_scratch(const BalanceParams& params) {
  if (fits_a_warp_bwd(params)) return 0;
  if (fits_a_head(params)) {
    return scans_columns(params) ? balance::head_causal_bwd_scratch(params) : 0;
  }
  if (fits_a_crew_bwd(params)) return balance::crew_bwd_scratch(params);
  if (fits_strips(params)) {
    return scans_columns(params) ? balance::strip_causal_bwd_scratch(params)
                                 : balance::strip_full_bwd_scratch(params);
  }
  return scans_columns(params) ? balance::tiled_causal_bwd_scratch(params)
                               : balance::tiled_full_bwd_scratch(params);
}

void launch_balance_fwd(const BalanceParams& params, void* scratch, Stream stream) {
  if (params.batch == 0) return;
  if (fits_a_warp_fwd(params)) return balance::warp_causal_fwd(params, stream);
  if (fits_a_head(params)) {
    scans_columns(params) ? balance::head_causal_fwd(params, stream)
                          : balance::head_full_fwd(params, stream);
  } else if (fits_a_crew_fwd(params)) {
    balance::crew_fwd(params, scratch, stream);
  } else if (fits_strips(params)) {
    scans_columns(params) ? balance::strip_causal_fwd(params, scratch, stream)
                          : balance::strip_full_fwd(params, scratch, stream);
  } else {
    scans_columns(params) ? balance::tiled_causal_fwd(params, scratch, stream)
                          : balance::tiled_full_fwd(params, scratch, stream);
  }
}

void launch_balance_bwd(const BalanceParams& params, void* scratch, Stream stream) {
  if (params.batch == 0) return;
  if (fits_a_warp_bwd(params)) return balance::warp_causal_bwd(params, stream);
  if (fits_a_head(params)) {
    scans_columns(params) ? balance::head_causal_bwd(params, scratch, stream)
                          : balance::head_full_bwd(params, stream);
  } else if (fits_a_crew_bwd(params)) {
    balance::crew_bwd(params, scratch, stream);
  } else if (fits_strips(params)) {
    scans_columns(params) ? balance::strip_causal_bwd(params, scratch, stream)
                          : balance::strip_full_bwd(params, scratch, stream);
  } else {
    scans_columns(params) ? balance::tiled_causal_bwd(params, scratch, stream)
                          : balance::tiled_full_bwd(params, scratch, stream);
  }
}

}  // namespace sinkhorn::cuda
