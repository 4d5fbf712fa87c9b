// balance: logits [B, H, N, N] to the relaxed permutation R of the same shape.
#pragma once

#include "ops/common.h"

namespace sinkhorn::ops {

void check_balance(const Tensor& logits, int64_t iterations, double temperature,
                   std::string_view causal, std::string_view columns, int64_t window,
                   const OptionalTensor& noise, const OptionalTensor& block_mask);

// A kernel's parameters but for the result and the terms, which forward and backward each make.
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

}  // namespace sinkhorn::ops
