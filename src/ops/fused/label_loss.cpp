// label_loss: the cross-entropy of a projection to many labels, and all of its backward that asks
// for the logits, in one go.
//
// The logits of some thousands of tokens are the largest tensor of a step by far. Here they become
// their own gradient in place and give that of x; what is kept is their gradient, for that of the
// weight. (Rows in pieces that stay in the second-level cache were slower: on the H200 a step of
// `tiny` by 3% in pieces of 32 MB and 7% in pieces of 16, one of lm_base by 3 to 4%.)
#include <ATen/ops/mm.h>
#include <ATen/ops/ones_like.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <algorithm>
#include <mutex>

#include "ops/autograd.h"
#include "ops/fused/fused.h"
#include "ops/fused/products.h"
#include "ops/fused/targets.h"

namespace sinkhorn::ops {
namespace {

std::mutex units_lock;
// What unit_gradient has given. Never destroyed: a device may be gone by then.
std::vector<Tensor>& units() {
  static auto& all = *new std::vector<Tensor>();
  return all;
}
bool is_unit_gradient(const Tensor& gradient) {
  const std::lock_guard<std::mutex> guard(units_lock);
  return std::any_of(units().begin(), units().end(),
                     [&](const Tensor& unit) { return unit.is_same(gradient); });
}

using LabelLoss = std::tuple<Tensor, Tensor, Tensor>;  // loss; gradients of logits and of x

void check_label_loss(const Tensor& x, const Tensor& weight, const Tensor& targets,
                      double smoothing) {
  const std::string_view op = "label_loss";
  check_float(op, "x", x);
  check_rank(op, "x", x, 2);
  check_rank(op, "weight", weight, 2);
  check_device(op, x, "weight", weight);
  SINKHORN_CHECK_SIZE(x.sym_size(1).sym_eq(weight.sym_size(1)), "label_loss: x has width ",
                      x.sym_size(1), ", weight [labels, in] is ", weight.sym_sizes());
  check_targets(op, x, targets, smoothing);
}

// Rows of logits begin at multiples of 16 bytes.
c10::SymInt pitch_of(const Tensor& x, const Tensor& weight) {
  const auto pack = static_cast<int64_t>(16 / x.element_size());
  return (weight.sym_size(0) + pack - 1) / pack * pack;
}

LabelLoss allocate(const Tensor& x, const Tensor& weight) {
  return {at::empty({}, x.options().dtype(at::kFloat)),
          at::empty_symint({x.sym_size(0), pitch_of(x, weight)}, x.options()),
          at::empty_symint(x.sym_sizes(), x.options())};
}

LabelLoss label_loss_fwd_cuda(const Tensor& x, const Tensor& weight, const Tensor& targets,
                              int64_t ignored, double smoothing) {
  check_label_loss(x, weight, targets, smoothing);
  const c10::DeviceGuard guard(x.device());
  LabelLoss result = allocate(x, weight);
  auto& [loss, grad_logits, grad_x] = result;
  const int64_t rows = x.size(0), pitch = grad_logits.size(1);
  const Tensor labels = with_rows(weight, pitch - weight.size(0)), wanted = targets.contiguous();
  const Tensor scratch = at::empty({rows + 1}, loss.options());
  cuda::CrossEntropyParams p;
  p.rows = rows;
  p.labels = weight.size(0);
  p.pitch = pitch;
  p.type = kernel_type(x.scalar_type());
  p.ignored = ignored;
  p.smoothing = static_cast<float>(smoothing);
  p.targets = wanted.const_data_ptr<int64_t>();
  p.losses = scratch.data_ptr<float>();
  p.count = p.losses + rows;
  p.loss = loss.data_ptr<float>();
  const SideWorkPtr side = SideScope::current();
  run_aside(side.get(), {wanted, scratch},
            [&] { cuda::launch_target_count(p, current_stream(x)); });
  at::mm_out(grad_logits, x, labels.t());
  if (side) side->meet();  // what counts is counted
  p.logits = p.grad_logits = grad_logits.data_ptr();
  cuda::launch_cross_entropy(p, current_stream(x));
  at::mm_out(grad_x, grad_logits, labels);
  run_aside(side.get(), {scratch, loss}, [&] { cuda::launch_mean_loss(p, current_stream(x)); });
  return result;
}

LabelLoss label_loss_fwd_meta(const Tensor& x, const Tensor& weight, const Tensor& targets,
                              int64_t /*ignored*/, double smoothing) {
  check_label_loss(x, weight, targets, smoothing);
  return allocate(x, weight);
}

// Times a float32 factor, rounded once: a factor in a half type would be another one.
Tensor scaled(const Tensor& x, const Tensor& factor) {
  return (x.to(at::kFloat) * factor).to(x.scalar_type());
}

class LabelLossFunction : public torch::autograd::Function<LabelLossFunction> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& x, const Tensor& weight,
                        const Tensor& targets, int64_t ignored, double smoothing,
                        const OptionalTensor& weight_copy) {
    static const auto op = find_op<decltype(label_loss_fwd_cuda)>("label_loss_fwd");
    at::AutoDispatchBelowAutograd below;
    const auto [loss, grad_logits, grad_x] =
        op.call(x, in_type_of(x, weight, weight_copy), targets, ignored, smoothing);
    context->save_for_backward({x, grad_logits, grad_x});
    context->saved_data["labels"] = weight.size(0);
    context->saved_data["type"] = static_cast<int64_t>(weight.scalar_type());
    if (const SideWorkPtr side = side_work_for(x, weight, std::nullopt)) {
      context->saved_data["side"] = c10::IValue::make_capsule(side);
      context->saved_data["weight"] = weight;
    }
    return loss;
  }
  static variable_list backward(AutogradContext* context, variable_list grads) {
    TORCH_CHECK(!at::GradMode::is_enabled(), "label_loss has no second derivative");
    at::AutoDispatchBelowAutograd below;
    const auto saved = context->get_saved_variables();
    const Tensor &x = saved[0], &grad_logits = saved[1], &grad_x = saved[2], &factor = grads[0];
    auto& data = context->saved_data;
    const auto type = static_cast<at::ScalarType>(data["type"].toInt());
    const bool unit = is_unit_gradient(factor);
    enter_device(x);
    Tensor wide = at::empty_symint({grad_logits.sym_size(1), x.sym_size(1)},
                                   x.options().dtype(type));  // with rows of zeros
    const auto write = [&] {
      write_product(grad_logits, x, wide);
      if (!unit) wide.copy_(scaled(wide, factor));
    };
    variable_list result(6);
    result[0] = unit ? grad_x : scaled(grad_x, factor);
    const Tensor gradient = wide.narrow(0, 0, data["labels"].toInt());
    if (data.count("side") == 0) {
      write();
      result[1] = gradient;
      return result;
    }
    const auto held = data["side"].toCapsule();
    auto& side = static_cast<SideWork&>(*held);
    side.run({grad_logits, x, wide, factor}, write);
    side.leave(data["weight"].toTensor(), gradient);
    return result;
  }
};

