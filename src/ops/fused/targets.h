// What operators that read token ids or targets ask of them.
#pragma once

#include "kernels/cuda/cross_entropy.h"
#include "ops/fused/kernel_call.h"

namespace sinkhorn::ops {

inline void check_int64(std::string_view op, std::string_view name, const Tensor& x) {
  TORCH_CHECK_VALUE(x.scalar_type() == at::kLong, op, ": ", name, " must be int64, got ",
                    x.scalar_type());
}

// targets [rows] for the rows of `like`, and the share of each that is spread over all labels.
inline void check_targets(std::string_view op, const Tensor& like, const Tensor& targets,
                          double smoothing) {
  check_device(op, like, "targets", targets);
  check_sizes(op, "targets", targets, {like.sym_size(0)}, "[rows]");
  check_int64(op, "targets", targets);
  TORCH_CHECK_VALUE(smoothing >= 0.0 && smoothing <= 1.0, op,
                    ": smoothing must lie in [0, 1], got ", smoothing);
}

// Whether the kernels take the cross-entropy of logits [rows of x, labels] in the type of x.
inline bool covers_cross_entropy(const Tensor& x, const c10::SymInt& labels) {
  if (!x.is_cuda() || !is_kernel_type(x.scalar_type())) return false;
  const auto rows = x.sym_size(0).maybe_as_int(), count = labels.maybe_as_int();
  return rows.has_value() && count.has_value() && cuda::covers_cross_entropy(*rows, *count);
}

}  // namespace sinkhorn::ops
