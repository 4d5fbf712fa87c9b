// pool: x [B, L, E] -> [B, N, E], sums or means of the real tokens that row i reads:
//
//   not causal  block i
//   causal      blocks 0 .. i-1 and the first token of block i
//   recent      the last b-1 tokens of block i-1 and the first token of block i
//
// Each row adds up its own tokens or those of rows above, and nothing is subtracted: a running sum
// minus an earlier one would not forget NaN.
#include <algorithm>

#include "ops/common.h"
#include "ops/composite/blocks.h"
#include "ops/composite/composite.h"

namespace sinkhorn::composite {
namespace {

// blocks [B, N, b, E], 0 where masked -> [B, N, E]
Tensor add_up(const Tensor& blocks, PoolMode mode, bool causal) {
  if (!causal) return blocks.sum(2);
  const Tensor first = blocks.select(2, 0);
  if (mode == PoolMode::kRecent) {
    return shift_down(blocks.narrow(2, 1, blocks.size(2) - 1).sum(2), 1) + first;
  }
  return running_sum(shift_down(blocks.sum(2), 1), 1) + first;
}

}  // namespace

at::Tensor pool(const at::Tensor& x, int64_t block, std::string_view mode, bool causal,
                const std::optional<at::Tensor>& mask) {
  const PoolMode kind = ops::parse_pool_mode("pool", mode);
  const at::ScalarType type = ops::compute_type(x.scalar_type());
  const int64_t used = std::min(block, x.size(1));  // a longer block holds no more tokens
  const Tensor real = real_tokens(mask, x, x.size(1), used).unsqueeze(3);  // [B|1, N, b, 1]
  Tensor result = add_up(keep(real, cut(x, 1, used)).to(type), kind, causal);
  if (kind != PoolMode::kSum) {
    result = result / add_up(real.to(type), kind, causal).clamp_min(1);
  }
  return result.to(x.scalar_type()).contiguous();
}

}  // namespace sinkhorn::composite
