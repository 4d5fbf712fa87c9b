// Tokens of width E as H heads of width D = E / H, and back.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace sinkhorn::nn {

// [B, L, E] -> [B, H, L, D] and back.
at::Tensor split_heads(const at::Tensor& x, int64_t heads);
at::Tensor join_heads(const at::Tensor& x);

// [B, L, parts * E] -> the heads of each part, as views. Where the parts' gradients lie side by
// side as the parts do (attention's do), they are the gradient of x as they are; others are copied.
std::vector<at::Tensor> split_parts(const at::Tensor& x, int64_t parts, int64_t heads);

}  // namespace sinkhorn::nn
