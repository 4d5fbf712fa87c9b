#include "train/device.h"

#include <ATen/Context.h>
#include <sys/resource.h>

#include <cstdlib>

#include "sinkhorn/error.h"

namespace sinkhorn::train {

at::Device pick_device(const std::string& name) {
  const bool has_cuda = at::hasCUDA() && at::getNumGPUs() > 0;
  if (name == "auto") return has_cuda ? at::Device(at::kCUDA, 0) : at::Device(at::kCPU);
  if (name == "cpu") return at::Device(at::kCPU);
  if (name.rfind("cuda", 0) != 0) {
    throw UsageError("train.device is '" + name + "'; it must be auto, cpu, cuda or cuda:N");
  }
  if (!has_cuda) throw Error("train.device is '" + name + "', but no CUDA device was found here");
  int64_t index = 0;
  if (name.size() > 4) {
    char* end = nullptr;
    index = std::strtol(name.c_str() + 5, &end, 10);
    if (name[4] != ':' || name.size() == 5 || *end != '\0' || index < 0) {
      throw UsageError("train.device is '" + name + "'; it must be auto, cpu, cuda or cuda:N");
    }
  }
  if (index >= static_cast<int64_t>(at::getNumGPUs())) {
    throw Error("train.device is '" + name + "', but there are only " +
                std::to_string(at::getNumGPUs()) + " CUDA devices");
  }
  return at::Device(at::kCUDA, static_cast<at::DeviceIndex>(index));
}

void seed_everything(uint64_t seed, at::Device device) {
  for (const at::Device d : {at::Device(at::kCPU), device}) {
    at::Generator generator = at::globalContext().defaultGenerator(d);
    const std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_current_seed(seed);
  }
}

std::unique_ptr<StepStream> make_cpu_stream() {
  class CpuStream : public StepStream {
   public:
    bool can_capture() const override { return false; }
    std::unique_ptr<Graph> capture(const std::function<void()>&) override {
      throw Error("a step on the CPU cannot be captured");
    }
  };
  return std::make_unique<CpuStream>();
}

int64_t process_peak_memory() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<int64_t>(usage.ru_maxrss) * 1024;
}

void be_deterministic() {
  // cuBLAS splits its work the same way every time only with a workspace of fixed size.
  setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", /*overwrite=*/0);
  at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);
  at::globalContext().setDeterministicFillUninitializedMemory(false);
}

}  // namespace sinkhorn::train
