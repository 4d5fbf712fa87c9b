// Launches captured once and replayed, so that the host's part of a step of fixed shapes is one
// call. Memory that is allocated while capturing stays with the graph.
#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <memory>

namespace sinkhorn::ops {

class Graph {
 public:
  virtual ~Graph() = default;
  virtual void replay() = 0;  // on the current stream
};

// A stream to capture on: the default one cannot be.
class CaptureStream {
 public:
  virtual ~CaptureStream() = default;
  // Runs f there, behind what the current stream has been given and before what it is given next.
  virtual void run(const std::function<void()>& f) = 0;
  // What f launches, which does not run yet. f waits for nothing, and ran once before: libraries
  // load their kernels then.
  virtual std::unique_ptr<Graph> capture(const std::function<void()>& f) = 0;
};

// Null where nothing can be captured: another device than CUDA, or a build without it.
std::unique_ptr<CaptureStream> make_capture_stream(c10::Device device);

}  // namespace sinkhorn::ops
