#include "train/run_folder.h"

#include <fcntl.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string_view>
#include <system_error>

#include "models/files.h"
#include "report/figure.h"
#include "sinkhorn/error.h"
#include "train/events.h"
#include "train/notice.h"
#include "train/run_files.h"

namespace sinkhorn::train {

namespace fs = std::filesystem;
using nlohmann::json;

namespace {

constexpr std::string_view kStep = "step-";
constexpr std::string_view kExtension = ".safetensors";

fs::path log_path(const fs::path& root) { return root / kRunLog; }
fs::path checkpoints(const fs::path& root) { return root / kCheckpoints; }
fs::path best_path(const fs::path& root) { return checkpoints(root) / "best.safetensors"; }

std::string file_name(int64_t step) {
  std::string digits = std::to_string(step);
  if (digits.size() < 8) digits.insert(0, 8 - digits.size(), '0');
  return std::string(kStep) + digits + std::string(kExtension);
}

// The step in a file's name; nothing for another file.
std::optional<int64_t> step_of(const fs::path& path, std::string_view begin, std::string_view end) {
  const std::string name = path.filename().string();
  if (!name.starts_with(begin) || !name.ends_with(end)) return std::nullopt;
  const char* const stop = name.data() + name.size() - end.size();
  int64_t step = 0;
  const auto [stopped, error] = std::from_chars(name.data() + begin.size(), stop, step);
  if (error != std::errc() || stopped != stop) return std::nullopt;
  return step;
}

// Files that are told apart by a step in their names.
std::map<int64_t, fs::path> by_step(const fs::path& folder, std::string_view begin,
                                    std::string_view end) {
  std::map<int64_t, fs::path> steps;
  for (const fs::path& path : models::list_folder(folder)) {
    if (const auto step = step_of(path, begin, end)) steps[*step] = path;
  }
  return steps;
}

std::map<int64_t, fs::path> checkpoints_in(const fs::path& root) {
  return by_step(checkpoints(root), kStep, kExtension);
}

std::string environment_name(int64_t step) {
  return step == 0 ? "environment.json" : "environment-" + std::to_string(step) + ".json";
}

// By the step from which on they hold.
std::map<int64_t, fs::path> environments_in(const fs::path& root) {
  auto steps = by_step(root, "environment-", ".json");
  const fs::path first = root / environment_name(0);
  if (fs::exists(first)) steps[0] = first;
  return steps;
}

// What a process that died before its first write leaves behind is no run.
bool holds_run(const fs::path& root) {
  std::error_code ignored;
  return fs::exists(root / kRunConfig, ignored) || !checkpoints_in(root).empty() ||
         (fs::exists(log_path(root), ignored) && !fs::is_empty(log_path(root), ignored));
}

// A run writes config.ini, and its log, behind task.json: without that one they are somebody's own.
void check_own_files(const fs::path& root) {
  std::error_code ignored;
  if (fs::exists(root / kRunTask, ignored)) return;
  for (const char* name : {kRunConfig, kRunLog}) {
    if (fs::file_size(root / name, ignored) > 0 && !ignored) {
      throw UsageError(root.string() + ": holds a " + name +
                       " that no run has written; name another folder");
    }
  }
}

// Whatever a run that failed before its config.ini has not left, and whoever starts runs does not
// put beside them.
bool holds_other_things(const fs::path& root) {
  constexpr std::string_view kOwn[] = {"environment.json", kRunTask, kRunTokenizer, kRunLog,
                                       kCheckpoints};
  const auto is_expected = [&](const fs::path& path) {
    const std::string name = path.filename().string();
    return std::find(std::begin(kOwn), std::end(kOwn), name) != std::end(kOwn) ||
           name.starts_with(kEventsPrefix) || models::is_temporary(path) ||
           path.extension() == ".ini" || path.extension() == ".log";
  };
  const std::vector<fs::path> paths = models::list_folder(root);
  return !std::all_of(paths.begin(), paths.end(), is_expected);
}

void make_folder(const fs::path& path) {
  std::error_code failed;
  fs::create_directories(path, failed);
  if (failed) throw Error(path.string() + ": cannot make the folder: " + failed.message());
}

bool reads_back(const fs::path& path) {
  try {
    models::load_safetensors(path);
    return true;
  } catch (const Error&) {
    return false;
  }
}

// {"step":..,"loss":..} for training, {"step":..,"eval":{..}} for other kinds.
std::string line_of(const std::string& kind, int64_t step, const RunFolder::Figures& figures) {
  nlohmann::ordered_json line = {{"step", step}};
  nlohmann::ordered_json& place = kind == "train" ? line : line[kind];
  for (const auto& [name, value] : figures) place[name] = report::figure_json(value);
  return line.dump(-1, ' ', false, json::error_handler_t::replace) + '\n';
}

// A line that was cut off, or came after the step's checkpoint, is not kept: those of later steps,
// evaluations that it does not know of, and the test, which comes last.
bool belongs(std::string_view line, int64_t last_step, int64_t evaluated) {
  const json value = json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!value.is_object()) return false;
  const auto step = value.find("step");
  if (step == value.end() || !step->is_number_integer()) return false;
  if (value.contains("test")) return step->get<int64_t>() < last_step;
  return step->get<int64_t>() <= (value.contains("valid") ? evaluated : last_step);
}

// Gives the file a second name in one move; a copy where the file system has no links.
void link_or_copy(const fs::path& from, const fs::path& to) {
  const fs::path temporary = models::temporary_for(to);
  std::error_code failed;
  fs::create_hard_link(from, temporary, failed);
  if (failed) fs::copy_file(from, temporary, fs::copy_options::overwrite_existing, failed);
  if (failed) {
    const std::string reason = failed.message();
    fs::remove(temporary, failed);
    throw Error(to.string() + ": cannot copy " + from.string() + " here: " + reason);
  }
  models::OutputFile(temporary, O_RDONLY).sync();
  models::replace(temporary, to);
}

// Keeps the newest checkpoints up to `last`. Later ones are of a run that went on from an earlier
// step, because they did not read back.
void prune(const fs::path& root, int64_t last, int64_t keep) {
  const std::map<int64_t, fs::path> steps = checkpoints_in(root);
  int64_t kept = 0;
  std::error_code ignored;
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
    const bool wanted = step->first <= last && kept < std::max<int64_t>(keep, 1);
    if (wanted) {
      ++kept;
    } else {
      fs::remove(step->second, ignored);
    }
  }
}

}  // namespace

