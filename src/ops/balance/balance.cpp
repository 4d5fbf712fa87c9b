#include "ops/balance/balance.h"

#include <ATen/ops/empty.h>

#include "ops/autograd.h"

namespace sinkhorn::ops {

void check_balance(const Tensor& logits, int64_t iterations, double temperature,
                   std::string_view causal, std::string_view columns, int64_t window,
                   const OptionalTensor& noise, const OptionalTensor& block_mask) {
  const std::string_view op = "balance";
  const Causal rule = parse_causal(op, causal);
  const Columns kind = parse_columns(op, columns);
  TORCH_CHECK_VALUE(iterations >= 0, "balance: iterations must not be negative, got ", iterations);
  TORCH_CHECK_VALUE(temperature > 0.0, "balance: temperature must be greater than 0, got ",
                    temperature);
  check_window(op, window);
  TORCH_CHECK_VALUE(rule != Causal::kNone || (kind != Columns::kPrefix && kind != Columns::kPrior),
                    "balance: columns '", columns,
                    "' needs a causal rule (strict or inclusive), got causal '", causal, "'");
  TORCH_CHECK_VALUE(rule != Causal::kInclusive || window == 0,
                    "balance: causal 'inclusive' needs window 0, got ", window);
  check_float(op, "logits", logits);
  check_rank(op, "logits", logits, 4);
  check_not_empty(op, "logits", logits, "B, H, N, N");
  const auto blocks = logits.sym_size(3);
  check_sizes(op, "logits", logits, {logits.sym_size(0), logits.sym_size(1), blocks, blocks},
              "[B, H, N, N]");
  if (noise.has_value()) {
    TORCH_CHECK_VALUE(noise->is_floating_point(), "balance: noise must be of a float type, got ",
                      noise->scalar_type());
    check_device(op, logits, "noise", *noise);
    check_sizes(op, "noise", *noise, logits.sym_sizes(), "the shape of logits");
  }
  check_mask(op, "block_mask", logits, block_mask, {logits.sym_size(0), blocks}, "[B, N]");
}

namespace {

using FwdSignature = std::tuple<Tensor, Tensor>(const Tensor&, int64_t, double, std::string_view,
                                                std::string_view, int64_t, const OptionalTensor&,
                                                const OptionalTensor&);
using BwdSignature = Tensor(const Tensor&, const Tensor&, const Tensor&, int64_t, double,
                            std::string_view, std::string_view, int64_t, const OptionalTensor&,
                            const OptionalTensor&);

std::tuple<Tensor, Tensor> call_fwd(const Tensor& logits, int64_t iterations, double temperature,
                                    std::string_view causal, std::string_view columns,
                                    int64_t window, const OptionalTensor& noise,
                                    const OptionalTensor& block_mask) {
  static const auto op = find_op<FwdSignature>("balance_fwd");
  return op.call(logits, iterations, temperature, causal, columns, window, noise, block_mask);
}

Tensor balance(const Tensor& logits, int64_t iterations, double temperature,
               std::string_view causal, std::string_view columns, int64_t window,
               const OptionalTensor& noise, const OptionalTensor& block_mask) {
  return std::get<0>(
      call_fwd(logits, iterations, temperature, causal, columns, window, noise, block_mask));
}

class BalanceFunction : public torch::autograd::Function<BalanceFunction> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& logits, int64_t iterations,
                        double temperature, std::string causal, std::string columns, int64_t window,
                        const OptionalTensor& noise, const OptionalTensor& block_mask) {
    at::AutoDispatchBelowAutograd below;
    auto [result, terms] =
        call_fwd(logits, iterations, temperature, causal, columns, window, noise, block_mask);
    context->save_for_backward({logits, terms, or_undefined(noise), or_undefined(block_mask)});
    auto& data = context->saved_data;
    data["iterations"] = iterations;
    data["temperature"] = temperature;
    data["causal"] = causal;
    data["columns"] = columns;
    data["window"] = window;
    return result;
  }
  static variable_list backward(AutogradContext* context, variable_list grads) {
    static const auto op = find_op<BwdSignature>("balance_bwd");
    const auto saved = context->get_saved_variables();
    auto& data = context->saved_data;
    variable_list result(8);
    result[0] = op.call(grads[0], saved[0], saved[1], data["iterations"].toInt(),
                        data["temperature"].toDouble(), data["causal"].toStringRef(),
                        data["columns"].toStringRef(), data["window"].toInt(), or_none(saved[2]),
                        or_none(saved[3]));
    return result;
  }
};

Tensor balance_autograd(const Tensor& logits, int64_t iterations, double temperature,
                        std::string_view causal, std::string_view columns, int64_t window,
                        const OptionalTensor& noise, const OptionalTensor& block_mask) {
  return BalanceFunction::apply(logits, iterations, temperature, std::string(causal),
                                std::string(columns), window, noise, block_mask);
}

std::tuple<Tensor, Tensor> balance_fwd_meta(const Tensor& logits, int64_t iterations,
                                            double temperature, std::string_view causal,
                                            std::string_view columns, int64_t window,
                                            const OptionalTensor& noise,
                                            const OptionalTensor& block_mask) {
  check_balance(logits, iterations, temperature, causal, columns, window, noise, block_mask);
  const auto options = logits.options().dtype(compute_type(logits.scalar_type()));
  const int64_t terms = balance_terms(parse_columns("balance", columns), iterations);
  return {at::empty_symint(logits.sym_sizes(), options),
          at::empty_symint({logits.sym_size(0), logits.sym_size(1), terms, logits.sym_size(3)},
                           options)};
}

Tensor balance_bwd_meta(const Tensor&, const Tensor& logits, const Tensor&, int64_t, double,
                        std::string_view, std::string_view, int64_t, const OptionalTensor&,
                        const OptionalTensor&) {
  return at::empty_symint(logits.sym_sizes(), logits.options());
}

}  // namespace

TORCH_LIBRARY_IMPL(sinkhorn, Autograd, m) {
  m.impl("balance", balance_autograd);
  m.impl("balance_fwd", no_second_derivative());
  m.impl("balance_bwd", no_second_derivative());
}
TORCH_LIBRARY_IMPL(sinkhorn, CompositeExplicitAutograd, m) { m.impl("balance", balance); }
TORCH_LIBRARY_IMPL(sinkhorn, Meta, m) {
  m.impl("balance_fwd", balance_fwd_meta);
  m.impl("balance_bwd", balance_bwd_meta);
}

}  // namespace sinkhorn::ops
