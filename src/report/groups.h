// Runs whose figures compare, under one heading.
#pragma once

#include <string>
#include <vector>

#include "report/run.h"

namespace sinkhorn::report {

struct Group {
  std::string table, task;
  std::vector<const Run*> runs;
};

// In the order they first appear.
std::vector<Group> grouped(const std::vector<Run>& runs);

// The table's title, or the task where there is no table.
std::string group_heading(const Group& group);

}  // namespace sinkhorn::report
