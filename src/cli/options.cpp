// What the command lines of train, eval and inspect offer, and how it reaches them.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cmath>
#include <functional>
#include <iostream>
#include <map>
#include <set>

#include "cli/commands.h"
#include "cli/fields.h"
#include "cli/run_options.h"
#include "sinkhorn/error.h"
#include "train/run_files.h"

namespace sinkhorn::cli {
namespace {

using OfferKey = std::function<bool(const Key&)>;

bool is_any(const Key&) { return true; }

// What decoding depends on: where it runs, and where the task's vocabulary is found.
bool is_of_decoding(const Key& key) {
  static const std::set<std::string> kKeys = {"task.data", "task.cache", "train.device",
                                              "train.precision", "train.threads"};
  return kKeys.contains(key.name);
}

// What examples of the test split depend on, besides: the model is what its checkpoint holds.
bool is_of_examples(const Key& key) {
  static const std::set<std::string> kKeys = {
      "task.length",         "task.sort_test_max",   "task.sort_test_size",  "task.recall_pairs",
      "task.recall_queries", "task.recall_distance", "task.recall_test_size"};
  return is_of_decoding(key) || kKeys.contains(key.name);
}

// What figures of a split depend on, besides.
bool is_of_evaluation(const Key& key) {
  static const std::set<std::string> kKeys = {
      "task.valid",         "task.files",         "task.sort_train_max", "train.batch",
      "train.batch_tokens", "train.eval_batches", "train.greedy"};
  return is_of_examples(key) || kKeys.contains(key.name);
}

// What an export depends on: where the task's vocabulary is found, and in what type its products
// run.
bool is_of_exporting(const Key& key) {
  static const std::set<std::string> kKeys = {"task.data", "task.cache", "train.precision"};
  return kKeys.contains(key.name);
}

// --section.key options for the keys to offer, collected in the result.
std::shared_ptr<Overrides> add_key_options(CLI::App& command, const OfferKey& offers,
                                           bool trained = true) {
  auto overrides = std::make_shared<Overrides>();
  for (const Key& key : config_keys()) {
    if (!offers(key)) continue;
    const std::string section = key.section();
    // The stacks repeat attention's keys: they would triple the help and say nothing new.
    const bool hidden = section == "encoder" || section == "decoder";
    command
        .add_option_function<std::string>(
            "--" + key.name,
            [overrides, name = key.name](const std::string& value) {
              overrides->emplace_back(name, value);
            },
            key.help)
        ->type_name(key.type)
        ->default_str(trained ? "as trained" : key.standard)
        ->group(hidden ? "" : "[" + section + "]")
        ->take_last();
  }
  return overrides;
}

// The task that alone has a use for a key, where its name says so.
std::string task_of(const std::string& key) {
  if (key.starts_with("task.sort_")) return "sort";
  return key.starts_with("task.recall_") ? "recall" : "";
}

// Of no use where data is generated.
bool is_of_data(const std::string& key) {
  static const std::set<std::string> kKeys = {"task.data",  "task.tokens", "task.tokenizer",
                                              "task.vocab", "task.valid",  "task.files"};
  return kKeys.contains(key);
}

// What would be ignored is refused: figures would be taken for those of something else.
void check_matter(const std::string& run, const train::RunConfig& trained,
                  const Overrides& overrides) {
  const std::string& task = trained.task.name;
  for (const auto& [key, value] : overrides) {
    const std::string needed = task_of(key);
    if (!needed.empty() && needed != task) {
      throw UsageError("--" + key + " is for runs of the task " + needed + "; " + run +
                       " is one of " + task);
    }
    if ((is_of_data(key) && tasks::is_generated(task)) ||
        (key == "task.length" && task == "sort")) {
      throw UsageError("--" + key + " changes nothing of " + run + ", a run of the task " + task);
    }
    if (key == "task.valid" && value == "train" && trained.task.valid != value) {
      throw UsageError("--task.valid train: " + run +
                       " was trained on all of the training split, nothing was held out of it");
    }
  }
}

// A key is looked at only where another key of its section, the decider, holds one of the words.
// Blocks and what sorts them are not among these keys: whoever compares kinds of attention gives
// the same to all.
struct Use {
  const char* key;
  const char* decider;
  std::vector<std::string> words;
};

const std::vector<Use>& uses() {
  static const std::vector<Use> kUses = {
      {"max_blocks", "kind", {"sinkhorn", "mixture", "sortcut"}},
      {"max_blocks", "sort_net", {"linear", "linear_relu", "mlp", "mlp_relu"}},
      {"window", "kind", {"sinkhorn", "mixture", "window"}},
      {"budget", "kind", {"sortcut"}},
      {"stride", "kind", {"sparse"}},
      {"summary", "kind", {"sparse"}},
      {"merged", "kind", {"sparse"}},
      {"beta1", "name", {"adamw", "adam"}},
      {"beta2", "name", {"adamw", "adam"}},
      {"epsilon", "name", {"adamw", "adam"}},
      {"weight_decay", "name", {"adamw"}},
      {"final_rate", "schedule", {"linear", "cosine"}},
  };
  return kUses;
}

using Values = std::map<std::string, std::string>;  // of all keys, resolved

// Why a stated value is passed over, but for the section before it: "kind is full, not sparse"; ""
// where it is not.
std::string why_unused(const std::string& section, const std::string& name,
                       const std::string& value, const Values& resolved) {
  for (const Use& use : uses()) {
    if (name != use.key) continue;
    const std::string& found = resolved.at(section + "." + use.decider);
    const std::vector<std::string>& words = use.words;
    if (std::find(words.begin(), words.end(), found) != words.end()) continue;
    const std::vector<std::string> others(words.begin(), words.end() - 1);
    return std::string(use.decider) + " is " + found + ", not " + join(others, ", ") +
           (others.empty() ? "" : " or ") + words.back();
  }
  if (name == "window" && resolved.at(section + ".kind") == "window" && std::stoll(value) == 0) {
    return "kind is window, whose window is at least 1";
  }
  return "";
}

// attention.x is of use where one of the task's stacks looks at it.
void check_use(const std::string& key, const std::string& value, const std::string& task,
               const Values& resolved) {
  const std::string section = key.substr(0, key.find('.')), name = key.substr(section.size() + 1);
  std::vector<std::string> places = {section};
  if (section == "attention") {
    places.clear();
    if (tasks::has_encoder(task)) places.push_back("encoder");
    if (tasks::has_decoder(task)) places.push_back("decoder");
  }
  const size_t spoken_of = places.size();
  if (name == "causal") std::erase(places, "encoder");
  std::string why = places.empty() ? "only decoders have a causal rule" : "";
  std::set<std::string> different;
  for (const std::string& place : places) {
    const std::string reason = why_unused(place, name, value, resolved);
    if (reason.empty()) return;
    different.insert(reason);
    why += (why.empty() ? "" : "; ") + place + "." + reason;
  }
  if (different.size() == 1 && places.size() == spoken_of) why = section + "." + *different.begin();
  throw UsageError("--" + key + " changes nothing: " + why);
}

// For a training as check_matter() above for a run: of the command line, since files are shared by
// tasks.
void check_matter(const train::RunConfig& config, const Overrides& overrides) {
  const std::string& task = config.task.name;
  train::RunConfig copy = config;
  Values resolved;
  for (const Field& field : run_fields(copy)) resolved[field.key] = field.get();
  for (const auto& [key, value] : overrides) {
    const std::string needed = task_of(key);
    std::string why;
    if (!needed.empty() && needed != task) why = ", which is not " + needed;
    if (tasks::is_generated(task) && is_of_data(key)) why = ", which makes its data";
    if (key.starts_with("encoder.") && !tasks::has_encoder(task)) why = ", which has no encoder";
    if (key.starts_with("decoder.") && !tasks::has_decoder(task)) why = ", which has no decoder";
    if (!why.empty()) throw UsageError("--" + key + " changes nothing of the task " + task + why);
    check_use(key, value, task, resolved);
  }
}

// All of some data is for data of one's own: the run's holds what it was trained on.
void check_split(const EvalOptions& options, const Overrides& overrides) {
  if (options.split != "all") return;
  if (tasks::is_generated(options.config.task.name)) {
    throw UsageError("--split all is for data of one's own; " + options.run.string() +
                     " is a run of the task " + options.config.task.name +
                     ", which makes its data");
  }
  const auto names_data = [](const auto& one) { return one.first == "task.data"; };
  if (std::none_of(overrides.begin(), overrides.end(), names_data)) {
    throw UsageError("--split all: all of which data? Name it with --task.data; all of what " +
                     options.run.string() + " was trained on says little");
  }
}

// The run that is meant by its folder, or by the configuration in it, which may have been moved or
// copied since it was written; empty for any other configuration.
std::filesystem::path run_of(const std::filesystem::path& config) {
  namespace fs = std::filesystem;
  std::error_code unknown;
  const auto is_run = [&](const fs::path& folder) {
    return fs::exists(folder / train::kRunConfig, unknown) &&
           (fs::exists(folder / train::kRunTask, unknown) || train::has_checkpoint(folder));
  };
  if (fs::is_directory(config, unknown)) {
    if (is_run(config)) return config;
    throw UsageError(config.string() +
                     ": is not the folder of a run; expected that, or a configuration file");
  }
  const fs::path folder = config.has_parent_path() ? config.parent_path() : fs::path(".");
  return config.filename() == train::kRunConfig && is_run(folder) ? folder : fs::path();
}

}  // namespace

train::RunConfig read_run_config(const std::filesystem::path& run, const Overrides& overrides) {
  const bool trained = std::filesystem::exists(run / train::kRunConfig);
  const std::filesystem::path path = trained ? run / train::kRunConfig : run / "config.json";
  if (!std::filesystem::exists(path)) {
    throw UsageError(
        run.string() +
        ": not the folder of a run; expected config.ini (an export: config.json) in it");
  }
  train::RunConfig config = read_config(path, overrides);
  check_matter(run.string(), read_config(path, {}), overrides);
  config.train.run = run.string();  // a run may have been moved
  return config;
}

std::shared_ptr<Overrides> add_decoding_key_options(CLI::App& command) {
  return add_key_options(command, is_of_decoding);
}

std::shared_ptr<Overrides> add_export_key_options(CLI::App& command) {
  return add_key_options(command, is_of_exporting);
}

void add_device_options(CLI::App& command, const std::shared_ptr<Overrides>& overrides) {
  const auto add = [&](const std::string& key, const char* type, const char* more) {
    command
        .add_option_function<std::string>(
            "--" + key,
            [overrides, name = "train." + key](const std::string& value) {
              overrides->emplace_back(name, value);
            },
            "short for --train." + key + more)
        ->type_name(type)
        ->default_str("as trained");
  };
  add("device", "TEXT", ": auto, cpu, cuda or cuda:N");
  add("precision", "{float32,bf16,fp16,float64}", "");
}

void add_run_argument(CLI::App& command, std::filesystem::path& run) {
  command.add_option("RUN", run, "folder of a run or of an export")->required()->type_name("DIR");
}

void add_checkpoint_option(CLI::App& command, std::string& checkpoint) {
  command.add_option("--checkpoint", checkpoint, "newest, best, or a checkpoint file")
      ->type_name("TEXT")
      ->capture_default_str();
}

CLI::Validator at_least(int64_t least) {
  const auto check = [least](const std::string& text) -> std::string {
    int64_t value = 0;
    errno = 0;
    const bool counts = CLI::detail::lexical_cast(text, value);  // the nearest that there is
    if (errno == ERANGE && value > 0) return text + " is too large";
    if (counts ? value >= least : !text.starts_with('-')) return "";
    return text + " is not " + std::to_string(least) + " or more";
  };
  return CLI::Validator(check, "");
}

CLI::Validator is_number() {
  const auto check = [](const std::string& text) -> std::string {
    double value = 0;
    const bool reads = CLI::detail::lexical_cast(text, value);
    return reads && !std::isnan(value) ? "" : text + " is not a number";
  };
  return CLI::Validator(check, "");
}

Command add_train(CLI::App& program) {
  struct Options {
    std::filesystem::path config;
    bool resume = false;
    bool go_on = false;
    bool dry_run = false;
  };
  CLI::App* app = program.add_subcommand("train", "Train a model, as a configuration says");
  auto options = std::make_shared<Options>();
  app->add_option("CONFIG", options->config, "configuration file, or the folder of a run")
      ->required()
      ->type_name("FILE");
  CLI::Option* resume = app->add_flag("--resume", options->resume,
                                      "continue the run in its folder from its newest checkpoint");
  app->add_flag("--continue", options->go_on,
                "the same if it has come to a checkpoint, else begin it")
      ->excludes(resume);
  app->add_flag("--dry-run", options->dry_run, "print the resolved configuration and stop");
  auto overrides = add_key_options(*app, is_any, /*trained=*/false);
  app->footer(
      "Every key may stand in the configuration file ([section], then key = value) or here, as\n"
      "--section.key value; here wins. encoder.* and decoder.* take the keys of attention.* for\n"
      "that stack alone. Defaults are shown; model.size and presets move some of them.");
  return {app, [options, overrides] {
            const std::filesystem::path run = run_of(options->config);
            const std::filesystem::path file =
                run.empty() ? options->config : run / train::kRunConfig;
            if (!run.empty()) overrides->insert(overrides->begin(), {"train.run", run.string()});
            const train::RunConfig config = read_config(file, *overrides);
            check_matter(config, *overrides);
            const bool goes_on = options->go_on && train::has_checkpoint(config.train.run);
            if (!options->dry_run) {
              return run_train({config, names_task(file, *overrides), options->resume || goes_on});
            }
            std::cout << write_config(config);
            return 0;
          }};
}

Command add_eval(CLI::App& program) {
  CLI::App* app = program.add_subcommand("eval", "Evaluate a trained run");
  auto options = std::make_shared<EvalOptions>();
  add_run_argument(*app, options->run);
  app->add_option("--split", options->split, "what to evaluate on")
      ->type_name("{valid,test,all}")
      ->capture_default_str();
  add_checkpoint_option(*app, options->checkpoint);
  app->add_flag("--json", options->json, "print JSON");
  auto overrides = add_key_options(*app, is_of_evaluation);
  add_device_options(*app, overrides);
  app->get_option("--train.eval_batches")->default_str("0");  // whatever training looked at
  return {
      app, [options, overrides] {
        if (options->split != "valid" && options->split != "test" && options->split != "all") {
          throw UsageError("--split: \"" + options->split + "\" is not one of valid, test, all");
        }
        Overrides all = *overrides;
        all.insert(all.begin(), {"train.eval_batches", "0"});
        options->config = read_run_config(options->run, all);
        options->config.task.whole = options->split == "all";
        check_split(*options, *overrides);
        return run_eval(*options);
      }};
}

Command add_inspect(CLI::App& program) {
  CLI::App* app = program.add_subcommand(
      "inspect", "Show a run's parameters and what it learned to sort, as numbers and pictures");
  auto options = std::make_shared<InspectOptions>();
  add_run_argument(*app, options->run);
  add_checkpoint_option(*app, options->checkpoint);
  CLI::Option* text =
      app->add_option("--text", options->text, "an input of your own; none: an example")
          ->type_name("TEXT");
  app->add_option("--example", options->example,
                  "number of an example of the test split, the first is 0; default: the longest")
      ->type_name("INT")
      ->check(at_least(0))
      ->excludes(text);
  app->add_option("--out", options->out, "folder of the pictures; default RUN/inspect")
      ->type_name("DIR");
  app->add_flag("--json", options->json, "print JSON");
  auto overrides = add_key_options(*app, is_of_examples);
  add_device_options(*app, overrides);
  return {app, [options, overrides] {
            options->config = read_run_config(options->run, *overrides);
            if (options->out.empty()) options->out = options->run / "inspect";
            return run_inspect(*options);
          }};
}

}  // namespace sinkhorn::cli
