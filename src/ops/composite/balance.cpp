// balance: logits [B, H, N, N] -> R [B, H, N, N], row = destination, column = source.
//
//   X = (logits + noise) / temperature, then X <- X - logsumexp of its row, and `iterations` times
//   X <- X - C, X <- X - logsumexp of its row;  R = exp X
//
// X stays in the log domain throughout. Where not allowed it holds kNothing, a number so low that
// beside any other it adds exactly 0 and yet is finite: sums of nothing but it, their exponentials
// and all derivatives are finite too, and the selection after each step drops them.
#include <torch/csrc/autograd/custom_function.h>

#include "ops/common.h"
#include "ops/composite/blocks.h"
#include "ops/composite/composite.h"

namespace sinkhorn::composite {
namespace {

constexpr double kNothing = -1e38;

// C[i] = log of the sum over i' <= i of exp X[i'], along the rows of X [B, H, N, N].
//
// Backward: dX[i'] = sum over i >= i' of dC[i] exp(X[i'] - C[i]) = A[i'] exp(X[i'] - C[i']), where
// A[i'] = sum over i >= i' of dC[i] exp(C[i'] - C[i]) is a running sum from below. C never falls,
// so no exponent is positive.
class RunningLogSumExp : public torch::autograd::Function<RunningLogSumExp> {
 public:
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x) {
    const Tensor sums = running(
        x, 2, [](const Tensor& row, const Tensor& above) { return at::logaddexp(row, above); });
    context->save_for_backward({x, sums});
    return sums;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    const auto saved = context->get_saved_variables();
    const Tensor &x = saved[0], &sums = saved[1];
    const int64_t rows = x.size(2);
    Tensor total = grads[0];  // A over rows i .. i + step - 1
    for (int64_t step = 1; step < rows; step *= 2) {
      const int64_t rest = rows - step;
      const Tensor decay = (sums.narrow(2, 0, rest) - sums.narrow(2, step, rest)).exp();
      total = at::cat({total.narrow(2, 0, rest) + decay * total.narrow(2, step, rest),
                       total.narrow(2, rest, step)},
                      2);
    }
    return {total * (x - sums).exp()};
  }
};

// X - C of one iteration. x [B, H, N, N]
Tensor normalise_columns(const Tensor& x, Columns columns) {
  if (columns == Columns::kFull) return at::log_softmax(x, 2);
  if (columns == Columns::kPrefix) return x - RunningLogSumExp::apply(x);
  return x - running_sum(shift_down(x.exp(), 2), 2).log1p();
}

}  // namespace

at::Tensor balance(const at::Tensor& logits, int64_t iterations, double temperature,
                   std::string_view causal, std::string_view columns, int64_t window,
                   const std::optional<at::Tensor>& noise,
                   const std::optional<at::Tensor>& block_mask) {
  const Columns kind = ops::parse_columns("balance", columns);
  const Tensor live = real_tokens(block_mask, logits, logits.size(2), 1).squeeze(2);  // [B|1, N]
  const Tensor allowed =
      allowed_pairs(live, ops::parse_causal("balance", causal), window).unsqueeze(1);
  Tensor x = logits.to(ops::compute_type(logits.scalar_type()));
  if (noise) x = x + noise->detach().to(x.scalar_type());
  x = keep(allowed, x / temperature, kNothing);
  const auto select = [&](const Tensor& next) { x = keep(allowed, next, kNothing); };
  if (iterations > 0) select(at::log_softmax(x, 3));
  // Without column terms a second normalisation would find rows that sum to 1.
  const int64_t rounds = kind == Columns::kNone ? 0 : iterations;
  for (int64_t round = 0; round < rounds; ++round) {
    select(normalise_columns(x, kind));
    select(at::log_softmax(x, 3));
  }
  return x.exp().contiguous();
}

}  // namespace sinkhorn::composite
