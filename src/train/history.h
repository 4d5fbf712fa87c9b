// What a run folder tells of its training: figures over steps, speed, memory. No Torch.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "report/run.h"

namespace sinkhorn::train {

struct History {
  std::vector<report::Curve> curves;
  int64_t steps = 0;                  // the last one logged
  double tokens_per_second = 0;       // median; 0: not known
  double peak_memory = 0;             // bytes, the most; 0: not known
  std::vector<std::string> problems;  // what could not be read, one line each
};

// Reads what can be read; a folder without a log gives no curves and says so.
History read_history(const std::filesystem::path& run);

}  // namespace sinkhorn::train
