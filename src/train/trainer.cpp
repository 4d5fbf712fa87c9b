#include "train/trainer.h"

#include <ATen/Parallel.h>

#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>

#include "sinkhorn/error.h"
#include "train/device.h"
#include "train/environment.h"
#include "train/evaluate.h"
#include "train/inputs.h"
#include "train/open_run.h"
#include "train/run_folder.h"
#include "train/state.h"
#include "train/step.h"
#include "train/task_info.h"

namespace sinkhorn::train {
namespace {

using Clock = std::chrono::steady_clock;

void check_run(const RunConfig& config) {
  const TrainConfig& t = config.train;
  const auto positive = [](const char* name, int64_t value) {
    if (value < 1) {
      throw UsageError(std::string(name) + " is " + std::to_string(value) +
                       "; it must be at least 1");
    }
  };
  if (t.precision == "fp16") {
    throw UsageError("train.precision is fp16, whose gradients underflow; train in bf16");
  }
  if (t.run.empty()) throw UsageError("train.run is not set: name the folder of the run");
  learning_rate(config.optimizer, 1, t.steps, config.model.width);  // knows its schedule?
  if (t.steps < 0) positive("train.steps", t.steps);
  positive("train.accumulate", t.accumulate);
  positive("train.log_every", t.log_every);
  positive("train.save_every", t.save_every);
  if (t.batch < 1 && t.batch_tokens < 1) positive("train.batch", t.batch);
}

// A resumed run keeps its own tokenizer; one that begins with another's parameters takes its.
tasks::TaskConfig task_config(const RunConfig& config, bool resume) {
  tasks::TaskConfig task = config.task;
  if (resume) {
    const std::filesystem::path own = std::filesystem::path(config.train.run) / "tokenizer.model";
    if (std::filesystem::exists(own)) task.tokenizer = own.string();
  } else if (!config.train.init.empty() && task.tokenizer.empty() && task.tokens != "bytes") {
    task.tokenizer = initial_tokenizer(config.train.init).string();
  }
  return task;
}

std::unique_ptr<tasks::Task> open_task(const RunConfig& config, bool resume) {
  const tasks::TaskConfig used = task_config(config, resume);
  std::unique_ptr<tasks::Task> task = tasks::make_task(used);
  // Of pieces of its own the model would read other words than it has learned.
  if (!resume && !config.train.init.empty() && used.tokenizer.empty() &&
      !task->tokenizer_path().empty()) {
    throw Error("train.init: " + config.train.init +
                ": no tokenizer.model lies with it; name the one it was trained with in "
                "task.tokenizer");
  }
  return task;
}

// What a resumed run may not change, by section and key: all but where things lie, how the
// optimizer goes on, and [train]; of [train], what the order of the data hangs on.
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
    if (section == "[train]") keeps = key == "seed" || key == "batch" || key == "batch_tokens";
    if (section == "[optimizer]") keeps = key == "name";
    if (section == "[task]") keeps = key != "data" && key != "cache";
    if (keeps) kept[section + " " + key] = section + " " + line;
  }
  return kept;
}

// Keys that the run's version did not know yet are left alone: its parameters tell what it was.
void check_same_run(const std::filesystem::path& root, const std::string& config_text) {
  std::ifstream file(root / "config.ini");
  const std::string before((std::istreambuf_iterator<char>(file)), {});
  const auto now = lasting_lines(config_text);
  for (const auto& [key, was] : lasting_lines(before)) {
    const auto found = now.find(key);
    const std::string is = found == now.end() ? "without it" : "'" + found->second + "'";
    if (found == now.end() || found->second != was) {
      throw UsageError(
          root.string() + ": cannot resume with another configuration: the run has '" + was +
          "', this is " + is +
          "; what may change is where data lies, of [optimizer] all but its name, and of [train] "
          "all but seed and batch sizes");
    }
  }
}

class Run {
 public:
  Run(const RunConfig& config, const std::string& config_text, bool resume, Observer& observer,
      const std::atomic<int>& stop)
      : config_(config),
        config_text_(config_text),
        observer_(observer),
        stop_(stop),
        device_(pick_device(config.train.device)),
        folder_(config.train.run, resume),
        task_(open_task(config, resume)),
        model_(first_model()),
        stepper_(*model_, config, device_) {
    auto source = task_->train(batch_config(config.train));
    place_.data = source->position();
    if (resume) {
      check_same_run(folder_.root(), config_text);
      check_same_task();
    }
    const auto newest = resume ? folder_.newest() : std::nullopt;
    if (newest) {
      place_ = restore(*newest, stepper_, device_);
      source->seek(place_.data);
    } else if (!config.train.init.empty()) {
      begin_with(initial_parameters(config.train.init), stepper_);
    }
    if (resume) {
      if (place_.step > config.train.steps) {
        throw UsageError(folder_.root().string() + ": has made " + std::to_string(place_.step) +
                         " steps; train.steps is " + std::to_string(config.train.steps));
      }
      folder_.describe(place_.step, environment_json());
      folder_.write_text("config.ini", config_text);
      folder_.rewind_log(place_.step, place_.evaluated);
    } else {
      write_description();
    }
    batches_ = std::make_unique<Prefetcher>(std::move(source), device_.is_cuda());
    model_->train();
    observer_.started({device_.str(), config.train.run, task_->info().metric,
                       task_->info().data_note, model_->parameter_count(), place_.step,
                       config.train.steps, resume});
  }

