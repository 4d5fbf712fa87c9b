// Adam and AdamW: on CUDA all parameters in one launch, elsewhere ATen's fused kernels.
#pragma once

#include "ops/fused/update.h"
#include "train/optimizer.h"

namespace sinkhorn::train {

// m <- m + (1 - beta1) (g - m); v <- beta2 v + (1 - beta2) g^2;
// p <- p - rate (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + epsilon), t counted per parameter.
// AdamW first takes p <- p (1 - rate * weight_decay) where decay is due.
class Adam : public Optimizer {
 public:
  Adam(const OptimizerConfig& config, const NamedTensors& parameters);
  void step(const at::Tensor& rate, const std::optional<at::Tensor>& divisor) override;
  NamedTensors state() override;

 private:
  struct Slot {
    std::string name;
    at::Tensor parameter, exp_avg, exp_avg_sq, step;
    bool decayed;
  };
  ops::AdamTensors tensors_with_gradients() const;
  void step_group(bool decayed, const at::Tensor& rate, const std::optional<at::Tensor>& divisor);

  OptimizerConfig config_;
  std::vector<Slot> slots_;
  at::Tensor arrived_;  // what the kernel counts in
};

}  // namespace sinkhorn::train
