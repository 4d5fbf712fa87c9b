// Streams of a build without CUDA.
#include <ATen/Context.h>

#include "train/device.h"

namespace sinkhorn::train {

std::unique_ptr<StepStream> make_step_stream(at::Device) { return make_cpu_stream(); }

bool cuda_graphs_built() { return false; }

std::vector<std::string> cuda_devices() {
  return std::vector<std::string>(at::hasCUDA() ? at::getNumGPUs() : 0, "CUDA device");
}

int64_t peak_memory(at::Device) { return process_peak_memory(); }

int64_t free_memory(at::Device) { return 0; }

}  // namespace sinkhorn::train
