#include "train/run_checks.h"

#include <map>
#include <sstream>

#include "sinkhorn/error.h"
#include "sinkhorn/nn/attention.h"
#include "train/task_info.h"

namespace sinkhorn::train {
namespace {

// What a resumed run may not change, by section and key: of [train], what the run began with and
// what the order of the data hangs on.
std::map<std::string, std::string> lasting_lines(const std::string& config_text) {
  std::istringstream lines(config_text);
  std::string line, section;
  std::map<std::string, std::string> kept;
  while (std::getline(lines, line)) {
    if (line.empty()) continue;
    if (line[0] == '[') {
      section = line;
      continue;
    }
    const std::string key = line.substr(0, line.find_first_of(" ="));
    bool keeps = true;
    if (section == "[train]") {
      keeps = key == "seed" || key == "batch" || key == "batch_tokens" || key == "init";
    }
    if (section == "[optimizer]") keeps = key == "name";
    if (section == "[task]") keeps = key != "data" && key != "cache";
    if (keeps) kept[section + " " + key] = section + " " + line;
  }
  return kept;
}

}  // namespace

// Keys that the run's version did not know yet are left alone: its parameters tell what it was.
void check_same_run(const std::filesystem::path& root, const std::string& before,
                    const std::string& config_text) {
  const auto now = lasting_lines(config_text);
  for (const auto& [key, was] : lasting_lines(before)) {
    const auto found = now.find(key);
    const std::string is = found == now.end() ? "without it" : "'" + found->second + "'";
    if (found == now.end() || found->second != was) {
      throw UsageError(
          root.string() + ": cannot resume with another configuration: the run has '" + was +
          "', this is " + is +
          "; what may change is where data lies, of [optimizer] all but its name, and of [train] "
          "all but init, seed and batch sizes");
    }
  }
}

void check_same_task(const std::filesystem::path& root, const std::string& data,
                     const tasks::TaskInfo& now) {
  const auto before = read_run_task(root);
  if (!before) return;
  const std::string run = root.string(), rest = "; resume with the data it had";
  if (before->vocab != now.vocab || before->labels != now.labels) {
    throw Error("task.data: " + data + " has another vocabulary or other labels than " + run +
                " was trained on" + rest);
  }
  if (before->data_tokens > 0 && before->data_tokens != now.data_tokens) {
    throw Error("task.data: " + data + " has " + std::to_string(now.data_tokens) +
                " tokens, and had " + std::to_string(before->data_tokens) + " when " + run +
                " began" + rest);
  }
}

void check_length(const models::ModelConfig& model, const tasks::TaskInfo& info) {
  if (model.max_length > 0 && model.max_length < info.max_length) {
    throw UsageError("model.max_length: " + std::to_string(model.max_length) +
                     " is less than the " + std::to_string(info.max_length) +
                     " tokens of the task's sequences; raise it, or leave it out");
  }
}

// A sequence that is answered to may be shorter than its answer, which has an end.
void check_columns(const models::Model& model, const tasks::TaskInfo& info) {
  const bool answers = info.model == tasks::ModelKind::kSeq2Seq;
  const int64_t longest = info.max_length - (answers ? 1 : 0);
  for (const auto& attention : model.attentions()) {
    if (!attention->sorts() || attention->sort_net()->bilinear()) continue;
    const int64_t block = attention->config().block, blocks = (longest + block - 1) / block;
    const int64_t columns = attention->sort_net()->max_blocks();
    if (blocks > columns) {
      throw UsageError("attention.max_blocks: " + std::to_string(columns) + " is less than the " +
                       std::to_string(blocks) + " blocks of " + std::to_string(block) + " that " +
                       std::to_string(longest) +
                       " tokens make, the task's longest sequence; raise it, leave it out, or " +
                       "take sort_net bilinear");
    }
  }
}

}  // namespace sinkhorn::train
