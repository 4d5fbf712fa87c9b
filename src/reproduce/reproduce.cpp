#include "reproduce/reproduce.h"

#include <algorithm>
#include <csignal>
#include <map>
#include <set>
#include <thread>

#include "models/files.h"
#include "reproduce/archive.h"
#include "reproduce/children.h"
#include "reproduce/memory.h"
#include "reproduce/room.h"
#include "reproduce/tune.h"
#include "sinkhorn/error.h"
#include "tasks/files.h"
#include "train/environment.h"
#include "train/run_files.h"

namespace sinkhorn::reproduce {

namespace fs = std::filesystem;

namespace {

// "aclImdb (published at ...)" where a run's data is not to be had, from what `sinkhorn data check`
// says; "" where it is.
std::string missing_data(const Run& run) {
  const tasks::DataReport report = tasks::check_data(run.config.task);
  if (report.complete) return "";
  bool is_its = false;
  for (const std::string& line : report.lines) {
    if (!line.starts_with(" ")) is_its = line.ends_with("/" + run.dataset);
    const size_t at = line.find("published at ");
    if (is_its && at != std::string::npos) return run.dataset + " (" + line.substr(at) + ")";
  }
  return run.dataset + " (" + report.lines.back() + ")";
}

std::string tested_in_part(const train::TrainConfig& config) {
  if (config.test_batches == 0) return "";
  return "; tested on " + std::to_string(config.test_batches) + " batches";
}

class Reproduction final : public Watcher {
 public:
  Reproduction(const Table& table, const Options& options, const ConfigLanguage& language,
               Screen& screen, const std::atomic<int>& stop)
      : table_(table),
        options_(options),
        planner_(table, options, language),
        archive_(options.out, table.name, file_scale()),
        screen_(screen),
        stop_(stop),
        on_gpu_(options.device != "cpu" && train::environment_fact("cuda devices") != "0") {}

  Outcome run() {
    if (table_.trains()) look_for_data();
    make_out(options_.out);
    if (table_.trains()) {
      if (options_.tune) tune();
      if (!outcome_.stopped) train(wanted_runs());
    }
    update();
    return std::move(outcome_);
  }

 private:
  // Tuned results are results of another question, and have a file of their own.
  std::string file_scale() const { return options_.scale + (options_.tune ? ".tuned" : ""); }

  template <typename F>
  void each_place(const F& f) const {
    for (size_t row = 0; row < table_.rows.size(); ++row) {
      for (size_t variant = 0; variant < table_.variants.size(); ++variant) {
        if (planner_.trains(table_.rows[row], table_.variants[variant])) f(row, variant);
      }
    }
  }

  template <typename F>
  void each_wanted(const F& f) const {
    each_place([&](size_t row, size_t variant) {
      if (planner_.wants(table_.rows[row], table_.variants[variant])) f(row, variant);
    });
  }

  void look_for_data() {
    std::set<std::string> missing;
    std::set<size_t> seen;
    bool some = false;  // can be shown
    each_wanted([&](size_t row, size_t variant) {
      const bool complete = is_complete(row, variant);
      some = some || complete;
      if (complete || !seen.insert(variant).second) return;
      const std::string what = missing_data(planner_.run(row, variant, 1, {}));
      some = some || what.empty();
      if (what.empty()) return;
      missing.insert(what);
      absent_.insert(variant);
    });
    if (missing.empty()) return;
    const std::string where = options_.data.empty() ? "" : options_.data.string() + ": ";
    const std::string what =
        where + table_.name + " needs " + tasks::join({missing.begin(), missing.end()});
    if (!some) throw UsageError(what + "; give the folder that holds it with --data DIR");
    screen_.line(what + ": its columns stay empty");
  }

  std::optional<Picks> picks(size_t row, size_t variant) const {
    const auto found = picks_.find({row, variant});
    if (found != picks_.end()) return found->second;
    return options_.tune ? archive_.picks(table_.rows[row].id, table_.variants[variant].name)
                         : std::nullopt;
  }

  Run run_of(size_t row, size_t variant, int64_t seed) const {
    return planner_.run(row, variant, seed, picks(row, variant));
  }

  bool is_archived(const Run& run) const {
    for (const Column& column : table_.columns) {
      if (column.variant != table_.variants[run.variant].name) continue;
      const Cell* cell = archive_.find(run.hash, column);
      if (!cell || static_cast<int64_t>(cell->seeds.size()) < run.seed) return false;
    }
    return true;
  }

  bool is_done(const Run& run) const { return is_archived(run) || read_run(run).has_value(); }

  // Tuning has yet to say what this is trained with.
  bool awaits_tuning(size_t row, size_t variant) const {
    return options_.tune && !picks(row, variant) &&
           is_tunable(planner_.run(row, variant, 1, std::nullopt).config);
  }

  bool is_complete(size_t row, size_t variant) const {
    if (awaits_tuning(row, variant)) return false;
    for (int64_t seed = 1; seed <= options_.seeds; ++seed) {
      if (!is_done(run_of(row, variant, seed))) return false;
    }
    return true;
  }

