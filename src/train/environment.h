// What a run runs on, in words: for `sinkhorn info` and a run folder's environment.json. No Torch
// in this header.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

namespace sinkhorn::train {

struct Fact {
  std::string name;
  std::variant<std::string, int64_t> value;  // a count is a number

  std::string text() const;
};
std::vector<Fact> environment();

// One of these facts in words; "" where there is none of that name.
std::string environment_fact(const std::string& name);

// All of them as a JSON object.
std::string environment_json();

// Throws where no run here could have this train.device: UsageError for a word that names none,
// Error for one that is not here.
void check_device(const std::string& device);

// Bytes free on the GPU that this train.device means; nothing where it means the CPU.
std::optional<int64_t> free_gpu_memory(const std::string& device);

}  // namespace sinkhorn::train
