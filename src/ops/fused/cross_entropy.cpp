// cross_entropy: the mean over real targets, and the logits' gradient in the same pass over them.
// Where the logits are a projection to many labels, label_loss (label_loss.cpp) does both.
#include <ATen/ops/cross_entropy_loss.h>
#include <torch/csrc/autograd/functions/utils.h>

#include "ops/autograd.h"
#include "ops/fused/fused.h"
#include "ops/fused/targets.h"

namespace sinkhorn::ops {
namespace {

void check_cross_entropy(const Tensor& logits, const Tensor& targets, double smoothing) {
  const std::string_view op = "cross_entropy";
  check_float(op, "logits", logits);
  check_rank(op, "logits", logits, 2);
  check_targets(op, logits, targets, smoothing);
}

// loss [], and with `keep` the gradient of the logits [rows, V], else [0].
std::tuple<Tensor, Tensor> allocate(const Tensor& logits, bool keep) {
  return {
      at::empty({}, logits.options().dtype(at::kFloat)),
      keep ? at::empty_symint(logits.sym_sizes(), logits.options()) : nothing(logits.options())};
}

std::tuple<Tensor, Tensor> cross_entropy_fwd_cuda(const Tensor& logits, const Tensor& targets,
                                                  int64_t ignored, double smoothing, bool keep) {
  check_cross_entropy(logits, targets, smoothing);
  const c10::DeviceGuard guard(logits.device());
  auto result = allocate(logits, keep);
  const Tensor plain = aligned(logits), wanted = targets.contiguous();
  const Tensor scratch = at::empty({logits.size(0) + 1}, std::get<0>(result).options());
  cuda::CrossEntropyParams p;
  p.rows = logits.size(0);
  p.labels = p.pitch = logits.size(1);
  p.type = kernel_type(logits.scalar_type());
  p.ignored = ignored;
  p.smoothing = static_cast<float>(smoothing);
  p.logits = plain.const_data_ptr();
  p.targets = wanted.const_data_ptr<int64_t>();
  p.losses = scratch.data_ptr<float>();
  p.count = p.losses + p.rows;
  p.loss = std::get<0>(result).data_ptr<float>();
  if (keep) p.grad_logits = std::get<1>(result).data_ptr();
  const cuda::Stream stream = current_stream(logits);
  cuda::launch_target_count(p, stream);
  cuda::launch_cross_entropy(p, stream);
  cuda::launch_mean_loss(p, stream);
  return result;
}

std::tuple<Tensor, Tensor> cross_entropy_fwd_meta(const Tensor& logits, const Tensor& targets,
                                                  int64_t /*ignored*/, double smoothing,
                                                  bool keep) {
  check_cross_entropy(logits, targets, smoothing);
  return allocate(logits, keep);
}

// grad_logits *= grad, in place.
void cross_entropy_bwd_cuda(const Tensor& grad, Tensor& grad_logits) {
  const c10::DeviceGuard guard(grad_logits.device());
  const Tensor factor = grad.to(at::kFloat).contiguous();
  cuda::ScaleParams p;
  p.count = grad_logits.numel();
  p.type = kernel_type(grad_logits.scalar_type());
  p.values = grad_logits.data_ptr();
  p.factor = factor.const_data_ptr<float>();
  cuda::launch_scale(p, current_stream(grad_logits));
}

void cross_entropy_bwd_meta(const Tensor&, Tensor&) {}

std::tuple<Tensor, Tensor> call_fwd(const Tensor& logits, const Tensor& targets, int64_t ignored,
                                    double smoothing, bool keep) {
  static const auto op = find_op<decltype(cross_entropy_fwd_cuda)>("cross_entropy_fwd");
  return op.call(logits, targets, ignored, smoothing, keep);
}

class CrossEntropyFunction : public torch::autograd::Function<CrossEntropyFunction> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& logits, const Tensor& targets,
                        int64_t ignored, double smoothing) {
    at::AutoDispatchBelowAutograd below;
    auto [loss, grad_logits] = call_fwd(logits, targets, ignored, smoothing, /*keep=*/true);
    context->save_for_backward({logits, targets});
    context->saved_data["grad_logits"] = grad_logits;
    context->saved_data["ignored"] = ignored;
    context->saved_data["smoothing"] = smoothing;
    return loss;
  }
  static variable_list backward(AutogradContext* context, variable_list grads) {
    static const auto op = find_op<decltype(cross_entropy_bwd_cuda)>("cross_entropy_bwd");
    at::AutoDispatchBelowAutograd below;
    auto& data = context->saved_data;
    Tensor grad_logits;
    if (data["grad_logits"].isTensor()) {
      grad_logits = data["grad_logits"].toTensor();
      data["grad_logits"] = c10::IValue();  // it is handed on; a second backward makes its own
    } else {
      const auto saved = context->get_saved_variables();
      grad_logits = std::get<1>(call_fwd(saved[0], saved[1], data["ignored"].toInt(),
                                         data["smoothing"].toDouble(), /*keep=*/true));
    }
    op.call(grads[0], grad_logits);
    return {grad_logits, Tensor(), Tensor(), Tensor()};
  }
};

Tensor cross_entropy_op(const Tensor& logits, const Tensor& targets, int64_t ignored,
                        double smoothing) {
  check_cross_entropy(logits, targets, smoothing);
  if (!covers_cross_entropy(logits, logits.sym_size(1))) {
    return at::cross_entropy_loss(logits.to(compute_type(logits.scalar_type())), targets, {},
                                  at::Reduction::Mean, ignored, smoothing);
  }
  if (!torch::autograd::compute_requires_grad(logits)) {
    return std::get<0>(call_fwd(logits, targets, ignored, smoothing, /*keep=*/false));
  }
  return CrossEntropyFunction::apply(logits, targets, ignored, smoothing);
}

}  // namespace

Tensor cross_entropy(const Tensor& logits, const Tensor& targets, int64_t ignored,
                     double smoothing) {
  static const auto op = find_op<decltype(cross_entropy_op)>("cross_entropy");
  return op.call(logits, targets, ignored, smoothing);
}

TORCH_LIBRARY_IMPL(sinkhorn, CompositeImplicitAutograd, m) {
  m.impl("cross_entropy", cross_entropy_op);
}
TORCH_LIBRARY_IMPL(sinkhorn, Autograd, m) {
  m.impl("cross_entropy_fwd", no_second_derivative());
  m.impl("cross_entropy_bwd", no_second_derivative());
}
TORCH_LIBRARY_IMPL(sinkhorn, CUDA, m) {
  m.impl("cross_entropy_fwd", cross_entropy_fwd_cuda);
  m.impl("cross_entropy_bwd", cross_entropy_bwd_cuda);
}
TORCH_LIBRARY_IMPL(sinkhorn, Meta, m) {
  m.impl("cross_entropy_fwd", cross_entropy_fwd_meta);
  m.impl("cross_entropy_bwd", cross_entropy_bwd_meta);
}

}  // namespace sinkhorn::ops
