#include "train/device.h"

#include <ATen/Context.h>
#include <sys/resource.h>

#include <charconv>
#include <cstdlib>
#include <fstream>
#include <string>

#include "sinkhorn/error.h"

namespace sinkhorn::train {

namespace {

// The number of a GPU by its word: cuda, cuda:0, ...
int64_t gpu_number(const std::string& name) {
  if (name == "cuda") return 0;
  int64_t number = -1;
  const char* end = name.data() + name.size();
  if (name.starts_with("cuda:")) {
    const auto [stop, error] = std::from_chars(name.data() + 5, end, number);
    if (error == std::errc() && stop == end && number >= 0) return number;
  }
  throw UsageError("device '" + name + "'; expected auto, cpu, cuda or cuda:N");
}

}  // namespace

at::Device pick_device(const std::string& name) {
  const int64_t there = at::hasCUDA() ? static_cast<int64_t>(at::getNumGPUs()) : 0;
  if (name == "auto") return there > 0 ? at::Device(at::kCUDA, 0) : at::Device(at::kCPU);
  if (name == "cpu") return at::Device(at::kCPU);
  const int64_t number = gpu_number(name);
  if (there == 0) {
    throw Error("device '" + name + "', but no CUDA device was found here; expected auto or cpu");
  }
  if (number >= there) {
    throw Error("device '" + name + "', but there are only " + std::to_string(there) +
                " CUDA devices");
  }
  return at::Device(at::kCUDA, static_cast<at::DeviceIndex>(number));
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

int64_t available_memory(at::Device device) {
  if (device.is_cuda()) return free_memory(device);
  std::ifstream facts("/proc/meminfo");
  for (std::string line; std::getline(facts, line);) {
    const std::string name = "MemAvailable:";
    if (line.starts_with(name)) return std::stoll(line.substr(name.size())) * 1024;
  }
  return 0;
}

void be_deterministic() {
  // cuBLAS splits its work the same way every time only with a workspace of fixed size.
  setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", /*overwrite=*/0);
  at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);
  at::globalContext().setDeterministicFillUninitializedMemory(false);
}

}  // namespace sinkhorn::train
