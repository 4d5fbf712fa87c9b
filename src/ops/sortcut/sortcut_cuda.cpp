#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "ops/attention/cuda_call.h"
#include "ops/composite/composite.h"
#include "ops/composite/recompute.h"
#include "ops/composite/rng.h"
#include "ops/sortcut/sortcut.h"

namespace sinkhorn::ops {
namespace {

CudaAttention kernels_of(const Tensor& query, const Tensor& key, const Tensor& value,
                         const Tensor& sort, int64_t block, int64_t budget,
                         const OptionalTensor& mask, std::optional<double> scale,
                         double dropout_p) {
  CudaAttention kernels(query, key, value, sort, block, budget, mask, scale, dropout_p);
  kernels.call.sortcut = true;
  return kernels;
}

SortcutResult sortcut_fwd_cuda(const Tensor& query, const Tensor& key, const Tensor& value,
                               const Tensor& sort, int64_t block, int64_t budget,
                               const OptionalTensor& mask, std::optional<double> scale,
                               double dropout_p) {
  check_sortcut(query, key, value, sort, block, budget, mask, scale, dropout_p);
  SortcutResult result = allocate_sortcut(query, key, value, sort, block, budget, mask);
  auto& [out, stats, sorted_key, sorted_value, weight, rng] = result;
  if (dropout_p > 0.0) rng = composite::draw_rng(dropout_p, query);
  CudaAttention kernels =
      kernels_of(query, key, value, sort, block, budget, mask, scale, dropout_p);
  if (kernels.covered()) {
    const Tensor none = at::empty({0}, stats.options());
    kernels.forward(out, stats, sorted_key, sorted_value, weight, none, rng);
    return result;
  }
  out.copy_(
      composite::sortcut(query, key, value, sort, block, budget, mask, scale, dropout_p, rng));
  // Backward starts from the inputs and reads nothing else that is saved.
  for (Tensor* unused : {&stats, &sorted_key, &sorted_value, &weight}) unused->zero_();
  return result;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> sortcut_bwd_cuda(
    const Tensor& grad, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& sort, const Tensor& out, const Tensor& stats, const Tensor& sorted_key,
    const Tensor& sorted_value, const Tensor& weight, const Tensor& rng, int64_t block,
    int64_t budget, const OptionalTensor& mask, std::optional<double> scale, double dropout_p) {
  CudaAttention kernels =
      kernels_of(query, key, value, sort, block, budget, mask, scale, dropout_p);
  if (kernels.covered()) {
    const Tensor none = at::empty({0}, stats.options());
    return kernels.backward(grad, out, stats, sorted_key, sorted_value, weight, none, rng);
  }
  const auto gradients = composite::recompute_gradients(
      grad, {query, key, value, sort}, [&](const std::vector<Tensor>& inputs) {
        return composite::sortcut(inputs[0], inputs[1], inputs[2], inputs[3], block, budget, mask,
                                  scale, dropout_p, rng);
      });
  return {laid_out_like(query, gradients[0]), laid_out_like(key, gradients[1]),
          laid_out_like(value, gradients[2]), gradients[3]};
}

}  // namespace

TORCH_LIBRARY_IMPL(sinkhorn, CUDA, m) {
  m.impl("sortcut_fwd", sortcut_fwd_cuda);
  m.impl("sortcut_bwd", sortcut_bwd_cuda);
}

}  // namespace sinkhorn::ops
