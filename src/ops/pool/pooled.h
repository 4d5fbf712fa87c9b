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
  Tensor x;  // the x that was given
  // [B, N, E] each, rounded to the type of x and handed on in the one that sums run in, where a
  // sort network reads them.
  std::vector<Tensor> pools;
};

// One or two pools of x [B, L, E]. Read the x that comes back: its gradient and those of the pools
// then meet in one pass (pool_spread), where autograd would spread each and add them one by one.
Pooled pooled(const Tensor& x, int64_t block, const std::vector<PoolKind>& kinds,
              const OptionalTensor& mask);

}  // namespace sinkhorn::ops
