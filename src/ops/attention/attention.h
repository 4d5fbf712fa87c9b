// attention: queries against the block sorted into their place and the blocks around them.
#pragma once

#include <tuple>

#include "ops/common.h"

namespace sinkhorn::ops {

void check_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                     const OptionalTensor& sort, int64_t block, std::string_view causal,
                     std::string_view combine, int64_t window, const OptionalTensor& mask,
                     std::optional<double> scale, double dropout_p);

// out, stats [B, H, softmaxes, 2 (half types 1), L], sorted_key and sorted_value [B, H, N, b, D],
// weight [B, H, N, b + 1 (or 2, see weight_row)], sorted_out [B, H, L, D], rng [2]. What a
// call does not need has shape [0]; without `keep` that is also the sorted copies, which only
// backward reads.
using AttentionResult = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// Allocates everything attention_fwd returns, on any device, sizes symbolic or not.
AttentionResult allocate_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                   const OptionalTensor& sort, int64_t block,
                                   std::string_view combine, const OptionalTensor& mask, bool keep);

}  // namespace sinkhorn::ops