Tensor label_loss_op(const Tensor& x, const Tensor& weight, const Tensor& targets, int64_t ignored,
                     double smoothing, const OptionalTensor& weight_copy) {
  check_label_loss(x, weight, targets, smoothing);
  if (!covers_cross_entropy(x, weight.sym_size(0)) ||
      !torch::autograd::compute_requires_grad(x, weight)) {
    LinearOptions options;
    options.weight_copy = weight_copy;
    return cross_entropy(linear(x, weight, std::nullopt, options), targets, ignored, smoothing);
  }
  return LabelLossFunction::apply(x, weight, targets, ignored, smoothing, weight_copy);
}

}  // namespace

Tensor label_loss(const Tensor& x, const Tensor& weight, const Tensor& targets,
                  const LabelLossOptions& o) {
  static const auto op = find_op<decltype(label_loss_op)>("label_loss");
  return op.call(x, weight, targets, o.ignored, o.smoothing, o.weight_copy);
}

Tensor unit_gradient(const Tensor& loss) {
  const std::lock_guard<std::mutex> guard(units_lock);
  const auto serves = [&](const Tensor& unit) {
    return unit.device() == loss.device() && unit.scalar_type() == loss.scalar_type();
  };
  const auto found = std::find_if(units().begin(), units().end(), serves);
  return found != units().end() ? *found : units().emplace_back(at::ones_like(loss.detach()));
}

TORCH_LIBRARY_IMPL(sinkhorn, CompositeImplicitAutograd, m) { m.impl("label_loss", label_loss_op); }
TORCH_LIBRARY_IMPL(sinkhorn, Autograd, m) { m.impl("label_loss_fwd", no_second_derivative()); }
TORCH_LIBRARY_IMPL(sinkhorn, CUDA, m) { m.impl("label_loss_fwd", label_loss_fwd_cuda); }
TORCH_LIBRARY_IMPL(sinkhorn, Meta, m) { m.impl("label_loss_fwd", label_loss_fwd_meta); }

}  // namespace sinkhorn::ops
