// `sinkhorn report`: gathers what runs and tables of results left on disk, and writes the page.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <ctime>
#include <functional>
#include <iostream>
#include <limits>
#include <map>

#include "cli/commands.h"
#include "cli/run_words.h"
#include "models/files.h"
#include "report/page.h"
#include "sinkhorn/error.h"
#include "train/environment.h"
#include "train/export_folder.h"
#include "train/history.h"
#include "train/run_files.h"
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
  std::vector<std::pair<fs::path, std::string>> problems;  // where, what
};

// What a folder holds; one that may not be read is a problem, not the end.
std::vector<fs::path> list(const fs::path& folder, Found& found) {
  try {
    return models::list_folder(folder);
  } catch (const Error& error) {
    found.problems.emplace_back(folder, error.what());
    return {};
  }
}

bool is_run(const fs::path& folder) {
  std::error_code ignored;
  for (const char* name :
       {train::kRunConfig, train::kRunLog, train::kCheckpoints, "reproduce.ini"}) {
    if (fs::exists(folder / name, ignored)) return true;
  }
  return false;
}

// Looks through a folder, not into its runs, hidden folders or links to folders.
void search(const fs::path& folder, const std::string& name, Found& found) {
  if (is_run(folder)) {
    found.runs.emplace_back(name, folder);
    return;
  }
  std::error_code ignored;
  for (const fs::path& path : list(folder, found)) {
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
    } else if (train::is_export(place) && fs::exists(place / train::kExportModel, failed)) {
      found.problems.emplace_back(place, "an export, which has no curves; name the run's folder");
    } else {
      search(place, "", found);
    }
  }
  // Tables before figures.
  std::stable_partition(found.results.begin(), found.results.end(), [](const fs::path& path) {
    return path.filename().string().starts_with("table");
  });
  return found;
}

// A run's own configuration; an Error, which says what to do, where it is missing or not whole.
train::RunConfig config_of(const fs::path& run) {
  const std::string remedy = "; train it again, or remove the folder";
  const fs::path path = run / train::kRunConfig;
  if (!fs::exists(path)) throw Error("half a run, without its config.ini" + remedy);
  // The last section: without it what is missing would be taken for the defaults.
  if (models::read_text(path).find("\n[train]\n") == std::string::npos) {
    throw Error(path.string() + ": breaks off" + remedy);
  }
  try {
    train::RunConfig config = read_config(path, {{"train.device", "auto"}});
    config.train.run = run.string();  // it may have been moved
    return config;
  } catch (const Error& error) {
    throw Error(error.what() + std::string("; cut off, or another version's") + remedy);
  }
}

class Gatherer {
 public:
  explicit Gatherer(const ReportOptions& options) : options_(options) {}

  // One line, here and on the page, that begins with the place.
  void problem(const fs::path& place, const std::string& reason) {
    const std::string begin = place.string();
    std::string line = reason.starts_with(begin) ? reason : begin + ": " + reason;
    line = line.substr(0, line.find('\n'));
    std::cerr << "sinkhorn: " << line << "\n";
    page_.problems.push_back(line);
  }

  void add_results(const fs::path& path) {
    try {
      const auto table = report::read_results(models::read_text(path));
      if (!table) return;
      remember_places(*table, path.parent_path());
      page_.tables.push_back(*table);
    } catch (const Error& error) {
      problem(path, error.what());
    }
  }

  void add_run(const std::string& name, const fs::path& folder) {
    train::RunConfig config;
    try {
      config = config_of(folder);
    } catch (const Error& error) {
      problem(folder, error.what());
      return;
    }
    Entry entry{{}, folder.string(), "", std::numeric_limits<size_t>::max()};
    report::Run& run = entry.run;
    run.name = name;
    run.task = task_words(config.task);
    const bool trial = name_by_table(folder, entry);
    run.attention = attention_words(config);
    run.leaks = leaks_future(config);
    run.wanted = config.train.steps;
    add_history(folder, run);
    if (options_.samples > 0 && !trial) add_look(folder, config, run);
    if (run.opened || !run.curves.empty()) runs_.push_back(std::move(entry));
  }

  // Runs in the order of their tables' rows; those of one name told apart by table or folder.
  report::Page finish() {
    std::stable_sort(runs_.begin(), runs_.end(),
                     [](const Entry& a, const Entry& b) { return a.order < b.order; });
    tell_apart([](const Entry& entry) {
      return entry.table.empty() ? entry.folder : entry.table + ": " + entry.run.name;
    });
    tell_apart([](const Entry& entry) { return entry.folder; });
    for (Entry& entry : runs_) page_.runs.push_back(std::move(entry.run));
    return std::move(page_);
  }

 private:
  struct Entry {
    report::Run run;
    std::string folder, table;
    size_t order;
  };
  struct Place {
    std::string table, title, row;
    size_t order;  // of rows, through all tables
  };

