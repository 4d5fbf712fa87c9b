#include "report/groups.h"

#include <algorithm>

#include "report/html.h"

namespace sinkhorn::report {

std::vector<Group> grouped(const std::vector<Run>& runs) {
  std::vector<Group> groups;
  for (const Run& run : runs) {
    const auto found = std::find_if(groups.begin(), groups.end(), [&](const Group& group) {
      return group.table == run.table && group.task == run.task;
    });
    Group& group =
        found != groups.end() ? *found : groups.emplace_back(Group{run.table, run.task, {}});
    group.runs.push_back(&run);
  }
  return groups;
}

std::string group_heading(const Group& group) {
  return "<h3>" + escape(group.table.empty() ? group.task : group.table) + "</h3>";
}

}  // namespace sinkhorn::report