  std::vector<Run> wanted_runs() const {
    std::vector<Run> runs;
    each_wanted([&](size_t row, size_t variant) {
      if (absent_.contains(variant) || awaits_tuning(row, variant)) return;
      for (int64_t seed = 1; seed <= options_.seeds; ++seed) {
        const Run run = run_of(row, variant, seed);
        if (!is_done(run)) runs.push_back(run);
      }
    });
    return runs;
  }

  std::string name_of(const Run& run) const {
    return run.folder.lexically_relative(options_.out).string();
  }

  int64_t at_once() const {
    if (options_.jobs > 0) return options_.jobs;
    return most_at_once(on_gpu_, options_.scale, std::thread::hardware_concurrency());
  }

  // Whether the GPU's memory says how many run at a time.
  bool shares_gpu() const { return on_gpu_ && options_.jobs == 0; }

  void fail(const std::string& line) {
    outcome_.failures.push_back(line);
    screen_.line("failed: " + line);
  }

  Child child_of(const Run& run) const {
    const fs::path config = run.folder / "reproduce.ini";
    fs::create_directories(run.folder);
    models::write_atomically(config, planner_.text(run));
    Child child{name_of(run), {"train", config.string()}, run.folder / "output.log", ""};
    if (fs::exists(run.folder / train::kRunConfig)) child.words.push_back("--resume");
    if (at_once() > 1 && run.config.train.threads == 0) {
      const auto cores = static_cast<int64_t>(std::thread::hardware_concurrency());
      child.words.push_back("--train.threads");
      child.words.push_back(std::to_string(std::max<int64_t>(1, cores / at_once())));
    }
    const tasks::TaskConfig& task = run.config.task;
    if (!task.data.empty()) {
      child.shares = task.data + " " + task.files + " " + task.valid + " " + task.tokens + " " +
                     std::to_string(task.vocab) + " " + std::to_string(task.length);
    }
    return child;
  }

  void train(const std::vector<Run>& runs) {
    runs_.clear();
    children_.clear();
    for (const Run& run : runs) {
      try {
        if (const std::string why = obstacle(run); !why.empty()) throw Error(why);
        children_.push_back(child_of(run));
        runs_.push_back(run);
      } catch (const std::exception& error) {  // the file system's, too
        fail(error.what());
      }
    }
    begun_ = 0;
    if (shares_gpu() && !children_.empty()) {
      free_before_ = train::free_gpu_memory(options_.device).value_or(0);
    }
    const std::vector<Ending> endings = run_children(children_, at_once(), *this, stop_);
    outcome_.stopped = std::any_of(endings.begin(), endings.end(),
                                   [](const Ending& ending) { return ending.stopped; });
  }

  void tune() {
    Tuner tuner(table_, planner_);
    each_wanted([&](size_t row, size_t variant) {
      if (absent_.contains(variant)) return;
      const auto earlier = archive_.picks(table_.rows[row].id, table_.variants[variant].name);
      if (earlier && is_archived(planner_.run(row, variant, 1, earlier))) return;
      tuner.add(row, variant);
    });
    trying_ = true;
    while (!outcome_.stopped && tuner.next_grid()) {
      std::vector<Run> trials = tuner.trials();
      std::erase_if(trials, [](const Run& run) { return read_run(run).has_value(); });
      train(trials);
    }
    trying_ = false;
    if (outcome_.stopped) return;
    for (const Tuner::Choice& choice : tuner.choices()) {
      if (!choice.made) {
        fail(choice.line);
        continue;
      }
      picks_[{choice.row, choice.variant}] = choice.picks;
      screen_.line(choice.line);
    }
  }

  // Of Watcher.
  bool has_room(const std::vector<size_t>& running) override {
    if (!shares_gpu()) return true;
    Load load{.free_before = free_before_,
              .free_now = train::free_gpu_memory(options_.device).value_or(0)};
    for (const size_t child : running) {
      ++(is_training(children_[child]) ? load.training : load.starting);
    }
    return reproduce::has_room(load);
  }

  void began(size_t child) override {
    screen_.line(children_[child].name +
                 (children_[child].words.size() > 2 && children_[child].words[2] == "--resume"
                      ? " resumed ("
                      : " started (") +
                 std::to_string(++begun_) + " of " + std::to_string(children_.size()) + ")");
  }

  void watched(const std::vector<std::pair<size_t, std::string>>& running) override {
    std::vector<std::string> lines;
    for (const auto& [child, line] : running) lines.push_back(children_[child].name + "  " + line);
    screen_.running(lines);
  }

