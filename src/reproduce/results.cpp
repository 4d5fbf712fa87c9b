#include "reproduce/results.h"

#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <nlohmann/json.hpp>
#include <sstream>

#include "models/files.h"
#include "report/figure.h"
#include "sinkhorn/error.h"
#include "train/run_files.h"

namespace sinkhorn::reproduce {

namespace fs = std::filesystem;
using nlohmann::json;
using nlohmann::ordered_json;

namespace {

// A JSON file of a run folder; null where it is missing or was cut off.
json read_json(const fs::path& path) {
  if (!fs::is_regular_file(path)) return nullptr;
  return json::parse(models::read_text(path), nullptr, /*allow_exceptions=*/false);
}

// The last figures of each split, and the last step that was evaluated on the test split.
int64_t read_figures(const fs::path& log, RunResult& result) {
  int64_t tested = -1;
  std::string line;
  for (std::istringstream lines(models::read_text(log)); std::getline(lines, line);) {
    const json entry = json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (!entry.is_object()) continue;
    for (const char* split : {"valid", "test"}) {
      if (!entry.contains(split)) continue;
      if (std::string(split) == "test") tested = entry.value("step", int64_t{-1});
      auto& figures = result.figures[split];
      figures.clear();
      for (const auto& [name, value] : entry[split].items()) {
        if (const auto figure = report::read_figure(value)) figures[name] = *figure;
      }
    }
  }
  return tested;
}

std::string device_name(const std::string& device, const json& environment) {
  if (!environment.is_object()) return device;
  if (environment.contains(device)) return environment[device];
  const auto threads = environment.find("threads");  // runs of earlier versions: in words
  if (threads == environment.end()) return device;
  return device + ", " + (threads->is_string() ? threads->get<std::string>() : threads->dump()) +
         " threads";
}

ordered_json number(const std::optional<double>& value) {
  return value ? report::figure_json(*value) : ordered_json(nullptr);
}

ordered_json numbers(const std::vector<double>& values) {
  ordered_json array = ordered_json::array();
  for (const double value : values) array.push_back(report::figure_json(value));
  return array;
}

double figure_of(const json& value) {
  const auto figure = report::read_figure(value);
  if (!figure) throw Error("a figure is no number");
  return *figure;
}

std::optional<double> number(const json& object, const char* key) {
  if (!object.contains(key) || object[key].is_null()) return std::nullopt;
  return figure_of(object[key]);
}

ordered_json cell_json(const Cell& cell) {
  ordered_json object = {{"value", number(cell.value)}, {"paper", number(cell.paper)}};
  if (!cell.value) return object;
  object.update({{"seeds", numbers(cell.seeds)},
                 {"steps", cell.steps},
                 {"scale", cell.scale},
                 {"data", cell.data},
                 {"leaks", cell.leaks},
                 {"run", cell.run},
                 {"seconds", cell.seconds},
                 {"tokens_per_second", cell.tokens_per_second},
                 {"peak_memory", cell.peak_memory},
                 {"device", cell.device},
                 {"commit", cell.commit},
                 {"config_hash", cell.config_hash}});
  if (cell.picks) {
    object["tuned"] = {{"temperature", cell.picks->temperature},
                       {"iterations", cell.picks->iterations}};
  }
  return object;
}

Cell read_cell(const json& object) {
  Cell cell;
  cell.value = number(object, "value");
  cell.paper = number(object, "paper");
  if (!cell.value) return cell;
  for (const json& seed : object.at("seeds")) cell.seeds.push_back(figure_of(seed));
  cell.steps = object.at("steps");
  cell.scale = object.value("scale", "");
  cell.data = object.at("data");
  cell.leaks = object.at("leaks");
  cell.run = object.at("run");
  cell.seconds = object.at("seconds");
  cell.tokens_per_second = object.at("tokens_per_second");
  cell.peak_memory = object.at("peak_memory");
  cell.device = object.value("device", "");
  cell.commit = object.value("commit", "");
  cell.config_hash = object.at("config_hash");
  if (object.contains("tuned")) {
    cell.picks = Picks{object["tuned"].at("temperature"), object["tuned"].at("iterations")};
  }
  return cell;
}

Column read_column(const json& object) {
  return {object.at("name"),           object.at("figure"),           object.value("split", "test"),
          object.value("variant", ""), object.at("better") == "high", object.at("digits"),
          object.value("ranked", true)};
}

Results parse_results(const json& object) {
  Results results;
  results.table = object.at("table");
  results.title = object.at("title");
  results.note = object.value("note", "");
  results.scale = object.at("scale");
  results.commit = object.at("commit");
  results.device = object.at("device");
  for (const json& column : object.at("columns")) results.columns.push_back(read_column(column));
  for (const json& row : object.at("rows")) {
    ResultRow read{
        row.value("id", row.at("name").get<std::string>()), row.at("name"), row.at("role"), {}};
    for (const json& cell : row.at("cells")) read.cells.push_back(read_cell(cell));
    if (read.cells.size() != results.columns.size()) throw Error("a row lacks cells");
    results.rows.push_back(std::move(read));
  }
  return results;
}

// Whether a run's folder is of another configuration, which must not be overwritten.
bool holds_another(const Run& run) {
  const fs::path config = run.folder / train::kRunConfig;
  return fs::exists(config) && config_hash(models::read_text(config)) != run.hash;
}

}  // namespace

std::optional<RunResult> read_run(const Run& run) try {
  const json facts = read_json(run.folder / train::kRunResult);
  if (!facts.is_object() || !facts.value("finished", false)) return std::nullopt;
  if (holds_another(run) || !fs::exists(run.folder / train::kRunLog)) return std::nullopt;
  RunResult result;
  result.steps = facts.value("steps", int64_t{0});
  if (read_figures(run.folder / train::kRunLog, result) != result.steps) return std::nullopt;
  const json environment = read_json(run.folder / "environment.json");
  result.data = facts.value("data", "");
  result.device = device_name(facts.value("device", ""), environment);
  result.commit = environment.is_object() ? environment.value("commit", "") : "";
  result.seconds = facts.value("seconds", 0.0);
  result.tokens_per_second = facts.value("tokens_per_second", 0.0);
  result.peak_memory = facts.value("peak_memory", int64_t{0});
  return result;
} catch (const json::exception&) {  // something in it is of another kind: not our run's
  return std::nullopt;
}

std::string obstacle(const Run& run) {
  if (holds_another(run)) {
    return run.folder.string() +
           ": holds a run of another configuration; remove it or choose another --out";
  }
  std::error_code ignored;
  const bool begun = fs::exists(run.folder / train::kRunConfig, ignored);
  const bool has_log = fs::file_size(run.folder / train::kRunLog, ignored) > 0 && !ignored;
  if (!begun && (has_log || !models::list_folder(run.folder / train::kCheckpoints).empty())) {
    return run.folder.string() + ": holds half a run, without its config.ini; remove the folder";
  }
  return "";
}

void check_out(const fs::path& out) {
  std::error_code ignored;
  fs::path place = out;
  while (!fs::exists(place, ignored) && place.has_relative_path()) place = place.parent_path();
  if (fs::exists(place, ignored) && !fs::is_directory(place, ignored)) {
    throw UsageError("--out: " + place.string() + " is a file; name a folder");
  }
}

void make_out(const fs::path& out) {
  std::error_code failed;
  fs::create_directories(out, failed);
  if (!failed && access(out.c_str(), W_OK | X_OK) != 0) {
    failed = std::error_code(errno, std::generic_category());
  }
  if (failed) {
    throw Error("--out: " + out.string() + " cannot be written: " + failed.message() +
                "; name another folder");
  }
}

fs::path results_path(const fs::path& out, const std::string& table, const std::string& scale) {
  return out / (table + "." + scale + ".json");
}

std::string to_json(const Results& results) {
  ordered_json object = {{"table", results.table},   {"title", results.title},
                         {"note", results.note},     {"scale", results.scale},
                         {"commit", results.commit}, {"device", results.device}};
  object["columns"] = ordered_json::array();
  for (const Column& column : results.columns) {
    object["columns"].push_back({{"name", column.name},
                                 {"figure", column.figure},
                                 {"split", column.split},
                                 {"variant", column.variant},
                                 {"better", column.higher_is_better ? "high" : "low"},
                                 {"digits", column.digits},
                                 {"ranked", column.ranked}});
  }
  object["rows"] = ordered_json::array();
  for (const ResultRow& row : results.rows) {
    ordered_json cells = ordered_json::array();
    for (const Cell& cell : row.cells) cells.push_back(cell_json(cell));
    object["rows"].push_back(
        {{"id", row.id}, {"name", row.name}, {"role", row.role}, {"cells", cells}});
  }
  return object.dump(1, ' ', false, json::error_handler_t::replace) + "\n";
}

Results read_results(const fs::path& path) {
  try {
    return parse_results(json::parse(models::read_text(path)));
  } catch (const json::exception&) {
  } catch (const Error&) {
  }
  throw Error(path.string() +
              ": is not a whole results file; remove it to have it made anew from the runs");
}

void write_results(const fs::path& path, const Results& results) {
  std::error_code failed;
  fs::create_directories(path.parent_path(), failed);
  models::write_atomically(path, to_json(results));
}

std::optional<double> best_of(const Results& results, size_t column) {
  std::optional<double> best;
  if (!results.columns[column].ranked) return best;
  for (const ResultRow& row : results.rows) {
    const Cell& cell = row.cells[column];
    if (!cell.value || cell.leaks || !std::isfinite(*cell.value)) continue;
    const bool high = results.columns[column].higher_is_better;
    if (!best || (high ? *cell.value > *best : *cell.value < *best)) best = cell.value;
  }
  return best;
}

}  // namespace sinkhorn::reproduce
