// Optimizers on float32 (or float64) parameters. A step is free of host synchronisation and of
// host-side numbers that change, so that a CUDA graph may hold it: rate and step count are tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "sinkhorn/models/safetensors.h"
#include "train/config.h"

namespace sinkhorn::train {

using models::NamedTensors;

class Optimizer {
 public:
  virtual ~Optimizer() = default;
  // Uses each parameter's .grad(), divided by `divisor` where given; parameters without one are
  // left alone. A divisor that is not a number: all parameters and the state are. rate and divisor:
  // scalar tensors on the parameters' device, rate float32. May overwrite the gradients with what
  // they were divided to.
  virtual void step(const at::Tensor& rate,
                    const std::optional<at::Tensor>& divisor = std::nullopt) = 0;
  // The live state, names stable ("exp_avg/<parameter>", "step"); a checkpoint saves these and
  // copies back into them.
  virtual NamedTensors state() = 0;
};

std::unique_ptr<Optimizer> make_optimizer(const OptimizerConfig& config,
                                          const NamedTensors& parameters);

// The learning rate of a step (the first is 1); width is the model's d (noam).
double learning_rate(const OptimizerConfig& config, int64_t step, int64_t steps, int64_t width);

}  // namespace sinkhorn::train
