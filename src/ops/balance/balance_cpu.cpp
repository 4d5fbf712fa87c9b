#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "kernels/cpu/dispatch.h"
#include "ops/balance/balance.h"

namespace sinkhorn::ops {
namespace {

std::tuple<Tensor, Tensor> balance_fwd_cpu(const Tensor& logits, int64_t iterations,
                                           double temperature, std::string_view causal,
                                           std::string_view columns, int64_t window,
                                           const OptionalTensor& noise,
                                           const OptionalTensor& block_mask) {
  check_balance(logits, iterations, temperature, causal, columns, window, noise, block_mask);
  BalanceCall call(logits, iterations, temperature, causal, columns, window, noise, block_mask);
  const auto options = logits.options().dtype(compute_type(logits.scalar_type()));
  const Tensor result = at::empty(logits.sizes(), options);
  // Terms of dead blocks are never written or read by the kernels; zeros make runs comparable.
  const Tensor terms = at::zeros(
      {call.p.batch, call.p.heads, balance_terms(call.p.columns, iterations), call.p.blocks},
      options);
  call.p.result = result.data_ptr();
  call.p.terms = terms.data_ptr();
  cpu::kernels().balance_fwd(call.p, executor());
  return {result, terms};
}

Tensor balance_bwd_cpu(const Tensor& grad, const Tensor& logits, const Tensor& terms,
                       int64_t iterations, double temperature, std::string_view causal,
                       std::string_view columns, int64_t window, const OptionalTensor& noise,
                       const OptionalTensor& block_mask) {
  BalanceCall call(logits, iterations, temperature, causal, columns, window, noise, block_mask);
  const Tensor result =
      at::empty(logits.sizes(), logits.options().dtype(compute_type(logits.scalar_type())));
  const Tensor kept = terms.contiguous();
  call.p.result = result.data_ptr();
  call.p.terms = kept.data_ptr();
  call.p.grad = view_of(grad);
  cpu::kernels().balance_bwd(call.p, executor());
  return result.to(logits.scalar_type());
}

}  // namespace

TORCH_LIBRARY_IMPL(sinkhorn, CPU, m) {
  m.impl("balance_fwd", balance_fwd_cpu);
  m.impl("balance_bwd", balance_bwd_cpu);
}

}  // namespace sinkhorn::ops
