// The four operators again, naive: sections 1 and 2 of docs/spec.md transcribed into ATen calls,
// the oracle that the fast kernels are tested against. Differentiable by ordinary autograd in every
// floating input. Arguments and results are those of `torch.ops.sinkhorn`, without dropout and
// without checks: nonsense in, nonsense out.
//
// B, H, L, D = batch, heads, tokens, head width; b = block, N = ceil(L / b) blocks; row i of R is
// the destination block, column j the source block.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <optional>
#include <string>

namespace sinkhorn::reference {

// x [B, L, E], mask [B, L] -> [B, N, E].
at::Tensor pool(const at::Tensor& x, int64_t block, const std::string& mode, bool causal,
                const std::optional<at::Tensor>& mask = std::nullopt);

// logits, noise [B, H, N, N], block_mask [B, N] -> R [B, H, N, N], float32 (float64 for float64).
at::Tensor balance(const at::Tensor& logits, int64_t iterations, double temperature,
                   const std::string& causal = "none", const std::string& columns = "full",
                   int64_t window = 0, const std::optional<at::Tensor>& noise = std::nullopt,
                   const std::optional<at::Tensor>& block_mask = std::nullopt);

// query, key, value [B, H, L, D], sort [B, H, N, N], mask [B, L] -> [B, H, L, D].
at::Tensor attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const std::optional<at::Tensor>& sort, int64_t block,
                     const std::string& causal = "none", const std::string& combine = "concat",
                     int64_t window = 0, const std::optional<at::Tensor>& mask = std::nullopt,
                     std::optional<double> scale = std::nullopt);

// query [B, H, Lq, D], key, value [B, H, L, D], sort [B, H, N, N], mask [B, L] -> [B, H, Lq, D].
at::Tensor sortcut(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                   const at::Tensor& sort, int64_t block, int64_t budget,
                   const std::optional<at::Tensor>& mask = std::nullopt,
                   std::optional<double> scale = std::nullopt);

}  // namespace sinkhorn::reference
