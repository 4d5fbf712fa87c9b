// Where a run computes: the device, its random numbers, its stream, and CUDA graphs on it.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace sinkhorn::train {

// "cpu", "cuda", "cuda:N" or "auto" (a GPU where there is one); throws UsageError for any other
// word, Error where it is not to be had.
at::Device pick_device(const std::string& name);

// Seeds the generators that initialisation (CPU) and dropout (device) draw from.
void seed_everything(uint64_t seed, at::Device device);

// Same inputs, same bits: deterministic algorithms everywhere.
void be_deterministic();

// A sequence of kernel launches recorded once and replayed as one.
class Graph {
 public:
  virtual ~Graph() = default;
  virtual void replay() = 0;
};

// On CUDA every step runs on one stream of its own, so that a later one may be captured there.
class StepStream {
 public:
  virtual ~StepStream() = default;
  virtual bool can_capture() const = 0;
  // Records what f launches, without running it; throws where something in it cannot be recorded.
  virtual std::unique_ptr<Graph> capture(const std::function<void()>& f) = 0;
};
std::unique_ptr<StepStream> make_step_stream(at::Device device);
std::unique_ptr<StepStream> make_cpu_stream();  // where a step is a function call

bool cuda_graphs_built();

// Names of the GPUs; empty where there is none.
std::vector<std::string> cuda_devices();

// Most bytes held at once: by the device's allocator, or by the process on the CPU.
int64_t peak_memory(at::Device device);
int64_t process_peak_memory();

// Bytes that nobody holds on a GPU; 0 in a build without CUDA.
int64_t free_memory(at::Device device);
// Bytes that can still be asked for: on a GPU, or of the system; 0: unknown.
int64_t available_memory(at::Device device);

}  // namespace sinkhorn::train
