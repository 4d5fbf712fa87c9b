#include "ops/composite/recompute.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/autograd.h>

namespace sinkhorn::composite {

std::vector<at::Tensor> recompute_gradients(const at::Tensor& grad,
                                            const std::vector<at::Tensor>& inputs,
                                            const Recomputed& function) {
  const auto keys = c10::impl::tls_local_dispatch_key_set();
  const c10::impl::ForceDispatchKeyGuard with_autograd(
      keys.included_, keys.excluded_ - c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  const at::AutoGradMode recording(true);

  std::vector<at::Tensor> arguments, leaves;
  for (const at::Tensor& input : inputs) {
    arguments.push_back(input.defined() ? input.detach().requires_grad_() : input);
    if (input.defined()) leaves.push_back(arguments.back());
  }
  const auto found = torch::autograd::grad({function(arguments)}, leaves, {grad.detach()},
                                           /*retain_graph=*/false, /*create_graph=*/false,
                                           /*allow_unused=*/true);
  std::vector<at::Tensor> result(inputs.size());
  auto next = found.begin();
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].defined()) continue;
    const at::Tensor& gradient = *next++;
    if (!gradient.defined()) {
      result[i] = at::zeros_like(inputs[i], at::MemoryFormat::Contiguous);
    } else {
      // Where backward merely hands `grad` on, an operator must still return a tensor of its own.
      result[i] = gradient.is_alias_of(grad) ? gradient.clone(at::MemoryFormat::Contiguous)
                                             : gradient.contiguous();
    }
  }
  return result;
}

}  // namespace sinkhorn::composite
