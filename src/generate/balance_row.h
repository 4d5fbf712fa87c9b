// Balancing one row at a time. Row i of R depends on the rows above it through one number a column
// and iteration alone: what that column held before the iteration's column step, summed over them.
#pragma once

#include <ATen/core/Tensor.h>

#include "sinkhorn/nn/attention_config.h"

namespace sinkhorn::generate {

// What an empty column's running sum holds: prefix keeps a logarithm, prior the sum itself.
double empty_sum(const nn::AttentionConfig& config);
// Running sums a column; none where rows do not depend on one another.
int64_t kept_sums(const nn::AttentionConfig& config);

// The next row of R, [B, H, N], of logits [B, H, N]; allowed [B, 1, N] bool. sums [B, H, K, N] are
// those of the rows above; they become those with this row.
at::Tensor balance_row(const at::Tensor& logits, const at::Tensor& allowed,
                       const nn::AttentionConfig& config, at::Tensor& sums);

// The running sums below the last row of logits [B, H, N, N], allowed [B, 1, N, N]: [B, H, K, N].
at::Tensor column_sums(const at::Tensor& logits, const at::Tensor& allowed,
                       const nn::AttentionConfig& config);

}  // namespace sinkhorn::generate
