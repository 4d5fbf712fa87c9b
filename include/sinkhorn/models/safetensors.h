// Tensors in a file in the safetensors format: an 8-byte length, a JSON header, the bytes. Reading
// is memory-mapped; a truncated, overlapping or foreign file is refused with its name and the
// reason.
#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace sinkhorn::models {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;
using Metadata = std::map<std::string, std::string>;

// Writes beside path, syncs file and folder, renames: the old file or the new one, never half.
void save_safetensors(const std::filesystem::path& path, const NamedTensors& tensors,
                      const Metadata& metadata = {});

struct SafeTensors {
  std::map<std::string, at::Tensor> tensors;  // views of the mapped file; a write stays in memory
  Metadata metadata;
};
SafeTensors load_safetensors(const std::filesystem::path& path);

}  // namespace sinkhorn::models
