#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "ops/composite/composite.h"
#include "ops/composite/recompute.h"
#include "ops/pool/pool.h"

namespace sinkhorn::ops {
namespace {

Tensor pool_fwd_cuda(const Tensor& x, int64_t block, std::string_view mode, bool causal,
                     const OptionalTensor& mask) {
  check_pool(x, block, mode, causal, mask);
  return composite::pool(x, block, mode, causal, mask);
}

Tensor pool_bwd_cuda(const Tensor& grad, const OptionalTensor& mask, int64_t length, int64_t block,
                     std::string_view mode, bool causal) {
  // pool is linear: its gradient is the same at any x.
  const Tensor x = at::zeros({grad.size(0), length, grad.size(2)}, grad.options());
  return composite::recompute_gradients(grad, {x}, [&](const std::vector<Tensor>& inputs) {
    return composite::pool(inputs[0], block, mode, causal, mask);
  })[0];
}

}  // namespace

TORCH_LIBRARY_IMPL(sinkhorn, CUDA, m) {
  m.impl("pool_fwd", pool_fwd_cuda);
  m.impl("pool_bwd", pool_bwd_cuda);
}

}  // namespace sinkhorn::ops
