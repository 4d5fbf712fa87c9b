#include "nn/heads.h"

#include <ATen/ops/cat.h>
#include <torch/csrc/autograd/custom_function.h>

namespace sinkhorn::nn {
namespace {

// What parts [B, H, L, D] are views of, if they are what split_parts makes of one contiguous [B, L,
// parts * E]; else undefined. It is told from memory alone, so whoever made them is right.
at::Tensor common_memory(const std::vector<at::Tensor>& parts) {
  const at::Tensor& first = parts[0];
  const int64_t batch = first.size(0), heads = first.size(1), length = first.size(2);
  const int64_t width = first.size(3), part = heads * width;
  const int64_t token = static_cast<int64_t>(parts.size()) * part;
  const std::vector<int64_t> strides = {length * token, width, token, 1};
  int64_t offset = first.storage_offset();
  for (const at::Tensor& x : parts) {
    if (!x.is_alias_of(first) || x.scalar_type() != first.scalar_type() ||
        x.sizes() != first.sizes() || x.strides() != at::IntArrayRef(strides) ||
        x.storage_offset() != offset) {
      return {};
    }
    offset += part;
  }
  return first.as_strided({batch, length, token}, {length * token, token, 1},
                          first.storage_offset());
}

class SplitParts : public torch::autograd::Function<SplitParts> {
 public:
  static std::vector<at::Tensor> forward(torch::autograd::AutogradContext*, const at::Tensor& x,
                                         int64_t parts, int64_t heads) {
    std::vector<at::Tensor> split;
    for (const at::Tensor& part : x.chunk(parts, 2)) split.push_back(split_heads(part, heads));
    return split;
  }

  static std::vector<at::Tensor> backward(torch::autograd::AutogradContext*,
                                          const std::vector<at::Tensor>& grads) {
    at::Tensor whole = common_memory(grads);
    if (!whole.defined()) {
      std::vector<at::Tensor> joined;
      for (const at::Tensor& grad : grads) joined.push_back(join_heads(grad));
      whole = at::cat(joined, 2);
    }
    return {whole, {}, {}};
  }
};

}  // namespace

at::Tensor split_heads(const at::Tensor& x, int64_t heads) {
  return x.view({x.size(0), x.size(1), heads, x.size(2) / heads}).transpose(1, 2);
}

at::Tensor join_heads(const at::Tensor& x) {
  return x.transpose(1, 2).reshape({x.size(0), x.size(2), x.size(1) * x.size(3)});
}

std::vector<at::Tensor> split_parts(const at::Tensor& x, int64_t parts, int64_t heads) {
  return SplitParts::apply(x, parts, heads);
}

}  // namespace sinkhorn::nn
