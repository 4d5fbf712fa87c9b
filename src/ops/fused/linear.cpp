// linear: a product in the type of its input with weights kept in another, and the ReLU and dropout
// that may follow it.
//
// Weights are float32 and products run in bf16. Left to autograd, every weight is cast forward and
// its gradient rounded to bf16, cast back and then added; here forward takes a copy that was made
// beforehand, and the gradient leaves its product in float32.
#include <ATen/ops/_addmm_activation.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/where.h>
#include <torch/csrc/autograd/functions/utils.h>

#include "kernels/cuda/feed_forward.h"
#include "ops/autograd.h"
#include "ops/fused/fused.h"
#include "ops/fused/kernel_call.h"
#include "ops/fused/products.h"

namespace sinkhorn::ops {
namespace {

using LinearGradients = std::tuple<Tensor, Tensor, Tensor>;  // x, weight, bias

void check_linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                  double dropout_p) {
  const std::string_view op = "linear";
  check_float(op, "x", x);
  check_rank(op, "weight", weight, 2);
  check_device(op, x, "weight", weight);
  check_dropout(op, dropout_p);
  TORCH_CHECK_VALUE(x.dim() >= 1, "linear: x must have at least one dimension, got none");
  SINKHORN_CHECK_SIZE(x.sym_size(-1).sym_eq(weight.sym_size(1)), "linear: x has width ",
                      x.sym_size(-1), ", weight [out, in] is ", weight.sym_sizes());
  if (bias.has_value()) check_sizes(op, "bias", *bias, {weight.sym_size(0)}, "[out]");
}

Tensor rows_of(const Tensor& x) { return x.reshape_symint({-1, x.sym_size(-1)}); }

// Whether the kernels between the products of a feed-forward part serve out [rows, F].
bool kernel_covers(const Tensor& x, const c10::SymInt& width) {
  if (!x.is_cuda() || !is_kernel_type(x.scalar_type())) return false;
  const auto count = x.sym_numel().maybe_as_int(), in = x.sym_size(-1).maybe_as_int();
  const auto out = width.maybe_as_int();
  return count.has_value() && in.has_value() && out.has_value() && *count > 0 &&
         cuda::covers_feed_forward(*count / *in, *out);
}

cuda::FeedForwardParams params_of(const Tensor& inner, double dropout_p) {
  cuda::FeedForwardParams p;
  p.rows = inner.size(0);
  p.width = inner.size(1);
  p.type = kernel_type(inner.scalar_type());
  p.dropout = static_cast<float>(dropout_p);
  p.inner = inner.data_ptr();
  return p;
}

Tensor relu_product(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                    double dropout_p) {
  if (!kernel_covers(x, weight.sym_size(0))) {
    return at::dropout(at::relu(at::linear(x, weight, bias)), dropout_p, true);
  }
  const c10::DeviceGuard guard(x.device());
  const Tensor rows = rows_of(x);
  // Bias and ReLU in the product's own epilogue.
  Tensor inner = bias.has_value() ? at::_addmm_activation(*bias, rows, weight.t())
                                  : at::relu(at::mm(rows, weight.t()));
  if (dropout_p > 0.0) {
    const Tensor rng = draw_or_nothing(dropout_p, x);
    cuda::FeedForwardParams p = params_of(inner, dropout_p);
    p.rng = rng_data(rng);
    cuda::launch_feed_forward_dropout(p, current_stream(x));
  }
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = weight.size(0);
  return inner.view(sizes);
}

// How many rows of zeros a weight [out, in] is given for the time of a product (products.h).
int64_t missing_rows(const Tensor& x, const Tensor& weight) {
  constexpr int64_t kPack = 8, kManyRows = 1024, kManyColumns = 64;
  if (!x.is_cuda() || x.element_size() != 2) return 0;
  const auto count = x.sym_numel().maybe_as_int(), out = weight.sym_size(0).maybe_as_int();
  const auto in = weight.sym_size(1).maybe_as_int();
  if (!count.has_value() || !out.has_value() || !in.has_value()) return 0;
  if (*out < kManyColumns || *count < kManyRows * *in) return 0;
  return (kPack - *out % kPack) % kPack;
}

Tensor with_columns(const Tensor& rows, int64_t missing) {
  return missing > 0 ? at::constant_pad_nd(rows, {0, missing}) : rows;
}

// weight and bias in the type of x.
Tensor linear_fwd(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, bool relu,
                  double dropout_p) {
  check_linear(x, weight, bias, dropout_p);
  if (relu) return relu_product(x, weight, bias, dropout_p);
  const int64_t missing = bias.has_value() ? 0 : missing_rows(x, weight);
  const Tensor out = at::linear(x, with_rows(weight, missing), bias);
  return missing > 0 ? out.narrow(-1, 0, weight.size(0)) : out;
}

// The gradient of x weight' + bias from that of dropout(relu(.)), whose zeros tell what was cut or
// dropped: [rows, F]; and sums of its rows, strip by strip, where a kernel has made them in
// passing.
std::tuple<Tensor, Tensor> relu_gradient(const Tensor& grad, const Tensor& out, double dropout_p) {
  if (!kernel_covers(grad, grad.sym_size(1))) {
    const double kept = 1.0 / (1.0 - dropout_p);
    return {at::where(out <= 0, 0, kept == 1.0 ? grad : grad * kept), Tensor()};
  }
  const c10::DeviceGuard guard(grad.device());
  const Tensor inner = aligned(out), plain_grad = aligned(grad);
  cuda::FeedForwardParams p = params_of(inner, dropout_p);
  const Tensor result = at::empty(inner.sizes(), inner.options());
  const Tensor partial =
      at::empty({cuda::feed_forward_partials(p), p.width}, grad.options().dtype(at::kFloat));
  p.grad_inner = plain_grad.const_data_ptr();
  p.grad = result.data_ptr();
  p.partial = partial.data_ptr<float>();
  cuda::launch_feed_forward_bwd(p, current_stream(grad));
  return {result, partial};
}

// The sums of grad [rows, F] over rows, the gradient of a bias: to out [F]. made: the sums by
// strips, where relu_gradient has made them.
void write_bias_gradient(const Tensor& grad, const Tensor& made, Tensor& out) {
  if (!kernel_covers(grad, grad.sym_size(1))) {
    at::sum_out(out, grad, 0, false, out.scalar_type());
    return;
  }
  const c10::DeviceGuard guard(grad.device());
  const Tensor plain_grad = aligned(grad);
  cuda::FeedForwardParams p;
  p.rows = grad.size(0);
  p.width = grad.size(1);
  p.type = kernel_type(grad.scalar_type());
  const auto floats = grad.options().dtype(at::kFloat);
  const Tensor partial =
      made.defined() ? made : at::empty({cuda::feed_forward_partials(p), p.width}, floats);
  const Tensor bias = out.scalar_type() == at::kFloat ? out : at::empty({p.width}, floats);
  p.grad_inner = plain_grad.const_data_ptr();
  p.partial = partial.data_ptr<float>();
  p.grad_bias = bias.data_ptr<float>();
  if (!made.defined()) cuda::launch_bias_partials(p, current_stream(grad));
  cuda::launch_bias_sum(p, current_stream(grad));
  if (!bias.is_same(out)) out.copy_(bias);
}

struct BackwardOptions {
  bool bias, relu;
  double dropout_p;
  at::ScalarType type;  // of the gradients of weight and bias
};

// The gradients of weight and bias: their memory, and what they are made from.
struct ParameterGradients {
  Tensor rows, x;      // [rows, out] of x weight' + bias, with columns of zeros; [rows, in]
  Tensor wide_weight;  // [out, in], with as many rows of zeros
  int64_t missing;     // how many
  Tensor strip_sums;   // of rows; undefined: not made
  bool has_bias;
  Tensor bias;  // [out]; [0]: none

