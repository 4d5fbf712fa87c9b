// The subcommands: each adds its options to the program and says what to run. train.cpp, eval.cpp
// and inspect.cpp hold the work; the rest is thin enough to stand beside its options.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "cli/config.h"

namespace CLI {
class App;
}

namespace sinkhorn::cli {

struct Command {
  CLI::App* app;             // parsed() once the command line names it
  std::function<int()> run;  // the exit code; throws Error
};

Command add_train(CLI::App& program);
Command add_eval(CLI::App& program);
Command add_reproduce(CLI::App& program);
Command add_inspect(CLI::App& program);
Command add_generate(CLI::App& program);
Command add_classify(CLI::App& program);
Command add_serve(CLI::App& program);
Command add_export(CLI::App& program);
Command add_report(CLI::App& program);
Command add_info(CLI::App& program);
Command add_data_check(CLI::App& program);
Command add_tokenizer_train(CLI::App& program);
Command add_completion(CLI::App& program);

struct TrainOptions {
  train::RunConfig config;
  bool task_named = true;  // by the configuration; the default task otherwise
  bool resume = false;
};

struct EvalOptions {
  std::filesystem::path run;          // folder of the run
  train::RunConfig config;            // the run's own, under the command line's keys
  std::string split = "test";         // valid, test, all
  std::string checkpoint = "newest";  // newest, best, or a file
  bool json = false;
};

struct InspectOptions {
  std::filesystem::path run;
  train::RunConfig config;
  std::string checkpoint = "newest";
  std::optional<std::string> text;  // an input of the user's own; or
  std::optional<int64_t> example;   // of the test split, the first is 0; none: the longest
  std::filesystem::path out;        // folder of the pictures
  bool json = false;
};

// Exit codes; a run stopped by a signal that saved its state returns 128 + the signal's number.
int run_train(const TrainOptions& options);
int run_eval(const EvalOptions& options);
int run_inspect(const InspectOptions& options);

}  // namespace sinkhorn::cli
