// The report: one HTML file that needs nothing but itself.
#pragma once

#include <string>
#include <vector>

#include "report/results.h"
#include "report/run.h"

namespace sinkhorn::report {

struct Page {
  std::string written;                // when and by what
  std::vector<std::string> problems;  // what was left out and why, one line each
  std::vector<ResultTable> tables;
  std::vector<Run> runs;
};

std::string page_html(const Page& page);

}  // namespace sinkhorn::report
