// `sinkhorn train`: shows the loop's progress and passes signals on to it.
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/run_words.h"
#include "cli/signals.h"
#include "models/files.h"
#include "train/trainer.h"

namespace sinkhorn::cli {
namespace {

std::string duration(double seconds) {
  const long s = std::lround(seconds);
  char text[32];
  if (s >= 3600) {
    std::snprintf(text, sizeof text, "%ldh%02ldm", s / 3600, s / 60 % 60);
  } else {
    std::snprintf(text, sizeof text, "%ldm%02lds", s / 60, s % 60);
  }
  return text;
}

std::string count(double value) {
  const char* unit = "";
  for (const char* next : {"k", "M", "G"}) {
    if (value < 1000) break;
    value /= 1000;
    unit = next;
  }
  char text[32];
  std::snprintf(text, sizeof text, value < 10 && *unit ? "%.2f%s" : "%.0f%s", value, unit);
  return text;
}

// One line that renews itself on a terminal, plain lines elsewhere.
class Progress : public train::Observer {
 public:
  Progress(std::string what, std::string note) : what_(std::move(what)), note_(std::move(note)) {}

  // A large text takes minutes the first time: its pieces are learned, its tokens written down. So
  // does a large model.
  void preparing() {
    if (terminal_) renew("preparing " + what_ + " ...");
  }
  void started(const Start& s) override {
    // Before this there is nothing to save, and a signal ends the program as usual.
    catch_signals();
    catch_departures();
    begin_line();
    std::printf("%s\n", what_.c_str());
    std::printf("%s: %s parameters on %s, step %lld of %lld%s\n", s.run.c_str(),
                count(static_cast<double>(s.parameters)).c_str(), s.device.c_str(),
                static_cast<long long>(s.first_step), static_cast<long long>(s.steps),
                s.resumed ? ", resumed" : "");
    if (!s.data_note.empty()) std::printf("data: %s\n", s.data_note.c_str());
    if (!note_.empty()) std::printf("note: %s\n", note_.c_str());
    std::fflush(stdout);
    start_ = s;
  }
  void stepped(const Step& s) override {
    speeds_.push_back(s.tokens_per_second);
    char line[256];
    std::snprintf(line, sizeof line, "step %lld/%lld  loss %.4f  rate %.3g  %s tokens/s  %s left",
                  static_cast<long long>(s.step), static_cast<long long>(s.steps), s.loss, s.rate,
                  count(s.tokens_per_second).c_str(), duration(s.seconds_left).c_str());
    if (terminal_) return renew(line);
    std::printf("%s\n", line);
    std::fflush(stdout);
  }
  void evaluated(int64_t step, const std::string& split,
                 const std::vector<tasks::Figure>& figures) override {
    begin_line();
    std::printf("step %lld  %s:", static_cast<long long>(step), split.c_str());
    for (const auto& f : figures) {
      std::printf("  %s %s", f.name.c_str(), figure_words(f.value).c_str());
    }
    std::putchar('\n');
    std::fflush(stdout);
  }
  ~Progress() override {
    if (open_) std::putchar('\n');
  }

  const Start& start() const { return start_; }
  double median_speed() const {  // tokens a second
    if (speeds_.empty()) return 0;
    std::vector<double> sorted = speeds_;
    std::sort(sorted.begin(), sorted.end());
    return sorted[sorted.size() / 2];
  }

 private:
  void begin_line() {
    if (open_) std::fputs("\r\033[K", stdout);
    open_ = false;
  }
  // Shows a line that the next one takes the place of: as much of it as one row of the terminal
  // holds, since a row that was wrapped cannot be taken back.
  void renew(std::string line) {
    begin_line();
    winsize size{};
    if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) {
      size_t end = std::min(line.size(), size_t{size.ws_col} - 1);
      while (end > 0 && end < line.size() && (line[end] & 0xC0) == 0x80) --end;  // whole letters
      line.resize(end);
    }
    std::fputs(line.c_str(), stdout);
    std::fflush(stdout);
    open_ = true;
  }

  std::string what_;  // is trained, in words
  std::string note_;  // on the configuration, where there is one
  bool terminal_ = isatty(STDOUT_FILENO) == 1;
  bool open_ = false;  // a line without its end stands on the terminal
  Start start_{};
  std::vector<double> speeds_;
};

// result.json: what the log does not say of a run, since it differs from one time to the next. A
// run in several parts adds up its seconds.
void write_result(const std::string& run, const Progress& progress, const train::Outcome& outcome,
                  double seconds) {
  const std::filesystem::path path = std::filesystem::path(run) / "result.json";
  double speed = progress.median_speed();
  int64_t peak_memory = outcome.peak_memory;
  if (progress.start().resumed && std::filesystem::exists(path)) {
    const auto before = nlohmann::json::parse(models::read_text(path), nullptr, false);
    if (before.is_object()) {
      seconds += before.value("seconds", 0.0);
      if (speed == 0) speed = before.value("tokens_per_second", 0.0);  // no steps were left
      peak_memory = std::max(peak_memory, before.value("peak_memory", peak_memory));
    }
  }
  const nlohmann::ordered_json object = {{"finished", !outcome.stopped},
                                         {"steps", outcome.steps},
                                         {"parameters", progress.start().parameters},
                                         {"device", progress.start().device},
                                         {"data", progress.start().data_note},
                                         {"seconds", seconds},
                                         {"tokens_per_second", speed},
                                         {"peak_memory", peak_memory}};
  models::write_atomically(path, object.dump(2) + "\n");
}

// "task sort: ...; attention sinkhorn, blocks of 64; 2 layers of width 256".
std::string trained_words(const TrainOptions& options) {
  const train::RunConfig& config = options.config;
  const int64_t layers = config.model.layers;
  return "task " + task_words(config.task) +
         (options.task_named ? "" : ", by default, since no task.name is given") + "; attention " +
         attention_words(config) + "; " + std::to_string(layers) +
         (layers == 1 ? " layer" : " layers") + " of width " + std::to_string(config.model.width);
}

// A warm-up that outlasts the training is legal and hardly ever meant.
std::string note_on(const train::RunConfig& config) {
  const int64_t warmup = config.optimizer.warmup, steps = config.train.steps;
  if (config.optimizer.schedule == "rsqrt" || warmup <= steps || steps == 0) return "";
  const double share = 100.0 * static_cast<double>(steps) / static_cast<double>(warmup);
  return "the warm-up of " + std::to_string(warmup) +
         " steps outlasts the training: the rate comes to " + std::to_string(std::lround(share)) +
         "% of its peak (optimizer.warmup)";
}

}  // namespace

int run_train(const TrainOptions& options) {
  train::RunConfig config = options.config;
  make_absolute(config);
  train::Outcome outcome;
  {
    const auto begin = std::chrono::steady_clock::now();
    Progress progress(trained_words(options), note_on(config));
    progress.preparing();
    outcome = train::train(config, write_config(config), options.resume, progress, stop_signal);
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
    write_result(config.train.run, progress, outcome, taken.count());
  }
  if (!outcome.stopped) {
    std::printf("peak memory %.3f GiB\n", static_cast<double>(outcome.peak_memory) / (1 << 30));
    return 0;
  }
  std::printf("stopped at step %lld, saved; continue with --resume\n",
              static_cast<long long>(outcome.steps));
  return 128 + stop_signal;
}

}  // namespace sinkhorn::cli
