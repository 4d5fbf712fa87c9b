#include "train/environment.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <sys/utsname.h>
#include <torch/version.h>

#include <nlohmann/json.hpp>
#include <thread>

#include "sinkhorn/ops.h"
#include "train/device.h"

namespace sinkhorn::train {

std::string Fact::text() const {
  const auto* words = std::get_if<std::string>(&value);
  return words != nullptr ? *words : std::to_string(std::get<int64_t>(value));
}

std::vector<Fact> environment() {
  std::vector<Fact> facts{{"version", SINKHORN_VERSION},
                          {"commit", SINKHORN_COMMIT},
                          {"compiler", __VERSION__},
                          {"torch", TORCH_VERSION}};
  utsname system{};
  if (uname(&system) == 0) {
    facts.push_back(
        {"system", std::string(system.sysname) + " " + system.release + " " + system.machine});
  }
  facts.push_back({"cpu kernels", cpu_form()});
  facts.push_back({"cores", int64_t{std::thread::hardware_concurrency()}});
  facts.push_back({"threads", int64_t{at::get_num_threads()}});
  facts.push_back({"cuda graphs", cuda_graphs_built() ? "built in" : "not in this build"});
  const std::vector<std::string> devices = cuda_devices();
  facts.push_back({"cuda devices", static_cast<int64_t>(devices.size())});
  for (size_t i = 0; i < devices.size(); ++i) {
    facts.push_back({"cuda:" + std::to_string(i), devices[i]});
  }
  return facts;
}

std::string environment_fact(const std::string& name) {
  for (const Fact& fact : environment()) {
    if (fact.name == name) return fact.text();
  }
  return "";
}

std::string environment_json() {
  nlohmann::ordered_json object;
  for (const Fact& fact : environment()) {
    std::visit([&](const auto& value) { object[fact.name] = value; }, fact.value);
  }
  return object.dump(2) + "\n";
}

void check_device(const std::string& device) { pick_device(device); }

std::optional<int64_t> free_gpu_memory(const std::string& device) {
  const at::Device picked = pick_device(device);
  if (!picked.is_cuda()) return std::nullopt;
  return free_memory(picked);
}

}  // namespace sinkhorn::train
