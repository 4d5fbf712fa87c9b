// A tensor of tokens together with its pools, where a module reads all of them.
#pragma once

#include <string>
#include <vector>

#include "ops/common.h"

namespace sinkhorn::ops {

struct PoolKind {
  std::string mode;
  bool causal = false;
};

struct Pooled {
  Tensor x;                   // the x that was given
  std::vector<Tensor> pools;  // [B, N, E] each
};

// One or two pools of x [B, L, E]. Read the x that comes back: its gradient and those of the pools
// then meet in one pass (pool_spread), where autograd would spread each and add them one by one.
Pooled pooled(const Tensor& x, int64_t block, const std::vector<PoolKind>& kinds,
              const OptionalTensor& mask);

}  // namespace sinkhorn::ops
