#include "generate/step_graphs.h"

#include <algorithm>

namespace sinkhorn::generate {
namespace {

// Steps of a shape that run as they are before one is captured: libraries load kernels and allocate
// workspaces then, and weights are copied into the type of the products.
constexpr int kEagerSteps = 2;
constexpr int64_t kLeastEnd = 256;

}  // namespace

at::Tensor StepGraphs::run(const Shape& shape, const std::function<at::Tensor()>& f) {
  Captured& step = captured_[shape];
  if (step.graph == nullptr && step.eager_steps < kEagerSteps) {
    ++step.eager_steps;
    at::Tensor result;
    stream_->run([&] { result = f(); });
    return result;
  }
  if (step.graph == nullptr) {
    step.graph = stream_->capture([&] { step.result = f(); });
  }
  step.graph->replay();
  return step.result;
}

int64_t rounded_end(int64_t end, int64_t capacity) {
  int64_t rounded = kLeastEnd;
  while (rounded < end) rounded *= 2;
  return std::min(rounded, capacity);
}

}  // namespace sinkhorn::generate
