// A finished (or running) run in use: evaluating it and looking into it. No Torch in this header.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

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

// One head's relaxed permutation of one input.
struct SortPicture {
  std::string stack;  // encoder, decoder
  int64_t layer = 0, head = 0, blocks = 0;
  std::vector<float> r;  // [blocks, blocks], row = destination
  double own = 0;        // mean share of the own block, over rows that read something
  double previous = 0;   // of the block before
  double largest = 0;    // of a row's largest entry: how sharp
};

struct Inspection {
  std::string checkpoint;
  int64_t step = 0, parameter_count = 0;
  std::vector<std::pair<std::string, std::string>> parameters;  // name, shape
  std::string input;                                            // as a person reads it
  std::vector<SortPicture> sorts;
};

// `text`: an input of the user's own; "": example number `example` of the test split.
Inspection inspect_run(const RunConfig& config, const std::string& checkpoint,
                       const std::string& text, int64_t example);

}  // namespace sinkhorn::train
