// A finished (or running) run in use: evaluating it and looking into it. No Torch in this header.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "report/run.h"
#include "tasks/metrics.h"
#include "train/config.h"

namespace sinkhorn::train {

struct EvalResult {
  std::string checkpoint;  // the file read
  int64_t step = 0;
  std::string split, data_note;
  std::vector<tasks::Figure> figures;  // the task's own metric first
  tasks::Counts counts;
};

// checkpoint: "newest", "best" or a file. The run's folder is config.train.run.
EvalResult evaluate_run(const RunConfig& config, const std::string& checkpoint,
                        const std::string& split);

struct Inspection {
  std::string checkpoint;
  int64_t step = 0, parameter_count = 0;
  std::vector<std::pair<std::string, std::vector<int64_t>>> parameters;  // name, shape
  std::string input;                                                     // as a person reads it
  report::Image input_image;                                             // where it is one
  std::vector<report::SortMatrix> sorts;
};

// `text`: an input of the user's own; "": an example of the test split, the first of the longest
// where none is named, since a short one has nothing to sort.
Inspection inspect_run(const RunConfig& config, const std::string& checkpoint,
                       const std::string& text, std::optional<int64_t> example);

// What a report shows of a model.
struct Look {
  Inspection inspection;
  std::string data_note;
  std::vector<report::Sample> samples;
};

// `samples` examples of the test split, spread evenly over it; the matrices are the last one's.
Look look_at_run(const RunConfig& config, const std::string& checkpoint, int64_t samples);

}  // namespace sinkhorn::train
