#include "tasks/task.h"

#include "sinkhorn/error.h"
#include "tasks/dataset.h"

namespace sinkhorn::tasks {

const std::vector<std::string>& task_names() {
  static const std::vector<std::string> names{"sort",   "recall",    "lm",  "text",
                                              "pixels", "sentiment", "nli", "classify"};
  return names;
}

bool is_generated(const std::string& task) { return task == "sort" || task == "recall"; }

bool has_encoder(const std::string& task) { return task == "sort" || !has_decoder(task); }

bool has_decoder(const std::string& task) {
  return task != "sentiment" && task != "nli" && task != "classify";
}

Framing framing(const std::string& task) {
  if (task == "lm" || task == "text") return {kEnd, true};
  return {kBegin, task == "sort"};
}

std::unique_ptr<Task> make_task(const TaskConfig& config) {
  const std::string& name = config.name;
  if (name == "sort") return make_sort(config);
  if (name == "recall") return make_recall(config);
  if (name == "lm" || name == "text" || name == "pixels") return make_language(config);
  if (name == "sentiment" || name == "nli" || name == "classify") {
    return make_classification(config);
  }
  throw UsageError("task.name: '" + name + "'; expected " + join(task_names()));
}

}  // namespace sinkhorn::tasks
