// Adafactor: Adam's second moment in the memory of a row and a column, and steps relative to the
// size of what they change. The equations head adafactor.cpp.
#pragma once

#include "train/optimizer.h"

namespace sinkhorn::train {

class Adafactor : public Optimizer {
 public:
  explicit Adafactor(const NamedTensors& parameters);
  void step(const at::Tensor& rate, const std::optional<at::Tensor>& divisor) override;
  NamedTensors state() override;

 private:
  struct Slot {
    std::string name;
    at::Tensor parameter;
    at::Tensor rows, columns;  // matrices: means of g^2 over columns, over rows
    at::Tensor full;           // vectors and scalars
  };
  // held: whether the step is not to be made.
  static at::Tensor scaled_gradient(const Slot& slot, const at::Tensor& mixing,
                                    const at::Tensor& held);

  std::vector<Slot> slots_;
  at::Tensor step_;
};

}  // namespace sinkhorn::train