  Outcome loop() {
    const TrainConfig& t = config_.train;
    last_report_ = Clock::now();
    // Stopped in the middle of an evaluation, a run begins with it.
    if (evaluates() && place_.evaluated < place_.step) save(validate());
    while (place_.step < t.steps && stop_ == 0) {
      one_step();
      const bool last = place_.step == t.steps;
      if (place_.step % t.log_every == 0 || last) report();
      const bool best = evaluates() && validate();
      if (place_.step % t.save_every == 0 || last || best) save(best);
    }
    if (place_.step == 0) save(false);  // no steps: the initial state
    Outcome outcome{place_.step, false, {}, peak_memory(device_)};
    if (place_.step == t.steps) {
      const auto figures = evaluate_split("test", t.test_batches, t.greedy);
      outcome.stopped = !figures.has_value();
      if (figures) outcome.figures = *figures;
    } else {
      outcome.stopped = true;
      if (place_.step > 0) save(false);
    }
    folder_.flush();
    return outcome;
  }

 private:
  // What a step begins from, besides parameters and the optimizer's state.
  struct Beginning {
    Place place;
    Chance chance;
  };
  static constexpr size_t kMostBeginnings = 1000;

  std::shared_ptr<models::Model> first_model() {
    const int64_t longest = config_.model.max_length, needed = task_->info().max_length;
    if (longest > 0 && longest < needed) {
      throw UsageError("model.max_length: " + std::to_string(longest) + " is less than the " +
                       std::to_string(needed) + " tokens of the task's sequences; raise it, or " +
                       "leave it out");
    }
    seed_everything(config_.train.seed, device_);
    return make_model(config_.model, task_->info());
  }

  // Data that has changed in between may mean other things by the same numbers.
  void check_same_task() const {
    const auto before = read_run_task(folder_.root());
    const tasks::TaskInfo& now = task_->info();
    if (!before) return;
    const std::string run = folder_.root().string(), rest = "; resume with the data it had";
    if (before->vocab != now.vocab || before->labels != now.labels) {
      throw Error("task.data: " + config_.task.data +
                  " has another vocabulary or other labels than " + run + " was trained on" + rest);
    }
    if (before->data_tokens > 0 && before->data_tokens != now.data_tokens) {
      throw Error("task.data: " + config_.task.data + " has " + std::to_string(now.data_tokens) +
                  " tokens, and had " + std::to_string(before->data_tokens) + " when " + run +
                  " began" + rest);
    }
  }

