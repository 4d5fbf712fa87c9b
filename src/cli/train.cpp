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
#include "train/run_files.h"
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

double rounded(double value) { return std::round(value * 1000) / 1000; }

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
    if (s.resumed && std::filesystem::exists(result_path())) {
      const auto before = nlohmann::json::parse(models::read_text(result_path()), nullptr, false);
      if (before.is_object()) before_ = before;
    }
    if (s.resumed) write_result({s.first_step, false, {}, 0, 0});  // it is not finished any more
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
  void saved(const train::Outcome& so_far) override { write_result(so_far); }
  // result.json: what the log does not say of a run, since it differs from one time to the next. A
  // run in several parts adds them up.
  void write_result(const train::Outcome& outcome) const {
    const std::chrono::duration<double> taken = Clock::now() - begin_;
    const double speed = speeds_.empty() ? before("tokens_per_second", 0.0) : median_speed();
    const nlohmann::ordered_json object = {
        {"finished", outcome.finished},
        {"steps", outcome.steps},
        {"replayed_steps", outcome.replayed_steps + before("replayed_steps", int64_t{0})},
        {"parameters", start_.parameters},
        {"device", start_.device},
        {"data", start_.data_note},
        {"seconds", rounded(taken.count() + before("seconds", 0.0))},
        {"tokens_per_second", rounded(speed)},
        {"peak_memory", std::max(outcome.peak_memory, before("peak_memory", int64_t{0}))}};
    models::write_atomically(result_path(), object.dump(2) + "\n");
  }
  ~Progress() override {
    if (open_) std::putchar('\n');
  }

 private:
  using Clock = std::chrono::steady_clock;

  std::filesystem::path result_path() const {
    return std::filesystem::path(start_.run) / train::kRunResult;
  }
  // What the parts of the run before this one came to.
  template <class T>
  T before(const char* key, T otherwise) const {
    const auto found = before_.find(key);
    return found != before_.end() && found->is_number() ? found->get<T>() : otherwise;
  }
  double median_speed() const {  // tokens a second
    std::vector<double> sorted = speeds_;
    std::sort(sorted.begin(), sorted.end());
    return sorted[sorted.size() / 2];
  }
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
  Clock::time_point begin_ = Clock::now();
  Start start_{};
  nlohmann::json before_ = nlohmann::json::object();  // result.json when the run was resumed
  std::vector<double> speeds_;
};

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
    Progress progress(trained_words(options), note_on(config));
    progress.preparing();
    outcome = train::train(config, write_config(config), options.resume, progress, stop_signal);
  }
  if (outcome.finished) {
    std::printf("peak memory %.3f GiB\n", static_cast<double>(outcome.peak_memory) / (1 << 30));
    return 0;
  }
  std::printf("stopped at step %lld, saved; continue with --resume\n",
              static_cast<long long>(outcome.steps));
  return 128 + stop_signal;
}

}  // namespace sinkhorn::cli
