#include <CLI/CLI.hpp>
#include <iostream>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/fields.h"
#include "tasks/task.h"

namespace sinkhorn::cli {

Command add_data_check(CLI::App& program) {
  struct Options {
    std::string task;
    std::string folder;
    bool json = false;
  };
  CLI::App* data = program.add_subcommand("data", "Look at a task's data");
  CLI::App* app = data->add_subcommand(
      "check",
      "Read it all; say what was found, what is missing, and where its publisher offers it");
  auto options = std::make_shared<Options>();
  app->add_option("TASK", options->task, "the task")
      ->required()
      ->type_name(choice_of(tasks::task_names()));
  app->add_option("DIR", options->folder, "folder or file of the data (sort, recall: none)")
      ->type_name("DIR");
  app->add_flag("--json", options->json, "print JSON");
  return {app, [options] {
            const Overrides keys = {{"task.name", options->task}, {"task.data", options->folder}};
            const tasks::DataReport report = tasks::check_data(read_config("", keys).task);
            if (options->json) {
              const nlohmann::ordered_json object = {{"task", options->task},
                                                     {"data", options->folder},
                                                     {"complete", report.complete},
                                                     {"lines", report.lines}};
              std::cout << object.dump(2) << "\n";
            } else {
              for (const std::string& line : report.lines) std::cout << line << "\n";
            }
            return report.complete ? 0 : 1;
          }};
}

}  // namespace sinkhorn::cli