  void write() {
    if (has_bias) write_bias_gradient(rows, strip_sums, bias);
    write_product(rows, x, wide_weight);
  }
  Tensor weight() const {
    if (missing == 0) return wide_weight;
    return wide_weight.narrow(0, 0, wide_weight.size(0) - missing);
  }
};

// The gradient of x, and all that those of the parameters need to be written.
std::tuple<Tensor, ParameterGradients> begin_bwd(const Tensor& grad, const Tensor& x,
                                                 const Tensor& weight, const Tensor& out,
                                                 const BackwardOptions& o) {
  enter_device(grad);
  const auto type = grad.options().dtype(o.type);
  Tensor rows = rows_of(grad), strip_sums;
  if (o.relu) std::tie(rows, strip_sums) = relu_gradient(rows, rows_of(out), o.dropout_p);
  const Tensor bias = o.bias ? at::empty_symint({rows.sym_size(1)}, type) : nothing(type);
  const int64_t missing = o.bias || o.relu ? 0 : missing_rows(x, weight);
  rows = with_columns(rows, missing);
  const Tensor grad_x = at::mm(rows, with_rows(weight, missing)).view_symint(x.sym_sizes());
  const Tensor wide_weight = at::empty_symint({rows.sym_size(1), x.sym_size(-1)}, type);
  return {grad_x, {rows, rows_of(x), wide_weight, missing, strip_sums, o.bias, bias}};
}

LinearGradients linear_bwd(const Tensor& grad, const Tensor& x, const Tensor& weight,
                           const Tensor& out, bool bias, bool relu, double dropout_p,
                           at::ScalarType type) {
  auto [grad_x, own] = begin_bwd(grad, x, weight, out, {bias, relu, dropout_p, type});
  own.write();
  return {grad_x, own.weight(), own.bias};
}

Tensor call_fwd(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, bool relu,
                double dropout_p) {
  static const auto op = find_op<decltype(linear_fwd)>("linear_fwd");
  return op.call(x, weight, bias, relu, dropout_p);
}

OptionalTensor bias_in_type_of(const Tensor& x, const OptionalTensor& bias,
                               const OptionalTensor& copy) {
  return bias.has_value() ? OptionalTensor(in_type_of(x, *bias, copy)) : std::nullopt;
}

class LinearFunction : public torch::autograd::Function<LinearFunction> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& x, const Tensor& weight,
                        const OptionalTensor& bias, const OptionalTensor& weight_copy,
                        const OptionalTensor& bias_copy, bool relu, double dropout_p) {
    at::AutoDispatchBelowAutograd below;
    const Tensor own_weight = in_type_of(x, weight, weight_copy);
    const Tensor out =
        call_fwd(x, own_weight, bias_in_type_of(x, bias, bias_copy), relu, dropout_p);
    context->save_for_backward({x, own_weight, relu ? out : Tensor()});
    context->saved_data["bias"] = bias.has_value();
    context->saved_data["relu"] = relu;
    context->saved_data["dropout_p"] = dropout_p;
    context->saved_data["type"] = static_cast<int64_t>(weight.scalar_type());
    if (const SideWorkPtr side = side_work_for(x, weight, bias)) {
      context->saved_data["side"] = c10::IValue::make_capsule(side);
      context->saved_data["parameters"] = c10::List<OptionalTensor>({weight, bias});
    }
    return out;
  }
  static variable_list backward(AutogradContext* context, variable_list grads) {
    static const auto op = find_op<decltype(linear_bwd)>("linear_bwd");
    const auto saved = context->get_saved_variables();
    auto& data = context->saved_data;
    const BackwardOptions o{data["bias"].toBool(), data["relu"].toBool(),
                            data["dropout_p"].toDouble(),
                            static_cast<at::ScalarType>(data["type"].toInt())};
    const Tensor& out = o.relu ? saved[2] : grads[0];
    variable_list result(7);
    if (data.count("side") > 0) {
      at::AutoDispatchBelowAutograd below;
      ParameterGradients own;
      std::tie(result[0], own) = begin_bwd(grads[0], saved[0], saved[1], out, o);
      leave_aside(data, own);
      return result;
    }
    std::tie(result[0], result[1], result[2]) =
        op.call(grads[0], saved[0], saved[1], out, o.bias, o.relu, o.dropout_p, o.type);
    if (!o.bias) result[2] = Tensor();
    return result;
  }

 private:
  static void leave_aside(SavedData& data, ParameterGradients& own) {
    const auto held = data["side"].toCapsule();
    auto& side = static_cast<SideWork&>(*held);
    std::vector<Tensor> kept{own.rows, own.x, own.wide_weight, own.bias};
    if (own.strip_sums.defined()) kept.push_back(own.strip_sums);
    side.run(std::move(kept), [&] { own.write(); });
    const auto parameters = data["parameters"].toOptionalTensorList();
    const OptionalTensor weight = parameters[0], bias = parameters[1];
    side.leave(*weight, own.weight());
    if (bias.has_value()) side.leave(*bias, own.bias);
  }
};

