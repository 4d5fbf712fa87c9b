// add_norm, norm and residual: the residual sum, dropout and layer norm in one pass.
#include "kernels/cuda/norm.h"

#include <ATen/ops/dropout.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/functions/utils.h>

#include "ops/autograd.h"
#include "ops/fused/fused.h"
#include "ops/fused/kernel_call.h"
#include "ops/fused/side_work.h"

namespace sinkhorn::ops {
namespace {

using OptionalType = std::optional<at::ScalarType>;
using NormResult =
    std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;            // sum, normed, mean, rstd, rng
using NormGradients = std::tuple<Tensor, Tensor, Tensor, Tensor>;  // x, part, weight, bias

void check_norm(const Tensor& x, const OptionalTensor& part, const OptionalTensor& weight,
                const OptionalTensor& bias, double dropout_p) {
  const std::string_view op = "add_norm";
  check_float(op, "x", x);
  check_dropout(op, dropout_p);
  TORCH_CHECK_VALUE(x.dim() >= 1, "add_norm: x must have at least one dimension, got none");
  if (part.has_value()) {
    check_device(op, x, "part", *part);
    check_sizes(op, "part", *part, x.sym_sizes(), "the shape of x");
  }
  for (const auto& [name, y] : {std::pair{"weight", weight}, std::pair{"bias", bias}}) {
    if (!y.has_value()) continue;
    check_device(op, x, name, *y);
    check_sizes(op, name, *y, {x.sym_size(-1)}, "[E]");
    TORCH_CHECK_VALUE(y->scalar_type() == x.scalar_type(), "add_norm: ", name,
                      " must have the type of x, ", x.scalar_type(), ", got ", y->scalar_type());
  }
}

// Whether a kernel computes it. type: of part and result.
bool covered(const Tensor& x, at::ScalarType part, at::ScalarType type) {
  if (!x.is_cuda() || x.scalar_type() != at::kFloat || part != type || !is_kernel_type(type)) {
    return false;
  }
  const auto count = x.sym_numel().maybe_as_int(), width = x.sym_size(-1).maybe_as_int();
  return count.has_value() && width.has_value() && *count > 0 &&
         cuda::covers_norm(*count / *width, *width);
}

cuda::NormParams params_of(const Tensor& x, at::ScalarType type, double dropout_p,
                           const Tensor& rng) {
  cuda::NormParams p;
  p.width = x.size(-1);
  p.rows = x.numel() / p.width;
  p.type = kernel_type(type);
  p.rng = rng_data(rng);
  if (p.rng != nullptr) p.dropout = static_cast<float>(dropout_p);
  return p;
}

NormResult allocate_norm(const Tensor& x, const OptionalTensor& part, const OptionalTensor& weight,
                         at::ScalarType type) {
  const auto none = [&] { return nothing(x.options()); };
  const auto like_x = [&](at::ScalarType t) {
    return at::empty_symint(x.sym_sizes(), x.options().dtype(t));
  };
  const auto rows = x.sym_sizes().slice(0, static_cast<size_t>(x.dim() - 1));
  const auto statistic = [&] {
    return weight.has_value() ? at::empty_symint(rows, x.options()) : none();
  };
  return {part.has_value() ? like_x(x.scalar_type()) : none(),
          weight.has_value() ? like_x(type) : none(), statistic(), statistic(), Tensor()};
}

NormResult add_norm_fwd_cuda(const Tensor& x, const OptionalTensor& part,
                             const OptionalTensor& weight, const OptionalTensor& bias,
                             double epsilon, double dropout_p, at::ScalarType type) {
  check_norm(x, part, weight, bias, dropout_p);
  const c10::DeviceGuard guard(x.device());
  NormResult result = allocate_norm(x, part, weight, type);
  auto& [sum, normed, mean, rstd, rng] = result;
  rng = draw_or_nothing(part.has_value() ? dropout_p : 0.0, x);
  const Tensor plain_x = aligned(x), plain_part = part.has_value() ? aligned(*part) : Tensor();
  cuda::NormParams p = params_of(plain_x, type, dropout_p, rng);
  p.x = plain_x.const_data_ptr<float>();
  p.part = data_or_null<void>(plain_part);
  p.sum = sum.data_ptr<float>();
  if (!weight.has_value()) {
    cuda::launch_residual_fwd(p, current_stream(x));
    return result;
  }
  const Tensor plain_weight = aligned(*weight), plain_bias = aligned(*bias);
  p.epsilon = static_cast<float>(epsilon);
  p.weight = plain_weight.const_data_ptr<float>();
  p.bias = plain_bias.const_data_ptr<float>();
  p.normed = normed.data_ptr();
  p.mean = mean.data_ptr<float>();
  p.rstd = rstd.data_ptr<float>();
  cuda::launch_norm_fwd(p, current_stream(x));
  return result;
}

NormResult add_norm_fwd_meta(const Tensor& x, const OptionalTensor& part,
                             const OptionalTensor& weight, const OptionalTensor& bias,
                             double /*epsilon*/, double dropout_p, at::ScalarType type) {
  check_norm(x, part, weight, bias, dropout_p);
  NormResult result = allocate_norm(x, part, weight, type);
  const bool draws = part.has_value() && dropout_p > 0.0;
  std::get<4>(result) = at::empty({draws ? 2 : 0}, x.options().dtype(at::kLong));
  return result;
}

// The part's gradient is x's own where nothing was dropped and the types agree.
bool shares_gradient(const Tensor& sum, double dropout_p, const OptionalType& part_type) {
  return dropout_p == 0.0 && part_type.has_value() && *part_type == sum.scalar_type();
}

NormGradients allocate_gradients(const Tensor& sum, const OptionalTensor& weight, double dropout_p,
                                 const OptionalType& part_type) {
  const auto none = [&] { return nothing(sum.options()); };
  const bool own = part_type.has_value() && !shares_gradient(sum, dropout_p, part_type);
  const auto per_column = [&] {
    return weight.has_value() ? at::empty_symint(weight->sym_sizes(), weight->options()) : none();
  };
  return {weight.has_value() ? at::empty_symint(sum.sym_sizes(), sum.options()) : none(),
          own ? at::empty_symint(sum.sym_sizes(), sum.options().dtype(*part_type)) : none(),
          per_column(), per_column()};
}

// Backward over the rows: all but the sums that make the gradients of weight and bias.
struct OpenGradients {
  NormGradients gradients;
  Tensor partial;  // [2, norm_partials, E] to be summed; undefined without a weight
  cuda::NormParams p;

