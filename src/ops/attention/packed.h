// Query, key and value that are thirds of one tensor, as a projection gives them, and gradients
// that lie side by side in the same way: the projection's gradient is then there without a copy.
#pragma once

#include <array>

#include "ops/common.h"

namespace sinkhorn::ops {

// Whether parts, [B, H, L, D] each, lie side by side in one contiguous [B, L, parts * H * D]. It is
// told from memory alone, so whoever made them is right. Never of tensors that stand for others: a
// compiler is told the layout that each has by itself.
bool are_packed(at::ArrayRef<Tensor> parts);

// Memory for the gradients of query, key and value: laid out like each of them, or as the thirds of
// one [B, L, 3 * H * D].
std::array<Tensor, 3> allocate_gradients(const Tensor& query, const Tensor& key,
                                         const Tensor& value, bool packed);

}  // namespace sinkhorn::ops