  void write_description() {
    folder_.begin_anew();
    folder_.describe(0, environment_json());
    const std::string tokenizer = task_->tokenizer_path();
    if (!tokenizer.empty()) {
      std::ifstream file(tokenizer, std::ios::binary);
      folder_.write_text("tokenizer.model", {std::istreambuf_iterator<char>(file), {}});
    }
    const nlohmann::ordered_json described = {{"info", task_info_json(task_->info())}};
    folder_.write_text(
        kRunTask, described.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
    folder_.write_text("config.ini", config_text_);  // last: with it the folder holds a run
  }

  void one_step() {
    if (beginnings_.size() == kMostBeginnings) check_finite();
    beginnings_.push_back({place_, get_chance(device_)});
    std::vector<Prepared> batches;
    for (int64_t i = 0; i < config_.train.accumulate; ++i) batches.push_back(batches_->next());
    stepper_.step(batches, rate());
    for (const Prepared& batch : batches) tokens_ += batch.tokens;
    place_.data = batches.back().position;
    ++place_.step;
  }

  // A step whose loss or gradients are not finite changes nothing, nor does any after it: what the
  // first of them began from is saved, and ends the run.
  void check_finite() {
    const auto failure = stepper_.failure();
    if (!failure) return beginnings_.clear();
    const Beginning last_good =
        beginnings_.at(static_cast<size_t>(failure->step - 1 - beginnings_.front().place.step));
    beginnings_.clear();
    place_ = last_good.place;
    stepper_.go_back(place_.step);
    set_chance(last_good.chance, device_);
    const std::string remedy =
        "a smaller optimizer.rate, a longer optimizer.warmup or a smaller optimizer.clip may help";
    if (place_.step > 0) save(false, config_.train.keep + 1);  // it may be spoilt already
    throw Error("step " + std::to_string(failure->step) + ": " + failure->what +
                " is not finite; " +
                (place_.step > 0 ? "the state before it is saved: --resume goes on from there, and "
                                 : "nothing was learned yet: ") +
                remedy);
  }

  double rate() const {
    return learning_rate(config_.optimizer, place_.step + 1, config_.train.steps,
                         config_.model.width);
  }

  void report() {
    const double rate_used =
        learning_rate(config_.optimizer, place_.step, config_.train.steps, config_.model.width);
    check_finite();
    const Stepper::Report r = stepper_.report();
    const auto now = Clock::now();
    const double seconds = std::chrono::duration<double>(now - last_report_).count();
    last_report_ = now;
    const double speed = static_cast<double>(tokens_) / seconds;
    const double left = seconds / static_cast<double>(std::max<int64_t>(r.steps, 1)) *
                        static_cast<double>(config_.train.steps - place_.step);
    tokens_ = 0;
    folder_.log("train", place_.step,
                {{"loss", r.loss}, {"gradient_norm", r.gradient_norm}, {"rate", rate_used}});
    folder_.log(
        "speed", place_.step,
        {{"tokens_per_second", speed}, {"peak_memory", static_cast<double>(peak_memory(device_))}});
    observer_.stepped(
        {place_.step, config_.train.steps, r.loss, r.gradient_norm, rate_used, speed, left});
  }

  // Whether there is an evaluation behind the step just made.
  bool evaluates() const {
    const TrainConfig& t = config_.train;
    return (t.eval_every > 0 && place_.step % t.eval_every == 0) || place_.step == t.steps;
  }

  // Whether it is the best so far; not where it was given up.
  bool validate() {
    const auto figures = evaluate_split("valid", config_.train.eval_batches, false);
    if (!figures) return false;
    place_.evaluated = place_.step;
    if (figures->empty()) return false;
    const double score = tasks::deciding(*figures).value;
    const bool better =
        std::isfinite(score) &&
        (!place_.has_best ||
         (task_->info().higher_is_better ? score > place_.best : score < place_.best));
    if (better) {
      place_.best = score;
      place_.has_best = true;
    }
    return better;
  }

  // Nothing where it was given up.
  std::optional<std::vector<tasks::Figure>> evaluate_split(const std::string& split, int64_t limit,
                                                           bool greedy) {
    check_finite();
    const auto begin = Clock::now();
    const auto counts = evaluate(*model_, *task_, stepper_.context(),
                                 {split, batch_config(config_.train), limit, greedy, &stop_});
    if (!counts) return std::nullopt;
    const auto figures = tasks::figures(task_->info().metric, *counts);
    std::vector<std::pair<std::string, double>> named;
    for (const auto& f : figures) named.emplace_back(f.name, f.value);
    folder_.log(split, place_.step, named);
    observer_.evaluated(place_.step, split, figures);
    last_report_ += Clock::now() - begin;  // not training time
    return figures;
  }

  void save(bool best) { save(best, config_.train.keep); }
  void save(bool best, int64_t keep) {
    check_finite();  // a state that is not finite is never saved
    const auto begin = Clock::now();
    folder_.flush();
    folder_.save(place_.step, state_tensors(stepper_, device_),
                 state_metadata(place_, config_text_, model_->config()), keep, best);
    last_report_ += Clock::now() - begin;
  }

  RunConfig config_;
  std::string config_text_;
  Observer& observer_;
  const std::atomic<int>& stop_;
  at::Device device_;
  RunFolder folder_;
  std::unique_ptr<tasks::Task> task_;
  std::shared_ptr<models::Model> model_;
  Stepper stepper_;
  Place place_;
  std::vector<Beginning> beginnings_;  // of the steps since check_finite() last looked
  std::unique_ptr<Prefetcher> batches_;
  Clock::time_point last_report_;
  int64_t tokens_ = 0;
};

}  // namespace

Outcome train(const RunConfig& config, const std::string& config_text, bool resume,
              Observer& observer, const std::atomic<int>& stop) {
  check_run(config);
  be_deterministic();
  if (config.train.threads > 0) at::set_num_threads(static_cast<int>(config.train.threads));
  Run run(config, config_text, resume, observer, stop);
  return run.loop();
}

}  // namespace sinkhorn::train
