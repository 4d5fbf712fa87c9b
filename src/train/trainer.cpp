#include "train/trainer.h"

#include <ATen/Parallel.h>

#include <chrono>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>

#include "models/files.h"
#include "sinkhorn/error.h"
#include "tasks/dataset.h"
#include "train/device.h"
#include "train/environment.h"
#include "train/evaluate.h"
#include "train/inputs.h"
#include "train/open_run.h"
#include "train/run_checks.h"
#include "train/run_files.h"
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
tasks::TaskConfig task_config(const RunConfig& config, bool resumed) {
  namespace fs = std::filesystem;
  tasks::TaskConfig task = config.task;
  const fs::path own = fs::path(config.train.run) / kRunTokenizer;
  const bool gone = !task.tokenizer.empty() && !fs::exists(task.tokenizer);
  if ((resumed || gone) && fs::exists(own)) task.tokenizer = own.string();
  if (resumed) return task;
  const std::string& init = config.train.init;
  if (init.empty() || !task.tokenizer.empty() || task.tokens == "bytes") return task;
  task.tokenizer = initial_tokenizer(init).string();
  // Of pieces of its own the model would read other words than it has learned.
  if (task.tokenizer.empty() && !tasks::is_generated(task.name) && !tasks::reads_bytes(task)) {
    throw Error("train.init: " + init +
                ": no tokenizer.model lies with it; name the one it was trained with in "
                "task.tokenizer, or say that it reads bytes by task.tokens = bytes");
  }
  return task;
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
        newest_(claimed_newest(resume)),
        task_(tasks::make_task(task_config(config, newest_.has_value()))),
        model_(first_model()),
        stepper_(*model_, config, device_) {
    auto source = task_->train(batch_config(config.train));
    place_.data = source->position();
    newest_ ? go_on(*source) : begin();
    batches_ = std::make_unique<Prefetcher>(std::move(source), device_.is_cuda());
    model_->train();
    observer_.started({device_.str(), config.train.run, task_->info().metric,
                       task_->info().data_note, model_->parameter_count(), place_.step,
                       config.train.steps, newest_.has_value()});
  }

  Outcome loop() {
    const TrainConfig& t = config_.train;
    last_report_ = Clock::now();
    // Stopped in the middle of an evaluation, a run begins with it.
    if (evaluates() && place_.evaluated < place_.step && validate()) save(true);
    while (place_.step < t.steps && stop_ == 0) {
      one_step();
      const bool last = place_.step == t.steps;
      if (place_.step % t.log_every == 0 || last) report();
      const bool best = evaluates() && validate();
      if (place_.step % t.save_every == 0 || last || best) save(best);
    }
    if (!saved_ || saved_->step != place_.step || saved_->evaluated != place_.evaluated)
      save(false);
    Outcome outcome = so_far();
    if (place_.step == t.steps) {
      const auto figures = evaluate_split("test", t.test_batches, t.greedy);
      outcome.finished = figures.has_value();
      if (figures) outcome.figures = *figures;
    }
    folder_.flush();
    observer_.saved(outcome);
    return outcome;
  }

 private:
  // What a run goes on from; nothing where it is to begin.
  std::optional<std::filesystem::path> claimed_newest(bool resume) {
    folder_.claim();
    if (!resume) return std::nullopt;
    auto newest = folder_.newest();
    if (!newest && has_checkpoint(folder_.root())) {
      throw Error(folder_.root().string() +
                  ": none of its checkpoints reads back; begin again in another folder");
    }
    return newest;
  }

  void begin() {
    if (!config_.train.init.empty()) begin_with(initial_parameters(config_.train.init), stepper_);
    const std::string path = task_->tokenizer_path();
    const std::string tokenizer = path.empty() ? "" : models::read_text(path);  // it may lie here
    folder_.begin_anew(!path.empty());
    folder_.describe(0, environment_json());
    if (!path.empty()) folder_.write_text(kRunTokenizer, tokenizer);
    const nlohmann::ordered_json described = {{"info", task_info_json(task_->info())}};
    folder_.write_text(
        kRunTask, described.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
    folder_.write_text(kRunConfig, config_text_);  // last: with it the folder holds a run
  }

  void go_on(tasks::BatchSource& source) {
    // The folder's file may have been edited since.
    for (const std::string& before :
         {models::read_text(folder_.root() / kRunConfig), checkpoint_config(*newest_)}) {
      check_same_run(folder_.root(), before, config_text_);
    }
    check_same_task(folder_.root(), config_.task.data, task_->info());
    saved_ = place_ = restore(*newest_, stepper_, device_);
    source.seek(place_.data);
    if (place_.step > config_.train.steps) {
      throw UsageError(folder_.root().string() + ": has made " + std::to_string(place_.step) +
                       " steps; train.steps is " + std::to_string(config_.train.steps));
    }
    folder_.describe(place_.step, environment_json());
    folder_.write_text(kRunConfig, config_text_);
    folder_.rewind_log(place_.step, place_.evaluated);
  }

  // What a step begins from, besides parameters and the optimizer's state.
  struct Beginning {
    Place place;
    Chance chance;
  };
  static constexpr size_t kMostBeginnings = 1000;

  std::shared_ptr<models::Model> first_model() {
    check_length(config_.model, task_->info());
    seed_everything(config_.train.seed, device_);
    auto model = make_model(config_.model, task_->info());
    check_columns(*model, task_->info());
    return model;
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
    std::string state = "nothing was learned yet: ";
    if (place_.step > 0) state = kept_after_failure();
    throw Error("step " + std::to_string(failure->step) + ": " + failure->what +
                " is not finite; " + state + remedy);
  }

  // What became of the state before a step that failed.
  std::string kept_after_failure() {
    try {
      save(false, RunFolder::kAll);  // it may be spoilt already
      return "the state before it is saved: --resume goes on from there, and ";
    } catch (const Error& error) {
      return std::string("the state before it could not be saved (") + error.what() + "): ";
    }
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

  Outcome so_far() const {
    return {place_.step, false, {}, peak_memory(device_), stepper_.replayed_steps()};
  }

  void save(bool best) { save(best, config_.train.keep); }
  void save(bool best, int64_t keep) {
    check_finite();  // a state that is not finite is never saved
    const auto begin = Clock::now();
    folder_.flush();
    folder_.save(place_.step, state_tensors(stepper_, device_),
                 state_metadata(place_, config_text_, model_->config()), keep, best);
    saved_ = place_;
    observer_.saved(so_far());
    last_report_ += Clock::now() - begin;
  }

  RunConfig config_;
  std::string config_text_;
  Observer& observer_;
  const std::atomic<int>& stop_;
  at::Device device_;
  RunFolder folder_;
  const std::optional<std::filesystem::path> newest_;  // none: the run begins
  std::unique_ptr<tasks::Task> task_;
  std::shared_ptr<models::Model> model_;
  Stepper stepper_;
  Place place_;
  std::optional<Place> saved_;         // what the newest checkpoint is of
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
