// The parts of the page, each from plain data to HTML; "" where there is nothing to show.
#pragma once

#include <string>
#include <vector>

#include "report/results.h"
#include "report/run.h"

namespace sinkhorn::report {

std::string tables_section(const std::vector<ResultTable>& tables);
std::string curves_section(const std::vector<Run>& runs);
std::string speed_section(const std::vector<Run>& runs);
std::string sorting_section(const std::vector<Run>& runs);
std::string samples_section(const std::vector<Run>& runs);

// "exact_match" -> "exact match, %".
std::string figure_title(const std::string& name);

}  // namespace sinkhorn::report