  void write_sums() const {
    if (partial.defined()) cuda::launch_norm_sums(p, current_stream(partial));
  }
};

OpenGradients begin_bwd(const OptionalTensor& grad_sum, const OptionalTensor& grad_normed,
                        const Tensor& sum, const OptionalTensor& weight, const Tensor& mean,
                        const Tensor& rstd, const Tensor& rng, double dropout_p,
                        OptionalType part_type) {
  const c10::DeviceGuard guard(sum.device());
  NormGradients result = allocate_gradients(sum, weight, dropout_p, part_type);
  const auto& [grad_x, grad_part, grad_weight, grad_bias] = result;
  const Tensor plain_sum = aligned(sum);
  const Tensor carried = grad_sum.has_value() ? aligned(*grad_sum) : Tensor();
  const at::ScalarType type =
      grad_normed.has_value() ? grad_normed->scalar_type() : part_type.value_or(at::kFloat);
  cuda::NormParams p = params_of(plain_sum, type, dropout_p, rng);
  p.grad_sum = data_or_null<const float>(carried);
  p.grad_part = grad_part.numel() > 0 ? grad_part.data_ptr() : nullptr;
  if (!weight.has_value()) {
    cuda::launch_residual_bwd(p, current_stream(sum));
    return {result, Tensor(), p};
  }
  const Tensor plain_grad = aligned(*grad_normed), plain_weight = aligned(*weight);
  const Tensor partial =
      at::empty({2, cuda::norm_partials(p.rows, p.width), p.width}, sum.options());
  p.sum = plain_sum.data_ptr<float>();
  p.weight = plain_weight.const_data_ptr<float>();
  p.mean = mean.data_ptr<float>();
  p.rstd = rstd.data_ptr<float>();
  p.grad_normed = plain_grad.const_data_ptr();
  p.grad_x = grad_x.data_ptr<float>();
  p.partial = partial.data_ptr<float>();
  p.grad_weight = grad_weight.data_ptr<float>();
  p.grad_bias = grad_bias.data_ptr<float>();
  cuda::launch_norm_bwd(p, current_stream(sum));
  return {result, partial, p};
}

NormGradients add_norm_bwd_cuda(const OptionalTensor& grad_sum, const OptionalTensor& grad_normed,
                                const Tensor& sum, const OptionalTensor& weight, const Tensor& mean,
                                const Tensor& rstd, const Tensor& rng, double dropout_p,
                                OptionalType part_type) {
  const c10::DeviceGuard guard(sum.device());
  const OpenGradients open =
      begin_bwd(grad_sum, grad_normed, sum, weight, mean, rstd, rng, dropout_p, part_type);
  open.write_sums();
  return open.gradients;
}

NormGradients add_norm_bwd_meta(const OptionalTensor&, const OptionalTensor&, const Tensor& sum,
                                const OptionalTensor& weight, const Tensor&, const Tensor&,
                                const Tensor&, double dropout_p, OptionalType part_type) {
  return allocate_gradients(sum, weight, dropout_p, part_type);
}

NormResult call_fwd(const Tensor& x, const OptionalTensor& part, const OptionalTensor& weight,
                    const OptionalTensor& bias, double epsilon, double dropout_p,
                    at::ScalarType type) {
  static const auto op = find_op<decltype(add_norm_fwd_cuda)>("add_norm_fwd");
  return op.call(x, part, weight, bias, epsilon, dropout_p, type);
}

NormGradients call_bwd(const OptionalTensor& grad_sum, const OptionalTensor& grad_normed,
                       const Tensor& sum, const OptionalTensor& weight, const Tensor& mean,
                       const Tensor& rstd, const Tensor& rng, double dropout_p,
                       OptionalType part_type) {
  static const auto op = find_op<decltype(add_norm_bwd_cuda)>("add_norm_bwd");
  return op.call(grad_sum, grad_normed, sum, weight, mean, rstd, rng, dropout_p, part_type);
}

// Outputs: sum and normed; without a part the sum is x itself.
class AddNormFunction : public torch::autograd::Function<AddNormFunction> {
 public:
  static variable_list forward(AutogradContext* context, const Tensor& x,
                               const OptionalTensor& part, const Tensor& weight, const Tensor& bias,
                               double epsilon, double dropout_p, at::ScalarType type) {
    at::AutoDispatchBelowAutograd below;
    auto [sum, normed, mean, rstd, rng] = call_fwd(x, part, weight, bias, epsilon, dropout_p, type);
    context->set_materialize_grads(false);
    context->save_for_backward({part.has_value() ? sum : x, weight, mean, rstd, rng});
    context->saved_data["dropout_p"] = part.has_value() ? dropout_p : 0.0;
    context->saved_data["type"] = static_cast<int64_t>(type);
    context->saved_data["has_part"] = part.has_value();
    const SideWorkPtr side = SideScope::current();
    if (side && side->accepts(weight) && side->accepts(bias)) {
      context->saved_data["side"] = c10::IValue::make_capsule(side);
      context->saved_data["parameters"] = c10::List<Tensor>({weight, bias});
    }
    return {part.has_value() ? sum : x, normed};
  }
  static variable_list backward(AutogradContext* context, variable_list grads) {
    const auto saved = context->get_saved_variables();
    const double dropout_p = context->saved_data["dropout_p"].toDouble();
    const auto type = static_cast<at::ScalarType>(context->saved_data["type"].toInt());
    const bool has_part = context->saved_data["has_part"].toBool();
    const OptionalType part_type = has_part ? OptionalType(type) : std::nullopt;
    const Tensor& sum = saved[0];
    Tensor grad_normed = grads[1];
    if (!grad_normed.defined()) {
      grad_normed = at::zeros(sum.sizes(), sum.options().dtype(type));
    }
    const auto run = [&](const auto& bwd) {
      return bwd(or_none(grads[0]), grad_normed, sum, saved[1], saved[2], saved[3], saved[4],
                 dropout_p, part_type);
    };
    const bool aside = context->saved_data.count("side") > 0;
    auto [x, part, weight, bias] =
        aside ? leave_sums(context->saved_data, run(begin_bwd)) : run(call_bwd);
    variable_list result(7);
    result[0] = x;
    if (has_part) result[1] = shares_gradient(sum, dropout_p, part_type) ? x : part;
    result[2] = weight;
    result[3] = bias;
    return result;
  }