Tensor linear_op(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                 const OptionalTensor& weight_copy, const OptionalTensor& bias_copy, bool relu,
                 double dropout_p) {
  check_linear(x, weight, bias, dropout_p);
  const bool mixed = x.scalar_type() != weight.scalar_type() ||
                     (bias.has_value() && x.scalar_type() != bias->scalar_type());
  if (!mixed && !(relu && kernel_covers(x, weight.sym_size(0)))) {
    const Tensor y = at::linear(x, weight, bias);
    return relu ? at::dropout(at::relu(y), dropout_p, true) : y;
  }
  if (!torch::autograd::compute_requires_grad(x, weight, or_undefined(bias))) {
    return call_fwd(x, in_type_of(x, weight, weight_copy), bias_in_type_of(x, bias, bias_copy),
                    relu, dropout_p);
  }
  return LinearFunction::apply(x, weight, bias, weight_copy, bias_copy, relu, dropout_p);
}

}  // namespace

Tensor linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
              const LinearOptions& o) {
  static const auto op = find_op<decltype(linear_op)>("linear");
  return op.call(x, weight, bias, o.weight_copy, o.bias_copy, o.relu, o.dropout_p);
}

TORCH_LIBRARY_IMPL(sinkhorn, CompositeImplicitAutograd, m) { m.impl("linear", linear_op); }
TORCH_LIBRARY_IMPL(sinkhorn, Autograd, m) {
  m.impl("linear_fwd", no_second_derivative());
  m.impl("linear_bwd", no_second_derivative());
}
// Made of ATen's operations but for the kernels in between: for every device, and for Meta.
TORCH_LIBRARY_IMPL(sinkhorn, CompositeExplicitAutograd, m) {
  m.impl("linear_fwd", linear_fwd);
  m.impl("linear_bwd", linear_bwd);
}

}  // namespace sinkhorn::ops
