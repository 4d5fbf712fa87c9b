// Backward by recomputation: runs a differentiable function again and takes its gradients.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace sinkhorn::composite {

using Recomputed = std::function<at::Tensor(const std::vector<at::Tensor>&)>;

// The gradients of sum(function(inputs) * grad) by each of `inputs`, contiguous, in the type and
// shape of the input. An undefined input is handed on as such and gets an undefined gradient.
//
// For use inside an operator's kernel, where the dispatcher leaves autograd out: it is put back for
// the length of the call.
std::vector<at::Tensor> recompute_gradients(const at::Tensor& grad,
                                            const std::vector<at::Tensor>& inputs,
                                            const Recomputed& function);

}  // namespace sinkhorn::composite