bool has_checkpoint(const fs::path& run) {
  std::error_code ignored;
  return fs::exists(best_path(run), ignored) || !checkpoints_in(run).empty();
}

// Everything is opened at the first write: a folder that is only read stays as it is.
struct RunFolder::Logs {
  explicit Logs(fs::path root) : folder(std::move(root)) {}

  // One process at a time writes here; what a killed one left half written goes.
  void claim() {
    if (lock) return;
    lock.emplace(folder, O_RDONLY | O_DIRECTORY);
    try {
      lock->lock();
    } catch (const Error&) {
      lock.reset();
      throw;
    }
    std::error_code ignored;
    for (const fs::path& place : {folder, checkpoints(folder)}) {
      for (const fs::path& path : models::list_folder(place)) {
        if (models::is_temporary(path)) fs::remove(path, ignored);
      }
    }
  }

  // restart_step: TensorBoard shall forget what it read from there on.
  void open(std::optional<int64_t> restart_step) {
    claim();
    events.emplace(folder, restart_step);
    lines.emplace(log_path(folder), O_WRONLY | O_CREAT | O_APPEND);  // last: open when both are
  }

  fs::path folder;
  std::optional<models::OutputFile> lock;
  std::optional<models::OutputFile> lines;
  std::optional<EventFile> events;
};

RunFolder::RunFolder(fs::path root, bool resume) : root_(std::move(root)) {
  const bool found = holds_run(root_);
  const bool saved = has_checkpoint(root_);
  if (saved && !resume) {
    throw UsageError(root_.string() +
                     ": holds a run already; resume it (--resume) or name another folder");
  }
  if (!found && resume) {
    throw UsageError(root_.string() + ": holds no run to resume; expected config.ini");
  }
  if (!resume) check_own_files(root_);
  if (!found && holds_other_things(root_)) {
    throw UsageError(root_.string() + ": holds other things than a run; name another folder");
  }
  make_folder(root_);
  logs_ = std::make_unique<Logs>(root_);
}

