// The operators written with ATen operations only: differentiable by ordinary autograd, on any
// device, for every option. They serve where there is no kernel.
//
// What they keep to:
//   - What is masked or not allowed is replaced by a constant before any arithmetic that could
//     carry it on, so that neither a value nor a gradient meets 0 * NaN.
//   - Sums run in float32 (float64 for float64); a result is rounded to its type once.
//   - No operation whose result depends on the order of threads, no wait for the device, and no
//     branch on the contents of a tensor.
//   - Attention costs O(L * (2 + 2 * window) * b): queries meet blocks, never L x L.
//
// Arguments are those of the operators, which check them; here they are taken to be legal.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>

namespace sinkhorn::composite {

// x [B, L, E] -> [B, N, E]
at::Tensor pool(const at::Tensor& x, int64_t block, std::string_view mode, bool causal,
                const std::optional<at::Tensor>& mask);

// logits [B, H, N, N] -> R [B, H, N, N]
at::Tensor balance(const at::Tensor& logits, int64_t iterations, double temperature,
                   std::string_view causal, std::string_view columns, int64_t window,
                   const std::optional<at::Tensor>& noise,
                   const std::optional<at::Tensor>& block_mask);

// query, key, value [B, H, L, D] -> [B, H, L, D]. rng: int64 [2] on the same device, a seed and an
// offset; read if dropout_p > 0. The same numbers drop the same weights.
at::Tensor attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const std::optional<at::Tensor>& sort, int64_t block, std::string_view causal,
                     std::string_view combine, int64_t window,
                     const std::optional<at::Tensor>& mask, std::optional<double> scale,
                     double dropout_p, const at::Tensor& rng);

// query [B, H, Lq, D], key and value [B, H, L, D] -> [B, H, Lq, D]. rng as above.
at::Tensor sortcut(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                   const at::Tensor& sort, int64_t block, int64_t budget,
                   const std::optional<at::Tensor>& mask, std::optional<double> scale,
                   double dropout_p, const at::Tensor& rng);

}  // namespace sinkhorn::composite
