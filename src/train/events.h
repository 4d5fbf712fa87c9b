// TensorBoard event files: scalars at a step, appended as they come.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "models/files.h"

namespace sinkhorn::train {

// What the names of event files begin with.
inline constexpr std::string_view kEventsPrefix = "events.out.tfevents.";

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

struct Scalar {
  int64_t step;
  std::string tag;
  double value;
};

// Every scalar of a folder's event files, in order, less what a restart made void. A file that
// breaks off gives what it holds up to there, and its name is added to `broken`.
std::vector<Scalar> read_scalars(const std::filesystem::path& folder,
                                 std::vector<std::string>& broken);

}  // namespace sinkhorn::train
