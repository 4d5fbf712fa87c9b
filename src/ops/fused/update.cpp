#include "ops/fused/update.h"

#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/argmax.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>

#include <limits>

#include "kernels/cuda/optimizer.h"
#include "ops/fused/kernel_call.h"

namespace sinkhorn::ops {
namespace {

constexpr int64_t kRecordSize = sizeof(cuda::StepRecord) / sizeof(int64_t);

// A number that a kernel reads or counts in.
bool is_scalar(const Tensor& x, at::ScalarType type, at::Device device) {
  return x.numel() == 1 && x.scalar_type() == type && x.device() == device;
}

bool are_plain(at::TensorList list, at::ScalarType type, at::Device device) {
  return std::all_of(list.begin(), list.end(), [&](const Tensor& x) {
    return x.scalar_type() == type && x.device() == device && is_plain(x);
  });
}

// In any layout: aligned() makes what a kernel reads.
bool are_floats(at::TensorList list, at::Device device) {
  return std::all_of(list.begin(), list.end(), [&](const Tensor& x) {
    return x.scalar_type() == at::kFloat && x.device() == device && x.layout() == at::kStrided;
  });
}

std::vector<Tensor> all_aligned(at::TensorList list) {
  std::vector<Tensor> plain;
  plain.reserve(list.size());
  for (const Tensor& x : list) plain.push_back(aligned(x));
  return plain;
}

bool same_sizes(at::TensorList a, at::TensorList b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const Tensor& x, const Tensor& y) { return x.sizes() == y.sizes(); });
}

// --- the note of a step ---

void check_note(at::TensorList gradients, const Tensor& loss, double clip, const Tensor& record,
                const Tensor& sums) {
  const std::string_view op = "note_gradients";
  TORCH_CHECK_VALUE(!gradients.empty(), "note_gradients: no gradients");
  TORCH_CHECK_VALUE(clip >= 0, "note_gradients: clip must be at least 0, got ", clip);
  TORCH_CHECK_VALUE(loss.dim() == 0, "note_gradients: loss must be a scalar, got ", loss.sizes());
  check_device(op, loss, "record", record);
  check_device(op, loss, "sums", sums);
  check_sizes(op, "record", record, {kRecordSize}, "[4]");
  check_sizes(op, "sums", sums, {2}, "[2]");
  TORCH_CHECK_VALUE(record.scalar_type() == at::kLong && record.is_contiguous() &&
                        sums.scalar_type() == at::kFloat && sums.is_contiguous(),
                    "note_gradients: record must be int64 and sums float32, both contiguous, got ",
                    record.scalar_type(), " and ", sums.scalar_type());
}

Tensor note_by_kernel(at::TensorList gradients, const Tensor& loss, double clip,
                      const Tensor& record, const Tensor& sums) {
  const c10::DeviceGuard guard(loss.device());
  const std::vector<Tensor> plain = all_aligned(gradients);
  std::vector<cuda::Gradient> list;
  list.reserve(plain.size());
  for (const Tensor& x : plain) list.push_back({x.const_data_ptr<float>(), x.numel()});
  const Tensor divisor = at::empty({}, sums.options());
  cuda::NoteParams p;
  p.gradients = list.data();
  p.count = static_cast<int>(list.size());
  p.loss = loss.const_data_ptr<float>();
  p.clip = static_cast<float>(clip);
  p.record = static_cast<cuda::StepRecord*>(record.data_ptr());
  p.sums = sums.data_ptr<float>();
  p.divisor = divisor.data_ptr<float>();
  const Tensor scratch = scratch_of(sums, cuda::note_scratch(p));
  p.scratch = scratch.data_ptr();
  cuda::launch_note_gradients(p, current_stream(sums));
  return divisor;
}

Tensor note_gradients_op(at::TensorList gradients, const Tensor& loss, double clip,
                         const Tensor& record, const Tensor& sums) {
  const at::NoGradGuard no_grad;
  check_note(gradients, loss, clip, record, sums);
  if (loss.is_cuda() && cuda::covers_updates() && is_scalar(loss, at::kFloat, loss.device()) &&
      are_floats(gradients, loss.device())) {
    return note_by_kernel(gradients, loss, clip, record, sums);
  }
  const Tensor norms = at::stack(at::_foreach_norm(gradients));
  const Tensor norm = norms.norm();
  const Tensor step = record[kSteps].add_(1);
  Tensor failed_step = record[kFailedStep], failed_parameter = record[kFailedParameter];
  const Tensor fine = at::isfinite(norm).logical_and(at::isfinite(loss));
  const Tensor first = fine.logical_not().logical_and(failed_step == 0);
  const Tensor bad = at::isfinite(norms).logical_not();
  const Tensor gradient = at::where(bad.any(), at::argmax(bad.to(at::kInt)), kWholeNorm);
  const Tensor index = at::where(at::isfinite(loss), gradient, kLoss);
  failed_parameter.copy_(at::where(first, index, failed_parameter));
  failed_step.copy_(at::where(first, step, failed_step));
  const Tensor failed = failed_step != 0;
  sums[0].add_(at::where(failed, 0, loss));
  sums[1].add_(at::where(failed, 0, norm));
  const Tensor divisor = clip > 0 ? ((norm + 1e-6) / clip).clamp_min(1.0) : at::ones_like(norm);
  return at::where(failed, std::numeric_limits<double>::quiet_NaN(), divisor);
}