  void ended(size_t child, const Ending& ending) override {
    const Run& run = runs_[child];
    const std::string& name = children_[child].name;
    if (ending.stopped) return;
    if (!read_run(run)) {  // another process may have finished it
      const std::string why = ending.code > 128
                                  ? "killed by signal " + std::to_string(ending.code - 128) +
                                        (ending.code - 128 == SIGKILL ? " (out of memory?)" : "") +
                                        "; the same command resumes it"
                              : ending.last.empty() ? "exit code " + std::to_string(ending.code)
                                                    : ending.last;
      fail(name + ": " + why + "; see " + children_[child].log.string());
      return;
    }
    screen_.line(name + " done in " + std::to_string(static_cast<int64_t>(ending.seconds)) + " s");
    if (trying_) return;
    update();
    const bool is_last =
        std::all_of(runs_.begin(), runs_.end(), [&](const Run& r) { return is_done(r); });
    if (row_is_done(run.row) && !is_last) screen_.table(outcome_.results);
  }

  bool row_is_done(size_t row) const {
    return std::none_of(runs_.begin(), runs_.end(),
                        [&](const Run& run) { return run.row == row && !is_done(run); });
  }

  // The runs of a place that are finished, the first seeds first.
  Cell cell_of_runs(size_t row, const Column& column, size_t variant) const {
    const Cell* kept = archive_.find(run_of(row, variant, 1).hash, column);
    Cell cell = kept ? *kept : Cell{};
    const std::vector<double> known = cell.seeds;  // of runs whose folders may be gone
    cell.seeds.clear();
    for (size_t seed = 1;; ++seed) {
      const Run run = run_of(row, variant, static_cast<int64_t>(seed));
      const auto result = read_run(run);
      const bool counted = result && result->figures.contains(column.split) &&
                           result->figures.at(column.split).contains(column.figure);
      if (!counted && seed > known.size()) break;
      cell.seeds.push_back(counted ? result->figures.at(column.split).at(column.figure)
                                   : known[seed - 1]);
      if (!counted) continue;
      cell.steps = result->steps;
      cell.scale = options_.scale;
      cell.data = result->data + tested_in_part(run.config.train);
      cell.run = name_of(run);
      cell.config_hash = run.hash;
      cell.device = result->device;
      cell.commit = result->commit;
      cell.leaks = run.leaks;
      cell.seconds = result->seconds;
      cell.tokens_per_second = result->tokens_per_second;
      cell.peak_memory = result->peak_memory;
      cell.picks = run.picks;
    }
    return cell;
  }

  Cell cell_of(size_t row, size_t column_index) const {
    const Column& column = table_.columns[column_index];
    Cell cell;
    if (table_.rows[row].elsewhere) {
      cell = find_elsewhere(options_.out, *table_.rows[row].elsewhere);
    } else {
      for (size_t variant = 0; variant < table_.variants.size(); ++variant) {
        if (table_.variants[variant].name != column.variant) continue;
        if (!planner_.trains(table_.rows[row], table_.variants[variant])) continue;
        if (awaits_tuning(row, variant)) continue;
        cell = cell_of_runs(row, column, variant);
      }
    }
    if (!cell.seeds.empty()) {
      double sum = 0;
      for (const double value : cell.seeds) sum += value;
      cell.value = sum / static_cast<double>(cell.seeds.size());
    }
    cell.paper = table_.rows[row].paper[column_index];
    return cell;
  }

  // Makes the results of what is finished and writes their file.
  void update() {
    Results results{table_.name, table_.title, table_.note,    options_.scale,
                    "",          "",           table_.columns, {}};
    if (options_.tune) results.title += " (temperature and iterations tuned)";
    bool any = false;
    for (size_t i = 0; i < table_.rows.size(); ++i) {
      const Row& row = table_.rows[i];
      ResultRow made{row.id, row.name, row.role, {}};
      bool has_value = false;
      for (size_t column = 0; column < table_.columns.size(); ++column) {
        made.cells.push_back(cell_of(i, column));
        const Cell& cell = made.cells.back();
        if (!cell.value) continue;
        has_value = true;
        results.commit = cell.commit;
        results.device = cell.device;
      }
      any |= has_value;
      if (row.role != "literal" || has_value) results.rows.push_back(std::move(made));
    }
    if (any || !table_.trains()) {
      write_results(results_path(options_.out, table_.name, file_scale()), results);
    }
    outcome_.results = std::move(results);
  }

  const Table& table_;
  const Options& options_;
  const Planner planner_;
  const Archive archive_;
  Screen& screen_;
  const std::atomic<int>& stop_;
  const bool on_gpu_;
  std::set<size_t> absent_;  // variants whose data is not here
  std::map<std::pair<size_t, size_t>, Picks> picks_;
  std::vector<Run> runs_;  // those of children_
  std::vector<Child> children_;
  int64_t begun_ = 0;
  int64_t free_before_ = 0;  // bytes on the GPU, before any of them
  bool trying_ = false;
  Outcome outcome_;
};

}  // namespace

Outcome reproduce(const Table& table, const Options& options, const ConfigLanguage& language,
                  Screen& screen, const std::atomic<int>& stop) {
  check_out(options.out);
  if (!table.trains()) refuse_what_trains(table, options);
  if (table.measures()) return measure_memory(table, options, screen, stop);
  return Reproduction(table, options, language, screen, stop).run();
}

}  // namespace sinkhorn::reproduce
