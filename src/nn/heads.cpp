#include "nn/heads.h"

#include <ATen/ops/cat.h>
#include <torch/csrc/autograd/custom_function.h>

#include "ops/attention/packed.h"

namespace sinkhorn::nn {
namespace {

// What packed parts [B, H, L, D] are views of: [B, L, parts * E].
at::Tensor whole_of(const std::vector<at::Tensor>& parts) {
  const at::Tensor& first = parts[0];
  const int64_t length = first.size(2), token = first.stride(2);
  return first.as_strided({first.size(0), length, token}, {length * token, token, 1},
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
    if (ops::are_packed(grads)) return {whole_of(grads), {}, {}};
    std::vector<at::Tensor> joined;
    for (const at::Tensor& grad : grads) joined.push_back(join_heads(grad));
    return {at::cat(joined, 2), {}, {}};
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
