#include "train/trainer.h"

#include <ATen/Parallel.h>

#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "sinkhorn/error.h"
#include "train/device.h"
#include "train/environment.h"
#include "train/evaluate.h"
#include "train/inputs.h"
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

// A resumed run keeps its own tokenizer.
tasks::TaskConfig task_config(const RunConfig& config, bool resume) {
  tasks::TaskConfig task = config.task;
  const std::filesystem::path own = std::filesystem::path(config.train.run) / "tokenizer.model";
  if (resume && std::filesystem::exists(own)) task.tokenizer = own.string();
  return task;
}

// What a resumed run may not change: all but where things lie and [train]; of [train], what the
// order of the data hangs on.
std::string lasting_part(const std::string& config_text) {
  std::istringstream lines(config_text);
  std::string line, section, kept;
  while (std::getline(lines, line)) {
    if (!line.empty() && line[0] == '[') section = line;
    const std::string key = line.substr(0, line.find_first_of(" ="));
    const bool keeps = section == "[train]"
                           ? key == "seed" || key == "batch" || key == "batch_tokens"
                           : section != "[task]" || (key != "data" && key != "cache");
    if (keeps) kept += section + " " + line + "\n";
  }
  return kept;
}

void check_same_run(const std::filesystem::path& root, const std::string& config_text) {
  std::ifstream file(root / "config.ini");
  const std::string before((std::istreambuf_iterator<char>(file)), {});
  std::istringstream old_lines(lasting_part(before)), new_lines(lasting_part(config_text));
  std::string was, is;
  for (;;) {
    const bool more = static_cast<bool>(std::getline(old_lines, was));
    if (!more && !std::getline(new_lines, is)) return;
    if (more) std::getline(new_lines, is);
    if (was != is) {
      throw UsageError(
          root.string() + ": cannot resume with another configuration: the run has '" + was +
          "', this is '" + is +
          "'; of [train] all but seed and batch sizes may change, and where data lies");
    }
  }
}

class Run {
 public:
  Run(const RunConfig& config, const std::string& config_text, bool resume, Observer& observer)
      : config_(config),
        config_text_(config_text),
        observer_(observer),
        device_(pick_device(config.train.device)),
        folder_(config.train.run, resume),
        task_(tasks::make_task(task_config(config, resume))),
        model_(seeded_model()),
        stepper_(*model_, config, device_) {
    auto source = task_->train(batch_config(config.train));
    place_.data = source->position();
    if (resume) {
      check_same_run(folder_.root(), config_text);
      check_same_task();
      if (const auto newest = folder_.newest()) {
        place_ = restore(*newest, stepper_, device_);
        source->seek(place_.data);
      }
      if (place_.step > config.train.steps) {
        throw UsageError(folder_.root().string() + ": has made " + std::to_string(place_.step) +
                         " steps; train.steps is " + std::to_string(config.train.steps));
      }
      folder_.write_text("config.ini", config_text);
      folder_.rewind_log(place_.step);
    } else {
      write_description();
    }
    batches_ = std::make_unique<Prefetcher>(std::move(source), device_.is_cuda());
    model_->train();
    observer_.started({device_.str(), config.train.run, task_->info().metric,
                       task_->info().data_note, model_->parameter_count(), place_.step,
                       config.train.steps, resume});
  }

  Outcome loop(const std::atomic<int>& stop) {
    const TrainConfig& t = config_.train;
    last_report_ = Clock::now();
    while (place_.step < t.steps && stop == 0) {
      one_step();
      const int64_t step = place_.step;
      const bool last = step == t.steps;
      if (step % t.log_every == 0 || last) report();
      const bool evaluates = (t.eval_every > 0 && step % t.eval_every == 0) || last;
      bool best = false;
      if (evaluates) best = evaluate_split("valid", t.eval_batches, false).second;
      if (step % t.save_every == 0 || last || best) save(best);
    }
    if (place_.step == 0) save(false);  // no steps: the initial state
    Outcome outcome{place_.step, place_.step < t.steps, {}, peak_memory(device_)};
    if (outcome.stopped) {
      if (place_.step > 0) save(false);
    } else {
      outcome.figures = evaluate_split("test", t.test_batches, t.greedy).first;
    }
    folder_.flush();
    return outcome;
  }

 private:
  std::shared_ptr<models::Model> seeded_model() {
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
    folder_.write_text("environment.json", environment_json());
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
    std::vector<Prepared> batches;
    for (int64_t i = 0; i < config_.train.accumulate; ++i) batches.push_back(batches_->next());
    stepper_.step(batches, rate());
    for (const Prepared& batch : batches) tokens_ += batch.tokens;
    place_.data = batches.back().position;
    ++place_.step;
  }

  double rate() const {
    return learning_rate(config_.optimizer, place_.step + 1, config_.train.steps,
                         config_.model.width);
  }

  void report() {
    const double rate_used =
        learning_rate(config_.optimizer, place_.step, config_.train.steps, config_.model.width);
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

  // The figures, and whether they are the best so far.
  std::pair<std::vector<tasks::Figure>, bool> evaluate_split(const std::string& split,
                                                             int64_t limit, bool greedy) {
    stepper_.report_failures();
    const auto begin = Clock::now();
    const auto counts = evaluate(*model_, *task_, stepper_.context(),
                                 {split, batch_config(config_.train), limit, greedy});
    const auto figures = tasks::figures(task_->info().metric, counts);
    std::vector<std::pair<std::string, double>> named;
    for (const auto& f : figures) named.emplace_back(f.name, f.value);
    folder_.log(split, place_.step, named);
    observer_.evaluated(place_.step, split, figures);
    last_report_ += Clock::now() - begin;  // not training time
    if (split != "valid" || figures.empty()) return {figures, false};
    const double score = tasks::deciding(figures).value;
    const bool better =
        std::isfinite(score) &&
        (!place_.has_best ||
         (task_->info().higher_is_better ? score > place_.best : score < place_.best));
    if (better) {
      place_.best = score;
      place_.has_best = true;
    }
    return {figures, better};
  }

  void save(bool best) {
    stepper_.report_failures();  // a state that is not finite is never saved
    const auto begin = Clock::now();
    folder_.flush();
    folder_.save(place_.step, state_tensors(stepper_, device_),
                 state_metadata(place_, config_text_, model_->config()), config_.train.keep, best);
    last_report_ += Clock::now() - begin;
  }

  RunConfig config_;
  std::string config_text_;
  Observer& observer_;
  at::Device device_;
  RunFolder folder_;
  std::unique_ptr<tasks::Task> task_;
  std::shared_ptr<models::Model> model_;
  Stepper stepper_;
  Place place_;
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
  Run run(config, config_text, resume, observer);
  return run.loop(stop);
}

}  // namespace sinkhorn::train
