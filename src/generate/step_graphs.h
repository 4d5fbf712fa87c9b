// Steps that are captured once and replayed: on a GPU a token of a small model would be bound by
// its launches otherwise.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <memory>
#include <utility>

#include "ops/graph.h"

namespace sinkhorn::generate {

class StepGraphs {
 public:
  // What decides a step's shapes: whether blocks begin, and how much of the past is read (0: no
  // matter).
  using Shape = std::pair<bool, int64_t>;

  explicit StepGraphs(std::unique_ptr<ops::CaptureStream> stream) : stream_(std::move(stream)) {}

  // The result of f, which is the same launches for the same shape; it is overwritten by the next.
  at::Tensor run(const Shape& shape, const std::function<at::Tensor()>& f);
  // Tensors that f reads have moved.
  void forget() { captured_.clear(); }

 private:
  struct Captured {
    int eager_steps = 0;
    std::unique_ptr<ops::Graph> graph;
    at::Tensor result;
  };
  std::unique_ptr<ops::CaptureStream> stream_;
  std::map<Shape, Captured> captured_;
};

// The next power of 2 at or above `end`, at most `capacity`: so that few shapes serve all lengths.
int64_t rounded_end(int64_t end, int64_t capacity);

}  // namespace sinkhorn::generate
