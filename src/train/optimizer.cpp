#include "train/optimizer.h"

#include <ATen/core/Tensor.h>

#include <sstream>

#include "sinkhorn/error.h"
#include "train/adafactor.h"
#include "train/adam.h"

namespace sinkhorn::train {

namespace {

void check(bool good, const char* key, double found, const char* expected) {
  if (good) return;
  std::ostringstream message;
  message << "optimizer." << key << ": " << found << ", expected " << expected;
  throw UsageError(message.str());
}

// Written so that NaN is refused.
void check_numbers(const OptimizerConfig& config) {
  check(config.beta1 >= 0 && config.beta1 < 1, "beta1", config.beta1, "at least 0 and below 1");
  check(config.beta2 >= 0 && config.beta2 < 1, "beta2", config.beta2, "at least 0 and below 1");
  check(config.epsilon >= 0, "epsilon", config.epsilon, "at least 0");
  check(config.weight_decay >= 0, "weight_decay", config.weight_decay, "at least 0");
}

// The fused kernels take one type and plain strides.
void check_parameters(const NamedTensors& parameters) {
  if (parameters.empty()) throw Error("optimizer: no parameters to train");
  const at::ScalarType type = parameters[0].second.scalar_type();
  if (type != at::kFloat && type != at::kDouble) {
    throw Error("optimizer: parameters of type " + std::string(at::toString(type)) +
                ", expected float32 or float64 (master weights)");
  }
  for (const auto& [name, parameter] : parameters) {
    if (parameter.scalar_type() != type || !parameter.is_contiguous()) {
      throw Error("optimizer: parameter '" + name + "' has another type than '" +
                  parameters[0].first + "' or is not contiguous");
    }
  }
}

}  // namespace

std::unique_ptr<Optimizer> make_optimizer(const OptimizerConfig& config,
                                          const NamedTensors& parameters) {
  check_numbers(config);
  check_parameters(parameters);
  if (config.name == "adam" || config.name == "adamw") {
    return std::make_unique<Adam>(config, parameters);
  }
  if (config.name == "adafactor") return std::make_unique<Adafactor>(parameters);
  throw UsageError("optimizer.name: '" + config.name + "', expected adamw, adam or adafactor");
}

}  // namespace sinkhorn::train
