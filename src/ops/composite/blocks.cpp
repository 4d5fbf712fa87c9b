#include "ops/composite/blocks.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "ops/common.h"

namespace sinkhorn::composite {

Tensor cut(const Tensor& x, int64_t dim, int64_t block) {
  const int64_t length = x.size(dim), blocks = (length - 1) / block + 1;
  std::vector<int64_t> shape = x.sizes().vec();
  shape[dim] = block;
  shape.insert(shape.begin() + dim, blocks);
  const int64_t missing = blocks * block - length;
  if (missing == 0) return x.reshape(shape);
  std::vector<int64_t> pads(2 * (x.dim() - dim), 0);  // from the last dimension to `dim`
  pads.back() = missing;
  return at::constant_pad_nd(x, pads, 0).reshape(shape);
}

Tensor real_tokens(const OptionalTensor& mask, const Tensor& like, int64_t length, int64_t block) {
  return cut(mask ? *mask : at::ones({1, length}, like.options().dtype(at::kBool)), 1, block);
}

Tensor allowed_pairs(const Tensor& live, Causal causal, int64_t window) {
  const int64_t blocks = live.size(1);
  const Tensor pairs = live.unsqueeze(2) & live.unsqueeze(1);
  if (causal == Causal::kNone) return pairs;
  const int64_t gap = causal == Causal::kStrict ? std::min(window, blocks) + 1 : 0;
  return pairs & at::ones({blocks, blocks}, live.options()).tril(-gap);
}

Tensor shift_down(const Tensor& x, int64_t dim) {
  std::vector<int64_t> first = x.sizes().vec();
  first[dim] = 1;
  return at::cat({at::zeros(first, x.options()), x.narrow(dim, 0, x.size(dim) - 1)}, dim);
}

Tokens clean_tokens(const Tensor& x, const Tensor& real, int64_t block) {
  const Tensor blocks = cut(x, 2, block);                // [B, H, N, b, D]
  const Tensor exists = real.unsqueeze(1).unsqueeze(4);  // [B|1, 1, N, b, 1]
  const Tensor finite =
      blocks.detach().abs() < std::numeric_limits<double>::infinity();  // false for NaN
  const Tensor bad = finite.logical_not() & exists;
  return {keep(finite & exists, blocks).to(ops::compute_type(x.scalar_type())), bad.any(4),
          bad.any(at::IntArrayRef{2, 3}, /*keepdim=*/true)};
}

}  // namespace sinkhorn::composite