  // A row's runs lie in one folder, one for each seed; a run of another name stands for itself.
  void remember_places(const report::ResultTable& table, const fs::path& folder) {
    for (const report::ResultRow& row : table.rows) {
      for (const report::ResultCell& cell : row.cells) {
        if (cell.run.empty()) continue;
        const fs::path run = fs::weakly_canonical(folder / cell.run);
        const bool seeded = run.filename().string().find("seed") != std::string::npos;
        const fs::path place = seeded ? run.parent_path() : run;
        const std::string variant = seeded ? place.extension().string() : "";
        const std::string name = row.name + (variant.empty() ? "" : " " + variant.substr(1));
        places_.try_emplace(place, Place{table.table, table.title, name, places_.size()});
      }
    }
  }

  // Groups and names a run by the row of the table it belongs to. True for what lies deeper than a
  // row's own runs: a trial to choose by, shown by its curves alone.
  bool name_by_table(const fs::path& folder, Entry& entry) const {
    report::Run& run = entry.run;
    const fs::path whole = fs::weakly_canonical(folder);
    for (fs::path above = whole; above.has_relative_path(); above = above.parent_path()) {
      const auto found = places_.find(above);
      if (found == places_.end()) continue;
      const Place& place = found->second;
      const bool trial = above != whole && above != whole.parent_path();
      const std::string rest = whole.lexically_relative(above).string();
      const bool alone = rest == "." || (rest == "seed1" && !fs::exists(above / "seed2"));
      run.table = place.title + (trial ? ", trials" : "");
      run.name = place.row + (alone ? "" : ", " + rest);
      entry.order = place.order;
      entry.table = place.table;
      return trial;
    }
    return false;
  }

  void tell_apart(const std::function<std::string(const Entry&)>& longer) {
    std::map<std::string, int> uses;
    for (const Entry& entry : runs_) ++uses[entry.run.name];
    for (Entry& entry : runs_) {
      if (uses[entry.run.name] > 1) entry.run.name = longer(entry);
    }
  }

  void add_history(const fs::path& folder, report::Run& run) {
    train::History history = train::read_history(folder);
    run.curves = std::move(history.curves);
    run.steps = history.steps;
    run.tokens_per_second = history.tokens_per_second;
    run.peak_memory = history.peak_memory;
    for (const std::string& line : history.problems) problem(folder, line);
    try {
      const auto trained = read_config(folder / train::kRunConfig, {});
      run.device = device_words(folder, trained.train.device);
    } catch (const std::exception&) {
      run.device = "";  // only a fact less: environment.json is missing or not whole
    }
  }

  void add_look(const fs::path& folder, const train::RunConfig& config, report::Run& run) {
    try {
      train::Look look = train::look_at_run(config, options_.checkpoint, options_.samples);
      run.opened = true;
      run.parameters = look.inspection.parameter_count;
      run.data_note = look.data_note;
      run.input = std::move(look.inspection.input);
      run.input_image = std::move(look.inspection.input_image);
      run.sorts = std::move(look.inspection.sorts);
      run.samples = std::move(look.samples);
    } catch (const std::exception& error) {  // Torch's own, too
      const std::string reason = error.what();
      problem(folder, reason.substr(0, reason.find('\n')) + "; no matrices and samples of it");
    }
  }

  const ReportOptions& options_;
  std::map<fs::path, Place> places_;  // what row the runs in a folder are of
  std::vector<Entry> runs_;
  report::Page page_;
};

std::string written_words() {
  std::string words = "written ";
  char date[32];
  const std::time_t now = std::time(nullptr);
  std::strftime(date, sizeof date, "%Y-%m-%d %H:%M", std::localtime(&now));
  words += date;
  words += " by sinkhorn " + train::environment_fact("version");
  const std::string commit = train::environment_fact("commit");
  return commit.empty() ? words : words + " (" + commit + ")";
}

void check_out(const fs::path& out) {
  const fs::path folder = out.has_parent_path() ? out.parent_path() : ".";
  if (!fs::is_directory(folder)) {
    throw UsageError(folder.string() + ": no such folder for the report; make it first");
  }
  if (fs::is_directory(out)) {
    throw UsageError("--out: " + out.string() + " is a folder; name the page's file");
  }
  const models::AtomicFile attempt(out);  // throws now what would be thrown after all the work
}

int run_report(const ReportOptions& options) {
  check_out(options.out);
  const Found found = find_all(options.places);
  Gatherer gatherer(options);
  for (const auto& [place, reason] : found.problems) gatherer.problem(place, reason);
  for (const fs::path& path : found.results) gatherer.add_results(path);
  for (const auto& [name, path] : found.runs) gatherer.add_run(name, path);
  report::Page page = gatherer.finish();
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
      ->check(CLI::Range(int64_t{0}, int64_t{1000}));
  return {app, [options] { return run_report(*options); }};
}

}  // namespace sinkhorn::cli
