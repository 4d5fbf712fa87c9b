// The numbers behind a call's dropout.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/zeros.h>

#include <limits>

namespace sinkhorn::composite {

// int64 [2], a seed and an offset, from the default generator of the device of `like`; zeros, and
// the generator left alone, without dropout. Drawn on the device, so that nothing waits.
inline at::Tensor draw_rng(double dropout_p, const at::Tensor& like) {
  const auto options = like.options().dtype(at::kLong);
  if (dropout_p == 0.0) return at::zeros({2}, options);
  return at::randint(std::numeric_limits<int64_t>::max(), {2}, options);
}

}  // namespace sinkhorn::composite
