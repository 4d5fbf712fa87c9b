#include "nn/dense_attention.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/scaled_dot_product_attention.h>

namespace sinkhorn::nn {

at::Tensor masked_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                            const at::Tensor& visible, double dropout) {
  // One more key and value of zeros, for the queries that see nothing else: their softmax stays
  // finite, their result is 0 and nothing flows back.
  const at::Tensor nothing = visible.any(-1, true).logical_not();
  const at::Tensor padded_key = at::constant_pad_nd(key, {0, 0, 0, 1});
  const at::Tensor padded_value = at::constant_pad_nd(value, {0, 0, 0, 1});
  return at::scaled_dot_product_attention(query, padded_key, padded_value,
                                          at::cat({visible, nothing}, -1), dropout);
}

at::Tensor dense_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                           const DenseOptions& options) {
  if (!options.key_mask.has_value()) {
    return at::scaled_dot_product_attention(query, key, value, std::nullopt, options.dropout,
                                            options.causal);
  }
  at::Tensor visible = options.key_mask->unsqueeze(1).unsqueeze(1);  // [B, 1, 1, S]
  if (options.causal) {
    const auto longs = query.options().dtype(at::kLong);
    const at::Tensor at_query = at::arange(query.size(2), longs).unsqueeze(1);
    visible = visible.logical_and(at::arange(key.size(2), longs) <= at_query);
  } else {
    visible = visible.expand({-1, 1, query.size(2), -1});
  }
  return masked_attention(query, key, value, visible, options.dropout);
}

}  // namespace sinkhorn::nn
