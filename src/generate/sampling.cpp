#include "generate/sampling.h"

#include <ATen/core/PhiloxRNGEngine.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <limits>
#include <string>

#include "sinkhorn/error.h"

namespace sinkhorn::generate {
namespace {

constexpr double kWhole = 0x1p52;  // the weights of a row add up to about this
// Options are float64, scores may be float32: bounds in which both stay normal, finite numbers. A
// penalty also leaves its scores room to do so; nobody can tell it from a stronger one.
constexpr double kLowest = std::numeric_limits<float>::min();
constexpr double kHighest = std::numeric_limits<float>::max();
constexpr double kStrongestPenalty = 1e30;

at::Tensor weights_of(const at::Tensor& scores) {
  return at::softmax(scores, -1, at::kDouble).mul_(kWhole).round_().to(at::kLong);
}

[[noreturn]] void refuse(const char* name, double value, const char* expected) {
  std::string number = std::to_string(value);
  number.erase(number.find_last_not_of('0') + 1);
  if (number.ends_with('.')) number.pop_back();
  throw UsageError(std::string(name) + " is " + number + "; it must be " + expected);
}

}  // namespace

void check_sampling(const SamplingOptions& options) {
  const auto check = [](bool holds, const char* name, double value, const char* expected) {
    if (!holds) refuse(name, value, expected);
  };
  check(std::isfinite(options.temperature) && options.temperature >= 0, "temperature",
        options.temperature, "0 (greedy) or more");
  check(options.top_k >= 0, "top_k", static_cast<double>(options.top_k), "0 (all) or more");
  check(options.top_p > 0 && options.top_p <= 1, "top_p", options.top_p, "above 0 and at most 1");
  check(std::isfinite(options.repetition_penalty) && options.repetition_penalty > 0,
        "repetition_penalty", options.repetition_penalty, "above 0; 1 is none");
}

at::Tensor token_mask(const std::vector<int64_t>& ids, int64_t vocab, at::Device device) {
  if (ids.empty()) return {};
  at::Tensor mask = at::zeros({vocab}, at::kBool);
  for (const int64_t id : ids) {
    if (id < 0 || id >= vocab) {
      throw UsageError("token " + std::to_string(id) + " is none of the model's " +
                       std::to_string(vocab));
    }
    mask.data_ptr<bool>()[id] = true;
  }
  return mask.to(device);
}

at::Tensor penalised(const at::Tensor& scores, const at::Tensor& seen, const at::Tensor& penalty) {
  const at::Tensor factor =
      penalty.clamp(1 / kStrongestPenalty, kStrongestPenalty).to(scores.scalar_type());
  return at::where(seen, at::where(scores > 0, scores / factor, scores * factor), scores);
}

Candidates candidates(const at::Tensor& scores, const Filters& filters) {
  // The largest score becomes 0, which no temperature, however low, can turn into NaN.
  at::Tensor cooled = scores - scores.amax(-1, true);
  cooled = cooled / filters.temperature.clamp(kLowest, kHighest).to(cooled.scalar_type());
  if (!filters.truncates) return {weights_of(cooled), {}};
  auto [sorted, ids] = cooled.sort(/*stable=*/true, -1, /*descending=*/true);
  const at::Tensor rank = at::arange(scores.size(1), filters.top_k.options());
  const at::Tensor beyond_k = (rank >= filters.top_k).logical_and_(filters.top_k > 0);
  at::Tensor weights = weights_of(sorted.masked_fill(beyond_k, -INFINITY));
  // A token stays if those before it do not yet reach p.
  const at::Tensor reached = weights.cumsum(-1), whole = reached.slice(1, -1).to(at::kDouble);
  const at::Tensor beyond_p = (reached - weights).to(at::kDouble) >= filters.top_p * whole;
  return {weights.masked_fill(beyond_p, 0), ids};
}

at::Tensor draw(const Candidates& candidates, const at::Tensor& uniform) {
  const at::Tensor reached = candidates.weights.cumsum(-1), whole = reached.slice(1, -1);
  const at::Tensor point = at::minimum((uniform * whole.to(at::kDouble)).to(at::kLong), whole - 1);
  // A row of NaN may lead past the end, which a device would not survive.
  const at::Tensor place = (reached <= point).sum(-1, true).clamp_max_(reached.size(1) - 1);
  return (candidates.ids.defined() ? candidates.ids.gather(1, place) : place).squeeze(1);
}

void check_score(double log_probability) {
  if (!std::isnan(log_probability)) return;
  throw Error("the model's scores of the next token are not numbers: it cannot generate");
}

double uniform_number(uint64_t seed, uint64_t stream, uint64_t position) {
  at::Philox4_32 random(seed, stream, position);
  const uint64_t high = random(), low = random();
  return static_cast<double>((high << 32 | low) >> 11) * 0x1p-53;
}

}  // namespace sinkhorn::generate
