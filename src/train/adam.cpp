#include "train/adam.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

namespace sinkhorn::train {

namespace {

// Biases and norms have one dimension; an embedding's rows are not summed over.
bool is_decayed(const OptimizerConfig& config, const std::string& name,
                const at::Tensor& parameter) {
  return config.name == "adamw" && config.weight_decay != 0 && parameter.dim() > 1 &&
         name.find("embedding") == std::string::npos;
}

}  // namespace

Adam::Adam(const OptimizerConfig& config, const NamedTensors& parameters) : config_(config) {
  for (const auto& [name, parameter] : parameters) {
    const at::Tensor values = parameter.detach();
    const at::Tensor step = at::zeros({}, values.options().dtype(at::kFloat));
    slots_.push_back({name, parameter, at::zeros_like(values), at::zeros_like(values), step,
                      is_decayed(config, name, parameter)});
  }
  arrived_ = at::zeros({1}, parameters.at(0).second.options().dtype(at::kInt));
}

ops::AdamTensors Adam::tensors_with_gradients() const {
  ops::AdamTensors x;
  for (const Slot& slot : slots_) {
    if (!slot.parameter.grad().defined()) continue;
    x.parameters.push_back(slot.parameter);
    x.gradients.push_back(slot.parameter.grad());
    x.exp_avgs.push_back(slot.exp_avg);
    x.exp_avg_sqs.push_back(slot.exp_avg_sq);
    x.steps.push_back(slot.step);
    x.decays.push_back(slot.decayed ? config_.weight_decay : 0.0);
  }
  return x;
}

void Adam::step(const at::Tensor& rate, const std::optional<at::Tensor>& divisor) {
  const at::NoGradGuard no_grad;
  if (rate.is_cuda() && ops::adam_step(tensors_with_gradients(), rate, divisor,
                                       {config_.beta1, config_.beta2, config_.epsilon, arrived_})) {
    return;
  }
  step_group(/*decayed=*/true, rate, divisor);
  step_group(/*decayed=*/false, rate, divisor);
}

void Adam::step_group(bool decayed, const at::Tensor& rate,
                      const std::optional<at::Tensor>& divisor) {
  std::vector<at::Tensor> parameters, gradients, exp_avgs, exp_avg_sqs, steps;
  for (const Slot& slot : slots_) {
    const at::Tensor& gradient = slot.parameter.grad();
    if (slot.decayed != decayed || !gradient.defined()) continue;
    parameters.push_back(slot.parameter);
    gradients.push_back(gradient.contiguous());
    exp_avgs.push_back(slot.exp_avg);
    exp_avg_sqs.push_back(slot.exp_avg_sq);
    steps.push_back(slot.step);
  }
  if (parameters.empty()) return;
  std::optional<at::Tensor> scale = divisor, held;
  if (divisor.has_value()) {
    held = at::isnan(*divisor).to(at::kFloat);
    at::_foreach_add_(steps, 1 - *held);
  } else {
    at::_foreach_add_(steps, 1);
  }
  // The kernel divides in passing, but by a float32 alone.
  if (divisor.has_value() && gradients[0].scalar_type() != at::kFloat) {
    at::_foreach_div_(gradients, *divisor);
    scale.reset();
  }
  // AdamW's kernel with nothing to decay is Adam's.
  at::_fused_adamw_(parameters, gradients, exp_avgs, exp_avg_sqs, /*max_exp_avg_sqs=*/{}, steps,
                    rate, config_.beta1, config_.beta2, decayed ? config_.weight_decay : 0.0,
                    config_.epsilon, /*amsgrad=*/false, /*maximize=*/false, scale, held);
}

NamedTensors Adam::state() {
  NamedTensors state;
  for (const Slot& slot : slots_) {
    state.emplace_back("exp_avg/" + slot.name, slot.exp_avg);
    state.emplace_back("exp_avg_sq/" + slot.name, slot.exp_avg_sq);
    state.emplace_back("step/" + slot.name, slot.step);
  }
  return state;
}

}  // namespace sinkhorn::train