RunFolder::~RunFolder() = default;

void RunFolder::claim() { logs_->claim(); }

void RunFolder::begin_anew(bool has_tokenizer) {
  logs_->claim();
  check_own_files(root_);
  std::error_code ignored;
  for (const char* name : {kRunLog, kRunResult}) fs::remove(root_ / name, ignored);
  // A run describes its environment first: without that the tokenizer is somebody's own.
  if (!has_tokenizer && fs::exists(root_ / environment_name(0), ignored)) {
    fs::remove(root_ / kRunTokenizer, ignored);
  }
  for (const fs::path& path : models::list_folder(root_)) {
    if (path.filename().string().starts_with(kEventsPrefix)) fs::remove(path, ignored);
  }
}

void RunFolder::write_text(const std::string& name, const std::string& text) {
  logs_->claim();
  models::write_atomically(root_ / name, text);
}

void RunFolder::describe(int64_t step, const std::string& environment) {
  logs_->claim();
  std::string before;
  std::vector<fs::path> gone;  // of parts that are made again
  for (const auto& [begin, path] : environments_in(root_)) {
    if (begin < step) {
      before = models::read_text(path);
    } else {
      gone.push_back(path);
    }
  }
  const fs::path path = root_ / environment_name(step);
  if (before != environment) {
    write_text(path.filename().string(), environment);
    std::erase(gone, path);
  }
  std::error_code ignored;
  for (const fs::path& each : gone) fs::remove(each, ignored);
}

void RunFolder::log(const std::string& kind, int64_t step, const Figures& figures) {
  if (!logs_->lines) logs_->open(std::nullopt);
  if (kind != "speed") logs_->lines->write(line_of(kind, step, figures));
  Figures tagged;
  for (const auto& [name, value] : figures) tagged.emplace_back(kind + '/' + name, value);
  logs_->events->add_scalars(step, tagged);
}

void RunFolder::flush() {
  if (!logs_->lines) return;
  logs_->lines->sync();
  logs_->events->sync();
}

void RunFolder::rewind_log(int64_t step, int64_t evaluated) {
  logs_->claim();
  logs_->lines.reset();
  logs_->events.reset();
  const fs::path path = log_path(root_);
  std::error_code ignored;
  if (fs::exists(path, ignored)) {
    const std::string text = models::read_text(path);
    std::string kept;
    for (size_t begin = 0; begin < text.size();) {
      const size_t end = text.find('\n', begin);
      if (end == std::string::npos) break;  // cut off
      const std::string_view line(text.data() + begin, end - begin);
      if (belongs(line, step, evaluated)) kept.append(line) += '\n';
      begin = end + 1;
    }
    if (kept != text) models::write_atomically(path, kept);
  }
  logs_->open(step + 1);
}

void RunFolder::save(int64_t step, const models::NamedTensors& tensors,
                     const models::Metadata& metadata, int64_t keep, bool best) {
  logs_->claim();
  flush();  // a checkpoint's log is on disk before the checkpoint
  make_folder(checkpoints(root_));
  logs_->lock->sync();  // and so are the names in the folder
  const fs::path path = checkpoints(root_) / file_name(step);
  // The best first: killed between the two, a resumed run finds the best again at the same step.
  models::save_safetensors(best ? best_path(root_) : path, tensors, metadata);
  if (best) link_or_copy(best_path(root_), path);
  const json newest = {{"step", step}, {"file", file_name(step)}};
  models::write_atomically(checkpoints(root_) / "newest.json", newest.dump() + '\n');
  prune(root_, step, keep);
}

std::optional<fs::path> RunFolder::newest() const {
  const std::map<int64_t, fs::path> steps = checkpoints_in(root_);
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
    if (reads_back(step->second)) return step->second;
    notice(step->second.string() + ": damaged; left out");
  }
  return best();
}

std::optional<fs::path> RunFolder::best() const {
  if (!reads_back(best_path(root_))) return std::nullopt;
  return best_path(root_);
}

}  // namespace sinkhorn::train
