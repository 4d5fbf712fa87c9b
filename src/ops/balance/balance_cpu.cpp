#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "kernels/cpu/dispatch.h"
#include "ops/balance/balance.h"

namespace sinkhorn::ops {
namespace {

// Everything but the result, which forward and backward each make.
struct BalanceCall {
  BalanceCall(const Tensor& logits, int64_t iterations, double temperature, std::string_view causal,
              std::string_view columns, int64_t window, const OptionalTensor& given_noise,
              const OptionalTensor& block_mask)
      : mask(block_mask) {
    p.batch = logits.size(0);
    p.heads = logits.size(1);
    p.blocks = logits.size(3);
    p.iterations = iterations;
    p.window = window;
    p.temperature = temperature;
    p.causal = parse_causal("balance", causal);
    p.columns = parse_columns("balance", columns);
    p.compute64 = logits.scalar_type() == at::kDouble;
    p.live = mask.data();
    p.logits = view_of(logits);
    if (given_noise.has_value()) {
      noise = given_noise->to(compute_type(logits.scalar_type()));
      p.noise = view_of(noise);
    }
  }

  MaskBytes mask;
  Tensor noise;
  BalanceParams p{};
};

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
