// What stands between backward and the next forward pass, on all tensors of a model at once.
//
// Each is a dispatcher operator `sinkhorn::<name>` in one or few launches on float32 CUDA tensors.
// None of them waits for the device or depends on a number that the host would have to know.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "ops/autograd.h"

namespace sinkhorn::ops {

// The numbers of a record, int64 [4] on the device.
enum RecordPlace : int64_t {
  kSteps = 0,            // done
  kFailedStep = 1,       // the first whose loss or gradients were not finite; 0: none
  kFailedParameter = 2,  // the first of its gradients that was not, or
};
// what else was not: the loss; the norm of all gradients together, each of which is finite.
constexpr int64_t kLoss = -1, kWholeNorm = -2;
at::Tensor new_record(at::Device device);

// Adds a step to the record, its loss and the norm of its gradients to sums (float32 [2]). Returns
// what the gradients are to be divided by, so that their norm is at most clip: 1, or more; 1 for
// clip = 0. From the first step on that fails it is not a number, which an optimizer takes for
// "leave everything as it is", and the sums stay. loss: a scalar.
at::Tensor note_gradients(at::TensorList gradients, const at::Tensor& loss, double clip,
                          const at::Tensor& record, const at::Tensor& sums);

// to[i] = from[i], in the type of to[i].
void copy_all(at::TensorList to, at::TensorList from);

struct AdamTensors {
  std::vector<at::Tensor> parameters, gradients, exp_avgs, exp_avg_sqs;
  std::vector<at::Tensor> steps;  // float32 scalars: steps done
  std::vector<double> decays;
};

struct AdamOptions {
  double beta1, beta2, epsilon;
  at::Tensor arrived;  // int32 [1] on the device, 0: the kernel's own
};

// AdamW's step on gradients / divisor, no step where the divisor is not a number; rate and divisor
// float32 scalars on the device. Returns false, having done nothing, where no kernel covers it.
// Inline, so that an optimizer on the CPU can be linked without the operators.
inline bool adam_step(const AdamTensors& x, const at::Tensor& rate,
                      const std::optional<at::Tensor>& divisor, const AdamOptions& o) {
  using Signature =
      bool(at::TensorList, at::TensorList, at::TensorList, at::TensorList, at::TensorList,
           at::ArrayRef<double>, const at::Tensor&, const std::optional<at::Tensor>&, double,
           double, double, const at::Tensor&);
  static const auto op = find_op<Signature>("adam_step");
  return op.call(x.parameters, x.gradients, x.exp_avgs, x.exp_avg_sqs, x.steps, x.decays, rate,
                 divisor, o.beta1, o.beta2, o.epsilon, o.arrived);
}

}  // namespace sinkhorn::ops
