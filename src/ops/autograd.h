// Helpers for the operators' Autograd kernels.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "ops/common.h"

namespace sinkhorn::ops {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using SavedData = decltype(AutogradContext::saved_data);

// The operator sinkhorn::<name>, called through the dispatcher so that tracers see it.
template <class Signature>
c10::TypedOperatorHandle<Signature> find_op(const char* name) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow((std::string("sinkhorn::") + name).c_str(), "")
      .template typed<Signature>();
}

// The Autograd kernel of <op>_fwd and <op>_bwd: they compute as they are, and a derivative of what
// they return throws. <op> itself is differentiable; its second derivative is what ends here.
inline torch::CppFunction no_second_derivative() {
  return torch::autograd::autogradNotImplementedFallback();
}

// An optional tensor for save_for_backward, which takes undefined ones, and back.
inline Tensor or_undefined(const OptionalTensor& x) { return x.has_value() ? *x : Tensor(); }
inline OptionalTensor or_none(const Tensor& x) {
  return x.defined() ? OptionalTensor(x) : std::nullopt;
}

}  // namespace sinkhorn::ops
