// What a run runs on, in words: for `sinkhorn info` and a run folder's environment.json. No Torch
// in this header.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace sinkhorn::train {

std::vector<std::pair<std::string, std::string>> environment();

// One of these facts; "" where there is none of that name.
std::string environment_fact(const std::string& name);

// Throws where no run here could have this train.device: UsageError for a word that names none,
// Error for one that is not here.
void check_device(const std::string& device);

// Bytes free on the GPU that this train.device means; nothing where it means the CPU.
std::optional<int64_t> free_gpu_memory(const std::string& device);

}  // namespace sinkhorn::train