 private:
  // The sums are short, but whatever follows would wait for them.
  static NormGradients leave_sums(SavedData& data, const OpenGradients& open) {
    const auto& [x, part, weight, bias] = open.gradients;
    const auto held = data["side"].toCapsule();
    auto& side = static_cast<SideWork&>(*held);
    side.run({open.partial, weight, bias}, [&] { open.write_sums(); });
    const auto parameters = data["parameters"].toTensorVector();
    side.leave(parameters[0], weight);
    side.leave(parameters[1], bias);
    return {x, part, Tensor(), Tensor()};
  }
};

class ResidualFunction : public torch::autograd::Function<ResidualFunction> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& x, const Tensor& part,
                        double dropout_p) {
    at::AutoDispatchBelowAutograd below;
    const auto result =
        call_fwd(x, part, std::nullopt, std::nullopt, 0.0, dropout_p, part.scalar_type());
    context->save_for_backward({std::get<4>(result)});
    context->saved_data["dropout_p"] = dropout_p;
    context->saved_data["type"] = static_cast<int64_t>(part.scalar_type());
    return std::get<0>(result);
  }
  static variable_list backward(AutogradContext* context, variable_list grads) {
    const double dropout_p = context->saved_data["dropout_p"].toDouble();
    const auto type = static_cast<at::ScalarType>(context->saved_data["type"].toInt());
    const Tensor& grad = grads[0];
    if (shares_gradient(grad, dropout_p, type)) return {grad, grad, Tensor()};
    const Tensor none = nothing(grad.options());
    const auto gradients = call_bwd(grad, std::nullopt, grad, std::nullopt, none, none,
                                    context->get_saved_variables()[0], dropout_p, type);
    return {grad, std::get<1>(gradients), Tensor()};
  }
};

