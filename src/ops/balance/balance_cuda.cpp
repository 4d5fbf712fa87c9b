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

// Everything but the result and the terms, which forward and backward each make.
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

  bool covered() const { return cuda::covers_balance(p); }

  MaskBytes mask;
  Tensor noise;
  BalanceParams p{};
};

Tensor scratch_of(const Tensor& like, int64_t bytes) {
  return at::empty({bytes}, like.options().dtype(at::kByte));
}

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
  if (!call.covered()) {
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
  if (!call.covered()) {
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
