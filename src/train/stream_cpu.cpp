// Streams of a build without CUDA: there is only the CPU, where a step is a function call.
#include <ATen/Context.h>

#include "sinkhorn/error.h"
#include "train/device.h"

namespace sinkhorn::train {
namespace {

class CpuStream : public StepStream {
 public:
  bool can_capture() const override { return false; }
  std::unique_ptr<Graph> capture(const std::function<void()>&) override {
    throw Error("CUDA graphs need a build with CUDA");
  }
  void synchronize() override {}
};

}  // namespace

std::unique_ptr<StepStream> make_step_stream(at::Device) { return std::make_unique<CpuStream>(); }

bool cuda_graphs_built() { return false; }

std::vector<std::string> cuda_devices() {
  return std::vector<std::string>(at::hasCUDA() ? at::getNumGPUs() : 0, "CUDA device");
}

int64_t peak_memory(at::Device) { return process_peak_memory(); }

}  // namespace sinkhorn::train
