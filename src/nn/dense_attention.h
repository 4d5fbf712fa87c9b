// Attention over a whole sequence, by PyTorch's scaled_dot_product_attention.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace sinkhorn::nn {

struct DenseOptions {
  bool causal = false;
  std::optional<at::Tensor> key_mask{};  // [B, S] bool
  double dropout = 0.0;
};

// query [B, H, L, D], key and value [B, H, S, D] -> [B, H, L, D]; a query that sees nothing gives
// 0.
at::Tensor dense_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                           const DenseOptions& options);

// The same with what is visible written out: bool, [L, S] or broadcastable to [B, H, L, S].
at::Tensor masked_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                            const at::Tensor& visible, double dropout);

}  // namespace sinkhorn::nn
