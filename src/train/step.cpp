#include "train/step.h"

#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/autograd.h>

#include "ops/fused/fused.h"
#include "ops/fused/side_work.h"
#include "ops/fused/update.h"
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
  rate_ = at::zeros({}, floats);
  sums_ = at::zeros({2}, floats);
  record_ = ops::new_record(device);
  steps_since_report_ = at::zeros({}, at::kLong);
  // Recomputed layers are there to save memory, which side work keeps.
  if (aside && !config.model.checkpoint) side_stream_ = ops::make_side_stream(device);
  // A recomputed layer reads the generator's state, which a capture cannot.
  capture_ = config.train.graph && stream_->can_capture() && !config.model.checkpoint;
}

void Stepper::set_steps_done(int64_t steps) {
  steps_done_ = steps;
  record_[ops::kSteps].fill_(steps);
}

at::Tensor Stepper::backward(const std::vector<models::Input>& inputs) {
  // A parameter's first gradient becomes its .grad as it is: no zeros to add it to.
  for (auto& [name, parameter] : parameters_) parameter.mutable_grad() = at::Tensor();
  const nn::CopyScope copies(model_);
  at::Tensor loss;
  if (inputs.size() == 1) {
    ops::SideScope side(side_stream_);
    loss = model_.loss(inputs[0], context_);
    torch::autograd::backward({loss}, {ops::unit_gradient(loss)});
    side.join();
  } else {
    loss = accumulate(inputs);
  }
  gradients_.clear();
  for (auto& [name, parameter] : parameters_) {
    if (!parameter.grad().defined()) parameter.mutable_grad() = at::zeros_like(parameter);
    gradients_.push_back(parameter.grad());
  }
  return loss.detach();
}

at::Tensor Stepper::accumulate(const std::vector<models::Input>& inputs) {
  // Every target counts the same, in whichever of the batches it stands.
  std::vector<at::Tensor> counts;
  for (const models::Input& input : inputs) {
    const bool labels = input.targets.dim() == 1;
    counts.push_back((labels ? input.targets >= 0 : input.targets != 0).sum().to(at::kFloat));
  }
  const at::Tensor all = at::stack(counts).sum();
  at::Tensor sum = at::zeros({}, rate_.options());
  for (size_t i = 0; i < inputs.size(); ++i) {
    const at::Tensor loss = model_.loss(inputs[i], context_) * (counts[i] / all);
    torch::autograd::backward({loss}, {});
    sum.add_(loss.detach());
  }
  return sum;
}

// The one place between backward and clipping: with several machines gradients are summed here.
void Stepper::exchange_gradients() {}

void Stepper::run(const std::vector<models::Input>& inputs) {
  const at::Tensor loss = backward(inputs);
  exchange_gradients();
  const double clip = std::max(config_.optimizer.clip, 0.0);
  optimizer_->step(rate_, ops::note_gradients(gradients_, loss, clip, record_, sums_));
}

void Stepper::step(const std::vector<Prepared>& batches, double rate) {
  if (rate != last_rate_) rate_.fill_(rate);
  last_rate_ = rate;
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
    if (captured.graph != nullptr) {
      captured.graph->replay();
      ++replayed_steps_;
    } else {
      run(captured.inputs);
    }
  }
  ++steps_done_;
  steps_since_report_.add_(1);
}

std::optional<Stepper::Failure> Stepper::failure() const {
  const at::Tensor record = record_.cpu();
  const int64_t step = record[ops::kFailedStep].item<int64_t>();
  if (step == 0) return std::nullopt;
  const int64_t index = record[ops::kFailedParameter].item<int64_t>();
  const auto what = [&]() -> std::string {
    if (index == ops::kLoss) return "the loss";
    if (index == ops::kWholeNorm) return "the norm of all gradients";
    return "the gradient of " + parameters_[static_cast<size_t>(index)].first;
  };
  return Failure{step, what()};
}

void Stepper::go_back(int64_t steps) {
  steps_since_report_.sub_(steps_done_ - steps);
  record_.copy_(ops::new_record(device_));
  set_steps_done(steps);
}

Stepper::Report Stepper::report() {
  const int64_t steps = steps_since_report_.item<int64_t>();
  const double count = static_cast<double>(std::max<int64_t>(steps, 1));
  const at::Tensor sums = sums_.cpu();
  const Report report{sums[0].item<double>() / count, sums[1].item<double>() / count, steps};
  sums_.zero_();
  steps_since_report_.zero_();
  return report;
}

NamedTensors Stepper::report_state() const {
  return {{"loss", sums_[0]}, {"gradient_norm", sums_[1]}, {"steps", steps_since_report_}};
}

}  // namespace sinkhorn::train
