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

// How many rows of zeros a weight [out, in] is given for the time of a product. Where rows of `out`
// numbers do not begin at multiples of 16 bytes, as with a vocabulary of 259 bytes, the library's
// products of half types load and store number by number.
int64_t missing_rows(const Tensor& x, const Tensor& weight) {
  constexpr int64_t kPack = 8, kManyRows = 1024, kManyColumns = 64;
  if (!x.is_cuda() || x.element_size() != 2) return 0;
  const auto count = x.sym_numel().maybe_as_int(), out = weight.sym_size(0).maybe_as_int();
  const auto in = weight.sym_size(1).maybe_as_int();
  if (!count.has_value() || !out.has_value() || !in.has_value()) return 0;
  if (*out < kManyColumns || *count < kManyRows * *in) return 0;
  return (kPack - *out % kPack) % kPack;
}

Tensor with_rows(const Tensor& weight, int64_t missing) {
  return missing > 0 ? at::constant_pad_nd(weight, {0, 0, 0, missing}) : weight;
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

// The gradients of x weight' + bias from that of dropout(relu(.)), whose zeros tell what was cut or
// dropped: [rows, F], [F].
std::tuple<Tensor, Tensor> relu_gradients(const Tensor& grad, const Tensor& out, double dropout_p,
                                          at::ScalarType type) {
  if (!kernel_covers(grad, grad.sym_size(1))) {
    const double kept = 1.0 / (1.0 - dropout_p);
    const Tensor result = at::where(out <= 0, 0, kept == 1.0 ? grad : grad * kept);
    return {result, at::sum(result, 0, false, type)};
  }
  const c10::DeviceGuard guard(grad.device());
  const Tensor inner = aligned(out), plain_grad = aligned(grad);
  cuda::FeedForwardParams p = params_of(inner, dropout_p);
  const auto floats = grad.options().dtype(at::kFloat);
  const Tensor result = at::empty(inner.sizes(), inner.options());
  const Tensor partial = at::empty({cuda::feed_forward_partials(p), p.width}, floats);
  const Tensor bias = at::empty({p.width}, floats);
  p.grad_inner = plain_grad.const_data_ptr();
  p.grad = result.data_ptr();
  p.partial = partial.data_ptr<float>();
  p.grad_bias = bias.data_ptr<float>();
  cuda::launch_feed_forward_bwd(p, current_stream(grad));
  return {result, bias.to(type)};
}

// The sums of grad [rows, F] over rows, in `type`: the gradient of a bias.
Tensor bias_gradient(const Tensor& grad, at::ScalarType type) {
  if (!kernel_covers(grad, grad.sym_size(1))) return at::sum(grad, 0, false, type);
  const c10::DeviceGuard guard(grad.device());
  const Tensor plain_grad = aligned(grad);
  cuda::FeedForwardParams p;
  p.rows = grad.size(0);
  p.width = grad.size(1);
  p.type = kernel_type(grad.scalar_type());
  const auto floats = grad.options().dtype(at::kFloat);
  const Tensor partial = at::empty({cuda::feed_forward_partials(p), p.width}, floats);
  const Tensor bias = at::empty({p.width}, floats);
  p.grad_inner = plain_grad.const_data_ptr();
  p.partial = partial.data_ptr<float>();
  p.grad_bias = bias.data_ptr<float>();
  cuda::launch_bias_sum(p, current_stream(grad));
  return bias.to(type);
}

// a' b in `type`; CUDA's products write float32 from half types as they are.
Tensor product_in(const Tensor& a, const Tensor& b, at::ScalarType type) {
  if (a.scalar_type() == type) return at::mm(a.t(), b);
  if (a.is_cuda() && type == at::kFloat) return at::mm(a.t(), b, type);
  return at::mm(a.t(), b).to(type);
}

// type: of the gradients of weight and bias.
LinearGradients linear_bwd(const Tensor& grad, const Tensor& x, const Tensor& weight,
                           const Tensor& out, bool bias, bool relu, double dropout_p,
                           at::ScalarType type) {
  Tensor rows = rows_of(grad), grad_bias;
  if (relu) {
    std::tie(rows, grad_bias) = relu_gradients(rows, rows_of(out), dropout_p, type);
  } else if (bias) {
    grad_bias = bias_gradient(rows, type);
  }
  if (!bias) grad_bias = nothing(grad.options().dtype(type));
  const int64_t missing = bias || relu ? 0 : missing_rows(x, weight);
  const Tensor wide = with_columns(rows, missing);
  const Tensor grad_x = at::mm(wide, with_rows(weight, missing)).view_symint(x.sym_sizes());
  const Tensor grad_weight = product_in(wide, rows_of(x), type);
  return {grad_x, missing > 0 ? grad_weight.narrow(0, 0, weight.size(0)) : grad_weight, grad_bias};
}

Tensor call_fwd(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, bool relu,
                double dropout_p) {
  static const auto op = find_op<decltype(linear_fwd)>("linear_fwd");
  return op.call(x, weight, bias, relu, dropout_p);
}

// A copy in the type of x: the one at hand, or a new one.
Tensor in_type_of(const Tensor& x, const Tensor& parameter, const OptionalTensor& copy) {
  return copy.has_value() ? *copy : parameter.to(x.scalar_type());
}
OptionalTensor in_type_of(const Tensor& x, const OptionalTensor& parameter,
                          const OptionalTensor& copy) {
  return parameter.has_value() ? OptionalTensor(in_type_of(x, *parameter, copy)) : std::nullopt;
}

class LinearFunction : public torch::autograd::Function<LinearFunction> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& x, const Tensor& weight,
                        const OptionalTensor& bias, const OptionalTensor& weight_copy,
                        const OptionalTensor& bias_copy, bool relu, double dropout_p) {
    at::AutoDispatchBelowAutograd below;
    const Tensor own_weight = in_type_of(x, weight, weight_copy);
    const Tensor out = call_fwd(x, own_weight, in_type_of(x, bias, bias_copy), relu, dropout_p);
    context->save_for_backward({x, own_weight, relu ? out : Tensor()});
    context->saved_data["bias"] = bias.has_value();
    context->saved_data["relu"] = relu;
    context->saved_data["dropout_p"] = dropout_p;
    context->saved_data["type"] = static_cast<int64_t>(weight.scalar_type());
    return out;
  }
  static variable_list backward(AutogradContext* context, variable_list grads) {
    static const auto op = find_op<decltype(linear_bwd)>("linear_bwd");
    const auto saved = context->get_saved_variables();
    auto& data = context->saved_data;
    const bool relu = data["relu"].toBool(), bias = data["bias"].toBool();
    auto [grad_x, grad_weight, grad_bias] =
        op.call(grads[0], saved[0], saved[1], relu ? saved[2] : grads[0], bias, relu,
                data["dropout_p"].toDouble(), static_cast<at::ScalarType>(data["type"].toInt()));
    variable_list result(7);
    result[0] = grad_x;
    result[1] = grad_weight;
    if (bias) result[2] = grad_bias;
    return result;
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
    return call_fwd(x, in_type_of(x, weight, weight_copy), in_type_of(x, bias, bias_copy), relu,
                    dropout_p);
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
