// One step of training: forward, backward, exchange, clipping, update. Nothing in it waits for the
// device; what the host wants to know is left in tensors and read when it asks.
#pragma once

#include <c10/core/Stream.h>

#include <map>
#include <memory>
#include <optional>
#include <string>

#include "sinkhorn/models/models.h"
#include "train/config.h"
#include "train/device.h"
#include "train/inputs.h"
#include "train/optimizer.h"

namespace sinkhorn::train {

class Stepper {
 public:
  // aside: small weights' gradients on a stream of their own, on CUDA; the same bits without.
  Stepper(models::Model& model, const RunConfig& config, at::Device device, bool aside = true);

  // Trains on the batches of one step (more than one: gradients are accumulated).
  void step(const std::vector<Prepared>& batches, double rate);

  // Since the last call: mean loss and gradient norm over the steps. Waits for the device.
  struct Report {
    double loss = 0, gradient_norm = 0;
    int64_t steps = 0;
  };
  Report report();

  // The first step whose loss or gradients were not finite: neither it nor those after it changed
  // anything. Waits for the device.
  struct Failure {
    int64_t step;
    std::string what;  // "the loss", "the gradient of layers.0..."
  };
  std::optional<Failure> failure() const;
  // Forgets a failure, and the steps beyond `steps`, which changed nothing.
  void go_back(int64_t steps);

  // What the next report will sum up, live: a checkpoint keeps it, so that a resumed run logs the
  // same means.
  NamedTensors report_state() const;

  int64_t steps_done() const { return steps_done_; }
  int64_t replayed_steps() const { return replayed_steps_; }  // made from a captured graph
  void set_steps_done(int64_t steps);
  Optimizer& optimizer() { return *optimizer_; }
  const NamedTensors& parameters() const { return parameters_; }
  nn::Context context() const { return context_; }

 private:
  struct Captured {
    std::vector<models::Input> inputs;
    std::unique_ptr<Graph> graph;
    int64_t eager_steps = 0;
  };
  void run(const std::vector<models::Input>& inputs);
  // These return the loss.
  at::Tensor backward(const std::vector<models::Input>& inputs);
  at::Tensor accumulate(const std::vector<models::Input>& inputs);
  void exchange_gradients();

  models::Model& model_;
  RunConfig config_;
  at::Device device_;
  nn::Context context_;
  std::unique_ptr<StepStream> stream_;
  std::optional<c10::Stream> side_stream_;  // none: nothing is done aside
  NamedTensors parameters_;
  std::vector<at::Tensor> gradients_;  // of this step, in the order of the parameters
  std::unique_ptr<Optimizer> optimizer_;
  double last_rate_ = 0;           // what rate_ holds
  at::Tensor rate_;                // a scalar on the device
  at::Tensor record_;              // ops::new_record, on the device
  at::Tensor sums_;                // [2], on the device: of losses and norms since the last report
  at::Tensor steps_since_report_;  // on the CPU
  bool capture_;
  std::map<std::string, Captured> graphs_;  // by the inputs' signature
  int64_t steps_done_ = 0, replayed_steps_ = 0;
};

}  // namespace sinkhorn::train
