#include "reproduce/room.h"

#include <algorithm>

namespace sinkhorn::reproduce {
namespace {

constexpr int64_t kMost = 8;      // beyond that they but wait for one another
constexpr double kToSpare = 1.5;  // rows differ, and evaluation may take more than a step

}  // namespace

int64_t most_at_once(bool on_gpu, const std::string& scale, int64_t cores) {
  if (on_gpu) return std::clamp<int64_t>(cores / 2, 1, kMost);
  return scale == "smoke" ? std::clamp<int64_t>(cores, 1, kMost) : 1;
}

bool has_room(const Load& load) {
  if (load.training == 0) return false;
  const double taken = static_cast<double>(load.free_before - load.free_now);
  const double one = kToSpare * std::max(taken, 0.0) / static_cast<double>(load.training);
  return one * static_cast<double>(load.starting + 1) <= static_cast<double>(load.free_now);
}

}  // namespace sinkhorn::reproduce
