#include "train/history.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <sstream>

#include "models/files.h"
#include "report/figure.h"
#include "sinkhorn/error.h"
#include "train/events.h"

namespace sinkhorn::train {
namespace {

namespace fs = std::filesystem;
using json = nlohmann::ordered_json;  // the task's own metric comes first

class LogReader {
 public:
  // False for a line that is no line of a log.
  bool add(const std::string& line) {
    const json object = json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (!object.is_object() || !object.contains("step") || !object["step"].is_number())
      return false;
    const double step = object["step"].get<double>();
    for (const auto& [key, value] : object.items()) {
      if (key == "step") continue;
      if (!value.is_object()) {
        add_point("train", key, step, value);
        continue;
      }
      for (const auto& [name, figure] : value.items()) add_point(key, name, step, figure);
    }
    history.steps = std::max(history.steps, static_cast<int64_t>(step));
    return true;
  }

  History history;

 private:
  void add_point(const std::string& split, const std::string& name, double step,
                 const json& value) {
    const auto figure = report::read_figure(value);
    if (!figure) return;
    const auto found = std::find_if(
        history.curves.begin(), history.curves.end(),
        [&](const report::Curve& curve) { return curve.split == split && curve.name == name; });
    report::Curve& curve = found != history.curves.end()
                               ? *found
                               : history.curves.emplace_back(report::Curve{split, name, {}});
    curve.points.push_back({step, *figure});
  }
};

void read_log(const fs::path& run, LogReader& reader) {
  const fs::path path = run / "log.jsonl";
  std::error_code ignored;
  std::vector<std::string>& problems = reader.history.problems;
  if (!fs::exists(path, ignored)) {
    problems.push_back("no log.jsonl yet: no curves");
    return;
  }
  std::istringstream lines(models::read_text(path));
  int64_t number = 0, bad = 0, first_bad = 0;
  for (std::string line; std::getline(lines, line);) {
    ++number;
    if (line.empty() || reader.add(line)) continue;
    if (bad++ == 0) first_bad = number;
  }
  if (bad > 0) {
    problems.push_back("log.jsonl: line " + std::to_string(first_bad) +
                       (bad > 1 ? " and " + std::to_string(bad - 1) + " more" : "") +
                       " cannot be read; left out");
  }
  if (number == bad) problems.push_back("log.jsonl has no figures yet: no curves");
}

void read_speed(const fs::path& run, History& history) {
  std::vector<std::string> broken;
  std::vector<double> speeds;
  for (const Scalar& scalar : read_scalars(run, broken)) {
    if (scalar.tag == "speed/tokens_per_second") speeds.push_back(scalar.value);
    if (scalar.tag == "speed/peak_memory") {
      history.peak_memory = std::max(history.peak_memory, scalar.value);
    }
  }
  for (const std::string& name : broken) {
    history.problems.push_back(name + ": breaks off; speed and memory may be missing");
  }
  if (speeds.empty()) return;
  const auto middle = speeds.begin() + static_cast<std::ptrdiff_t>(speeds.size() / 2);
  std::nth_element(speeds.begin(), middle, speeds.end());
  history.tokens_per_second = *middle;
}

}  // namespace

History read_history(const fs::path& run) {
  LogReader reader;
  try {
    read_log(run, reader);
    read_speed(run, reader.history);
  } catch (const Error& error) {
    reader.history.problems.push_back(error.what());
  }
  return std::move(reader.history);
}

}  // namespace sinkhorn::train
