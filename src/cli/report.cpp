// `sinkhorn report`: gathers what runs and tables of results left on disk, and writes the page.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <ctime>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "models/files.h"
#include "report/page.h"
#include "sinkhorn/error.h"
#include "train/environment.h"
#include "train/history.h"
#include "train/use_run.h"

namespace sinkhorn::cli {
namespace {

namespace fs = std::filesystem;

struct ReportOptions {
  std::vector<fs::path> places;
  fs::path out = "report.html";
  std::string checkpoint = "newest";
  int64_t samples = 3;
};

// Where runs and result files were found, and what they are called on the page.
struct Found {
  std::vector<std::pair<std::string, fs::path>> runs;  // by their place under what was named
  std::vector<fs::path> results;
};

bool is_run(const fs::path& folder) {
  std::error_code ignored;
  return fs::exists(folder / "config.ini", ignored) || fs::exists(folder / "log.jsonl", ignored) ||
         fs::is_directory(folder / "checkpoints", ignored);
}

// Looks through a folder, not into its runs, hidden folders or links to folders.
void search(const fs::path& folder, const std::string& name, Found& found) {
  if (is_run(folder)) {
    found.runs.emplace_back(name, folder);
    return;
  }
  std::error_code ignored;
  for (const fs::path& path : models::list_folder(folder)) {
    const std::string child = path.filename().string();
    if (child.starts_with(".") || models::is_temporary(path)) continue;
    if (fs::is_directory(path, ignored)) {
      if (!fs::is_symlink(path, ignored))
        search(path, name.empty() ? child : name + "/" + child, found);
    } else if (path.extension() == ".json") {
      found.results.push_back(path);
    }
  }
}

Found find_all(const std::vector<fs::path>& places) {
  Found found;
  for (const fs::path& place : places) {
    std::error_code failed;
    if (!fs::exists(place, failed)) throw UsageError(place.string() + ": no such file or folder");
    if (!fs::is_directory(place, failed)) {
      found.results.push_back(place);
    } else if (is_run(place)) {
      const fs::path whole = fs::weakly_canonical(place);
      found.runs.emplace_back(whole.filename().string(), place);
    } else {
      search(place, "", found);
    }
  }
  return found;
}

std::string task_words(const tasks::TaskConfig& task) {
  if (task.name == "sort") {
    return "sort: " + std::to_string(task.sort_symbols) + " symbols, lists of up to " +
           std::to_string(task.sort_train_max) +
           (task.sort_test_max != task.sort_train_max
                ? " (test: " + std::to_string(task.sort_test_max) + ")"
                : "");
  }
  std::string words = task.name;
  if (!task.data.empty()) words += ": " + fs::path(task.data).filename().string();
  if (task.length > 0) words += ", " + std::to_string(task.length) + " tokens";
  return words;
}

std::string attention_words(const nn::AttentionConfig& attention) {
  std::string words = attention.kind;
  if (attention.kind == "sparse") return words + ", stride " + std::to_string(attention.stride);
  if (attention.kind != "full") words += ", blocks of " + std::to_string(attention.block);
  if (attention.kind == "sortcut") words += ", budget " + std::to_string(attention.budget);
  if (attention.window > 0) words += ", window " + std::to_string(attention.window);
  return words;
}

std::string attention_words(const models::ModelConfig& model) {
  const std::string encoder = attention_words(model.encoder);
  const std::string decoder = attention_words(model.decoder);
  return encoder == decoder ? decoder : "encoder " + encoder + "; decoder " + decoder;
}

std::string device_words(const fs::path& run, const std::string& device) {
  const auto facts = nlohmann::json::parse(models::read_text(run / "environment.json"), nullptr,
                                           /*allow_exceptions=*/false);
  if (!facts.is_object()) return device;
  const std::string gpu = device.starts_with("cuda:") ? device : "cuda:0";
  if (!device.starts_with("cpu") && facts.contains(gpu)) return facts.value(gpu, device);
  return "CPU";
}

class Gatherer {
 public:
  explicit Gatherer(const ReportOptions& options) : options_(options) {}

  void add_results(const fs::path& path) {
    try {
      const auto table = report::read_results(models::read_text(path));
      if (!table) return;
      remember_places(*table, path.parent_path());
      page.tables.push_back(*table);
    } catch (const Error& error) {
      const std::string reason = error.what(), place = path.string();
      problem(reason.starts_with(place) ? reason : place + ": " + reason);
    }
  }

  void add_run(const std::string& name, const fs::path& folder) {
    train::RunConfig config;
    try {
      if (!fs::exists(folder / "config.ini")) throw Error("half-written: it has no config.ini");
      config = read_config(folder / "config.ini",
                           {{"train.run", folder.string()}, {"train.device", "auto"}});
    } catch (const Error& error) {
      problem(folder.string() + ": " + error.what());
      return;
    }
    report::Run run;
    run.name = name;
    run.group = task_words(config.task);
    const bool trial = name_by_table(folder, run);
    run.attention = attention_words(config.model);
    run.wanted = config.train.steps;
    add_history(folder, run);
    if (options_.samples > 0 && !trial) add_look(folder, config, run);
    if (run.opened || !run.curves.empty()) {
      page.runs.push_back(std::move(run));
      folders_.push_back(folder.string());
    }
  }