std::tuple<Tensor, Tensor> add_norm_op(const Tensor& x, const Tensor& part, const Tensor& weight,
                                       const Tensor& bias, double epsilon, double dropout_p,
                                       at::ScalarType type) {
  check_norm(x, part, weight, bias, dropout_p);
  if (!covered(x, part.scalar_type(), type)) {
    const Tensor sum = x + at::dropout(part, dropout_p, true);
    return {sum, at::layer_norm(sum, weight.sizes(), weight, bias, epsilon).to(type)};
  }
  if (!torch::autograd::compute_requires_grad(x, part, weight, bias)) {
    const auto result = call_fwd(x, part, weight, bias, epsilon, dropout_p, type);
    return {std::get<0>(result), std::get<1>(result)};
  }
  const auto outputs = AddNormFunction::apply(x, part, weight, bias, epsilon, dropout_p, type);
  return {outputs[0], outputs[1]};
}

std::tuple<Tensor, Tensor> carry_norm_op(const Tensor& x, const Tensor& weight, const Tensor& bias,
                                         double epsilon, at::ScalarType type) {
  check_norm(x, std::nullopt, weight, bias, 0.0);
  if (!covered(x, type, type)) {
    return {x, at::layer_norm(x, weight.sizes(), weight, bias, epsilon).to(type)};
  }
  if (!torch::autograd::compute_requires_grad(x, weight, bias)) {
    return {x, std::get<1>(call_fwd(x, std::nullopt, weight, bias, epsilon, 0.0, type))};
  }
  const auto outputs =
      AddNormFunction::apply(x, OptionalTensor(), weight, bias, epsilon, 0.0, type);
  return {outputs[0], outputs[1]};
}

Tensor norm_op(const Tensor& x, const Tensor& weight, const Tensor& bias, double epsilon,
               at::ScalarType type) {
  return std::get<1>(carry_norm_op(x, weight, bias, epsilon, type));
}

Tensor residual_op(const Tensor& x, const Tensor& part, double dropout_p) {
  check_norm(x, part, std::nullopt, std::nullopt, dropout_p);
  if (!covered(x, part.scalar_type(), part.scalar_type())) {
    return x + at::dropout(part, dropout_p, true);
  }
  if (!torch::autograd::compute_requires_grad(x, part)) {
    return std::get<0>(
        call_fwd(x, part, std::nullopt, std::nullopt, 0.0, dropout_p, part.scalar_type()));
  }
  return ResidualFunction::apply(x, part, dropout_p);
}

}  // namespace

std::tuple<Tensor, Tensor> add_norm(const Tensor& x, const Tensor& part, const Tensor& weight,
                                    const Tensor& bias, const NormOptions& o) {
  static const auto op = find_op<decltype(add_norm_op)>("add_norm");
  return op.call(x, part, weight, bias, o.epsilon, o.dropout_p, o.type);
}

std::tuple<Tensor, Tensor> carry_norm(const Tensor& x, const Tensor& weight, const Tensor& bias,
                                      const NormOptions& o) {
  static const auto op = find_op<decltype(carry_norm_op)>("carry_norm");
  return op.call(x, weight, bias, o.epsilon, o.type);
}

Tensor residual(const Tensor& x, const Tensor& part, double dropout_p) {
  static const auto op = find_op<decltype(residual_op)>("residual");
  return op.call(x, part, dropout_p);
}

TORCH_LIBRARY_IMPL(sinkhorn, CompositeImplicitAutograd, m) {
  m.impl("add_norm", add_norm_op);
  m.impl("carry_norm", carry_norm_op);
  m.impl("norm", norm_op);
  m.impl("residual", residual_op);
}
TORCH_LIBRARY_IMPL(sinkhorn, Autograd, m) {
  m.impl("add_norm_fwd", no_second_derivative());
  m.impl("add_norm_bwd", no_second_derivative());
}
TORCH_LIBRARY_IMPL(sinkhorn, CUDA, m) {
  m.impl("add_norm_fwd", add_norm_fwd_cuda);
  m.impl("add_norm_bwd", add_norm_bwd_cuda);
}
TORCH_LIBRARY_IMPL(sinkhorn, Meta, m) {
  m.impl("add_norm_fwd", add_norm_fwd_meta);
  m.impl("add_norm_bwd", add_norm_bwd_meta);
}

}  // namespace sinkhorn::ops
