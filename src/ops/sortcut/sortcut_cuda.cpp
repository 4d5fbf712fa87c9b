#include <torch/library.h>

#include "ops/composite/composite.h"
#include "ops/composite/recompute.h"
#include "ops/composite/rng.h"
#include "ops/sortcut/sortcut.h"

namespace sinkhorn::ops {
namespace {

SortcutResult sortcut_fwd_cuda(const Tensor& query, const Tensor& key, const Tensor& value,
                               const Tensor& sort, int64_t block, int64_t budget,
                               const OptionalTensor& mask, std::optional<double> scale,
                               double dropout_p) {
  check_sortcut(query, key, value, sort, block, budget, mask, scale, dropout_p);
  SortcutResult result = allocate_sortcut(query, key, value, sort, block, budget);
  auto& [out, stats, sorted_key, sorted_value, weight, rng] = result;
  rng = composite::draw_rng(dropout_p, query);
  out = composite::sortcut(query, key, value, sort, block, budget, mask, scale, dropout_p, rng);
  // Backward starts from the inputs and reads nothing else that is saved.
  for (Tensor* unused : {&stats, &sorted_key, &sorted_value, &weight}) unused->zero_();
  return result;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> sortcut_bwd_cuda(
    const Tensor& grad, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& sort, const Tensor& /*out*/, const Tensor& /*stats*/,
    const Tensor& /*sorted_key*/, const Tensor& /*sorted_value*/, const Tensor& /*weight*/,
    const Tensor& rng, int64_t block, int64_t budget, const OptionalTensor& mask,
    std::optional<double> scale, double dropout_p) {
  const auto gradients = composite::recompute_gradients(
      grad, {query, key, value, sort}, [&](const std::vector<Tensor>& inputs) {
        return composite::sortcut(inputs[0], inputs[1], inputs[2], inputs[3], block, budget, mask,
                                  scale, dropout_p, rng);
      });
  return {gradients[0], gradients[1], gradients[2], gradients[3]};
}

}  // namespace

TORCH_LIBRARY_IMPL(sinkhorn, CUDA, m) {
  m.impl("sortcut_fwd", sortcut_fwd_cuda);
  m.impl("sortcut_bwd", sortcut_bwd_cuda);
}

}  // namespace sinkhorn::ops
