// TensorBoard event files: scalars at a step, appended as they come.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "models/files.h"

namespace sinkhorn::train {

class EventFile {
 public:
  // Begins a file in the folder that sorts behind those already there, as TensorBoard reads them in
  // that order. With restart_step, what they hold from that step on is void.
  EventFile(const std::filesystem::path& folder, std::optional<int64_t> restart_step);

  void add_scalars(int64_t step, const std::vector<std::pair<std::string, double>>& scalars);
  void sync() { file_.sync(); }

 private:
  void add_record(const std::string& event);

  models::OutputFile file_;
};

}  // namespace sinkhorn::train
