#include "train/environment.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <sys/utsname.h>
#include <torch/version.h>

#include <thread>

#include "sinkhorn/ops.h"
#include "train/device.h"

namespace sinkhorn::train {

std::vector<std::pair<std::string, std::string>> environment() {
  std::vector<std::pair<std::string, std::string>> facts;
  facts.emplace_back("version", SINKHORN_VERSION);
  facts.emplace_back("commit", SINKHORN_COMMIT);
  facts.emplace_back("compiler", __VERSION__);
  facts.emplace_back("torch", TORCH_VERSION);
  utsname system{};
  if (uname(&system) == 0) {
    facts.emplace_back("system",
                       std::string(system.sysname) + " " + system.release + " " + system.machine);
  }
  facts.emplace_back("cpu kernels", cpu_form());
  facts.emplace_back("cores", std::to_string(std::thread::hardware_concurrency()));
  facts.emplace_back("threads", std::to_string(at::get_num_threads()));
  facts.emplace_back("cuda graphs", cuda_graphs_built() ? "built in" : "not in this build");
  const std::vector<std::string> devices = cuda_devices();
  facts.emplace_back("cuda devices", std::to_string(devices.size()));
  for (size_t i = 0; i < devices.size(); ++i) {
    facts.emplace_back("cuda:" + std::to_string(i), devices[i]);
  }
  return facts;
}

std::string environment_fact(const std::string& name) {
  for (const auto& [key, value] : environment()) {
    if (key == name) return value;
  }
  return "";
}

void check_device(const std::string& device) { pick_device(device); }

std::optional<int64_t> free_gpu_memory(const std::string& device) {
  const at::Device picked = pick_device(device);
  if (!picked.is_cuda()) return std::nullopt;
  return free_memory(picked);
}

}  // namespace sinkhorn::train
