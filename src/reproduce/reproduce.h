// Trains and evaluates the rows of a table, and keeps its results file up to date.
//
// A run lies in OUT/NAME/SCALE/ROW[.VARIANT]/seedK and is trained by a child process. What is
// finished is not run again: a run folder that says so, or a cell of a results file in OUT with the
// same configuration, whichever table it was trained for. What was interrupted is resumed.
#pragma once

#include <atomic>
#include <string>
#include <vector>

#include "reproduce/plan.h"
#include "reproduce/results.h"

namespace sinkhorn::reproduce {

// Where a program shows what happens; nothing here prints.
class Screen {
 public:
  virtual ~Screen() = default;
  virtual void line(const std::string& text) = 0;                   // to stay
  virtual void running(const std::vector<std::string>& lines) = 0;  // to be renewed
  virtual void table(const Results& results) = 0;
};

struct Outcome {
  Results results;
  std::vector<std::string> failures;  // one line each
  bool stopped = false;               // by a signal; the same command goes on
};

Outcome reproduce(const Table& table, const Options& options, const ConfigLanguage& language,
                  Screen& screen, const std::atomic<int>& stop);

}  // namespace sinkhorn::reproduce
