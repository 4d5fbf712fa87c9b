#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <array>
#include <vector>

#include "kernels/cuda/balance.h"
#include "ops/balance/balance.h"
#include "ops/composite/composite.h"
#include "ops/composite/recompute.h"
#include "ops/stream.h"

namespace sinkhorn::ops {
namespace {

std::tuple<Tensor, Tensor> balance_fwd_cuda(const Tensor& logits, int64_t iterations,
                                            double temperature, std::string_view causal,
                                            std::string_view columns, int64_t window,
                                            const OptionalTensor& noise,
                                            const OptionalTensor& block_mask) {
  check_balance(logits, iterations, temperature, causal, columns, window, noise, block_mask);
  const c10::DeviceGuard guard(logits.device());
  BalanceCall call(logits, iterations, temperature, causal, columns, window, noise, block_mask);
  const auto options = logits.options().dtype(compute_type(logits.scalar_type()));
  const std::array<int64_t, 4> shape = {call.p.batch, call.p.heads,
                                        balance_terms(call.p.columns, iterations), call.p.blocks};
  if (!cuda::covers_balance(call.p)) {
    // Backward balances again and reads no terms.
    return {composite::balance(logits, iterations, temperature, causal, columns, window, noise,
                               block_mask),
            at::zeros(shape, options)};
  }
  const Tensor result = at::empty(logits.sizes(), options), terms = at::empty(shape, options);
  const Tensor scratch = scratch_of(logits, cuda::balance_fwd_scratch(call.p));
  call.p.result = result.data_ptr();
  call.p.terms = terms.data_ptr();
  cuda::launch_balance_fwd(call.p, scratch.data_ptr(), current_stream(logits));
  return {result, terms};
}

Tensor balance_bwd_cuda(const Tensor& grad, const Tensor& logits, const Tensor& terms,
                        int64_t iterations, double temperature, std::string_view causal,
                        std::string_view columns, int64_t window, const OptionalTensor& noise,
                        const OptionalTensor& block_mask) {
  const c10::DeviceGuard guard(logits.device());
  BalanceCall call(logits, iterations, temperature, causal, columns, window, noise, block_mask);
  if (!cuda::covers_balance(call.p)) {
    return composite::recompute_gradients(grad, {logits}, [&](const std::vector<Tensor>& inputs) {
      return composite::balance(inputs[0], iterations, temperature, causal, columns, window, noise,
                                block_mask);
    })[0];
  }
  const Tensor result = at::empty(logits.sizes(), logits.options());
  const Tensor kept = terms.contiguous(), wide = grad.to(at::kFloat);
  const Tensor scratch = scratch_of(logits, cuda::balance_bwd_scratch(call.p));
  call.p.result = result.data_ptr();
  call.p.terms = kept.data_ptr();
  call.p.grad = view_of(wide);
  cuda::launch_balance_bwd(call.p, scratch.data_ptr(), current_stream(logits));
  return result;
}

}  // namespace

TORCH_LIBRARY_IMPL(sinkhorn, CUDA, m) {
  m.impl("balance_fwd", balance_fwd_cuda);
  m.impl("balance_bwd", balance_bwd_cuda);
}

}  // namespace sinkhorn::ops
