#include "train/step.h"

#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/argmax.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/autograd.h>

#include "ops/fused/side_work.h"
#include "sinkhorn/error.h"
#include "train/evaluate.h"

namespace sinkhorn::train {
namespace {

// Steps of a shape that run as they are before one is captured: libraries choose algorithms and
// allocate workspaces then.
constexpr int64_t kEagerSteps = 3;
constexpr size_t kMostGraphs = 24;  // shapes; more run as they are

}  // namespace

Stepper::Stepper(models::Model& model, const RunConfig& config, at::Device device, bool aside)
    : model_(model), config_(config), device_(device), stream_(make_step_stream(device)) {
  context_.compute = set_precision(config.train.precision, device);
  model.to(device, config.train.precision == "float64" ? at::kDouble : at::kFloat);
  for (const auto& item : model.named_parameters()) {
    parameters_.emplace_back(item.key(), item.value());
  }
  optimizer_ = make_optimizer(config.optimizer, parameters_);
  const auto floats = at::TensorOptions(at::kFloat).device(device);
  for (at::Tensor* t : {&rate_, &loss_, &losses_, &norms_}) *t = at::zeros({}, floats);
  steps_since_report_ = at::zeros({}, at::kLong);
  const auto numbers = at::TensorOptions(at::kLong).device(device);
  step_ = at::zeros({}, numbers);
  failed_step_ = at::zeros({}, numbers);
  failed_parameter_ = at::full({}, -1, numbers);
  // Recomputed layers are there to save memory, which side work keeps.
  if (aside && !config.model.checkpoint) side_stream_ = ops::make_side_stream(device);
  // A recomputed layer reads the generator's state, which a capture cannot.
  capture_ = config.train.graph && stream_->can_capture() && !config.model.checkpoint;
}

void Stepper::backward(const std::vector<models::Input>& inputs) {
  // A parameter's first gradient becomes its .grad as it is: no zeros to add it to.
  for (auto& [name, parameter] : parameters_) parameter.mutable_grad() = at::Tensor();
  const nn::CopyScope copies(model_);
  loss_.zero_();
  if (inputs.size() == 1) {
    ops::SideScope side(side_stream_);
    const at::Tensor loss = model_.loss(inputs[0], context_);
    torch::autograd::backward({loss}, {});
    side.join();
    loss_.add_(loss.detach());
  } else {
    accumulate(inputs);
  }
  gradients_.clear();
  for (auto& [name, parameter] : parameters_) {
    if (!parameter.grad().defined()) parameter.mutable_grad() = at::zeros_like(parameter);
    gradients_.push_back(parameter.grad());
  }
}

void Stepper::accumulate(const std::vector<models::Input>& inputs) {
  // Every target counts the same, in whichever of the batches it stands.
  std::vector<at::Tensor> counts;
  for (const models::Input& input : inputs) {
    const bool labels = input.targets.dim() == 1;
    counts.push_back((labels ? input.targets >= 0 : input.targets != 0).sum().to(at::kFloat));
  }
  const at::Tensor all = at::stack(counts).sum();
  for (size_t i = 0; i < inputs.size(); ++i) {
    const at::Tensor loss = model_.loss(inputs[i], context_) * (counts[i] / all);
    torch::autograd::backward({loss}, {});
    loss_.add_(loss.detach());
  }
}

// The one place between backward and clipping: with several machines gradients are summed here.
void Stepper::exchange_gradients() {}

void Stepper::note_failures(const at::Tensor& norms, const at::Tensor& norm) {
  const at::Tensor fine = at::isfinite(norm).logical_and(at::isfinite(loss_));
  const at::Tensor first = fine.logical_not().logical_and(failed_step_ == 0);
  const at::Tensor bad = at::isfinite(norms).logical_not();
  const at::Tensor index = at::where(bad.any(), at::argmax(bad.to(at::kInt)), -1);
  failed_parameter_.copy_(at::where(first, index, failed_parameter_));
  failed_step_.copy_(at::where(first, step_, failed_step_));
}

std::optional<at::Tensor> Stepper::clipping() {
  const at::Tensor norms = at::stack(at::_foreach_norm(gradients_));
  const at::Tensor norm = norms.norm();
  note_failures(norms, norm);
  norms_.add_(norm);
  if (config_.optimizer.clip <= 0) return std::nullopt;
  return ((norm + 1e-6) / config_.optimizer.clip).clamp_min(1.0);
}

void Stepper::run(const std::vector<models::Input>& inputs) {
  step_.add_(1);
  backward(inputs);
  losses_.add_(loss_);
  exchange_gradients();
  optimizer_->step(rate_, clipping());
}

void Stepper::step(const std::vector<Prepared>& batches, double rate) {
  rate_.fill_(rate);
  step_.fill_(steps_done_);
  std::string shape;
  for (const Prepared& batch : batches) shape += signature(batch.input);
  const bool known = graphs_.count(shape) > 0;
  if (!capture_ || (!known && graphs_.size() >= kMostGraphs)) {
    std::vector<models::Input> inputs;
    for (const Prepared& batch : batches) inputs.push_back(to_device(batch.input, device_));
    run(inputs);
  } else {
    Captured& captured = graphs_[shape];
    if (!known) {
      for (const Prepared& b : batches) captured.inputs.push_back(to_device(b.input, device_));
    }
    for (size_t i = 0; i < batches.size(); ++i) copy_into(captured.inputs[i], batches[i].input);
    if (captured.graph == nullptr && captured.eager_steps++ >= kEagerSteps) {
      captured.graph = stream_->capture([&] { run(captured.inputs); });
    }
    captured.graph != nullptr ? captured.graph->replay() : run(captured.inputs);
  }
  ++steps_done_;
  steps_since_report_.add_(1);
}

void Stepper::report_failures() const {
  const int64_t failed = failed_step_.item<int64_t>();
  if (failed > 0) {
    const int64_t index = failed_parameter_.item<int64_t>();
    throw Error("step " + std::to_string(failed) + ": " +
                (index < 0 ? std::string("the loss")
                           : "the gradient of " + parameters_[static_cast<size_t>(index)].first) +
                " is not finite; the last good state is the newest checkpoint. A smaller "
                "optimizer.rate, a longer optimizer.warmup or optimizer.clip may help");
  }
}

Stepper::Report Stepper::report() {
  report_failures();
  const int64_t steps = steps_since_report_.item<int64_t>();
  const double count = static_cast<double>(std::max<int64_t>(steps, 1));
  const Report report{losses_.item<double>() / count, norms_.item<double>() / count, steps};
  losses_.zero_();
  norms_.zero_();
  steps_since_report_.zero_();
  return report;
}

NamedTensors Stepper::report_state() const {
  return {{"loss", losses_}, {"gradient_norm", norms_}, {"steps", steps_since_report_}};
}

}  // namespace sinkhorn::train