  // Runs that would have one name get their folders'.
  void make_names_unique() {
    std::map<std::string, int> uses;
    for (const report::Run& run : page.runs) ++uses[run.name];
    for (size_t i = 0; i < page.runs.size(); ++i) {
      if (uses[page.runs[i].name] > 1) page.runs[i].name = folders_[i];
    }
  }

  report::Page page;

 private:
  struct Place {
    std::string table, row;
  };

  // The folder above a cell's run holds the runs of all its seeds.
  void remember_places(const report::ResultTable& table, const fs::path& folder) {
    for (const report::ResultRow& row : table.rows) {
      for (const report::ResultCell& cell : row.cells) {
        if (cell.run.empty()) continue;
        const fs::path run = fs::weakly_canonical(folder / cell.run);
        const std::string variant = run.parent_path().extension().string();
        places_[run.parent_path()] = {table.title,
                                      row.name + (variant.empty() ? "" : " " + variant.substr(1))};
      }
    }
  }

  // Groups and names a run by the row of the table it belongs to. True for what lies deeper than a
  // row's own runs: a trial to choose by, shown by its curves alone.
  bool name_by_table(const fs::path& folder, report::Run& run) const {
    const fs::path whole = fs::weakly_canonical(folder);
    for (fs::path above = whole.parent_path(); above.has_relative_path();
         above = above.parent_path()) {
      const auto found = places_.find(above);
      if (found == places_.end()) continue;
      const bool trial = above != whole.parent_path();
      run.group = found->second.table + (trial ? ", trials: " : ": ") + run.group;
      run.name = found->second.row + ", " + whole.lexically_relative(above).string();
      return trial;
    }
    return false;
  }

  void problem(const std::string& text) {
    const std::string line = text.substr(0, text.find('\n'));
    std::cerr << "sinkhorn: " << line << "\n";
    page.problems.push_back(line);
  }

  void add_history(const fs::path& folder, report::Run& run) {
    train::History history = train::read_history(folder);
    run.curves = std::move(history.curves);
    run.steps = history.steps;
    run.tokens_per_second = history.tokens_per_second;
    run.peak_memory = history.peak_memory;
    for (const std::string& line : history.problems) problem(folder.string() + ": " + line);
    try {
      const auto trained = read_config(folder / "config.ini", {});
      run.device = device_words(folder, trained.train.device);
    } catch (const Error&) {
      run.device = "";  // only a fact less: no environment.json
    }
  }

  void add_look(const fs::path& folder, const train::RunConfig& config, report::Run& run) {
    try {
      train::Look look = train::look_at_run(config, options_.checkpoint, options_.samples);
      run.opened = true;
      run.parameters = look.inspection.parameter_count;
      run.data_note = look.data_note;
      run.input = look.inspection.input;
      run.sorts = std::move(look.inspection.sorts);
      run.samples = std::move(look.samples);
    } catch (const std::exception& error) {  // Torch's own, too
      const std::string reason = error.what(), place = folder.string();
      problem((reason.starts_with(place) ? reason : place + ": " + reason) +
              "; no matrices and samples of it");
    }
  }

  const ReportOptions& options_;
  std::map<fs::path, Place> places_;  // what row the runs in a folder are of
  std::vector<std::string> folders_;  // of the page's runs
};

std::string written_words() {
  std::string words = "written ";
  char date[32];
  const std::time_t now = std::time(nullptr);
  std::strftime(date, sizeof date, "%Y-%m-%d %H:%M", std::localtime(&now));
  words += date;
  for (const auto& [name, value] : train::environment()) {
    if (name == "version") words += " by sinkhorn " + value;
    if (name == "commit" && !value.empty()) words += " (" + value + ")";
  }
  return words;
}

int run_report(const ReportOptions& options) {
  const fs::path folder = options.out.has_parent_path() ? options.out.parent_path() : ".";
  if (!fs::is_directory(folder)) {
    throw UsageError(folder.string() + ": no such folder for the report; make it first");
  }
  const Found found = find_all(options.places);
  Gatherer gatherer(options);
  for (const fs::path& path : found.results) gatherer.add_results(path);
  for (const auto& [name, path] : found.runs) gatherer.add_run(name, path);
  gatherer.make_names_unique();
  report::Page& page = gatherer.page;
  if (page.runs.empty() && page.tables.empty()) {
    throw Error(options.places.front().string() + (options.places.size() > 1 ? " and others" : "") +
                ": no run and no table of results that can be shown");
  }
  page.written = written_words();
  models::write_atomically(options.out, report::page_html(page));
  std::cout << options.out.string() << "\n";
  return 0;
}

}  // namespace

Command add_report(CLI::App& program) {
  CLI::App* app = program.add_subcommand(
      "report",
      "Write one HTML page of runs and tables: figures, curves, sorting matrices, samples");
  auto options = std::make_shared<ReportOptions>();
  app->add_option("PLACE", options->places,
                  "run folders, result files, or folders to search for both")
      ->required()
      ->type_name("PATH");
  app->add_option("-o,--out", options->out, "the page")->type_name("FILE")->capture_default_str();
  app->add_option("--checkpoint", options->checkpoint, "newest, best, or a checkpoint file")
      ->type_name("TEXT")
      ->capture_default_str();
  app->add_option("--samples", options->samples,
                  "test examples of each run; 0: no model is opened, no matrices shown")
      ->type_name("INT")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  return {app, [options] { return run_report(*options); }};
}

}  // namespace sinkhorn::cli
