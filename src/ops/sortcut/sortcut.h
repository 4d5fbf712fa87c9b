// sortcut: every query against the first `budget` sorted blocks and nothing else.
#pragma once

#include <tuple>

#include "ops/common.h"

namespace sinkhorn::ops {

void check_sortcut(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& sort,
                   int64_t block, int64_t budget, const OptionalTensor& mask,
                   std::optional<double> scale, double dropout_p);

// out, stats [B, H, 1, 2 (half types 1), Lq], sorted_key and sorted_value [B, H, budget, b, D],
// weight [B, H, budget, b + 1 (or 2, see weight_row)], rng [2].
using SortcutResult = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// Allocates everything sortcut_fwd returns, on any device, sizes symbolic or not.
SortcutResult allocate_sortcut(const Tensor& query, const Tensor& key, const Tensor& value,
                               const Tensor& sort, int64_t block, int64_t budget,
                               const OptionalTensor& mask);

}  // namespace sinkhorn::ops