// --- Adam ---

bool adam_step_op(at::TensorList parameters, at::TensorList gradients, at::TensorList exp_avgs,
                  at::TensorList exp_avg_sqs, at::TensorList steps, at::ArrayRef<double> decays,
                  const Tensor& rate, const OptionalTensor& divisor, double beta1, double beta2,
                  double epsilon, const Tensor& arrived) {
  TORCH_CHECK_VALUE(same_sizes(parameters, gradients) && same_sizes(parameters, exp_avgs) &&
                        same_sizes(parameters, exp_avg_sqs) && steps.size() == parameters.size() &&
                        decays.size() == parameters.size(),
                    "adam_step: every parameter needs a gradient and moments of its own sizes, a "
                    "step and a decay");
  const at::Device device = rate.device();
  const auto is_number = [&](const Tensor& x) { return is_scalar(x, at::kFloat, device); };
  if (!rate.is_cuda() || !cuda::covers_updates() || !is_number(rate) ||
      (divisor.has_value() && !is_number(*divisor)) || !is_scalar(arrived, at::kInt, device) ||
      !std::all_of(steps.begin(), steps.end(), is_number) || !are_floats(gradients, device) ||
      !are_plain(parameters, at::kFloat, device) || !are_plain(exp_avgs, at::kFloat, device) ||
      !are_plain(exp_avg_sqs, at::kFloat, device)) {
    return false;
  }
  const c10::DeviceGuard guard(device);
  const std::vector<Tensor> plain = all_aligned(gradients);
  std::vector<cuda::AdamTensor> list;
  list.reserve(plain.size());
  for (size_t i = 0; i < plain.size(); ++i) {
    list.push_back({parameters[i].data_ptr<float>(), plain[i].const_data_ptr<float>(),
                    exp_avgs[i].data_ptr<float>(), exp_avg_sqs[i].data_ptr<float>(),
                    steps[i].data_ptr<float>(), parameters[i].numel(),
                    static_cast<float>(decays[i])});
    // A graph that saved the old values for its backward must notice.
    parameters[i].unsafeGetTensorImpl()->bump_version();
  }
  cuda::AdamParams p;
  p.tensors = list.data();
  p.count = static_cast<int>(list.size());
  p.rate = rate.const_data_ptr<float>();
  if (divisor.has_value()) p.divisor = divisor->const_data_ptr<float>();
  p.beta1 = static_cast<float>(beta1);
  p.beta2 = static_cast<float>(beta2);
  p.epsilon = static_cast<float>(epsilon);
  p.arrived = static_cast<unsigned*>(arrived.data_ptr());
  cuda::launch_adam(p, current_stream(rate));
  return true;
}

// --- copies ---

void copy_all_op(at::TensorList to, at::TensorList from) {
  TORCH_CHECK_VALUE(same_sizes(to, from), "copy_all: `to` and `from` must have the same sizes");
  if (to.empty()) return;
  const at::NoGradGuard no_grad;
  const at::Device device = to[0].device();
  const at::ScalarType type = to[0].scalar_type();
  if (!device.is_cuda() || !cuda::covers_updates() ||
      (type != at::kBFloat16 && type != at::kHalf) || !are_plain(to, type, device) ||
      !are_plain(from, at::kFloat, device)) {
    at::_foreach_copy_(to, from);
    return;
  }
  const c10::DeviceGuard guard(device);
  std::vector<cuda::Copy> list;
  list.reserve(to.size());
  for (size_t i = 0; i < to.size(); ++i) {
    list.push_back({from[i].const_data_ptr<float>(), to[i].data_ptr(), to[i].numel()});
    // A graph that saved the old copy for its backward must notice.
    if (!to[i].is_inference()) to[i].unsafeGetTensorImpl()->bump_version();
  }
  cuda::launch_copies(list.data(), static_cast<int>(list.size()), kernel_type(type),
                      current_stream(to[0]));
}

}  // namespace

Tensor new_record(at::Device device) {
  return at::tensor({0, 0, -1, 0}, at::TensorOptions(at::kLong)).to(device);
}

Tensor note_gradients(at::TensorList gradients, const Tensor& loss, double clip,
                      const Tensor& record, const Tensor& sums) {
  static const auto op = find_op<decltype(note_gradients_op)>("note_gradients");
  return op.call(gradients, loss, clip, record, sums);
}

void copy_all(at::TensorList to, at::TensorList from) {
  static const auto op = find_op<decltype(copy_all_op)>("copy_all");
  op.call(to, from);
}

TORCH_LIBRARY_IMPL(sinkhorn, CompositeImplicitAutograd, m) {
  m.impl("note_gradients", note_gradients_op);
  m.impl("adam_step", adam_step_op);
  m.impl("copy_all", copy_all_op);
}

}  // namespace sinkhorn::ops
