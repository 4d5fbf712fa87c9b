#include <algorithm>
#include <cmath>
#include <numbers>

#include "sinkhorn/error.h"
#include "train/optimizer.h"

namespace sinkhorn::train {

double learning_rate(const OptimizerConfig& config, int64_t step, int64_t steps, int64_t width) {
  const double t = static_cast<double>(step);
  const double warmup = static_cast<double>(std::max<int64_t>(config.warmup, 0));
  if (config.schedule == "noam") {
    const double shape = std::min(std::pow(t, -0.5), t * std::pow(warmup, -1.5));
    return config.rate * 2.0 / std::sqrt(static_cast<double>(width)) * shape;
  }
  if (config.schedule == "rsqrt") return config.rate / std::sqrt(std::max(t, warmup));

  // Where the decay stands: 0 at the end of the warm-up, 1 at the last step.
  const double length = static_cast<double>(steps) - warmup;
  const double progress = length > 0 ? std::clamp((t - warmup) / length, 0.0, 1.0) : 0.0;
  double share = 1.0;  // of what lies between the peak and final_rate
  if (config.schedule == "linear") {
    share = 1.0 - progress;
  } else if (config.schedule == "cosine") {
    share = 0.5 * (1.0 + std::cos(std::numbers::pi * progress));
  } else if (config.schedule != "constant") {
    throw UsageError("optimizer.schedule: '" + config.schedule +
                     "', expected constant, linear, cosine, noam or rsqrt");
  }
  const double rise = t < warmup ? t / warmup : 1.0;
  return config.rate * rise * (config.final_rate + (1.0 - config.final_rate) * share);
}

}  // namespace sinkhorn::train
