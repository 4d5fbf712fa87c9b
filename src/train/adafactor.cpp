// Adafactor (Shazeer & Stern, 2018) with the settings of Tensor2Tensor.
//
// Adam divides the gradient G by the root of V, a running mean of G^2. For a matrix [n, m], V is
// taken to be of rank one, V = R C / mean(R), with R [n] the mean of each row and C [m] that of
// each column: of all rank-one matrices with V's row and column sums, the only one, and the nearest
// in generalised Kullback-Leibler divergence. At step t = 1, 2, ...
//   rho = t^-0.8                                 1 - beta2_t; 1 at first, so that nothing is biased
//   R  <- R + rho (mean_columns(G^2 + eps1) - R)
//   C  <- C + rho (mean_rows(G^2 + eps1) - C)
//   U   = G / sqrt(R C / mean(R))                vectors: U = G / sqrt(V), V kept whole
//   U  <- U / max(1, rms(U) / d)                 update clipping: no step much above the usual one
//   P  <- P - rate * max(eps2, rms(P)) * U       a step relative to the parameter's size
// with eps1 = 1e-30, eps2 = 1e-3, d = 1 and no momentum. Of tensors with more than two dimensions,
// the last two are the matrix. Before its first gradient a parameter's R, C and V are 0; one that
// misses gradients keeps them, and t counts on. The maps of queries, keys and values are one matrix
// here: they share C, rms(P) and rms(U), where Tensor2Tensor keeps three variables.
#include "train/adafactor.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

namespace sinkhorn::train {

namespace {

constexpr double kDecayPower = -0.8;
constexpr double kGradientEpsilon = 1e-30;
constexpr double kScaleEpsilon = 1e-3;
constexpr double kLargestRms = 1.0;

at::Tensor rms(const at::Tensor& values) { return values.square().mean().sqrt(); }

// Of values that nobody else holds: zeros where the step is not to be made.
at::Tensor unless(const at::Tensor& held, at::Tensor values) {
  return values.masked_fill_(held, 0);
}

}  // namespace

Adafactor::Adafactor(const NamedTensors& parameters) {
  for (const auto& [name, parameter] : parameters) {
    Slot slot{name, parameter, {}, {}, {}};
    const at::Tensor values = parameter.detach();
    if (values.dim() >= 2) {
      slot.rows = at::zeros_like(values.sum(-1));
      slot.columns = at::zeros_like(values.sum(-2));
    } else {
      slot.full = at::zeros_like(values);
    }
    slots_.push_back(std::move(slot));
  }
  // float64, so that t^-0.8 is as exact as any parameter.
  step_ = at::zeros({}, parameters.at(0).second.options().dtype(at::kDouble));
}

void Adafactor::step(const at::Tensor& rate, const std::optional<at::Tensor>& divisor) {
  const at::NoGradGuard no_grad;
  if (divisor.has_value()) {
    std::vector<at::Tensor> gradients;
    for (const Slot& slot : slots_) {
      if (slot.parameter.grad().defined()) gradients.push_back(slot.parameter.grad());
    }
    at::_foreach_div_(gradients, *divisor);
  }
  const at::Tensor held = at::isnan(divisor.value_or(at::ones_like(rate)));
  step_.add_(held.logical_not());
  const at::Tensor mixing =
      unless(held, step_.pow(kDecayPower)).to(slots_[0].parameter.scalar_type());
  for (const Slot& slot : slots_) {
    if (!slot.parameter.grad().defined()) continue;
    const at::Tensor update = scaled_gradient(slot, mixing, held);
    const at::Tensor clip = (rms(update) / kLargestRms).clamp_min_(1.0);
    const at::Tensor scale = rms(slot.parameter).clamp_min_(kScaleEpsilon);
    slot.parameter.sub_(unless(held, update.mul_(rate * scale / clip)));
  }
}

at::Tensor Adafactor::scaled_gradient(const Slot& slot, const at::Tensor& mixing,
                                      const at::Tensor& held) {
  const at::Tensor& gradient = slot.parameter.grad();
  const at::Tensor squares = unless(held, gradient.square().add_(kGradientEpsilon));
  if (slot.full.defined()) {
    slot.full.lerp_(squares, mixing);
    return gradient * slot.full.rsqrt();
  }
  slot.rows.lerp_(squares.mean(-1), mixing);
  slot.columns.lerp_(squares.mean(-2), mixing);
  const at::Tensor row_factor = (slot.rows / slot.rows.mean(-1, /*keepdim=*/true)).rsqrt_();
  return (gradient * row_factor.unsqueeze(-1)).mul_(slot.columns.rsqrt().unsqueeze(-2));
}

NamedTensors Adafactor::state() {
  NamedTensors state = {{"step", step_}};
  for (const Slot& slot : slots_) {
    if (slot.full.defined()) {
      state.emplace_back("second_moment/" + slot.name, slot.full);
    } else {
      state.emplace_back("row_moment/" + slot.name, slot.rows);
      state.emplace_back("column_moment/" + slot.name, slot.columns);
    }
  }
  return state;
}

}  // namespace sinkhorn::train
