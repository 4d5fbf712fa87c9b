#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "ops/balance/balance.h"
#include "ops/composite/composite.h"
#include "ops/composite/recompute.h"

namespace sinkhorn::ops {
namespace {

std::tuple<Tensor, Tensor> balance_fwd_cuda(const Tensor& logits, int64_t iterations,
                                            double temperature, std::string_view causal,
                                            std::string_view columns, int64_t window,
                                            const OptionalTensor& noise,
                                            const OptionalTensor& block_mask) {
  check_balance(logits, iterations, temperature, causal, columns, window, noise, block_mask);
  const Tensor result = composite::balance(logits, iterations, temperature, causal, columns, window,
                                           noise, block_mask);
  // Backward balances again and reads no terms.
  const int64_t terms = balance_terms(parse_columns("balance", columns), iterations);
  return {result,
          at::zeros({logits.size(0), logits.size(1), terms, logits.size(3)}, result.options())};
}

Tensor balance_bwd_cuda(const Tensor& grad, const Tensor& logits, const Tensor& /*terms*/,
                        int64_t iterations, double temperature, std::string_view causal,
                        std::string_view columns, int64_t window, const OptionalTensor& noise,
                        const OptionalTensor& block_mask) {
  return composite::recompute_gradients(grad, {logits}, [&](const std::vector<Tensor>& inputs) {
    return composite::balance(inputs[0], iterations, temperature, causal, columns, window, noise,
                              block_mask);
  })[0];
}

}  // namespace

TORCH_LIBRARY_IMPL(sinkhorn, CUDA, m) {
  m.impl("balance_fwd", balance_fwd_cuda);
  m.impl("balance_bwd", balance_bwd_cuda);
}

}  // namespace sinkhorn::ops
